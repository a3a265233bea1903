from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash_lit.attention.intervals import interval_tiles, kv_blocks

NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def check(lo: Tensor, hi: Tensor, keys: int, tile: int) -> None:
    """The same index tensors as from trying all pairs."""
    rows, queries = lo.shape

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (lo[b, q] <= k) & (k < hi[b, q])

    expected = create_block_mask(visible, rows, None, queries, keys, device="cpu", BLOCK_SIZE=tile)
    for name, found in zip(NAMES, kv_blocks(*interval_tiles(lo, hi, keys, tile)), strict=True):
        wanted = getattr(expected, name)
        assert found.dtype == wanted.dtype == torch.int32
        assert found.is_contiguous()
        assert torch.equal(found, wanted), name


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 4, 8]), st.integers(0, 10**6))
def test_random_intervals(rows: int, queries: int, keys: int, tile: int, seed: int) -> None:
    """Empty, reversed and overhanging ones among them."""
    generator = torch.Generator().manual_seed(seed)
    lo = torch.randint(-5, keys + 5, (rows, queries), generator=generator)
    hi = torch.randint(-5, keys + 9, (rows, queries), generator=generator)
    wide = torch.rand(rows, queries, generator=generator) < 0.6  # or full tiles would be rare
    check(torch.where(wide, lo // 4, lo).int(), torch.where(wide, hi + keys // 2, hi).int(), keys, tile)


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (384, 128), (200, 300)])
def test_causal_at_the_usual_tile(queries: int, keys: int) -> None:
    hi = torch.arange(1, queries + 1)[None]
    check(torch.zeros_like(hi), hi, keys, 128)
    check(hi - 100, hi, keys, 128)
