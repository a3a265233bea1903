"""The same run, however its processes were started: by itself, by torchrun, by SLURM, on two hosts; and what stops it at once."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from dflash_lit.errors import UserError
from dflash_lit.placement.interfaces import listening_address
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.started import Started
from dflash_lit.placement.world import _wait_for_rank_0, lead
from dflash_lit.target.frozen import TargetInfo
from tests.fork_server import forked_python
from tests.placement.test_same_run import SMALL, metrics, seen
from tests.test_conf import configured, make_plan
from tests.test_train import ROOT

Finished = subprocess.CompletedProcess[str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Shelf:
    """A folder for runs, and processes that are known by a variable in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keep = {k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR")}
        self.variables = {
            **keep,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DFLASH_LIT_RUNS": str(folder / "runs"),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "LAUNCH_TEST": str(folder),
            "PYTHON_EXEC": forked_python(),  # for torchrun
        }

    def run(self, *commands: tuple[Sequence[str], dict[str, str]], timeout: float = 300) -> list[Finished]:
        """Run commands at the same time, each with variables of its own, from the project's folder."""
        with ExitStack() as stack:
            started = []
            for command, variables in commands:
                said = [stack.enter_context((self.folder / f"{len(started)}.{name}").open("w+")) for name in ("out", "err")]
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=self.variables | variables, stdout=said[0], stderr=said[1])
                )
            deadline = time.monotonic() + timeout
            try:
                for process in started:
                    process.wait(max(deadline - time.monotonic(), 0.1))
            finally:
                for process in started:
                    process.kill()
        return [
            Finished(process.args, process.returncode, *((self.folder / f"{n}.{name}").read_text() for name in ("out", "err")))
            for n, process in enumerate(started)
        ]

    def processes(self) -> list[str]:
        """Command lines of those that still run."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if f"LAUNCH_TEST={self.folder}".encode() in (place / "environ").read_bytes():
                    found.append((place / "cmdline").read_text().replace("\0", " "))
            except OSError:  # has ended, or is somebody else's
                continue
        return found


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("launch"))


@pytest.fixture(autouse=True)
def nothing_is_left(shelf: Shelf) -> Iterator[None]:
    """By any test: no process, and no file outside the folders that it was told."""
    before = visible()
    yield
    deadline = time.monotonic() + 10
    while shelf.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shelf.processes() == []
    assert visible() <= before


def visible() -> set[Path]:
    return {path for folder in (ROOT, ROOT / "outputs") for path in folder.glob("[!.]*")}


def train(*overrides: str) -> list[str]:
    return [forked_python(), "train.py", *overrides]


def torchrun(processes: int, *overrides: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*command, "train.py", *overrides]


def slurm(processes: int, *overrides: str) -> list[tuple[list[str], dict[str, str]]]:
    """The tasks of one node, as srun starts them: one command, and a number for each."""
    everywhere = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "x",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(processes),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": str(processes),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    return [
        (train(*overrides), {**everywhere, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}) for task in range(processes)
    ]


def good(done: Sequence[Finished]) -> None:
    assert [process.returncode for process in done] == [0] * len(done), done[0].stderr[-3000:]


def assert_same(one: Path, other: Path, drafters: int) -> None:
    assert metrics(one) == metrics(other)
    assert metrics(one)
    for rank in range(drafters):
        assert seen(one, "train", rank) == seen(other, "train", rank)


@pytest.fixture(scope="module")
def by_itself(shelf: Shelf) -> Path:
    """A sweep of two jobs, each of which starts its target process; as by a person in a terminal."""
    folder = shelf.folder / "sweep"
    good(shelf.run((train("-m", "seed=1,2", *SMALL, "placement=split", f"hydra.sweep.dir={folder}"), {})))
    return folder


def test_the_jobs_of_a_sweep_start_and_end_their_own_processes(by_itself: Path, shelf: Shelf) -> None:
    made = sorted(path.name for path in by_itself.iterdir())
    assert made == ["0", "1", "best.yaml", "multirun.yaml", "report.html", "results.csv"]
    assert not (shelf.folder / "runs").exists()
    for job in ("0", "1"):
        made = sorted(path.name for path in (by_itself / job).iterdir())
        assert made == [
            ".hydra",
            "checkpoints",
            "csv",
            "drafter",
            "job.json",
            "report.html",
            "seen",
            "summary.json",
            "train.log",
        ]
        # Of the drafter alone: the target has no Trainer.
        assert [path.name for path in (by_itself / job / "seen").iterdir()] == ["0.jsonl"]
    assert metrics(by_itself / "0") != metrics(by_itself / "1")


def test_torchrun(by_itself: Path, shelf: Shelf) -> None:
    folder = shelf.folder / "torchrun"
    good(shelf.run((torchrun(2, *SMALL, "seed=1", "placement=split", f"hydra.run.dir={folder}"), {})))
    assert_same(folder, by_itself / "0", 1)
    assert not (shelf.folder / "runs").exists()  # Hydra ran in rank 0 alone


def test_two_hosts_are_as_one_by_slurm(shelf: Shelf) -> None:
    """Two drafters and two targets on one host, and one of each on two; neither the second host nor the others run Hydra."""
    one, two = shelf.folder / "slurm", shelf.folder / "hosts"
    layout = ("placement=split", "placement.drafters=2", "placement.targets=2")
    good(shelf.run(*slurm(4, *SMALL, *layout, f"hydra.run.dir={one}")))
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # All that the second host is told is where the first one is.
    first = train(*SMALL, "placement=split", "placement.hosts=2", f"hydra.run.dir={two}")
    done = shelf.run((first, {**master, "NODE_RANK": "0"}), (train(), {**master, "NODE_RANK": "1"}))
    good(done)
    assert_same(two, one, 2)
    assert not (two / ".rows").exists()
    assert not (shelf.folder / "runs").exists()
    assert "2     1     0      drafter  1" in done[0].stderr
    name = socket.gethostname()
    assert f"hosts: 0 is {name} (lo, 127.0.0.1), 1 is {name} (lo, 127.0.0.1)" in done[0].stderr
    assert done[1].stderr == ""  # rank 0 speaks for all


# -- what stops it at once


def own_errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def test_torchrun_with_another_number_of_processes(shelf: Shelf) -> None:
    began = time.monotonic()
    (done,) = shelf.run((torchrun(2, "placement=split", "placement.targets=2", f"hydra.run.dir={shelf.folder / 'no'}"), {}))
    assert own_errors(done.stderr) == [
        "error: torchrun has started 2 processes, 2 a host, but placement.drafters=1 + placement.targets=2 are 3: start 3 a host"
    ]
    assert done.returncode == 1  # torchrun's own
    assert re.findall(r"exitcode +: (\d+)", done.stderr) == ["2", "2"]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("trainer.maxsteps=3",), "maxsteps"),  # Hydra's, before there is a config
        (("-m", "seed=1,2", "placement=split"), "error: -m: each job of a sweep starts its own processes, on one host"),
    ],
    ids=["wrong key", "sweep"],
)
def test_slurm_tasks_end_with_rank_0_where_there_is_no_run(shelf: Shelf, overrides: tuple[str, ...], says: str) -> None:
    done = shelf.run(*slurm(2, *overrides, f"hydra.sweep.dir={shelf.folder / 'no'}"))
    assert [process.returncode for process in done] == [2, 2], done[0].stderr
    assert len(own_errors(done[0].stderr)) == 1
    assert says in done[0].stderr
    assert done[1].stderr == ""


def test_slurm_tasks_that_are_spread_unevenly(shelf: Shelf) -> None:
    """``srun --nodes 2 --ntasks 3``: one line, and all end, though they cannot meet."""
    places = [("0", "0"), ("0", "1"), ("1", "0")]
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "node[1-2]"}
    tasks = slurm(3, "placement=split")
    done = shelf.run(
        *(
            (command, env | uneven | {"SLURM_NODEID": host, "SLURM_LOCALID": local})
            for (command, env), (host, local) in zip(tasks, places, strict=True)
        )
    )
    assert [process.returncode for process in done] == [2, 2, 2], done[0].stderr
    assert done[0].stderr.startswith("error: slurm has started 3 processes, 2, 1 on the hosts: all hosts of a run have as many")
    assert len(done[0].stderr.splitlines()) == 1
    assert [process.stderr for process in done[1:]] == ["", ""]


def test_rank_0_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that leads nowhere is said at once; of the tasks of a SLURM node by one. By hand it may come to lead somewhere."""
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^MASTER_ADDR=a\.\.b: .* on host 1; set MASTER_ADDR to an address of host 0"):
        _wait_for_rank_0(Started("slurm", 1, 0, "a..b", 15001, 4, 2), 15001)
    with pytest.raises(SystemExit) as caught:
        _wait_for_rank_0(Started("slurm", 1, 1, "a..b", 15001, 4, 2), 15001)
    assert caught.value.code == 2
    assert time.monotonic() - began < 5
    monkeypatch.setattr("dflash_lit.placement.world._START_S", 0.3)
    port = free_port()
    with pytest.raises(UserError, match=rf"MASTER_PORT={port}: rank 0 of the run could not be reached from host 1"):
        _wait_for_rank_0(Started("hand", 1, 0, "127.0.0.1", port), port)
    with pytest.raises(
        UserError, match=rf"MASTER_ADDR=host0.invalid MASTER_PORT={port}: rank 0 of the run could not be reached"
    ):
        _wait_for_rank_0(Started("hand", 1, 0, "host0.invalid", port), port)
    assert f"waiting for rank 0 at MASTER_ADDR=host0.invalid MASTER_PORT={port}: " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^MASTER_ADDR=a\.\.b: .*; set MASTER_ADDR to an address of host 0"):
        listening_address("a..b", port, None)


def test_two_hosts_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="set MASTER_ADDR and MASTER_PORT on every host to an address"):
        lead(Layout(1, 1, 2), Started("hand"), "", command=[], timeout_s=25)


@pytest.mark.parametrize(
    ("overrides", "visible", "says"),
    [
        (
            ("placement=split", "placement.targets=5", "placement.drafters=3"),
            4,
            "placement.targets=5 + placement.drafters=3 need 8 GPUs a host, 4 are visible",
        ),
        (("placement.drafters=2",), 1, "placement.drafters=2 need 2 GPUs a host, 1 is visible"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], visible: int, says: str
) -> None:
    """The only test of this file in which something is not as it is: this machine has other GPUs."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("read the target's files")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(TargetInfo, "load", load)
    with pytest.raises(UserError, match=re.escape(says)):
        make_plan(configured("trainer.accelerator=gpu", *overrides))
