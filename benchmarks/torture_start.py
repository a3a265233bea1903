"""One start of compile_torture.py: a process that compiles cold, trains, validates and saves."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import torch
from common import SHAPES, qwen3_8b, random_ends
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from callbacks.compile_warmup import CompileWarmup
from dflash_lit.compilation.cache import use_cache
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.packing import PackedRows
from dflash_lit.module import DrafterModule
from dflash_lit.placement.feature_loader import FeatureLoader


def fit(name: str, steps: int, layers: int | None) -> dict[str, float | None]:
    """Fit a drafter of a shape on random features; what that took."""
    use_cache()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES[name]
    config = qwen3_8b(shape.block, tiny=name == "tiny")
    if layers:
        config = dataclasses.replace(config, num_hidden_layers=layers)
    torch.manual_seed(0)  # all starts train the same: their losses are compared

    class RandomFeatures(SingleDeviceStrategy):
        """Features of a fixed random table: what a target would send, without one."""

        table = torch.randn(1, shape.tokens, config.feature_size, dtype=torch.bfloat16)

        def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            if self.table.device != device:
                self.table = self.table.to(device)
            return {**batch, "features": self.table.expand(batch["input_ids"].shape[0], -1, -1).contiguous()}

        def process_dataloader(self, dataloader: object) -> FeatureLoader:
            return FeatureLoader(dataloader, self)

    def rows(count: int) -> PackedRows:
        ids = np.random.default_rng(0).integers(4, config.vocab_size - 400, (count, shape.tokens), dtype=np.int32)
        place = np.broadcast_to(np.arange(shape.tokens, dtype=np.int32), ids.shape).copy()
        return PackedRows(ids, np.zeros_like(ids), place, np.ones(ids.shape, dtype=np.bool_))

    with device:
        module = DrafterModule(
            config.to_dict(), random_ends(config, device), {"weights": "dpace"}, anchors=shape.anchors, compile_on_cpu=True
        )
    warmup = CompileWarmup()
    with tempfile.TemporaryDirectory() as folder:
        save = ModelCheckpoint(folder, save_top_k=1, every_n_train_steps=max(steps // 2, 1), save_weights_only=True)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            strategy=RandomFeatures(device=device),
            precision="bf16-mixed",
            max_steps=steps,
            max_epochs=-1,
            gradient_clip_val=1.0,
            val_check_interval=max(steps // 2, 1),
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            num_sanity_val_steps=1,
            inference_mode=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[warmup, save],
            default_root_dir=folder,
        )
        # Five validation rows: the last batch of validation is a partial one.
        trainer.fit(module, datamodule=RowDataModule(rows(8 * shape.rows), rows(shape.rows + 1), shape.rows, 0))
    return {
        "warmup_s": round(sum(made.seconds for made in warmup.made), 2),
        "graphs": sum(made.graphs for made in warmup.made),
        "hits": sum(made.hits for made in warmup.made),
        "misses": sum(made.misses for made in warmup.made),
        "recompiles": int(trainer.callback_metrics["compile/recompiles"]),
        "loss": float(trainer.callback_metrics["train/loss"]),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }


def told(path: str, name: str, steps: int, layers: int | None) -> None:
    """The same in a process whose output goes to files; the figures to ``path``."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    facts = fit(name, steps, layers)
    Path(path).write_text(json.dumps(facts))


if __name__ == "__main__":
    told(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) or None)
