"""The drafter for decoding at full speed: rounds of static shapes over a context of fixed room.

What :mod:`dflash_lit.target.static_reader` is for the target: layers are one compiled graph, and on a GPU drafting and building
the tree are replayed by one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_lit.attention.attend import Attends, ContextKV
from dflash_lit.attention.compiled import compiled
from dflash_lit.compilation.captured import Captured, CapturedStages, captures, on_device
from dflash_lit.decode.proposer import Draft, Drafts, Proposer, Settle, Settled
from dflash_lit.decode.stages import Timing, untimed
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter, Layer
from dflash_lit.target.frozen import FrozenTarget, TargetEnds
from dflash_lit.target.grouped_attention import grouped
from dflash_lit.target.static_cache import Stacks, put_at
from dflash_lit.target.static_reader import StaticTarget, room_for

__all__ = ["PlacedAttention", "StaticDrafter", "can_be_static", "static_pair"]


class PlacedAttention:
    """Attention of a block over a context of fixed room: the block's keys and values are put behind what counts, and forgotten.

    Args:
        lengths: int64 [R], tokens of the context of each text.
        block: slots.
        room: columns of the context.
        causal: whether a slot sees only slots up to its own.
        dtype: of the queries.
        window: a slot sees only columns less than this before it, of sliding layers.
    """

    def __init__(
        self, lengths: Tensor, block: int, room: int, causal: bool, dtype: torch.dtype, window: int | None = None
    ) -> None:
        slots = torch.arange(block, device=lengths.device)
        self.places = lengths[:, None] + slots
        last = self.places if causal else self.places[:, -1:].expand(-1, block)
        columns = torch.arange(room, device=lengths.device)
        visible = columns <= last[..., None]
        if window is not None:
            visible = visible & (self.places[..., None] - columns < window)
        self.mask = torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]

    def __call__(self, queries: Tensor, context: ContextKV, block: ContextKV) -> Tensor:
        for buffer, new in zip(context, block, strict=True):
            put_at(buffer, self.places, new)
        return grouped(queries, *context, self.mask)


def _layer(layer: Layer, *args: Any) -> Any:
    # By its class: `layer.forward` is what leads here.
    return type(layer).forward(layer, *args)


def _context(drafter: Drafter, features: Tensor, cos: Tensor, sin: Tensor) -> list[ContextKV]:
    return drafter.context_turned(features, cos, sin)


class StaticDrafter:
    """A drafter whose rounds have static shapes; decodes as :class:`Drafter` does, one batch of texts at a time.

    Args:
        drafter: on its device, in the target's dtype.
        room: tokens of context and a block; see :func:`dflash_lit.target.static_reader.room_for`.
        backend: of ``torch.compile`` for the layers; None leaves them as they are.
    """

    def __init__(self, drafter: Drafter, *, room: int, backend: str | None = "inductor") -> None:
        self.drafter, self.room = drafter, room
        self.device = drafter.fc.weight.device
        self._layer = None if backend is None else compiled(_layer, backend=backend)
        self._context: Callable[..., list[ContextKV]] = _context if backend is None else compiled(_context, backend=backend)
        self.buffers: dict[int, tuple[Stacks, Stacks]] = {}
        self.captured: dict[tuple[Any, ...], Any] = {}

    @property
    def config(self) -> DrafterConfig:
        return self.drafter.config

    def proposer(self, ends: TargetEnds, rows: int) -> Proposer:
        """For texts that begin; those of an earlier proposer are forgotten."""
        return _StaticProposer(self, ends, rows)

    @contextmanager
    def graphs(self) -> Iterator[None]:
        """Inside the block its layers run through their graph."""
        with ExitStack() as after:
            for layer in self.drafter.layers if self._layer is not None else ():
                assert self._layer is not None
                layer.forward = partial(self._layer, layer)
                after.callback(vars(layer).pop, "forward", None)
            yield

    def context(self, features: Tensor, lengths: Tensor, *, eager: bool = False) -> list[ContextKV]:
        """Keys and values of features [R, P, n_ids * H] behind the first ``lengths`` [R] tokens."""
        positions = lengths[:, None] + torch.arange(features.shape[1], device=features.device)
        run = _context if eager else self._context
        return run(self.drafter, features.to(self.drafter.fc.weight.dtype), *self.drafter.rotary(positions))


def can_be_static(target: FrozenTarget) -> bool:
    """Whether its layers can be compiled for decoding, and it can verify what :class:`StaticTarget` gives it to read."""
    return target.info.packs and target.no_trees is None and bool(getattr(target.model, "_can_compile_fullgraph", False))


def static_pair(
    target: FrozenTarget,
    drafter: Drafter,
    *,
    longest_prompt: int,
    max_new_tokens: int,
    budgets: Sequence[int],
    backend: str | None = "inductor",
) -> tuple[StaticTarget, StaticDrafter]:
    """Both sides with room for texts of these sizes.

    Raises:
        UserError: if the target cannot; see :func:`can_be_static`.
    """
    room = room_for(longest_prompt, max_new_tokens, drafter.config.block_size, max(budgets, default=0))
    return StaticTarget(target, room=room, backend=backend), StaticDrafter(drafter, room=room, backend=backend)


class _StaticProposer:
    """See :class:`~dflash_lit.decode.proposer.Proposer`. What it returns is overwritten by the next call."""

    def __init__(self, static: StaticDrafter, ends: TargetEnds, rows: int) -> None:
        self._static, self._ends, self._rows = static, ends, rows
        self._lengths: list[int] = [0] * rows
        self._begun = False

    def remember(self, features: Tensor, counts: Sequence[int]) -> None:
        static, rows = self._static, self._rows
        if not self._begun:  # prompts, of any length: as they are
            pairs = static.context(features, torch.zeros(rows, dtype=torch.int64, device=features.device), eager=True)
            keys, values = zip(*pairs, strict=True)
            if rows not in static.buffers:
                static.buffers[rows] = (Stacks(keys, static.room), Stacks(values, static.room))
            for stacks, states in zip(static.buffers[rows], (keys, values), strict=True):
                stacks.begin(states)
            self._begun = True
        else:
            buffers = static.buffers[rows]

            def append(features: Tensor, lengths: Tensor) -> None:
                places = lengths[:, None] + torch.arange(features.shape[1], device=features.device)
                for stacks, states in zip(buffers, zip(*static.context(features, lengths), strict=True), strict=True):
                    for view, new in zip(stacks.views, states, strict=True):
                        put_at(view, places, new)

            key = ("remember", *features.shape)
            if key not in static.captured:
                static.captured[key] = Captured(append, static.device)
            static.captured[key](features, on_device(self._lengths, features.device))
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def propose(self, draft: Draft, anchors: Tensor, stages: Timing) -> Drafts:
        static, config, ends = self._static, self._static.config, self._ends
        block, room = config.block_size, static.room
        if max(self._lengths) + block > room:
            raise ValueError(f"{max(self._lengths)} tokens and a block are more than the room of {room}")
        pairs = list(zip(*(stacks.views for stacks in static.buffers[self._rows]), strict=True))

        def run(anchors: Tensor, lengths: Tensor, stages: Timing = untimed) -> Drafts:
            with stages("draft"):
                placed = partial(PlacedAttention, lengths, block, room, config.causal, static.drafter.fc.weight.dtype)
                attend: Attends = placed()
                if config.slides:
                    attend = config.each_layer(placed(), placed(window=config.sliding_window))
            with static.graphs():
                return draft(static.drafter, ends, anchors, lengths, pairs, attend, stages)

        inputs = (anchors, on_device(self._lengths, anchors.device))
        if stages is untimed:
            key = ("propose", draft, self._rows)
            if key not in static.captured:
                static.captured[key] = Captured(run, static.device)
            drafts: Drafts = static.captured[key](*inputs)
        else:
            key = ("propose, timed", draft, self._rows)
            if key not in static.captured:
                static.captured[key] = CapturedStages(run, static.device)
            drafts = static.captured[key](*inputs, stages=stages)
        return drafts

    def settle(self, settle: Settle, drafts: Drafts, chosen: Tensor) -> Settled:
        static = self._static
        if not captures(static.device):
            return settle(drafts, chosen)
        # A capture reads the drafts where they are: those of a kind are always in the same place.
        key = ("settle", settle, drafts.tokens.data_ptr())
        if key not in static.captured:
            static.captured[key] = Captured(partial(settle, drafts), static.device)
        settled: Settled = static.captured[key](chosen)
        return settled
