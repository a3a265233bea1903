"""Whether a run has come to its end: one that was killed after its last step has only to finish."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SUMMARY", "has_ended", "reopen"]

SUMMARY = "summary.json"
"""The last file that a run writes."""


def has_ended(folder: Path) -> bool:
    """Whether nothing is left to do in a run's folder."""
    return (folder / SUMMARY).is_file()


def reopen(folder: Path) -> None:
    """A run begins or goes on in this folder; what an earlier, shorter one has summarised there is no longer its end."""
    (folder / SUMMARY).unlink(missing_ok=True)
