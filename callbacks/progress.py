"""One progress bar over the whole run, with tokens/s and time left; plain lines where no terminal is."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from callbacks.throughput import Throughput

__all__ = ["Progress"]


class Progress(ProgressBar):
    """Counts optimizer steps over the run, not batches over an epoch; silent on other ranks than zero (Lightning disables it).

    Beside a :class:`Throughput` it shows the figures of that one's last window, else tokens/s since the start, validation included.

    Args:
        lines: without a terminal, about so many plain lines over the run.
        refresh: in a terminal, steps between updates of the figures beside the bar.
    """

    def __init__(self, lines: int = 10, refresh: int = 10) -> None:
        super().__init__()
        self.lines, self.refresh = lines, refresh
        self.bar: Any = None
        self.tokens = 0
        self.enabled = True
        self.first = self.step = 0
        self.started = 0.0

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first = self.step = trainer.global_step
        self.tokens, self.started = 0, time.monotonic()
        self.total = int(trainer.estimated_stepping_batches)
        if self.enabled and sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=self.step, desc="train", unit="step", dynamic_ncols=True, mininterval=0.5)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += batch["input_ids"].numel() * trainer.world_size
        moved = trainer.global_step - self.step
        if not self.enabled or not moved:
            return
        self.step = trainer.global_step
        every = max(self.total // self.lines, 1)
        if self.bar is not None:
            self.bar.update(moved)
            # Reading a metric waits for the device, so not every step.
            if self.step % self.refresh == 0:
                self.bar.set_postfix_str(self._facts(trainer), refresh=False)
        elif self.step % every == 0 or self.step == self.total:
            elapsed = time.monotonic() - self.started
            left = elapsed / (self.step - self.first) * (self.total - self.step)
            print(f"step {self.step}/{self.total}  {self._facts(trainer)}  {left:.0f} s left", file=sys.stderr, flush=True)

    def _facts(self, trainer: L.Trainer) -> str:
        since_start = self.tokens / max(time.monotonic() - self.started, 1e-9) / 1000
        measured = next((callback.last for callback in trainer.callbacks if isinstance(callback, Throughput)), {})  # type: ignore[attr-defined]
        shown = {"loss": "train/loss", "chain": "train/chain_eal", "tree64": "val/tree_eal@64", "tau": "acceptance/tau_greedy"}
        metrics = trainer.callback_metrics
        parts = [f"{name} {float(metrics[key]):.2f}" for name, key in shown.items() if key in metrics]
        parts.append(f"{measured.get('pipeline/ktok_s', since_start):.1f} Ktok/s")
        if "pipeline/wait_share" in measured:
            parts.append(f"wait {100 * measured['pipeline/wait_share']:.0f} %")
        return " ".join(parts)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
