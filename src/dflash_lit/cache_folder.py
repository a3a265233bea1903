"""Where this package keeps what any run may use again: responses, rows, features, how long steps took."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(chosen: str | None) -> Path:
    """``data.cache_dir``, else the user's cache folder."""
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_lit").expanduser()
