"""The processes that one process a host starts for its host, and their end: none outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dflash_lit.errors import UserError

__all__ = ["Children", "die_with_parent", "ignore_stops", "outlive_parent"]

_PARENT = "DFLASH_LIT_PARENT"
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_COLLECT_S = 5.0
"""For the kernel to end a killed process; one that waits for a dead disk or driver takes for ever."""


class Children:
    """Local ranks of this host, each a process with the same command and an environment of its own.

    Args:
        first_rank: physical rank of local rank 0, which is the process that starts them.
    """

    def __init__(self, first_rank: int) -> None:
        self.first_rank = first_rank
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._dropped: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start one for each local rank of ``environments``; nothing of Lightning's or Hydra's in their command line."""
        # They are of this process's group, so a terminal's Ctrl-C reaches them, too. They leave it to rank 0 (see ignore_stops),
        # and until they can say so it is held back: a mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            for local, environment in environments.items():
                self.processes[local] = subprocess.Popen([*command], env={**environment, _PARENT: str(os.getpid())})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def failed(self) -> tuple[int, str] | None:
        """Physical rank of one that has ended badly, and how."""
        for process in self._dropped:
            process.poll()  # collects it
        for local, process in list(self.processes.items()):
            code = process.poll()
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return self.first_rank + local, how
        return None

    def drop(self, rank: int) -> None:
        """One that the run goes on without: it is killed, if it is still there, and how it has ended means nothing.

        Args:
            rank: physical.
        """
        if (process := self.processes.pop(rank - self.first_rank, None)) is not None:
            process.kill()  # also one that is stopped; of one that has ended this knows
            self._dropped.append(process)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended by themselves within that time."""
        deadline = time.monotonic() + seconds
        for process in [*self.processes.values(), *self._dropped]:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return False
        return True

    def kill(self) -> None:
        """End what still runs, stopped ones too, and collect them."""
        for process in list(self.processes.values()):
            if process.poll() is None:
                process.kill()
        self.wait(_COLLECT_S)


def die_with_parent() -> int:
    """Let the kernel end this process when the one that started it is gone, however that ended; on Linux.

    Returns:
        the parent's pid.

    Raises:
        UserError: if this process was not started by another one of a run, but has the variables of such a one.
    """
    told = os.environ.get(_PARENT, "")
    if not told.isdecimal():
        raise UserError(
            f"{_PARENT}={told!r} in the environment, beside DFLASH_LIT_LOCAL_RANK: a run sets them for the processes that it starts; unset "
            "both to start another run, and CUDA_VISIBLE_DEVICES, which it sets, too"
        )
    parent = int(told)
    _at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        # Usually gone already, and nobody reads this.
        print(
            f"error: {_PARENT}={told}: this process was not started by that one, or it is gone; unset it and DFLASH_LIT_LOCAL_RANK to start "
            "another run, and CUDA_VISIBLE_DEVICES, which a run sets, too",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    return parent


def outlive_parent() -> None:
    """Take :func:`die_with_parent` back. If this process is stopped when its parent ends, it still wakes up."""
    _at_parents_end(signal.SIGCONT)


def _at_parents_end(signum: signal.Signals) -> None:
    """The signal is the calling thread's own matter; threads that it starts have none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def ignore_stops() -> None:
    """Leave Ctrl-C, SIGTERM and SIGUSR1 to rank 0."""
    for signum in _STOPS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
