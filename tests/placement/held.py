"""A callback that holds training up at some steps, so that a test can do something to its processes meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

__all__ = ["Held"]


class Held(Callback):
    """After each of some steps, waits until there is a file of that name; targets that come back are taken in meanwhile.

    Args:
        steps: numbers of steps done.
        folder: of the files ``go<STEP>``.
    """

    def __init__(self, steps: list[int], folder: str) -> None:
        self.steps, self.folder = steps, Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step not in self.steps:
            return
        while not (self.folder / f"go{trainer.global_step}").exists():
            trainer.strategy.source._channel.targets()  # type: ignore[attr-defined]
            time.sleep(0.1)
