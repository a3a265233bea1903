"""A number that all drafters agree on at each step, without a wait for a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dflash_lit.placement.world import World

__all__ = ["Agreement"]


class Agreement:
    """The largest number that any drafter has given at the call before; on all drafters the same at the same call.

    One call behind, so that the exchange (CPU to CPU, over gloo) goes on during a step. All drafters call equally often.
    """

    def __init__(self, world: World) -> None:
        self._group = world.group("agreement", world.drafter_rank, world.layout.drafter_world)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._value = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def ask(self, number: int) -> int:
        agreed = self.settle()
        self._value = torch.tensor([number])
        self._work = self._group.allreduce([self._value], self._options)
        return agreed

    def settle(self) -> int:
        """Wait for the last exchange, and give what it came to."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._value)
