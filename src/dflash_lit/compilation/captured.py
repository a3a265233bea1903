"""Functions of static shapes as CUDA graphs: all their kernels by one launch.

Decoding at batch 1 launches thousands of small kernels a token, and a GPU would mostly wait for the host. On other devices nothing
is captured, and functions are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dflash_lit.compilation.cache import surviving_deletion

__all__ = ["Captured", "CapturedStages", "captures", "on_device"]

Made = TypeVar("Made")

WARM_UPS = 2
"""Runs before a capture: what libraries set up when they are first used cannot be captured."""

OTHERS = "thread_local"
"""Other threads, such as the one that watches over NCCL, may ask the device what they like during a capture."""


def captures(device: torch.device) -> bool:
    """Whether functions are captured there."""
    return device.type == "cuda"


class Captured(Generic[Made]):
    """``function`` of tensors, captured at its first call and replayed from then on; every call has the same shapes.

    What it returns is overwritten by the next call. Called more than once for a capture, so it has to be one that does no harm
    twice; or ``harmless`` says which inputs are. Its memory is its own: graphs that share theirs would have to be replayed in the
    order of their capture.

    Args:
        function: tensors -> anything that holds tensors.
        device: of all of them.
        harmless: inputs for the runs before the capture; default: those of the first call.
    """

    def __init__(
        self,
        function: Callable[..., Made],
        device: torch.device,
        harmless: Callable[..., Sequence[Tensor]] | None = None,
    ) -> None:
        self._function, self._device, self._harmless = function, device, harmless
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._made: Made

    def __call__(self, *inputs: Tensor) -> Made:
        if not captures(self._device):
            return self._function(*inputs)
        if self._graph is None:
            self._inputs = _own(inputs if self._harmless is None else self._harmless(*inputs))
            _warm_up(self._function, self._inputs, self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=OTHERS):
                self._made = self._function(*self._inputs)
            self._graph = graph
        _fill(self._inputs, inputs)
        self._graph.replay()
        return self._made


class CapturedStages(Generic[Made]):
    """The same for a function of tensors and a ``Timing``, one graph a stage, so that each can be timed.

    All that it computes has to be inside of a stage.

    Args:
        function: (tensors, stages=...) -> anything that holds tensors.
        device: of all of them.
    """

    def __init__(self, function: Callable[..., Made], device: torch.device) -> None:
        self._function, self._device = function, device
        self._parts: list[tuple[str, torch.cuda.CUDAGraph]] = []
        self._inputs: list[Tensor] = []
        self._made: Made

    def __call__(self, *inputs: Tensor, stages: Callable[[str], AbstractContextManager[None]]) -> Made:
        if not captures(self._device):
            return self._function(*inputs, stages=stages)
        if not self._parts:
            self._inputs = _own(inputs)
            _warm_up(self._function, self._inputs, self._device)
            # Of one function, hence always replayed in the order of their capture: they may share memory.
            handle = torch.cuda.graph_pool_handle()

            @contextmanager
            def capture(stage: str) -> Iterator[None]:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=handle, capture_error_mode=OTHERS):
                    yield
                self._parts.append((stage, graph))

            self._made = self._function(*self._inputs, stages=capture)
        _fill(self._inputs, inputs)
        for stage, graph in self._parts:
            with stages(stage):
                graph.replay()
        return self._made


def _own(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [given.clone(memory_format=torch.contiguous_format) for given in inputs]


def _warm_up(function: Callable[..., object], inputs: Sequence[Tensor], device: torch.device) -> None:
    """Run ``function`` on a stream of its own, as captures do; what it compiles is compiled again if the cache is deleted meanwhile."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            surviving_deletion(partial(function, *inputs))
    torch.cuda.current_stream(device).wait_stream(stream)


def _fill(buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copy each input to its buffer.

    Raises:
        ValueError: if a shape is another than when the function was captured.
    """
    for buffer, given in zip(buffers, inputs, strict=True):
        if buffer.shape != given.shape:
            raise ValueError(f"captured for {tuple(buffer.shape)}, called with {tuple(given.shape)}")
        buffer.copy_(given)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)]; on a GPU without waiting for it."""
    made = torch.tensor(values, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
