"""A command in a process of its own, and its end as a case understands it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_lit.errors import UserError
from fuzzing.case import Wrong

__all__ = ["SCRIPT", "Ended", "cleaned", "end_all", "forked", "outcome"]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("start.py")


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal that ended it), and what it wrote."""

    code: int
    said: str


def forked() -> str:
    """A program like this interpreter that need not import what takes seconds."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.fork_server import forked_python

    return forked_python()


def cleaned() -> dict[str, str]:
    """This process's variables without those that a run looks at."""
    prefixes = ("DFLASH_LIT_", "SLURM_", "WANDB_", "TORCHELASTIC_", "MASTER_", "XDG_", "HYDRA_")
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "FORKED_PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in others}
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT, ROOT / "benchmarks"))
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def outcome(command: Sequence[str], folder: Path, variables: Mapping[str, str], *, limit_s: float) -> Ended:
    """Run it to its end in ``folder``; what is left of it after ``limit_s`` is killed.

    Raises:
        UserError: with the one line that it has ended with, if it has done so with 2, or with 1 for what another process did.
        Wrong: if it has said more than one, or a traceback, or has not ended.
    """
    log = folder.parent / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except BaseException as error:
            end_all(process.pid)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise Wrong(f"not over after {limit_s:g} s: {_end(log)}") from None
    said = log.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith(("error: ", "train.py: error: "))]
    if "Traceback (most recent call last)" in said or "Error in sys.excepthook" in said:
        raise Wrong(f"exit {code} with a traceback: {_end(log)}")
    if code in (1, 2) and len(lines) == 1:
        raise UserError(lines[0].removeprefix("error: "))
    if code in (1, 2):
        raise Wrong(f"exit {code} with {len(lines)} lines of error: {_end(log)}")
    return Ended(code, said)


def end_all(pid: int) -> None:
    """Kill a process and those it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-700:]


def pids(seen: Path) -> Iterator[int]:
    """Of the processes that have told where."""
    for path in seen.parent.glob(f"{seen.name}.*.pid"):
        yield int(path.name.split(".")[-2])
