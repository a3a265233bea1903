"""Stop a run that has diverged, and say where."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import UserError

__all__ = ["FiniteGuard"]


class FiniteGuard(Callback):
    """Look at loss, features and weights every few steps; the look waits for the device, so not every step.

    Args:
        every: steps between looks.
    """

    def __init__(self, every: int = 25) -> None:
        self.every = every

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every and trainer.global_step != 1:
            return
        named = {"features of the target": batch["features"], **dict(pl_module.named_parameters())}
        if "last_hidden" in batch:
            named["last hidden states of the target"] = batch["last_hidden"]
        for metric in ("train/loss", "train/gradient_norm", "train/path_loss", "train/path_gradient_norm"):
            if metric in trainer.callback_metrics:
                named[metric] = trainer.callback_metrics[metric]
        for name, tensor in named.items():
            if not bool(tensor.isfinite().all()):
                raise UserError(
                    f"step {trainer.global_step}: {name!r} is not finite, so training was stopped; "
                    "lower optimizer.lr, or resume from an earlier checkpoint (ckpt_path)"
                )
