"""One checkpoint file: whole or not there, and known to be what was written.

A file is what ``torch.save`` writes, an archive in zip format, with the checksum of everything before it (:mod:`dflash_lit.checkpoints.digest`)
as the archive's comment. So it is one file, and anything that reads zip archives or ``torch.save`` files reads it, the checksum unseen.

It is written under another name in its folder, brought to the disk (which begins while more is written, as the run waits), and renamed: at no
moment does its name stand for a part of it, and what had the name before is there until then. A lock tells a file being written from one
whose writer was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pickle
import re
import secrets
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dflash_lit.checkpoints.digest import PieceDigest, pieces_digest
from dflash_lit.checkpoints.plain import plain_bytes
from dflash_lit.data.held import LEFT_S
from dflash_lit.doctor.finding import gib
from dflash_lit.errors import UserError

__all__ = ["DiskFullError", "load", "remove_leftovers", "save"]

_log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_END = b"PK\x05\x06"
_END_BYTES = 22
"""Of a zip archive's last record without a comment. Its last two bytes are the comment's length."""
_COMMENT = b"dflash_lit sha256/4MiB="
_COMMENT_BYTES = len(_COMMENT) + 64
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's share of it, or the file is larger than it may get."""
_SYNC_BYTES = 2**28
"""Written bytes after which the system is asked to bring them to the disk."""


class DiskFullError(UserError):
    """There was no room for a checkpoint. Nothing is left of it, and older ones are as they were."""


# -- writing


def save(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to ``path``; what has that name is replaced, at once and as a whole. Its folder is made.

    Leftovers of killed writers in that folder are removed before.

    Raises:
        UserError: if the checkpoint holds what could only be read back by running code.
        DiskFullError: if there is no room, with the bytes needed and free.
        OSError: if it cannot be written for another reason.
    """
    path = Path(path)
    needed = plain_bytes(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    outer = sys.exception()  # in whose handling this is
    partial, handle = _open_partial(path)
    writer = _Writer(handle)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]  # it asks for no more than write and flush
        writer.finish()
        os.replace(partial, path)  # still held: nobody may take it for a leftover before
        _to_disk(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # After an error, or Ctrl-C, torch still tries to end its archive, and what comes of that hides the first.
        hidden = error.__context__ if isinstance(error, RuntimeError) and error.__context__ is not outer else None
        first = hidden or error
        if isinstance(first, OSError) and first.errno in _FULL:
            raise DiskFullError(_no_room(path, needed, writer.written, first)) from error
        if hidden is not None:
            raise hidden from None
        raise
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # it flushes again what could not be written
            handle.close()


class _Writer:
    """What ``torch.save`` writes to: passes on what comes, from the beginning to the end, and ends the archive with its checksum."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle = handle
        self.written = 0
        self._digest = PieceDigest()
        self._last = b""  # the last two bytes, which may be the comment's length
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="to_disk")
        self._synced: Future[None] | None = None
        self._unsynced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        last = memoryview(self._last + bytes(view[-2:]))
        try:
            # The checksum of a tensor is made while it is written.
            self._digest.update(last[:-2])
            self._digest.update(view[:-2])
            self._last = bytes(last[-2:])
            self.handle.write(view)
            self._sync(len(view))
        finally:
            self._digest.wait()  # torch takes the memory back
        self.written += len(view)
        return len(view)

    def _sync(self, count: int) -> None:
        """Let the disk begin with what is there now. The system reports an error of the disk to one ``fsync`` only, maybe to this one."""
        self._unsynced += count
        if self._unsynced < _SYNC_BYTES or not (self._synced is None or self._synced.done()):
            return
        if self._synced is not None:
            self._synced.result()
        self._unsynced = 0
        self._synced = self._syncing.submit(os.fsync, self.handle.fileno())

    def flush(self) -> None:
        self.handle.flush()

    def finish(self) -> None:
        """Write the comment; when this returns all is on the disk."""
        if self._last != b"\0\0":
            raise RuntimeError("torch.save has written an archive with a comment of its own")
        self.handle.seek(-2, os.SEEK_END)
        comment = _COMMENT + self._digest.hexdigest().encode()
        self.handle.write(len(comment).to_bytes(2, "little") + comment)
        self.handle.flush()
        if self._synced is not None:
            self._synced.result()
        os.fsync(self.handle.fileno())

    def close(self) -> None:
        """Before the file is."""
        self._syncing.shutdown()
        self._digest.close()


