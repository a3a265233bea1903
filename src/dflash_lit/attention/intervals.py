"""Block masks by arithmetic: which attention tiles are needed, where each query sees one interval of keys.

FlexAttention works tile by tile, and skips those that nobody sees. Its ``create_block_mask`` finds them by trying every pair
of query and key. With one interval ``[lo, hi)`` a query, counting where intervals begin and end gives the same tiles in
``Q + tiles`` steps, without waiting for the device, in shapes that depend on nothing but the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TILE", "document_starts", "interval_tiles", "kv_blocks"]

TILE = 128
"""Queries and keys of a tile, FlexAttention's default."""


def document_starts(document_ids: Tensor) -> Tensor:
    """Index of the first token of each token's document, int64 [R, S].

    Args:
        document_ids: int [R, S]; a run of equal ids is one document, and so is padding.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(first, places, 0).cummax(dim=1).values


def interval_tiles(lo: Tensor, hi: Tensor, keys: int, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Which tiles hold any visible pair, and which hold nothing else.

    Args:
        lo: integer [R, Q], the first key that each query sees; what lies outside the keys is cut off.
        hi: integer [R, Q], one past the last; a query with ``hi <= lo`` sees nothing.
        keys: K, how many keys there are.
        tile: T, queries and keys of a tile.

    Returns:
        ``any`` and ``full``, bool [R, ceil(Q / T), ceil(K / T)]. As in ``create_block_mask``, what lies beyond the last query
        or key counts as not visible: an incomplete tile at an edge is never full.
    """
    rows, queries = lo.shape
    query_tiles, key_tiles = -(-queries // tile), -(-keys // tile)
    lo, hi = lo.clamp(0, keys).long(), hi.clamp(0, keys).long()
    # Each query adds one to a run of key tiles: +1 where the run begins, -1 behind its end, and the sums along the keys count
    # the queries of a query tile. The last column takes what ends behind the last tile.
    width = key_tiles + 1
    start_of_tile = torch.arange(queries, device=lo.device) // tile * width

    def count(begin: Tensor, end: Tensor) -> Tensor:
        one = (begin < end).int()
        steps = torch.zeros(rows, query_tiles * width, dtype=torch.int32, device=lo.device)
        steps.scatter_add_(1, start_of_tile + begin, one).scatter_add_(1, start_of_tile + end, -one)
        return steps.view(rows, query_tiles, width).cumsum(-1, dtype=torch.int32)[..., :key_tiles]

    touched = count(lo // tile, torch.where(lo < hi, -(-hi // tile), 0))
    covered = count(-(-lo // tile), hi // tile)
    return touched > 0, covered == tile


def kv_blocks(any_: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first four arguments of ``BlockMask.from_kv_blocks``, for tiles that all heads share.

    Args:
        any_: bool [R, Qt, Kt], tiles with any visible pair.
        full: bool [R, Qt, Kt], those of them in which every pair is visible: the mask is not asked there.

    Returns:
        ``kv_num_blocks`` [R, 1, Qt] and ``kv_indices`` [R, 1, Qt, Kt] of the partly visible tiles, ``full_kv_num_blocks``
        and ``full_kv_indices`` of the others; all int32, in ``create_block_mask``'s order: the tiles in question ascending,
        then the rest ascending.
    """

    def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
        found = tiles[:, None].int()
        return found.sum(-1, dtype=torch.int32), found.argsort(stable=True, dim=-1, descending=True).int()

    return *ordered(any_ & ~full), *ordered(full)
