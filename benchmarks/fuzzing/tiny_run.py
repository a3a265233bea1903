"""A run small enough to be made again for every case, in this process or in one of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_lit.checkpoints.form import restoring
from dflash_lit.commands import groups_explained
from dflash_lit.config import TrainConfig
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.job import Job
from dflash_lit.module import DrafterModule
from dflash_lit.plan import Plan, make_plan
from dflash_lit.target.frozen import FrozenTarget

__all__ = ["CONF", "TINY", "fitted", "planned", "quiet"]

CONF = Path(__file__).parents[2] / "conf"
TINY = (
    "debug=fast",
    "logger=csv",
    "trainer.threads=1",
    "trainer.max_steps=4",
    "trainer.val_every=2",
    "trainer.accumulate_grad_batches=2",
    "data.train_prompts=16",
    "data.val_prompts=2",
    "data.prompt_tokens=32",
    "data.response_tokens=40",
    "data.rows_per_batch=1",
    "data.row_tokens=128",
    "data.responses_per_batch=32",
    "drafter.layers=1",
    "drafter.intermediate_size=32",
    "drafter.num_attention_heads=2",
    "drafter.num_key_value_heads=1",
    "drafter.head_dim=16",
    "drafter.block_size=4",
    "drafter.anchors=4",
    "evaluation.tree_budgets=[4]",
    "evaluation.prompts=1",
    "evaluation.temperatures=[]",
    "evaluation.max_new_tokens=4",
    "callbacks.acceptance=null",
    "callbacks.export=null",
)


def planned(overrides: Sequence[str], conf: Path = CONF) -> tuple[TrainConfig, Plan]:
    """The config that a command line gives, and its plan."""
    with groups_explained(overrides), initialize_config_dir(str(conf), version_base="1.3"):
        composed = compose("train", overrides=list(overrides))
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, TrainConfig)
    return cfg, make_plan(cfg)


def fitted(cfg: TrainConfig, plan: Plan, target: FrozenTarget, data: RowDataModule) -> tuple[L.Trainer, DrafterModule]:
    """What ``train.py`` does between the data and the decoding."""
    fresh = RowDataModule(data.train, data.val, data.rows_per_batch, data.seed)
    with Job(cfg, plan) as job:
        job.console.quiet = True
        callbacks, loggers = job.instances()
        L.seed_everything(cfg.seed, verbose=False)
        module = job.module(target)
        trainer = job.trainer(target, callbacks, loggers)
        with restoring(cfg.ckpt_path):
            trainer.fit(module, datamodule=fresh, ckpt_path=cfg.ckpt_path, weights_only=True)
    return trainer, module


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning logs of each fit."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "dflash_lit", "callbacks")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
