"""The target as decoding uses it: tokens are read after those before, one by one or as a tree, and taken back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_lit.errors import UserError

if TYPE_CHECKING:
    from dflash_lit.target.frozen import FrozenTarget

__all__ = ["TargetReader", "no_trees", "put_behind"]


def no_trees(target: FrozenTarget) -> str | None:
    """Why drafts that branch cannot be verified by ``target`` in one pass; None if they can.

    Drafts of one place stand in several columns: attention has to go by the positions it is given.
    """
    given = "position_ids" in inspect.signature(target.model.forward).parameters
    if not given or getattr(target.info.text, "alibi", False):
        return (
            f"target.path={target.info.path!r}: its attention counts columns (ALiBi) rather than positions, so several drafts "
            "of one place cannot be verified in one pass; decode with a chain"
        )
    return None


def put_behind(buffer: Tensor, lengths: Tensor, new: Tensor) -> None:
    """Write ``new`` [R, Hkv, P, D] into ``buffer`` [R, Hkv, S, D], in each row behind its first ``lengths`` [R] entries."""
    places = lengths[:, None] + torch.arange(new.shape[2], device=new.device)
    buffer.scatter_(2, places[:, None, :, None].expand_as(new), new)


class TargetReader:
    """One text that the target reads, a piece at a time: its cache, and the features of what it has just read.

    Or several texts of different lengths, by :meth:`read_prompts`, :meth:`read_tree` and :meth:`keep`. Token ``i`` of each is
    in column ``i`` of the cache; columns behind a text's end hold anything, and nothing looks at them.

    Args:
        target: who reads.
        layer_ids: whose outputs are the features, as in :func:`dflash_lit.drafter.config.feature_layers`; may be empty.

    Attributes:
        lengths: tokens read and not forgotten, of each text.

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
        self.lengths = [0]

    @property
    def length(self) -> int:
        """Tokens read and not forgotten, of the longest text: the width of the cache."""
        return max(self.lengths)

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run ids [1, T] after what is cached; logits [1, T or 1, V] and features [1, T, n_ids * H] (None without layers)."""
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        logits, features = self.run(ids, positions, **({"logits_to_keep": 1} if last_only else {}))
        self.lengths = [self.length + ids.shape[1]]
        return logits, features

    def forget(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        if count:
            self.cache.crop(-count)
            self.lengths = [self.length - count]

    def read_prompts(self, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Begin several texts: ids [R, T], T the longest's length; anything stands behind the first ``lengths[r]`` of a row.

        Returns:
            logits [R, V] of each text's last token and features [R, T, n_ids * H].

        Raises:
            UserError: if the target cannot read trees.
        """
        if reason := no_trees(self.target):
            raise UserError(reason)
        # No mask is needed: what stands behind a text's end is in front of none of its tokens.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        last = sorted({length - 1 for length in lengths})
        logits, features = self.run(
            ids, positions, logits_to_keep=1 if len(last) == 1 else torch.tensor(last, device=ids.device)
        )
        self.lengths = list(lengths)
        # A model that does not know the argument has made them all.
        found = last if logits.shape[1] == len(last) else list(range(ids.shape[1]))
        return logits[range(len(lengths)), [found.index(length - 1) for length in lengths]], features

    def read_tree(self, ids: Tensor, depths: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read tokens that branch, in one pass; until :meth:`keep` they are in the cache behind the longest text.

        Args:
            ids: int64 [R, Q].
            depths: int64 [R, Q]: how many of these tokens are before each on its branch; its position, from the text's end.
            sees: bool [R, Q, Q]: which of these tokens each sees, itself included. All see the whole text before.

        Returns:
            logits [R, Q, V] and features [R, Q, n_ids * H].
        """
        lengths = torch.tensor(self.lengths, device=ids.device)[:, None]
        columns = torch.arange(self.length, device=ids.device)[None]
        positions = lengths + depths
        visible = torch.cat([(columns < lengths)[:, None].expand(-1, ids.shape[1], -1), sees], dim=2)
        # A cached token's column is its position.
        distance = positions[:, :, None] - torch.cat([columns.expand(len(ids), -1), positions], dim=1)[:, None]
        masks = {
            kind: self._mask(visible if window is None else visible & (distance < window))
            for kind, window in self.target.info.windows.items()
        }
        # By kind where layers differ; models whose layers are all alike take the mask itself.
        return self.run(ids, positions, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    def keep(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Make tokens of the last :meth:`read_tree` the next ones of each text, in this order, and drop the others.

        Args:
            rows: int64 [R, P], P at most Q: which of its Q tokens.
            counts: how many of them, for each text; 0 leaves it as it was.
        """
        width, before = self.length, torch.tensor(self.lengths, device=rows.device)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

        def kept(states: Tensor) -> Tensor:
            index = rows[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            put_behind(states, before, states[:, :, width:].gather(2, index))
            return states[:, :, : self.length]

        for layer in self.cache.layers:
            assert isinstance(layer, DynamicLayer)  # a cache made without a config has no others
            if layer.keys is not None and layer.values is not None:  # layers may share those of another
                layer.keys, layer.values = kept(layer.keys), kept(layer.values)

    def run(self, ids: Tensor, positions: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
        """One pass of the model over ``cache``, whatever that is: logits and features; ``more`` goes to the model."""
        arguments = {"input_ids": ids, "position_ids": positions, self.cache_name: self.cache, "use_cache": True, **more}
        if not self.layer_ids:
            return self.target.model(**arguments).logits, None
        with self.target.capture(self.layer_ids) as found:
            logits = self.target.model(**arguments).logits
        return logits, torch.cat([found[i] for i in self.layer_ids], dim=-1)

    def _mask(self, visible: Tensor) -> Tensor:
        """``visible`` [R, Q, S] as the attention takes it: [R, 1, Q, S]."""
        if self.target.model.config._attn_implementation != "eager":
            return visible[:, None]
        # Eager attention adds the mask to the scores.
        return torch.where(visible[:, None], 0.0, torch.finfo(self.target.dtype).min).to(self.target.dtype)
