"""Garbage in circles goes at validations, and nothing stays frozen when a run is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from callbacks.garbage import GarbageCollection


class Circle:
    def __init__(self) -> None:
        self.itself = self


class Leaving(BoringModel):
    """Leaves a circle at each step, and counts those that are still there."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.circles: weakref.WeakSet[Circle] = weakref.WeakSet()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.circles.add(Circle())
        self.seen.append(len(self.circles))
        if batch_idx == 0:
            assert gc.get_freeze_count() > 1000
        if batch_idx == self.fails_at:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def no_collection_by_itself() -> Iterator[None]:
    before = gc.get_freeze_count()
    gc.disable()
    yield
    gc.enable()
    assert gc.get_freeze_count() == before


def fit(folder: Path, module: Leaving) -> None:
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=9,
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[GarbageCollection()],
    )
    trainer.fit(module)


def test_circles_go_at_validations(tmp_path: Path) -> None:
    module = Leaving()
    fit(tmp_path, module)
    assert module.seen == [1, 2, 3] * 3


def test_a_run_that_fails_leaves_nothing_frozen(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Leaving(fails_at=4))
