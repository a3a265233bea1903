"""Run every graph of a run once, one rank after the other, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

# Private: the only place where torch counts what its caches gave. Used for figures alone.
from torch._dynamo.utils import counters

from dflash_lit.compilation.cache import surviving_deletion
from dflash_lit.compilation.seal import graphs_made
from dflash_lit.errors import UserError

__all__ = ["Group", "Made", "WarmupError", "in_turn", "undisturbed", "warm_up"]


class WarmupError(RuntimeError):
    """A rank could not compile; raised on all ranks."""


@dataclass(frozen=True)
class Made:
    """What one part of a run cost to make ready.

    Attributes:
        name: of the part.
        seconds: until its last kernel had run.
        graphs: compiled by Dynamo.
        hits, misses: of the cache of compiled code.
    """

    name: str
    seconds: float
    graphs: int
    hits: int
    misses: int

    def __str__(self) -> str:
        return f"{self.name}: {self.seconds:.1f} s, {self.graphs} graphs, cache: {self.hits} hits, {self.misses} misses"


class Group(Protocol):
    """The ranks that warm up together, as Lightning's strategies have it."""

    def broadcast(self, obj: object, src: int = 0) -> object:
        """``obj`` of rank ``src``, on every rank."""
        ...


def _cached() -> tuple[int, int]:
    """Hits and misses so far, of the caches of whole graphs and of their compiled code."""
    hits, misses = (
        counters["inductor"][f"fxgraph_cache_{kind}"] + counters["aot_autograd"][f"autograd_cache_{kind}"]
        for kind in ("hit", "miss")
    )
    return hits, misses


def warm_up(parts: Mapping[str, Callable[[], object]], told: Callable[[Made], None] = lambda made: None) -> list[Made]:
    """Call each part in this thread, and say what it cost.

    A part is a function that runs graphs as training will: same shapes, dtypes, strides, grad and autocast modes. It is called
    again if the cache was deleted under its hands.

    Args:
        parts: name -> function.
        told: called after each part.
    """
    made = []
    for name, run in parts.items():
        graphs, (hits, misses), began = graphs_made(), _cached(), time.monotonic()
        surviving_deletion(run)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # errors of kernels belong to this part
        now_hits, now_misses = _cached()
        made.append(Made(name, time.monotonic() - began, graphs_made() - graphs, now_hits - hits, now_misses - misses))
        told(made[-1])
    return made


def in_turn(run: Callable[[], object], group: Group, rank: int, world_size: int) -> None:
    """Call ``run`` on rank 0, then on rank 1, and so on: a later rank finds in the cache what the first one compiled.

    Raises:
        WarmupError: on every rank, with the message of the rank that failed; those after it do not run.
        UserError: the same, if it failed by something the user can mend.
    """
    for turn in range(world_size):
        failure: tuple[str, bool] | None = None
        cause: Exception | None = None
        if turn == rank:
            try:
                run()
            except Exception as error:
                cause, users = error, isinstance(error, UserError)
                said = str(error) if users else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                failure = (f"rank {rank} could not be warmed up: {said}" if world_size > 1 or not users else said, users)
        if world_size > 1:
            failure = group.broadcast(failure, src=turn)  # type: ignore[assignment]
        if failure is not None:
            message, by_user = failure
            raise (UserError(message) if by_user else WarmupError(message)) from cause


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, torch's generators go on afterwards as if nothing had been."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
