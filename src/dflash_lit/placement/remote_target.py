"""The target as a drafter rank sees it: embedding and head of its own, everything else asked of target ranks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.placement.channel import Channel
from dflash_lit.placement.flow import DeviceTimer
from dflash_lit.placement.link import Answer, DrafterLink, Pending, TargetLostError, TensorSpec
from dflash_lit.placement.target_worker import each_of, forget, keep, open_reader, read, read_prompts, read_tree
from dflash_lit.placement.world import World
from dflash_lit.target.ends import read_ends
from dflash_lit.target.frozen import TargetEnds, TargetInfo

__all__ = ["RemoteReader", "RemoteTarget"]

Item = TypeVar("Item")
Made = TypeVar("Made")


class Asked:
    """A request for features, with which target it is.

    Attributes:
        rows: int32 [3, R, S], as they are sent: should that target be lost, another one is asked.
        pending: what it sends.
    """

    def __init__(self, rows: Tensor, pending: Pending) -> None:
        self.rows, self.pending = rows, pending

    def arrived(self) -> bool:
        return self.pending.arrived()


class RemoteTarget:
    """Stands in for a :class:`~dflash_lit.target.frozen.FrozenTarget` where features, responses and drafts are made.

    Args:
        world: of a drafter rank.
        channel: to the targets of its host.
        info: config and tokenizer.
        layer_ids: the feature layers.
        device: of the drafter.
        dtype: of the target.
        teacher: ask for last hidden states, too.

    Attributes:
        fingerprint, eos_ids, no_trees: as the target ranks know them.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        info: TargetInfo,
        layer_ids: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        teacher: bool = False,
    ) -> None:
        self.info, self.device, self.dtype, self.teacher = info, device, dtype, teacher
        self.layer_ids = tuple(layer_ids)
        self._world, self._channel = world, channel
        facts = _facts_of_all(world, info)
        self.fingerprint: str = facts["fingerprint"]
        self.eos_ids: tuple[int, ...] = tuple(facts["eos_ids"])
        self.no_trees: str | None = facts["no_trees"]
        self._requests = itertools.count()
        self._waiting = DeviceTimer(device)
        self._asked: dict[int, Asked] = {}  # not taken yet, in order
        self._abandoned: list[Asked] = []  # those of them that nobody waits for

    @property
    def tokenizer(self) -> Any:
        return self.info.tokenizer

    @cached_property
    def _ends(self) -> TargetEnds:
        return read_ends(self.info, device=self.device, dtype=self.dtype)

    def ends(self) -> TargetEnds:
        """Embedding and head, read once from the target's files."""
        return self._ends

    # -- features

    def ask(self, batch: dict[str, Tensor]) -> Asked:
        """Ask the target whose turn it is for the features of a TokenRow batch; waits for nothing."""
        self._replace_lost()
        for gone in [asked for asked in self._abandoned if asked.arrived()]:
            self._abandoned.remove(gone)
            self._taken(gone)
        names = ("input_ids", "document_ids", "position_ids")
        rows = torch.stack([batch[name].to("cpu", torch.int32) for name in names])
        asked = Asked(rows, self._request(rows))
        self._asked[id(asked)] = asked
        return asked

    def _request(self, rows: Tensor) -> Pending:
        width = int(self.info.text.hidden_size)
        widths = [len(self.layer_ids) * width, *([width] if self.teacher else [])]
        wanted = [TensorSpec((*rows.shape[1:], size), self.dtype) for size in widths]
        while True:
            target = self._turn()
            try:
                return self._channel.ask(target, rows, wanted)
            except TargetLostError as error:
                self._channel.lose(error)

    def _turn(self) -> int:
        """Local rank of the target whose turn it is, among those that serve."""
        return self._world.layout.target_of(self._world.rank, next(self._requests), self._channel.targets())

    def _replace_lost(self) -> None:
        """Ask others for what lost targets still owed. Features are the same whoever makes them."""
        serving = set(self._channel.targets())
        for gone in [one for one in self._abandoned if not one.arrived() and _of_lost(one.pending, serving)]:
            self._abandoned.remove(gone)
            self._asked.pop(id(gone), None)
        for asked in self._asked.values():
            if not asked.arrived() and _of_lost(asked.pending, serving):
                asked.pending = self._request(asked.rows)

    def take(self, batch: dict[str, Tensor], pending: Asked, arrived: int) -> dict[str, Tensor]:
        """The batch with what was asked for: ``features`` [R, S, n_ids * H] and, for a teacher, ``last_hidden`` [R, S, H].

        Args:
            arrived: how many batches had arrived when this one was wanted, for the record.
        """
        flow = self._world.flow
        with self._waiting.measure():
            tensors = self._taken(pending)
        flow.waited_s = self._waiting.seconds()
        flow.tokens += batch["input_ids"].numel()
        flow.batches += 1
        flow.queued += arrived
        return {**batch, **dict(zip(("features", "last_hidden"), tensors, strict=False))}

    def abandon(self, pending: Asked) -> None:
        """What was asked for will not be taken; its memory is free as soon as it has arrived."""
        self._abandoned.append(pending)

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Ask, and wait for it."""
        return {**batch, **dict(zip(("features", "last_hidden"), self._taken(self.ask(batch)), strict=False))}

    def _taken(self, asked: Asked) -> list[Tensor]:
        while True:
            try:
                tensors = asked.pending.take()
            except TargetLostError as error:
                self._channel.lose(error)
                self._replace_lost()
            else:
                self._asked.pop(id(asked), None)
                return tensors

    # -- calls

    def each(self, function: Callable[[Any, Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """``function(target, item)`` for each, in order; as many at a time as there are target ranks on this host.

        Args:
            function: of a module: it is sent by its name. What is asked of a target that is lost is asked of another.
        """
        turns = itertools.count()
        waiting: deque[_Called] = deque()
        for item in items:
            while len(waiting) >= len(self._channel.targets()):
                yield waiting.popleft().answer()
            waiting.append(_Called(self._channel, next(turns), each_of, function, item))
        while waiting:
            yield waiting.popleft().answer()

    def reader(self, layer_ids: Sequence[int]) -> RemoteReader:
        """Reads a text with one of the targets."""
        drafter = self._world.layout.local_rank(self._world.rank)
        return RemoteReader(self._channel, drafter, tuple(layer_ids), self.device)

    def goodbye(self) -> None:
        """Nothing more will be asked. What was asked for and not taken, by an iterator that was dropped, comes in first."""
        self._replace_lost()
        while self._asked:
            self._taken(next(iter(self._asked.values())))
        self._abandoned.clear()
        self._channel.goodbye()


class _Called:
    """A call to one target, or to another one if that is lost.

    Args:
        turn: whose it is, among those that serve.
    """

    def __init__(self, channel: Channel, turn: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._channel, self._turn, self._function, self._arguments = channel, turn, function, arguments
        self._answer = self._ask()

    def _ask(self) -> Answer:
        while True:
            targets = self._channel.targets()
            target = targets[self._turn % len(targets)]
            try:
                return self._channel.call(target, self._function, *self._arguments)
            except TargetLostError as error:
                self._channel.lose(error)

    def answer(self) -> Any:
        """What it returned, or raised."""
        while True:
            try:
                return self._answer.take()
            except TargetLostError as error:
                self._channel.lose(error)
                self._answer = self._ask()


def _of_lost(pending: Pending, serving: set[int]) -> bool:
    return pending.link is not None and (pending.link.lost or pending.link.target not in serving)


def _facts_of_all(world: World, info: TargetInfo) -> dict[str, Any]:
    """What all targets of the run say of themselves, once they have read their weights.

    Raises:
        UserError: if they are not the same model.
    """
    ranks = [rank for host in range(world.layout.hosts) for rank in world.layout.targets_of_host(host)]
    facts = {rank: world.told(f"target/{rank}") for rank in ranks}
    for rank in ranks:
        if facts[rank] != facts[ranks[0]]:
            raise UserError(
                f"target.path={info.path!r}: {world.layout.who(rank)} has read another model there than "
                f"{world.layout.who(ranks[0])}; put the same files on all hosts"
            )
    return facts[ranks[0]]


class RemoteReader:
    """A :class:`~dflash_lit.target.reader.TargetReader` whose cache lives on a target rank.

    Should that rank be lost, another one reads the text once more, from its beginning.
    """

    def __init__(self, channel: Channel, drafter: int, layer_ids: tuple[int, ...], device: torch.device) -> None:
        self._channel, self._drafter, self._device = channel, drafter, device
        self.lengths = [0]
        self._link: DrafterLink | None = None
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []  # all that the cache was made by
        self._call(open_reader, layer_ids)

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._calls.append((function, arguments))
        while True:
            targets = self._channel.targets()
            link, calls = self._link, self._calls[-1:]
            if link is None or link.lost:
                self._link = link = self._channel.links[targets[self._drafter % len(targets)]]
                calls = self._calls
            try:
                for called, told in calls:
                    made = link.call(called, self._drafter, *told).take()
                return made
            except TargetLostError as error:
                self._channel.lose(error)

    def _read(self, function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, Tensor | None]:
        logits, features = self._call(function, *arguments)
        return logits.to(self._device), None if features is None else features.to(self._device)

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read`; the tensors are on the drafter's device."""
        made = self._read(read, ids.cpu(), last_only)
        self.lengths = [self.length + ids.shape[1]]
        return made

    def forget(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        if count:
            self._call(forget, count)
            self.lengths = [self.length - count]

    def read_prompts(self, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read_prompts`."""
        made = self._read(read_prompts, ids.cpu(), list(lengths))
        self.lengths = list(lengths)
        return made

    def read_tree(self, ids: Tensor, depths: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`TargetReader.read_tree`."""
        return self._read(read_tree, ids.cpu(), depths.cpu(), sees.cpu())

    def keep(self, rows: Tensor, counts: Sequence[int]) -> None:
        """See :meth:`TargetReader.keep`."""
        self._call(keep, rows.cpu(), list(counts))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
