"""Real offline W&B runs of the main job, read back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from dflash_lit.job import Job
from dflash_lit.watching.resumed import run_of_checkpoint
from tests.test_conf import configured, planned
from tests.test_train import QUICK, run, train
from tests.watching.offline_run import OfflineRun

# The worst loss is "best", so that the best checkpoint is not the last.
KEEP = [
    "logger=default",
    "callbacks.checkpoint.save_top_k=-1",
    "callbacks.checkpoint.monitor=val/loss",
    "callbacks.checkpoint.mode=max",
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


@pytest.fixture(scope="module")
def folder(shelf: Path) -> Path:
    return train(*KEEP, folder=shelf)


@pytest.fixture(scope="module")
def whole(folder: Path) -> OfflineRun:
    return OfflineRun(folder)


def test_the_config_is_whole_and_searchable(whole: OfflineRun, folder: Path) -> None:
    config = whole.config
    assert config["drafter"]["block_size"] == 8
    assert config["optimizer"]["kind"] == "muon"
    assert config["paths"]["output_dir"] == str(folder)
    assert config["derived"]["drafter"]["target_layer_ids"] == [1, 2, 3]
    assert "${" not in json.dumps({key: value for key, value in config.items() if not key.startswith("_wandb")})
    assert "anchors" not in config  # Lightning's own record of the module, under other names


def test_environment_and_code(whole: OfflineRun) -> None:
    environment = whole.config["environment"]
    assert environment["versions"]["torch"] == torch.__version__
    assert {"lightning", "transformers", "hydra-core", "wandb"} <= environment["versions"].keys()
    (code,) = whole.artifacts("source")
    paths = {entry["path"]: entry["local_path"] for entry in code["manifest"]["contents"]}
    assert {"train.py", "conf/train.yaml", "callbacks/wandb_run.py", "src/dflash_lit/module.py"} <= paths.keys()
    assert Path(paths["train.py"]).read_text().startswith('"""Train a drafter')


def test_what_an_offline_run_has_to_upload_lies_in_the_runs_folder(whole: OfflineRun, folder: Path) -> None:
    local = [Path(entry["local_path"]) for one in whole.all("artifact") for entry in one["manifest"]["contents"]]
    assert all(path.is_relative_to(folder) and path.is_file() for path in local)


def test_groups_have_axes_and_summaries(whole: OfflineRun) -> None:
    defined = {one.get("name") or one["glob_name"]: one for one in whole.all("metric")}
    for name, summary in {
        "train/loss": {"min", "last"},
        "val/*": {"max", "last"},
        "val/loss": {"min", "last"},
        "acceptance/*": {"max", "last"},
        "pipeline/*": {"mean", "last"},
        "compile/*": {"last"},
        "system/*": {"max", "last"},
    }.items():
        assert defined[name]["step_metric"] == "trainer/global_step"
        assert {key for key, value in defined[name]["summary"].items() if value} == summary, name
    logged = {name for one in whole.all("history") for name in one["item"] if not name.startswith("_")} - {"epoch"}
    groups = ("train/", "val/", "acceptance/", "pipeline/", "compile/", "system/", "trainer/", "pictures/")
    assert [name for name in logged if not name.startswith(groups)] == []
    losses = [value for _, value in whole.series("val/loss")]
    assert whole.summary["val/loss"] == {"min": min(losses), "last": losses[-1]}
    assert [step for step, _ in whole.series("val/loss")] == [1, 3]  # Lightning counts from 0
    assert len(whole.series("system/peak_memory_gib")) == 4


def test_acceptance_by_slot_and_budget_over_time(whole: OfflineRun) -> None:
    first, second = whole.tables("acceptance/by_slot_table")
    assert {row[1] for row in first["data"]} == {"step 2"}
    assert {row[1] for row in second["data"]} == {"step 2", "step 4"}
    assert [row[0] for row in first["data"]] == list(range(1, 8))
    survival = dict(whole.series("val/acceptance_slot_1"))
    assert [row[2] for row in second["data"] if row[0] == 1] == pytest.approx([survival[1], survival[3]])
    budgets = whole.tables("acceptance/by_budget_table")[-1]["data"]
    assert {tuple(row[:2]) for row in budgets} >= {(x, "tree EAL, step 4") for x in (0, 16, 64, 256)}
    assert {tuple(row[:2]) for row in budgets} >= {(x, "decoded tau, step 2") for x in (0, 64)}


def test_pictures_come_once(whole: OfflineRun) -> None:
    for name in ("pictures/mask", "pictures/packing"):
        (image,) = whole.images(name)
        assert image.read_bytes().startswith(b"\x89PNG")


def test_sample_decodings_are_coloured(whole: OfflineRun, folder: Path) -> None:
    (table,) = whole.tables("acceptance/samples")
    samples = json.loads((folder / "summary.json").read_text())["samples"]
    assert [row[:2] for row in table["data"]] == [[one["prompt"], len(one["rounds"])] for one in samples]
    (artifact,) = [one for one in whole.artifacts("run_table") if "samples" in one["name"]]
    cells = [entry["local_path"] for entry in artifact["manifest"]["contents"] if entry["path"].endswith(".html")]
    assert len(cells) == len(samples)
    assert all("<span class='bonus" in Path(cell).read_text() and ".ok {" in Path(cell).read_text() for cell in cells)


