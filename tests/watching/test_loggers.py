"""Runs that are watched without W&B."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from callbacks.memory import Memory
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.report import load_metrics
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows
from tests.test_train import QUICK, run, train

WITHOUT = """
import importlib.metadata as metadata, runpy, sys
found = metadata.distribution
def distribution(name):
    if name.startswith("tensorboard"):
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.distribution = distribution
sys.modules["tensorboard"] = sys.modules["tensorboardX"] = None  # imports of them fail
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train("logger=tensorboard", folder=tmp_path)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {"train/loss", "val/tree_eal@64", "val/acceptance_slot_1", "pipeline/ktok_s"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("train/loss")) == 4
    assert not (folder / "wandb").exists()
    assert (folder / "report.html").read_text().count("<svg") >= 3  # from the CSV file beside it


def test_tensorboard_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    done = run("-c", WITHOUT, *QUICK, "logger=tensorboard", f"hydra.run.dir={tmp_path / 'run'}", folder=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    said = done.stderr.strip().splitlines()
    assert said == ["error: logger.tensorboard: tensorboard is not installed; pip install tensorboard"]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torchmetrics")
def test_peak_memory_is_logged_once_a_step(embedded: FrozenTarget, tmp_path: Path) -> None:
    config = embedded_config()
    rows = packed_rows([[(128, 16)]] * 8)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ColocatedStrategy(embedded, config.target_layer_ids),
        max_steps=3,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        limit_val_batches=0,
        callbacks=[Memory()],
        logger=CSVLogger(tmp_path, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DrafterModule(config.to_dict(), embedded.ends(), anchors=4), datamodule=RowDataModule(rows, rows, 1, 0))
    logged = load_metrics(tmp_path / "metrics.csv")["system/peak_memory_gib"]
    assert [step for step, _ in logged] == [1, 2, 3]
    assert all(0.1 < value < 50 for _, value in logged)
