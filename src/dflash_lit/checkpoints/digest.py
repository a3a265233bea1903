"""One checksum for gigabytes, by all cores: the SHA-256 of the SHA-256s of pieces.

One SHA-256 goes through its bytes one after the other, at 0.5 to 2 GB/s. Those of pieces are computed side by side, while the file is
written or read.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dflash_lit.cores import cores

__all__ = ["PIECE", "PieceDigest", "pieces_digest"]

PIECE = 2**22
"""Bytes."""

_MOST_THREADS = 8
"""More would only wait for the memory."""


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, cores()), thread_name_prefix="checksum")


def _sha256(piece: bytes | memoryview) -> bytes:
    return hashlib.sha256(piece).digest()  # which lets other threads run meanwhile


def _of_pieces(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


class PieceDigest:
    """The checksum of bytes that come one part after the other. Its threads end with :meth:`close`."""

    def __init__(self) -> None:
        self._pool = _pool()
        self._whole: list[Future[bytes]] = []
        self._waited = 0  # of those
        self._begun, self._begun_bytes = hashlib.sha256(), 0

    def update(self, data: memoryview) -> None:
        """Begin to add ``data`` (bytes), which has to stay until :meth:`wait` has returned."""
        if self._begun_bytes or len(data) < PIECE:
            head, data = data[: PIECE - self._begun_bytes], data[PIECE - self._begun_bytes :]
            self._begun.update(head)
            self._begun_bytes += len(head)
            if self._begun_bytes == PIECE:
                self._whole.append(self._pool.submit(self._begun.digest))
                self._begun, self._begun_bytes = hashlib.sha256(), 0
        whole = len(data) // PIECE * PIECE
        for at in range(0, whole, PIECE):
            # One by one: after an error in between, those that have begun are waited for, too.
            self._whole.append(self._pool.submit(_sha256, data[at : at + PIECE]))
        if rest := data[whole:]:
            self._begun.update(rest)
            self._begun_bytes = len(rest)

    def wait(self) -> None:
        """Until nothing of what was given is needed any more."""
        wait(self._whole[self._waited :])  # not for all each time: a checkpoint is thousands of pieces in thousands of writes
        self._waited = len(self._whole)

    def close(self) -> None:
        self._pool.shutdown()

    def hexdigest(self) -> str:
        """Of everything so far."""
        digests = [future.result() for future in self._whole]
        return _of_pieces([*digests, self._begun.digest()] if self._begun_bytes else digests)


def pieces_digest(handle: int, size: int) -> str:
    """The same of the first ``size`` bytes of an open file, read by several threads.

    Args:
        handle: its descriptor.
    """

    def piece(at: int) -> bytes:
        end, data = min(at + PIECE, size), b""
        # Some file systems give less than they are asked for; nothing is given at the end of a file that was cut meanwhile.
        while more := os.pread(handle, end - at - len(data), at + len(data)):
            data += more
        return _sha256(data)

    with _pool() as pool:
        return _of_pieces(list(pool.map(piece, range(0, size, PIECE))))
