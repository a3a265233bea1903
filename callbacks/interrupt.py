"""Ctrl-C and SIGTERM: finish the step, save, and end on all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import Interrupted
from dflash_lit.placement.remote_target import RemoteTarget

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
        self._leads = True
        self._before: dict[int, Any] = {}
        self._agreement: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._signal, self._leads = 0, trainer.is_global_zero
        # Those from before Lightning puts its own in their place, which starts a collective of its own inside the handler.
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        self._before = {signum: handler for signum, handler in handlers.items() if handler is not None}  # None: not Python's

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if trainer.world_size > 1:
            self._agreement = trainer.strategy.agreement()  # type: ignore[attr-defined]
        self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # not in the main thread, where signals do not come
            for signum in self._before:
                signal.signal(signum, self._told)

    def _told(self, signum: int, frame: FrameType | None) -> None:
        if not self._leads:  # a terminal's Ctrl-C goes to all, and one of them speaks, and stops at once if it is told again
            self._signal = signum
            return
        if self._signal:
            self._restore()
            raise KeyboardInterrupt
        self._signal = signum
        # Not by print: the signal may have come in the middle of one.
        os.write(2, b"stopping after this step; once more to stop at once, without saving\n")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients are being accumulated, which no checkpoint holds
            return
        self._step = trainer.global_step
        told = self._signal if self._agreement is None else self._agreement.ask(self._signal)
        if told:
            self._stop(trainer, told)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        told = self._signal if self._agreement is None else max(self._agreement.ask(self._signal), self._agreement.settle())
        self._restore()
        if told:  # in the last step, or in the validation after it
            self._stop(trainer, told)

    def _stop(self, trainer: L.Trainer, told: int) -> None:
        trainer.save_checkpoint(self.checkpoint, weights_only=False)
        if self._agreement is not None:
            self._agreement.settle()
        source = getattr(trainer.strategy, "source", None)
        if isinstance(source, RemoteTarget):  # its ranks wait for requests; this is how they learn that there will be no more
            source.goodbye()
        raise Interrupted(told, str(self.checkpoint))

    def _restore(self) -> None:
        with contextlib.suppress(ValueError):
            while self._before:
                signal.signal(*self._before.popitem())

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
