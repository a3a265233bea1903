"""The target for decoding at full speed: passes of a few static shapes over a cache of fixed room.

At batch 1 a pass over one token launches thousands of kernels that each take microseconds; a GPU waits for the host. Here layers
are one compiled graph, shared by all of them as in training, and on a GPU a whole pass is replayed by one launch. Plain, chain and
tree decoding go through the same pass, over 1, B and budget + 1 tokens, so that their speeds compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from dflash_lit.compilation.captured import Captured, on_device
from dflash_lit.errors import UserError
from dflash_lit.target.compiled_layers import packed_layers, shared_layer_graph
from dflash_lit.target.frozen import FrozenTarget, TargetEnds
from dflash_lit.target.grouped_attention import GROUPED
from dflash_lit.target.packed_attention import unsupported
from dflash_lit.target.reader import TargetReader
from dflash_lit.target.static_cache import PlacedLayer, Stacks

__all__ = ["StaticReader", "StaticTarget", "room_for", "turns_by_length"]


def turns_by_length(text: Any) -> bool:
    """Whether the rotary angles of a language model, by its config, depend on how long the text is.

    Transformers compares the longest position on the host ("dynamic"; "longrope", too, before 5.40), which no graph can capture.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]  # models may have one a kind of layer
    return any(of_kind.get("rope_type") in ("dynamic", "longrope") for of_kind in each)


