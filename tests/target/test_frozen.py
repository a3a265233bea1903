from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from dflash_lit.errors import UserError
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo, document_mask, resolve_path
from tests.helpers import Batch, tiny_target, token_batch

LAYERS = (1, 3, 4)


def features(target: FrozenTarget, batch: Batch, layers: tuple[int, ...] = LAYERS) -> Tensor:
    return target.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded target."""
    return shutil.copytree(resolve_path(EMBEDDED), tmp_path_factory.mktemp("target") / "copy")


def rewrite(folder: Path, place: Path, **config: object) -> Path:
    """The same with other settings."""
    made = shutil.copytree(folder, place / "changed")
    old = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**old, **config}))
    return made


def test_feature_i_is_hidden_state_i_plus_one(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0)], [(40, 0)]], 40)
    with torch.no_grad():
        states = embedded.model(batch["input_ids"], output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in LAYERS], dim=-1)
    torch.testing.assert_close(features(embedded, batch), expected, rtol=1e-4, atol=1e-3)


def test_layers_come_in_the_order_asked_for(embedded: FrozenTarget) -> None:
    batch = token_batch([[(16, 0)]], 16)
    first, second = features(embedded, batch, (1, 3)).chunk(2, dim=-1)
    assert torch.equal(features(embedded, batch, (3, 1)), torch.cat([second, first], dim=-1))


def test_the_pass_stops_after_the_last_feature_layer(embedded: FrozenTarget) -> None:
    seen: list[int] = []
    layers = embedded.model.model.layers
    hooks = [layer.register_forward_hook(lambda *_, i=i: seen.append(i)) for i, layer in enumerate(layers)]
    hooks.append(embedded.model.lm_head.register_forward_hook(lambda *_: seen.append(-1)))
    before = [len(layer._forward_hooks) for layer in layers]
    try:
        features(embedded, token_batch([[(16, 0)]], 16), (0, 2))
    finally:
        after = [len(layer._forward_hooks) for layer in layers]
        for hook in hooks:
            hook.remove()
    assert seen == [0, 1, 2]
    assert after == before


def test_the_last_hidden_state_is_what_the_head_reads(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0)]], 40)
    ran: list[int] = []
    hook = embedded.model.lm_head.register_forward_hook(lambda *_: ran.append(1))
    before = len(embedded.model.lm_head._forward_pre_hooks)
    try:
        found, last = embedded.features_and_last_hidden(
            *(batch[x] for x in ("input_ids", "document_ids", "position_ids")), LAYERS
        )
    finally:
        hook.remove()
    assert not ran
    assert len(embedded.model.lm_head._forward_pre_hooks) == before
    with torch.no_grad():
        states = embedded.model(batch["input_ids"], output_hidden_states=True).hidden_states
    torch.testing.assert_close(last, states[-1], rtol=1e-4, atol=1e-3)
    assert torch.equal(found, features(embedded, batch))


def test_a_window_that_all_layers_share(embedded: FrozenTarget) -> None:
    """Mistral's config has a window and names no kinds of layers."""
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        initializer_range=0.4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = FrozenTarget(TargetInfo("tiny", config, embedded.tokenizer), MistralForCausalLM(config))
    assert target.info.windows == {"sliding_attention": 8}
    batch = token_batch([[(20, 0), (40, 0)]], 64, vocab=60)
    together = features(target, batch, (0, 1))
    with torch.no_grad():
        alone = target.model(batch["input_ids"][:, 20:60], output_hidden_states=True).hidden_states
    torch.testing.assert_close(together[:, 20:60], torch.cat([alone[1], alone[2]], dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 8])
