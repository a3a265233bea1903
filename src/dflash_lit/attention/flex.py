"""The drafter's attention on a GPU: one flex_attention over context and noise, under a BlockMask made from anchors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.attention.compiled import refuse_eager

__all__ = ["KernelOptions", "flex_attend", "kernel_options"]

KernelOptions = dict[str, Any]


# Below 128 queries torch would choose its decoding kernel, which has no tiles that fit every block size.
TRAINING_KERNEL: KernelOptions = {"BACKEND": "TRITON"}


def kernel_options(dtype: torch.dtype, head_dim: int, device: torch.device) -> KernelOptions:
    """The kernel to use, and tile sizes where better ones than torch's own choice are known.

    Tiles are of the forward kernel on Hopper (docs/performance.md); for other GPUs, wider heads and fp32 the same ones might not
    even fit. For the backward kernel torch's choice was the best of twelve.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return TRAINING_KERNEL
    if dtype != torch.bfloat16 or head_dim > 128:
        return TRAINING_KERNEL
    return {
        **TRAINING_KERNEL,
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        "fwd_USE_TMA": True,
    }


def flex_attend(mask: BlockMask, options: KernelOptions = TRAINING_KERNEL) -> Attend:
    """Attention under ``mask`` (:func:`dflash_lit.attention.block_mask.block_mask`); to be called inside a compiled graph.

    ``options`` are :func:`kernel_options`, asked outside of it.

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
        out = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)  # type: ignore[call-overload]
        assert isinstance(out, Tensor)
        return out

    return attend
