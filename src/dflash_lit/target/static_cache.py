"""Keys and values of a fixed room, for passes of static shapes; see :class:`~dflash_lit.target.static_reader.StaticTarget`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from dflash_lit.target.reader import put_behind

__all__ = ["PlacedLayer", "Stacks", "put_at"]


def put_at(buffer: Tensor, places: Tensor, new: Tensor) -> None:
    """Write ``new`` [R, Hkv, P, D] into columns ``places`` [R, P] of ``buffer`` [R, Hkv, S, D].

    By an index rather than a scatter: a compiler writes it in place, and does not copy the buffer.
    """
    rows = torch.arange(len(places), device=places.device)[:, None, None]
    heads = torch.arange(buffer.shape[1], device=places.device)[None, :, None]
    buffer.index_put_((rows, heads, places[:, None]), new)


class PlacedLayer(StaticLayer):
    """One layer's keys and values [R, Hkv, S, D]; new ones go where ``places`` says, each row's at columns of its own.

    Transformers' own static layer has one length for all rows, and goes on from it with every pass.

    Attributes:
        places: int64 [R, Q], set before each pass.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.places: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        put_at(self.keys, self.places, key_states)
        put_at(self.values, self.places, value_states)
        return self.keys, self.values


class Stacks:
    """Buffers of many layers side by side [R, layers * Hkv, S, D], so that one operation moves columns of all of them.

    Args:
        like: of each layer, a tensor [R, Hkv, ..., D]; layers of other sizes get stacks of their own.
        room: S.

    Attributes:
        views: of each layer, its buffer [R, Hkv, S, D].
    """

    def __init__(self, like: Sequence[Tensor], room: int) -> None:
        by_size: dict[tuple[int, int], list[int]] = {}
        for layer, states in enumerate(like):
            by_size.setdefault((states.shape[1], states.shape[3]), []).append(layer)
        self._stacks: list[Tensor] = []
        found: dict[int, Tensor] = {}
        for (heads, dim), layers in by_size.items():
            self._stacks.append(like[layers[0]].new_zeros(like[0].shape[0], len(layers) * heads, room, dim))
            found |= dict(zip(layers, self._stacks[-1].split(heads, dim=1), strict=True))
        self.views = [found[layer] for layer in range(len(like))]

    def begin(self, states: Sequence[Tensor]) -> None:
        """Fill the first columns with [R, Hkv, T, D] of each layer."""
        for view, new in zip(self.views, states, strict=True):
            view[:, :, : new.shape[2]] = new

    def move(self, rows: Tensor, lengths: Tensor) -> None:
        """In each row: entries ``rows`` [R, P] behind its first ``lengths`` [R] become the next ones, in this order."""
        places = (lengths[:, None] + rows)[:, None, :, None]
        for stack in self._stacks:
            put_behind(stack, lengths, stack.gather(2, places.expand(-1, stack.shape[1], -1, stack.shape[3])))
