"""Targets with layers that no mask keeps to one document: a document a row, and no decoding with drafts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
)

from dflash_lit.config import DrafterSection
from dflash_lit.decode.chain import decode_plain
from dflash_lit.errors import UserError
from dflash_lit.plan import derive_drafter
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from tests.helpers import Batch, token_batch
from tests.test_train import summary_of, train

SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}


def next_config(**changes: Any) -> Qwen3NextConfig:
    sizes: dict[str, Any] = {
        **SMALL,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return Qwen3NextConfig(**{**sizes, **changes})


def target_of(embedded: FrozenTarget, config: PretrainedConfig, kind: Any) -> FrozenTarget:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
    return FrozenTarget(TargetInfo("tiny", config, embedded.tokenizer), model)


@pytest.fixture(scope="module")
def hybrid(embedded: FrozenTarget) -> FrozenTarget:
    return target_of(embedded, next_config(initializer_range=0.3), Qwen3NextForCausalLM)


def run(target: FrozenTarget, batch: Batch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return target.features_and_last_hidden(batch["input_ids"], batch["document_ids"], batch["position_ids"], layers)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(), None),
        (MistralConfig(sliding_window=64), None),
        (next_config(), "linear_attention"),
        (MambaConfig(), "linear_attention"),
        (RwkvConfig(), "recurrent"),
        (JambaConfig(), "linear_attention"),
        (Lfm2Config(layer_types=["conv"] * 31 + ["full_attention"], num_hidden_layers=32), "conv"),
        (PretrainedConfig(layers_block_type=["attention", "mamba"]), "mamba"),
        (PretrainedConfig(block_types=["recurrent", "full_attention"]), "recurrent"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_which_targets_pack(embedded: FrozenTarget, config: PretrainedConfig, kind: str | None) -> None:
    info = TargetInfo("x", config, embedded.tokenizer)
    assert info.not_packed == kind
    assert info.packs == (kind is None)


def test_a_padded_row_is_the_document_alone(hybrid: FrozenTarget) -> None:
    assert not hybrid.info.packs
    assert not hybrid.compiled
    batch = token_batch([[(100, 0)], [(77, 10)], []], 128, vocab=500)
    found, hidden = run(hybrid, batch, (1, 3, 5))
    assert found.isfinite().all()
    for row, length in ((0, 100), (1, 77)):
        with torch.no_grad():
            alone = hybrid.model(batch["input_ids"][row : row + 1, :length], output_hidden_states=True).hidden_states
        expected = torch.cat([alone[i + 1] for i in (1, 3, 5)], dim=-1)[0]
        torch.testing.assert_close(found[row, :length], expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(hidden[row, :length], alone[-1][0], rtol=1e-3, atol=1e-3)


def test_without_any_attention(embedded: FrozenTarget) -> None:
    config = MambaConfig(**SMALL, num_hidden_layers=3, state_size=4)
    target = target_of(embedded, config, MambaForCausalLM)
    batch = token_batch([[(100, 0)]], 128, vocab=500)
    found, _ = run(target, batch, (0, 1))
    alone, _ = run(target, token_batch([[(100, 0)]], 100, vocab=500), (0, 1))
    torch.testing.assert_close(found[:, :100], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"drafter\.num_attention_heads: the target has none"):
        derive_drafter(DrafterSection(), target.info)


@pytest.mark.parametrize("documents", [[0, 0, 1, 1], [0, 0, -1, 1], [-1, -1, 0, 0]])
def test_a_second_document_or_a_late_one_is_refused(hybrid: FrozenTarget, documents: list[int]) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="'linear_attention' to one document of a row"):
        hybrid.features(ids, torch.tensor([documents]), ids, (1,))


def test_compiling_and_decoding_are_refused(hybrid: FrozenTarget) -> None:
    with pytest.raises(UserError, match="'linear_attention' take one document a row"):
        FrozenTarget(hybrid.info, hybrid.model, compile=True)
    with pytest.raises(UserError, match="'linear_attention', from whose state rejected drafts cannot be taken back"):
        decode_plain(hybrid, [5, 6, 7], 4)


def test_a_config_that_hides_recurrent_layers_is_refused(hybrid: FrozenTarget) -> None:
    config = copy.deepcopy(hybrid.info.config)
    config.layer_types = ["full_attention"] * 8
    with pytest.raises(UserError, match="recurrent layers that its config does not name"):
        FrozenTarget(TargetInfo("tiny", config, hybrid.tokenizer), hybrid.model)


def test_training_runs_and_leaves_decoding_out(embedded: FrozenTarget, tmp_path: Path) -> None:
    info = embedded.info
    folder = tmp_path / "next"
    config = next_config(pad_token_id=info.pad_id, eos_token_id=info.reserved_ids["eos"], bos_token_id=None)
    target_of(embedded, config, Qwen3NextForCausalLM).model.save_pretrained(folder)
    info.tokenizer.save_pretrained(folder)
    short = ("data.response_tokens=40", "data.row_tokens=128", "drafter.block_size=4")
    made = train("target=hf", f"target.path={folder}", *short, folder=tmp_path)
    summary = summary_of(made)
    assert "linear_attention" in summary["not_decoded"]
    assert summary["steps"] == 4
    assert summary["val/chain_eal"] >= 1
    assert not any(key.startswith(("tau_greedy", "lossless", "tokens_per_s")) for key in summary)
    assert "tau greedy (incl. bonus)      not measured" in (made / "stdout.txt").read_text()
    rope = json.loads((made / "drafter" / "config.json").read_text())["rope_parameters"]
    assert "partial_rotary_factor" not in rope
