"""Runs of several processes that are broken or stopped: how soon all of it ends, what it says, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fork_server import forked_python

ROOT = Path(__file__).parent.parent.parent
LONG = [
    "debug=fast",
    "trainer.threads=1",
    "data.responses_per_batch=32",
    "data.rows_per_batch=1",
    "callbacks.acceptance=null",
    "trainer.max_steps=100000",
    "trainer.val_every=2",
    "trainer.log_every_n_steps=1",
    "+callbacks.progress.lines=100000",
    "evaluation.temperatures=[0]",
    "evaluation.max_new_tokens=8",
]
SPLIT = ("placement=split", "placement.targets=1")
SOON = 29.0
"""Seconds to the end of everything; on a machine that is not busy it takes three where a failure is seen at once."""
STALE = 6.0
"""``placement.timeout_s`` here."""


class Live:
    """A run of one or two "hosts" on this machine, in sessions of their own.

    Args:
        python: runs it; where processes are killed or stopped, it is not one that forks others in its place.
    """

    def __init__(
        self,
        shelf: Path,
        *overrides: str,
        script: str = "train.py",
        hosts: int = 1,
        logger: str = "csv",
        python: str = "",
        **environment: str,
    ) -> None:
        self.mark = f"DFLASH_LIT_TEST={uuid.uuid4().hex}"
        self.folder = shelf / self.mark[-6:]
        self.folder.mkdir()
        self.shared: set[str] = set()
        variables = {k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR")}
        variables |= {
            "XDG_CACHE_HOME": str(shelf / "cache"),
            "HOME": str(shelf),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        variables |= dict([self.mark.split("=")]) | environment
        if hosts > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
            overrides = (*overrides, f"placement.hosts={hosts}")
        command = [python or sys.executable, script, *LONG, f"logger={logger}", f"hydra.run.dir={self.folder}/run", *overrides]
        self.hosts = []
        for host in range(hosts):
            with (self.folder / f"stderr{host}").open("w") as stderr, (self.folder / f"stdout{host}").open("w") as stdout:
                variables["NODE_RANK"] = str(host)
                started = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            self.hosts.append(started)

    def said(self, host: int = 0) -> str:
        return (self.folder / f"stderr{host}").read_text()

    def errors(self, host: int = 0) -> list[str]:
        return [line for line in self.said(host).splitlines() if line.startswith("error:")]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "run" / "checkpoints" / "last.ckpt"

    def processes(self) -> dict[int, dict[str, str]]:
        """Everything that has been started by the run and is alive, with its environment; the dead have none."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (environment := (folder / "environ").read_bytes()):
                    found[int(folder.name)] = dict(
                        line.split("=", 1) for line in environment.decode().split("\0") if "=" in line
                    )
        return found

    def pid(self, local_rank: int, host: int = 0) -> int:
        if local_rank == 0:
            return self.hosts[host].pid
        wanted = {"DFLASH_LIT_LOCAL_RANK": str(local_rank), "DFLASH_LIT_HOST": str(host)}
        (pid,) = (pid for pid, variables in self.processes().items() if wanted.items() <= variables.items())
        return pid

    def until(self, pattern: str, within: float = 240) -> re.Match[str]:
        """Wait until rank 0's host says something. Generous: other tests share the machine."""
        deadline = time.monotonic() + within
        while (match := re.search(pattern, self.said())) is None:
            assert time.monotonic() < deadline, self.said()[-3000:]
            assert self.hosts[0].poll() is None, self.said()[-3000:]
            time.sleep(0.02)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                self.shared |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        return match

    def ended(self, within: float, *codes: int) -> float:
        """Seconds until nothing is left of the run, after which nothing has to be left on the disk and in memory, either."""
        began = time.monotonic()
        while self.processes():
            assert time.monotonic() - began < within, (self.said()[-3000:], self.processes().keys())
            time.sleep(0.05)
            for host in self.hosts:
                host.poll()
        seconds = time.monotonic() - began
        assert [host.wait() for host in self.hosts] == list(codes), self.said()[-3000:]
        assert not [name for name in self.shared if Path(name).exists()]
        return seconds

    def leaves_no_rows(self) -> None:
        assert not list(self.folder.rglob(".rows"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@contextlib.contextmanager
def live(shelf: Path, *overrides: str, **settings: object) -> Iterator[Live]:
    run = Live(shelf, *overrides, **settings)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in run.hosts:
            host.wait()


def test_ctrl_c_then_sigterm_then_to_the_end(shelf: Path) -> None:
    """Each run goes on where the one before has stopped; the last ends inside an epoch, with short and first validations."""
    drafters = (*SPLIT, "placement.drafters=2")
    with live(shelf, *drafters, "placement.timeout_s=4") as run:
        run.until("step 3/")
        os.killpg(run.pid(0), signal.SIGSTOP)  # whoever is stopped together goes on together
        time.sleep(6)
        before = run.said().count("step ")
        os.killpg(run.pid(0), signal.SIGCONT)
        while run.said().count("step ") < before + 3:
            assert run.hosts[0].poll() is None, run.said()[-3000:]
            time.sleep(0.02)
        os.killpg(run.pid(0), signal.SIGINT)  # as a terminal does
        run.ended(SOON, 130)
        assert f"interrupted; ckpt_path={run.checkpoint} goes on from here" in run.said()
        assert run.said().count("stopping after this step") == 1
        last = int(re.findall(r"step (\d+)/", run.said())[-1])
        assert torch.load(run.checkpoint, weights_only=True)["global_step"] == last
        assert not run.errors()
        assert "Traceback" not in run.said()
        run.leaves_no_rows()
    slow = {"script": "tests/preemption/slow.py", "SLOW": "validation:0.3"}
    with live(shelf, "placement.drafters=2", f"ckpt_path={run.checkpoint}", **slow) as again:  # targets may move in between
        assert int(again.until(r"step (\d+)/")[1]) == last + 1
        again.until("slow validation")  # of many batches
        os.kill(again.pid(1), signal.SIGTERM)  # one that is not rank 0
        again.ended(SOON, 0)
        assert f"stopped by SIGTERM; ckpt_path={again.checkpoint} goes on from here" in again.said()
        last = int(re.findall(r"step (\d+)/", again.said())[-1])
        assert not again.errors()
        assert "Traceback" not in again.said()
    limits = [f"trainer.max_steps={last + 2}", "trainer.limit_val_batches=1", "trainer.num_sanity_val_steps=2"]
    with live(shelf, *drafters, f"ckpt_path={again.checkpoint}", *limits, python=forked_python()) as rest:
        rest.ended(240, 0)
        assert re.findall(r"step (\d+)/", rest.said()) == [str(last + 1), str(last + 2)]
        rest.leaves_no_rows()


def test_a_killed_target_and_then_of_the_resumed_run_a_killed_drafter(shelf: Path) -> None:
    with live(shelf, *SPLIT, "placement.drafters=2", logger="wandb", WANDB_MODE="offline") as run:
        run.until("step 3/")
        os.kill(run.pid(2), signal.SIGKILL)
        run.ended(SOON, 1)
        assert run.errors() == ["error: rank 2 (target, host 0) was killed by SIGKILL"]
        assert "Traceback" not in run.said()
        run.leaves_no_rows()
        saved = torch.load(run.checkpoint, weights_only=True)["global_step"]
    with live(shelf, *SPLIT, "placement.drafters=2", f"ckpt_path={run.checkpoint}", python=forked_python()) as resumed:
        assert int(resumed.until(r"step (\d+)/")[1]) == saved + 1
        os.kill(resumed.pid(1), signal.SIGKILL)
        resumed.ended(SOON, 1)
        assert resumed.errors() == ["error: rank 1 (drafter, host 0) was killed by SIGKILL"]
        assert "Traceback" not in resumed.said()
        resumed.leaves_no_rows()


def test_rank_0_killed(shelf: Path) -> None:
    """Another process of its host has to speak."""
    with live(shelf, "placement.drafters=2") as run:
        run.until("step 3/")
        os.kill(run.pid(0), signal.SIGKILL)
        run.ended(SOON, -signal.SIGKILL)
        assert run.errors() == ["error: rank 0 (drafter, host 0) is gone: it was killed or has crashed"]
        assert "Traceback" not in run.said()


@pytest.mark.parametrize(
    ("overrides", "local_rank", "error", "code"),
    [
        (SPLIT, 1, "rank 1 (target, host 0) has not been heard of for 6 s", 1),
        (("placement.drafters=2",), 1, "rank 1 (drafter, host 0) has not been heard of for 6 s", 1),
        (SPLIT, 0, "rank 0 (drafter, host 0) has not answered for 6 s", -signal.SIGKILL),
    ],
    ids=["target", "drafter", "rank 0"],
)
def test_a_stopped_rank(shelf: Path, overrides: tuple[str, ...], local_rank: int, error: str, code: int) -> None:
    with live(shelf, *overrides, f"placement.timeout_s={STALE}") as run:
        run.until("step 3/")
        os.kill(run.pid(local_rank), signal.SIGSTOP)
        assert run.ended(SOON, code) > STALE - 1
        assert run.errors() == [f"error: {error}: it is stopped, or its host is gone"]
        assert "Traceback" not in run.said()
        if local_rank:
            run.leaves_no_rows()


@pytest.mark.parametrize(
    ("overrides", "fault", "error"),
    [
        (SPLIT, "forward:1", "rank 1 (target, host 0)"),
        (("placement.drafters=2",), "step:0", "rank 0 (drafter, host 0)"),
        (("placement.drafters=2",), "callback:1", "rank 1 (drafter, host 0)"),
    ],
    ids=["target", "rank 0's step", "a callback on rank 1"],
)
def test_a_rank_that_raises(shelf: Path, overrides: tuple[str, ...], fault: str, error: str) -> None:
    """Its traceback is there, once, and the line that says whose it is."""
    with live(shelf, *overrides, script="tests/placement/faulty.py", python=forked_python(), FAULT=fault) as run:
        run.until("planted")
        run.ended(SOON, 1)
        assert run.errors() == [f"error: {error} failed: ArithmeticError: planted: 1 + 1 = 3"]
        assert run.said().count("Traceback") == 1
        run.leaves_no_rows()


@pytest.mark.parametrize(
    ("signum", "overrides", "who"),
    [
        (signal.SIGKILL, SPLIT, "rank 2 (drafter, host 1) and all others of host 1 have"),
        (signal.SIGSTOP, (), "rank 1 (drafter, host 1) has"),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_host(shelf: Path, signum: signal.Signals, overrides: tuple[str, ...], who: str) -> None:
    python = forked_python() if signum == signal.SIGKILL else ""
    with live(shelf, *overrides, f"placement.timeout_s={STALE}", hosts=2, python=python) as run:
        run.until("step 3/")
        os.killpg(run.hosts[1].pid, signum)
        began = time.monotonic()
        assert run.hosts[0].wait(SOON) == 1
        assert time.monotonic() - began > STALE - 1
        assert run.errors() == [f"error: {who} not been heard of for 6 s: it is stopped, or its host is gone"]
        assert "Traceback" not in run.said()
        run.leaves_no_rows()
        # A host that comes back finds nothing to do.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.hosts[1].pid, signal.SIGCONT)
        run.ended(SOON, 1, -signal.SIGKILL if signum == signal.SIGKILL else 1)


def test_early_stopping(shelf: Path) -> None:
    early = "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 1, min_delta: 1000}"
    with live(shelf, *SPLIT, "placement.drafters=2", early, python=forked_python()) as run:
        run.ended(240, 0)
        assert re.findall(r"step (\d+)/", run.said())[-1] == "4"
        assert (run.folder / "run" / "summary.json").is_file()


def test_a_second_ctrl_c_does_not_wait_for_a_step_that_hangs(shelf: Path) -> None:
    with live(shelf, *SPLIT) as run:
        run.until("step 3/")
        os.kill(run.pid(1), signal.SIGSTOP)
        time.sleep(3)  # until what has been served already is used up
        os.killpg(run.pid(0), signal.SIGINT)
        run.until("once more to stop at once", within=10)
        os.killpg(run.pid(0), signal.SIGINT)
        run.ended(SOON, 130)
        assert "interrupted; ckpt_path=RUN/checkpoints/last.ckpt goes on from the last checkpoint" in run.said()
        assert not run.errors()


def test_a_signal_to_all_while_responses_are_made(shelf: Path) -> None:
    many = ["data.train_prompts=600", "data.response_tokens=200", "data.responses_per_batch=8"]
    with live(shelf, *SPLIT, *many, f"data.cache_dir={shelf}/other", python=forked_python()) as run:
        run.until("responses:")
        time.sleep(1)
        os.killpg(run.pid(0), signal.SIGUSR1)  # as SLURM does
        run.ended(SOON, 0)
        assert "stopped by SIGUSR1 before there was anything to save" in run.said()
        assert not run.errors()
        assert "Traceback" not in run.said()
