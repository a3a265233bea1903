"""Train a drafter: ``python train.py [key=value ...]``; ``--cfg job`` shows every key, ``-m`` sweeps.

Compose, check, seed, instantiate, fit, report. Everything else is in ``dflash_lit``.
"""

from __future__ import annotations

import hydra
import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf

from dflash_lit.commands import exits_on_user_error, run_command
from dflash_lit.config import TrainConfig, register
from dflash_lit.job import Job, load_target, quiet_libraries
from dflash_lit.plan import make_plan

register()


def train(composed: DictConfig) -> float | None:
    """One job, from the composed config to the report; what a sweeper maximises, if anything."""
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, TrainConfig)
    quiet_libraries()
    plan = make_plan(cfg)
    with Job(cfg, plan) as job:
        callbacks, loggers = job.instances()
        L.seed_everything(cfg.seed, verbose=False)
        if cfg.trainer.threads is not None:
            torch.set_num_threads(cfg.trainer.threads)
        with job.phase("target"):
            target = load_target(plan, cfg)
        with job.phase("data"):
            data = job.data(target)
        with job.phase("train"):
            module = job.module(target)
            trainer = job.trainer(target, callbacks, loggers)
            trainer.fit(module, datamodule=data.module, ckpt_path=cfg.ckpt_path, weights_only=True)
        with job.phase("decode"):
            summary = job.summarise(trainer, module, target, data)
        job.close(summary, trainer)
    return summary.get(cfg.optimized_metric) if cfg.optimized_metric else None


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    with exits_on_user_error():
        return train(composed)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
