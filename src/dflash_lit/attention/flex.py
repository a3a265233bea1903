"""The drafter's attention on a GPU: one flex_attention over context and noise, under a BlockMask made from anchors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.attention.compiled import refuse_eager

__all__ = ["flex_attend"]

# Of the forward kernel; found on an H200 with heads of 128 (docs/performance.md). For the backward kernel, torch's own choice
# for the GPU was the best of twelve.
KERNEL_OPTIONS: Any = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "fwd_USE_TMA": True,
}


def flex_attend(mask: BlockMask) -> Attend:
    """Attention under ``mask`` (:func:`dflash_lit.attention.block_mask.block_mask`); to be called inside a compiled graph.

    Queries share keys in groups (``enable_gqa``): nothing is repeated. The readable twin is
    :func:`dflash_lit.attention.dense.full_attention`.
    """

    def attend(queries: Tensor, context: ContextKV, block: ContextKV) -> Tensor:
        rows, heads, count, _ = queries.shape
        refuse_eager(
            torch.compiler.is_dynamo_compiling(), "the drafter's attention", rows, heads, count, context[0].shape[2] + count
        )
        keys = torch.cat([context[0], block[0]], dim=2)
        values = torch.cat([context[1], block[1]], dim=2)
        out = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS)
        assert isinstance(out, Tensor)
        return out

    return attend
