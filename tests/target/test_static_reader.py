"""Passes of static shapes: what the reader with a growing cache says, by few graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from dflash_lit.target.grouped_attention import grouped
from dflash_lit.target.static_cache import Stacks, put_at
from dflash_lit.target.static_reader import StaticTarget, room_for
from tests.helpers import random, tiny_target

LAYERS = (0, 2)
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6}
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def branching() -> tuple[Tensor, Tensor]:
    """Depths and sight of the anchor, two children of it, and a child of the second."""
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    return torch.tensor([[0, 1, 1, 2]] * 3), sees.expand(3, -1, -1)


def same(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> None:
    torch.testing.assert_close(one[0], other[0], **CLOSE)
    assert one[1] is not None
    assert other[1] is not None
    torch.testing.assert_close(one[1], other[1], **CLOSE)


def compare(plain: FrozenTarget, static: StaticTarget) -> None:
    """Three texts, trees of which different paths stay; then one text by tokens and blocks that are taken back."""
    for seed in range(2):  # the second time in buffers that hold what is left of the first
        ids = torch.randint(0, 32, (3, 40), generator=torch.Generator().manual_seed(seed))
        growing, fixed = plain.reader(LAYERS), static.reader(LAYERS)
        readers, lengths = (growing, fixed), [9 - seed, 1, 5]
        (logits, features), (other, theirs) = (r.read_prompts(ids[:, : 9 - seed], lengths) for r in readers)
        same((logits, features), (other, theirs))
        depths, sees = branching()
        for start, counts in ((9, [3, 1, 2]), (13, [1, 0, 3]), (17, [2, 2, 2]), (21, [0, 3, 1])):
            same(*(r.read_tree(ids[:, start : start + 4], depths, sees) for r in readers))
            for reader in readers:
                reader.keep(torch.tensor([[0, 2, 3], [0, 1, 0], [0, 2, 3]]), counts)
            assert growing.lengths == fixed.lengths
            assert growing.length == fixed.length
    growing, fixed = plain.reader(LAYERS), static.reader(LAYERS)
    for start, stop, gone in ((0, 9, 0), (9, 13, 3), (10, 11, 0), (11, 15, 0), (15, 19, 4), (15, 16, 0)):
        for last_only in (False, True):
            (logits, features), (other, theirs) = (r.read(ids[:1, start:stop], last_only=last_only) for r in (growing, fixed))
            same((logits, features), (other, theirs))
            for reader in (growing, fixed):
                reader.forget(stop - start if not last_only and start else 0)
            if not start:
                break
        for reader in (growing, fixed):
            reader.forget(gone)
        assert growing.length == fixed.length


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("changes", [{}, {**SLIDING, "max_window_layers": 2}, {**SLIDING, "max_window_layers": 0}])
def test_a_static_pass_is_a_pass_over_a_growing_cache(
    embedded: FrozenTarget, changes: dict[str, Any], backend: str | None, attention: str
) -> None:
    target = tiny_target(embedded.info, **SIZES, **changes)
    target.model.set_attn_implementation(attention)
    compare(target, StaticTarget(target, room=64, backend=backend))
    if backend:
        # One for trees of 3 texts, for blocks, and for single tokens: not one for each layer or kind of layer.
        assert counters["stats"]["unique_graphs"] == 3
        assert not counters["graph_break"]
    assert target.model.config._attn_implementation == attention
    assert not any("forward" in vars(layer) for layer in target.layers)


def test_by_the_real_compiler(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, **SIZES, **SLIDING, max_window_layers=2)
    compare(target, StaticTarget(target, room=64))


MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (LlamaConfig(**SIZES, intermediate_size=48, **TOKENS), "aot_eager"),
        (
            Cohere2Config(
                **SIZES,
                intermediate_size=48,
                **TOKENS,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention"] * 2,
                logit_scale=1.0,
            ),
            "aot_eager",
        ),
        (DeepseekV3Config(**{**SIZES, **MLA, "num_key_value_heads": 4}, intermediate_size=48, **TOKENS), None),
        (GPT2Config(vocab_size=32, n_embd=32, n_layer=4, n_head=4, n_positions=64, **TOKENS), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else str(value),
)
def test_other_families(embedded: FrozenTarget, config: PretrainedConfig, backend: str | None) -> None:
    with torch.inference_mode(False), torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    target = FrozenTarget(TargetInfo("tiny", model.config, embedded.info.tokenizer), model)
    compare(target, StaticTarget(target, room=64, backend=backend))


def test_what_cannot_be_compiled_is_refused(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, **SIZES)
    target.model._can_compile_fullgraph = False
    with pytest.raises(UserError, match=r"its layers cannot be compiled .* --no-compile"):
        StaticTarget(target, room=64)
    StaticTarget(target, room=64, backend=None)
    target.info.config.alibi = True
    with pytest.raises(UserError, match="ALiBi"):
        StaticTarget(target, room=64, backend=None)


def test_room(embedded: FrozenTarget) -> None:
    assert room_for(prompt=40, new=10, block=4, budget=0) == 64
    assert room_for(prompt=40, new=10, block=4, budget=9) == 64
    assert room_for(prompt=40, new=10, block=4, budget=10) == 128
    reader = StaticTarget(tiny_target(embedded.info, **SIZES), room=12, backend=None).reader(LAYERS)
    reader.read(torch.zeros(1, 9, dtype=torch.int64))
    reader.read(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="12 tokens and 1 behind them are more than the room of 12"):
        reader.read(torch.zeros(1, 1, dtype=torch.int64))


# -- the parts


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (6, 1)])
def test_grouped_attention_is_attention_with_repeated_heads(heads: int, shared: int) -> None:
    query, key, value = random(2, heads, 3, 8), random(2, shared, 7, 8, seed=1), random(2, shared, 7, 5, seed=2)
    visible = random(2, 1, 3, 7, seed=3) > 0
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    repeated = (x.repeat_interleave(heads // shared, dim=1) for x in (key, value))
    expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=visible)
    torch.testing.assert_close(grouped(query, key, value, mask), expected)


def test_stacks_hold_layers_of_different_sizes_and_move_all_of_them() -> None:
    sizes = [(2, 4), (1, 6), (2, 4)]
    stacks = Stacks([torch.zeros(2, heads, 1, dim) for heads, dim in sizes], room=8)
    old = [random(2, heads, 8, dim, seed=layer) for layer, (heads, dim) in enumerate(sizes)]
    stacks.begin(old)
    stacks.move(torch.tensor([[0, 3], [2, 1]]), torch.tensor([1, 4]))
    for view, before in zip(stacks.views, old, strict=True):
        assert view.shape == before.shape
        after = before.clone()
        after[0, :, [1, 2]] = before[0, :, [1, 4]]
        after[1, :, [4, 5]] = before[1, :, [6, 5]]
        assert torch.equal(view, after)


def test_put_at() -> None:
    buffer, new = random(2, 3, 6, 4), random(2, 3, 2, 4, seed=1)
    expected = buffer.clone()
    expected[0, :, [4, 1]], expected[1, :, [0, 5]] = new[0], new[1]
    put_at(buffer, torch.tensor([[4, 1], [0, 5]]), new)
    assert torch.equal(buffer, expected)
