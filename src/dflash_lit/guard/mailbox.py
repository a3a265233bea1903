"""Numbers of the device on their way to the host, read when they have long arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Mailbox"]


class Mailbox:
    """Takes a tensor at each step, and gives it ``behind`` steps later: at a fixed distance, so that all ranks act at the same step.

    The copy goes to pinned memory in line with the device's work. When it is read, the host is ``behind`` steps ahead of what it
    reads; were the device still not there, it has that many steps queued, and does not stand still while the host waits.

    Args:
        behind: steps between sending and reading.

    Attributes:
        waits: how often the host was so far ahead that a copy had not arrived.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.waits = 0
        self._sent: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, about: Any, numbers: Tensor) -> None:
        """Begin to copy ``numbers`` [n]; ``about`` comes with them."""
        if numbers.device.type != "cuda":
            self._sent.append((about, numbers, None))
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((about, host, event))

    def read(self, behind: int | None = None) -> Iterator[tuple[Any, list[float]]]:
        """What was sent ``behind`` sends ago or earlier (by default as the mailbox was made for), oldest first; once each."""
        keep = self.behind if behind is None else behind
        while len(self._sent) > keep:
            about, host, event = self._sent.popleft()
            if event is not None and not event.query():
                self.waits += 1
                event.synchronize()
            yield about, host.tolist()

    def peek(self) -> list[tuple[Any, list[float]]]:
        """Everything that is not read yet, which stays there. Waits for it."""
        for _, _, event in self._sent:
            if event is not None:
                event.synchronize()
        return [(about, host.tolist()) for about, host, _ in self._sent]

    def put_back(self, sent: list[tuple[Any, list[float]]]) -> None:
        """What :meth:`peek` gave, in another process."""
        self._sent = deque((about, torch.tensor(numbers), None) for about, numbers in sent)

    def clear(self) -> None:
        """Forget what is on its way."""
        self._sent.clear()
