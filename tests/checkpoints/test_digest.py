"""The checksum by pieces is what a few lines say it is, however the bytes come."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from dflash_lit.checkpoints import digest
from dflash_lit.checkpoints.digest import PieceDigest, file_digest


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
        assert file_digest(handle.fileno(), size) == plain(data, 100)


def test_other_bytes_or_another_order_are_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE", 4)
    sums = set()
    for data in (b"abcdefgh", b"efghabcd", b"abcdefg", b"abcdefgh\0"):
        made = PieceDigest()
        made.update(memoryview(data))
        sums.add(made.hexdigest())
        made.close()
    assert len(sums) == 4
