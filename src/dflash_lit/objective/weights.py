"""How much each slot of a block counts in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lit.objective.tree import path_scores, tree_thresholds

__all__ = ["decay_weights", "default_gamma", "dpace_weights", "tree_survival_weights"]

# Published for these block sizes (DFlash, arXiv 2602.06036); others are scaled from 16, so that the last slot keeps its share.
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """Decay length in slots for a block size."""
    return _GAMMA.get(block_size, block_size * 7.0 / 16.0)


def decay_weights(block_size: int, gamma: float, *, device: torch.device | None = None) -> Tensor:
    """``w_k = exp(-(k - 1) / gamma)`` for slots k = 1..B-1; fp32 [B - 1] (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


def dpace_weights(label_probability: Tensor, label_ok: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): ``w_k = sum_{d >= k} prod_{i <= d} q~_i`` with ``q~ = (1 - alpha) q + alpha``.

    A slot counts by the expected length that hangs on it. Slots without a label end the products.

    Args:
        label_probability: fp32 [..., B - 1], the drafter's probability of the label; taken as a constant.
        label_ok: bool [..., B - 1].
        alpha: floor in [0, 1]; 1 gives the linear weights B-1..1.

    Returns:
        fp32 [..., B - 1], 0 where there is no label, without gradient.
    """
    smoothed = (1 - alpha) * label_probability.detach().float() + alpha
    survival = torch.where(label_ok, smoothed, 0.0).cumprod(dim=-1)
    return survival.flip(-1).cumsum(-1).flip(-1) * label_ok


def tree_survival_weights(
    label_probability: Tensor, label_ok: Tensor, top: Tensor, *, budget: int, temperature: float
) -> Tensor:
    """Tree survival: ``w_k = sum_{d >= k} s'((c_d - t) / T) / T``, where ``s'`` is the derivative of the sigmoid.

    ``c_d`` is the log-probability of the text's first d tokens and ``t`` that of the budget-th most probable prefix, so a draft
    tree of ``budget`` nodes accepts ``#{d : c_d >= t}`` tokens. With the step made a sigmoid, and ``t`` taken as a constant,
    cross-entropy with these weights has the gradient of that length. A slot counts by what its path gains at the tree's edge:
    little where it is well inside the tree, and little where it is far outside.

    Args:
        label_probability: fp32 [..., B - 1], the drafter's probability of the label; taken as a constant.
        label_ok: bool [..., B - 1]; slots without a label end the path.
        top: fp32 [..., B - 1, K], the largest log-probabilities of each slot, K at least min(budget, V); -inf without a label.
        budget: nodes of the tree, the anchor not counted.
        temperature: ``T`` in nats; the wider, the more depths count.

    Returns:
        fp32 [..., B - 1], 0 where there is no label, without gradient.
    """
    slots, candidates = top.shape[-2:]
    label = torch.where(label_ok, label_probability.detach().float().log(), -torch.inf)
    scores = path_scores(label.reshape(-1, slots))
    # Without ``budget`` prefixes the tree has all of them: infinitely far inside, and no weight.
    threshold = tree_thresholds(top.detach().reshape(-1, slots, candidates), [budget])
    distance = torch.where(scores == -torch.inf, -torch.inf, (scores - threshold) / temperature)
    slope = torch.sigmoid(distance) * torch.sigmoid(-distance) / temperature
    return (slope.flip(-1).cumsum(-1).flip(-1) * label_ok.reshape(-1, slots)).view_as(label)
