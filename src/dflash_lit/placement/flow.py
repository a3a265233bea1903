"""How much a rank has moved so far, and how long it worked and waited for it: what a run's pace is judged by."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Protocol, runtime_checkable

import torch

from dflash_lit.placement.layout import Layout

__all__ = ["DeviceTimer", "Flow", "FlowSource"]


@dataclass(slots=True)
class Flow:
    """Counters of one rank since it started; of two moments, the difference says what happened in between.

    Attributes:
        tokens: of a target those of the rows it has served, of a drafter those of the feature batches that its trainer was given.
        busy_s: seconds of a target's forward passes; 0 of a drafter.
        waited_s: seconds that a drafter waited for features, a target for a request.
        batches: served, or given to the trainer.
        queued: of a drafter, the feature batches that had arrived already, counted whenever it took one and summed up, so
            that ``queued / batches`` is the mean depth of its queue; 0 of a target.
    """

    tokens: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    batches: int = 0
    queued: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Flow) -> Flow:
        return Flow(*(one - two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def to_json(self) -> str:
        """Short, as it travels with every heartbeat: the values in their order, seconds to the microsecond."""
        values = (self.tokens, round(self.busy_s, 6), round(self.waited_s, 6), self.batches, self.queued)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Flow:
        return cls(*json.loads(text))


@runtime_checkable
class FlowSource(Protocol):
    """A strategy that knows what all ranks have moved."""

    @property
    def layout(self) -> Layout: ...

    def flows(self) -> dict[int, Flow]:
        """Newest known counters by physical rank; those of other processes are as old as their last heartbeat."""
        ...

    def serving(self) -> int:
        """Target ranks that are there, of all hosts."""
        ...


class DeviceTimer:
    """Adds up how long a device worked on measured blocks; the host never waits for it.

    On a GPU a pair of events encloses what a block puts on the current stream, and counts once the GPU has passed it. Blocks
    follow one another on one stream; one thread measures, and one thread (the same, or another) asks for the seconds.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._total = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self.device.type != "cuda":
            began = time.perf_counter()
            try:
                yield
            finally:
                self._total += time.perf_counter() - began
            return
        stream = torch.cuda.current_stream(self.device)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(stream)
        try:
            yield
        finally:
            last.record(stream)
            self._pending.append((first, last))

    def seconds(self) -> float:
        """Of all blocks that the device has finished."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._total += first.elapsed_time(last) / 1000  # it gives milliseconds
        return self._total
