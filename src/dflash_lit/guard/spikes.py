"""When a figure of a step is far above what it was lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Spike", "SpikeDetector"]

_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation (Rousseeuw and Croux 1993)."""

_LEAST = 0.02
"""Share of the median that is taken for the spread at least: equal values would else make a spike of anything."""


@dataclass(frozen=True)
class Spike:
    """A value above its limit.

    Attributes:
        name: of the figure.
        usual: median of the values before.
        limit: what it would have been allowed.
    """

    name: str
    value: float
    usual: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} is a spike (median {self.usual:.4g}, limit {self.limit:.4g})"


class SpikeDetector:
    """Compares each value with the median of those before it, plus ``threshold`` times their spread.

    The spread is the median absolute deviation, in standard deviations: neither moves with a few outliers, so spikes are counted
    among the values before as well, and a level that stays is soon a usual one.

    Args:
        window: values before that count, >= 8.
        threshold: standard deviations.
        warmup: values to see before anything is called a spike, at least 8 of them.
    """

    def __init__(self, window: int = 128, threshold: float = 10.0, warmup: int = 100) -> None:
        self.window, self.threshold, self.warmup = window, threshold, warmup
        self._values: dict[str, deque[float]] = {}
        self._seen: dict[str, int] = {}

    def look(self, values: Mapping[str, float]) -> list[Spike]:
        """Spikes among the ``values`` of one step, all of them finite, which count from now on."""
        found = []
        for name, value in values.items():
            before = self._values.setdefault(name, deque(maxlen=self.window))
            if self._seen.get(name, 0) >= self.warmup and len(before) >= 8:
                usual = median(before)
                spread = max(_NORMAL * median(abs(x - usual) for x in before), _LEAST * abs(usual))
                limit = usual + self.threshold * spread
                if value > limit:
                    found.append(Spike(name, value, usual, limit))
            before.append(value)
            self._seen[name] = self._seen.get(name, 0) + 1
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"values": {name: list(values) for name, values in self._values.items()}, "seen": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        finite = {name: [x for x in values if math.isfinite(x)] for name, values in state["values"].items()}
        self._values = {name: deque(values, maxlen=self.window) for name, values in finite.items()}
        self._seen = dict(state["seen"])
