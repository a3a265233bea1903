"""Callbacks that write down which processes a sweep's process has started: at a job's beginning and end, and while it trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from hydra.experimental.callback import Callback as HydraCallback
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig


def children() -> list[int]:
    """Processes that this one has started and not seen the end of, the dead among them included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid() and "DFLASH_LIT_LOCAL_RANK" in _environment(folder):
                found.append(int(folder.name))
    return found


def _environment(folder: Path) -> str:
    try:
        return (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _write(file: str, when: str) -> None:
    with Path(file).open("a") as lines:
        lines.write(json.dumps([when, len(children())]) + "\n")


class OfJobs(HydraCallback):
    def __init__(self, file: str) -> None:
        self.file = file

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        _write(self.file, "start")

    def on_job_end(self, config: DictConfig, **kwargs: Any) -> None:
        _write(self.file, "end")


class WhileTraining(Callback):
    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            _write(self.file, "train")
