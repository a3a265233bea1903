"""A folder that one process at a time writes into, while others remove what seems to be left."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_lit.data.held import held, remove_unheld


def test_a_folder_that_is_removed_between_two_looks_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path.mkdir`` finds something there, and then no folder."""
    folder, look = tmp_path / "folder", Path.is_dir
    removed: list[bool] = []

    def later(self: Path) -> bool:
        if self == folder and not removed:
            removed.append(remove_unheld(folder))
        return look(self)

    folder.mkdir()
    monkeypatch.setattr(Path, "is_dir", later)
    with held(folder) as ours:
        assert ours
        assert not remove_unheld(folder)
    assert removed == [True]
    assert remove_unheld(folder)


def test_what_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "is not there")
    for place in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / "nowhere"):
        with pytest.raises((FileExistsError, NotADirectoryError)), held(place):
            pass
