"""A run that is told to stop, wherever it is: how it ends, how soon, and what goes on; with SLURM's part played by a program."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dflash_lit.errors import Interrupted, UserError
from dflash_lit.ranks import _or_again
from dflash_lit.requeue import job_id, requeue, run_folder, wanted
from dflash_lit.stopping import Stopping, duration
from tests.test_conf import configured, make_plan
from tests.test_train import ROOT, summary_of

SMALL = (
    "debug=fast trainer.threads=1 data.responses_per_batch=32 data.rows_per_batch=1 callbacks.acceptance=null logger=csv "
    "evaluation.temperatures=[0] evaluation.budgets=[] evaluation.max_new_tokens=8"
).split()
SOON = 40.0
"""Seconds; far less where the machine is not busy."""


class Shelf:
    """Where runs are, and a ``scontrol`` that writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.told = folder, folder / "runs", folder / "scontrol.txt"
        programs = folder / "bin"
        programs.mkdir()
        (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{self.told}"\n')
        (programs / "srun").write_text("#!/bin/sh\nexit 1\n")  # a host of a cluster
        for program in programs.iterdir():
            program.chmod(0o755)
        self.variables = {k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR")}
        self.variables |= {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DFLASH_LIT_RUNS": str(self.runs),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),  # a script in a folder does not see train.py
            "PATH": f"{programs}:{os.environ['PATH']}",
        }

    def run(
        self, *overrides: str, stop: signal.Signals | None = None, slow: str = "none:0", **environment: str
    ) -> tuple[int, str]:
        """Exit code and stderr; once the slow part has begun the run is told to stop."""
        command = [sys.executable, "tests/preemption/slow.py", *SMALL, *overrides]
        variables = {**self.variables, "SLOW": slow, **environment}
        said = ""
        with subprocess.Popen(
            command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                said += line
                if stop is not None and "slow " in line:
                    began = time.monotonic()
                    process.send_signal(stop)
                    said += process.stderr.read()
                    process.wait(SOON)
                    assert time.monotonic() - began < SOON
                    break
            process.wait(SOON)
        assert "Traceback" not in said, said[-3000:]
        return process.returncode, said


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("preemption"))


def weights(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def validations(folder: Path) -> list[tuple[str, list[str]]]:
    with open(folder / "csv" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted(name for name in rows[0] if name.startswith("val/"))
    return [(row["step"], [row[name] for name in names]) for row in rows if row["val/loss"]]


def test_a_slurm_job_that_is_stopped_again_and_again(shelf: Shelf) -> None:
    """In a validation, and while the drafter decodes; each time it is the same command, as of SLURM."""
    # One task of a batch job, which are to be two.
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "drafter",
        "ENVIRONMENT": "BATCH",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "0"}

    code, said = shelf.run(stop=signal.SIGUSR1, slow="validation:0.5", **job)
    (folder,) = [path for path in shelf.runs.iterdir() if path.name != ".slurm"]
    last = folder / "checkpoints" / "last.ckpt"
    queued = "SLURM job 77 is in the queue again, and goes on by itself"
    assert (code, said.splitlines()[-1]) == (0, f"stopped by SIGUSR1; ckpt_path={last} goes on from here; {queued}")
    assert said.count("slow validation") == 1  # of several batches
    assert shelf.told.read_text() == "requeue 77\n"

    code, said = shelf.run(stop=signal.SIGTERM, slow="decoding:0.5", **job | {"SLURM_RESTART_COUNT": "1"})
    assert (code, said.splitlines()[-1]) == (0, f"stopped by SIGTERM; ckpt_path={last} goes on from here")
    assert f"started again by SLURM; going on from ckpt_path={last}" in said
    assert re.findall(r"step (\d)/", said) == ["3", "4"]
    assert not (folder / "summary.json").exists()
    assert shelf.told.read_text() == "requeue 77\n"  # SIGTERM is for SLURM to follow up

    code, said = shelf.run(**job | {"SLURM_RESTART_COUNT": "2"})
    assert code == 0, said[-3000:]
    assert not re.findall(r"step (\d)/", said)
    assert summary_of(folder)["steps"] == 4
    assert summary_of(folder)["val/chain_eal"] > 0
    assert [path for path in shelf.runs.iterdir() if path.name != ".slurm"] == [folder]

    # The same to the last bit as without any of this.
    whole = shelf.folder / "whole"
    code, said = shelf.run(f"hydra.run.dir={whole}")
    assert code == 0
    assert "srun" not in said  # Lightning would have it used
    assert all(torch.equal(value, weights(folder)[name]) for name, value in weights(whole).items())
    assert validations(folder) == validations(whole)
    assert [step for step, _ in validations(whole)] == ["1", "3"]


def test_a_step_that_does_not_end_is_ended(shelf: Shelf) -> None:
    began = time.monotonic()
    code, said = shelf.run("trainer.save_within_s=1", stop=signal.SIGTERM, slow="training:600")
    assert code == 1
    assert said.splitlines()[-1].startswith(
        "error: not stopped within 1 s of SIGTERM (trainer.save_within_s), and not saved; ckpt_path="
    )
    assert time.monotonic() - began < 100


def test_a_sanity_check_is_left_at_once(shelf: Shelf) -> None:
    code, said = shelf.run("trainer.num_sanity_val_steps=2", stop=signal.SIGTERM, slow="validation:0.5")
    assert (code, said.splitlines()[-1]) == (0, "stopped by SIGTERM before there was anything to save")


# -- signals in this process


@contextmanager
def listening(stops: Stopping) -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)}
    try:
        with stops.listening():
            yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_the_time_limit_is_one_more_signal() -> None:
    stops = Stopping()
    with listening(stops):
        stops.begin(limit_s=60, max_time="00:00:00:01", checkpoint="a.ckpt", per_job=False)
        with pytest.raises(Interrupted) as caught:
            time.sleep(30)
    assert (caught.value.signal, caught.value.checkpoint, caught.value.alone) == (signal.SIGALRM, "a.ckpt", True)


def test_held_back_in_training_and_obeyed_after_it() -> None:
    stops = Stopping()
    with listening(stops):
        stops.begin(limit_s=60, max_time=None, checkpoint=None, per_job=False)
        stops.hold()
        for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # launchers send several
            os.kill(os.getpid(), signum)
        assert stops.signal == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):  # a person who does not want to wait
            os.kill(os.getpid(), signal.SIGINT)
        stops.release()
        with pytest.raises(Interrupted):
            stops.obey()
        os.kill(os.getpid(), signal.SIGTERM)  # no news


