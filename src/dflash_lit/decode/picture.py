"""What the budget of draft trees does to length and speed, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash_lit.decode.acceptance import Acceptance
from dflash_lit.pictures import BLUE, GREEN, GREY, ORANGE, STYLE, save_picture

__all__ = ["draw_budgets"]

LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (GREY, "^"))


def draw_budgets(results: Sequence[Acceptance], path: str | Path) -> None:
    """Tau with its 95 % interval, and tokens a second over those without a drafter, against the budget; a line a temperature.

    The suffix chooses the format (.png, .svg, .pdf).

    Raises:
        UserError: if the file cannot be written.
    """
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(9.5, 4), layout="constrained")
        length, speed = figure.subplots(1, 2)
        places = {budget: place for place, budget in enumerate(sorted({r.budget for r in results}))}
        for number, heat in enumerate(dict.fromkeys(r.temperature for r in results)):
            of_heat = sorted((r for r in results if r.temperature == heat), key=lambda r: r.budget)
            colour, marker = LOOKS[number % len(LOOKS)]
            x = [places[r.budget] for r in of_heat]
            look = {"color": colour, "marker": marker, "label": f"T={heat:g}"}
            rooms = [high - r.tau if math.isfinite(high := r.tau_interval[1]) else 0.0 for r in of_heat]
            length.errorbar(x, [r.tau for r in of_heat], yerr=rooms, capsize=3, **look)
            speed.plot(x, [r.speedup for r in of_heat], **look)
        speed.axhline(1, color=GREY, linestyle="--", label="the target alone")
        _finish(length, places, "tokens per target pass (incl. bonus), 95 %")
        _finish(speed, places, "tokens/s over plain decoding")
        save_picture(figure, path, dpi=120)


def _finish(axes: Axes, places: dict[int, int], ylabel: str) -> None:
    axes.set_xlabel("tree nodes the target verifies")
    axes.set_ylabel(ylabel)
    axes.set_xticks(list(places.values()), [str(budget) if budget else "chain" for budget in places])
    axes.margins(x=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)
