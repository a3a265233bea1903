"""How much each slot of a block counts in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decay_weights", "default_gamma", "dpace_weights"]

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
