from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_lit.attention.dense import block_attention, dense_bytes, full_attention, refuse_large
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.errors import UserError

TOKENS, SIZE, DIM = 24, 4, 8


def layout(causal: bool, window: int | None = None) -> BlockLayout:
    """Two documents and padding; a padding block; and a row without any anchor."""
    documents = torch.full((2, TOKENS), -1, dtype=torch.int32)
    documents[:, :10], documents[:, 10:20] = 0, 1
    anchors = torch.tensor([[0, 5, 10, 19, 23], [23] * 5], dtype=torch.int32)
    valid = torch.tensor([[True, True, True, True, False], [False] * 5])
    return BlockLayout(anchors, valid, documents, SIZE, causal, window)


def inputs(heads: int, kv_heads: int, queries: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(2, heads, queries, DIM)] + [(2, kv_heads, n, DIM) for n in (TOKENS, TOKENS, queries, queries)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run(attention: object, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    queries, keys, values, block_keys, block_values = tensors
    out = attention(queries, (keys, values), (block_keys, block_values))  # type: ignore[operator]
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * direction).sum(), tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_block_attention_is_full_attention(heads: int, window: int | None, causal: bool) -> None:
    where = layout(causal, window)
    tensors = inputs(heads, 2, where.queries, torch.float32)
    for fast, slow in zip(run(block_attention(where), tensors), run(full_attention(where), tensors), strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("attention", [block_attention, full_attention])
def test_rows_without_anchor_stay_finite_in_bf16_with_large_scores(attention: object) -> None:
    where = layout(causal=False)
    tensors = inputs(4, 2, where.queries, torch.bfloat16)
    loud = [(100 * t).detach().requires_grad_() for t in tensors]
    assert all(t.isfinite().all() for t in run(attention(where), loud))  # type: ignore[operator]


def test_a_block_that_only_pads_attends_to_itself() -> None:
    where = layout(causal=True)
    queries, *rest = inputs(4, 4, where.queries, torch.float32)
    out = block_attention(where)(queries, (rest[0], rest[1]), (rest[2], rest[3]))
    # Causal, so slot 0 has one key: its own.
    torch.testing.assert_close(out[1, :, 0], rest[3][1, :, 0])


def test_large_attention_is_refused_with_its_numbers() -> None:
    # Nothing of this size exists here: the refusal comes from the numbers alone.
    with pytest.raises(UserError) as caught:
        refuse_large(1, 32, 32_768, 72_768 - 32_768, 4.0)
    message = str(caught.value)
    assert "284.2 GiB of scores" in message
    assert "72768 keys" in message
    assert "drafter.dense_limit_gib=4" in message


def test_the_limit_counts_mask_and_scores() -> None:
    mask, scores = dense_bytes(2, 4, 64, 128)
    assert (mask, scores) == (2 * 64 * 192, 2 * 4 * 64 * 192 * 4)
    refuse_large(2, 4, 64, 128, (mask + scores) / 2**30)
    with pytest.raises(UserError):
        refuse_large(2, 4, 64, 128, (mask + scores - 1) / 2**30)