def test_the_drafter_is_a_versioned_artifact(whole: OfflineRun, folder: Path) -> None:
    best, latest = whole.artifacts("model")
    assert best["name"] == latest["name"] == f"drafter-{whole.id}"
    assert "best" in best["aliases"]  # W&B makes each version the latest, until the next
    assert latest["aliases"] == ["latest"]
    theirs, ours = (json.loads(one["metadata"]) for one in (best, latest))
    assert (theirs["step"], ours["step"]) == (2, 4)
    assert theirs["val/loss"] == max(value for _, value in whole.series("val/loss"))
    assert theirs["acceptance/tau_greedy"] >= 1
    summary = json.loads((folder / "summary.json").read_text())
    assert ours["tau_greedy"] == summary["tau_greedy"]
    assert whole.summary["summary/tau_greedy"] == summary["tau_greedy"]
    files = {entry["path"]: Path(entry["local_path"]) for entry in latest["manifest"]["contents"]}
    assert files["model.safetensors"] == folder / "drafter" / "model.safetensors"


def test_a_finished_run_is_readable_and_ready_to_sync(whole: OfflineRun, folder: Path) -> None:
    assert whole.exit_code == 0
    done = subprocess.run(
        ["wandb", "sync", "--dry-run", str(whole.folder)], capture_output=True, text=True, timeout=60, check=False, cwd=folder
    )
    assert done.returncode == 0
    assert whole.folder.name in done.stdout + done.stderr


def test_a_resumed_run_goes_on_with_the_same_run(whole: OfflineRun, folder: Path, shelf: Path) -> None:
    checkpoint = folder / "checkpoints" / "step=2.ckpt"
    assert run_of_checkpoint(checkpoint) == whole.id
    resumed = OfflineRun(train(*KEEP, f"ckpt_path='{checkpoint}'", folder=shelf))
    assert resumed.id == whole.id
    losses = resumed.series("train/loss")
    # What was logged in the last seconds before the checkpoint comes once more: its own file may have been lost with the process.
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert losses[:2] == whole.series("train/loss")[:2]
    assert resumed.images("pictures/mask") == []
    assert {row[1] for row in resumed.tables("acceptance/by_slot_table")[-1]["data"]} == {"step 2", "step 4"}


def test_a_run_that_fails_can_be_read_and_says_why(shelf: Path) -> None:
    place = shelf / "failed"
    wrong = ("logger=default", "callbacks.checkpoint.monitor=val/nothing")
    done = run("train.py", *QUICK, *wrong, f"hydra.run.dir={place}", folder=shelf)
    assert done.returncode != 0
    failed = OfflineRun(place)
    assert failed.exit_code == 1
    assert "val/nothing" in failed.summary["error"]
    assert [step for step, _ in failed.series("train/loss")] == [0, 1]


def test_several_processes_write_one_run(shelf: Path) -> None:
    split = train("logger=default", "placement=split", "placement.drafters=2", "data.train_prompts=40", folder=shelf)
    found = OfflineRun(split)
    assert found.exit_code == 0
    assert found.config["derived"]["processes"] == 3
    assert [step for step, _ in found.series("train/loss")] == [0, 1, 2, 3]
    assert found.series("pipeline/wait_share")
    assert len(found.artifacts("model")) in (1, 2)  # one, if the last is the best
    assert list(split.glob("wandb/*-run-*")) == [found.folder]


def test_checkpoints_without_a_run(tmp_path: Path) -> None:
    assert run_of_checkpoint(tmp_path / "none.ckpt") is None
    torch.save({"callbacks": {"Other": {"a": 1}}}, tmp_path / "other.ckpt")
    assert run_of_checkpoint(tmp_path / "other.ckpt") is None
    (tmp_path / "broken.ckpt").write_text("nothing")
    assert run_of_checkpoint(tmp_path / "broken.ckpt") is None


@pytest.mark.parametrize(
    ("saved", "override", "chosen"),
    [
        ("abc", "", "abc"),
        ("abc", "logger.wandb.id=mine", "mine"),
        ("abc", "+logger.wandb.version=mine", "mine"),
        (None, "", None),
    ],
)
def test_the_run_that_a_checkpoint_resumes(saved: str | None, override: str, chosen: str | None, tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.ckpt"
    torch.save({"callbacks": {"WandbRun": {"wandb_run_id": saved} if saved else {}}}, checkpoint)
    cfg = configured(*filter(None, [override]), "logger=wandb", f"ckpt_path={checkpoint}")
    cfg.paths.output_dir, cfg.logger["wandb"]["save_dir"] = str(tmp_path), str(tmp_path)
    (logger,) = Job(cfg, planned()).instances()[1]
    assert logger.version == chosen
