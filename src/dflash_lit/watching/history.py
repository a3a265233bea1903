"""What each validation found, kept so that curves by slot and by budget can be drawn over time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

__all__ = ["Curves", "History", "by_budget", "by_slot", "spread"]

History = Mapping[int, Mapping[str, float]]
"""optimizer step -> metric -> value"""

Curves = dict[str, list[tuple[int, float]]]
"""name -> (x, y), x ascending"""


def spread(steps: list[int], most: int) -> list[int]:
    """At most ``most`` (2 or more) of the steps, evenly, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def by_slot(history: History, most: int = 8) -> Curves:
    """Share of blocks whose slots 1..k are all right against k, a curve a validation; empty if nothing was logged."""
    return _curves(history, r"val/acceptance_slot_(\d+)", "step {step}", most)


def by_budget(history: History, most: int = 4) -> Curves:
    """Accepted length against the nodes of a draft tree, expected and, where trees were decoded, decoded; 0 is the chain."""
    expected = _curves(history, r"val/tree_eal@(\d+)", "tree EAL, step {step}", most, chain="val/chain_eal")
    decoded = _curves(history, r"val/tau@(\d+)", "decoded tau, step {step}", most, chain="acceptance/tau_greedy")
    return {**expected, **decoded}


def _curves(history: History, pattern: str, name: str, most: int, chain: str | None = None) -> Curves:
    found: dict[int, dict[int, float]] = {}
    for step, metrics in history.items():
        values = {int(match[1]): value for key, value in metrics.items() if (match := re.fullmatch(pattern, key))}
        if values and chain is not None and chain in metrics:
            values[0] = metrics[chain]
        if kept := {x: value for x, value in values.items() if math.isfinite(value)}:
            found[step] = kept
    return {name.format(step=step): sorted(found[step].items()) for step in spread(sorted(found), most)}
