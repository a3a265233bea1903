"""The trial of a search that this process trains: told by the sweeper, through the environment of the job.

Not through the config: what a job was composed of trains it again, outside any search.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from dflash_lit.errors import UserError

if TYPE_CHECKING:
    import optuna

__all__ = ["VARIABLE", "running_trial", "trial_words"]

VARIABLE = "DFLASH_LIT_TRIAL"


def trial_words(storage: str, study: str, trial_id: int) -> str:
    """What the sweeper puts into :data:`VARIABLE`."""
    return json.dumps([storage, study, trial_id])


def running_trial(pruner: optuna.pruners.BasePruner) -> optuna.Trial | None:
    """The trial, from the search's database; None outside a search.

    Raises:
        UserError: if the variable names none.
    """
    if not (words := os.environ.get(VARIABLE)):
        return None
    import optuna

    try:
        storage, name, trial_id = json.loads(words)
        return optuna.Trial(optuna.load_study(study_name=name, storage=storage, pruner=pruner), trial_id)
    except Exception as error:  # of JSON, or of any database
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError(
            f"{VARIABLE}={words[:80]!r} in the environment: names no trial of a search ({reason}); the sweeper sets it for its jobs, unset "
            "it for a run by hand"
        ) from error
