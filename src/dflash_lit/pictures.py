"""The figures of the run report: one small function a figure, each from logged series to an inline SVG.

Every function returns None when its series were not logged: an empty picture would look like a measurement of nothing.
Lengths are tokens per target pass and include the bonus token: *tau* is counted in real decoding, *EAL* (expected accepted
length) comes from the teacher-forced validation pass.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dflash_lit.errors import UserError

__all__ = [
    "acceptance_by_slot",
    "budget_curves",
    "budgets",
    "length_curves",
    "loss_curves",
    "parallel_coordinates",
    "pipeline_curves",
    "save_picture",
    "tau_by_budget",
    "tree_by_budget",
]

Series = Sequence[tuple[int, float]]
"""(optimizer step, value), steps ascending."""

# Okabe-Ito: told apart by colour-blind readers too; line style or marker repeats the distinction.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8F98"

STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be selected and takes the page's font
    "svg.hashsalt": "dflash-lit",  # ids are random without it
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E7EB",
    "legend.frameon": False,
}


def loss_curves(metrics: Mapping[str, Series]) -> str | None:
    """Training and validation loss over optimizer steps."""
    with _style():
        figure, axes = _canvas("optimizer step", "loss")
        _line(axes, metrics.get("train/loss", ()), "training", color=GREY, linewidth=1)
        _line(axes, metrics.get("val/loss", ()), "validation", color=BLUE, marker="o", markersize=4)
        return _svg(figure, axes, "Training and validation loss over steps")


def length_curves(metrics: Mapping[str, Series]) -> str | None:
    """Accepted lengths over optimizer steps: validation chain EAL and tree EAL@64, and tau of real decoding of both."""
    with _style():
        figure, axes = _canvas("optimizer step", "tokens per target pass (incl. bonus)")
        _line(axes, metrics.get("val/tree_eal@64", ()), "tree EAL@64", color=GREEN, marker="s", markersize=4)
        _line(axes, metrics.get("val/chain_eal", ()), "chain EAL", color=BLUE, marker="o", markersize=4)
        tau = metrics.get("acceptance/tau_greedy", ())
        _line(axes, tau, "decoded tau", color=ORANGE, marker="D", markersize=4, linestyle="--")
        tree = metrics.get("val/tau@64", ())
        _line(axes, tree, "decoded tree tau@64", color=GREY, marker="^", markersize=4, linestyle="--")
        _from_zero(axes)
        return _svg(figure, axes, "Accepted length over steps")


def acceptance_by_slot(metrics: Mapping[str, Series]) -> str | None:
    """Survival (slots 1..k all right) and marginal accuracy (slot k right) against k, at the first and the last validation."""
    with _style():
        figure, axes = _canvas("slot in the block", "share of blocks")
        for prefix, name, linestyle in (
            ("val/acceptance_slot_", "slots 1..k all right", "-"),
            ("val/accuracy_slot_", "slot k right", "--"),
        ):
            slots = _by_number(metrics, prefix)
            steps = sorted({step for series in slots.values() for step, _ in series})
            for step in dict.fromkeys(steps[:1] + steps[-1:]):  # a single validation is drawn once, as the last
                color = BLUE if step == steps[-1] else GREY
                values = [(k, value) for k, series in slots.items() for at, value in series if at == step]
                _line(axes, values, f"{name}, step {step}", color=color, linestyle=linestyle, marker="o", markersize=4)
        axes.set_ylim(0, 1)
        return _svg(figure, axes, "Acceptance by slot, first and last validation")


def budget_curves(metrics: Mapping[str, Series]) -> str | None:
    """Accepted length over optimizer steps by node budget: tree EAL solid, tau of decoded trees dashed; None for one budget.

    A single budget is in :func:`length_curves` already.
    """
    expected, decoded = (_by_number(metrics, prefix) for prefix in ("val/tree_eal@", "val/tau@"))
    if len({*expected, *decoded}) < 2:
        return None
    with _style():
        figure, axes = _canvas("optimizer step", "tokens per target pass (incl. bonus)")
        colours = dict(zip(sorted({*expected, *decoded}), [BLUE, GREEN, ORANGE, GREY] * 9, strict=False))
        for trees, name, look in ((expected, "tree EAL", "-"), (decoded, "decoded tau", "--")):
            for budget, series in trees.items():
                _line(axes, series, f"{name}@{budget}", color=colours[budget], linestyle=look, marker="o", markersize=3)
        _from_zero(axes)
        return _svg(figure, axes, "Accepted length by budget over steps")


def pipeline_curves(metrics: Mapping[str, Series]) -> str | None:
    """Thousand tokens a second over optimizer steps, and what either side of a split run could do if it never waited."""
    with _style():
        figure, axes = _canvas("optimizer step", "thousand tokens a second")
        for name, label, color, look in (
            ("ktok_s", "trained on", BLUE, "-"),
            ("supply_ktok_s", "targets could supply", GREEN, "--"),
            ("demand_ktok_s", "drafters could take", ORANGE, "--"),
        ):
            _line(axes, metrics.get(f"pipeline/{name}", ()), label, color=color, linestyle=look, linewidth=1.3)
        _from_zero(axes)
        return _svg(figure, axes, "Tokens a second over steps")


def tree_by_budget(tree: Mapping[int, float], chain: float | None) -> str | None:
    """Tree EAL against the node budget (see :func:`budgets`), with the chain EAL as the line to beat."""
    with _style():
        figure, axes = _canvas("tree nodes the target verifies", "tokens per target pass (incl. bonus)")
        _line(axes, sorted(tree.items()), "tree EAL", color=GREEN, marker="s", markersize=6)
        for budget, value in tree.items():
            axes.annotate(f"{value:.2f}", (budget, value), xytext=(0, 7), textcoords="offset points", ha="center")
        if chain is not None and tree:
            axes.axhline(chain, color=BLUE, linestyle="--", label=f"chain EAL {chain:.2f}")
        if tree:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(tree), [str(budget) for budget in sorted(tree)])
            axes.minorticks_off()
            axes.margins(x=0.12)
        axes.set_ylim(0, 1.2 * max([*tree.values(), chain or 0, 1]))
        return _svg(figure, axes, "Tree EAL by node budget")


def tau_by_budget(decoded: Mapping[str, Mapping[int, tuple[float, float]]]) -> str | None:
    """Decoded tau and its standard error against the node budget, a line a temperature; budget 0 is the chain.

    None unless trees were decoded.
    """
    with _style():
        figure, axes = _canvas("tree nodes the target verifies", "tokens per target pass (incl. bonus)")
        shown = sorted({budget for taus in decoded.values() for budget in taus})
        if any(shown):
            looks = zip((ORANGE, BLUE, GREEN, GREY), "DosP", strict=True)
            for (name, taus), (color, marker) in zip(decoded.items(), looks, strict=False):
                points = [(shown.index(budget), *taus[budget]) for budget in sorted(taus)]
                x, y, error = zip(*points, strict=True)
                _line(axes, list(zip(x, y, strict=True)), f"decoded, {name}", color=color, marker=marker, markersize=5)
                axes.errorbar(
                    x, y, yerr=[e if math.isfinite(e) else 0 for e in error], color=color, capsize=3, linestyle="none"
                )
            axes.set_xticks(range(len(shown)), [str(budget) if budget else "chain" for budget in shown])
            axes.margins(x=0.12)
            _from_zero(axes)
        return _svg(figure, axes, "Decoded tau by node budget")


def parallel_coordinates(settings: Mapping[str, Sequence[str | None]], metric: str, values: Sequence[float]) -> str | None:
    """One line a job over an axis a setting, and the metric as the last axis; colour says the metric.

    An axis whose values are all finite numbers has their scale (logarithmic if they are positive and span a factor of 50), any
    other has its values in order of appearance.

    Args:
        settings: name -> value of each job, None where it was not given.
        metric: its name.
        values: finite, one a job.

    Returns:
        None for fewer than two jobs, or if no setting was varied.
    """
    if len(values) < 2 or not settings:
        return None
    # Where each job crosses each axis, from 0 to 1, and the ticks of the axis.
    crossings, ticks = zip(*(_axis(list(column)) for column in [*settings.values(), [repr(v) for v in values]]), strict=True)
    with _style():
        figure = Figure(figsize=(max(6.0, 1.6 * len(crossings)), 3.8), layout="constrained")
        axes = figure.add_subplot()
        low, high = min(values), max(values)
        colours = matplotlib.colormaps["viridis"]
        for job in sorted(range(len(values)), key=lambda one: values[one]):  # the best on top
            share = (values[job] - low) / (high - low) if high > low else 1.0
            axes.plot(range(len(crossings)), [column[job] for column in crossings], color=colours(share), linewidth=1.6)
        for x, marks in enumerate(ticks):
            axes.axvline(x, color=GREY, linewidth=1)
            for y, text in marks.items():
                axes.annotate(text, (x, y), xytext=(3, 2), textcoords="offset points", fontsize=8)
        # Names as they are: "@" and "_" are no mathematics, and a "$" is none either.
        names = [name.replace("$", r"\$") for name in (*settings, metric)]
        axes.set_xticks(range(len(crossings)), names, rotation=20 if len(names) > 4 else 0)
        axes.set_yticks([])
        axes.grid(False)
        axes.set_ylim(-0.05, 1.08)
        axes.spines[["left", "bottom"]].set_visible(False)
        return _svg(figure, axes, f"Settings of each job and its {metric}")


def _axis(column: Sequence[str | None]) -> tuple[list[float], dict[float, str]]:
    """Positions from 0 to 1, and position -> text of the values there."""
    texts = ["(default)" if value is None else value for value in column]
    numbers = [_number(text) for text in texts]
    if all(math.isfinite(value) for value in numbers):
        low, high = min(numbers), max(numbers)
        scale = math.log if low > 0 and high >= 50 * low else float
        span = scale(high) - scale(low)
        places = [(scale(value) - scale(low)) / span if span else 0.5 for value in numbers]
        few = sorted(set(numbers))
        if len(few) > 6:
            few = [low, high]
        return places, {places[numbers.index(value)]: f"{value:.5g}" for value in few}
    known = list(dict.fromkeys(texts))
    where = {text: index / (len(known) - 1) if len(known) > 1 else 0.5 for index, text in enumerate(known)}
    return [where[text] for text in texts], {place: text.replace("$", r"\$") for text, place in where.items()}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def budgets(values: Mapping[str, float]) -> dict[int, float]:
    """Node budget -> tree EAL, from the keys `val/tree_eal@<budget>`; values that are not finite are left out."""
    found = {key.removeprefix("val/tree_eal@"): value for key, value in values.items() if key.startswith("val/tree_eal@")}
    return {int(budget): value for budget, value in found.items() if budget.isdecimal() and math.isfinite(value)}


def _by_number(metrics: Mapping[str, Series], prefix: str) -> dict[int, Series]:
    """The series named `<prefix><number>`, by number, ascending."""
    numbers = (key.removeprefix(prefix) for key in metrics if key.startswith(prefix))
    return {number: metrics[f"{prefix}{number}"] for number in sorted(int(n) for n in numbers if n.isdecimal())}


def _style() -> AbstractContextManager[None]:
    # From "default": a user's own matplotlibrc must not change the report.
    return matplotlib.style.context(["default", STYLE])


def _canvas(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _line(axes: Axes, series: Series, label: str, **look: object) -> None:
    """Draw a series if it has any finite value: only what was measured enters the legend."""
    points = [(x, y) for x, y in series if math.isfinite(y)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **look)  # type: ignore[arg-type]


def _from_zero(axes: Axes) -> None:
    """Autoscaling leaves room for the range of the values, which is little for lengths that hardly differ: markers would be cut."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def save_picture(figure: Figure, path: str | Path, *, dpi: int, option: str = "") -> None:
    """Write it; the suffix chooses the format (.png, .svg, .pdf).

    Args:
        option: that named the file, for the message.

    Raises:
        UserError: if the file cannot be written.
    """
    # Without a date, which matplotlib would take from SOURCE_DATE_EPOCH, whatever that holds.
    metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
    try:
        figure.savefig(path, dpi=dpi, metadata=metadata)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{option}{path}: cannot write the picture ({reason}); name another .png, .svg or .pdf file") from error


def _svg(figure: Figure, axes: Axes, title: str) -> str | None:
    """The figure as an inline SVG element without size, ids of groups, metadata or DOCTYPE; None if nothing was drawn."""
    if not axes.lines:
        return None
    # Above the axes: a legend inside hides points wherever the curves happen to go.
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside upper left", ncols=3 if len(axes.lines) == 3 else 2, fontsize=9)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(r'<g id="[^"]*"', "<g", buffer.getvalue())  # the ids repeat in each figure of the page
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # the page decides the size
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1).strip()
