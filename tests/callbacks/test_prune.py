"""When a trial is given up, against a real study; how all ranks of a run end then is in tests/sweeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.prune import Prune
from dflash_lit.errors import Pruned, UserError
from dflash_lit.sweeps.trial import VARIABLE, trial_words

optuna = pytest.importorskip("optuna", reason="the extra [sweeps] is not installed")


def stand_in(step: int, value: float, **facts: Any) -> Any:
    """What the callback reads of a Trainer."""
    given = {
        "sanity_checking": False,
        "is_global_zero": True,
        "max_steps": 100,
        "global_step": step,
        "callback_metrics": {"val/tree_eal@64": torch.tensor(value)},
        "strategy": SimpleNamespace(broadcast=lambda what: what),
    }
    return SimpleNamespace(**{**given, **facts})


@pytest.fixture
def study(tmp_path: Path) -> Any:
    """Two trials that came to 2 and 3 at step 10."""
    study = optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db", direction="maximize")
    for value in (2.0, 3.0):
        trial = study.ask()
        trial.report(value, 10)
        study.tell(trial, value)
    return study


def validate(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, step: int = 10, **settings: int) -> Any:
    trial = study.ask()
    monkeypatch.setenv(VARIABLE, trial_words(f"sqlite:///{tmp_path}/study.db", "s", trial._trial_id))
    prune = Prune(**{"startup_trials": 2, **settings})
    prune.setup(stand_in(0, 0.0), None, "fit")  # type: ignore[arg-type]
    prune.on_validation_end(stand_in(step, value), None)  # type: ignore[arg-type]
    return study.trials[-1].intermediate_values


def test_below_the_median_is_given_up(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Pruned) as caught:
        validate(study, tmp_path, monkeypatch, 2.25)
    assert (caught.value.metric, caught.value.value, caught.value.step) == ("val/tree_eal@64", 2.25, 10)


@pytest.mark.parametrize(
    ("value", "step", "settings"),
    [(2.75, 10, {}), (1.0, 10, {"startup_trials": 3}), (1.0, 10, {"warmup_steps": 11}), (1.0, 100, {})],
    ids=["above the median", "too few trials", "warming up", "done anyway"],
)
def test_what_goes_on_and_is_told_to_the_study(
    value: float, step: int, settings: dict[str, int], study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validate(study, tmp_path, monkeypatch, value, step, **settings) == {step: value}


def test_outside_a_search_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    prune = Prune()
    prune.setup(stand_in(0, 0.0), None, "fit")  # type: ignore[arg-type]
    prune.on_validation_end(stand_in(10, 0.0, callback_metrics={}), None)  # type: ignore[arg-type]


def test_a_monitor_that_is_not_logged_is_named(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, trial_words(f"sqlite:///{tmp_path}/study.db", "s", study.ask()._trial_id))
    prune = Prune(monitor="val/nothing")
    with pytest.raises(UserError, match=r"callbacks\.prune\.monitor=val/nothing: is not logged; choose one of val/tree_eal@64"):
        prune.on_validation_end(stand_in(1, 1.0), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["startup_trials", "warmup_steps"])
def test_negative_numbers_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option}=-1: must be at least 0"):
        Prune(**{option: -1})
