"""The target as decoding uses it: tokens are read after those before, and taken back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_lit.errors import UserError

if TYPE_CHECKING:
    from dflash_lit.target.frozen import FrozenTarget

__all__ = ["TargetReader"]


class TargetReader:
    """One text that the target reads, a piece at a time: its cache, and the features of what it has just read.

    Args:
        target: who reads.
        layer_ids: whose outputs are the features, as in :func:`dflash_lit.drafter.config.feature_layers`; may be empty.

    Attributes:
        length: tokens read and not forgotten.

    Raises:
        UserError: if the target is not one that ``packs``: tokens cannot be taken back from it.
    """

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int]) -> None:
        if not target.info.packs:
            raise UserError(
                f"target.path={target.info.path!r}: has layers of kind {target.info.not_packed!r}, from whose state rejected drafts "
                "cannot be taken back; a drafter can be trained for it, but not decoded with here"
            )
        self.target, self.layer_ids = target, layer_ids
        # Without a config: caches of sliding layers forget tokens that come back when drafts are dropped. Their masks do slide.
        self.cache = DynamicCache()
        # Transformers renames the argument between 5.17 and 5.40.
        self.cache_name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"
        self.length = 0

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run ids [1, T] after what is cached; logits [1, T or 1, V] and features [1, T, n_ids * H] (None without layers)."""
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        arguments = {"input_ids": ids, "position_ids": positions, self.cache_name: self.cache, "use_cache": True}
        if last_only:
            arguments["logits_to_keep"] = 1
        if not self.layer_ids:
            logits, features = self.target.model(**arguments).logits, None
        else:
            with self.target.capture(self.layer_ids) as found:
                logits = self.target.model(**arguments).logits
            features = torch.cat([found[i] for i in self.layer_ids], dim=-1)
        self.length += ids.shape[1]
        return logits, features

    def forget(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        if count:
            self.cache.crop(-count)
            self.length -= count
