"""The drafter's side of decoding: what it has seen of each text, and its drafts behind the anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.attention.attend import Attend, Attends, ContextKV
from dflash_lit.decode.stages import Timing
from dflash_lit.decode.tree_cache import RowsCache
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import TargetEnds

if TYPE_CHECKING:
    from dflash_lit.decode.tree import Tree

__all__ = [
    "Draft",
    "Drafts",
    "EagerProposer",
    "Proposer",
    "ProposingDrafter",
    "Settle",
    "Settled",
    "one_block_attention",
    "proposer_of",
]


@dataclass(frozen=True)
class Drafts:
    """What the target is to read in one pass: the anchors, and drafts behind them.

    Attributes:
        tokens: int64 [R, Q], the anchors first.
        depths: int64 [R, Q]: tokens between the anchor and each on its branch, itself included; 0 is the anchor.
        sees: bool [R, Q, Q]: which of these tokens each sees.
        tree: how they branch; None for a chain.
    """

    tokens: Tensor
    depths: Tensor
    sees: Tensor
    tree: Tree | None = None


class Draft(Protocol):
    """A way to draft: static shapes, nothing waits for the device. Hashable: equal ones do the same."""

    def __call__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        anchors: Tensor,
        places: Tensor,
        context: Sequence[ContextKV],
        attend: Attends,
        stages: Timing,
    ) -> Drafts:
        """See :func:`dflash_lit.decode.chain.draft_logits` for the arguments."""


@dataclass(frozen=True)
class Settled:
    """What the target accepts of drafts.

    Attributes:
        rows: int64 [R, P]: which of the Q tokens stay, in this order; from the counts on they mean nothing.
        anchors: int64 [R]: the next ones: the target's tokens behind the last that stays.
        packed: int64 [R, P + 1]: what the target chose behind each of ``rows``, and how many count: one thing for the host to
            wait for.
    """

    rows: Tensor
    anchors: Tensor
    packed: Tensor


Settle = Callable[[Drafts, Tensor], Settled]


class Proposer(Protocol):
    """What decoding asks of a drafter."""

    def remember(self, features: Tensor, counts: Sequence[int]) -> None:
        """The target's features [R, P, n_ids * H] of the next tokens of each text; the first ``counts[r]`` of them count."""

    def propose(self, draft: Draft, anchors: Tensor, stages: Timing) -> Drafts:
        """Drafts behind the anchors, int64 [R], that stand right after what is remembered."""

    def settle(self, settle: Settle, drafts: Drafts, chosen: Tensor) -> Settled:
        """What the target's choices, int64 [R, Q], make of the drafts: ``settle(drafts, chosen)``."""


def one_block_attention(
    causal: bool, present: Tensor | None = None, *, places: Tensor | None = None, window: int | None = None
) -> Attend:
    """Attention of a single block over a cached context, all of which it sees, or what is ``present``: bool [R, S].

    With a ``window`` slot ``o`` sees the columns less than that before ``places + o``, int64 [R]: a column is a position.
    """

    def attend(queries: Tensor, context: ContextKV, block: ContextKV) -> Tensor:
        keys = torch.cat([context[0], block[0]], dim=2)
        values = torch.cat([context[1], block[1]], dim=2)
        mask = None
        if causal or present is not None or window is not None:
            size, total = queries.shape[2], keys.shape[2]
            mask = torch.ones(size, total, dtype=torch.bool, device=queries.device)
            if causal:
                mask = mask.tril(total - size)
            if present is not None:
                mask = mask & F.pad(present, (0, size), value=True)[:, None, None]
            if window is not None:
                assert places is not None
                slots = places[:, None] + torch.arange(size, device=queries.device)
                near = slots[..., None] - torch.arange(total - size, device=queries.device) < window
                mask = mask & F.pad(near, (0, size), value=True)[:, None]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


class EagerProposer:
    """Runs the drafter as it is, over caches that grow.

    Args:
        drafter: in evaluation mode.
        ends: embedding and head of the target.
        rows: texts.
    """

    def __init__(self, drafter: Drafter, ends: TargetEnds, rows: int) -> None:
        self.drafter, self.ends = drafter, ends
        self._cache = RowsCache(rows)

    def remember(self, features: Tensor, counts: Sequence[int]) -> None:
        device = features.device
        steps = torch.arange(features.shape[1], device=device)
        positions = torch.tensor(self._cache.lengths, device=device)[:, None] + steps
        self._cache.append_rows(self.drafter.context(features.to(self.drafter.fc.weight.dtype), positions), counts)

    def propose(self, draft: Draft, anchors: Tensor, stages: Timing) -> Drafts:
        cache = self._cache
        places = torch.tensor(cache.lengths, device=anchors.device)
        config, present = self.drafter.config, cache.present()
        full = one_block_attention(config.causal, present)
        attend: Attends = full
        if config.slides:
            sliding = one_block_attention(config.causal, present, places=places, window=config.sliding_window)
            attend = config.each_layer(full, sliding)
        return draft(self.drafter, self.ends, anchors, places, cache.views(), attend, stages)

    def settle(self, settle: Settle, drafts: Drafts, chosen: Tensor) -> Settled:
        return settle(drafts, chosen)


class ProposingDrafter(Protocol):
    """A drafter that makes its own proposers, such as a compiled one."""

    @property
    def config(self) -> DrafterConfig:
        """What drafter it is."""

    @property
    def drafter(self) -> Drafter:
        """Its weights."""

    def proposer(self, ends: TargetEnds, rows: int) -> Proposer:
        """For so many texts that begin."""


def proposer_of(drafter: Drafter | ProposingDrafter, ends: TargetEnds, rows: int) -> Proposer:
    """A proposer for texts that begin."""
    return EagerProposer(drafter, ends, rows) if isinstance(drafter, Drafter) else drafter.proposer(ends, rows)
