"""What conf/callbacks keeps: the best checkpoint by the draft trees' length, and the last one, whatever it is worth."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf" / "callbacks" / "default.yaml"


class Falling(BoringModel):
    """Gets worse from the second validation on."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/tree_eal@64", -abs(float(self.trainer.global_step) - 2))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_last_is_the_last_and_not_the_best(tmp_path: Path) -> None:
    conf = OmegaConf.create({"paths": {"output_dir": str(tmp_path)}, "callbacks": OmegaConf.load(CONF)})
    callbacks = [instantiate(conf.callbacks[name]) for name in ("checkpoint", "last_checkpoint")]
    L.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=tmp_path,
    ).fit(Falling())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step=2.ckpt"]
    for name, step in (("last.ckpt", 8), ("step=2.ckpt", 2)):
        assert torch.load(folder / name, weights_only=True)["global_step"] == step
