"""Files that are there completely or not at all, and what is read from those that people may have changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_lit.errors import UserError

__all__ = ["file_digest", "map_array", "read_json", "read_sealed", "refuse_no_file", "sealed", "write_whole"]


def refuse_no_file(path: str | Path, cure: str) -> None:
    """Refuse what a reader would wait for, or read without an end: anything but a plain file or a link to one.

    Args:
        cure: ends the message.

    Raises:
        UserError: naming ``path``; also if there is nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {cure}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise UserError(f"{path}: cannot be read (it is {kind}, no file); {cure}")


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds.

    Args:
        advice: what to give, or do, instead of a file that cannot be read or is not JSON.

    Raises:
        UserError: naming the file.
    """
    refuse_no_file(path, advice)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); {advice}") from error


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(value: dict[str, Any]) -> str:
    """``value`` as JSON that :func:`read_sealed` knows to be whole."""
    return json.dumps({**value, "sha256": _seal(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """What was written with :func:`sealed`.

    Raises:
        UserError: if there is no such file.
        ValueError: if it has changed since.
    """
    refuse_no_file(path, "look at the disk")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        seal = value.pop("sha256")
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    if _seal(value) != seal:
        raise ValueError(f"{path.name} has changed")
    return value


def _seal(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def map_array(path: Path, mode: Literal["r", "c"] = "r") -> np.ndarray:
    """An array of ``numpy.save`` as a memory map.

    Raises:
        UserError: if there is no such file.
        ValueError: if it is damaged.
    """
    refuse_no_file(path, "look at the disk")
    try:
        array: np.ndarray = np.load(path, mmap_mode=mode, allow_pickle=False)
    except Exception as error:  # its header is read by Python's own tokenizer and parser, whose errors are many
        raise ValueError(f"{path.name}: {' '.join(str(error).split())[:120]}") from error
    if not array.dtype.isnative:  # the bytes would be right, and the numbers not
        raise ValueError(f"{path.name}: has the byte order of another machine")
    return array


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
