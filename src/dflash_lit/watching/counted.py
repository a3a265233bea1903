"""Progress of what is counted outside the training: one line of at most 80 columns in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.live import Live
from rich.table import Table

from dflash_lit.watching.progress_line import WIDTH, left_text
from dflash_lit.watching.terminal import line_and_bar, live_console

__all__ = ["Counted"]

_LINES = 10
"""Plain lines over the whole, about."""


class Counted:
    """A context that shows how much is done and the time left.

    In a terminal the line is drawn over itself, and gone at the end. A log file gets a line at the start, one after
    ``quiet_s`` seconds, one for each tenth, no sooner than ``quiet_s`` after the one before, and one at the end.

    Args:
        what: is done.
        total: of it, >= 0.
        done: before.
        show: anything at all.
        quiet_s: see above.
    """

    def __init__(self, what: str, total: int, *, done: int = 0, show: bool = True, quiet_s: float = 10.0) -> None:
        self.what, self.total, self.done, self.show, self.quiet_s = what, total, done, show, quiet_s
        self._before, self._note = done, ""
        self._live: Live | None = None

    def __enter__(self) -> Counted:
        self._began = self._said_at = self._advanced_at = time.monotonic()
        self._paced = False  # whether a line has said how long it takes
        console = live_console() if self.show else None
        if console is not None:
            self._live = Live(console=console, get_renderable=self._shown, refresh_per_second=4, transient=True)
            self._live.start()
            console.show_cursor(True)  # a process that is killed could not bring it back
        elif self.show and self.done < self.total:
            print(self.line(), file=sys.stderr, flush=True)
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more are done; ``note`` is shown behind the numbers, as a speed."""
        self.done, self._note = self.done + count, note
        now = self._advanced_at = time.monotonic()
        if self._live is not None:
            self._live.refresh()
        if not self.show or self._live is not None:
            return
        tenth = self.done * _LINES // max(self.total, 1) > (self.done - count) * _LINES // max(self.total, 1)
        if self.done >= self.total or ((tenth or not self._paced) and now - self._said_at >= self.quiet_s):
            print(self.line(), file=sys.stderr, flush=True)
            self._paced, self._said_at = True, now

    def line(self, width: int = WIDTH) -> str:
        """As it stands, at most :data:`WIDTH` columns."""
        parts = [f"{self.what} {self.done:,}/{self.total:,}", self._note]
        if made := self.done - self._before:
            left_s = (self._advanced_at - self._began) / made * max(self.total - self.done, 0)
            parts.append(f"{left_text(left_s)} left")
        return " ".join(part for part in parts if part)[: min(width, WIDTH)]

    def _shown(self) -> Table:
        width = self._live.console.width if self._live else WIDTH
        return line_and_bar(self.line(width - 1), self.done, self.total, width)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
