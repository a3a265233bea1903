"""Which W&B run a checkpoint belongs to, so that resuming it goes on with that run."""

from __future__ import annotations

from pathlib import Path

from dflash_lit.checkpoints.file import load
from dflash_lit.errors import UserError

__all__ = ["RUN_ID", "run_of_checkpoint"]

RUN_ID = "wandb_run_id"
"""Key in a callback's part of a checkpoint."""


def run_of_checkpoint(path: str | Path) -> str | None:
    """The id of the run that saved it; None if that run had no W&B, or the file cannot be read (Lightning will say why).

    Weights are not read: the file is mapped.
    """
    try:
        states = load(path, mmap=True).get("callbacks", {}).values()
        found = [state[RUN_ID] for state in states if isinstance(state, dict) and state.get(RUN_ID)]
    except (UserError, AttributeError):
        return None
    return str(found[0]) if found else None
