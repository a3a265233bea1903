"""Imported before anything else is: what the environment has that libraries fail with while they are imported, as one line.

Needs no package. Torch's compiler makes the folder of its cache when it is imported, whether or not anything is compiled; other
libraries read numbers and names from variables, and say at best what is wrong with the value.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

__all__: list[str] = []

_READ = ("CUDA_", "HF_", "MKL_", "MPL", "OMP_", "PYTORCH_", "TORCH", "TRITON_", "WANDB_")
"""How names begin of variables that libraries read while they are imported. The value of another may stand in an error by chance."""


def _unusable() -> str | None:
    """What is wrong with the folder that torch is going to make."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen is None:
        return None
    try:
        os.makedirs(os.path.abspath(chosen), exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"TORCHINDUCTOR_CACHE_DIR={chosen[:200]!r}: cannot be made ({reason}); unset it, or name a folder that can"
    return None


def _blamed(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Variables whose value an error quotes that a library has raised while it was imported."""
    imported = any(
        frame.f_code.co_name == "<module>"
        and "site-packages" in frame.f_code.co_filename
        and "dflash_lit" not in frame.f_code.co_filename
        for frame, _ in traceback.walk_tb(trace)
    )
    said = str(error)
    found = [
        name
        for name, value in os.environ.items()
        if name.startswith(_READ) and (repr(value) in said or (len(value) > 3 and f" {value}\n" in f" {said}\n"))
    ]
    return found if imported else []


def _explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not (names := _blamed(error, trace)):
        sys.__excepthook__(kind, error, trace)
        return
    told = ", ".join(f"{name}={os.environ[name][:200]!r}" for name in names)
    print(f"error: {told} in the environment: {' '.join(str(error).split())[:300]}; correct or unset it", file=sys.stderr)
    sys.stderr.flush()
    os._exit(2)  # an exception that nobody has caught ends with 1; nothing has begun


sys.excepthook = _explained
if _wrong := _unusable():
    print(f"error: {_wrong}", file=sys.stderr)
    raise SystemExit(2)
