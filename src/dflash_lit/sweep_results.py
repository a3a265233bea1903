"""The jobs of a sweep and their results, read from what Hydra and the jobs left in their folders.

Nothing has to have ended well: it can be read while a sweep runs, and after it was killed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash_lit.errors import UserError
from dflash_lit.files import read_json, refuse_no_file
from dflash_lit.report_page import number
from dflash_lit.sweeps.outcome import Outcome, override_words, read_outcome
from dflash_lit.trained import SUMMARY

__all__ = ["Setting", "Sweep", "SweepJob", "is_sweep", "load_config", "read_sweep", "scalars", "settings"]

DEFAULT_METRICS = ("val/tree_eal@64", "val/chain_eal")
"""Of a sweep without ``optimized_metric``: the first that any job has."""


@dataclass(frozen=True)
class SweepJob:
    """One job's folder.

    Attributes:
        overrides: key -> value as given, ``+`` and ``~`` left out of the key.
        summary: of ``summary.json``; None if there is none, or none that can be read, and of a job that did not end well.
        outcome: of ``job.json``; None while the job runs, or if its process was killed.
    """

    folder: Path
    overrides: Mapping[str, str]
    summary: Mapping[str, Any] | None
    outcome: Outcome | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def status(self) -> str:
        """How it ended, as far as its folder says."""
        if self.outcome is not None:
            return self.outcome.state
        return "failed" if self.summary is None else "done"

    @property
    def reason(self) -> str:
        """Why it has no result."""
        if self.outcome is None:
            return "it still runs, or was killed"
        if self.outcome.state == "pruned":
            return f"given up at step {self.outcome.step}, at {self.outcome.value}"
        return self.outcome.error or ""

    def value(self, metric: str) -> float | None:
        """A finite number of the summary."""
        return number(self.summary or {}, metric)


@dataclass(frozen=True)
class Setting:
    """Jobs that differ in nothing but the seed.

    Attributes:
        values: of the metric, of the jobs that have it.
        jobs: how many there are.
    """

    overrides: Mapping[str, str]
    values: tuple[float, ...]
    jobs: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Sample standard deviation over seeds; NaN for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Sweep:
    """All jobs of a sweep.

    Attributes:
        metric: key of ``summary.json`` that the jobs are compared by; larger is better.
        asked: whether the config named it (``optimized_metric``).
        varied: override keys whose values differ between jobs, in the order in which they were given.
    """

    folder: Path
    jobs: tuple[SweepJob, ...]
    metric: str
    asked: bool
    varied: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> list[SweepJob]:
        """They failed, were given up or stopped, or still run."""
        return [job for job in self.jobs if job.summary is None]

    @property
    def ranked(self) -> list[SweepJob]:
        """Jobs with the metric, best first."""
        with_metric = [job for job in self.jobs if job.value(self.metric) is not None]
        return sorted(with_metric, key=lambda job: job.value(self.metric) or 0.0, reverse=True)

    @property
    def best(self) -> SweepJob | None:
        return next(iter(self.ranked), None)


def is_sweep(folder: str | Path) -> bool:
    """Whether folders of Hydra jobs lie in it, and it is no job itself."""
    folder = Path(folder)
    return not (folder / ".hydra").exists() and bool(_job_folders(folder))


def read_sweep(folder: str | Path) -> Sweep:
    """The jobs below a sweep's folder, in the order of their numbers.

    Raises:
        UserError: if there are none.
    """
    folder = Path(folder)
    jobs = tuple(_job(path) for path in _job_folders(folder))
    if not jobs:
        raise UserError(f"{folder}: holds no jobs of a sweep (folders with .hydra in them); give what hydra.sweep.dir was")
    asked = next((metric for job in jobs if (metric := _asked_metric(job.folder))), None)
    found = next((m for m in DEFAULT_METRICS if any(job.value(m) is not None for job in jobs)), DEFAULT_METRICS[0])
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    varied = tuple(key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1)
    return Sweep(folder, jobs, asked or found, bool(asked), varied)


def settings(sweep: Sweep) -> list[Setting]:
    """Jobs by what was varied besides the seed, best mean first; settings without a value last."""
    groups: dict[tuple[str | None, ...], list[SweepJob]] = {}
    keys = [key for key in sweep.varied if key != "seed"]
    for job in sweep.jobs:
        groups.setdefault(tuple(job.overrides.get(key) for key in keys), []).append(job)
    made = [
        Setting(
            {key: value for key, value in zip(keys, values, strict=True) if value is not None},
            tuple(value for job in jobs if (value := job.value(sweep.metric)) is not None),
            len(jobs),
        )
        for values, jobs in groups.items()
    ]
    return sorted(made, key=lambda one: one.mean if one.values else -math.inf, reverse=True)


def scalars(jobs: Sequence[SweepJob]) -> list[str]:
    """Keys of the summaries that hold a number anywhere, in their order."""
    keys = dict.fromkeys(key for job in jobs for key in job.summary or {})
    return [key for key in keys if any(job.value(key) is not None for job in jobs)]


def _job(folder: Path) -> SweepJob:
    outcome = read_outcome(folder)
    # A job may fail after it has written its summary, as in what is done with it.
    summary = _summary(folder / SUMMARY) if outcome is None or outcome.state == "done" else None
    return SweepJob(folder, _overrides(folder / ".hydra" / "overrides.yaml"), summary, outcome)


def _job_folders(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.glob("*/.hydra") if path.is_dir()]
    return sorted(found, key=lambda path: (int(path.name) if path.name.isdecimal() else math.inf, path.name))


def load_config(path: Path) -> DictConfig:
    needed = "the job's config is needed to write best.yaml"
    refuse_no_file(path, needed)
    try:
        found = OmegaConf.load(path)
    except Exception as error:  # of the file system, of YAML, of OmegaConf
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); {needed}") from None
    if not isinstance(found, DictConfig):
        raise UserError(f"{path}: holds no config; {needed}")
    return found


def _asked_metric(folder: Path) -> str | None:
    try:
        found = load_config(folder / ".hydra" / "config.yaml").get("optimized_metric")
    except UserError:  # half a file of a job that was killed: the others say it, too
        return None
    return found if isinstance(found, str) else None


def _overrides(path: Path) -> dict[str, str]:
    try:
        refuse_no_file(path, "")
        lines = override_words(OmegaConf.load(path))
    except Exception:  # half a file of a job that was killed, which is listed nevertheless
        return {}
    pairs = (line.partition("=") for line in lines)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path, "")
    except UserError:
        return None
    return found if isinstance(found, dict) else None
