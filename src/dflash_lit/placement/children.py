"""The processes that one process a host starts for its host, and their end: none outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["Children", "die_with_parent"]

_PR_SET_PDEATHSIG = 1


class Children:
    """Local ranks of this host, each a process with the same command and an environment of its own.

    Args:
        first_rank: physical rank of local rank 0, which is the process that starts them.
    """

    def __init__(self, first_rank: int) -> None:
        self.first_rank = first_rank
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start one for each local rank of ``environments``; nothing of Lightning's or Hydra's in their command line."""
        for local, environment in environments.items():
            # Of this process's group, so that a terminal's Ctrl-C reaches them, too; they leave it to rank 0.
            self.processes[local] = subprocess.Popen([*command], env={**environment})

    def failed(self) -> tuple[int, str] | None:
        """Physical rank of one that has ended badly, and how."""
        for local, process in self.processes.items():
            code = process.poll()
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return self.first_rank + local, how
        return None

    def wait(self, seconds: float) -> bool:
        """Whether all have ended by themselves within that time."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return False
        return True

    def kill(self) -> None:
        """End what still runs, stopped ones too, and collect them."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait()


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when ``parent``, which started it, is gone, however that ended; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone already
        os._exit(1)
