"""The chain as a tree with one branch: what :func:`dflash_lit.decode.chain.decode_chain` drafts, for several texts at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_lit.attention.attend import Attends, ContextKV
from dflash_lit.decode.chain import draft_chain
from dflash_lit.decode.stages import Timing, untimed
from dflash_lit.decode.tree import Tree
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import TargetEnds

__all__ = ["draft_chain_tree"]


def draft_chain_tree(
    drafter: Drafter,
    ends: TargetEnds,
    anchors: Tensor,
    places: Tensor,
    context: Sequence[ContextKV],
    attend: Attends,
    budget: int,
    stages: Timing = untimed,
) -> Tree:
    """One pass of the drafter, and the most probable token of each of the first ``budget`` slots, one behind the other.

    The scores give no more than the order. Takes the place of :func:`dflash_lit.decode.tree.draft_tree`; with ``budget = B - 1``
    the texts are those of ``decode_chain``.

    Args:
        anchors: int64 [R] tokens; ``places``: int64 [R] where they stand, right after everything that was verified.
        budget: nodes, at most B - 1.
        stages: told of "draft".

    Raises:
        ValueError: for a budget beyond the block.
    """
    slots = drafter.config.block_size - 1
    if not 1 <= budget <= slots:
        raise ValueError(f"budget={budget}: a chain of this drafter has 1 to {slots} nodes")
    with stages("draft"):
        tokens = draft_chain(drafter, ends, anchors, places, context, attend)[:, :budget]
    order = torch.arange(budget, device=tokens.device).expand_as(tokens)
    return Tree(tokens, parents=order, depths=order + 1, scores=-order.float(), deepest=budget)
