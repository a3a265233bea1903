"""Python's garbage is collected at validations, not in the middle of a step."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

__all__ = ["GarbageCollection"]


class GarbageCollection(Callback):
    """Collects what is left in circles before the first step and at every validation.

    A step leaves some twenty objects that refer to one another. Python looks for such when they are a quarter of all that there is, which
    is once in some thousand steps, since half a million objects of libraries live for ever: until then memory grows, and then a step
    waits for 0.3 s. So what lives before the first step is left out of the search (``gc.freeze``), which takes milliseconds then.
    """

    def __init__(self) -> None:
        self._frozen = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()
        gc.freeze()
        self._frozen = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._frozen:
            gc.collect()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._thaw()

    def on_exception(self, *_: Any) -> None:
        self._thaw()

    def _thaw(self) -> None:
        """Of a sweep's job its trainer and its drafter are garbage afterwards."""
        if self._frozen:
            gc.unfreeze()
        self._frozen = False
