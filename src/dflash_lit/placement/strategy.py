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
        teacher: add the target's last hidden state to each batch as ``last_hidden``, for losses on its distribution.
    """

    def __init__(
        self,
        target: FrozenTarget,
        layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        teacher: bool = False,
    ) -> None:
        super().__init__(device=device)
        self.teacher = teacher
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """Context features [R, S, n_ids * H] of a TokenRow batch."""
        return self.target.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], self.layer_ids)

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with ``features`` [R, S, n_ids * H] and, for a teacher, ``last_hidden`` [R, S, H], in the target's dtype."""
        if not self.teacher:
            return {**batch, "features": self.features(batch)}
        rows = (batch["input_ids"], batch["document_ids"], batch["position_ids"])
        features, last_hidden = self.target.features_and_last_hidden(*rows, self.layer_ids)
        return {**batch, "features": features, "last_hidden": last_hidden}

    def process_dataloader(self, dataloader: object) -> FeatureLoader:
        """Lightning's hook for every loader (training, validation, test, sanity check): attach the features here."""
        return FeatureLoader(dataloader, self)
