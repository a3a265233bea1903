"""The errors that are meant for people."""

from __future__ import annotations

__all__ = ["Interrupted", "Pruned", "RankError", "UserError"]


class UserError(Exception):
    """Wrong input: one line that names the field, row or file, says what is wrong with it, and what to do.

    The commands print it without a traceback and exit with 2.
    """


class RankError(RuntimeError):
    """Another process of the run has failed; the message names its rank, role, host and cause."""


class Interrupted(BaseException):
    """A run that was told to stop has done so, after saving. No ``Exception``: nobody should take it for a failure.

    Attributes:
        signal: number of the signal that told it.
        checkpoint: what goes on from there, None if there is nothing to go on from.
        alone: only this rank has stopped; the others are to be told. Otherwise all have, at the same place.
        requeued: what SLURM has said to that.
    """

    def __init__(self, signal: int, checkpoint: str | None, *, alone: bool = False) -> None:
        super().__init__(signal, checkpoint)
        self.signal, self.checkpoint, self.alone = signal, checkpoint, alone
        self.requeued = ""


class Pruned(Interrupted):
    """A sweep's sampler has given up a trial after a validation, on all ranks alike: nothing is saved, decoded or exported.

    Attributes:
        metric: what was validated.
        value: what it came to.
        step: optimizer steps done.
    """

    def __init__(self, metric: str, value: float, step: int) -> None:
        super().__init__(0, "")
        self.metric, self.value, self.step = metric, value, step
