"""Functions that exist compiled or not at all.

``flex_attention`` outside a compiled graph computes every score of the dense mask: hundreds of gigabytes at the lengths this
project trains on, and it warns at most once. Whatever made the graph go missing (compilation switched off, a failed compile
that was suppressed, Dynamo's recompile limit, another thread that is tracing), the *body* then runs as ordinary Python. So
the body itself asks, on every run. docs/compile.md tells the story.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dflash_lit.errors import UserError

__all__ = ["RecompileError", "ThreadError", "compiled", "refuse_eager"]

_serial = count()
# torch raises plain RuntimeErrors for these two, so their texts are all there is to know them by: tests/compilation/test_seal.py.
_OFF = "found no compiled frames"
_STANCE = "Detected recompile when torch.compile stance is 'fail_on_recompile'"

_OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"deterministic": True}}
"""Of a backend. Else Inductor chooses the tiles of a sum by timing them, at every start (the ones that it makes at run time are not found in its
cache), and with them the order in which a rank adds: two runs, or two ranks, need not be equal to the last bit."""


class RecompileError(RuntimeError):
    """A graph that the warm-up did not make was asked for afterwards."""


class ThreadError(RuntimeError):
    """A second thread called a compiled function."""


class _Owner:
    """The one thread of this process that may call compiled functions: the first that does."""

    thread: threading.Thread | None = None

    @classmethod
    def check(cls, function: str) -> None:
        here = threading.current_thread()
        if cls.thread is None or not cls.thread.is_alive():
            cls.thread = here
        elif here is not cls.thread:
            raise ThreadError(
                f"{function} is compiled and was called from thread {here.name!r}, but thread {cls.thread.name!r} calls compiled functions "
                "in this process: while one thread compiles, torch changes the state of all. Use one process a GPU"
            )


def refuse_eager(compiling: bool, what: str, rows: int, heads: int, queries: int, keys: int) -> None:
    """Do nothing while Dynamo traces the caller; otherwise raise, before anything is allocated.

    Args:
        compiling: ``torch.compiler.is_dynamo_compiling()``, asked in the caller's own body. Asked in here it could be true of
            this function alone: under ``suppress_errors`` Dynamo may compile it as a frame of its own, its caller being eager.
        what: whose attention, for the message.
        rows, heads, queries, keys: its sizes.

    Raises:
        UserError: with the bytes of fp32 scores that dense math would take for one layer.
    """
    if compiling:
        return
    scores = rows * heads * queries * keys * 4
    raise UserError(
        f"{what} was about to run without compilation: dense math over {rows} x {heads} heads x {queries} queries x {keys} keys "
        f"takes {scores / 1e9:.1f} GB ({scores / 2**30:.1f} GiB) a layer. torch.compile is off or failed here: unset TORCH_COMPILE_DISABLE, "
        "TORCHDYNAMO_DISABLE and torch._dynamo.config.suppress_errors, and see that a C compiler and Triton are installed"
    )


def compiled(function: Callable[..., Any], *, backend: str = "inductor") -> Callable[..., Any]:
    """``function`` as one static graph: a graph break or one variant too many is an error, never a quiet eager run.

    Dynamo keeps graphs, and counts them against a limit of eight, by code object. So each call here makes one of its own:
    models of one process do not share the limit, and the ninth job of a sweep compiles like the first.

    Raises (when called):
        ThreadError: from any other thread than the first of the process to call one.
        RecompileError: if it would compile anew after :class:`dflash_lit.compilation.seal.Seal` was closed.
    """
    assert isinstance(function, FunctionType)
    name = function.__name__.strip("_")
    # Another name, because code objects that are equal in all else count as the same key.
    code = function.__code__.replace(co_name=f"{name}_{next(_serial)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    graph = torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=_OPTIONS.get(backend))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Inside another graph this is only a part of it.
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        _Owner.check(name)
        try:
            return graph(*args, **kwargs)
        except RuntimeError as error:
            if _OFF in str(error):
                raise UserError(
                    f"{name} has to be compiled, and torch.compile is switched off: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
                ) from error
            if _STANCE not in str(error):
                raise
            raise RecompileError(_explain(name, str(error), args, kwargs)) from error

    return call


def _explain(name: str, said: str, args: Any, kwargs: Any) -> str:
    # "- 0/1: tensor 'x' size mismatch at index 0. expected 3, actual 4", one line for each graph that was tried.
    guards = [line.strip().lstrip("- ") for line in said.splitlines()[1:] if line.strip().startswith("- ")]
    shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in _tensors((args, kwargs)))
    because = "; ".join(guards) if guards else "no graph of it was made before"
    return (
        f"{name} would have to be compiled again after the warm-up: {because}. It was called with {shapes}. Every shape of a run "
        "has to be the same from its first step to its last: see that batches are complete and nothing changes its dtype or grad mode"
    )


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))