class Told:
    """Told to stop while it is deleted, where Python lets no exception out."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __del__(self) -> None:
        os.kill(os.getpid(), self.signum)
        time.sleep(0)


@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGTERM, Interrupted), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_in_the_middle_of_a_deletion_is_not_lost(
    signum: int, kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    stops = Stopping()
    hook = sys.unraisablehook
    with listening(stops):
        told = [Told(signum)]
        told.clear()  # no exception leaves this line
        with pytest.raises(kind):
            time.sleep(5)
    assert sys.unraisablehook is hook
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("00:11:30:00", 41400), ("11.5", 41400), ("1:00:00:01", 86401)])
def test_a_duration(text: str, seconds: float) -> None:
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.max_time='11:30'", "trainer.max_time='11:30': give DD:HH:MM:SS"),
        ("trainer.max_time='0'", "trainer.max_time='0': give DD:HH:MM:SS"),
        ("trainer.max_time='99999999999999999999'", "trainer.max_time='99999999999999999999': give DD:HH:MM:SS"),
        (
            "trainer.max_time='99999999999999999999:00:00:00'",
            "trainer.max_time='99999999999999999999:00:00:00': give DD:HH:MM:SS",
        ),
        ("trainer.save_within_s=0", "trainer.save_within_s=0: must be positive"),
        ("trainer.requeue=true", "trainer.requeue=true: this is no SLURM batch job"),
        ("placement.message_limit_gib=0", "placement.message_limit_gib=0: must be at least 0.001"),
        ("placement.interface=eth77", "placement.interface='eth77': this host has lo"),
    ],
)
def test_wrong_settings_name_the_key(override: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match=re.escape(says)):
        make_plan(configured(override))


# -- SLURM


@pytest.fixture
def in_job(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    monkeypatch.setenv("PATH", shelf.variables["PATH"])
    return monkeypatch


def test_which_job(in_job: pytest.MonkeyPatch) -> None:
    assert (job_id(), wanted(None), wanted(False)) == ("12", True, False)
    in_job.setenv("SLURM_ARRAY_JOB_ID", "11")
    in_job.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_id() == "11_3"
    in_job.setenv("SLURM_JOB_NAME", "bash")  # sbatch --job-name=bash
    assert wanted(None)
    in_job.setenv("SLURM_JOB_NAME", "drafter")  # salloc --job-name=drafter, srun --job-name=drafter
    in_job.delenv("ENVIRONMENT")
    assert (wanted(None), wanted(True)) == (False, True)  # the latter where --export has kept the variable from srun's tasks


def test_a_run_that_had_ended_when_its_job_was_requeued(
    in_job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_job.setenv("SLURM_RESTART_COUNT", "1")
    in_job.setenv("DFLASH_LIT_RUNS", str(tmp_path))
    folder = tmp_path / "one"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    composed = OmegaConf.create({"paths": {"output_dir": str(folder)}, "ckpt_path": None, "trainer": {"requeue": None}})

    def run() -> float:
        assert composed.ckpt_path == str(folder / "checkpoints" / "last.ckpt")
        return 1.0

    assert _or_again(composed, run) == 1.0
    assert (run_folder("new"), run_folder("newer")) == (str(folder), str(folder))
    (folder / "summary.json").touch()
    assert _or_again(composed, run) is None
    assert "this run has ended before SLURM started the job again" in capsys.readouterr().err
    note = next((tmp_path / ".slurm").iterdir())
    for torn in ("", "\0" * 20, "outputs/one", "\ufefffolder"):  # as a host that lost its power leaves it
        note.write_text(torn)
        with pytest.raises(UserError, match=rf"{note.name}: holds no folder of a run; name this job's with hydra\.run\.dir"):
            run_folder("new")
    in_job.setattr("sys.argv", ["train.py", "seed=2"])  # another run of the same script
    assert run_folder("new") == str(tmp_path / "new")


def test_a_job_that_slurm_does_not_requeue(in_job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Requested operation is presently disabled' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    in_job.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        UserError, match=r"job 12 was not requeued .Requested operation is presently disabled.; queue it by hand"
    ):
        requeue()
    in_job.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"job 12 was not requeued .*scontrol"):
        requeue()
