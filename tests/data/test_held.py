"""A folder that one process at a time writes into, while others remove what seems to be left."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.data.held import WRITER, held, remove_left, sign


def test_a_folder_that_is_removed_between_two_looks_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path.mkdir`` finds something there, and then no folder."""
    folder, look = tmp_path / "folder", Path.is_dir
    removed: list[bool] = []

    def later(self: Path) -> bool:
        if self == folder and not removed:
            removed.append(remove_left(folder))
        return look(self)

    folder.mkdir()
    sign(folder)
    monkeypatch.setattr(Path, "is_dir", later)
    with held(folder) as ours:
        assert ours
        sign(folder)
        assert not remove_left(folder)
    assert removed == [True]
    assert remove_left(folder)


@pytest.mark.parametrize("locks", [True, False])
def test_what_is_left_goes_where_nobody_can_be_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """Another host's lock need not be seen, and a file system may have none."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def made(name: str, writer: str, hours: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "part").write_bytes(b"0" * 1000)
        sign(folder)
        if writer != "here":
            (folder / WRITER).write_text(writer)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, time.time() - hours * 3600))
        return folder

    if not locks:
        monkeypatch.setattr(fcntl, "flock", none)
    ours, theirs, old, written = made("a", "here", 1), made("b", "there", 23), made("c", "there", 25), made("d", "there", 25)
    (written / "part").write_bytes(b"1")
    assert [remove_left(folder) for folder in (ours, theirs, old, written)] == [locks, False, True, False]
    with held(made("e", "there", 25)) as holds:
        assert holds
        assert remove_left(tmp_path / "e") != locks


def test_what_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "is not there")
    for place in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / "nowhere"):
        with pytest.raises((FileExistsError, NotADirectoryError)), held(place):
            pass