def room_for(prompt: int, new: int, block: int, budget: int) -> int:
    """Columns that decoding needs: the text, what a last round yields too much, and a tree behind it; a multiple of 64."""
    return -(-(prompt + new + block + max(budget + 1, block)) // 64) * 64


class PlacedCache(Cache):
    """The layers of :class:`PlacedLayer` as a model takes them."""

    def __init__(self, layers: list[PlacedLayer]) -> None:
        super().__init__(layers=list(layers))


class _Buffers:
    """The caches of so many texts."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], room: int) -> None:
        self.keys, self.values = Stacks(keys, room), Stacks(values, room)
        pairs = zip(self.keys.views, self.values.views, strict=True)
        self.cache = PlacedCache([PlacedLayer(k, v) for k, v in pairs])

    def place(self, places: Tensor) -> None:
        for layer in self.cache.layers:
            assert isinstance(layer, PlacedLayer)
            layer.places = places


class StaticTarget:
    """A target whose verify passes have static shapes; decodes as :class:`FrozenTarget` does, one batch of texts at a time.

    Prompts are read as they are: they are long, of any length, and read once.

    Args:
        whole: the target itself.
        room: columns of the cache; see :func:`room_for`.
        backend: of ``torch.compile`` for the layers; None leaves them as they are.

    Raises:
        UserError: if the target cannot verify trees, or its code cannot be compiled.
    """

    def __init__(self, whole: FrozenTarget, *, room: int, backend: str | None = "inductor") -> None:
        if reason := whole.no_trees:
            raise UserError(f"{reason}, and with --no-compile")
        if backend is not None and not getattr(whole.model, "_can_compile_fullgraph", False):
            raise UserError(
                f"target.path={whole.info.path!r}: its layers cannot be compiled (Transformers says so); decode with --no-compile"
            )
        if turns_by_length(whole.info.text):
            raise UserError(
                f"target.path={whole.info.path!r}: its rotary angles depend on the text's length; decode with --no-compile"
            )
        self.whole, self.room = whole, room
        attention = whole.model.config._attn_implementation
        self._attention = GROUPED if attention == "sdpa" and unsupported(whole.model) is None else attention
        self._backend = backend
        self._graphs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._buffers: dict[int, _Buffers] = {}
        self._passes: dict[tuple[int, int, tuple[int, ...]], Captured[tuple[Tensor, Tensor | None]]] = {}
        self._in_line: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves: dict[tuple[int, int], Captured[None]] = {}

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.whole.eos_ids

    @property
    def no_trees(self) -> str | None:
        return None

    def ends(self) -> TargetEnds:
        return self.whole.ends()

    def reader(self, layer_ids: Sequence[int]) -> StaticReader:
        """Begin texts; those of an earlier reader are forgotten."""
        return StaticReader(self, tuple(layer_ids))

    def in_line(self, count: int) -> tuple[Tensor, Tensor]:
        """Depths [1, Q] and sight [1, Q, Q] of tokens one after the other."""
        if count not in self._in_line:
            depths = torch.arange(count, device=self.device)[None]
            self._in_line[count] = (depths, depths[..., None] >= depths[:, None])
        return self._in_line[count]

    def begin(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Buffers:
        """Put what prompts left into the buffers for as many texts, which are made when they are first needed."""
        rows = keys[0].shape[0]
        if rows not in self._buffers:
            self._buffers[rows] = _Buffers(keys, values, self.room)
        buffers = self._buffers[rows]
        buffers.keys.begin(keys)
        buffers.values.begin(values)
        return buffers

    def read(
        self, buffers: _Buffers, layer_ids: tuple[int, ...], ids: Tensor, depths: Tensor, sees: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """One pass; see :meth:`TargetReader.read_tree`. ``lengths``: int64 [R], tokens before. Overwritten by the next."""
        key = (*ids.shape, layer_ids)
        if key not in self._passes:
            self._passes[key] = Captured(partial(self._pass, buffers, layer_ids), self.device)
        return self._passes[key](ids, depths, sees, lengths)

    def move(self, buffers: _Buffers, rows: Tensor, lengths: Tensor) -> None:
        """See :meth:`Stacks.move`."""

        def both(rows: Tensor, lengths: Tensor) -> None:
            buffers.keys.move(rows, lengths)
            buffers.values.move(rows, lengths)

        def in_place(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return torch.arange(rows.shape[1], device=rows.device).expand_as(rows), lengths

        key = (rows.shape[0], rows.shape[1])
        if key not in self._moves:
            self._moves[key] = Captured(both, self.device, in_place)
        self._moves[key](rows, lengths)

    def _graph(self, shape: tuple[int, ...]) -> Callable[..., Any] | None:
        """One a shape: Dynamo keeps at most eight variants of a function, and a sweep may have more budgets."""
        if self._backend is None:
            return None
        if shape not in self._graphs:
            self._graphs[shape] = shared_layer_graph(self._backend)
        return self._graphs[shape]

    def _pass(
        self, buffers: _Buffers, layer_ids: tuple[int, ...], ids: Tensor, depths: Tensor, sees: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        whole = self.whole
        buffers.place(lengths[:, None] + torch.arange(ids.shape[1], device=ids.device))
        masks = self._masks(depths, sees, lengths)
        reader = TargetReader(whole, layer_ids)
        reader.cache = buffers.cache  # type: ignore[assignment]
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        own = self._graph(tuple(ids.shape))
        graph = None if own is None else partial(_with_own_cache, own, whole.layers)
        with packed_layers(whole.layers, self._attention, graph):
            return reader.run(ids, lengths[:, None] + depths, attention_mask=mask)

    def _masks(self, depths: Tensor, sees: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Of each kind of layer [R, 1, Q, S] to be added to the scores. A text's token ``i`` is in column ``i``."""
        queries = depths.shape[1]
        columns = torch.arange(self.room, device=depths.device)
        behind = columns - lengths[:, None]  # [R, S]: from 0 on the tokens of this pass
        which = behind.clamp(0, queries - 1)
        old, new = behind < 0, (behind >= 0) & (behind < queries)
        own = sees.gather(2, which[:, None].expand(-1, queries, -1))
        visible = old[:, None] | (new[:, None] & own)
        positions = lengths[:, None] + depths
        of_columns = torch.where(old, columns, positions.gather(1, which))
        distance = positions[:, :, None] - of_columns[:, None]
        dtype = self.whole.dtype
        lowest = torch.finfo(dtype).min
        return {
            kind: torch.where(visible if window is None else visible & (distance < window), 0.0, lowest).to(dtype)[:, None]
            for kind, window in self.whole.info.windows.items()
        }


def _with_own_cache(graph: Callable[..., Any], layers: nn.ModuleList, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``graph`` of one layer, with its part of the cache in place of the whole: nothing in it says which layer it is."""
    number = next(n for n, other in enumerate(layers) if other is layer)
    given = {name: value.layers[number] if isinstance(value, PlacedCache) else value for name, value in kwargs.items()}
    return graph(layer, *args, **given)


class StaticReader:
    """A :class:`~dflash_lit.target.reader.TargetReader` by passes of static shapes.

    What it returns of a pass is overwritten by the next of as many tokens.

    Attributes:
        lengths: tokens read and not forgotten, of each text.
    """

    def __init__(self, target: StaticTarget, layer_ids: tuple[int, ...]) -> None:
        self._target, self._layer_ids = target, layer_ids
        self._prompts: TargetReader | None = target.whole.reader(layer_ids)
        self._buffers: _Buffers
        self.lengths = [0]

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read`."""
        count = ids.shape[1]
        if self._prompts is not None:
            made = self._prompts.read(ids, last_only=last_only)
            self._begin([count])
            return made
        logits, features = self.read_tree(ids, *self._target.in_line(count))
        self.lengths = [self.lengths[0] + count]
        return logits[:, -1:] if last_only else logits, features

    def forget(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        self.lengths = [length - count for length in self.lengths]

    def read_prompts(self, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read_prompts`."""
        assert self._prompts is not None, "texts begin once"
        made = self._prompts.read_prompts(ids, lengths)
        self._begin(lengths)
        return made

    def read_tree(self, ids: Tensor, depths: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read_tree`.

        Raises:
            ValueError: if the texts have outgrown the room.
        """
        if self.length + ids.shape[1] > self._target.room:
            raise ValueError(
                f"{self.length} tokens and {ids.shape[1]} behind them are more than the room of {self._target.room}"
            )
        lengths = on_device(self.lengths, ids.device)
        return self._target.read(self._buffers, self._layer_ids, ids, depths, sees, lengths)

    def keep(self, rows: Tensor, counts: Sequence[int]) -> None:
        """See :meth:`TargetReader.keep`."""
        self._target.move(self._buffers, rows, on_device(self.lengths, rows.device))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _begin(self, lengths: Sequence[int]) -> None:
        assert self._prompts is not None
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self._prompts.cache.layers]
        whole = self._target.whole
        if len(pairs) != whole.info.layers or any(keys is None for keys, _ in pairs):
            raise UserError(f"target.path={whole.info.path!r}: layers share caches; decode with --no-compile")
        keys, values = zip(*pairs, strict=True)
        self._buffers = self._target.begin(keys, values)
        self._prompts, self.lengths = None, list(lengths)
