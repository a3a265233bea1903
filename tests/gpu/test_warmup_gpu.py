"""On a GPU the real graphs: target, flex_attention forward and backward, fused head; made once, before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.compile_warmup import CompileWarmup
from dflash_lit.compilation.seal import graphs_made
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import embedded_config, packed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 8.0 or more"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), device="cuda", dtype=torch.bfloat16)


class Watch(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.graphs: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.random = (torch.get_rng_state(), torch.cuda.get_rng_state())
        self.graphs.append(graphs_made())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.graphs.append(graphs_made())


def fit(
    target: FrozenTarget, folder: Path, *callbacks: L.Callback, labels: str = "hard", path_width: int = 0, **settings: Any
) -> Watch:
    torch.compiler.reset()
    torch.manual_seed(0)
    sizes = {"block_size": 8, "head_dim": 64, "num_hidden_layers": 2, "path_width": path_width}
    config = embedded_config(target_fingerprint=target.fingerprint, **sizes)
    module = DrafterModule(config.to_dict(), target.ends(), {"weights": "dpace", "labels": labels}, anchors=16, seed=3, lr=1e-3)
    data = RowDataModule(packed_rows([[(128, 4)], [(60, 4), (40, 30)]] * 8), packed_rows([[(128, 4)]] * 5, seed=1), 4, 1)
    watch = Watch()
    ckpt_path = settings.pop("ckpt_path", None)
    L.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=ColocatedStrategy(target, config.target_layer_ids, "cuda:0", teacher=labels == "soft"),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        max_epochs=-1,
        max_steps=8,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        inference_mode=False,
        callbacks=[*callbacks, watch],
        default_root_dir=folder,
        **settings,
    ).fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return watch


@pytest.mark.parametrize(("labels", "path_width"), [("hard", 0), ("soft", 0), ("hard", 32)])
def test_nothing_compiles_after_it_and_losses_are_those_without(
    target: FrozenTarget, tmp_path: Path, labels: str, path_width: int
) -> None:
    kind: dict[str, Any] = {"labels": labels, "path_width": path_width}
    warm = fit(target, tmp_path, CompileWarmup(), ModelCheckpoint(tmp_path, every_n_train_steps=3), **kind)
    assert len(set(warm.graphs)) == 1  # train, validation with a partial batch, checkpoint
    cold = fit(target, tmp_path, **kind)
    assert all(torch.equal(one, other) for one, other in zip(warm.random, cold.random, strict=True))
    # FlexAttention's and the head's kernels add in one order, so equal is equal.
    assert warm.losses == pytest.approx(cold.losses, rel=1e-5)


def test_resuming_compiles_nothing_either(target: FrozenTarget, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    whole = fit(target, tmp_path, CompileWarmup(), save)
    resumed = fit(target, tmp_path, CompileWarmup(), ckpt_path=tmp_path / "step=4.ckpt")
    assert len(set(resumed.graphs)) == 1
    assert resumed.losses == pytest.approx(whole.losses[4:], rel=1e-5)
