"""``sweep=tpe``: Hydra's jobs as trials of an Optuna study that lives in a database.

Hydra's own Optuna plugin (1.3.0) needs Optuna 2, has no pruning, and gives up a study that is interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    import optuna
    from hydra.plugins.launcher import Launcher
    from optuna.distributions import BaseDistribution

__all__ = ["TPESweeper"]

_INTERRUPTED = "interrupted"


class TPESweeper(Sweeper):
    """Ask the study for trials, launch them, and tell it what their folders say that they came to.

    Args:
        trials: of the whole study, pruned and failed ones included; a sweep that goes on counts those before it.
        jobs: launched together; more than one for a parallel launcher.
        storage: a file or a database URL of Optuna.
        study: its name there.
        seed: of the sampler.
        startup_trials: drawn at random before the sampler models what is good.
        params: search space, key -> value in Hydra's grammar; overrides of the command line add to it.
    """

    def __init__(
        self,
        trials: int,
        jobs: int,
        storage: str,
        study: str,
        seed: int,
        startup_trials: int,
        params: Mapping[str, object] | None,
    ) -> None:
        self.trials, self.jobs, self.seed, self.startup_trials = trials, jobs, seed, startup_trials
        self.storage = storage if "://" in storage else f"sqlite:///{Path(storage).expanduser().absolute()}"
        self.name, self.params = study, params or {}
        self.launcher: Launcher | None = None
        self.config: DictConfig | None = None
        self.context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Until the study has its trials. Hydra calls it with the overrides of the command line.

        Raises:
            UserError: for numbers below 1, nothing to search or to maximise, or a study with another search space.
        """
        import optuna

        from dflash_lit.errors import UserError
        from dflash_lit.sweeps.space import make_space

        assert self.config is not None
        for name in ("trials", "jobs", "startup_trials"):
            if getattr(self, name) < 1:
                raise UserError(f"hydra.sweeper.{name}={getattr(self, name)}: must be at least 1")
        if self.config.optimized_metric is None:
            raise UserError("optimized_metric=null: name a key of summary.json, which the search is to make large")
        space, fixed = make_space(self.params, arguments)
        if not space:
            raise UserError(
                "hydra.sweeper.params: nothing to search; give for example 'optimizer.lr=tag(log,interval(1e-3,3e-2))'"
            )
        self._compose_choices(space, fixed)
        folder = Path(self.config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = self._study()
        while (left := self.trials - self._counted(study)) > 0:
            self._batch(study, space, fixed, min(left, self.jobs), folder)

    def _compose_choices(self, space: dict[str, BaseDistribution], fixed: Sequence[str]) -> None:
        """Each choice once: a name that does not exist would end the search at the trial that draws it, hours later perhaps."""
        from optuna.distributions import CategoricalDistribution

        assert self.context is not None
        assert self.config is not None
        for key, values in space.items():
            for choice in values.choices if isinstance(values, CategoricalDistribution) else ():
                self.context.config_loader.load_sweep_config(self.config, [*fixed, f"{key}={choice}"])

    def _study(self) -> optuna.Study:
        import optuna

        study = optuna.create_study(study_name=self.name, storage=self.storage, direction="maximize", load_if_exists=True)
        # Else a study that goes on would be asked for the same random trials again.
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=self.startup_trials, seed=self.seed + len(study.trials))
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            # Of a sweep that was stopped: nobody trains it any more, so it is tried again.
            optuna.Trial(study, trial._trial_id).set_user_attr(_INTERRUPTED, True)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.params:
                study.enqueue_trial(trial.params)
        return study

    def _counted(self, study: optuna.Study) -> int:
        return sum(trial.state.is_finished() and _INTERRUPTED not in trial.user_attrs for trial in study.trials)

    def _batch(self, study: optuna.Study, space: dict[str, Any], fixed: Sequence[str], count: int, folder: Path) -> None:
        from dflash_lit.errors import UserError
        from dflash_lit.sweeps.outcome import read_outcome
        from dflash_lit.sweeps.submitted import refused

        assert self.launcher is not None
        try:
            trials = [study.ask(space) for _ in range(count)]
        except ValueError as error:  # choices that were others when the study was begun
            raise UserError(
                f"hydra.sweeper.storage={self.storage}: the study there has another search space ({error})"
            ) from None
        try:
            self.launcher.launch([self._overrides(trial, fixed) for trial in trials], initial_job_idx=trials[0].number)
        except (UserError, HydraException, OmegaConfBaseException):
            raise  # what does not compose does so in no trial
        except Exception as error:
            if (why := refused(error)) is not None:
                raise UserError(why) from error  # so it would any trial; these are tried again
            # A launcher's, of a process that was killed; what became of the jobs is in their folders.
            print(f"warning: trials from {trials[0].number} on: {type(error).__name__}: {error}", file=sys.stderr)
        for trial in trials:
            self._tell(study, trial, read_outcome(folder / str(trial.number)))

    def _overrides(self, trial: optuna.Trial, fixed: Sequence[str]) -> list[str]:
        from dflash_lit.sweeps.trial import VARIABLE, trial_words

        words = trial_words(self.storage, self.name, trial._trial_id).replace("\\", "\\\\").replace("'", "\\'")
        return [
            *fixed,
            *(f"{key}={value}" for key, value in trial.params.items()),
            f"hydra.sweep.subdir={trial.number}",
            f"+hydra.job.env_set.{VARIABLE}='{words}'",
        ]

    @staticmethod
    def _tell(study: optuna.Study, trial: optuna.Trial, outcome: Any) -> None:
        from optuna.trial import TrialState

        if outcome is not None and outcome.state == "pruned":
            study.tell(trial, state=TrialState.PRUNED)  # its value is the last that it reported
        elif outcome is not None and outcome.state == "done" and outcome.value is not None:
            study.tell(trial, outcome.value)
        else:
            if outcome is not None and outcome.state == "done":
                print(f"warning: trial {trial.number}: summary.json has no number of optimized_metric", file=sys.stderr)
            study.tell(trial, state=TrialState.FAIL)
