"""Ctrl-C, SIGTERM, SIGUSR1 and ``trainer.max_time``: finish the step, save, and end on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import Interrupted
from dflash_lit.optimizer_steps import OptimizerSteps
from dflash_lit.owed_validation import OwedValidation, validation_follows, validation_owed
from dflash_lit.placement.feature_loader import FeatureLoader
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.stopping import stopping

__all__ = ["Interrupt"]


class Interrupt(Callback):
    """Stops a run after the optimizer step in which a signal came, with a checkpoint of that step.

    All drafters stop at the same step, whichever of them got the signal. A validation that follows that step, or in which the signal
    came, is cut short, and its figures are dropped: the run that goes on begins with it. A second Ctrl-C stops at once, without saving.

    Args:
        checkpoint: file to save to.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = Path(checkpoint)
        self._steps = OptimizerSteps()
        self._saved = -1  # step of the newest checkpoint that owes nothing
        self._agreement: Any = None
        self._checkpoint: dict[str, Any] | None = None  # that this run goes on from, until its fit starts
        self._validation = OwedValidation()
        self._told = 0  # signal that the validation after this step obeys

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._checkpoint is not None:
            self._validation.extend(trainer, self._checkpoint)
            self._checkpoint = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.begin(trainer)
        self._saved = -1 if validation_owed(trainer) else trainer.global_step
        if trainer.world_size > 1:
            self._agreement = trainer.strategy.agreement()  # type: ignore[attr-defined]
        stopping.hold()
        self._validation.begin_training(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.taken(trainer):
            return
        told = stopping.signal if self._agreement is None else self._agreement.ask(stopping.signal)
        if told and validation_follows(trainer):
            self._told = told
        elif told:
            self._stop(trainer, told)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:  # left at once: there is nothing to save
            return
        self._validation.begin(trainer)
        if self._told:
            self._stop(trainer, self._told)
        loaders = trainer.val_dataloaders
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            if isinstance(loader, FeatureLoader):
                loader.over = lambda: bool(stopping.signal)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Before anybody goes by the figures of a validation that was cut short.
        if not trainer.sanity_checking and trainer.state.fn == "fit" and (told := self._agreed()):
            self._stop(trainer, told)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was told in the last step is obeyed when training is over, by rank 0. What goes on has nothing left to train then.

        A run that saves checkpoints has one of its last step, whether that is validated or not.
        """
        told = self._agreed()
        if told or (trainer.checkpoint_callbacks and self._saved != trainer.global_step):
            trainer.save_checkpoint(self.checkpoint, weights_only=False)
        if self.checkpoint.is_file():
            stopping.checkpoint = str(self.checkpoint)
        stopping.release()
        stopping.signal = stopping.signal or told

    def _agreed(self) -> int:
        """As after a step, but now: there is time to wait for the others."""
        if self._agreement is None:
            return stopping.signal
        return max(self._agreement.ask(stopping.signal), self._agreement.settle())

    def _stop(self, trainer: L.Trainer, told: int) -> None:
        if trainer.validating:
            self._validation.owe(trainer)
        trainer.save_checkpoint(self.checkpoint, weights_only=False)
        if self._agreement is not None:
            self._agreement.settle()
        source = getattr(trainer.strategy, "source", None)
        if isinstance(source, RemoteTarget):  # its ranks wait for requests; this is how they learn that there will be no more
            source.goodbye()
        raise Interrupted(told, str(self.checkpoint))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        stopping.release()
