"""Files that are there completely or not at all, and what is read from those that people may have changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dflash_lit.errors import UserError

__all__ = ["read_json", "write_whole"]


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds.

    Args:
        advice: what to give instead of a file that cannot be read.

    Raises:
        UserError: naming the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error


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
