"""``metrics.csv`` of runs that are killed and go on."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from callbacks.kept_metrics import KeptMetrics
from dflash_lit.checkpoints.file import save
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.trained import SUMMARY, folder_of, has_ended
from dflash_lit.watching.metrics_file import MetricsLogger


def logger(folder: Path, resumes: Path | None = None) -> MetricsLogger:
    return MetricsLogger(resumes=resumes, save_dir=folder, name="csv", version="")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / "last.ckpt"
    save({"global_step": step}, path)
    return path


def killed(folder: Path, steps: int) -> None:
    """A run's file up to a step, with a row of which a part was written."""
    writer = logger(folder)
    for step in range(steps):
        writer.log_metrics({"train/loss": step + 0.5}, step)
        writer.log_metrics({"system/memory": 1.0}, step + 1)
        if step % 2:
            writer.log_metrics({"val/loss": torch.tensor(2.0).item()}, step)
    writer.save()
    with (folder / "csv" / "metrics.csv").open("a") as file:
        file.write("3,")


@pytest.mark.parametrize("same", [True, False], ids=["in its folder", "in another"])
def test_rows_up_to_the_checkpoint_are_kept(tmp_path: Path, same: bool) -> None:
    killed(tmp_path / "one", 4)
    folder = tmp_path / ("one" if same else "other")
    again = logger(folder, checkpoint(tmp_path / "one", 2))
    again.log_metrics({"train/loss": 2.5}, 2)
    again.log_metrics({"train/loss": 1.5, "train/chain_eal": 3.0}, 1)  # of which the loss is known
    again.save()
    assert rows(folder) == [
        {"step": "0", "train/loss": "0.5"},
        {"step": "1", "system/memory": "1.0"},
        {"step": "1", "train/loss": "1.5"},
        {"step": "2", "system/memory": "1.0"},  # by the number of steps done
        {"step": "1", "val/loss": "2.0"},
        {"step": "2", "train/loss": "2.5"},
        {"step": "1", "train/chain_eal": "3.0"},
    ]


def test_a_checkpoint_may_be_named_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(tmp_path / "one", 4)
    saved = checkpoint(tmp_path / "one", 2)
    monkeypatch.chdir(saved.parent)
    again = logger(tmp_path / "other", Path(saved.name))
    again.log_metrics({"train/loss": 2.5}, 2)
    again.save()
    assert [row["train/loss"] for row in rows(tmp_path / "other") if "train/loss" in row] == ["0.5", "1.5", "2.5"]
    assert not has_ended(folder_of(saved.name))
    (tmp_path / "one" / SUMMARY).touch()
    assert has_ended(folder_of(saved.name))


def test_damaged_rows_of_the_earlier_run_are_left_out_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path, 4)
    path = tmp_path / "csv" / "metrics.csv"
    head, *lines, _ = path.read_text().splitlines(keepends=True)
    place = head.strip().split(",").index("step")
    cells = lines[1].strip().split(",")
    cells[place] = "\u00b2"  # a digit that is no number
    path.write_text("".join([head, lines[0], ",".join(cells) + "\n", *lines[2:]]))
    again = logger(tmp_path, checkpoint(tmp_path, 4))
    again.log_metrics({"train/loss": 1.0}, step=9)
    again.save()
    assert len(rows(tmp_path)) == len(lines)  # one less, and the new one
    assert f"1 of {len(lines)} rows are damaged, and are left out" in caplog.text


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    killed(tmp_path, 4)
    new = logger(tmp_path)
    new.log_metrics({"train/loss": 9.0}, 0)
    new.save()
    assert rows(tmp_path) == [{"step": "0", "train/loss": "9.0"}]


def test_a_file_is_there_until_another_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the columns change, which replaces the file: the old one is what is left."""
    writer = logger(tmp_path)
    writer.log_metrics({"train/loss": 1.0}, 0)
    writer.save()
    before = rows(tmp_path)
    writer.log_metrics({"val/loss": 1.0}, 0)

    def interrupted(*_: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.save()
    assert rows(tmp_path) == before


class Line(L.LightningModule):
    """Learns a number; logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).square().sum()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Iterator[Tensor]:
        return torch.utils.data.DataLoader(torch.ones(8), batch_size=1)  # type: ignore[return-value, arg-type]


class Dies(Callback):
    """Saves inside a step's last hook and goes no further."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise ConnectionError


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_the_metrics_of_the_very_step_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    def trainer(folder: Path, *callbacks: Callback, resumes: Path | None = None) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            max_steps=6,
            log_every_n_steps=1,
            logger=logger(folder, resumes),
            callbacks=[KeptMetrics(), *callbacks],
            plugins=[VerifiedCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )

    def losses(folder: Path) -> list[tuple[str, str]]:
        return [(row["step"], row["train/loss"]) for row in rows(folder)]

    whole, folder = tmp_path / "whole", tmp_path / "died"
    trainer(whole).fit(Line())
    path = folder / "checkpoints" / "last.ckpt"
    with pytest.raises(ConnectionError):
        trainer(folder, Dies(path, 3)).fit(Line())
    # As a killed process leaves it: nothing is written after the checkpoint.
    written = (folder / "csv" / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "csv" / "metrics.csv").write_text("".join(written[:3]))
    trainer(folder, resumes=path).fit(Line(), ckpt_path=path, weights_only=True)
    assert losses(folder) == losses(whole)
    assert len(losses(whole)) == 6


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("left", [2, 0], ids=["something left to train", "nothing left"])
def test_the_latest_value_of_every_metric_outlives_the_process(tmp_path: Path, left: int) -> None:
    """Of a validation, too, that a run which goes on does not come to again."""
    path = tmp_path / "last.ckpt"

    def trainer(steps: int) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            callbacks=[KeptMetrics()],
            plugins=[VerifiedCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )

    first, again = trainer(4), trainer(4 + left)
    first.fit(Line())
    third = torch.tensor(1 / 3)
    first.callback_metrics["val/loss"] = third
    first.save_checkpoint(path)
    again.fit(Line(), ckpt_path=path, weights_only=True)
    assert float(again.callback_metrics["val/loss"]) == float(third)
    losses = [float(one.callback_metrics["train/loss"]) for one in (first, again)]
    assert losses[1] < losses[0] if left else losses[1] == losses[0]
