"""What a run must have in common with the one whose checkpoint it goes on from.

A contract is a flat dict of plain values by the name of the config's key. It is stored in every checkpoint under ``contract``. What is
unknown (an empty string, or a name that only one side has) is not compared: some of it is known only later in a run's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.errors import UserError
from dflash_lit.objective.config import Objective

__all__ = ["BATCHES", "CONTENT", "CONTRACT", "compare", "contract_of", "settings"]

CONTRACT = "contract"
CONTENT = "data (digest of the training rows)"
BATCHES = ("data.rows_per_batch", "drafter ranks", "trainer.accumulate_grad_batches")
"""May change between epochs: they decide how an epoch is cut into steps, not what is learnt from."""


def settings(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a contract that is in the arguments of :class:`dflash_lit.module.DrafterModule`: drafter, objective, optimizer."""
    drafter = {**_standard_drafter(), **hyper_parameters["drafter"]}
    objective = {**Objective().to_dict(), **hyper_parameters["objective"]}
    # Chunking and the form of checkpointing change memory, not results.
    names = ["labels", "weights", "gamma", "alpha", "capacity"]
    if objective["labels"] == "soft":
        names.append("temperature")
    if objective["weights"] == "tree_survival":
        names += ["tree_budget", "tree_temperature", "floor", "floor_weights"]
    return {
        **{f"drafter.{name}": value for name, value in drafter.items()},
        **{f"objective.{name}": objective[name] for name in names},
        "drafter.anchors": hyper_parameters.get("anchors"),
        "drafter.feature_noise": hyper_parameters.get("feature_noise", 0.0),
        "seed": hyper_parameters.get("seed"),
        "optimizer.kind": hyper_parameters.get("optimizer"),
        # Lightning restores these with the optimizer, so another value would silently have no effect.
        **{f"optimizer.{name}": hyper_parameters.get(name) for name in ("lr", "betas", "weight_decay")},
        "target (digest of its tokenizer)": hyper_parameters.get("tokenizer", ""),
    }


def _standard_drafter() -> dict[str, Any]:
    """Of checkpoints from before a field was added; with lists for tuples, as in to_dict()."""
    return {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in fields(DrafterConfig)
        if field.default is not MISSING
    }


def contract_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint as it was read.

    Raises:
        UserError: if it is not of this project.
    """
    try:
        return {**settings(checkpoint["hyper_parameters"]), **(checkpoint.get(CONTRACT) or {})}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"ckpt_path: is not a checkpoint of this project: it has no settings of a drafter ({type(error).__name__}: {error})"
        ) from error


def compare(checkpoint: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of other data, another target, drafter, objective or optimizer.

    How the batches are cut is compared only if the checkpoint was saved inside an epoch. How many processes hold the target is no part of
    it.

    Args:
        checkpoint: as it was read; its tensors are not looked at.
        ours: this run's contract, or a part of it.

    Raises:
        UserError: naming every field that differs, and both values.
    """
    theirs = contract_of(checkpoint)
    differ = [
        f"{name}={theirs[name]}, this run {value}"
        for name, value in ours.items()
        if name in theirs
        and theirs[name] != value
        and "" not in (theirs[name], value)
        and not (name in BATCHES and not _inside_epoch(checkpoint))
    ]
    if differ:
        raise UserError(
            f"ckpt_path: the checkpoint has {'; '.join(differ)}; "
            "resume with the settings it was made with, or start a new run from its export (drafter.init_from)"
        )


def _inside_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether batches of its epoch are left, by the state that Lightning keeps of the training loader."""
    try:
        loaders = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        return any(0 < loader["batches"] < loader["order"]["batches"] for loader in loaders)
    except (KeyError, TypeError):
        return False
