"""One run on many layouts: batches, anchors, features, losses and weights are the same to the last bit, wherever the target is.

Real processes over gloo on a CPU, one thread each: with another number of threads a product is another sum.
"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.test_train import QUICK, run

SMALL = [
    *QUICK,
    "evaluation.prompts=1",
    "evaluation.temperatures=[]",
    # 12 rows: an epoch is six batches of one drafter, three of two. Five steps of two drafters are more than an epoch.
    "data.train_prompts=26",
    "data.val_prompts=6",
    "data.rows_per_batch=2",
    "trainer.max_steps=5",
    "+callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_top_k=-1",
    "callbacks.checkpoint.monitor=null",
    "+callbacks.recorder._target_=tests.placement.recorder.Recorder",
    "+callbacks.recorder.folder=${paths.output_dir}/seen",
]
Rows = dict[tuple[str, str], str]


def sweep(shelf: Path, folder: str, *overrides: str, script: str = "train.py", **environment: str) -> list[Path]:
    """The folders of the jobs of one command; the last override with several values changes fastest."""
    done = run(script, "-m", *SMALL, *overrides, f"hydra.sweep.dir={shelf / folder}", folder=shelf, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(path for path in (shelf / folder).iterdir() if path.is_dir())


def resumed(folder: Path) -> str:
    """A job from the beginning and one from the second step of another."""
    return f"ckpt_path=null,'{folder / 'checkpoints' / 'step=2.ckpt'}'"


def metrics(folder: Path) -> Rows:
    """All that training and validation logged, by step and name, as written: floats to the last digit."""
    return {
        (row["step"], name): value
        for row in csv.DictReader((folder / "csv" / "metrics.csv").open())
        for name, value in row.items()
        if value and name.startswith(("train/", "val/", "acceptance/", "lr-"))
    }


def column(rows: Rows, name: str) -> list[float]:
    return [float(value) for (_, key), value in rows.items() if key == name]


def seen(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """What a drafter rank was given and drew, batch by batch."""
    lines = map(json.loads, (folder / "seen" / f"{rank}.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def assert_same(one: Path, other: Path, drafters: int) -> None:
    assert metrics(one) == metrics(other)
    for rank in range(drafters):
        for kind in ("train", "val"):
            assert seen(one, kind, rank) == seen(other, kind, rank)
    assert_same_weights(one, other)


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "drafter" / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(value.equal(second[name]) for name, value in first.items())


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same")


@pytest.fixture(scope="module")
def alone(shelf: Path) -> list[Path]:
    """One process, with hard and with soft labels."""
    return sweep(shelf, "0+1", "trainer.accumulate_grad_batches=2", "objective=dpace,soft")


@pytest.fixture(scope="module")
def one_target(shelf: Path, alone: list[Path]) -> list[Path]:
    """The same with the target in another."""
    return sweep(shelf, "1+1", "trainer.accumulate_grad_batches=2", "objective=dpace,soft", "placement=split")


@pytest.fixture(scope="module")
def two_targets(shelf: Path, one_target: list[Path]) -> list[Path]:
    """Two ranks that hold the target; a whole run, and the end of the run with one."""
    split = ("placement=split", "placement.targets=2")
    return sweep(shelf, "2+1", "trainer.accumulate_grad_batches=2", *split, resumed(one_target[0]))


@pytest.fixture(scope="module")
def split_pair(shelf: Path, alone: list[Path]) -> list[Path]:
    """Two drafters with one and with three target ranks; spied on."""
    (shelf / "spy").mkdir()
    layouts = ("placement=split", "placement.drafters=2", "placement.targets=1,3")
    spied = {"script": "tests/placement/spied.py", "SPY": str(shelf / "spy"), "PYTHONPATH": os.pathsep.join(("src", "."))}
    return sweep(shelf, "1+2 and 3+2", *layouts, **spied)


@pytest.fixture(scope="module")
def pair(shelf: Path, split_pair: list[Path]) -> list[Path]:
    """Two drafters, each with a target of its own; a whole run, and the end of the one with three target ranks."""
    return sweep(shelf, "0+2", "placement.drafters=2", resumed(split_pair[1]))


@pytest.mark.parametrize("labels", [0, 1], ids=["hard", "soft"])
def test_one_drafter_and_its_target(alone: list[Path], one_target: list[Path], labels: int) -> None:
    assert_same(one_target[labels], alone[labels], 1)
    # And there is something to compare.
    rows, batches = metrics(alone[labels]), seen(alone[labels], "train")
    assert len(column(rows, "train/loss")) == len(column(rows, "train/gradient_norm")) == 5
    assert len(column(rows, "val/loss")) == len(column(rows, "val/tree_eal@64")) >= 2
    assert len(column(rows, "acceptance/tau_greedy")) >= 3  # the first before training
    assert len(column(rows, "val/tau@64")) == len(column(rows, "val/loss"))  # decoded by the target, wherever it is
    assert len(batches) == 10
    assert {"rows", "anchors", "input_ids", "features", *(["last_hidden"] if labels else [])} <= set(batches[0])


def test_one_drafter_and_two_targets(alone: list[Path], two_targets: list[Path]) -> None:
    assert_same(two_targets[0], alone[0], 1)


@pytest.mark.parametrize("targets", [0, 1], ids=["one", "three"])
def test_two_drafters(pair: list[Path], split_pair: list[Path], targets: int) -> None:
    assert_same(split_pair[targets], pair[0], 2)
    assert [batch["epoch"] for batch in seen(pair[0], "train", 1)] == [0, 0, 0, 1, 1]


def test_accumulation_makes_two_drafters_of_one(alone: list[Path], pair: list[Path]) -> None:
    one, two = alone[0], pair[0]
    batches = seen(one, "train")
    for step, shares in enumerate(zip(seen(two, "train", 0), seen(two, "train", 1), strict=True)):
        assert list(shares) == batches[2 * step : 2 * step + 2]  # rows, anchors, features
    for name in ("train/loss", "train/gradient_norm", "train/chain_eal", "val/loss", "val/chain_eal"):
        first, second = (column(metrics(folder), name) for folder in (one, two))
        assert first == pytest.approx(second, rel=1e-5), name


@pytest.mark.parametrize("drafters", [1, 2])
def test_a_run_goes_on_inside_an_epoch_with_other_targets(
    drafters: int, alone: list[Path], two_targets: list[Path], split_pair: list[Path], pair: list[Path]
) -> None:
    """Batches that were in flight when it was saved had not been trained on: they come after it."""
    whole, end = (alone[0], two_targets[1]) if drafters == 1 else (split_pair[1], pair[1])
    for rank in range(drafters):
        batches = seen(end, "train", rank)
        assert batches == seen(whole, "train", rank)[-len(batches) :]
    rows = {key: value for key, value in metrics(end).items() if not key[1].startswith("acceptance/")}
    assert len(column(rows, "train/loss")) == 5  # those before the checkpoint are taken over
    assert rows.items() <= metrics(whole).items()
    assert_same_weights(end, whole)


def test_drafters_read_the_ends_and_targets_make_no_drafter(shelf: Path, split_pair: list[Path]) -> None:
    """Rank 0 is one process for both jobs, every other rank one for each."""
    by_rank: dict[int, list[list[str]]] = {}
    for path in (shelf / "spy").iterdir():
        by_rank.setdefault(int(path.name.split("-")[0]), []).append(path.read_text().split())
    # A whole target only once training is over, to decode with; then the export is read and a fresh drafter made to compare.
    # Drafters without memory are made before all that, whose parameters are counted to say what the run will take, and to
    # compare the export's sizes with.
    assert by_rank[0] == [2 * ["drafter", "ends", "drafter", "fit", "fitted", "target", *3 * ["drafter"]]]
    assert by_rank[1] == 2 * [["ends", "drafter", "fit", "fitted"]]
    assert by_rank[2] == 2 * [["target"]]  # the first target of each
    assert by_rank[3] == by_rank[4] == [["target"]]
