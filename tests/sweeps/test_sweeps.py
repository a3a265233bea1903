"""Sweeps as a user runs them: real jobs, and what they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.sweeps.outcome import Outcome, read_outcomes
from tests.fork_server import forked_python

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "debug=fast",
    "trainer.threads=1",
    "data.responses_per_batch=32",
    "callbacks.acceptance=null",
    "evaluation.temperatures=[]",
    "evaluation.prompts=1",
    "logger=csv",
]


def environment(shelf: Path) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR")}
    own = {"XDG_CACHE_HOME": str(shelf / "cache"), "DFLASH_LIT_RUNS": str(shelf / "runs"), "HOME": str(shelf)}
    # The callbacks of these tests are found in every process.
    return {**keep, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def sweep(shelf: Path, folder: Path, *overrides: str, python: str = "") -> subprocess.CompletedProcess[str]:
    command = [python or forked_python(), "train.py", "-m", *SMALL, f"hydra.sweep.dir={folder}", *overrides]
    return subprocess.run(command, cwd=ROOT, env=environment(shelf), capture_output=True, text=True, timeout=400, check=False)


def states(folder: Path) -> list[str]:
    return [outcome.state for outcome in read_outcomes(folder)]


def trials(folder: Path) -> list[Any]:
    optuna = pytest.importorskip("optuna", reason="the extra [sweeps] is not installed")
    return optuna.load_study(study_name="dflash_lit", storage=f"sqlite:///{folder}/study.db").trials


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def split(shelf: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Three seeds, a target process and a drafter's each; the second one fails while it trains."""
    folder, spied = shelf / "split", shelf / "children.jsonl"
    done = sweep(
        shelf,
        folder,
        "seed=1,2,3",
        "placement=split",
        f"+hydra.callbacks.spy={{_target_: tests.sweeps.spied_children.OfJobs, file: {spied}}}",
        f"+callbacks.spy={{_target_: tests.sweeps.spied_children.WhileTraining, file: {spied}}}",
        "+callbacks.fail={_target_: tests.sweeps.failing.FailOfSeed, own: '${seed}', failing: 2}",
    )
    return folder, done


def test_a_failed_job_is_listed_and_stops_nothing(split: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = split
    assert done.returncode == 1, done.stderr[-3000:]
    assert states(folder) == ["done", "failed", "done"]
    assert "sweep: 2 done, 1 failed\n  job 1 (seed=2): rank 0 (drafter, host 0) failed: ArithmeticError: planted" in done.stderr
    assert f"report: {folder}/report.html" in done.stdout
    assert "Sweep: 2 of 3 jobs, best first" in done.stdout
    assert f"--config-dir {folder} --config-name best" in done.stdout
    losses = [json.loads((folder / job / "summary.json").read_text())["train_loss"] for job in ("0", "2")]
    assert losses[0] != losses[1]
    assert "planted" in (folder / "report.html").read_text()


def test_the_processes_of_a_job_are_gone_before_the_next_starts(
    split: tuple[Path, subprocess.CompletedProcess[str]], shelf: Path
) -> None:
    seen = [json.loads(line) for line in (shelf / "children.jsonl").read_text().splitlines()]
    assert seen == [["start", 0], ["train", 1], ["end", 0]] * 3


def test_the_best_config_trains_the_best_job_again(split: tuple[Path, subprocess.CompletedProcess[str]], shelf: Path) -> None:
    folder, _ = split
    again = shelf / "again"
    command = [forked_python(), "train.py", "--config-dir", str(folder), "--config-name", "best", f"hydra.run.dir={again}"]
    done = subprocess.run(
        [*command, "~callbacks.spy"], cwd=ROOT, env=environment(shelf), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours = json.loads((again / "summary.json").read_text())["val/loss"]
    assert ours in [json.loads((folder / job / "summary.json").read_text())["val/loss"] for job in ("0", "2")]


def test_wrong_input_to_all_jobs_starts_none(shelf: Path) -> None:
    done = sweep(shelf, shelf / "never", "seed=1,2", "trainer.maxsteps=3")
    assert done.returncode == 2
    assert next(line for line in done.stderr.splitlines() if "HYDRA" not in line).startswith("error: ")
    assert "maxsteps" in done.stderr
    assert states(shelf / "never") == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("sweep=tpe", "hydra.sweeper.trials=0"), "error: hydra.sweeper.trials=0: must be at least 1"),
        (("sweep=tpe", "optimized_metric=null"), "error: optimized_metric=null: name a key of summary.json"),
        (
            ("sweep=tpe", "optimizer.lr=0.01", "objective=soft", "drafter.feature_noise=0"),
            "error: hydra.sweeper.params: nothing to search",
        ),
        (("sweep=tpe", "optimizer.lr=interval(2,1)"), "error: optimizer.lr=interval(2,1): give an interval whose end"),
        (("sweep=tpe", "objective=dflash,nosuch"), "error: In 'train': Could not find 'objective/nosuch'"),
    ],
    ids=["trials", "metric", "space", "interval", "choice"],
)
def test_a_search_that_cannot_be_is_refused(overrides: tuple[str, ...], says: str, shelf: Path) -> None:
    pytest.importorskip("optuna", reason="the extra [sweeps] is not installed")
    done = sweep(shelf, shelf / "refused", *overrides)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (shelf / "refused" / "study.db").exists()


