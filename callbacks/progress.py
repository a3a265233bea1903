"""One line over the whole run, with tokens/s and time left: kept up to date in a terminal, printed now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.live import Live
from rich.table import Table

from callbacks.throughput import Throughput
from dflash_lit.watching.progress_line import SHOWN, WIDTH, progress_line
from dflash_lit.watching.terminal import line_and_bar, live_console

__all__ = ["Progress"]

_EARLY = 5
"""Optimizer steps after which a log says how long it will take."""


class Progress(ProgressBar):
    """Counts optimizer steps over the run, not batches over an epoch; silent on other ranks than zero (Lightning disables it).

    Beside a :class:`Throughput` it shows the figures of that one's last window, else tokens/s since the start, validation included.
    A log file, a pipe, and whatever sets ``CI`` get plain lines.

    Args:
        lines: without a terminal, about so many plain lines over the run.
        refresh: in a terminal, steps between updates of the figures.
    """

    def __init__(self, lines: int = 10, refresh: int = 10) -> None:
        super().__init__()
        self.lines, self.refresh = lines, refresh
        self.live: Live | None = None
        self.tokens = 0
        self.enabled = True
        self.first = self.step = 0
        self.started = 0.0

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not later: a run with nothing left but a validation has a limit of one step more then (`OwedValidation`).
        self.total = int(trainer.estimated_stepping_batches)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first = self.step = trainer.global_step
        self.tokens, self.started = 0, time.monotonic()
        self.ended, self.validates = self.started, False
        self._metrics: dict[str, float] = {}
        console = live_console() if self.enabled else None
        if console is not None:
            self.live = Live(console=console, get_renderable=self._shown, refresh_per_second=4)
            self.live.start()
            console.show_cursor(True)  # a process that is killed could not bring it back

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += batch["input_ids"].numel() * trainer.world_size
        if not self.enabled or trainer.global_step == self.step:
            return
        self.step, self.ended = trainer.global_step, time.monotonic()
        every = max(self.total // self.lines, 1)
        if self.live is not None:
            # Reading a metric waits for the device, so not every step.
            if self.step % self.refresh == 0 or self.step in (self.first + 1, self.total):
                self._metrics = self._measured(trainer)
        elif self.step % every == 0 or self.step == self.total or self.step - self.first == min(_EARLY, every):
            print(progress_line(self.step, self.total, self._measured(trainer), self._left()), file=sys.stderr, flush=True)

    def _measured(self, trainer: L.Trainer) -> dict[str, float]:
        last = next((callback.last for callback in trainer.callbacks if isinstance(callback, Throughput)), {})  # type: ignore[attr-defined]
        since_start = self.tokens / max(time.monotonic() - self.started, 1e-9) / 1000
        logged = {name: float(trainer.callback_metrics[name]) for name in SHOWN if name in trainer.callback_metrics}
        return {"pipeline/ktok_s": since_start, **last, **logged}

    def _left(self) -> float | None:
        """Seconds, at the pace of the steps since the start; it stands still until the next one has ended."""
        done = self.step - self.first
        return (self.ended - self.started) / done * (self.total - self.step) if done else None

    def _shown(self) -> Table:
        width = self.live.console.width if self.live else WIDTH
        line = progress_line(self.step, self.total, self._metrics, self._left(), width - 1)
        return line_and_bar(line, self.step, self.total, width, "validates" if self.validates else "")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validates = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validates = False

    def _close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    # Otherwise what is printed next is drawn over.

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()
