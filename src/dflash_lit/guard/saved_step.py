"""A training step in a folder, complete or not at all: what is needed to compute it again.

``step.json`` says what it was and what was found, ``weights.safetensors`` holds the drafter, ``batch-R.safetensors`` the batches of
drafter R, one after the other. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.files import read_json, refuse_no_file

__all__ = ["FACTS", "SavedStep", "finish", "read_step", "save_batches", "save_weights"]

Batch = dict[str, Tensor]
_FORMAT = 1
FACTS, _WEIGHTS = "step.json", "weights.safetensors"
_TOKENS = ("input_ids", "document_ids", "position_ids", "supervised", "row_ids")


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def save_batches(folder: Path, rank: int, batches: Sequence[Batch]) -> None:
    """Write those of one drafter; ``folder`` is there only after :func:`finish`."""
    place = _unfinished(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {f"{i}/{name}": x.detach().cpu().contiguous() for i, batch in enumerate(batches) for name, x in batch.items()}
    save_file(tensors, place / f"batch-{rank}.safetensors")


def save_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the drafter's parameters and buffers, for all drafters."""
    place = _unfinished(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, place / _WEIGHTS)


def finish(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts, and let ``folder`` appear; an older one of that name is replaced."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # strict JSON has no number for it
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    place = _unfinished(folder)
    (place / FACTS).write_text(json.dumps(plain({"format": _FORMAT, **facts}), indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(place, folder)


@dataclass(frozen=True)
class SavedStep:
    """A step as it was read.

    Attributes:
        facts: of ``step.json``.
        weights: of the drafter, by name.
        batches: of each drafter.
    """

    folder: Path
    facts: dict[str, Any]
    weights: dict[str, Tensor]
    batches: list[list[Batch]]

    @property
    def has_features(self) -> bool:
        return all("features" in batch for batches in self.batches for batch in batches)


def read_step(folder: str | Path) -> SavedStep:
    """Read what :func:`finish` has finished.

    Raises:
        UserError: naming the file that is missing, damaged or of another kind.
    """
    folder = Path(folder)
    path = folder / FACTS
    facts = read_json(path, "give a folder of RUN/bad_steps")
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise UserError(f"{path}: is no saved step of this version; replay it with the version that saved it")
    kinds: dict[str, type] = {"step": int, "epoch": int, "drafters": int, "weights_step": int, "module": dict, "target": dict}
    for name, kind in kinds.items():
        if not isinstance(facts.get(name), kind):
            raise UserError(f"{path}: field {name!r} is missing or cannot be {facts.get(name)!r}")
    texts, numbers = facts.get("found", []), [facts.get("losses", {}), facts.get("gradient_norms", {})]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{path}: field 'found' is no list of texts; copy the step again")
    if not all(isinstance(each, dict) and all(map(_is_number, each.values())) for each in numbers):
        raise UserError(f"{path}: field 'losses' or 'gradient_norms' has something that is no number; copy the step again")
    weights = _tensors(folder / _WEIGHTS)
    batches = []
    for rank in range(int(facts["drafters"])):
        file = folder / f"batch-{rank}.safetensors"
        of_rank: dict[int, Batch] = {}
        for key, tensor in _tensors(file).items():
            number, _, name = key.partition("/")
            if not number.isdecimal() or not name:
                raise UserError(f"{file}: tensor {key!r} belongs to no batch")
            of_rank.setdefault(int(number), {})[name] = tensor
        for place, batch in of_rank.items():
            if missing := set(_TOKENS) - set(batch):
                raise UserError(f"{file}: batch {place} has no {sorted(missing)[0]!r}")
        batches.append([of_rank[place] for place in sorted(of_rank)])
    return SavedStep(folder, facts, weights, batches)


def _is_number(value: Any) -> bool:
    """Also as a text, which is how those are written that are not finite."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _tensors(path: Path) -> dict[str, Tensor]:
    refuse_no_file(path, "copy the step again")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy the step again") from error
