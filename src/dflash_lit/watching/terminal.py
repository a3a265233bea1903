"""Where a line can be drawn over itself, and what such a line looks like: at most as wide as the terminal, a bar in what it leaves."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

__all__ = ["bars", "line_and_bar", "live_console"]

_LEAST, _MOST = 10, 40
"""Columns of a bar."""


def live_console() -> Console | None:
    """The terminal behind standard error; None for a log file, a pipe, a dumb terminal, and whatever sets ``CI``."""
    console = Console(stderr=True)
    # FORCE_COLOR makes a terminal of any file for rich, so the file itself is asked.
    return console if sys.stderr.isatty() and not console.is_dumb_terminal and not os.environ.get("CI") else None


def bars(*, show: bool) -> Progress:
    """A bar for each task, with what is done and the time left; in a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show or live_console() is None)


def line_and_bar(line: str, done: int, total: int, width: int, instead: str = "") -> Table:
    """The line, and behind it a bar in the columns that it leaves of ``width``, or a word ``instead`` of the bar."""
    table = Table.grid(padding=(0, 1))
    cells: list[Any] = [Text(line, no_wrap=True, overflow="crop")]
    room = width - len(line) - 3
    if instead and room >= len(instead):
        cells.append(Text(instead))
    elif room >= _LEAST:
        cells.append(Bar(total=max(total, 1), completed=done, width=min(room, _MOST)))
    table.add_row(*cells)
    return table
