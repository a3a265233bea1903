"""The drafter's cache for several texts at once, each of its own length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_lit.attention.attend import ContextKV
from dflash_lit.decode.cache import ContextCache
from dflash_lit.target.reader import put_behind

__all__ = ["RowsCache"]


class RowsCache(ContextCache):
    """Token ``i`` of each text is in column ``i``; columns behind a text's end hold anything.

    Attributes:
        lengths: tokens of each text; ``length`` is the longest.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.lengths = [0] * rows

    def append_rows(self, new: Sequence[ContextKV], counts: Sequence[int]) -> None:
        """Add the first ``counts[r]`` of the [R, Hkv, P, D] keys and values of every layer to each text."""
        needed = self.length + new[0][0].shape[2]
        if not self._keys or needed > self._keys[0].shape[2]:
            self._grow(new, needed)
        lengths = torch.tensor(self.lengths, device=new[0][0].device)
        for layer, (keys, values) in enumerate(new):
            put_behind(self._keys[layer], lengths, keys)
            put_behind(self._values[layer], lengths, values)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.length = max(self.lengths)

    def present(self) -> Tensor | None:
        """bool [R, length]: which columns of :meth:`views` hold tokens of each text; None if all do."""
        if min(self.lengths) == self.length:
            return None
        device = self._keys[0].device
        return torch.arange(self.length, device=device) < torch.tensor(self.lengths, device=device)[:, None]
