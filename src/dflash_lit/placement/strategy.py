"""Placements as Lightning strategies: where the target runs, and how its features reach the drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from dflash_lit.placement.feature_loader import FeatureLoader
from dflash_lit.target.frozen import FrozenTarget

__all__ = ["ColocatedStrategy"]


class ColocatedStrategy(SingleDeviceStrategy):
    """Target and drafter in one process on one device (a GPU or a CPU).

    Args:
        target: the frozen target, on ``device``.
        layer_ids: its feature layers.
        device: where both run.
    """

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        super().__init__(device=device)
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """Context features [R, S, n_ids * H] of a TokenRow batch."""
        return self.target.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], self.layer_ids)

    def process_dataloader(self, dataloader: object) -> FeatureLoader:
        """Lightning's hook for every loader (training, validation, test, sanity check): attach the features here."""
        return FeatureLoader(dataloader, self)
