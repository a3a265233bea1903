"""How long a run will take: what a run of the same shapes took on this machine before, else the rates of a known GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import UserError
from dflash_lit.files import read_json, write_whole
from dflash_lit.placement.forecast import MEASURED, Verdict, expected_rates, flop_per_token
from dflash_lit.watching.progress_line import left_text

if TYPE_CHECKING:
    from dflash_lit.config import TrainConfig
    from dflash_lit.doctor.memory import Recipe
    from dflash_lit.placement.sizes import Sizes
    from dflash_lit.plan import Plan

__all__ = ["Pace", "StepClock", "expected_time", "pace_file", "read_pace", "said_after", "write_pace"]

_STEPS = 10
"""Optimizer steps after which a run of unknown pace says how long it will take."""

_KNOWN_GPU, _KNOWN_WIDTH = "H200", 2048
"""Where :data:`.MEASURED` was measured, and the hidden size from which a target's kernels are about as busy as there."""


@dataclass(frozen=True)
class Pace:
    """Wall seconds of a run's parts.

    Attributes:
        before_s: from its start to its first step: weights, data, compiling.
        step_s: an optimizer step; the first one, which fills caches, is left out where there are others.
        validation_s: a validation, with what is decoded and saved then.
        after_s: from the last step to the summary.
        runs: that ended here so far; what the first one fills caches with does not take the next one's time.
    """

    before_s: float
    step_s: float
    validation_s: float
    after_s: float
    runs: int = 1

    def total_s(self, steps: int, validations: int) -> float:
        return self.before_s + steps * self.step_s + validations * self.validation_s + self.after_s


def pace_file(cfg: TrainConfig, plan: Plan, cache: Path) -> Path:
    """Where the pace of runs with these shapes on this machine is kept, by all that their time hangs on.

    Not the number of steps, which it is asked for; nor seed, learning rate, folders and loggers.
    """
    known: dict[str, Any] = {
        name: asdict(getattr(cfg, name))
        for name in ("target", "drafter", "objective", "data", "placement", "trainer", "evaluation")
    }
    for name in ("max_steps", "val_every", "log_every_n_steps", "enable_progress_bar"):
        del known["trainer"][name]
    del known["drafter"]["init_from"]
    known |= {
        "optimizer": cfg.optimizer.kind,
        "callbacks": cfg.callbacks,
        "machine": [platform.node(), os.cpu_count(), torch.get_num_threads(), torch.__version__],
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
    }
    text = json.dumps(known, sort_keys=True, default=str).replace(str(cfg.paths.output_dir), "")
    return cache / "pace" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_pace(file: Path) -> Pace | None:
    """None where there is none, or something else."""
    try:
        pace = Pace(**read_json(file, ""))
        good = all(type(value) in (int, float) and 0 <= value < 1e12 for value in asdict(pace).values())
        return pace if good and type(pace.runs) is int else None
    except (UserError, TypeError):
        return None


def write_pace(file: Path, pace: Pace) -> None:
    """Keep it for the next run. A cache that cannot be written to is no reason to fail."""
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps(asdict(pace), indent=2) + "\n")


def expected_time(cfg: TrainConfig, plan: Plan, sizes: Sizes | None, recipe: Recipe, pace: Pace | None, gpu: str | None) -> str:
    """One line for people: seconds to the first step and in all, where they come from, or when they will be known.

    Args:
        sizes, recipe: of the models and the batch; ``sizes`` is None if they are not known.
        pace: of the last run like this one here.
        gpu: name of the GPU, if it runs on one.
    """
    steps = cfg.trainer.max_steps
    if pace is not None:
        # What the first run fills caches with, responses and graphs, the next one finds there.
        before = f"first step after {'at most' if pace.runs == 1 else 'about'} {left_text(pace.before_s)}"
        source = "as the last run of these shapes here"
        if cfg.ckpt_path is not None:  # how many steps are left is not known before it is read
            return f"{before}, {_seconds(pace.step_s)} a step, {left_text(pace.after_s)} after the last; {source}"
        total = left_text(pace.total_s(steps, steps // plan.val_every))
        return f"{before}, {total} in all ({_seconds(pace.step_s)} a step); {source}"
    after = said_after(steps)
    later = f"said after step {after}" if after else "its steps are too few to foretell"
    if gpu is None or _KNOWN_GPU not in gpu or sizes is None or sizes.drafter.hidden_size < _KNOWN_WIDTH:
        return f"not known yet: no run of these shapes has ended here; {later}"
    rates = expected_rates(flop_per_token(sizes, recipe), MEASURED)
    if plan.layout.targets:
        rate = Verdict.of(plan.layout, rates).rate
    else:  # one after the other in the same process
        rate = plan.layout.drafter_world * rates.colocated
    rows = recipe.rows * plan.layout.drafter_world * cfg.trainer.accumulate_grad_batches
    step_s = rows * recipe.row_tokens / rate
    return (
        f"steps about {left_text(steps * step_s)} ({_seconds(step_s)} each) at the FLOP/s of Qwen3-8B's shapes on an {_KNOWN_GPU}; "
        f"what comes before, between and after them is not known yet: no run of these shapes has ended here; {later}"
    )


def said_after(steps: int) -> int | None:
    """The optimizer step after which a run of so many says its pace; None if it is too short to."""
    return min(_STEPS, steps // 2) if steps >= 4 else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds < 60 else left_text(seconds)


class StepClock(Callback):
    """Measures a run's :class:`Pace`; says once, after its first steps, how long the others will take.

    The clock is the host's: on a GPU it may be a step or two ahead.

    Args:
        began: when the run did, of ``time.monotonic``.
        say: whether the pace is news.
    """

    def __init__(self, began: float, *, say: bool) -> None:
        self.began, self.say = began, say
        self._first: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = self._step = trainer.global_step
        self._total = int(trainer.estimated_stepping_batches)
        self._first = None
        self._first_step_s, self._steps_s, self._validations_s, self._validations = 0.0, 0.0, 0.0, 0
        self._validated = False

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    # Callbacks around this one save and decode at a validation: it is over when the next batch begins.

    def on_train_batch_start(self, *_: Any) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = self._ended = now
            self._validated = False
        self._validation_over(now)

    def _validation_over(self, now: float) -> None:
        if self._validated:
            self._validations += 1
            self._validations_s += now - self._ended
            self._ended = now
            self._validated = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        self._steps_s += now - self._ended
        self._ended = now
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        done = self._step - self._start
        if done == 1:
            self._first_step_s = self._steps_s
        if self.say and trainer.is_global_zero and done == said_after(self._total - self._start):
            left = (self._total - self._step) * self.step_s
            print(
                f"time: {_seconds(self.step_s)} a step, {left_text(left)} for the {self._total - self._step:,} left; "
                "validation and what is decoded at the end not counted",
                file=sys.stderr,
                flush=True,
            )

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step so far, once there was one."""
        done = self._step - self._start
        if done > 1:
            return (self._steps_s - self._first_step_s) / (done - 1)
        return self._steps_s / max(done, 1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._first is not None:
            self._validation_over(time.monotonic())

    def pace(self, now: float, runs: int) -> Pace | None:
        """Of the run that is over at ``now``; None if it took no step.

        Args:
            runs: that ended here with this one.
        """
        if self._first is None or self._step == self._start:
            return None
        validation_s = self._validations_s / self._validations if self._validations else 0.0
        return Pace(self._first - self.began, self.step_s, validation_s, now - self._ended, runs)