def _open_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside ``path``, held by this process as long as it is open."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_PARTIAL}")
        handle = open(partial, "xb")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for a leftover for a day
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if partial.exists():  # else somebody has removed it before it was held
            return partial, handle
        handle.close()


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed writers have left in ``folder``; unfinished files of living ones stay.

    On a file system without locks that is what was not written for a day.

    Returns:
        what was removed.
    """
    removed = []
    for partial in Path(folder).glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError), open(partial, "rb") as handle:  # its writer may be done with it
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # no locks
                if time.time() - os.fstat(handle.fileno()).st_mtime < LEFT_S:
                    continue
            partial.unlink()
            removed.append(partial)
    return removed


def _to_disk(folder: Path) -> None:
    """That a file has got its name is on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know no such thing
            raise
    finally:
        os.close(handle)


def _no_room(path: Path, needed: int, written: int, cause: OSError) -> str:
    try:
        free = gib(shutil.disk_usage(path.parent).free)
    except OSError:
        free = "unknown"
    return (
        f"{path}: no room for this checkpoint ({cause.strerror}): it needs about {gib(needed)} ({needed} bytes), {gib(written)} were "
        f"written, {free} are free. What was written is removed, older checkpoints are kept; make room, or lower callbacks.checkpoint.save_top_k"
    )


# -- reading


def load(path: str | Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint after checking its sum. No code of the file is run: plain values, containers and tensors (on the CPU) only.

    Args:
        mmap: leave tensors in the file until they are looked at: for what else is in it.

    Raises:
        UserError: if there is no such file, it is damaged, or it holds more than plain values; with the checkpoint of that folder to
            take instead, if there is one.
    """
    path = Path(path)
    try:
        return _load(path, mmap=mmap)
    except UserError as error:
        raise UserError(f"{error}; {_instead(path)}") from error


def _load(path: Path, *, mmap: bool) -> dict[str, Any]:
    try:
        about = path.stat()
        if not path.is_file():
            raise UserError(f"{path}: no such checkpoint: it is no file")
        summed = _check(path, about.st_size, about.st_mtime_ns, about.st_ino)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: {_refused(error)}") from error
    except Exception as error:  # torch.load raises many kinds for damaged files
        raise UserError(f"{path}: is not a checkpoint of this project or is damaged ({_first_line(error)})") from error
    if not isinstance(saved, dict):
        raise UserError(f"{path}: is not a checkpoint of this project (it holds a {type(saved).__name__})")
    if not summed:
        _log.info("%s: has no checksum (it was not saved by a run of this version), so damage would not be seen", path)
    return saved


@lru_cache(maxsize=16)
def _check(path: Path, size: int, changed_ns: int, inode: int) -> bool:
    """Compare a file with its checksum, once as long as it stays the same.

    Returns:
        False if it is an archive that has none.

    Raises:
        UserError: if they differ, or it is no whole archive.
    """
    with open(path, "rb") as file:
        begins = file.read(4)
        if begins[:1] == b"\x80":
            raise UserError(
                f"{path}: is refused: a bare pickle, which runs code when it is read; checkpoints are archives of plain tensors"
            )
        if begins != b"PK\x03\x04":
            raise UserError(f"{path}: is not a checkpoint: no archive as torch.save writes it")
        file.seek(max(size - _END_BYTES - _COMMENT_BYTES, 0))
        tail = file.read()
        end = tail[:_END_BYTES]
        if tail[-_END_BYTES:].startswith(_END) and tail.endswith(b"\0\0"):
            return False
        length = _COMMENT_BYTES.to_bytes(2, "little")
        comment = tail[_END_BYTES:]
        if not (end.startswith(_END) and end.endswith(length) and comment.startswith(_COMMENT)):
            raise UserError(
                f"{path}: is damaged: its end is not that of a checkpoint, so it is cut off (at {size} bytes), overwritten, or of another version"
            )
        found = pieces_digest(file.fileno(), size - _COMMENT_BYTES - 2)
        wanted = comment.removeprefix(_COMMENT).decode("latin-1")
        if found != wanted:
            raise UserError(
                f"{path}: is damaged: its checksum is {found[:16]}..., {wanted[:16]}... when it was written; bytes have changed since"
            )
    return True


def _refused(error: Exception) -> str:
    """Why an archive was not unpickled."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is None:
        return f"is not a checkpoint of this project or is damaged ({_first_line(error)})"
    return (
        f"is refused: it names {found[1]!r}, code that would run when it is read; a checkpoint of this project holds tensors, numbers, text, "
        "lists and dicts only"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:120]


def _instead(path: Path) -> str:
    """The newest checkpoint beside ``path`` that can be read, as advice."""
    others = []
    with contextlib.suppress(OSError):
        others = [other for other in path.parent.glob("*.ckpt") if other.is_file() and other.name != path.name]
    for other in sorted(others, key=_changed, reverse=True):
        with contextlib.suppress(UserError):
            saved = _load(other, mmap=True)
            step = f", of step {saved['global_step']}" if isinstance(saved.get("global_step"), int) else ""
            return f"use {other}{step}"
    return "give a .ckpt file from a run's checkpoints folder (none beside it can be used)"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
