"""Peak memory of the process and of its GPU, for every logger."""

from __future__ import annotations

import resource
import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

__all__ = ["Memory"]

GIB = 2**30


class Memory(Callback):
    """Logs ``system/peak_memory_gib`` of rank 0's process and, on a GPU, ``system/peak_gpu_memory_gib`` of torch's allocator.

    At every ``trainer.log_every_n_steps``; neither waits for the device.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._step = step
        unit = 1 if sys.platform == "darwin" else 1024  # KiB elsewhere
        peaks = {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
        if pl_module.device.type == "cuda":
            peaks["peak_gpu_memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / GIB
        for logger in trainer.loggers:
            logger.log_metrics({f"system/{name}": value for name, value in peaks.items()}, step=step)
