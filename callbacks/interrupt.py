"""Ctrl-C and SIGTERM: finish the step, save, and end on all ranks."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import Interrupted

__all__ = ["Interrupt"]


class Interrupt(Callback):
    """Stops a run after the optimizer step in which a signal came, with a checkpoint of that step.

    All drafters stop at the same step, whichever of them got the signal. A second signal stops at once, without saving.

    Args:
        checkpoint: file to save to.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = Path(checkpoint)
        self._signal = 0
        self._step = -1
        self._before: dict[int, Any] = {}
        self._agreement: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._signal, self._step = 0, trainer.global_step
        if trainer.world_size > 1:
            self._agreement = trainer.strategy.agreement()  # type: ignore[attr-defined]
        with contextlib.suppress(ValueError):  # not in the main thread, where signals do not come
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._told)

    def _told(self, signum: int, frame: FrameType | None) -> None:
        if self._signal:
            self._restore()
            raise KeyboardInterrupt
        self._signal = signum
        print("stopping after this step; once more to stop at once, without saving", file=sys.stderr, flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients are being accumulated, which no checkpoint holds
            return
        self._step = trainer.global_step
        told = self._signal if self._agreement is None else self._agreement.ask(self._signal)
        if told:
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted(told, str(self.checkpoint))

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._agreement is not None:
            self._agreement.settle()
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
