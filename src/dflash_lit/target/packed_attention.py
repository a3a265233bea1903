"""The target's attention over packed rows, in tiles: causal inside each document, and no dense mask.

An attention implementation for Transformers (``config._attn_implementation = "dflash_packed"``). The mask is a ``BlockMask``
given to the model as ``attention_mask``: Transformers hands on what has four dimensions as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from dflash_lit.attention.compiled import compiled, refuse_eager
from dflash_lit.attention.intervals import TILE, document_starts, interval_tiles, kv_blocks

__all__ = ["PACKED", "document_intervals", "packed_mask", "unsupported"]

PACKED = "dflash_packed"
"""The name under which Transformers finds :func:`packed_attention`."""


def document_intervals(document_ids: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The first token that each token sees, and one past the last: two of int32 [R, S].

    Args:
        document_ids: int [R, S]; a run of equal ids is one document, and so is padding (-1): each token sees itself.
        window: how many tokens each sees at most, itself included; None for all of its document before it.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    lo = document_starts(document_ids)
    if window is not None:
        lo = lo.maximum(places - window + 1)
    return lo.int(), (places + 1).int().expand_as(lo)


def packed_mask(document_ids: Tensor, window: int | None = None) -> BlockMask:
    """What :func:`dflash_lit.target.frozen.document_mask` says, as a ``BlockMask`` for queries and keys of [R, S] tokens.

    Tile by tile what ``create_block_mask`` finds, by arithmetic on the device: no pair is tried, nothing waits, and other
    documents give other contents of the same shapes, hence no other graph. For forward passes only: it has no tiles by key.
    """
    tokens = document_ids.shape[1]
    lo, hi = document_intervals(document_ids, window)

    # The whole mask, although full tiles do not ask it and others are skipped: eager flex_attention knows no tiles.
    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (lo[row, query] <= key) & (key <= query)

    return BlockMask.from_kv_blocks(
        *kv_blocks(*interval_tiles(lo, hi, tokens)),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
        compute_q_blocks=False,
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    refuse_eager(
        torch.compiler.is_dynamo_compiling(),
        "the target's attention",
        query.shape[0],
        query.shape[1],
        query.shape[2],
        key.shape[2],
    )
    out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


# Inside the graph of a layer this is traced as if it were not compiled; a layer that is no graph gets one for its attention.
_compiled_attend = compiled(_attend)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as Transformers calls it.

    Args:
        query: [R, Hq, S, D]; key, value: [R, Hkv, S, D], shared by groups of query heads.
        attention_mask: of :func:`packed_mask`; the window of a sliding layer is part of it.

    Returns:
        [R, S, Hq, D], and no weights.

    Raises:
        UserError: if it runs outside a compiled graph.
        NotImplementedError: for terms in the scores that :func:`unsupported` should have found.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention with {name}")
    return _compiled_attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)


def unsupported(model: nn.Module) -> str | None:
    """Why ``model``, a Transformers model, cannot use this attention; None if it can."""
    if not getattr(model, "_supports_attention_backend", False):
        return "its code does not let its attention be replaced (Transformers' AttentionInterface)"
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):  # type: ignore[operator, union-attr]
        return "it caps its attention scores"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "it has attention sinks"
    return None
