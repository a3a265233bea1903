"""How long a draft tree's accepted path is, without building a tree.

On a known continuation ``y`` with ``c_d = sum_{i <= d} log q_i(y_i)``, the best-first tree of ``budget`` nodes accepts
``#{d : c_d >= t}``, where ``t`` is the budget-th largest log-probability among all prefixes of all lengths: the tree *is* the
set of the ``budget`` most probable prefixes (DDTree, arXiv 2604.12989), and prefixes of a member are members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["accepted_in_tree", "frontier_pairs", "path_scores", "tree_thresholds"]


@cache
def frontier_pairs(budget: int, candidates: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (i, r) with (i + 1)(r + 1) <= budget; kept on the device, as each copy to it would be waited for.

    Kept for good: captured graphs go on reading them where they are.

    With both lists sorted, the pair (i, r) has at least (i + 1)(r + 1) - 1 pairs that are no smaller: others never matter.
    """
    pairs = [(i, r) for i in range(budget) for r in range(min(candidates, budget // (i + 1)))]
    first, second = zip(*pairs, strict=True)
    return torch.tensor(first, device=device), torch.tensor(second, device=device)


def path_scores(label_log_probability: Tensor) -> Tensor:
    """``c_d`` [N, D] from ``log q_d(y_d)`` [N, D], added in the same order as the prefixes of the tree.

    The order matters: a path may *be* the budget-th prefix, and then both sides have to be equal to the last bit.
    """
    scores = [label_log_probability[:, 0]]
    for depth in range(1, label_log_probability.shape[1]):
        scores.append(scores[-1] + label_log_probability[:, depth])
    return torch.stack(scores, dim=1)


def tree_thresholds(top_log_probs: Tensor, budgets: Sequence[int]) -> Tensor:
    """The budget-th largest prefix log-probability of each block.

    Args:
        top_log_probs: fp32 [N, D, K], the K largest log-probabilities of each slot, sorted; exact if K >= min(max budget, V).
        budgets: tree sizes in nodes, the root not counted.

    Returns:
        fp32 [N, len(budgets)]; -inf where there are fewer prefixes than the budget.
    """
    largest = max(budgets)
    blocks, depths, candidates = top_log_probs.shape
    frontier = top_log_probs[:, 0, :largest]
    everything = frontier
    first, second = frontier_pairs(largest, candidates, top_log_probs.device)
    for depth in range(1, depths):
        known = first < frontier.shape[1]
        sums = frontier[:, first.clamp(max=frontier.shape[1] - 1)] + top_log_probs[:, depth][:, second]
        sums = torch.where(known, sums, -torch.inf)
        frontier = sums.topk(min(largest, sums.shape[1]), dim=1).values
        everything = torch.cat([everything, frontier], dim=1)
        everything = everything.topk(min(largest, everything.shape[1]), dim=1).values
    if everything.shape[1] < largest:
        missing = everything.new_full((blocks, largest - everything.shape[1]), -torch.inf)
        everything = torch.cat([everything, missing], dim=1)
    return torch.stack([everything[:, budget - 1] for budget in budgets], dim=1)


def accepted_in_tree(scores: Tensor, thresholds: Tensor) -> Tensor:
    """Accepted tokens of each block for each budget, int64 [N, len(budgets)], without the bonus token.

    Args:
        scores: [N, D] from :func:`path_scores`; impossible tokens are -inf and never in the tree.
        thresholds: [N, len(budgets)] from :func:`tree_thresholds`.
    """
    inside = (scores[:, None, :] >= thresholds[..., None]) & (scores[:, None, :] > -torch.inf)
    return inside.sum(dim=-1)
