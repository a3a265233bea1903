"""Which checkpoints are kept: the last and the best by what decoding accepts; and what happens when there is no room for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from callbacks.acceptance import Acceptance
from dflash_lit.checkpoints.file import remove_leftovers
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.errors import UserError
from dflash_lit.optimizer_steps import OptimizerSteps
from dflash_lit.owed_validation import validation_follows, validation_owed

__all__ = ["SafeCheckpoint"]

_log = logging.getLogger(__name__)

_AUTO = "auto"
_USUAL = 64


class SafeCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` that goes by real acceptance, outlives a full disk, and believes the folder, not its own notes.

    Files are written and read by :class:`VerifiedCheckpointIO`, which the Trainer has to have as a plugin.

    - ``monitor="auto"`` is ``val/tau@64`` where :class:`Acceptance` decodes draft trees (at another budget if not at 64), and
      ``val/tree_eal@64`` elsewhere.
    - What killed writers have left in the folder, and in that of the checkpoint a run goes on from, is removed at the start.
    - Nothing is saved between the batches of an optimizer step, nor between a step and the validation after it.
    - A resumed run forgets those of the best checkpoints that are not in its folder any more.

    Args:
        monitor: metric, None for no best, or "auto".
        mode: "max" for "auto".
        on_disk_full: "continue" training without this checkpoint (with a warning; the next one is tried again), or "stop". Older
            checkpoints are kept in both cases.
        settings: ``ModelCheckpoint``'s.

    Raises:
        UserError: for settings that do not go together.
    """

    def __init__(
        self, *, monitor: str | None = None, mode: str | None = None, on_disk_full: str = "continue", **settings: Any
    ) -> None:
        if on_disk_full not in ("continue", "stop"):
            raise UserError(f"on_disk_full={on_disk_full!r}: choose continue or stop")
        if monitor == _AUTO and mode != "max":
            raise UserError(f"mode={mode!r}: monitor=auto is a length, the longer the better; use mode=max")
        if not isinstance(interval := settings.get("train_time_interval"), timedelta | None):
            raise UserError(
                f"train_time_interval={interval!r}: is no time; write train_time_interval={{_target_: datetime.timedelta, minutes: 10}}"
            )
        super().__init__(monitor=monitor, mode=mode or "min", **settings)
        self.on_disk_full = on_disk_full
        self._saving = False
        self._steps = OptimizerSteps()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.monitor == _AUTO:
            self.monitor = _acceptance_metric(trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    # -- what earlier runs have left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best_k_models"]
        names = [state_dict[name] for name in ("best_model_path", "last_model_path", "kth_best_model_path")]
        scores = [*best.values(), *(state_dict[name] for name in ("best_model_score", "current_score", "kth_value"))]
        if not all(isinstance(name, str) for name in [*names, *best]):
            raise TypeError(f"{type(self).__name__}: a file's name that is no text")
        if not all(score is None or (isinstance(score, Tensor) and score.numel() == 1) for score in scores):
            raise TypeError(f"{type(self).__name__}: a score that is no number")
        super().load_state_dict(state_dict)
        self.current_score = state_dict.get("current_score")  # which Lightning forgets

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            for folder in {Path(str(self.dirpath)), *([Path(trainer.ckpt_path).parent] if trainer.ckpt_path else [])}:
                remove_leftovers(folder)
        if trainer.ckpt_path is None:
            return
        named = [self.best_model_path, self.last_model_path, *self.best_k_models]
        there = set(
            trainer.strategy.broadcast([path for path in named if self._is_ours(path)] if trainer.is_global_zero else [])
        )
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if path in there}
        self.last_model_path = self.last_model_path if self.last_model_path in there else ""
        if self.monitor is None:
            self.best_model_path = self.best_model_path if self.best_model_path in there else ""
            return
        ranked = sorted(self.best_k_models, key=lambda path: float(self.best_k_models[path]), reverse=self.mode == "max")
        self.best_model_path, self.best_model_score = (ranked[0], self.best_k_models[ranked[0]]) if ranked else ("", None)
        # Looked at only when there are k of them.
        self.kth_best_model_path = ranked[-1] if ranked else ""

    def _is_ours(self, path: str) -> bool:
        """Whether a name from a file is that of a checkpoint in this folder: what is no longer best is removed by its name."""
        file = Path(path)
        return file.parent == Path(str(self.dirpath)) and file.suffix == self.FILE_EXTENSION and file.is_file()

    # -- a full disk

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saving = True  # on all ranks, unlike the writing

    @contextmanager
    def _outliving(self, trainer: L.Trainer) -> Iterator[None]:
        """Around what may save: where there was no room, this callback is as it was before."""
        files = trainer.strategy.checkpoint_io
        # Lightning does not tell callbacks of checkpoints of weights alone.
        if self.on_disk_full == "stop" or self.save_weights_only or not isinstance(files, VerifiedCheckpointIO):
            yield
            return
        before = {**self.state_dict(), "best_k_models": dict(self.best_k_models)}
        self._saving = False
        with files.tolerant():
            yield
        if not self._saving:
            return
        said = trainer.strategy.broadcast(str(files.full or ""))
        if said:
            self.load_state_dict(before)
            if trainer.is_global_zero:
                _log.warning("%s. Training goes on (callbacks.checkpoint.on_disk_full=continue)", said)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._steps.begin(trainer)
        if validation_owed(trainer):
            self._defer_save_until_validation = self._is_due(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        # A run that has been resumed from a step at which Lightning saves would, again, after the first batch of the next.
        if not self._steps.taken(trainer):
            return
        if validation_follows(trainer):
            # Lightning never makes up for a validation that a run was killed in, if its checkpoint is of before.
            self._defer_save_until_validation |= self._is_due(trainer)
            return
        with self._outliving(trainer):
            super().on_train_batch_end(trainer, *arguments)

    def _is_due(self, trainer: L.Trainer) -> bool:
        """Whether this step is one to be saved, by its number or by the time since the last one."""
        if self._every_n_train_steps and trainer.global_step % self._every_n_train_steps == 0:
            return True
        if self._train_time_interval is None:
            return False
        now = time.monotonic()
        due = now - (self._last_time_checked or now) >= self._train_time_interval.total_seconds()
        due = trainer.strategy.broadcast(due)  # clocks of ranks differ
        if due:
            self._last_time_checked = now
        return due

    def _should_save_on_train_epoch_end(self, trainer: L.Trainer) -> bool:
        # What was put off until the validation would never be saved by a callback that saves at ends of epochs only.
        return not self._defer_save_until_validation and super()._should_save_on_train_epoch_end(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        with self._outliving(trainer):
            super().on_train_epoch_end(trainer, *arguments)

    def on_validation_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        with self._outliving(trainer):
            super().on_validation_end(trainer, *arguments)

    def on_train_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        with self._outliving(trainer):
            super().on_train_end(trainer, *arguments)


def _acceptance_metric(trainer: L.Trainer, module: L.LightningModule) -> str:
    """The longest that is measured by decoding draft trees; by teacher forcing where no trees are decoded."""
    decoded = [budget for c in trainer.callbacks if isinstance(c, Acceptance) for budget in c.budgets]  # type: ignore[attr-defined]
    prompts = getattr(trainer.datamodule, "eval_prompts", ())  # type: ignore[attr-defined]
    target = getattr(trainer.strategy, "target", None)
    if decoded and prompts and target is not None and target.no_trees is None:
        return f"val/tau@{_USUAL if _USUAL in decoded else max(decoded)}"
    budgets = getattr(module, "tree_budgets", [_USUAL])
    return f"val/tree_eal@{_USUAL if _USUAL in budgets else max(budgets)}"
