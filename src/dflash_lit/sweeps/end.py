"""The beginning and the end of a sweep, as Hydra calls them: is all installed; what failed, and the report."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from dflash_lit.commands import exits_on_user_error
from dflash_lit.errors import UserError
from dflash_lit.placement.started import how_started
from dflash_lit.sweeps.outcome import Outcome, read_outcomes

__all__ = ["SweepEnd", "closing_lines", "failed_jobs"]

_NEEDED = {"hydra_joblib_launcher": "joblib", "hydra_submitit_launcher": "submitit", "dflash_lit_tpe": "optuna"}
"""A word in the class of a sweeper or launcher, and the package that it is of no use without."""

_failed: list[str] = []


def failed_jobs() -> list[str]:
    """Names of the jobs of this process's sweep that failed."""
    return list(_failed)


class SweepEnd(Callback):
    """Hydra's callback (``hydra.callbacks.sweep``); nothing for a single run."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse what would fail in every job."""
        with exits_on_user_error():  # by an exit, as Hydra makes warnings of a callback's errors
            _failed.clear()
            if how_started().others_wait:
                raise UserError(
                    "-m: each job of a sweep starts its own processes, on one host: run it as `python train.py -m ...`"
                )
            for kind in ("sweeper", "launcher"):
                _installed(kind, str(config.hydra[kind]._target_))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """List the jobs that have no result, write the report, and print the best."""
        folder = Path(config.hydra.sweep.dir)
        outcomes = read_outcomes(folder)
        _failed.extend(one.job for one in outcomes if one.state == "failed")
        for line in closing_lines(outcomes):
            print(line, file=sys.stderr)
        try:
            from dflash_lit.sweep_report import ranking, sweep_report
            from dflash_lit.sweep_results import read_sweep

            report = sweep_report(folder)
            if (table := ranking(read_sweep(folder))) is not None:
                Console().print(table)
                print(f"the best again: python train.py --config-dir {shlex.quote(str(folder))} --config-name best")
            print(f"report: {report}")
        except Exception as error:  # drawing must not make a failure of jobs that are done
            print(f"warning: no report of {folder}: {type(error).__name__}: {error}", file=sys.stderr)


def closing_lines(outcomes: list[Outcome]) -> list[str]:
    """A line of counts, and one for each failed job, by the overrides in which jobs differ."""
    counts: Counter[str] = Counter(one.state for one in outcomes)
    said = ", ".join(f"{counts[state]} {state}" for state in ("done", "pruned", "failed", "stopped") if counts[state])
    common = set.intersection(*(set(one.overrides) for one in outcomes)) if len(outcomes) > 1 else set()
    lines = [f"sweep: {said or 'no job has ended'}"]
    for one in outcomes:
        if one.state == "failed":
            lines.append(f"  job {one.job} ({' '.join(word for word in one.overrides if word not in common)}): {one.error}")
    return lines


def _installed(kind: str, target: str) -> None:
    for word, package in _NEEDED.items():
        if f".{word}." not in target:
            continue
        for module in (package, f"hydra_plugins.{word}"):
            if find_spec(module) is None:
                raise UserError(
                    f"hydra.{kind}: {target.rsplit('.', 1)[-1]} needs {module.split('.')[-1].replace('_', '-')}, which is not "
                    "installed: pip install 'dflash-lit[sweeps]'"
                )
