"""Tokens a second, and of a run with targets apart: which side waits for which, and what would help."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.placement.flow import Flow, FlowSource
from dflash_lit.placement.forecast import Rates, Verdict
from dflash_lit.placement.layout import Layout, Role

__all__ = ["Throughput"]


@dataclass
class _Span:
    """What was counted over some stretches of training.

    Attributes:
        tokens: of the rows of all drafters.
        flows: what each physical rank did meanwhile.
    """

    seconds: float = 0.0
    tokens: int = 0
    flows: dict[int, Flow] = field(default_factory=lambda: defaultdict(Flow))

    def add(self, other: _Span) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        for rank, flow in other.flows.items():
            self.flows[rank] += flow


class Throughput(Callback):
    """Logs figures of each ``trainer.log_every_n_steps`` optimizer steps, and says at the end which side set the pace.

    ``pipeline/ktok_s`` is thousand tokens of rows a second, over all drafters. Where the strategy is a
    :class:`FlowSource` with targets, also

    - ``pipeline/supply_ktok_s``: what all targets could supply if they never waited for a request,
    - ``pipeline/demand_ktok_s``: what all drafters could take if they never waited for features,
    - ``pipeline/wait_share``, ``pipeline/target_wait_share``: share of the time that a drafter, that a target waited,
    - ``pipeline/queue_depth``: feature batches that had arrived when a drafter took one,
    - ``pipeline/targets``: target ranks that are there (``placement.tolerate``).

    Time runs from the end of one batch to the end of the next. A stretch with a validation or a checkpoint in it is left out, its
    batch included, and so is the one up to the end of the first batch: neither they nor filling the pipeline (again) count. Only
    checkpoints of weights alone (``save_weights_only``) do, as Lightning does not tell callbacks of them.

    The clock is the host's, which on a GPU may be a step or two ahead. What other processes did is as old as their last
    heartbeat: of windows of a second or two the figures are rough.

    Attributes:
        last: the figures of the last window; empty on other ranks than zero.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._running = False
        self._line = ""  # of a run that had nothing left to train

    # -- when time runs

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        self._split = strategy if isinstance(strategy, FlowSource) and strategy.layout.targets else None
        self.last = {}
        self._line = ""
        self._step = trainer.global_step
        self._running = False
        self._window, self._first, self._later = _Span(), _Span(), _Span()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        if self._running:
            self._ended = time.monotonic()
            self._window.tokens += batch["input_ids"].numel() * trainer.world_size
        else:
            self._start()
        step = trainer.global_step
        if step == self._step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._step = step
        self._stop()
        if self._window.seconds:  # none if every batch of the window was left out
            self.last = self._figures(self._window)
            # Not pl_module.log: on a GPU that copies each number there, and waits.
            for logger in trainer.loggers:
                logger.log_metrics(self.last, step=step)
            self._next_window()
        self._start()

    def on_validation_start(self, *_: Any) -> None:
        self._stop()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._stop()

    def _start(self) -> None:
        self._running = True
        self._began = self._ended = time.monotonic()
        self._before = self._flows()

    def _stop(self) -> None:
        """The clock as of the last batch's end, which has only just been."""
        if not self._running:
            return
        self._running = False
        self._window.seconds += self._ended - self._began
        for rank, flow in self._flows().items():
            self._window.flows[rank] += flow - self._before.get(rank, Flow())

    def _flows(self) -> dict[int, Flow]:
        """Copies: the strategy goes on counting in its own."""
        return {} if self._split is None else {rank: replace(flow) for rank, flow in self._split.flows().items()}

    def _next_window(self) -> None:
        (self._later if self._first.seconds else self._first).add(self._window)
        self._window = _Span()

    # -- what it means

    def _figures(self, span: _Span) -> dict[str, float]:
        figures = {"ktok_s": span.tokens / span.seconds / 1000}
        if self._split is not None:
            if verdict := _verdict(self._split.layout, span):
                figures |= {"supply_ktok_s": verdict.supply / 1000, "demand_ktok_s": verdict.demand / 1000}
            drafters, targets = (_flows(role, self._split.layout, span) for role in (Role.DRAFTER, Role.TARGET))
            figures |= {"wait_share": _wait_share(drafters, span), "target_wait_share": _wait_share(targets, span)}
            if batches := sum(flow.batches for flow in drafters):
                figures["queue_depth"] = sum(flow.queued for flow in drafters) / batches
            figures["targets"] = self._split.serving()
        return {f"pipeline/{name}": value for name, value in figures.items()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._stop()
        self._next_window()
        # The first window fills caches and queues; a run that has no other is judged by it nevertheless.
        span = self._later if self._later.seconds else self._first
        if not span.seconds:
            return
        self._line = f"throughput: {span.tokens / span.seconds / 1000:.1f} Ktok/s"
        if self._split is not None and (verdict := _verdict(self._split.layout, span)):
            self._line += f"; {verdict}{_advice(verdict, 'GPU' if pl_module.device.type == 'cuda' else 'rank')}"

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Only now: in on_train_end a progress bar may still own the line.
        if trainer.is_global_zero and self._line:
            print(self._line, file=sys.stderr, flush=True)


def _flows(role: Role, layout: Layout, span: _Span) -> list[Flow]:
    return [span.flows.get(rank, Flow()) for rank in range(layout.world) if layout.role(rank) is role]


def _verdict(layout: Layout, span: _Span) -> Verdict | None:
    """By the mean rates of the ranks that had anything to do; None if a side had nothing."""
    targets = [flow.tokens / flow.busy_s for flow in _flows(Role.TARGET, layout, span) if flow.busy_s > 0]
    drafters = [
        flow.tokens / (span.seconds - flow.waited_s)
        for flow in _flows(Role.DRAFTER, layout, span)
        if flow.tokens and flow.waited_s < span.seconds
    ]
    if not targets or not drafters:
        return None
    return Verdict.of(layout, Rates(target=sum(targets) / len(targets), drafter=sum(drafters) / len(drafters)))


def _wait_share(flows: list[Flow], span: _Span) -> float:
    # At most all of it: a heartbeat may bring seconds of the window before.
    return sum(min(flow.waited_s / span.seconds, 1.0) for flow in flows) / len(flows)


def _advice(verdict: Verdict, unit: str) -> str:
    """What to change for the best split, if rates that differ by more than their own error ask for one."""
    now, best = verdict.layout, verdict.best
    moved = best.targets - now.targets
    if not moved or verdict.bound == "balanced":
        return ""
    count = f"{abs(moved)} {unit}{'' if abs(moved) == 1 else 's'}"
    sides = "from drafters to targets" if moved > 0 else "from targets to drafters"
    each = " of each host" if now.hosts > 1 else ""
    return f": move {count}{each} {sides} (placement.targets={best.targets} placement.drafters={best.drafters})"
