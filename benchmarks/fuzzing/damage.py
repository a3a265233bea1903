"""Ways in which bytes, JSON values and folders go wrong."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["bytes_damaged", "dumped", "entry_damaged", "file_damaged", "json_damaged", "odd_value", "text_edited", "torn"]

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


def torn(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """What a machine that lost its power leaves of a file: blocks that never got to the disk, at its end or inside; and what it is."""
    size, block = len(data), rng.choice([16, 512, 4096])
    place = rng.randrange(size) // block * block
    match rng.randrange(4):
        case 0:  # its length is known, what is in it is not
            return data[:place] + bytes(size - place), f"zeros from {place} on"
        case 1:
            return data[:place], f"ends at {place} of {size}"
        case 2:
            return data[:place] + bytes(min(block, size - place)) + data[place + block :], f"a block of zeros at {place}"
        case _:  # written anew over a longer one, or twice
            return data + data[place:], f"goes on with what is at {place}"


_EDITS: tuple[tuple[str, Callable[[str, random.Random], str]], ...] = (
    ("as Windows ends lines", lambda text, rng: text.replace("\n", "\r\n")),
    ("as old Macs ended lines", lambda text, rng: text.replace("\n", "\r")),
    ("typographic quotes", lambda text, rng: text.replace('"', "\u201c")),
    ("single quotes", lambda text, rng: text.replace('"', "'")),
    ("one quote lost", lambda text, rng: _without(text, '"', rng)),
    ("one comma lost", lambda text, rng: _without(text, ",", rng)),
    ("one colon lost", lambda text, rng: _without(text, ":", rng)),
    ("one bracket lost", lambda text, rng: _without(text, rng.choice("{}[]"), rng)),
    ("a comma after the last", lambda text, rng: text.replace("}", ",}", 1)),
    ("a comment", lambda text, rng: text.replace(",", ", // as before\n", 1)),
    ("a comment of YAML", lambda text, rng: f"# mine\n{text}"),
    ("tabs", lambda text, rng: text.replace("  ", "\t")),
    ("a line twice", lambda text, rng: _line_twice(text, rng)),
    ("a line less", lambda text, rng: _line_less(text, rng)),
    ("what git leaves of two", lambda text, rng: f"<<<<<<< HEAD\n{text}\n=======\n{text}\n>>>>>>> theirs\n"),
    ("twice", lambda text, rng: text + text),
    ("True for true", lambda text, rng: text.replace("true", "True").replace("false", "False").replace("null", "None")),
    ("no-break spaces", lambda text, rng: text.replace(" ", "\u00a0")),
    ("a NUL", lambda text, rng: _put_in(text, "\0", rng)),
    ("a page of HTML", lambda text, rng: "<!DOCTYPE html><html><body>404</body></html>"),
    ("a pointer of Git LFS", lambda text, rng: "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ("white space", lambda text, rng: " \n\t\n"),
    ("deep", lambda text, rng: "[" * 100_000),
    ("a long number", lambda text, rng: "".join("9" * 5000 if one.isdigit() else one for one in text[:2000]) + text[2000:]),
)


def text_edited(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A text as people, editors, browsers and version control leave it, or in another encoding; and what was done."""
    text = data.decode("utf-8", "replace")
    if rng.random() < 0.25:
        name = rng.choice(["utf-16", "utf-8-sig", "utf-32", "cp037", "latin-1"])
        text = text.replace("e", "\u00e9", 1) if name == "latin-1" else text
        return text.encode(name, "replace"), f"in {name}"
    about, edit = rng.choice(_EDITS)
    return edit(text, rng).encode(), about


def _place(text: str, what: str, rng: random.Random) -> int:
    return rng.choice([place for place, one in enumerate(text) if one == what] or [len(text)])


def _without(text: str, what: str, rng: random.Random) -> str:
    place = _place(text, what, rng)
    return text[:place] + text[place + 1 :]


def _put_in(text: str, what: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + what + text[place:]


def _line_twice(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return "".join([*lines[: place + 1], *lines[place:]])


def _line_less(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return "".join(lines)


def file_damaged(data: bytes, rng: random.Random, *, text: bool = True, gentle: bool = False) -> tuple[bytes, str]:
    """One of the ways above in which the bytes of a file go wrong.

    Args:
        text: whether people edit it.
        gentle: of :func:`bytes_damaged`.
    """
    draw = rng.random()
    if text and draw < 0.25:
        return text_edited(data, rng)
    return torn(data, rng) if draw < 0.45 else bytes_damaged(data, rng, gentle=gentle)


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
