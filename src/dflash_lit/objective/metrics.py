"""Metrics as (numerator, denominator) pairs: exact over batches of any size and over any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["Ratios", "accepted_lengths"]


class Ratios(Metric):
    """A fixed number of ratios, each the sum of its numerators over the sum of its denominators.

    Args:
        size: how many.

    ``compute`` gives fp64 [size]; NaN where nothing was counted.
    """

    full_state_update = False
    numerators: Tensor
    denominators: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_state("numerators", torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("denominators", torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerators: Tensor, denominators: Tensor) -> None:
        """Add [size] numerators and [size] (or scalar) denominators."""
        self.numerators += numerators.double()
        self.denominators += denominators.double()

    def compute(self) -> Tensor:
        return self.numerators / self.denominators


def accepted_lengths(hit: Tensor) -> Tensor:
    """Leading hits of each block, int64 [M], from bool [M, B - 1]: what a chain accepts, without the bonus."""
    return hit.long().cumprod(dim=-1).sum(dim=-1)
