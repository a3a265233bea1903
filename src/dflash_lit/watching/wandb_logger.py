"""The W&B logger of a run that may be killed: what W&B had not yet written by its last checkpoint is logged again."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["DurableWandbLogger"]

_VARIABLE = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_WRITES_S, _USUAL_S = 1.0, 15.0
_MOST = 4096

Logged = tuple[int | None, dict[str, float]]
"""step, metrics"""


class DurableWandbLogger(WandbLogger):
    """Lightning's ``WandbLogger``, whose last seconds are in every checkpoint.

    W&B's service writes a run's file every 15 seconds, here every second, and when its run is killed it ends without writing the rest. So
    :class:`callbacks.kept_metrics.KeptMetrics` stores what was logged shortly before a checkpoint in it, and a run that goes on from there
    logs that again: some points twice, with equal values, and none is missing.

    Args:
        settings: ``WandbLogger``'s.
    """

    def __init__(self, **settings: Any) -> None:
        known = "x_transaction_log_flush_interval" in wandb.Settings.model_fields  # not a public one of W&B's
        if known and _VARIABLE not in os.environ and "settings" not in settings:
            settings["settings"] = wandb.Settings(x_transaction_log_flush_interval=_WRITES_S)
            self._unwritten_s = 3 * _WRITES_S
        else:
            self._unwritten_s = 2 * _USUAL_S
        self._recent: deque[tuple[float, Logged]] = deque(maxlen=_MOST)
        super().__init__(**settings)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._recent.append((time.monotonic(), (step, dict(metrics))))
        super().log_metrics(metrics, step)

    def recent(self) -> list[Logged]:
        """What W&B may not have written."""
        since = time.monotonic() - self._unwritten_s
        return [logged for at, logged in self._recent if at >= since]

    def log_again(self, logged: Sequence[Logged]) -> None:
        """Log what :meth:`recent` was when the run was saved."""
        for step, metrics in logged:
            self.log_metrics(metrics, step)
