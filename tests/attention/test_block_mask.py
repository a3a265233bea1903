from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_lit.attention.block_mask import block_mask, visible_tiles
from dflash_lit.attention.mask import BlockLayout, dense_mask

ROW = 384
KINDS = ("kv", "full_kv", "q", "full_q")
Some = st.integers(0, 2**31)


def layout(
    seed: int, blocks: int, size: int, *, causal: bool, window: int | None, rows: int = 2, tokens: int = ROW, documents: int = 3
) -> BlockLayout:
    """Rows of other documents, padding and anchors each; some blocks, and all of some rows, are not valid."""
    generator = torch.Generator().manual_seed(seed)

    def below(bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=generator)

    ids = (torch.arange(tokens) >= below(tokens, rows, documents, 1).sort(1).values).sum(1)
    ids = torch.where(torch.arange(tokens) < tokens - below(tokens // 3, rows, 1), ids, -1)
    anchors = below(tokens, rows, blocks).sort(1).values
    valid = (below(6, rows, blocks) > 0) & (below(8, rows, 1) > 0)
    return BlockLayout(anchors.int(), valid, ids.int(), size, causal, window)


def from_all_pairs(where: BlockLayout) -> BlockMask:
    """What PyTorch finds by trying every pair of the oracle."""
    oracle = dense_mask(where)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return oracle[b, q, k]

    return create_block_mask(seen, where.rows, None, where.queries, where.row_tokens + where.queries, device="cpu")


def assert_equal_masks(found: BlockMask, wanted: BlockMask) -> None:
    assert found.seq_lengths == wanted.seq_lengths
    assert found.shape == wanted.shape
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for kind in KINDS:
        ours, theirs = (getattr(mask, f"{kind}_num_blocks") for mask in (found, wanted))
        assert torch.equal(ours, theirs), kind
        indices, expected = (getattr(mask, f"{kind}_indices") for mask in (found, wanted))
        assert indices.shape == expected.shape, kind
        in_use = torch.arange(indices.shape[-1]) < ours[..., None]
        assert torch.equal(indices[in_use], expected[in_use]), kind
        for tensor in (ours, indices):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
    assert torch.equal(found.to_dense(), wanted.to_dense())


def pairs_of_mask_mod(mask: BlockMask) -> Tensor:
    """bool [R, Q, KV]: what eager FlexAttention, which reads no tiles, would show."""
    rows, _, queries, keys = mask.shape
    return create_mask(mask.mask_mod, rows, None, queries, keys, device="cpu")[:, 0]


@given(Some, st.integers(1, 14), st.integers(2, 40), st.booleans(), st.none() | st.integers(0, ROW))
@example(seed=1, blocks=9, size=16, causal=False, extra=None)  # 144 queries: the last tile has 16
@example(seed=2, blocks=8, size=16, causal=True, extra=100)  # tiles without remainder
@example(seed=3, blocks=3, size=150, causal=False, extra=60)  # blocks longer than a tile
@example(seed=4, blocks=2, size=300, causal=True, extra=None)  # with full tiles of noise
@settings(max_examples=60, deadline=None, derandomize=True)
def test_tiles_and_pairs_are_the_oracles(seed: int, blocks: int, size: int, causal: bool, extra: int | None) -> None:
    where = layout(seed, blocks, size, causal=causal, window=None if extra is None else size + extra)
    mask = block_mask(where)
    assert_equal_masks(mask, from_all_pairs(where))
    assert torch.equal(pairs_of_mask_mod(mask), dense_mask(where))


@pytest.mark.parametrize("causal", [False, True])
def test_full_tiles_occur(causal: bool) -> None:
    """The random rows are too small for many: here 128 queries see 256 tokens in common, and 300 slots each other."""
    anchors = torch.tensor([[300, 310, 320, 330, 340, 350, 360, 370]])
    where = BlockLayout(anchors, anchors > 0, torch.zeros(1, ROW, dtype=torch.int32), 16, causal)
    assert block_mask(where).full_kv_num_blocks.tolist() == [[[2]]]  # type: ignore[union-attr]
    assert_equal_masks(block_mask(where), from_all_pairs(where))
    large = BlockLayout(anchors[:, :1], anchors[:, :1] > 0, where.document_ids, 300, causal)
    assert block_mask(large).full_kv_num_blocks.tolist() == [[[2 + (0 if causal else 2), 2 + (1 if causal else 2), 0]]]  # type: ignore[union-attr]
    assert_equal_masks(block_mask(large), from_all_pairs(large))


@given(Some, st.integers(1, 12), st.integers(2, 40), st.booleans(), st.none() | st.integers(0, 200))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_tiles_are_never_looser_than_the_pairs(seed: int, blocks: int, size: int, causal: bool, extra: int | None) -> None:
    """By counting the oracle's pairs in each tile, without PyTorch's own code: none but tiles with a pair are computed, and
    none but tiles with all pairs skip the mask."""
    where = layout(seed, blocks, size, causal=causal, window=None if extra is None else size + extra)
    for tile in (32, 128):
        visible_any, full = visible_tiles(where, tile)
        pairs = dense_mask(where).int()
        pairs = torch.nn.functional.pad(pairs, (0, -pairs.shape[2] % tile, 0, -pairs.shape[1] % tile))
        count = pairs.unflatten(2, (-1, tile)).unflatten(1, (-1, tile)).sum((2, 4))
        assert torch.equal(visible_any, count > 0)
        assert torch.equal(full, count == tile * tile)


def test_rows_without_anchor_see_their_own_blocks_alone() -> None:
    where = layout(0, 8, 16, causal=False, window=None)
    empty = BlockLayout(where.anchors, torch.zeros_like(where.valid), where.document_ids, 16)
    mask = block_mask(empty)
    assert mask.kv_num_blocks.tolist() == [[[1]], [[1]]]
    assert mask.kv_indices[..., 0].unique().tolist() == [ROW // 128]
    assert mask.full_kv_num_blocks.sum() == 0  # type: ignore[union-attr]


def test_shapes_and_function_do_not_depend_on_the_content() -> None:
    """Either would recompile FlexAttention: another shape, another function, or a captured number that varies."""
    one, other = (block_mask(layout(seed, 9, 16, causal=False, window=64)) for seed in (1, 2))
    for kind in KINDS:
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.shape == b.shape
            assert a.stride() == b.stride()
    assert one.mask_mod.__code__ is other.mask_mod.__code__
    cells = [[cell.cell_contents for cell in mask.mask_mod.__closure__ or ()] for mask in (one, other)]
    for a, b in zip(*cells, strict=True):
        assert isinstance(a, Tensor)
        assert (a.shape, a.dtype) == (b.shape, torch.int32)


def test_nothing_depends_on_data_or_leaves_the_device() -> None:
    """Tensors without data cannot be waited for, and do not mix with tensors of the host."""
    where = layout(1, 9, 16, causal=True, window=64)
    meta = [t.to("meta") for t in (where.anchors, where.valid, where.document_ids)]
    mask = block_mask(BlockLayout(*meta, 16, True, 64))
    found = block_mask(where)
    for kind in KINDS:
        indices = getattr(mask, f"{kind}_indices")
        assert indices.device.type == "meta"
        assert indices.shape == getattr(found, f"{kind}_indices").shape


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("window", [None, 2048])
def test_cost_at_scale_is_that_of_the_tiles(window: int | None) -> None:
    tokens, blocks, size = 40_064, 1024, 32
    where = layout(0, blocks, size, causal=False, window=window, rows=1, tokens=tokens, documents=20)
    with Largest() as watch:
        mask = block_mask(where)
    queries, keys = blocks * size, tokens + blocks * size
    tiles = math.ceil(queries / 128) * math.ceil(keys / 128)
    assert mask.shape == (1, 1, queries, keys)
    assert watch.numel <= 2 * (keys + tiles)  # a pass over all pairs would be 2.4e9
    # Sorted anchors of documents of some thousand tokens: nearly everything is skipped.
    assert mask.sparsity() > 95


def test_a_row_that_is_no_multiple_of_the_tile_is_refused() -> None:
    documents, anchors = torch.zeros(1, 200, dtype=torch.int32), torch.tensor([[3]])
    with pytest.raises(ValueError, match="200 tokens is not a multiple of the attention tile of 128"):
        block_mask(BlockLayout(anchors, anchors > 0, documents, 4))
