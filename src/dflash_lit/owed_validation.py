"""A validation that a signal met is held by the run that goes on, from its first batch, before the next step.

Lightning's counters say that a checkpoint was saved inside a validation, and Lightning goes back to it. But it would not measure the
batches of before again, would count the one that had begun twice, and would not go back after the last step. All of it hangs on
counters that are private: tests/callbacks/test_interrupt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

__all__ = ["OwedValidation", "validation_follows", "validation_owed"]

_COUNTERS = "epoch_loop.val_loop.batch_progress"


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether the last batch is followed by a validation; in ``on_train_batch_end``, and in ``on_train_start`` of a run that goes on."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(sum(trainer.num_val_batches)) and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def validation_owed(trainer: L.Trainer) -> bool:
    """In ``on_train_start``: whether a validation comes before the first step. A run that goes on with other validations owes none."""
    return trainer.fit_loop.epoch_loop.val_loop.restarted_mid_evaluation and validation_follows(trainer)


class OwedValidation:
    """What a callback calls that ends runs in validations."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._limit: int | None = None

    def extend(self, trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> None:
        """In ``on_fit_start``: a run that goes on from ``checkpoint`` does not end without the validation of its last step."""
        batches = checkpoint["loops"]["fit_loop"][_COUNTERS]["current"]
        loop, step = trainer.fit_loop.epoch_loop, checkpoint["global_step"]
        if batches["ready"] > batches["completed"] and loop.max_steps <= step:
            self._limit, loop.max_steps = loop.max_steps, step + 1

    def begin_training(self, trainer: L.Trainer) -> None:
        """In ``on_train_start``: a run that holds no validation now goes on as from a checkpoint of the step before it."""
        if validation_owed(trainer):
            return
        self._limit_again(trainer)
        loop = trainer.fit_loop.epoch_loop
        if loop.val_loop.restarted_mid_evaluation and trainer.global_step < loop.max_steps:
            # Lightning would not count that step for the loggers, nor see that its epoch has ended.
            for counters in (loop.val_loop.batch_progress.total, loop.val_loop.batch_progress.current):
                counters.reset_on_restart()
            for counters in (loop.batch_progress.total, loop.batch_progress.current):
                counters.completed -= 1
            trainer.fit_loop.reset()

    def begin(self, trainer: L.Trainer) -> None:
        """In ``on_validation_start``, before anything is saved."""
        counters = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        counters.total.reset_on_restart()  # of the batch that had begun
        self._before = counters.state_dict()
        self._limit_again(trainer)

    def owe(self, trainer: L.Trainer) -> None:
        """In a validation: what is saved now says that its first batch has begun, and no more."""
        counters = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        counters.load_state_dict(self._before)
        counters.increment_ready()
        counters.increment_started()

    def _limit_again(self, trainer: L.Trainer) -> None:
        if self._limit is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._limit = self._limit, None
