"""A callback that writes down what a drafter was given and what it drew, batch by batch; put into a run by its config."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dflash_lit.module import DrafterModule

__all__ = ["Recorder"]


class Recorder(Callback):
    """A line a batch in ``FOLDER/RANK.jsonl``, of training and of validation.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder.mkdir(exist_ok=True)
        self.file = (self.folder / f"{trainer.global_rank}.jsonl").open("w", buffering=1)

    def _write(self, kind: str, batch: dict[str, Tensor], module: DrafterModule, epoch: int) -> None:
        blocks = module.blocks(batch, epoch)
        digest = {
            name: hashlib.sha256(batch[name].numpy().tobytes()).hexdigest()[:16]
            for name in ("input_ids", "features", "last_hidden")
            if name in batch
        }
        facts = {"kind": kind, "epoch": epoch, "rows": batch["row_ids"].tolist(), "anchors": blocks.anchors.tolist(), **digest}
        self.file.write(json.dumps(facts) + "\n")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._write("train", batch, pl_module, trainer.current_epoch)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._write("val", batch, pl_module, -1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.file.close()
