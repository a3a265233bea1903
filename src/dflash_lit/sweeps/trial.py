"""The trial of a search that this process trains: told by the sweeper, through the environment of the job.

Not through the config: what a job was composed of trains it again, outside any search.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

__all__ = ["VARIABLE", "running_trial", "trial_words"]

VARIABLE = "DFLASH_LIT_TRIAL"


def trial_words(storage: str, study: str, trial_id: int) -> str:
    """What the sweeper puts into :data:`VARIABLE`."""
    return json.dumps([storage, study, trial_id])


def running_trial(pruner: optuna.pruners.BasePruner) -> optuna.Trial | None:
    """The trial, from the search's database; None outside a search."""
    if not (words := os.environ.get(VARIABLE)):
        return None
    import optuna

    storage, name, trial_id = json.loads(words)
    return optuna.Trial(optuna.load_study(study_name=name, storage=storage, pruner=pruner), trial_id)
