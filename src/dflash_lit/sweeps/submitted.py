"""Jobs of a sweep that SLURM does not take."""

from __future__ import annotations

__all__ = ["refused"]


def refused(error: Exception) -> str | None:
    """One line for what submitit raises where ``sbatch`` has refused the jobs of a sweep, or there is no SLURM; None for any other error.

    Submitit's classes are those of jobs that have failed, too, so what they say decides.
    """
    if not type(error).__module__.startswith("submitit.") and not _is_no_slurm(error):
        return None
    said = " ".join(
        part for line in str(error).splitlines() if (part := line.removeprefix("sbatch: ").removeprefix("error: ").strip())
    )
    if _is_no_slurm(error):
        return f"hydra/launcher=slurm: {said}; start the sweep on a host of the cluster, or choose hydra/launcher=local"
    if not str(error).startswith("sbatch: "):
        return None
    return (
        f"hydra/launcher=slurm: sbatch refuses the jobs ({said}); correct hydra.launcher.partition, account, qos, constraint, gpus_per_node "
        "(null without GPUs), cpus_per_task, mem_gb or timeout_min"
    )


def _is_no_slurm(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith('Could not detect "srun"')
