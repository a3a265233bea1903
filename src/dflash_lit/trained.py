"""Whether a run has come to its end: one that was killed after its last step has only to finish."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SUMMARY", "folder_of", "has_ended", "reopen"]

SUMMARY = "summary.json"
"""The last file that a run writes."""


def folder_of(checkpoint: str | Path) -> Path:
    """Folder of the run that has saved a checkpoint; also if it is named from within that folder."""
    return Path(checkpoint).absolute().parent.parent


def has_ended(folder: Path) -> bool:
    """Whether nothing is left to do in a run's folder."""
    return (folder / SUMMARY).is_file()


def reopen(folder: Path) -> None:
    """A run begins or goes on in this folder; what an earlier, shorter one has summarised there is no longer its end."""
    (folder / SUMMARY).unlink(missing_ok=True)
