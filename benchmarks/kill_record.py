"""A callback for kill_resume.py: all that a drafter was given, drew and became, a line each, on the disk before the next thing happens."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dflash_lit.module import DrafterModule

__all__ = ["START", "Record"]

START = "KILL_RESUME_START"
"""Environment variable: which start of the run this is, from 0."""


class Record(Callback):
    """Lines of JSON in ``FOLDER/RANK.START.jsonl``; each is written at once, so only the last of a killed process may be cut off.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{trainer.global_rank}.{os.environ[START]}.jsonl"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._write("setup")

    def _write(self, kind: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._write("begin", step=self._step)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._batch("batch", batch, pl_module, trainer.current_epoch, trainer.global_step, batch_idx)

    def _batch(self, kind: str, batch: dict[str, Tensor], module: DrafterModule, epoch: int, step: int, place: int) -> None:
        blocks = module.blocks(batch, epoch)
        self._write(
            kind,
            step=step,
            place=place,
            epoch=epoch,
            rows=batch["row_ids"].tolist(),
            tokens=_digest(batch["input_ids"]),
            anchors=_digest(blocks.anchors, blocks.valid),
            rng=_rng(),
            exact=_digest(*(batch[name] for name in ("features", "last_hidden") if name in batch)),
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write("loss", step=trainer.global_step, place=batch_idx, value=float(outputs["loss"]))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        names = ("train/loss", "train/gradient_norm", "train/chain_eal")
        self._write(
            "step",
            step=self._step,
            value=[float(trainer.callback_metrics[name]) for name in names],
            rate=trainer.optimizers[0].param_groups[0]["lr"],
            exact=_digest(*_tensors([pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"]])),
        )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write("validation")

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert isinstance(pl_module, DrafterModule)
        if not trainer.sanity_checking:
            self._batch("val_batch", batch, pl_module, -1, trainer.global_step, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        names = sorted(name for name in trainer.callback_metrics if name.startswith(("val/", "acceptance/")))
        self._write(
            "val", step=trainer.global_step, names=names, value=[float(trainer.callback_metrics[name]) for name in names]
        )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write("save")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("end")


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(value: Any) -> Iterator[Tensor]:
    """In an order that does not depend on how a dict was filled."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _rng() -> str:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    _, keys, position, *gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    return _digest(*states, torch.tensor(list(random.getstate()[1]))) + _digest(
        torch.from_numpy(np.asarray(keys)), torch.tensor([float(x) for x in (position, *gauss)])
    )
