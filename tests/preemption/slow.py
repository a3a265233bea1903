"""``train.py`` of which one part is slow, and says so each time it begins; by the variable ``SLOW``: PART:SECONDS."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from dflash_lit import decoded
from dflash_lit.data import respond
from dflash_lit.module import DrafterModule
from dflash_lit.ranks import begin, launch
from train import train

PARTS: dict[str, tuple[Any, str]] = {
    "data": (respond, "generate_batch"),
    "validation": (DrafterModule, "validation_step"),
    "training": (DrafterModule, "training_step"),
    "decoding": (decoded, "measure"),
}


@hydra.main(version_base="1.3", config_path="../../conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    return begin(composed, train, __file__)


if __name__ == "__main__":
    part, seconds = os.environ.get("SLOW", "none:0").split(":")
    if part in PARTS:
        place, name = PARTS[part]
        function: Callable[..., Any] = getattr(place, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            print(f"slow {part}", file=sys.stderr, flush=True)
            time.sleep(float(seconds))
            return function(*arguments, **named)

        setattr(place, name, slow)
    raise SystemExit(launch(main, train, __file__))
