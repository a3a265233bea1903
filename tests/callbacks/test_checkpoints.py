"""What conf/callbacks keeps: the last checkpoint and the best k; on a full disk; and when a run goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from callbacks.acceptance import Acceptance
from callbacks.checkpoint import SafeCheckpoint
from callbacks.interrupt import Interrupt
from dflash_lit.checkpoints.file import DiskFullError, load
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.errors import UserError
from tests.checkpoints.test_file import room

CONF = Path(__file__).parents[2] / "conf" / "callbacks" / "default.yaml"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Scored(BoringModel):
    """Validated after every second step, with these scores."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores
        self.ballast: Callable[[], int] = lambda: 0

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/tree_eal@64", self.scores[self.trainer.global_step // 2 - 1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ballast"] = torch.zeros(self.ballast(), 1024, dtype=torch.uint8)


class KillAfter(Callback):
    """Before a batch of the step after ``step``; of the gradients' accumulation the first, or the ``batch``-th."""

    def __init__(self, step: int, batch: int = 0) -> None:
        self.step, self.left = step, batch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            if not self.left:
                raise RuntimeError("killed")
            self.left -= 1


def made(folder: Path, *overrides: str) -> list[SafeCheckpoint]:
    conf = OmegaConf.create({"paths": {"output_dir": str(folder)}, "callbacks": OmegaConf.load(CONF)})
    conf.merge_with_dotlist([override.removeprefix("+") for override in overrides])
    return [instantiate(conf.callbacks[name]) for name in ("checkpoint", "last_checkpoint")]


def fit(
    folder: Path,
    module: L.LightningModule,
    *overrides: str,
    ckpt: Path | None = None,
    stop: int = -1,
    batch: int = 0,
    accumulate: int = 1,
    more: Sequence[Callback] = (),
) -> list[SafeCheckpoint]:
    saves = made(folder, *overrides)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*saves, KillAfter(stop, batch), *more],
        accumulate_grad_batches=accumulate,
        plugins=[VerifiedCheckpointIO()],
        default_root_dir=folder,
    )
    trainer.fit(module, ckpt_path=ckpt)
    return saves


def kept(folder: Path) -> dict[str, int]:
    """Steps of the checkpoints in a run's folder, by name; each is read with its sum checked."""
    return {name: load(folder / "checkpoints" / name)["global_step"] for name in sorted(os.listdir(folder / "checkpoints"))}


def test_last_is_the_last_and_the_best_are_the_best(tmp_path: Path) -> None:
    best, _ = fit(tmp_path, Scored(1, 3, 2, 0), "callbacks.checkpoint.save_top_k=2")
    assert kept(tmp_path) == {"last.ckpt": 8, "step=4.ckpt": 4, "step=6.ckpt": 6}
    assert Path(best.best_model_path).name == "step=4.ckpt"
    fit(tmp_path / "k", Scored(1, 3, 2, 0))
    assert kept(tmp_path / "k") == {"last.ckpt": 8, "step=4.ckpt": 4}


def test_a_run_that_goes_on_in_its_folder_keeps_what_a_whole_one_would(tmp_path: Path) -> None:
    """Killed after a new best one was saved and the worse one removed, before the last one was."""
    scores, top = (3, 1, 2, 4), "callbacks.checkpoint.save_top_k=2"
    fit(tmp_path / "whole", Scored(*scores), top)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, Scored(*scores), top, stop=4)
    folder = tmp_path / "checkpoints"
    (folder / "step=4.ckpt").rename(folder / "step=6.ckpt")  # as if step 6 had just taken its place
    (folder / ".last.ckpt.abc.partial").write_text("cut off")
    best, _ = fit(tmp_path, Scored(*scores), top, ckpt=folder / "last.ckpt")
    assert kept(tmp_path) == kept(tmp_path / "whole") == {"last.ckpt": 8, "step=2.ckpt": 2, "step=8.ckpt": 8}
    assert best.best_k_models.keys() == {str(folder / "step=2.ckpt"), str(folder / "step=8.ckpt")}


def test_nothing_is_saved_between_the_batches_of_a_step(tmp_path: Path) -> None:
    """Their gradients would be lost. Lightning does so after resuming from a step at which it saves."""
    often, file = "+callbacks.last_checkpoint.every_n_train_steps=2", tmp_path / "checkpoints" / "last.ckpt"
    scores = Scored(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, scores, often, stop=2, accumulate=2)
    before = file.read_bytes()
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, scores, often, ckpt=file, stop=2, batch=1, accumulate=2)
    assert file.read_bytes() == before
    assert load(file)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"] == 4


