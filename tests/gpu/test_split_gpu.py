"""Target and drafter in processes of their own on GPUs, everything compiled, and the losses of a colocated run.

Where there are too few GPUs the ranks share them: then features and gradients go over gloo instead of NCCL.
"""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
import torch

from benchmarks.soak import Kill, prepare, soak
from tests.test_train import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 8.0 or more"),
]

QUICK = ("debug=fast", "logger=csv", "callbacks.acceptance.prompts=1", "evaluation.prompts=1", "evaluation.temperatures=[]")
SPLIT = ("placement=split", "placement.share=true")


def column(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in csv.DictReader((folder / "csv" / "metrics.csv").open()) if row.get(name)]


def trained(folder: Path, name: str, *placement: str) -> Path:
    done = run("train.py", *QUICK, *placement, f"hydra.run.dir={folder / name}", folder=folder)
    print(done.stderr[-6000:])
    assert done.returncode == 0, name
    return folder / name


def check_equal(one: Path, other: Path) -> None:
    """To the last bit: nothing that is added up depends on what was timed."""
    losses, expected = column(one, "train/loss"), column(other, "train/loss")
    print(losses, expected)
    assert losses == expected
    assert column(one, "acceptance/tau_greedy") == pytest.approx(column(other, "acceptance/tau_greedy"), abs=0.2)
    assert not any(column(one, "compile/recompiles"))


def test_a_split_run_is_the_colocated_one(tmp_path: Path) -> None:
    check_equal(trained(tmp_path, "split", *SPLIT), trained(tmp_path, "colocated"))


def test_so_are_those_of_two_drafters(tmp_path: Path) -> None:
    check_equal(
        trained(tmp_path, "split", *SPLIT, "placement.drafters=2"),
        trained(tmp_path, "colocated", "placement.drafters=2", "placement.share=true"),
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_target_comes_back(tmp_path: Path, signum: signal.Signals) -> None:
    """Receives that were in flight are aborted, and over NCCL a communicator is made while the drafter trains: with three GPUs."""
    prepare(tmp_path, rows=60, tokens=100)
    result = soak(
        tmp_path,
        "trainer.threads=null",
        "placement.share=true",
        steps=400,
        targets=2,
        every=0.5,
        mib=64.0,
        kills=[Kill(100, 1, signum)],
        restarts=1,
        timeout_s=10.0,
    )
    print((tmp_path / "said.txt").read_text()[-6000:])
    print(result["verdict"])
    assert [event["kind"] for event in result["events"]] == [signum.name, "restarted", "back"]
    assert len(column(tmp_path / "run", "train/loss")) == 400
    assert not any(column(tmp_path / "run", "compile/recompiles"))
