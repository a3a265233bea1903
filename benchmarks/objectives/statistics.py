"""The table of an experiment, from its raw records alone.

A record of a decoding holds, for each prompt ``p``, the tokens ``a_p`` that its rounds yielded (bonus included) and the number of
rounds ``n_p``. Of one objective ``o``, trained with seed ``s``:

    tau_os = sum_p a_osp / sum_p n_osp                 tau_o = mean over s of tau_os

A 95 % interval joins the two reasons why another experiment would give another figure:

* training: other first weights, another order of the texts, other anchors. ``t(S - 1) * sd_s(tau_os) / sqrt(S)`` with Student's
  t for S seeds.
* prompts: another sample of them. A prompt's rounds are not independent, so prompts are the clusters. Linearised, prompt ``p``
  moves the ratio by ``e_osp = (a_osp - tau_os n_osp) / mean_p n_osp``; averaged over seeds, which share the prompts, that is
  ``e_op``, and the half-width ``1.96 * sd_p(e_op) / sqrt(P)``.

The half-width of the interval is the root of the sum of the squares of both. The spread between seeds contains some noise of the
prompts, so the interval is rather too wide than too narrow.

Two objectives are compared in pairs: same seed (so same first weights, texts and anchors) and same prompts. Of
``l_s = log(tau_As / tau_Bs)`` the mean over seeds, with the same two parts, ``e_p`` being the mean over seeds of
``e_Asp / tau_As - e_Bsp / tau_Bs``; shown as ``exp(l) - 1`` in percent.

Over several targets (``together``) the ``l_s`` of all of them are the sample, a target and seed each; the prompts' half-widths of the
targets, whose prompts are independent, join with the targets' shares of the sample as weights.

What the table of one target does not cover: another target, other sizes, other settings of the optimizer.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from objectives.lengths import read_lengths

__all__ = ["Estimate", "compare", "estimate", "markdown", "read_records", "t_quantile", "together"]

Record = dict[str, Any]

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

LABELS = {
    "ce-decay": "CE x decay",
    "ce-dpace": "CE x D-PACE",
    "soft-dpace": "soft x D-PACE",
    "ce-tree-T2": "CE x tree, T=2",
    "soft-tree-T2": "soft x tree, T=2",
    "soft-mix-T2": "soft x tree, T=2, D-PACE floor",
    "soft-decay": "soft x decay",
    "soft-tree-T4": "soft x tree, T=4",
    "soft-mix-T4": "soft x tree, T=4, D-PACE floor",
    "soft-dpace-path": "soft x D-PACE, path head",
    "soft-dpace-causal": "soft x D-PACE, causal blocks",
}


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; 1.96 + 2.5 / freedom beyond the table, right to 0.01."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.5 / freedom


@dataclass(frozen=True)
class Estimate:
    """A figure and the half-width of its 95 % interval, of which ``training`` and ``prompts`` are the parts.

    ``training`` is NaN for a single seed; the interval then covers the prompts alone.
    """

    value: float
    training: float
    prompts: float
    seeds: int

    @property
    def half_width(self) -> float:
        return self.prompts if math.isnan(self.training) else math.hypot(self.training, self.prompts)


def _of_training(values: Sequence[float]) -> float:
    """Half-width by a value a seed; NaN of one seed."""
    if len(values) < 2:
        return math.nan
    return t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _of_prompts(influences: np.ndarray) -> float:
    """Half-width by the influence [S, P] of each prompt; NaN of one prompt."""
    prompts = influences.shape[1]
    return 1.96 * float(np.std(influences.mean(axis=0), ddof=1)) / math.sqrt(prompts) if prompts > 1 else math.nan


def _ratios(tokens: np.ndarray, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """tau [S] of [S, P] tokens and rounds, and the influence [S, P] of each prompt on it."""
    tau = tokens.sum(axis=1) / rounds.sum(axis=1)
    return tau, (tokens - tau[:, None] * rounds) / rounds.mean(axis=1, keepdims=True)


def estimate(tokens: np.ndarray, rounds: np.ndarray) -> Estimate:
    """tau of one objective from tokens and rounds, both [S, P]; see the module."""
    tau, influence = _ratios(tokens, rounds)
    return Estimate(float(np.mean(tau)), _of_training(tau.tolist()), _of_prompts(influence), len(tau))


Counts = tuple[np.ndarray, np.ndarray]
"""Tokens and rounds, both [S, P]."""


def compare(*pairs: tuple[Counts, Counts]) -> Estimate:
    """How much longer the first of a pair is than the second, in percent; both of the same seeds and prompts. A pair a target."""
    logs: list[float] = []
    widths: list[tuple[int, float]] = []
    for first, second in pairs:
        (tau, influence), (other, others) = _ratios(*first), _ratios(*second)
        logs += np.log(tau / other).tolist()
        widths.append((len(tau), _of_prompts(influence / tau[:, None] - others / other[:, None])))
    prompts = math.hypot(*(seeds / len(logs) * width for seeds, width in widths))
    value = math.exp(float(np.mean(logs)))
    return Estimate(100 * (value - 1), 100 * value * _of_training(logs), 100 * value * prompts, len(logs))


# -- records


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of JSON lines files, packed by gzip (``.gz``) or not; a line that is cut off is left out."""
    records = []
    for path in paths:
        data = path.read_bytes()
        for line in (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "kind" in record:
                records.append(record)
    return records


@dataclass
class Results:
    """Records of one target, by what they are of; of equal ones the last counts."""

    target: str
    setup: Record
    trained: dict[tuple[str, str], dict[int, Record]]
    decoded: dict[tuple[str, str, float, int], dict[int, Record]]

    @property
    def regimes(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for regime, objective in self.trained:
            found.setdefault(regime, []).append(objective)
        order = list(LABELS)
        return {regime: sorted(names, key=order.index) for regime, names in found.items()}

    @property
    def cells(self) -> list[tuple[float, int]]:
        """(temperature, budget) of the columns; budget 0 is the chain."""
        return sorted({(temperature, budget) for _, _, temperature, budget in self.decoded})

    def arrays(
        self, regime: str, objective: str, cell: tuple[float, int], seeds: Iterable[int] | None = None, *, loops: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and rounds [S, P]; without ``loops`` only of prompts whose response is a loop in no record of this cell."""
        found = self.decoded.get((regime, objective, *cell), {})
        chosen = [found[seed] for seed in (sorted(found) if seeds is None else seeds)]
        tokens, rounds = (np.array([record[name] for record in chosen], dtype=float) for name in ("tokens", "rounds"))
        keep = slice(None) if loops else ~self.loops(cell)
        return tokens[:, keep], rounds[:, keep]

    def loops(self, cell: tuple[float, int]) -> np.ndarray:
        """bool [P]: prompts whose response is a loop in any record of this cell."""
        every = [r["loops"] for key, seeds in self.decoded.items() if key[2:] == cell for r in seeds.values()]
        return np.array(every).any(axis=0)

    def seeds(self, regime: str, objective: str, cell: tuple[float, int]) -> list[int]:
        return sorted(self.decoded.get((regime, objective, *cell), {}))


def results(records: Sequence[Record]) -> list[Results]:
    """One a target, in the order of appearance."""
    found: dict[str, Results] = {}
    for record in records:
        name = record.get("target")
        if name is None:
            continue
        one = found.setdefault(name, Results(name, {}, {}, {}))
        if record["kind"] == "setup":
            one.setup = record
        elif record["kind"] == "trained":
            one.trained.setdefault((record["regime"], record["objective"]), {})[record["seed"]] = record
        elif record["kind"] == "decoded":
            key = (record["regime"], record["objective"], record["temperature"], record["budget"])
            one.decoded.setdefault(key, {})[record["seed"]] = record
    return [one for one in found.values() if one.trained]


# -- markdown


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), _row(["---"] + ["---:"] * (len(names) - 1))]


def _shown(value: Estimate, digits: int = 3) -> str:
    mark = "" if value.seeds > 1 else " (1 seed)"
    return f"{value.value:.{digits}f} ± {value.half_width:.{digits}f}{mark}"


def _percent(value: Estimate) -> str:
    sign = "" if abs(value.value) <= value.half_width else "**"
    return f"{sign}{value.value:+.1f} ± {value.half_width:.1f} %{sign}" + ("" if value.seeds > 1 else " (1 seed)")


def _heading(cell: tuple[float, int]) -> str:
    temperature, budget = cell
    return f"T={temperature:g} " + (f"tree@{budget}" if budget else "chain")


def _taus(one: Results, regime: str, names: Sequence[str], *, loops: bool) -> list[str]:
    cells = one.cells
    lines = _head(["objective", "seeds", *[_heading(cell) for cell in cells]])
    for name in names:
        shown = []
        for cell in cells:
            have = one.seeds(regime, name, cell)
            tokens, rounds = one.arrays(regime, name, cell, loops=loops) if have else (np.zeros((0, 0)),) * 2
            shown.append(_shown(estimate(tokens, rounds)) if tokens.size else "-")
        lines.append(_row([LABELS[name], str(len(one.trained[regime, name])), *shown]))
    return lines


def _pairs(several: Sequence[Results], regime: str, names: Sequence[str], base: str, *, loops: bool) -> list[str]:
    """Objectives against ``base``, over all targets that have both."""
    cells = sorted({cell for one in several for cell in one.cells})
    lines = _head([f"against {LABELS[base]}", *[_heading(cell) for cell in cells]])
    for name in names:
        if name == base:
            continue
        shown = []
        for cell in cells:
            pairs = []
            for one in several:
                both = sorted(set(one.seeds(regime, name, cell)) & set(one.seeds(regime, base, cell)))
                if both:
                    first, second = (one.arrays(regime, which, cell, both, loops=loops) for which in (name, base))
                    pairs += [(first, second)] if first[0].size else []
            shown.append(_percent(compare(*pairs)) if pairs else "-")
        lines.append(_row([LABELS[name], *shown]))
    return lines


def _lengths(one: Results, regime: str, names: Sequence[str]) -> list[str]:
    """Teacher-forced lengths on the held-out texts, bonus included, clustered by text."""
    columns = list(next(iter(one.trained[regime, names[0]].values()))["blocks"])
    lines = _head(["objective", *[column if column == "chain" else f"tree@{column}" for column in columns], "nll"])
    for name in names:
        found = list(one.trained[regime, name].values())
        shown = []
        for column in columns:
            # [S, texts, anchors], one more for the bonus; blocks without all labels count nothing.
            values = np.array([read_lengths(r["blocks"][column]).reshape(-1, r["anchors"]) for r in found]) + 1
            tokens, rounds = np.nansum(values, axis=2), (~np.isnan(values)).sum(axis=2).astype(float)
            shown.append(_shown(estimate(tokens, rounds)))
        lines.append(_row([LABELS[name], *shown, f"{np.mean([r['nll'] for r in found]):.3f}"]))
    return lines


_BUCKETS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 9), (10, 99))


def _buckets(one: Results, regime: str, names: Sequence[str], base: str, reference: Sequence[Record], column: str) -> list[str]:
    """Who gains: blocks by the length that a reference reaches on them; mean difference of the length from ``base``.

    ``reference``: records none of which shares a seed with the run that is measured, or one of a common start.
    """
    lines: list[str] = []
    edges = [f"{low}" if low == high else f"{low}-{high}" if high < 99 else f"{low}-" for low, high in _BUCKETS]
    shares: list[float] = []
    rows: list[list[str]] = []
    for name in names:
        if name == base:
            continue
        common = sorted(set(one.trained[regime, name]) & set(one.trained[regime, base]))
        cells: list[list[float]] = [[] for _ in _BUCKETS]
        for seed in common:
            others = [r for r in reference if r["regime"] != regime or r["seed"] != seed]
            if not others:
                continue
            length = read_lengths(others[0]["blocks"][column]) + 1
            first, second = (read_lengths(one.trained[regime, which][seed]["blocks"][column]) for which in (name, base))
            for number, (low, high) in enumerate(_BUCKETS):
                inside = (length >= low) & (length <= high)
                if inside.any():
                    cells[number].append(float((first - second)[inside].mean()))
            shares = [float(((length >= low) & (length <= high)).sum() / (~np.isnan(length)).sum()) for low, high in _BUCKETS]
        rows.append([LABELS[name], *[" / ".join(f"{value:+.2f}" for value in cell) or "-" for cell in cells]])
    if rows and shares:
        lines += _head([f"tree@{column} against {LABELS[base]}, a figure a seed", *edges])
        lines.append(_row(["share of the blocks", *[f"{100 * share:.0f} %" for share in shares]]))
        lines += [_row(row) for row in rows]
    return lines


def _named(record: Record) -> str:
    return f"{LABELS[record['objective']]} ({record['regime']})"


def markdown(records: Sequence[Record], *, loops: bool = True) -> str:
    """The tables of all targets and regimes.

    Args:
        loops: False leaves out the prompts whose response got stuck in a short cycle, with any drafter, at this temperature and
            budget.
    """
    parts: list[str] = []
    for one in results(records):
        facts = {name: value for name, value in one.setup.items() if name not in ("kind", "settings", "target")}
        parts += [f"### Target {facts.pop('name', one.target)}", ""]
        for regime, names in one.regimes.items():
            names = [name for name in names if any(key[:2] == (regime, name) for key in one.decoded)]
            if not names:
                continue
            steps = sorted({r["steps"] for name in names for r in one.trained[regime, name].values()})
            parts += [f"#### {regime}, {'/'.join(map(str, steps))} steps: tau", "", *_taus(one, regime, names, loops=loops), ""]
            for base in ("ce-decay", "ce-dpace", "soft-dpace"):
                if base in names and len(names) > 1:
                    parts += [*_pairs([one], regime, names, base, loops=loops), ""]
            parts += [f"#### {regime}: expected lengths on the held-out texts", "", *_lengths(one, regime, names), ""]
            reference = list(one.trained.get(("warm start", "soft-dpace"), {}).values())
            if regime == "scratch":
                reference = list(one.trained.get((regime, "ce-decay"), {}).values())
            base, column = "soft-dpace", "64"
            if base in names and len(names) > 1 and reference and column in reference[0]["blocks"]:
                buckets = _buckets(one, regime, names, base, reference, column)
                parts += (
                    [f"#### {regime}: who gains, by the length of {_named(reference[0])}", "", *buckets, ""] if buckets else []
                )
        for cell in one.cells:
            if cell[0] == 0:
                looping = one.loops(cell)
                parts.append(f"{_heading(cell)}: {int(looping.sum())} of {len(looping)} responses end in a loop.  ")
        parts.append("")
    return "\n".join(parts)


def together(records: Sequence[Record], *, loops: bool = True) -> str:
    """Differences between objectives over all targets of the records, with how many drafters of each there are; see the module."""
    several = results(records)
    parts: list[str] = []
    for regime in dict.fromkeys(regime for one in several for regime in one.regimes):
        counts = {name: sum(len(one.trained.get((regime, name), ())) for one in several) for name in LABELS}
        names = [name for name, count in counts.items() if count]
        parts += [f"#### {regime}, {len(several)} targets", ""]
        parts += [", ".join(f"{LABELS[name]}: {counts[name]}" for name in names) + " drafters", ""]
        for base in ("ce-decay", "ce-dpace", "soft-dpace"):
            if base in names and len(names) > 1:
                parts += [*_pairs(several, regime, names, base, loops=loops), ""]
    return "\n".join(parts)
