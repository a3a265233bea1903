"""Ways in which bytes, JSON values and folders go wrong."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["bytes_damaged", "entry_damaged", "json_damaged", "odd_value"]

_ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: True,
    lambda rng: False,
    lambda rng: 0,
    lambda rng: -1,
    lambda rng: rng.choice([1, 2, 3, 7, 64, 65, 127, 1000]),
    lambda rng: 10 ** rng.choice([6, 9, 12, 19, 40]),
    lambda rng: -(10 ** rng.choice([9, 19])),
    lambda rng: 0.5,
    lambda rng: rng.choice([1e-300, 1e300, float("nan"), float("inf"), -float("inf")]),
    lambda rng: "",
    lambda rng: rng.choice(["a", "0", "nan", "true", "../../etc/passwd", "/dev/zero", "\ud800", "\0", "é" * 3, "x" * 5000]),
    lambda rng: [],
    lambda rng: [rng.choice([None, -1, 0, "a", [], {}, 1.5, 10**20])],
    lambda rng: {},
    lambda rng: {rng.choice(["a", "", "rope_type"]): rng.choice([None, 1, "b", []])},
)


def odd_value(rng: random.Random) -> Any:
    """A value of any type that JSON or YAML has, extremes preferred."""
    return rng.choice(_ODD)(rng)


def json_damaged(value: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy with one field somewhere removed, replaced, renamed or doubled; and what was done."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list) and node[key]:
                walk(node[key])

    walk(value)
    node, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del node[key]
            return value, f"{key!r} removed"
        case 1 if isinstance(node, dict):
            node[f"{key}_"] = node.pop(key)
            return value, f"{key!r} renamed"
        case _:
            node[key] = odd_value(rng)
            return value, f"{key!r} = {str(node[key])[:30]!r}"


def bytes_damaged(data: bytes, rng: random.Random, *, gentle: bool = False) -> tuple[bytes, str]:
    """Other bytes than ``data``, which must not be empty; and what was done.

    Args:
        gentle: single bits and bytes only, so that most of it stays what it was.
    """
    size = len(data)
    place = rng.randrange(size)
    kind = rng.choice(
        ("flip", "byte") if gentle else ("flip", "byte", "cut", "empty", "zeros", "insert", "double", "drop", "noise")
    )
    end = min(place + rng.choice([1, 8, 100, 4096]), size)
    match kind:
        case "flip":
            bit = rng.randrange(8)
            changed, said = (
                data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :],
                f"bit {bit} of byte {place} flipped",
            )
        case "byte":
            new = rng.choice([b for b in (0, 10, 34, 123, 125, 128, 255) if b != data[place]])
            changed, said = data[:place] + bytes([new]) + data[place + 1 :], f"byte {place} = {new}"
        case "cut":
            changed, said = data[:place], f"cut at {place} of {size}"
        case "empty":
            changed, said = b"", "emptied"
        case "zeros":
            changed, said = data[:place] + bytes(end - place) + data[end:], f"zeros in {place}..{end}"
        case "insert":
            new = rng.randbytes(rng.choice([1, 7, 512]))
            changed, said = data[:place] + new + data[place:], f"{len(new)} bytes put in at {place}"
        case "double":
            changed, said = data[:end] + data[place:], f"{place}..{end} doubled"
        case "drop":
            changed, said = data[:place] + data[end:], f"{place}..{end} left out"
        case _:
            changed, said = rng.randbytes(min(size, 2048)), "noise"
    return changed, said


def entry_damaged(path: Path, rng: random.Random) -> str:
    """Put something into a folder that has the name of a file, and is none, or not that one; say what."""
    data = path.read_bytes()
    kind = rng.choice(("gone", "folder", "loop", "dangling", "elsewhere", "device", "pipe", "unreadable"))
    path.unlink()
    match kind:
        case "gone":
            pass
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to(path.parent / "nothing" / "here")
        case "elsewhere":  # a link to the same content outside of the folder, as caches of hubs have them
            away = path.parent.parent / f"away_{path.name}"
            away.write_bytes(data)
            path.symlink_to(os.path.relpath(away, path.parent))
        case "device":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "unreadable":
            path.write_bytes(data)
            path.chmod(0)
    return f"{path.name}: {kind}"


def dumped(value: Any) -> bytes:
    """JSON with what Python's own allows: NaN, and half characters as escapes."""
    return json.dumps(value).encode()
