"""All that one rank says to the ranks of the other kind on its host: a link to each of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lit.placement.layout import Transport
from dflash_lit.placement.link import (
    Answer,
    Call,
    DrafterLink,
    Goodbye,
    Pending,
    Request,
    Rows,
    TargetLink,
    TargetLostError,
    TensorSpec,
)
from dflash_lit.placement.secret import ForgedError
from dflash_lit.placement.world import World

__all__ = ["Channel", "ServingChannel"]


def _name(world: World, drafter: int, target: int, life: int) -> str:
    """Of a pair, by local ranks; each process of a target rank has its own."""
    return f"host/{world.host}/{drafter}-{target}/{life}"


class Channel:
    """A drafter's links to the targets of its host.

    Made by all ranks of a host at the same time, which connect every pair of drafter and target in one order: connecting blocks both
    sides. A target that comes back later is connected by a thread, in which nothing else waits.

    Args:
        world: of this rank.
        device: of this rank.
        transport: of features.
        limit_gib: larger requests and answers are neither sent nor received.
    """

    def __init__(self, world: World, device: torch.device, transport: Transport, *, limit_gib: float = 4.0) -> None:
        self._world, self._device, self._transport, self._limit_gib = world, device, transport, limit_gib
        self._rank = world.layout.local_rank(world.rank)
        self.links: dict[int, DrafterLink] = {}
        self._coming: dict[int, _Connecting] = {}
        self._members = world.members
        for drafter, target in world.layout.pairs_of_host(world.host):
            if drafter == world.rank:
                local = world.layout.local_rank(target)
                name = _name(world, self._rank, local, 0)
                self.links[local] = DrafterLink(world, name, local, device, transport, limit_gib)

    def targets(self) -> list[int]:
        """Local ranks of the targets that serve this drafter now, in order."""
        self._refresh()
        return sorted(self.links)

    def _refresh(self) -> None:
        """Let go of targets that are lost, and take in those that have come back."""
        members = self._world.members
        if members is self._members and not self._coming:
            return
        self._members = members
        for local, link in list(self.links.items()):
            if link.is_given_up():
                del self.links[local]
                link.close()
        layout = self._world.layout
        for rank in layout.targets_of_host(self._world.host):
            local, life = layout.local_rank(rank), members.lives[rank]
            coming = self._coming.get(local)
            if coming is not None and coming.life != life:  # lost again
                del self._coming[local]
                coming = None
            if local in self.links:
                continue
            if coming is None and life and (rank in members.ready or rank in members.joined):
                self._coming[local] = _Connecting(
                    self._world, self._rank, local, life, self._device, self._transport, self._limit_gib
                )
            elif coming is not None and coming.link is not None and rank in members.joined:
                self.links[local] = coming.link
                del self._coming[local]

    def lose(self, error: TargetLostError) -> None:
        """Go on without a target.

        Raises:
            Exception: what has happened to it, if there is no other, or if none may be lost: then the watch gets to know who it is.
        """
        link = error.link
        link.lost = True
        if self.links.get(link.target) is not link:
            return  # known
        if not link.is_given_up() and not (len(self.links) > 1 and self._world.tolerate):
            raise error.__cause__ or error
        del self.links[link.target]
        link.close()

    def ask(self, target: int, rows: Tensor, wanted: Sequence[TensorSpec]) -> Pending:
        """See :meth:`DrafterLink.ask`; of the target of that local rank."""
        return self.links[target].ask(rows, wanted)

    def call(self, target: int, function: Any, *arguments: Any) -> Answer:
        """See :meth:`DrafterLink.call`; of the target of that local rank."""
        return self.links[target].call(function, *arguments)

    def goodbye(self) -> None:
        """Tell all targets of this host that this drafter needs nothing more."""
        for link in self.links.values():
            link.goodbye()
        for link in self.links.values():
            link.close()
        self.links, self._coming = {}, {}


class _Connecting(threading.Thread):
    """Connects a drafter to a target that has come back.

    Attributes:
        link: None until it is there.
    """

    def __init__(
        self, world: World, drafter: int, target: int, life: int, device: torch.device, transport: Transport, limit_gib: float
    ) -> None:
        super().__init__(name="dflash_lit-connect", daemon=True)
        self._of = world, drafter, target, device, transport, limit_gib
        self.life = life
        self.link: DrafterLink | None = None
        self.start()

    def run(self) -> None:
        world, drafter, target, device, transport, limit_gib = self._of
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread's own
        try:
            name = _name(world, drafter, target, self.life)
            self.link = DrafterLink(world, name, target, device, transport, limit_gib, world.more_stores(), self.life)
        except ForgedError as error:
            world.watch.abort(str(error))
        except (RuntimeError, dist.DistError):
            pass  # it was lost again: whoever lost it is said by the watch


class ServingChannel:
    """A target's links to the drafters of its host; made as :class:`Channel` is.

    Args:
        world: of this rank.
        device: of this rank.
        transport: of features.
        limit_gib: larger requests and answers are neither sent nor received.
    """

    def __init__(self, world: World, device: torch.device, transport: Transport, *, limit_gib: float = 4.0) -> None:
        self._world = world
        self._requests: SimpleQueue[Request | Exception] = SimpleQueue()
        self._links: dict[int, TargetLink] = {}
        self._on_their_way: deque[tuple[TargetLink, dist.Work, Tensor]] = deque()
        self._left: set[int] = set()
        local = world.layout.local_rank(world.rank)
        for drafter, target in world.layout.pairs_of_host(world.host):
            if target == world.rank:
                other = world.layout.local_rank(drafter)
                name = _name(world, other, local, world.life)
                self._links[other] = TargetLink(world, name, other, device, transport, self._requests, limit_gib)

    def next_request(self) -> Rows | Call | None:
        """Wait for a request, from whichever drafter; None if all have said goodbye.

        One that came back when training was almost over may never hear of a drafter: so it looks whether they are done.
        """
        while len(self._left) < len(self._links):
            try:
                request = self._requests.get(timeout=1.0 if self._world.life else None)
            except Empty:
                drafters = self._world.layout.drafters_of_host(self._world.host)
                if all(self._world.is_done(rank) for rank in drafters):
                    return None
                continue
            if isinstance(request, Exception):
                raise request
            if not isinstance(request, Goodbye):
                return request
            self._left.add(request.source)
        return None

    def send_features(self, drafter: int, tensors: Sequence[Tensor], most: int) -> None:
        """Send what a request asked for. At most ``most`` tensors are on their way at a time; else this waits for the oldest."""
        link = self._links[drafter]
        self._on_their_way.extend((link, work, ready) for work, ready in link.send_features(tensors))
        self._trim(most)

    def send_answer(self, drafter: int, good: bool, value: Any) -> None:
        """Send what a call has come to."""
        self._links[drafter].send_answer(good, value)

    def _trim(self, most: int) -> None:
        while len(self._on_their_way) > most:
            link, work, _ = self._on_their_way.popleft()
            link.finish(work)

    def finish(self) -> None:
        """Wait until everything sent has left, and let go of it."""
        self._trim(0)
        for drafter, link in self._links.items():
            link.close(orderly=drafter in self._left)
