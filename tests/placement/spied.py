"""``train.py`` that writes down, process by process, when it reads a whole target, its ends alone, and when it makes a drafter.

A line each in ``$SPY/LOCAL_RANK-PID``: ``target``, ``ends``, ``drafter``; ``fit`` when training begins, ``fitted`` when it is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from omegaconf import DictConfig

from dflash_lit.drafter.model import Drafter
from dflash_lit.placement import remote_target
from dflash_lit.placement.started import how_started
from dflash_lit.ranks import begin, launch
from dflash_lit.target.frozen import FrozenTarget
from train import train


def spy(place: Any, name: str, before: str, after: str | None = None) -> None:
    """Let a function say that it is called, and what it has done."""
    function: Callable[..., Any] = getattr(place, name)
    path = Path(os.environ["SPY"]) / f"{how_started().local_rank}-{os.getpid()}"

    def said(word: str | None) -> None:
        if word:
            with path.open("a") as file:
                file.write(f"{word}\n")

    def spied(*arguments: Any, **named: Any) -> Any:
        said(before)
        result = function(*arguments, **named)
        said(after)
        return result

    setattr(place, name, spied)


@hydra.main(version_base="1.3", config_path="../../conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    return begin(composed, train, __file__)


if __name__ == "__main__":
    spy(FrozenTarget, "load", "target")
    spy(remote_target, "read_ends", "ends")
    spy(Drafter, "__init__", "drafter")
    spy(L.Trainer, "fit", "fit", "fitted")
    raise SystemExit(launch(main, train, __file__))
