"""No metric of a step that a checkpoint counts is lost with the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lit.watching.wandb_logger import DurableWandbLogger

__all__ = ["KeptMetrics"]

_UNLOGGED, _RECENT, _LATEST = "unlogged_metrics", "recent_metrics", "latest_metrics"


class KeptMetrics(Callback):
    """Before a checkpoint is written, loggers write what they hold; what they cannot be made to write is in the checkpoint.

    A run that goes on from it logs that first, also one that has nothing left to train:

    - metrics of the very step. Lightning logs them after ``on_train_batch_end``, in which checkpoints are saved: without this, a run that
      ends between the two, or is interrupted with a checkpoint, has them nowhere.
    - what was logged to W&B shortly before (:class:`DurableWandbLogger`).

    The latest value of every metric is in the checkpoint, too, for what reads ``trainer.callback_metrics``: the summary of a run in
    which no validation came after resuming, and checkpoints that go by a validation's metric.
    """

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._unlogged: list[Any] = []
        self._recent: list[Any] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
        checkpoint[_LATEST] = _plain(trainer.callback_metrics)
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
        self._recent = [
            [None if step is None else int(step), _plain(metrics)] for step, metrics in checkpoint.get(_RECENT) or []
        ]
        self._unlogged = []
        if unlogged := checkpoint.get(_UNLOGGED):
            step, metrics = unlogged
            self._unlogged = [int(step), _plain(metrics)]
        self._latest = _plain(checkpoint.get(_LATEST) or {})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore(trainer)  # where nothing was left to train no training has started

    def _restore(self, trainer: L.Trainer) -> None:
        # In the float64 of the checkpoint, which holds the metric's own value.
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in self._latest.items()}
        )
        for logger in trainer.loggers:
            if isinstance(logger, DurableWandbLogger):
                logger.log_again(self._recent)
            if self._unlogged:
                step, metrics = self._unlogged
                logger.log_metrics(metrics, step=step)
        self._unlogged, self._recent, self._latest = [], [], {}


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