def test_packed_documents_do_not_see_each_other(embedded: FrozenTarget, attention: str, window: int | None) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    target = tiny_target(embedded.info, vocab_size=64, num_hidden_layers=4, **sliding)
    if window:
        assert target.info.text.layer_types == ["full_attention"] + ["sliding_attention"] * 3
    target.model.set_attn_implementation(attention)
    packed = token_batch([[(20, 0), (30, 0), (3, 0)], [(50, 10)]], 64, vocab=60)
    together = features(target, packed, (0, 1, 2))
    assert together.isfinite().all()
    for row, start, stop in ((0, 0, 20), (0, 20, 50), (0, 50, 53), (1, 0, 50)):
        with torch.no_grad():
            alone = target.model(packed["input_ids"][row : row + 1, start:stop], output_hidden_states=True).hidden_states
        expected = torch.cat([alone[i + 1] for i in (0, 1, 2)], dim=-1)
        torch.testing.assert_close(together[row, start:stop], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_document_mask(window: int | None) -> None:
    documents = [0, 0, 0, 0, 1, 1, -1, -1]
    mask = document_mask(torch.tensor([documents]), window)
    expected = [
        [j <= i and documents[i] == documents[j] and (window is None or i - j < window) for j in range(8)] for i in range(8)
    ]
    assert mask.shape == (1, 1, 8, 8)
    assert mask[0, 0].tolist() == expected


def test_an_attention_that_cannot_take_the_mask_is_refused(embedded: FrozenTarget) -> None:
    with pytest.raises(UserError, match=r"target\.attention='flash_attention_2'"):
        FrozenTarget.load(embedded.info, attention="flash_attention_2")


def test_ends_are_the_tied_weights(embedded: FrozenTarget) -> None:
    ends = embedded.ends()
    assert ends.embed is ends.head
    assert ends.embed.shape == (512, 256)
    assert not ends.embed.requires_grad
    untied = tiny_target(embedded.info).ends()
    assert untied.embed is not untied.head


def test_info(embedded: FrozenTarget) -> None:
    info = embedded.info
    assert info.layers == 6
    assert info.default_mask_token() == info.tokenizer.convert_tokens_to_ids("<|mask|>") == 2
    assert info.default_mask_token() not in info.reserved_ids.values()
    assert embedded.eos_ids == (info.reserved_ids["eos"],)
    assert info.pad_id == info.reserved_ids["pad"]


def test_mask_token_without_one_in_the_tokenizer(embedded: FrozenTarget) -> None:
    tokenizer = copy.deepcopy(embedded.tokenizer)
    tokenizer.mask_token = None
    config = copy.deepcopy(embedded.info.config)
    with pytest.raises(UserError, match=r"drafter\.mask_token_id"):
        TargetInfo("x", config, tokenizer).default_mask_token()
    config.vocab_size = len(tokenizer) + 8
    assert TargetInfo("x", config, tokenizer).default_mask_token() == len(tokenizer)


def test_no_target_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.path='.*nowhere'"):
        TargetInfo.load(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"target\.path="):
        TargetInfo.load(str(tmp_path))


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_pickled_weights_that_would_run_code_are_refused(folder: Path, tmp_path: Path) -> None:
    made = shutil.copytree(folder, tmp_path / "evil", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"x": Runs(tmp_path / "ran")}, made / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"target\.path=.*refused: get the model as safetensors"):
        FrozenTarget.load(TargetInfo.load(str(made)))
    assert not (tmp_path / "ran").exists()


