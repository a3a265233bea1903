"""A run as a SLURM batch job that is put back into the queue, and what it goes on from when it is started again.

SLURM starts the same script again under the same job id, with ``SLURM_RESTART_COUNT`` in the environment. A run finds its folder by that
id and its command line, so that a script may hold several runs; there it finds its last checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_lit.errors import UserError
from dflash_lit.files import write_whole

__all__ = [
    "checkpoint_of",
    "in_batch_job",
    "is_restarted",
    "job_id",
    "note_folder",
    "requeue",
    "run_folder",
    "runs_root",
    "wanted",
]

_REQUEUE_S = 30.0
"""For SLURM's controller to answer."""


def job_id() -> str | None:
    """Of the job that this process is in, as ``scontrol requeue`` takes it; None outside of one."""
    env = os.environ
    if not env.get("SLURM_JOB_ID"):
        return None
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def in_batch_job() -> bool:
    """Whether sbatch has started this process's job. Those of salloc and of srun alone cannot be requeued, whatever their name."""
    return job_id() is not None and os.environ.get("ENVIRONMENT") == "BATCH"


def wanted(chosen: bool | None) -> bool:
    """``trainer.requeue``: by default in a batch job.

    Raises:
        UserError: if it is asked for where there is no job.
    """
    if chosen and job_id() is None:
        raise UserError("trainer.requeue=true: this is no SLURM batch job (SLURM_JOB_ID is not set); leave it null")
    return in_batch_job() if chosen is None else chosen


def is_restarted() -> bool:
    """Whether SLURM has started this job before."""
    return job_id() is not None and os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def requeue() -> str:
    """Put this job back into the queue; what to say about it.

    Raises:
        UserError: if SLURM does not.
    """
    job = job_id()
    assert job is not None
    cure = f"queue it by hand: scontrol requeue {job} (jobs need sbatch --requeue)"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            timeout=_REQUEUE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"SLURM job {job} was not requeued ({error}); {cure}") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"SLURM job {job} was not requeued ({said}); {cure}")
    return f"SLURM job {job} is in the queue again, and goes on by itself"


# -- where a restarted run finds itself


def runs_root() -> Path:
    """``DFLASH_LIT_RUNS``, else ``outputs``."""
    return Path(os.environ.get("DFLASH_LIT_RUNS", "outputs"))


def _note(command: Sequence[str]) -> Path:
    """File with the folder of this job's run of that command line."""
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    return runs_root() / ".slurm" / f"{job_id()}_{digest}"


def note_folder(folder: Path, chosen: bool | None) -> None:
    """Let this run find its folder again when SLURM starts it again. One that was named finds it by that.

    Args:
        chosen: ``trainer.requeue``.
    """
    if (in_batch_job() or wanted(chosen)) and folder.absolute().parent == runs_root().absolute():
        write_whole(_note(sys.argv[1:]), f"{folder.absolute()}\n")


def run_folder(otherwise: str) -> str:
    """The folder of this run: its own, if SLURM has started it before. The resolver ``run_folder`` of conf/train.yaml.

    Args:
        otherwise: name of a new one.
    """
    if is_restarted() and (note := _note(sys.argv[1:])).is_file():
        found = note.read_text(encoding="utf-8", errors="replace").strip()
        if not os.path.isabs(found) or not found.isprintable() or "\ufffd" in found:
            raise UserError(
                f"{note}: holds no folder of a run; name this job's with hydra.run.dir, or delete the file for a new one"
            )
        return found
    return str(runs_root() / otherwise)


def checkpoint_of(folder: Path) -> str | None:
    """What a restarted run goes on from, if it has saved anything."""
    path = folder / "checkpoints" / "last.ckpt"
    return str(path) if is_restarted() and path.is_file() else None
