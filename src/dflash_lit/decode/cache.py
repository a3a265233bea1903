"""The drafter's cache: keys and values of the verified context, for each layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dflash_lit.attention.attend import ContextKV

__all__ = ["ContextCache"]


class ContextCache:
    """Grows by appending; the noise tokens of a round never enter it.

    Buffers double when full, so appending costs amortised constant time.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.length = 0

    def append(self, new: Sequence[ContextKV]) -> None:
        """Add [R, Hkv, T, D] keys and values for every layer."""
        tokens = new[0][0].shape[2]
        if not self._keys or self.length + tokens > self._keys[0].shape[2]:
            self._grow(new, self.length + tokens)
        for layer, (keys, values) in enumerate(new):
            self._keys[layer][:, :, self.length : self.length + tokens] = keys
            self._values[layer][:, :, self.length : self.length + tokens] = values
        self.length += tokens

    def _grow(self, like: Sequence[ContextKV], needed: int) -> None:
        room = max(2 * needed, 128)

        def larger(old: list[Tensor], index: int) -> list[Tensor]:
            made = []
            for layer, pair in enumerate(like):
                rows, heads, _, dim = pair[index].shape
                buffer = pair[index].new_zeros(rows, heads, room, dim)
                if old:
                    buffer[:, :, : self.length] = old[layer][:, :, : self.length]
                made.append(buffer)
            return made

        self._keys, self._values = larger(self._keys, 0), larger(self._values, 1)

    def views(self) -> list[ContextKV]:
        """Keys and values so far, [R, Hkv, length, D] each, without copies."""
        return [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in zip(self._keys, self._values, strict=True)]
