"""Free text that every machine has: the standard library's sources and those of installed packages.

One rule, :func:`is_held_out`, splits files by the hash of their relative path. The embedded target was trained on the
training side only, and the main job takes training and evaluation prompts from the two sides by the same rule, so neither
the target nor the drafter has ever seen an evaluation file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SourceFile", "is_held_out", "package_files", "stdlib_files"]

# Large generated tables: no code, and a small model would spend its capacity on them.
_MAX_BYTES = 400_000
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data", "encodings"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_HELD_OUT_OF_100 = 10


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus: ``name`` is its path relative to the library it belongs to, with forward slashes."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Whether the file with this relative ``name`` belongs to the held-out tenth.

    A function of the name alone, so that the split is the same for every Python version and machine.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < _HELD_OUT_OF_100


def _read(path: Path, name: str) -> SourceFile | None:
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if not 200 <= len(raw) <= _MAX_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return SourceFile(name, text.replace("\r\n", "\n"))


def stdlib_files(root: str | Path | None = None, *, with_tests: bool = False) -> Iterator[SourceFile]:
    """Yield the standard library's ``*.py`` files in sorted order.

    Args:
        root: the library's folder; default: that of the running interpreter.
        with_tests: also the ``test`` folders, which some distributions leave out. The main job does not use them, so that
            its prompts are (nearly) the same everywhere.
    """
    folder = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    skipped = _SKIPPED_FOLDERS if with_tests else _SKIPPED_FOLDERS | _TEST_FOLDERS
    paths = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]  # not walked through: installed packages are many files
        paths += [Path(place, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        relative = path.relative_to(folder)
        if (file := _read(path, relative.as_posix())) is not None:
            yield file


def package_files(distributions: Iterable[str]) -> Iterator[SourceFile]:
    """Yield the ``*.py`` files of those of the named ``distributions`` that are installed, in sorted order."""
    for name in sorted(distributions):
        try:
            listed = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in sorted(listed, key=str):
            if entry.suffix == ".py" and (file := _read(Path(str(entry.locate())), f"{name}/{entry.as_posix()}")) is not None:
                yield file