class KillInValidation(Callback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: list[int] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(trainer.global_step)
        if trainer.global_step == self.step:
            raise RuntimeError("killed")


def test_nothing_is_saved_between_a_step_and_its_validation(tmp_path: Path) -> None:
    """Lightning would go on after that validation without ever having done it."""
    often, file = "+callbacks.last_checkpoint.every_n_train_steps=3", tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, Scored(1, 2, 3, 4), often, more=[KillInValidation(6)])
    assert load(file)["global_step"] == 3
    watched = KillInValidation(-1)
    fit(tmp_path, Scored(1, 2, 3, 4), often, ckpt=file, more=[watched])
    assert watched.seen == [4, 6, 8]
    assert load(file)["global_step"] == 6


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (["every_n_train_steps=2", "save_on_train_epoch_end=true"], [2, 4, 6, 8]),
        (["every_n_train_steps=3", "save_on_train_epoch_end=true"], [3, 6]),
        (["train_time_interval={_target_: datetime.timedelta}"], [*range(1, 9)]),
        (["train_time_interval={_target_: datetime.timedelta}", "save_on_train_epoch_end=true"], [*range(1, 9)]),
        (["train_time_interval={_target_: datetime.timedelta, hours: 1}"], []),
        (["save_on_train_epoch_end=true"], [8]),
    ],
)
def test_what_is_put_off_until_a_validation_is_saved_then(settings: list[str], steps: list[int], tmp_path: Path) -> None:
    more = [f"callbacks.last_checkpoint.{setting}" for setting in ("save_top_k=-1", "filename='{step}'", *settings)]
    fit(tmp_path, Scored(1, 2, 3, 4), "callbacks.checkpoint.save_top_k=0", *more)
    assert sorted(kept(tmp_path).values() if (tmp_path / "checkpoints").exists() else []) == steps


@pytest.mark.parametrize("saves", [True, False])
def test_the_last_step_is_saved_without_a_validation_if_any_is(tmp_path: Path, saves: bool) -> None:
    file = tmp_path / "checkpoints" / "last.ckpt"
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=3,
        val_check_interval=60,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*(made(tmp_path) if saves else ()), Interrupt(str(file))],
        plugins=[VerifiedCheckpointIO()],
        default_root_dir=tmp_path,
    )
    trainer.fit(Scored())
    assert file.is_file() == saves
    assert not saves or load(file)["global_step"] == 3


def test_private_names_of_lightning_are_where_they_were(tmp_path: Path) -> None:
    """callbacks/checkpoint.py asks the loop what follows a batch, and puts a save off as ModelCheckpoint does by itself."""
    trainer = L.Trainer(default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    assert callable(trainer.fit_loop.epoch_loop._should_check_val_fx)
    assert trainer.fit_loop._data_fetcher is None
    save = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=1))
    assert save._defer_save_until_validation is False
    assert save._train_time_interval == timedelta(seconds=1)
    assert save._last_time_checked is None
    assert save._should_save_on_train_epoch_end(trainer) is True


def test_what_lightning_forgets_is_known_after_resuming(tmp_path: Path) -> None:
    best, _ = fit(tmp_path, Scored(1, 3, 2, 0))
    again, _ = fit(tmp_path, Scored(1, 3, 2, 0), ckpt=tmp_path / "checkpoints" / "last.ckpt")
    assert best.current_score == again.current_score == 3


def test_leftovers_beside_the_checkpoint_that_a_run_goes_on_from_are_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path / "a", Scored(1, 2, 3, 4), stop=4)
    left = tmp_path / "a" / "checkpoints" / ".last.ckpt.abc.partial"
    left.write_text("cut off")
    fit(tmp_path / "b", Scored(1, 2, 3, 4), ckpt=tmp_path / "a" / "checkpoints" / "last.ckpt")
    assert not left.exists()
    assert kept(tmp_path / "b") == {"last.ckpt": 8, "step=8.ckpt": 8}
    assert kept(tmp_path / "a") == {"last.ckpt": 4, "step=4.ckpt": 4}


