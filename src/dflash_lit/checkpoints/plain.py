"""What may stand in a checkpoint: what can be read back without running code."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dflash_lit.errors import UserError

__all__ = ["plain_bytes"]

# By exact type: a NumPy number is a float to isinstance, but pickles as a call of NumPy.
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_SEQUENCES = frozenset({list, tuple, set})
_MAPPINGS = frozenset({dict, OrderedDict})
_TENSORS = frozenset({Tensor, Parameter})


def plain_bytes(checkpoint: object) -> int:
    """About how many bytes ``checkpoint`` takes on a disk: those of its tensors and a little for the rest.

    Raises:
        UserError: naming the first entry that is no plain value, container or tensor: it could be written, but not be read back by
            ``torch.load(weights_only=True)``.
    """
    storages: dict[int, int] = {}
    entries = _walk(checkpoint, "", storages)
    return sum(storages.values()) + 64 * entries + 4096


def _walk(value: Any, where: str, storages: dict[int, int]) -> int:
    """How many entries there are; fills the sizes of the tensors' storages, by where they are in memory."""
    kind = type(value)
    if kind in _LEAVES:
        return 1
    if kind in _TENSORS:
        storage = value.untyped_storage()
        storages[storage.data_ptr() or id(value)] = storage.nbytes()
        return 4
    if kind in _MAPPINGS:
        inside = 1
        for key, item in value.items():
            inside += _walk(key, f"a key of {where or 'the checkpoint'}", storages)
            inside += _walk(item, f"{where}.{key}" if where else str(key), storages)
        return inside
    if kind in _SEQUENCES:
        return 1 + sum(_walk(item, f"{where}[{place}]", storages) for place, item in enumerate(value))
    raise UserError(
        f"checkpoint: {where or 'it'} is a {kind.__module__}.{kind.__qualname__}, which cannot be read back without running code from the "
        "file; let what saves it (a callback's state_dict, hyperparameters) give numbers, text, tensors, lists and dicts"
    )