def test_a_search_gives_up_what_is_behind_and_goes_on_where_it_was_stopped(shelf: Path) -> None:
    """Of two drafters and a target, so that all ranks have to give up alike."""
    pytest.importorskip("optuna", reason="the extra [sweeps] is not installed")
    folder = shelf / "search"
    # The seed tries the first rate first; with the second one nothing is learnt.
    search = ["sweep=tpe", "optimizer.lr=0.02,1e-12", "hydra.sweeper.seed=2", "hydra.sweeper.trials=2"]
    several = [*search, "placement=split", "placement.drafters=2", "data.rows_per_batch=2", "seed=1", "trainer.val_every=1"]
    several.append("callbacks.prune.startup_trials=1")
    command = [forked_python(), "train.py", "-m", *SMALL, *several, f"hydra.sweep.dir={folder}", "trainer.max_steps=4000"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(shelf), stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if re.match(r"train$", line):
                first.send_signal(signal.SIGTERM)
                break
        rest = first.stderr.read()
        first.wait(timeout=60)
    assert first.returncode == 0, rest
    assert states(folder) == ["stopped"]
    assert [trial.state.name for trial in trials(folder)] == ["RUNNING"]

    done = sweep(shelf, folder, *several)
    assert done.returncode == 0, done.stderr[-3000:]
    found = trials(folder)
    # What was stopped is tried again, and not counted.
    assert [trial.state.name for trial in found] == ["FAIL", "COMPLETE", "PRUNED"]
    assert [trial.params["optimizer.lr"] for trial in found] == ["0.02", "0.02", "1e-12"]
    assert "sweep: 1 done, 1 pruned, 1 stopped" in done.stderr
    behind = read_outcomes(folder)[2]
    assert behind.step is not None
    assert behind.step < 4
    assert not (folder / "2" / "summary.json").exists()  # it was not decoded
    assert not (folder / "2" / "drafter").exists()

    again = sweep(shelf, folder, *several)
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(trials(folder)) == 3  # nothing was left to do


@pytest.mark.parametrize(("launcher", "plugin"), [("parallel", "hydra_joblib_launcher"), ("local", "hydra_submitit_launcher")])
def test_launchers(launcher: str, plugin: str, shelf: Path) -> None:
    """Jobs in processes of their own, two at a time; one fails before it begins."""
    pytest.importorskip(f"hydra_plugins.{plugin}", reason="the extra [sweeps] is not installed")
    folder = shelf / launcher
    jobs = ("drafter.block_size=8,1", "trainer.max_steps=2", f"hydra/launcher={launcher}")
    done = sweep(shelf, folder, *jobs, python=sys.executable)
    assert done.returncode == 1, done.stderr[-3000:]
    assert states(folder) == ["done", "failed"]
    assert "sweep: 1 done, 1 failed\n  job 1 (drafter.block_size=1): drafter.block_size=1: a block needs" in done.stderr


@pytest.mark.parametrize(
    "search", [(), ("sweep=tpe", "hydra.sweeper.jobs=2", "hydra.sweeper.trials=4")], ids=["plain", "search"]
)
def test_jobs_that_slurm_refuses(search: tuple[str, ...], shelf: Path, tmp_path: Path) -> None:
    """As 22.05 says it. A search loses no trials by it."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra [sweeps] is not installed")
    folder, programs = tmp_path / "sweep", tmp_path / "bin"
    programs.mkdir()
    refusal = "sbatch: error: invalid partition specified: nosuch\nsbatch: error: Batch job submission failed: Invalid partition name specified"
    for name in ("srun", "sbatch"):
        (programs / name).write_text(f"#!/bin/sh\necho '{refusal}' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    command = [
        sys.executable,
        "train.py",
        "-m",
        *SMALL,
        *search,
        f"hydra.sweep.dir={folder}",
        "seed=1,2",
        "hydra/launcher=slurm",
    ]
    for path, says in (
        (
            f"{programs}:{os.environ['PATH']}",
            "sbatch refuses the jobs (invalid partition specified: nosuch Batch job submission failed:",
        ),
        ("/usr/bin:/bin", 'Could not detect "srun"'),
    ):
        if path == "/usr/bin:/bin" and shutil.which("srun", path=path):
            continue  # there is a SLURM here
        variables = environment(shelf) | {"PATH": path}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"error: hydra/launcher=slurm: {says}")
        assert "Traceback" not in done.stderr
    if search:
        assert all(trial.state.name == "RUNNING" or "interrupted" in trial.user_attrs for trial in trials(folder))


def test_what_is_not_installed_is_named(shelf: Path) -> None:
    """Seen by an interpreter that cannot find the packages."""
    hide = "import sys; sys.modules.update(optuna=None, joblib=None, submitit=None); sys.argv[0] = 'train.py'; "
    run = "import runpy; runpy.run_path('train.py', run_name='__main__')"
    for choice, says in (("sweep=tpe", "TPESweeper needs optuna"), ("hydra/launcher=local", "LocalLauncher needs submitit")):
        command = [forked_python(), "-c", hide + run, "-m", *SMALL, "seed=1,2", choice, f"hydra.sweep.dir={shelf / 'hidden'}"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(shelf), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2, done.stderr[-2000:]
        assert says in done.stderr
        assert "pip install 'dflash-lit[sweeps]'" in done.stderr


def test_outcomes_are_read_by_number_and_half_a_file_is_a_killed_job(tmp_path: Path) -> None:
    for job in ("10", "9", "x"):
        (tmp_path / job / ".hydra").mkdir(parents=True)
        Outcome(job, "done", (f"seed={job}",), value=1.0).write(tmp_path / job)
    (tmp_path / "9" / "job.json").write_text("{")
    (tmp_path / "9" / ".hydra" / "overrides.yaml").write_text("- seed=9\n")
    found = read_outcomes(tmp_path)
    assert [one.job for one in found] == ["9", "10", "x"]
    assert found[0].state == "failed"
    assert found[0].overrides == ("seed=9",)
    assert found[1] == Outcome("10", "done", ("seed=10",), value=1.0)
    for damaged in (
        '{"job": "10", "state": "dome", "overrides": []}',
        '{"job": "10", "state": "done", "overrides": [], "value": "1"}',
        "[" * 99_999,
    ):
        (tmp_path / "10" / "job.json").write_text(damaged)
        assert read_outcomes(tmp_path)[1].error == "its job.json cannot be read: a disk, or a program that wrote there"
