"""What a W&B run holds besides the metrics that every logger gets: groups, environment, code, pictures, curves, the drafter."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import wandb
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from dflash_lit.attention.mask import BlockLayout
from dflash_lit.attention.picture import LARGEST, draw_mask
from dflash_lit.blocks import draw_anchors, row_noise
from dflash_lit.checkpoints.file import load
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.export import drafter_from_checkpoint, save_drafter
from dflash_lit.module import DrafterModule
from dflash_lit.watching.decodings import decoding_rows
from dflash_lit.watching.environment import environment
from dflash_lit.watching.history import Curves, by_budget, by_slot
from dflash_lit.watching.metric_groups import GROUPS, STEP
from dflash_lit.watching.packing_picture import draw_packing
from dflash_lit.watching.resumed import RUN_ID

__all__ = ["WandbRun"]

_ROOT = Path(__file__).parent.parent
_SOURCES = ("train.py", "callbacks/**/*.py", "conf/**/*.yaml", "src/dflash_lit/**/*.py")


class WandbRun(Callback):
    """Fills the W&B run of a :class:`WandbLogger`; without one it does nothing. Only rank 0 has a run.

    Once: definitions of the metrics' groups, versions and commit (``config.environment``), the code, pictures of mask and packing.
    At each validation: ``acceptance/by_slot`` and ``acceptance/by_budget``, curves of this and earlier validations. When the run
    has been summarised: ``summary/...``, a table of sample decodings, and the drafter as artifact ``drafter-RUN`` (aliases
    ``latest`` and ``best``).

    Checkpoints hold the run's id, so that resuming one (``ckpt_path``) goes on with its run.

    Args:
        code: record the project's sources.
        pictures: record mask and packing.
        artifact: record the exported drafter, and that of the best checkpoint.
    """

    def __init__(self, code: bool = True, pictures: bool = True, artifact: bool = True) -> None:
        self.code, self.pictures, self.artifact = code, pictures, artifact
        self.history: dict[int, dict[str, float]] = {}
        self._id: str | None = None
        self._pictured = False

    # -- what a checkpoint keeps

    def state_dict(self) -> dict[str, Any]:
        history = {step: dict(metrics) for step, metrics in self.history.items()}
        return {RUN_ID: self._id, "history": history, "pictured": self._pictured} if self._id else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {int(step): dict(metrics) for step, metrics in state_dict.get("history", {}).items()}
        # In another run than the checkpoint's they are missing.
        self._pictured = bool(state_dict.get("pictured")) and state_dict.get(RUN_ID) == self._id

    # -- during training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        run = _run(trainer)
        if run is None:
            return
        self._id = run.id
        for group in GROUPS:
            for metric in group.metrics:
                run.define_metric(metric.name, step_metric=STEP, step_sync=True, summary=metric.summary)
        run.config.update({"environment": environment(_ROOT)}, allow_val_change=True)
        if self.code:
            # W&B's own log_code would walk through the folders of all runs.
            code = wandb.Artifact(f"source-{run.project or 'dflash_lit'}", type="source")
            for pattern in _SOURCES:
                for file in sorted(_ROOT.glob(pattern)):
                    code.add_file(str(file), str(file.relative_to(_ROOT)))
            run.log_artifact(code)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run, data = _run(trainer), getattr(trainer, "datamodule", None)
        if run is None or not self.pictures or self._pictured or not isinstance(data, RowDataModule):
            return
        assert isinstance(pl_module, DrafterModule)
        self._pictured = True
        with tempfile.TemporaryDirectory() as folder:
            mask, packing = Path(folder, "mask.png"), Path(folder, "packing.png")
            draw_mask(_example_layout(data.example_batch(), pl_module), mask)
            draw_packing(data.train, packing)
            images = {"pictures/mask": wandb.Image(str(mask)), "pictures/packing": wandb.Image(str(packing))}
            run.log({**images, STEP: trainer.global_step})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run = _run(trainer)
        if run is None or trainer.sanity_checking:
            return
        shown = ("val/", "acceptance/")
        self.history[trainer.global_step] = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(shown)
        }
        charts = {
            "acceptance/by_slot": _chart(by_slot(self.history), "slots 1..k all right", "k"),
            "acceptance/by_budget": _chart(by_budget(self.history), "tokens per target pass", "tree nodes (0: chain)"),
        }
        if drawn := {name: chart for name, chart in charts.items() if chart is not None}:
            run.log({**drawn, STEP: trainer.global_step})

    # -- afterwards

    def on_summary(self, trainer: L.Trainer, summary: Mapping[str, Any], drafter: Path) -> None:
        """Called by the job when it has decoded with the exported ``drafter`` and made its summary."""
        run = _run(trainer)
        if run is None:
            return
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        run.summary.update({f"summary/{key}": value for key, value in numbers.items()})
        if samples := decoding_rows(list(summary.get("samples") or [])):
            table = wandb.Table(columns=["prompt", "rounds", "rounds with accepted drafts", "decoded"])
            for prompt, rounds, share, cell in samples:
                table.add_data(prompt, rounds, share, wandb.Html(cell, data_is_not_path=True))
            run.log({"acceptance/samples": table, STEP: trainer.global_step})
        if self.artifact:
            self._log_drafters(trainer, run, summary, numbers, drafter)

    def _log_drafters(
        self, trainer: L.Trainer, run: wandb.Run, summary: Mapping[str, Any], numbers: Mapping[str, Any], drafter: Path
    ) -> None:
        """The best first: W&B calls the last one that was logged the latest."""
        shared = {key: summary[key] for key in ("target", "block_size", "objective") if key in summary}
        last, best = trainer.global_step, _best(trainer)
        if best is not None and best[0] != last:
            step, path, scores = best
            folder = save_drafter(drafter_from_checkpoint(path), drafter.with_name(f"{drafter.name}_best"))
            decoded = self.history.get(step, {})
            _log_drafter(run, folder, {**shared, **decoded, **scores, "step": step}, ["best"])
        aliases = ["latest", "best"] if best is not None and best[0] == last else ["latest"]
        scores = best[2] if best is not None and best[0] == last else {}
        _log_drafter(run, drafter, {**shared, **numbers, **scores, "step": last}, aliases)


def _run(trainer: L.Trainer) -> wandb.Run | None:
    """The run of the W&B logger, begun if need be; None on other ranks than 0 and without that logger."""
    if not trainer.is_global_zero:
        return None
    return next((logger.experiment for logger in trainer.loggers if isinstance(logger, WandbLogger)), None)


def _best(trainer: L.Trainer) -> tuple[int, str, dict[str, float]] | None:
    """Step, file and score of the best checkpoint, where one goes by a metric."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.monitor and Path(callback.best_model_path).is_file():
            saved = load(callback.best_model_path, mmap=True)
            score = {} if callback.best_model_score is None else {callback.monitor: float(callback.best_model_score)}
            return int(saved["global_step"]), callback.best_model_path, score
    return None


