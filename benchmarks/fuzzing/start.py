"""``train.py`` as the fuzz starts it: says what it has made of its start, and, unless it is to do all, ends there.

``FUZZ_SEEN`` names the file it tells that in, ``FUZZ_WHOLE`` asks for the whole run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.remove(str(Path(__file__).parent))  # its modules have names that others have, too
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

import dflash_lit.early  # noqa: E402, F401 - before lightning imports torch's compiler

# isort: split
import hydra  # noqa: E402
import optuna  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from dflash_lit import ranks  # noqa: E402
from dflash_lit.config import TrainConfig, register, wandb_offline  # noqa: E402
from dflash_lit.job import Job  # noqa: E402
from dflash_lit.placement import world as worlds  # noqa: E402
from dflash_lit.plan import Plan  # noqa: E402
from dflash_lit.ranks import begin, launch  # noqa: E402
from dflash_lit.sweeps.trial import running_trial  # noqa: E402
from train import train as whole  # noqa: E402

register()
worlds._START_S, ranks._TELL_S = 6.0, 2.0  # nobody else is slow to start here


def train(cfg: TrainConfig, plan: Plan, world: worlds.World | None) -> float | None:
    """All of it, or what depends on the environment."""
    if os.environ.get("FUZZ_WHOLE"):
        return whole(cfg, plan, world)
    with Job(cfg, plan, world) as job:
        job.instances()
        running_trial(optuna.pruners.NopPruner())
        if job.leads:
            facts = {
                "world": plan.layout.world,
                "device": plan.device.type,
                "offline": wandb_offline(),
                "folder": str(job.folder),
            }
            Path(os.environ["FUZZ_SEEN"]).write_text(json.dumps(facts))
    return None


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="train")
def main(composed: DictConfig) -> float | None:
    return begin(composed, train, __file__)


if __name__ == "__main__":
    if seen := os.environ.get("FUZZ_SEEN"):
        Path(f"{seen}.{os.getpid()}.pid").touch()
    raise SystemExit(launch(main, train, __file__))
