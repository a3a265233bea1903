"""Imported before anything imports torch's compiler, which fails with a traceback where its cache cannot be made.

Needs no package, ends the process with 2 and one line, and does nothing else.
"""

from __future__ import annotations

import os
import sys

__all__: list[str] = []


def _unusable() -> str | None:
    """What is wrong with the folder that torch makes when its compiler is imported, whether or not anything is compiled."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen is None:
        return None
    try:
        os.makedirs(os.path.abspath(chosen), exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"TORCHINDUCTOR_CACHE_DIR={chosen[:200]!r}: cannot be made ({reason}); unset it, or name a folder that can"
    return None


if _wrong := _unusable():
    print(f"error: {_wrong}", file=sys.stderr)
    raise SystemExit(2)
