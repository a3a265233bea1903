"""A callback that spoils a feature of one drafter, a gradient of another, then a weight; put into a run by its config."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lit.module import DrafterModule

__all__ = ["FEATURE", "GRADIENT", "WEIGHT", "Spoiler"]

FEATURE, GRADIENT, WEIGHT = 2, 3, 6
"""Steps, from 1 up."""


class Spoiler(Callback):
    """Writes a digest of all weights after each step, a line each, to ``FOLDER/RANK.txt``.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, DrafterModule)
        step, weight = trainer.global_step + 1, pl_module.drafter.fc.weight
        if step == FEATURE and trainer.global_rank == 1:
            batch["features"] = batch["features"].clone()
            batch["features"][0, 3, 1] = torch.nan
        elif step == GRADIENT and trainer.global_rank == 0:
            self.handle = weight.register_hook(lambda gradient: gradient * torch.inf)
        elif step == GRADIENT + 1 and trainer.global_rank == 0:
            self.handle.remove()
        elif step == WEIGHT:
            weight.data[0, 0] = torch.nan

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        digest = hashlib.sha256()
        for parameter in pl_module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{digest.hexdigest()}\n")
