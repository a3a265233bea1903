"""A run that was stopped between its last step and its end: what it had measured, for whoever decodes with its drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_lit.files import write_whole

__all__ = ["forget_trained", "left_to_decode", "metrics_of", "note_trained"]

_FILE = "trained.json"


def note_trained(folder: Path, metrics: Mapping[str, float]) -> None:
    """Training is over in this folder."""
    write_whole(folder / _FILE, json.dumps(dict(metrics)) + "\n")


def forget_trained(folder: Path) -> None:
    """Nothing is left to do."""
    (folder / _FILE).unlink(missing_ok=True)


def metrics_of(folder: Path) -> dict[str, float]:
    """What was noted there; empty if nothing was."""
    try:
        return {str(name): float(value) for name, value in json.loads((folder / _FILE).read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        return {}


def left_to_decode(checkpoint: str | Path) -> bool:
    """Whether the run that saved it in its folder was trained to its end, and not decoded with."""
    folder = Path(checkpoint).parent.parent
    return (folder / _FILE).is_file()
