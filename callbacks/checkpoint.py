"""Which checkpoints are kept: the last and the best by what decoding accepts; and what happens when there is no room for one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.acceptance import Acceptance
from dflash_lit.checkpoints.file import remove_leftovers
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.errors import UserError

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
    - Nothing is saved between the batches of an optimizer step.
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
        super().__init__(monitor=monitor, mode=mode or "min", **settings)
        self.on_disk_full = on_disk_full
        self._saving = False
        self._step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.monitor == _AUTO:
            self.monitor = _acceptance_metric(trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    # -- what earlier runs have left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        # Lightning may save while gradients are being accumulated, which no checkpoint holds: a run that has been resumed from a step at
        # which it saves would, again, after the first batch of the next.
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        with self._outliving(trainer):
            super().on_train_batch_end(trainer, *arguments)

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
