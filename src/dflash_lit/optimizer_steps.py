"""Which batch ends an optimizer step, for callbacks that must not act while gradients are being accumulated."""

from __future__ import annotations

import lightning as L

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """What a callback asks in ``on_train_batch_end``, once a batch.

    No checkpoint holds gradients that are being accumulated, so a run that is stopped or saved there would lose them.

    Attributes:
        last: number of the last optimizer step that was seen.
    """

    def __init__(self) -> None:
        self.last = -1

    def begin(self, trainer: L.Trainer) -> None:
        """In ``on_train_start``: steps from here on are new."""
        self.last = trainer.global_step

    def taken(self, trainer: L.Trainer) -> bool:
        """Whether the optimizer has stepped since this was last asked."""
        before, self.last = self.last, trainer.global_step
        return self.last != before
