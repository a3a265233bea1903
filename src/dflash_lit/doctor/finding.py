"""What the doctor says: a line for each thing it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GIB", "Finding", "Level", "gib"]

Level = Literal["ok", "warning", "error"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line: what was found and, if it is not ok, what to do.

    Attributes:
        level: "ok"; "warning" for what costs speed or may fail later; "error" for what ends runs.
        name: of what was looked at.
        found: its state.
        advice: empty if ok.
    """

    level: Level
    name: str
    found: str
    advice: str = ""


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"