def test_no_weights_there(folder: Path, tmp_path: Path) -> None:
    made = rewrite(folder, tmp_path)
    (made / "model.safetensors").write_bytes((made / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match=r"target\.path=.*weights could not be read"):
        FrozenTarget.load(TargetInfo.load(str(made)))
    (made / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"target\.path=.*weights could not be read"):
        FrozenTarget.load(TargetInfo.load(str(made)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_unsupported_targets(folder: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TargetInfo.load(str(rewrite(folder, tmp_path, **change)))


def test_a_missing_tensor_is_not_made_up(folder: Path, tmp_path: Path) -> None:
    made = rewrite(folder, tmp_path)
    weights = load_file(made / "model.safetensors")
    del weights["model.layers.4.mlp.up_proj.weight"]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.4\.mlp\.up_proj\.weight"):
        FrozenTarget.load(TargetInfo.load(str(made)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["full_attention", None, *["full_attention"] * 4]}, "no usable model there .*'layer_types'"),
        ({"hidden_size": -256}, "its config has hidden_size=-256"),
        ({"max_position_embeddings": "many"}, "no usable model there .*'max_position_embeddings'"),
        ({"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}, r"hold 'model\.layers\.5\..*num_hidden_layers=5"),
        (
            {"intermediate_size": 512},
            r"tensor 'model\.layers\.0\.mlp\.down_proj\.weight' has shape \[256, 768\], by its config",
        ),
    ],
)
def test_a_config_that_is_not_of_these_weights_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=rf"target\.path=.*{says}"):
        FrozenTarget.load(TargetInfo.load(str(rewrite(folder, tmp_path, **change))))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.layers.2.mlp.up_proj.weight", torch.full((768, 256), torch.nan), "not finite"),
        ("model.layers.2.mlp.up_proj.bias", torch.ones(768), "but its config has no bias there"),
        ("model.layers.2.mlp.up_proj.weight_scale_inv", torch.ones(6, 2), "but its config has no quantization_config"),
    ],
)
def test_weights_that_are_no_numbers_or_left_over_are_refused(
    folder: Path, tmp_path: Path, name: str, value: Tensor, says: str
) -> None:
    made = rewrite(folder, tmp_path)
    save_file({**load_file(made / "model.safetensors"), name: value}, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"target\.path=.*{re.escape(name)}.*{says}"):
        FrozenTarget.load(TargetInfo.load(str(made)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model.layers.6.mlp.up_proj.weight", {"num_nextn_predict_layers": 1}),  # predicts the token after the next
        ("model.layers.2.self_attn.rotary_emb.inv_freq", {}),  # as older versions of Transformers saved it
        ("model.layers.2.self_attn.bias", {}),  # a mask of theirs
        ("vision_tower.layers.9.mlp.up_proj.weight", {}),
    ],
)
def test_weights_that_a_language_model_rightly_leaves_out_are_no_damage(
    folder: Path, tmp_path: Path, name: str, changes: dict[str, Any], embedded: FrozenTarget
) -> None:
    made = rewrite(folder, tmp_path, **changes)
    save_file(
        {**load_file(made / "model.safetensors"), name: torch.ones(4)}, made / "model.safetensors", metadata={"format": "pt"}
    )
    loaded = FrozenTarget.load(TargetInfo.load(str(made)))
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), embedded.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"eos_token_id": 0', r"generation_config\.json: is not JSON .*; fetch the model again"),
        ("[0]", r"generation_config\.json holds no object"),
        ('{"eos_token_id": ["end"]}', r"eos_token_id=\['end'\] is no token id; correct its generation_config\.json"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_not_left_out(folder: Path, tmp_path: Path, text: str, says: str) -> None:
    """Responses would go on behind their end."""
    made = rewrite(folder, tmp_path)
    (made / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=says):
        FrozenTarget.load(TargetInfo.load(str(made)))


def test_a_tokenizer_that_cannot_be_used_is_one_line(folder: Path, tmp_path: Path) -> None:
    made = rewrite(folder, tmp_path)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "long"}))
    with pytest.raises(UserError, match=r"target\.path=.*its tokenizer cannot be used"):
        TargetInfo.load(str(made))


def test_a_pipe_in_a_targets_folder_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    made = rewrite(folder, tmp_path)
    (made / "model.safetensors").unlink()
    os.mkfifo(made / "model.safetensors")
    with pytest.raises(UserError, match=r"target\.path=.*model\.safetensors is a device or a pipe"):
        TargetInfo.load(str(made))


def test_fingerprint_names_the_weights(folder: Path, embedded: FrozenTarget) -> None:
    info = TargetInfo.load(str(folder))
    assert FrozenTarget.load(info, dtype=torch.float32).fingerprint == embedded.fingerprint
    other = FrozenTarget.load(info, dtype=torch.bfloat16)
    assert other.fingerprint == embedded.fingerprint
    with torch.no_grad():
        other.model.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    assert FrozenTarget(info, other.model).fingerprint != embedded.fingerprint
    assert tiny_target(info, seed=0).fingerprint == tiny_target(info, seed=0).fingerprint
    assert tiny_target(info, seed=0).fingerprint != tiny_target(info, seed=1).fingerprint


def test_large_rows_are_refused_before_the_pass(embedded: FrozenTarget) -> None:
    limited = FrozenTarget(embedded.info, embedded.model, dense_limit_gib=2 * 4 * 64 * 64 * 4 / 2**30)
    features(limited, token_batch([[(64, 0)]] * 2, 64))
    with pytest.raises(UserError, match=r"3 rows of 64 tokens .* target.dense_limit_gib="):
        features(limited, token_batch([[(64, 0)]] * 3, 64))
    # 128 GiB of scores: only possible to refuse.
    huge = torch.zeros(1, 1, dtype=torch.long).expand(8, 32768)
    with pytest.raises(UserError, match=r"128\.0 GiB a layer"):
        embedded.features(huge, huge, huge, LAYERS)


def test_nothing_learns(embedded: FrozenTarget) -> None:
    assert not embedded.model.training
    assert not any(parameter.requires_grad for parameter in embedded.model.parameters())
    assert not features(embedded, token_batch([[(16, 0)]], 16)).requires_grad
