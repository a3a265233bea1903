"""Attention in plain PyTorch: the CPU path, and the readable twin of the kernels for GPUs.

Dense attention over blocks is quadratic in the row. It is right for rows of some hundred tokens on a CPU and hopeless at
scale, so it computes its bytes first and refuses past a limit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.attention.mask import BlockLayout, block_visible, context_visible, dense_mask
from dflash_lit.errors import UserError

__all__ = [
    "DenseMask",
    "attend_blocks",
    "block_attention",
    "dense_block_mask",
    "dense_bytes",
    "full_attention",
    "refuse_large",
]


def dense_bytes(rows: int, heads: int, queries: int, row_tokens: int, *, element_size: int = 4) -> tuple[int, int]:
    """(bytes of a bool mask, bytes of one layer's scores) that dense attention over ``S + A*B`` keys takes."""
    keys = row_tokens + queries
    return rows * queries * keys, rows * heads * queries * keys * element_size


def refuse_large(rows: int, heads: int, queries: int, row_tokens: int, limit_gib: float) -> None:
    """Raise before anything is allocated if dense attention would take more than ``limit_gib``.

    Raises:
        UserError: with both byte counts and the ways out.
    """
    mask, scores = dense_bytes(rows, heads, queries, row_tokens)
    if mask + scores > limit_gib * 2**30:
        raise UserError(
            f"dense attention for {rows} x {heads} heads x {queries} queries x {row_tokens + queries} keys takes "
            f"{scores / 2**30:.1f} GiB of scores a layer and {mask / 2**30:.1f} GiB of mask, over drafter.dense_limit_gib={limit_gib:g}: "
            "lower data.row_tokens, data.rows_per_batch or drafter.anchors, or raise the limit"
        )


def full_attention(layout: BlockLayout) -> Attend:
    """The oracle: one softmax over all ``S + A*B`` keys under :func:`dense_mask`."""
    mask = dense_mask(layout)[:, None]

    def attend(queries: Tensor, context: ContextKV, block: ContextKV) -> Tensor:
        keys = torch.cat([context[0], block[0]], dim=2)
        values = torch.cat([context[1], block[1]], dim=2)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


class DenseMask(NamedTuple):
    """What :func:`attend_blocks` adds to the scores.

    Attributes:
        context: fp32 [R, A, 1 or B, S].
        block: fp32 [B, B].
    """

    context: Tensor
    block: Tensor


def dense_block_mask(layout: BlockLayout) -> DenseMask:
    """0 where a key is visible, the least number where it is not."""
    hidden = torch.finfo(torch.float32).min
    context = torch.where(context_visible(layout), 0.0, hidden)
    return DenseMask(context, torch.where(block_visible(layout), 0.0, hidden))


def attend_blocks(mask: DenseMask) -> Attend:
    """:func:`full_attention` from ``S + B`` scores a query instead of ``S + A*B``: a block's noise is seen by itself alone."""
    blocks, size = mask.context.shape[1], mask.block.shape[0]

    def attend(queries: Tensor, context: ContextKV, block: ContextKV) -> Tensor:
        rows, heads, _, dim = queries.shape
        kv_heads, tokens = context[0].shape[1:3]
        group = heads // kv_heads
        scaled = queries / math.sqrt(dim)
        # Heads that share keys are stacked along the queries: one matrix product a key head, nothing repeated.
        flat = scaled.reshape(rows, kv_heads, group * blocks * size, dim)
        far = (flat @ context[0].transpose(-1, -2)).view(rows, kv_heads, group, blocks, size, tokens)
        split = flat.view(rows, kv_heads, group, blocks, size, dim)
        own_keys = block[0].reshape(rows, kv_heads, 1, blocks, size, dim)
        own_values = block[1].reshape(rows, kv_heads, 1, blocks, size, dim)
        near = split @ own_keys.transpose(-1, -2)
        scores = torch.cat([far + mask.context[:, None, None], near + mask.block], dim=-1)
        weights = scores.float().softmax(dim=-1).to(queries.dtype)
        out = weights[..., :tokens].reshape(rows, kv_heads, -1, tokens) @ context[1]
        return (out.view_as(split) + weights[..., tokens:] @ own_values).reshape(rows, heads, -1, dim)

    return attend


def block_attention(layout: BlockLayout) -> Attend:
    """:func:`attend_blocks` under the mask of ``layout``."""
    return attend_blocks(dense_block_mask(layout))
