"""One run as one or several processes: physical rank 0 begins it, the others join it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from dflash_lit.commands import exits_on_user_error
from dflash_lit.config import TrainConfig
from dflash_lit.errors import Interrupted
from dflash_lit.job import Job, quiet_libraries
from dflash_lit.placement.layout import Role
from dflash_lit.placement.started import how_started
from dflash_lit.placement.world import World, follow, lead
from dflash_lit.plan import Plan, make_plan

__all__ = ["begin", "join"]

Train = Callable[[TrainConfig, Plan, "World | None"], "float | None"]
"""What every drafter does; the result counts on rank 0."""


def begin(composed: DictConfig, train: Train, script: str) -> float | None:
    """Check the config, start the other processes if there are any, and train.

    Args:
        script: run by the other processes of this host; it must call :func:`join` where this process called this.
    """
    with exits_on_user_error():
        cfg = OmegaConf.to_object(composed)
        assert isinstance(cfg, TrainConfig)
        quiet_libraries()
        plan = make_plan(cfg)
        if plan.layout.world == 1:
            return train(cfg, plan, None)
        text = OmegaConf.to_yaml(composed, resolve=True)
        command = [sys.executable, script]
        with lead(plan.layout, how_started(), text, command=command, timeout_s=cfg.placement.timeout_s) as world:
            return train(cfg, plan, world)


def join(train: Train, script: str) -> int:
    """Take part as what the layout says this process is; its exit code."""
    with exits_on_user_error(quiet=True):
        world, text = follow(how_started(), [sys.executable, script])
        try:
            with world:
                cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.create(text)))
                assert isinstance(cfg, TrainConfig)
                quiet_libraries()
                plan = make_plan(cfg)
                if world.role is Role.DRAFTER:
                    train(cfg, plan, world)
                else:
                    with Job(cfg, plan, world) as job:
                        job.serve()
        except Interrupted:
            pass  # rank 0 says so
    return 0
