"""No metric of a step that a checkpoint counts is lost with the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.watching.wandb_logger import DurableWandbLogger

__all__ = ["KeptMetrics"]

_UNLOGGED, _RECENT = "unlogged_metrics", "recent_metrics"


class KeptMetrics(Callback):
    """Before a checkpoint is written, loggers write what they hold; what they cannot be made to write is in the checkpoint.

    A run that goes on from it logs that first:

    - metrics of the very step. Lightning logs them after ``on_train_batch_end``, in which checkpoints are saved: without this, a run that
      ends between the two, or is interrupted with a checkpoint, has them nowhere.
    - what was logged to W&B shortly before (:class:`DurableWandbLogger`).
    """

    def __init__(self) -> None:
        self._unlogged: list[Any] = []
        self._recent: list[Any] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        step = trainer.global_step
        if batches.completed < batches.processed and step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            values = {name: value for name, value in trainer.logged_metrics.items() if name.startswith("train/")}
            checkpoint[_UNLOGGED] = [step - 1, _plain({**values, "epoch": trainer.current_epoch})]
        checkpoint[_RECENT] = [
            [at, _plain(metrics)]
            for logger in trainer.loggers
            if isinstance(logger, DurableWandbLogger)
            for at, metrics in logger.recent()
        ]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._unlogged, self._recent = checkpoint.get(_UNLOGGED, []), checkpoint.get(_RECENT, [])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, DurableWandbLogger):
                logger.log_again(self._recent)
            if self._unlogged:
                step, metrics = self._unlogged
                logger.log_metrics(metrics, step=step)
        self._unlogged, self._recent = [], []


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
