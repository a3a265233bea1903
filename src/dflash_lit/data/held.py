"""A folder that one process at a time writes into."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["held", "kernel", "remove_unheld"]


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


def remove_unheld(folder: Path) -> bool:
    """Remove a folder unless another process holds it, or the file system has no locks that would tell.

    Some file systems of several hosts keep locks to each host (NFS by ``local_lock``, Lustre by ``localflock``, many of FUSE).

    Returns:
        Whether it was removed. Who waits for it sees that, and makes it anew.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(folder)):  # renamed by who held it, and made anew
            return False
        shutil.rmtree(folder)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
