"""The chain as a tree with one branch: what :func:`dflash_lit.decode.chain.decode_chain` drafts, for several texts at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.decode.chain import draft_logits
from dflash_lit.decode.tree import Tree
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import TargetEnds

__all__ = ["draft_chain"]


def draft_chain(
    drafter: Drafter,
    ends: TargetEnds,
    anchors: Tensor,
    places: Tensor,
    context: Sequence[ContextKV],
    attend: Attend,
    budget: int,
) -> Tree:
    """One pass of the drafter, and the most probable token of each of the first ``budget`` slots, one behind the other.

    Takes the place of :func:`dflash_lit.decode.tree.draft_tree`. With ``budget = B - 1`` the texts are those of ``decode_chain``.

    Args:
        anchors: int64 [R] tokens; ``places``: int64 [R] where they stand, right after everything that was verified.
        budget: nodes, at most B - 1.

    Raises:
        ValueError: for a budget beyond the block.
    """
    slots = drafter.config.block_size - 1
    if not 1 <= budget <= slots:
        raise ValueError(f"budget={budget}: a chain of this drafter has 1 to {slots} nodes")
    logits = draft_logits(drafter, ends, anchors, places, context, attend)[:, :budget]
    tokens = logits.argmax(dim=-1)
    best = logits.float().log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0]
    order = torch.arange(budget, device=tokens.device).expand_as(tokens)
    return Tree(tokens, parents=order, depths=order + 1, scores=best.cumsum(dim=1), deepest=budget)
