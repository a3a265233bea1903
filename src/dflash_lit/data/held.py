"""A folder that one process at a time writes into."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LEFT_S", "WRITER", "held", "kernel", "remove_left", "sign"]

WRITER = ".writer"
"""Which kernel's process writes a folder that is not whole."""

LEFT_S = 24 * 3600.0
"""Where nothing has been written for so long nobody writes, on whatever host."""


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Make a folder, and hold it inside the block; whoever holds it is waited for. A process that dies lets it go.

    Yields:
        False if the holder who was waited for has renamed or removed it: then there is nothing to write into.

    Raises:
        OSError: if it cannot be made.
    """
    for left in reversed(range(100)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)  # not inherited by other programs
            break
        except (FileExistsError, FileNotFoundError):  # whoever held it has just removed it, maybe between two looks of mkdir
            if not left:
                raise
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).warning("%s: another run is writing the same; waiting for it", folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: parts still appear whole
            pass
        try:
            ours = os.path.samestat(os.fstat(handle), os.stat(folder))
        except FileNotFoundError:
            ours = False
        yield ours
    finally:
        os.close(handle)


def kernel() -> str:
    """Which one this process runs under, since its last start: all processes under it see each other's locks, on any file system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def sign(folder: Path) -> None:
    """Say in a folder that is held which kernel's process writes there now."""
    (folder / WRITER).write_text(kernel(), encoding="utf-8")


def remove_left(folder: Path) -> bool:
    """Remove a folder whose writer is gone: nobody holds it, and it was signed under this kernel or a day has passed since anything was written.

    A lock says nothing of other hosts. Some file systems keep locks to each host (NFS by ``local_lock``, Lustre by ``localflock``,
    many of FUSE), and some have none.

    Returns:
        Whether it was removed. Who waits for it sees that, and makes it anew.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = _signed_here(folder)
        except BlockingIOError:
            return False
        except OSError:  # no locks
            ours = False
        if not os.path.samestat(os.fstat(handle), os.stat(folder)):  # renamed by who held it, and made anew
            return False
        if not ours and time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < LEFT_S:
            return False
        shutil.rmtree(folder)
        return True
    except OSError:  # it has just become whole
        return False
    finally:
        os.close(handle)


def _signed_here(folder: Path) -> bool:
    try:
        return (folder / WRITER).read_bytes() == kernel().encode()
    except FileNotFoundError:
        return False
