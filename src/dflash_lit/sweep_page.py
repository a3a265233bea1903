"""The HTML of a sweep's report, in the looks of a run's; everything that comes from the jobs is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from dflash_lit import pictures
from dflash_lit.report_page import CSS, document, duration_text
from dflash_lit.sweep_results import Sweep, SweepJob, settings

__all__ = ["page"]

_SHOWN = ("val/tree_eal@64", "val/chain_eal", "tau_greedy", "tau_greedy@64", "val/loss", "train_loss", "wall_s")
"""Metrics of the table beside the optimized one; ``results.csv`` has all."""


def page(sweep: Sweep) -> str:
    """The whole page; loads nothing."""
    title = f"Sweep of {len(sweep.jobs)} job{'' if len(sweep.jobs) == 1 else 's'}"
    parts = [f"<h1>{title}</h1>", _best(sweep), _picture(sweep), _seeds(sweep), _jobs(sweep), _failed(sweep)]
    return document(f"{title}: {sweep.metric}", "\n".join(part for part in parts if part), CSS + _CSS)


def _best(sweep: Sweep) -> str:
    job = sweep.best
    whence = "optimized_metric" if sweep.asked else "no optimized_metric was set"
    if job is None:
        return f"<p>No job has a <b>{escape(sweep.metric)}</b> ({whence}).</p>"
    setting = ", ".join(f"{key}={job.overrides.get(key, '(default)')}" for key in sweep.varied) or "nothing was varied"
    return (
        "<section class='cards'><div class='card big'>"
        f"<h3>best {escape(sweep.metric)} ({whence}; larger is better)</h3>"
        f"<p class='value'>{job.value(sweep.metric):.3f}</p>"
        f"<p>Job {escape(job.name)}: {escape(setting)}. "
        "<code>python train.py --config-dir THIS_FOLDER --config-name best</code> trains it again.</p></div></section>"
    )


def _picture(sweep: Sweep) -> str:
    axes = {key: [job.overrides.get(key) for job in sweep.ranked] for key in sweep.varied}
    drawn = pictures.parallel_coordinates(axes, sweep.metric, [job.value(sweep.metric) or 0.0 for job in sweep.ranked])
    if drawn is None:
        return ""
    caption = "A line a job with a result; the more yellow, the better. Axes whose lines cross at random do not matter."
    return f"<h2>Settings and {escape(sweep.metric)}</h2><figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _seeds(sweep: Sweep) -> str:
    """Nothing where each setting ran once."""
    found = settings(sweep)
    if len(found) < 2 or all(one.jobs < 2 for one in found):
        return ""
    keys = [key for key in sweep.varied if key != "seed"]
    rows = [
        [
            *(one.overrides.get(key, "") for key in keys),
            _decimal(one.mean),
            _decimal(one.deviation),
            f"{len(one.values)}/{one.jobs}",
        ]
        for one in found
    ]
    heads = [*keys, f"mean {sweep.metric}", "standard deviation", "jobs with a result"]
    return "<h2>Over seeds</h2>" + _table(heads, rows)


def _jobs(sweep: Sweep) -> str:
    done = [*sweep.ranked, *(job for job in sweep.jobs if job.summary is not None and job.value(sweep.metric) is None)]
    if not done:
        return ""
    shown = [sweep.metric, *(m for m in _SHOWN if m != sweep.metric and any(job.value(m) is not None for job in done))]
    rows = [
        [job.name, *(job.overrides.get(key, "") for key in sweep.varied), *(_value(job, metric) for metric in shown)]
        for job in done
    ]
    return "<h2>Jobs, best first</h2>" + _table(["job", *sweep.varied, *shown], rows)


def _failed(sweep: Sweep) -> str:
    if not sweep.failed:
        return ""
    rows = [
        [job.name, job.status, " ".join(f"{key}={value}" for key, value in job.overrides.items()), job.reason]
        for job in sweep.failed
    ]
    return f"<h2>{len(rows)} without a result</h2>" + _table(["job", "status", "overrides", "why"], rows)


def _value(job: SweepJob, metric: str) -> str:
    value = job.value(metric)
    return duration_text(value) if metric == "wall_s" and value is not None else _decimal(value)


def _decimal(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_CSS = """
.wide { overflow-x: auto; } td { font-variant-numeric: tabular-nums; } code { overflow-wrap: anywhere; }
"""
