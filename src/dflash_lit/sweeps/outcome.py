"""What a job of a sweep came to, in a file of its folder: whichever process it ran in, and however it ended."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dflash_lit.commands import one_line, stop_line
from dflash_lit.errors import Interrupted, Pruned, RankError, UserError
from dflash_lit.files import read_json, refuse_no_file, write_whole
from dflash_lit.trained import SUMMARY

__all__ = ["FILE", "Outcome", "override_words", "read_outcome", "read_outcomes", "run_job"]

FILE = "job.json"
_State = Literal["done", "failed", "pruned", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        job: name of its folder.
        state: "stopped": by ``trainer.max_time``, or by a signal, together with the sweep.
        overrides: of the job, as on a command line.
        value: of ``optimized_metric``; of a pruned job the last that was validated; None if there is none.
        step: at which it was pruned.
        error: one line: of a failed job what has happened, of a stopped one what goes on from there.
        seconds: it took.
    """

    job: str
    state: _State
    overrides: tuple[str, ...]
    value: float | None = None
    step: int | None = None
    error: str | None = None
    seconds: float = 0.0

    def write(self, folder: Path) -> None:
        """Completely or not at all."""
        write_whole(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_outcome(folder: Path) -> Outcome | None:
    """None where a job has not ended, or its process was killed. One whose file is damaged counts as failed: it may have."""
    if not os.path.lexists(folder / FILE):
        return None
    try:
        facts = read_json(folder / FILE, "")
        found = Outcome(**{**facts, "overrides": tuple(facts["overrides"])})
        numbers = [value for value in (found.value, found.step, found.seconds) if value is not None]
        texts = [found.job, *found.overrides, *([] if found.error is None else [found.error])]
        if (
            found.state in get_args(_State)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < math.inf for one in numbers)
        ):
            return found
    except (UserError, TypeError, KeyError):
        pass
    return replace(_killed(folder), error=f"its {FILE} cannot be read: a disk, or a program that wrote there")


def read_outcomes(sweep: Path) -> list[Outcome]:
    """Of all jobs of a sweep that is over, by their numbers; what left no word was killed."""
    found = [read_outcome(folder) or _killed(folder) for path in sweep.glob("*/.hydra") if (folder := path.parent)]
    return sorted(found, key=lambda one: (int(one.job) if one.job.isdecimal() else math.inf, one.job))


def override_words(overrides: Any) -> tuple[str, ...]:
    """A list of OmegaConf as it was written: an interpolation in an override is not one of that list."""
    return tuple(str(word) for word in OmegaConf.to_container(overrides) or ())


def _killed(folder: Path) -> Outcome:
    try:
        refuse_no_file(folder / ".hydra" / "overrides.yaml", "")
        overrides = override_words(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
    except Exception:  # killed before it was written
        overrides = ()
    return Outcome(
        folder.name, "failed", overrides, error="its process ended without a word: killed, for want of memory perhaps"
    )


def run_job(job: Callable[[], float | None]) -> float | None:
    """Run a job of the sweep that Hydra is in, and write down what it came to.

    Returns:
        what the job returns; None if it failed, which does not end the sweep, or was pruned.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    for old in (FILE, SUMMARY):  # of a sweep that is run again
        (folder / old).unlink(missing_ok=True)
    began = time.monotonic()

    def write(state: _State, **facts: object) -> None:
        overrides, seconds = override_words(hydra.overrides.task), round(time.monotonic() - began, 1)
        Outcome(folder.name, state, overrides, seconds=seconds, **facts).write(folder)  # type: ignore[arg-type]

    try:
        value = job()
        write("done", value=value if value is not None and math.isfinite(value) else None)
        return value
    except Pruned as pruned:
        print(f"job {folder.name}: pruned at step {pruned.step} ({pruned.metric} = {pruned.value:.3f})", file=sys.stderr)
        write("pruned", value=pruned.value if math.isfinite(pruned.value) else None, step=pruned.step)
    except Exception as error:
        line = _line(error)
        if not isinstance(error, UserError | RankError):
            traceback.print_exception(error)
        print(f"error: job {folder.name}: {line}", file=sys.stderr)
        write("failed", error=line)
    except BaseException as error:
        why = stop_line(error) if isinstance(error, Interrupted) else None
        write("stopped", error=why)
        # The limit is a job's own, and not the sweep's.
        if not isinstance(error, Interrupted) or error.signal != signal.SIGALRM:
            raise
        print(f"job {folder.name}: {why}", file=sys.stderr)
    finally:
        # A failed job's error held its frames, and with them the drafter and the target.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def _line(error: Exception) -> str:
    if isinstance(error, RankError):
        return " ".join(str(error).split())  # what another rank's failure did to this one is not the cause
    line = one_line(error)
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"[:600]
