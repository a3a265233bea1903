"""Files that are there completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, text: str) -> Path:
    """Write a text file (UTF-8; half a character becomes ``?``) and replace an older one in one step; makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays inside one file system and is atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
