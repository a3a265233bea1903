"""What was measured while decoding, as tables for a terminal of 80 columns or a log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table

from dflash_lit.decode.acceptance import Acceptance
from dflash_lit.decode.stages import STAGES

__all__ = ["depths_table", "stages_table", "tau_table"]


def _table(headings: Sequence[str]) -> Table:
    """Only the last column may break its text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=heading != headings[-1])
    return table


def _temperature(result: Acceptance) -> str:
    return f"{result.temperature:g}"


def _drafts(result: Acceptance) -> str:
    return f"tree {result.budget}" if result.budget else "chain"


def tau_table(results: Sequence[Acceptance]) -> Group:
    """A line for each temperature and budget: lengths, speed, and whether the text was the target's own."""
    headings = ("T", "drafts", "tau ± error", "95 %", "tokens/s\nplain", "tokens/s\ndrafted", "ratio", "as the\ntarget")
    table = _table(headings)
    for r in results:
        same = (
            "sampled"
            if r.identical is None
            else f"{r.identical}/{r.prompts}" + (f" + {r.near_ties} ties" if r.near_ties else "")
        )
        low, high = r.tau_interval
        table.add_row(
            _temperature(r),
            _drafts(r),
            f"{r.tau:.2f} ± {r.tau_error:.2f}",
            f"{low:.2f}..{high:.2f}",
            f"{r.tokens_per_s_plain:.1f}",
            f"{r.tokens_per_s_drafted:.1f}",
            f"{r.speedup:.2f}x",
            same,
        )
    return Group("tau: tokens a target pass, bonus included; its standard error is over prompts", table)


def depths_table(results: Sequence[Acceptance]) -> Group:
    """A line for each depth, since blocks have up to 32 slots and 80 columns are few; as many tables as the results need."""
    tables = []
    for some in _side_by_side(results):
        table = _table(("depth", *map(_heading, some)))
        for depth, shares in enumerate(zip(*(r.accepted_by_depth for r in some), strict=True), start=1):
            table.add_row(str(depth), *(f"{share:.2f}" for share in shares))
        tables.append(table)
    return Group("share of passes that accept a draft at each depth", *tables)


def _heading(result: Acceptance) -> str:
    return f"T={_temperature(result)}\n{_drafts(result)}"


def _side_by_side(results: Sequence[Acceptance]) -> list[list[Acceptance]]:
    """Those whose headings fit beside ``depth`` into 80 columns together."""
    groups: list[list[Acceptance]] = []
    left = 0
    for result in results:
        width = 2 + max(map(len, _heading(result).splitlines()))
        if width > left:
            groups.append([])
            left = 80 - len(" depth  ")
        groups[-1].append(result)
        left -= width
    return groups


def stages_table(results: Sequence[Acceptance]) -> Group:
    """A line for each temperature and budget: milliseconds of a pass."""
    table = _table(("T", "drafts", *STAGES, "sum", "plain\npass"))
    for r in results:
        spent = [r.stage_ms.get(stage, math.nan) for stage in STAGES]
        table.add_row(_temperature(r), _drafts(r), *(f"{ms:.2f}" for ms in spent), f"{sum(spent):.2f}", f"{r.plain_ms:.2f}")
    return Group("milliseconds a pass, waiting for the device at the end of each stage", table)
