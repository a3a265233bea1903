"""Which target ranks serve, as a log that all ranks share: who has joined, who was lost, who has come back.

One key of the store holds the whole log, and an entry is added by comparing and setting it. So all ranks read the same entries in
the same order, and what a loss comes to (whether the run goes on) is decided once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch.distributed as dist

from dflash_lit.placement.layout import Layout, Role

__all__ = ["LOG", "Entry", "Members", "add"]

LOG = "members"
"""Key of the log."""


@dataclass(frozen=True)
class Entry:
    """What has become of a target rank.

    Attributes:
        kind: ``joined``: it is connected to its drafters and serves; ``ready``: a restarted one, which they may connect to;
            ``lost``: it is not to be reckoned with any more.
        rank: physical.
        life: of the process that is meant: how many of this rank were lost before it.
        why: of a loss, as a sentence about the rank.
    """

    kind: Literal["ready", "joined", "lost"]
    rank: int
    life: int = 0
    why: str = ""


class Members:
    """The target ranks as of a log.

    Args:
        layout: of the run.
        tolerate: how many target ranks may be missing at a time.
        log: from the first entry.

    Attributes:
        lives: of each target rank, how many processes of it were lost.
        missing: ranks that are lost and have not joined again, and why.
        joined: ranks that serve.
        ready: restarted ranks that drafters may connect to, but which do not serve yet.
    """

    def __init__(self, layout: Layout, tolerate: int, log: Sequence[Entry] = ()) -> None:
        self.layout, self.tolerate, self.log = layout, tolerate, tuple(log)
        self.lives = {rank: 0 for rank in range(layout.world) if layout.role(rank) is Role.TARGET}
        self.missing: dict[int, str] = {}
        self.joined: set[int] = set()
        self.ready: set[int] = set()
        for entry in self.log:
            if entry.life != self.lives[entry.rank]:
                continue  # of a process that had been given up already
            if entry.kind == "ready":
                self.ready.add(entry.rank)
            elif entry.kind == "joined":
                self.ready.discard(entry.rank)
                self.joined.add(entry.rank)
                self.missing.pop(entry.rank, None)
            else:
                self.lives[entry.rank] += 1
                self.joined.discard(entry.rank)
                self.ready.discard(entry.rank)
                self.missing.setdefault(entry.rank, entry.why)

    @classmethod
    def read(cls, layout: Layout, tolerate: int, text: bytes) -> Members:
        """From the store's value."""
        return cls(layout, tolerate, [Entry(*entry) for entry in json.loads(text or b"[]")])

    def listens(self, rank: int) -> bool:
        """Whether beats of a rank are to be expected: of all but those that are missing and have not come back."""
        return rank not in self.missing or rank in self.ready

    def is_over(self, rank: int, life: int) -> bool:
        """Whether that process of a rank was given up."""
        return life < self.lives.get(rank, 0)

    def may_lose(self, rank: int) -> bool:
        """Whether the run can go on without it.

        Features do not leave a host, so each host needs a target rank. One that has not joined yet is not lost but cannot be
        started; one that comes back has been missed already.
        """
        if rank in self.missing:
            return True
        if rank not in self.joined or len(self.missing) >= self.tolerate:
            return False
        return any(other in self.joined and other != rank for other in self.layout.targets_of_host(self.layout.host(rank)))


def add(store: dist.Store, text: bytes, entry: Entry) -> bytes:
    """Add an entry to the log if it still reads ``text``; what it reads then."""
    entries = [*json.loads(text or b"[]"), list(astuple(entry))]
    return store.compare_set(LOG, text.decode(), json.dumps(entries))
