"""The checksum by pieces is what a few lines say it is, however the bytes come."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.checkpoints import digest
from dflash_lit.checkpoints.digest import PieceDigest, pieces_digest


def plain(data: bytes, piece: int) -> str:
    return hashlib.sha256(
        b"".join(hashlib.sha256(data[at : at + piece]).digest() for at in range(0, len(data), piece))
    ).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1234])
def test_however_the_bytes_come(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE", 100)
    chance = random.Random(size)
    data = chance.randbytes(size)
    for longest in (1, 60, 500):
        made = PieceDigest()
        at = 0
        while at < size:
            count = chance.randint(0, longest)
            made.update(memoryview(data)[at : at + count])
            made.wait()
            at += count
        assert made.hexdigest() == plain(data, 100)
        made.close()
    file = tmp_path / "it"
    file.write_bytes(data + b"beyond")
    with open(file, "rb") as handle:
        assert pieces_digest(handle.fileno(), size) == plain(data, 100)


def test_a_file_system_may_give_less_than_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE", 100)
    pread = os.pread
    monkeypatch.setattr("os.pread", lambda handle, count, at: pread(handle, min(count, 33), at))
    data = random.Random(0).randbytes(1234)
    (tmp_path / "it").write_bytes(data)
    with open(tmp_path / "it", "rb") as handle:
        assert pieces_digest(handle.fileno(), len(data)) == plain(data, 100)
        assert pieces_digest(handle.fileno(), len(data) + 50) == plain(data, 100)  # cut meanwhile: it ends


def test_after_an_error_nothing_is_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gave the memory takes it back."""
    monkeypatch.setattr(digest, "PIECE", 2**20)
    made = PieceDigest()
    submit, begun = made._pool.submit, []

    def thrice(*arguments: Any) -> Any:
        if len(begun) == 3:
            raise RuntimeError("can't start new thread")
        begun.append(submit(*arguments))
        return begun[-1]

    monkeypatch.setattr(made._pool, "submit", thrice)
    with pytest.raises(RuntimeError, match="new thread"):
        made.update(memoryview(bytes(2**23)))
    made.wait()
    assert all(future.done() for future in begun)
    made.close()


def test_without_a_list_of_allowed_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    made = PieceDigest()
    made.update(memoryview(b"some"))
    assert made.hexdigest() == plain(b"some", digest.PIECE)
    made.close()


def test_other_bytes_or_another_order_are_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE", 4)
    sums = set()
    for data in (b"abcdefgh", b"efghabcd", b"abcdefg", b"abcdefgh\0"):
        made = PieceDigest()
        made.update(memoryview(data))
        sums.add(made.hexdigest())
        made.close()
    assert len(sums) == 4
