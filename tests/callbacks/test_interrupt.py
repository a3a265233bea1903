"""A run that is told to stop at a step with a validation, and goes on: the same steps, validations and counters as a whole one's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from callbacks.checkpoint import SafeCheckpoint
from callbacks.interrupt import Interrupt
from callbacks.progress import Progress
from dflash_lit.checkpoints.file import load
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.errors import Interrupted
from dflash_lit.stopping import stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    yield
    stopping.release()
    stopping.signal = 0


class Told(Callback):
    """What happens, and a signal at one moment: of a step, before its validation, or at one of that one's batches."""

    def __init__(self, step: int, at: str) -> None:
        self.moment, self.happened = (step, at), []

    def _at(self, trainer: L.Trainer, at: str) -> None:
        self.happened.append((trainer.global_step, at))
        if (trainer.global_step, at) == self.moment:
            stopping.signal = signal.SIGTERM

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._at(trainer, "trained")

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int, *_: Any) -> None:
        self._at(trainer, f"batch {index}")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        # With the logger's step, which is a counter of its own.
        self._at(trainer, f"validated {trainer.fit_loop.epoch_loop._batches_that_stepped}")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._at(trainer, "epoch's end")

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._at(trainer, f"end of {trainer.max_steps}")


class Seeded(BoringModel):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([{"input_ids": torch.full((32,), i / 16)} for i in range(16)])  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["input_ids"]).square().mean()


def run(folder: Path, told: Told, *, ckpt: Path | None = None, every: int = 2, accumulate: int = 1, more: Any = ()) -> bool:
    """Two epochs of four steps. Whether it was stopped."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=8,
        max_epochs=-1,
        limit_train_batches=4 * accumulate,
        limit_val_batches=3,
        val_check_interval=every * accumulate,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=1,
        logger=False,
        enable_model_summary=False,
        callbacks=[told, Progress(), Interrupt(str(folder / "last.ckpt")), *more],
        plugins=[VerifiedCheckpointIO()],
        enable_checkpointing=bool(more),
        default_root_dir=folder,
    )
    stopping.signal = 0
    try:
        trainer.fit(Seeded(), ckpt_path=ckpt)
    except Interrupted:
        return True
    return False


def saves(folder: Path) -> list[SafeCheckpoint]:
    return [SafeCheckpoint(dirpath=folder, filename="all={step}", save_top_k=-1, auto_insert_metric_name=False)]


def counters(file: Path) -> Any:
    found = load(file)
    return found["global_step"], {name: value for name, value in found["loops"]["fit_loop"].items() if "combined" not in name}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [2, 4, 8])  # inside an epoch, at an epoch's end, the last
@pytest.mark.parametrize("at", ["trained", "batch 0", "batch 1"])
def test_the_validation_is_held_by_the_run_that_goes_on(tmp_path: Path, step: int, at: str, accumulate: int) -> None:
    whole, first, then = Told(-1, ""), Told(step, at), Told(-1, "")
    assert not run(tmp_path / "whole", whole, accumulate=accumulate, more=saves(tmp_path / "whole"))
    assert run(tmp_path, first, accumulate=accumulate, more=saves(tmp_path))
    assert not run(tmp_path, then, ckpt=tmp_path / "last.ckpt", accumulate=accumulate, more=saves(tmp_path))

    reached = whole.happened.index((step, "batch 0"), 1 + whole.happened.index((step, "trained")))
    sanity = 2  # a batch and its end, which a run that goes on leaves out
    assert whole.happened[:sanity] == first.happened[:sanity] == [(0, "batch 0"), (0, "validated 0")]
    assert then.happened == whole.happened[reached:]
    for name in ("all=2.ckpt", "all=4.ckpt", "all=6.ckpt", "all=8.ckpt"):
        assert counters(tmp_path / name) == counters(tmp_path / "whole" / name)


def test_stopped_in_the_same_validation_again(tmp_path: Path) -> None:
    for at in ("batch 1", "batch 0"):
        told = Told(8, at)
        assert run(tmp_path, told, ckpt=tmp_path / "last.ckpt" if (tmp_path / "last.ckpt").exists() else None)
    assert told.happened[0] == (8, "batch 0")
    assert (8, "validated 7") not in told.happened
    then = Told(-1, "")
    assert not run(tmp_path, then, ckpt=tmp_path / "last.ckpt")
    assert [at for _, at in then.happened] == ["batch 0", "batch 1", "batch 2", "validated 7", "epoch's end", "end of 8"]


def test_a_run_that_goes_on_with_other_validations_takes_no_step_more(tmp_path: Path) -> None:
    assert run(tmp_path, Told(8, "batch 0"))
    then = Told(-1, "")
    assert not run(tmp_path, then, ckpt=tmp_path / "last.ckpt", every=3)
    assert then.happened == [(8, "end of 8")]


@pytest.mark.parametrize("at", ["trained", "batch 0"])
@pytest.mark.parametrize("step", [2, 4, 6])
def test_other_validations_leave_steps_and_epochs_as_they_are(tmp_path: Path, step: int, at: str) -> None:
    whole, then = Told(-1, ""), Told(-1, "")
    assert not run(tmp_path / "whole", whole, every=7)
    assert run(tmp_path, Told(step, at))
    assert not run(tmp_path, then, ckpt=tmp_path / "last.ckpt", every=7)
    after = whole.happened[whole.happened.index((step + 1, "trained")) :]
    assert then.happened == after
    assert (7, "validated 6") in after


def test_what_was_to_be_saved_after_that_validation_is(tmp_path: Path) -> None:
    def every_fourth() -> list[SafeCheckpoint]:
        return [
            SafeCheckpoint(
                dirpath=tmp_path, filename="kept={step}", save_top_k=-1, every_n_train_steps=4, auto_insert_metric_name=False
            )
        ]

    assert run(tmp_path, Told(4, "batch 1"), more=every_fourth())
    assert not run(tmp_path, Told(-1, ""), ckpt=tmp_path / "last.ckpt", more=every_fourth())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["kept=4.ckpt", "kept=8.ckpt", "last.ckpt"]


def test_a_validation_is_owed_once(tmp_path: Path) -> None:
    """A run that is told again, or killed, after the validation that it owed has nothing left to do."""

    def seldom() -> list[SafeCheckpoint]:
        return [SafeCheckpoint(dirpath=tmp_path, filename="best={step}", every_n_train_steps=100)]

    assert run(tmp_path, Told(8, "batch 0"), more=seldom())
    assert not run(tmp_path, held := Told(-1, ""), ckpt=tmp_path / "last.ckpt", more=seldom())
    assert (8, "validated 7") in held.happened
    assert not run(tmp_path, again := Told(-1, ""), ckpt=tmp_path / "last.ckpt", more=seldom())
    assert again.happened == []


def test_counters_that_lightning_does_not_go_back_for_are_no_step_more(tmp_path: Path) -> None:
    assert run(tmp_path, Told(8, "batch 0"))
    saved = load(tmp_path / "last.ckpt")
    saved["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"] |= {"ready": 9, "started": 9}
    torch.save(saved, tmp_path / "changed.ckpt")
    then = Told(-1, "")
    assert not run(tmp_path, then, ckpt=tmp_path / "changed.ckpt")
    assert then.happened == [(8, "end of 8")]