def _log_drafter(run: wandb.Run, folder: Path, metadata: Mapping[str, Any], aliases: list[str]) -> None:
    artifact = wandb.Artifact(f"drafter-{run.id}", type="model", metadata=dict(metadata))
    # Not copied: an offline run refers to the run's own files, which a sync reads.
    artifact.add_dir(str(folder), skip_cache=True, policy="immutable")
    run.log_artifact(artifact, aliases=aliases)


def _chart(curves: Curves, title: str, x: str) -> Any:
    if not curves:
        return None
    xs, ys = ([[point[i] for point in points] for points in curves.values()] for i in range(2))
    return wandb.plot.line_series(xs=xs, ys=ys, keys=list(curves), title=title, xname=x)


def _example_layout(batch: Mapping[str, torch.Tensor], module: DrafterModule) -> BlockLayout:
    """The first row's blocks; of large runs only the row's beginning and some of its blocks, or nobody would see any."""
    tokens = min(batch["input_ids"].shape[1], 512)
    document_ids, supervised = (batch[name][:1, :tokens].cpu() for name in ("document_ids", "supervised"))
    size = module.config.block_size
    anchors = max(min(module.anchors, 32, LARGEST // (tokens + 32 * size) // size), 1)
    noise = row_noise(module.seed, 0, batch["row_ids"][:1].cpu(), tokens + 1)
    drawn, valid = draw_anchors(supervised, document_ids, anchors, noise)
    return BlockLayout(drawn, valid, document_ids, size, module.config.causal)
