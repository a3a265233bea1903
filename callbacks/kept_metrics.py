"""No metric of a step that a checkpoint counts is lost with the process."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

__all__ = ["KeptMetrics"]

_KEY = "unlogged_metrics"


class KeptMetrics(Callback):
    """Before a checkpoint is written, loggers write what they hold; what Lightning has yet to give them is in the checkpoint.

    Lightning logs the metrics of an optimizer step after ``on_train_batch_end``, in which checkpoints are saved: without this, a run that
    ends between the two, or is interrupted with a checkpoint, has no metrics of that step anywhere. A run that goes on from the checkpoint
    logs them first.
    """

    def __init__(self) -> None:
        self._unlogged: tuple[int, dict[str, float]] | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        step = trainer.global_step
        if batches.completed < batches.processed and step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            values = {name: float(value) for name, value in trainer.logged_metrics.items() if name.startswith("train/")}
            checkpoint[_KEY] = {"step": step - 1, "metrics": {**values, "epoch": trainer.current_epoch}}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if _KEY in checkpoint:
            self._unlogged = (int(checkpoint[_KEY]["step"]), dict(checkpoint[_KEY]["metrics"]))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._unlogged is not None:
            step, metrics = self._unlogged
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
            self._unlogged = None