def test_names_in_a_checkpoint_cannot_remove_other_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, Scored(1, 2, 3, 4), stop=4)
    folder, mine = tmp_path / "checkpoints", tmp_path / "mine.ckpt"
    mine.write_text("precious")
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    (state,) = (state for key, state in saved["callbacks"].items() if "tree_eal" in key)
    name = f"{folder}/../mine.ckpt"
    state |= {"best_k_models": {name: torch.tensor(-9.0)}, "kth_best_model_path": name, "best_model_path": name}
    torch.save(saved, folder / "last.ckpt")
    fit(tmp_path, Scored(1, 2, 3, 4), ckpt=folder / "last.ckpt")
    assert mine.read_text() == "precious"


# -- a full disk


def full_from_step_4(module: Scored) -> Scored:
    module.ballast = lambda: 4096 if module.trainer.global_step in (4, 6) else 0
    return module


def test_training_goes_on_without_the_checkpoints_there_is_no_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = full_from_step_4(Scored(1, 4, 3, 2))
    with room(2**20), caplog.at_level(logging.WARNING):
        best, last = fit(tmp_path, module)
    said = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(said) == 4  # best and last at steps 4 and 6
    assert "needs about 4 MiB" in said[0]
    assert said[0].endswith("Training goes on (callbacks.checkpoint.on_disk_full=continue)")
    # At step 8 there is room again. The best that could be kept are those of steps 2 and 8.
    assert kept(tmp_path) == {"last.ckpt": 8, "step=8.ckpt": 8}
    assert list(best.best_k_models) == [best.best_model_path] == [str(tmp_path / "checkpoints" / "step=8.ckpt")]
    assert float(best.best_model_score or 0) == 2
    assert last.best_model_path == str(tmp_path / "checkpoints" / "last.ckpt")


def test_or_the_run_stops_and_the_old_ones_are_there(tmp_path: Path) -> None:
    module = full_from_step_4(Scored(1, 4, 3, 2))
    with room(2**20), pytest.raises(DiskFullError, match=r"step=4\.ckpt: no room .* older checkpoints are kept"):
        fit(tmp_path, module, "callbacks.checkpoint.on_disk_full=stop")
    assert kept(tmp_path) == {"last.ckpt": 2, "step=2.ckpt": 2}


def test_one_option_for_both(tmp_path: Path) -> None:
    assert [save.on_disk_full for save in made(tmp_path)] == ["continue", "continue"]
    assert [save.on_disk_full for save in made(tmp_path, "callbacks.checkpoint.on_disk_full=stop")] == ["stop", "stop"]
    conf = OmegaConf.create({"paths": {"output_dir": "x"}, "callbacks": OmegaConf.load(CONF)})
    conf.callbacks.checkpoint = None
    assert instantiate(conf.callbacks.last_checkpoint).on_disk_full == "continue"
    with pytest.raises(UserError, match="on_disk_full='maybe': choose continue or stop"):
        SafeCheckpoint(on_disk_full="maybe")
    with pytest.raises(UserError, match="monitor=auto is a length"):
        SafeCheckpoint(monitor="auto", mode="min")
    with pytest.raises(UserError, match="train_time_interval='10': is no time"):
        SafeCheckpoint(train_time_interval="10")


# -- what the best goes by


@pytest.mark.parametrize(
    ("budgets", "prompts", "no_trees", "tree_budgets", "metric"),
    [
        ([64], [[1]], None, [16, 64], "val/tau@64"),
        ([16, 256], [[1]], None, [16, 64], "val/tau@256"),
        ([64], [], None, [16, 64], "val/tree_eal@64"),
        ([64], [[1]], "it cannot", [16, 64], "val/tree_eal@64"),
        (0, [[1]], None, [8, 16], "val/tree_eal@16"),
        (None, [[1]], None, [64], "val/tree_eal@64"),
    ],
)
def test_the_best_goes_by_decoding_where_something_is_decoded(
    budgets: Any, prompts: list[Any], no_trees: str | None, tree_budgets: list[int], metric: str, tmp_path: Path
) -> None:
    module = BoringModel()
    module.tree_budgets = tree_budgets  # type: ignore[assignment]
    save, _ = made(tmp_path)
    decoding = [] if budgets is None else [Acceptance(budgets=budgets)]
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[save, *decoding], default_root_dir=tmp_path)
    trainer.datamodule = SimpleNamespace(eval_prompts=prompts)  # type: ignore[attr-defined]
    trainer.strategy.target = SimpleNamespace(no_trees=no_trees)  # type: ignore[attr-defined]
    save.setup(trainer, module, "fit")
    assert save.monitor == metric
