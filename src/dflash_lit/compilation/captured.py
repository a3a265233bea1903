"""Functions of static shapes as CUDA graphs: all their kernels by one launch.

Decoding at batch 1 launches thousands of small kernels a token, and a GPU would mostly wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Captured", "Pool", "Segments", "fill", "on_device"]

Made = TypeVar("Made")

WARM_UPS = 2
"""Runs before a capture: what libraries set up when they are first used cannot be captured."""


class Pool:
    """Memory that graphs share which are replayed one after the other, never at the same time.

    Args:
        device: where they run; on other devices than GPUs nothing is captured, and functions are called as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = device.type == "cuda"
        self._handle = torch.cuda.graph_pool_handle() if self.captures else None

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched inside becomes ``graph``, and does not run."""
        with torch.cuda.graph(graph, pool=self._handle):
            yield

    def warm_up(self, function: Callable[..., object], inputs: Sequence[Tensor]) -> None:
        """Run ``function`` on a stream of its own, as captures do."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)


class Captured(Generic[Made]):
    """``function`` of tensors, captured at its first call and replayed from then on; every call has the same shapes.

    What it returns is overwritten by the next call. Called more than once for a capture, so it has to be one that does no harm
    twice; or ``harmless`` says which inputs are.

    Args:
        function: tensors -> anything that holds tensors.
        pool: whose memory it uses.
        harmless: inputs for the runs before the capture; default: those of the first call.
    """

    def __init__(
        self, function: Callable[..., Made], pool: Pool, harmless: Callable[..., Sequence[Tensor]] | None = None
    ) -> None:
        self._function, self._pool, self._harmless = function, pool, harmless
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._made: Made

    def __call__(self, *inputs: Tensor) -> Made:
        if not self._pool.captures:
            return self._function(*inputs)
        if self._graph is None:
            warm = inputs if self._harmless is None else self._harmless(*inputs)
            self._inputs = [given.clone(memory_format=torch.contiguous_format) for given in warm]
            self._pool.warm_up(self._function, self._inputs)
            graph = torch.cuda.CUDAGraph()
            with self._pool.capture(graph):
                self._made = self._function(*self._inputs)
            self._graph = graph
        fill(self._inputs, inputs)
        self._graph.replay()
        return self._made


class Segments:
    """A function captured in parts, so that each can be timed: a ``Timing`` whose stages become graphs of their own.

    Attributes:
        parts: names of the stages in their order, and their graphs.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.parts: list[tuple[str, torch.cuda.CUDAGraph]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        with self._pool.capture(graph):
            yield
        self.parts.append((stage, graph))


def fill(buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copy each input to its buffer.

    Raises:
        ValueError: if a shape is another than when the function was captured.
    """
    for buffer, given in zip(buffers, inputs, strict=True):
        if buffer.shape != given.shape:
            raise ValueError(f"captured for {tuple(buffer.shape)}, called with {tuple(given.shape)}")
        if buffer is not given:
            buffer.copy_(given)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)]; on a GPU without waiting for it."""
    made = torch.tensor(values, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
