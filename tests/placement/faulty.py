"""``train.py`` with a fault planted in one rank, for those that cannot be made from outside; by the variable ``FAULT``.

``FAULT`` is ``PLACE:LOCAL_RANK``. Places: ``forward`` (a target), ``step`` and ``callback`` (a drafter).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from callbacks.finite_guard import FiniteGuard
from dflash_lit.module import DrafterModule
from dflash_lit.placement.started import how_started
from dflash_lit.ranks import begin, launch
from dflash_lit.target.frozen import FrozenTarget
from train import train

PLACES = {
    "forward": (FrozenTarget, "features"),
    "step": (DrafterModule, "training_step"),
    "callback": (FiniteGuard, "on_train_batch_end"),
}


def plant(place: str, local_rank: int) -> None:
    """Let a method fail at its sixth call."""
    if how_started().local_rank != local_rank:
        return
    kind, name = PLACES[place]
    method: Callable[..., Any] = getattr(kind, name)
    calls = iter(range(5))

    def faulty(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise ArithmeticError("planted: 1 + 1 = 3")
        return method(*arguments, **named)

    setattr(kind, name, faulty)


@hydra.main(version_base="1.3", config_path="../../conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    return begin(composed, train, __file__)


if __name__ == "__main__":
    where, rank = os.environ["FAULT"].split(":")
    if how_started().by != "rejoin":  # who takes the place of one that has failed does not fail
        plant(where, int(rank))
    raise SystemExit(launch(main, train, __file__))
