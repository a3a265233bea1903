"""A callback that fails at a step, in the runs of some seeds."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class FailOfSeed(Callback):
    def __init__(self, own: int, failing: int) -> None:
        self.fails = own == failing

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.fails and trainer.global_step == 2:
            raise ArithmeticError("planted: 1 + 1 = 3")
