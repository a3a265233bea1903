"""The drafter's mask for FlexAttention, from anchors and documents alone.

A query sees two intervals of keys: some of the context, and some of its own block. So the tiles can be counted
(:mod:`dflash_lit.attention.intervals`), and the mask of a row of 40,000 tokens and 32,000 noise tokens costs milliseconds
where ``create_block_mask`` tries two billion pairs. Static shapes, no wait for the device, no copy to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_lit.attention.intervals import TILE, document_starts, interval_tiles, kv_blocks
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.blocks import slot_tokens

__all__ = ["block_mask", "context_intervals", "noise_intervals", "visible_tiles"]


def context_intervals(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """First context key each query sees and one past the last: two of int32 [R, A * B]; nothing where ``hi <= lo``."""
    documents, anchors, size = layout.document_ids, layout.anchors.long(), layout.block_size
    document_start = document_starts(documents).gather(1, anchors)[..., None]
    sees = layout.valid & (documents.gather(1, anchors) >= 0)
    lo = document_start.expand(-1, -1, size)
    hi = torch.where(sees, anchors, 0)[..., None].expand(-1, -1, size)
    if layout.window is not None:
        lo = lo.maximum(slot_tokens(anchors, size) - layout.window + 1)
    return lo.flatten(1).int(), hi.flatten(1).int()


def noise_intervals(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """The same for the noise keys, which stand behind the context: two of int32 [A * B], equal in all rows."""
    queries = torch.arange(layout.queries, dtype=torch.int32, device=layout.anchors.device)
    lo = queries - queries % layout.block_size
    hi = queries + 1 if layout.causal else lo + layout.block_size
    return layout.row_tokens + lo, layout.row_tokens + hi


def visible_tiles(layout: BlockLayout, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Tiles with any visible pair, and those with nothing else: ``any`` and ``full``, bool [R, ceil(A*B/tile), ceil((S+A*B)/tile)].

    Raises:
        ValueError: ``S`` is not a multiple of ``tile``.
    """
    return _tiles(layout, context_intervals(layout), noise_intervals(layout), tile)


def _tiles(
    layout: BlockLayout, context: tuple[Tensor, Tensor], noise: tuple[Tensor, Tensor], tile: int
) -> tuple[Tensor, Tensor]:
    if layout.row_tokens % tile:
        raise ValueError(f"a row of {layout.row_tokens} tokens is not a multiple of the attention tile of {tile}: pad the row")
    keys = layout.row_tokens + layout.queries
    context_any, context_full = interval_tiles(*context, keys, tile)
    noise_any, noise_full = interval_tiles(noise[0][None], noise[1][None], keys, tile)
    # No tile holds keys of both parts, since the context ends where a tile does: the union is exact, for full tiles too.
    return context_any | noise_any, context_full | noise_full


def block_mask(layout: BlockLayout) -> BlockMask:
    """The mask of ``layout`` for ``A * B`` queries and ``S + A * B`` keys, context first; shared by all heads.

    Tile by tile what ``create_block_mask`` finds. The shapes of its tensors depend on the sizes of the layout alone, and its
    ``mask_mod`` is one function over tensors, so another batch does not recompile FlexAttention.

    Raises:
        ValueError: ``S`` is not a multiple of 128.
    """
    lo, hi = context_intervals(layout)
    noise_lo, noise_hi = noise_intervals(layout)
    visible_any, full = _tiles(layout, (lo, hi), (noise_lo, noise_hi), TILE)

    # The whole mask and not what the tiles leave open: eager FlexAttention reads no tiles. Bounds a query rather than block
    # numbers: this runs for each pair of a partial tile, and so it compares and does not divide.
    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (lo[row, query] <= key) & (key < hi[row, query])
        return context | ((noise_lo[query] <= key) & (key < noise_hi[query]))

    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = kv_blocks(visible_any, full)
    # Backward goes through the tiles by key. BlockMask.from_kv_blocks would find these from the above, but meanwhile it
    # marks all that is traced in this process as "fallback_to_eager" (torch 2.13), compilations of other threads too.
    by_key = kv_blocks(visible_any.mT.contiguous(), full.mT.contiguous())
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = by_key
    return BlockMask(
        seq_lengths=(layout.queries, layout.row_tokens + layout.queries),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible,
    )
