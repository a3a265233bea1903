"""How long the stages of a decoding round take: draft, build, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["STAGES", "Stages", "Timing", "untimed"]

STAGES = ("draft", "build", "verify", "commit")
"""The drafter's pass; the tree of its drafts; the target's pass and its choices; what was accepted, in both caches."""

Timing = Callable[[str], AbstractContextManager[None]]
"""Asked for a context manager around each stage, by its name."""


def untimed(stage: str) -> AbstractContextManager[None]:
    """No measurement: the host runs ahead of the device over the borders of stages."""
    return nullcontext()


class Stages:
    """Wall time of named stages. Waits for the device at each border, so a run with it is slower than one without.

    Args:
        device: what the stages run on.

    Attributes:
        seconds: of each stage, summed up.
        rounds: how many of them there were: each has one "verify".
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.rounds = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._now() - began
        self.rounds += stage == "verify"

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def milliseconds(self) -> dict[str, float]:
        """Of each stage, a round; none without a round."""
        return {name: 1000 * self.seconds[name] / self.rounds for name in STAGES if name in self.seconds and self.rounds}
