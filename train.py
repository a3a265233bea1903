"""Train a drafter: ``python train.py [key=value ...]``; ``--cfg job`` shows every key, ``-m`` sweeps.

Compose, check, seed, instantiate, fit, report. Everything else is in ``dflash_lit``.
"""

from __future__ import annotations

import dflash_lit.early  # noqa: F401 - before lightning imports torch's compiler

# isort: split
import hydra
import lightning as L
from omegaconf import DictConfig

from dflash_lit.checkpoints.form import restoring
from dflash_lit.config import TrainConfig, register
from dflash_lit.job import Job
from dflash_lit.placement.world import World
from dflash_lit.plan import Plan
from dflash_lit.ranks import begin, launch

register()


def train(cfg: TrainConfig, plan: Plan, world: World | None) -> float | None:
    """One job as a drafter does it, from the config to the report; what a sweeper maximises, if anything."""
    with Job(cfg, plan, world) as job:
        callbacks, loggers = job.instances()
        job.announce()
        L.seed_everything(cfg.seed, verbose=False)
        with job.phase("target"):
            target = job.target()
        with job.phase("data"):
            data = job.data(target)
        with job.phase("train"):
            module = job.module(target)
            trainer = job.trainer(target, callbacks, loggers)
            with restoring(cfg.ckpt_path):
                trainer.fit(module, datamodule=data.module, ckpt_path=cfg.ckpt_path, weights_only=True)
            job.trained(trainer)
        with job.phase("decode"):
            whole = job.leave(target)
            if whole is None:
                return None
            summary = job.summarise(trainer, module, whole, data)
        job.close(summary, trainer)
    return summary.get(cfg.optimized_metric) if cfg.optimized_metric else None


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    return begin(composed, train, __file__)


if __name__ == "__main__":
    # Of several processes rank 0 calls main; every other one is told what it is.
    raise SystemExit(launch(main, train, __file__))
