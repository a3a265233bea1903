"""Give up a trial of a search that is behind the others: after a validation, on all ranks alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.errors import Pruned, UserError
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.sweeps.trial import VARIABLE, running_trial

if TYPE_CHECKING:
    import optuna

__all__ = ["Prune"]


class Prune(Callback):
    """Tell the search each validation's figure; stop where it is below the median of earlier trials at that step.

    Does nothing outside a search (``sweep=tpe``), so that the best trial's config trains it again to its end.

    Args:
        monitor: what is validated; larger is better.
        startup_trials: trials that are never stopped, as a median of few says little.
        warmup_steps: optimizer steps before which nothing is stopped.

    Raises:
        UserError: for numbers that are negative, and a monitor that is not logged.
    """

    def __init__(self, monitor: str = "val/tree_eal@64", startup_trials: int = 5, warmup_steps: int = 0) -> None:
        for name, value in (("startup_trials", startup_trials), ("warmup_steps", warmup_steps)):
            if value < 0:
                raise UserError(f"{name}={value}: must be at least 0")
        self.monitor, self.startup_trials, self.warmup_steps = monitor, startup_trials, warmup_steps
        self._trial: optuna.Trial | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and os.environ.get(VARIABLE):
            import optuna

            self._trial = running_trial(optuna.pruners.MedianPruner(self.startup_trials, self.warmup_steps))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not os.environ.get(VARIABLE):
            return
        if self.monitor not in trainer.callback_metrics:
            raise UserError(
                f"callbacks.prune.monitor={self.monitor}: is not logged; choose one of "
                f"{', '.join(sorted(name for name in trainer.callback_metrics if name.startswith('val/')))}"
            )
        value, step = float(trainer.callback_metrics[self.monitor]), trainer.global_step
        behind = False
        if self._trial is not None:
            self._trial.report(value, step)
            behind = self._trial.should_prune()
        if not trainer.strategy.broadcast(behind) or step >= trainer.max_steps:
            return  # what is done costs nothing more than decoding it
        source = getattr(trainer.strategy, "source", None)
        if isinstance(source, RemoteTarget):  # its ranks wait for requests; this is how they learn that there will be no more
            source.goodbye()
        raise Pruned(self.monitor, value, step)
