"""Attention of a few queries over a long cache whose heads are shared: queries of a group are rows of one product.

An attention implementation for Transformers (``config._attn_implementation = "dflash_grouped"``). Transformers' own repeats keys
and values for each query head where there is a mask: at batch 1 that copies the whole cache in every layer.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

__all__ = ["GROUPED", "grouped", "grouped_attention"]

GROUPED = "dflash_grouped"
"""The name under which Transformers finds :func:`grouped_attention`."""


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention with shared heads.

    Args:
        query: [R, Hq, Q, D]; key: [R, Hkv, S, D]; value: [R, Hkv, S, Dv]; head ``h`` reads those of ``h // (Hq / Hkv)``.
        mask: [R, 1, Q, S], added to the scores.

    Returns:
        [R, Hq, Q, Dv].
    """
    rows, heads, queries, dim = query.shape
    shared = key.shape[1]
    folded = query.reshape(rows, shared, heads // shared * queries, dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(1, 1, heads // shared, 1), scale=scale)
    return out.reshape(rows, heads, queries, -1)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """:func:`grouped` as Transformers calls it; for models of which :func:`~dflash_lit.target.packed_attention.unsupported` is None.

    Returns:
        [R, Q, Hq, Dv], and no weights.
    """
    return grouped(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
