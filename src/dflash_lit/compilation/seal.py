"""After the warm-up nothing compiles: a seal over torch's compilers, and the counters that show it held."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

# Private, and all there is that counts: `counters` gains a graph for each compile and names each recompile limit that was hit,
# `callback_handler` tells of each compile as it begins. tests/compilation/test_seal.py fails if they stop to do so.
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters
from torch.fx import _symbolic_trace

from dflash_lit.attention.compiled import RecompileError

__all__ = ["Seal", "graphs_made"]


def graphs_made() -> int:
    """Graphs that this process has compiled so far."""
    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True)
class _Seen:
    graphs: int
    limits: int

    @classmethod
    def now(cls) -> _Seen:
        # `unimplemented` counts reasons of graph breaks; the keys are sentences.
        return cls(graphs_made(), sum(n for reason, n in counters["unimplemented"].items() if "recompile limit" in str(reason)))


class Seal:
    """Closed, a compiled function that would compile anew raises, and :meth:`check` finds what slipped past.

    There are roads to an uncompiled run that torch reports nowhere (docs/compile.md); those end in
    :func:`dflash_lit.attention.compiled.refuse_eager`, inside the functions themselves.
    """

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._compiles: list[str] = []

    @property
    def closed(self) -> bool:
        return self._seen is not None

    def close(self) -> None:
        """From now on a compile is an error. The stance is the whole process's, of all threads."""
        self._seen = _Seen.now()
        self._compiles.clear()
        callback_handler.register_start_callback(self._began)
        torch.compiler.set_stance("fail_on_recompile")

    def open(self) -> None:
        """Compiling is allowed again. May be called twice."""
        if self.closed:
            self._seen = None
            torch.compiler.set_stance("default")
            with suppress(ValueError):  # torch.compiler.reset() has forgotten it already
                callback_handler.remove_start_callback(self._began)

    def _began(self, args: CallbackArgs) -> None:
        self._compiles.append(str(args.compile_id))

    def recompiles(self) -> int:
        """Compiles since :meth:`close`; 0 in a run that is right."""
        assert self._seen is not None, "the seal is open"
        return max(len(self._compiles), _Seen.now().graphs - self._seen.graphs)

    def check(self) -> int:
        """:meth:`recompiles`, if that is 0 and compiled functions are still what they were.

        Raises:
            RecompileError: naming what changed.
        """
        assert self._seen is not None, "the seal is open"
        now = _Seen.now()
        wrong = {
            f"{self.recompiles()} graphs were compiled": self.recompiles() > 0,
            "Dynamo's recompile limit was hit, so a function runs uncompiled": now.limits > self._seen.limits,
            "torch's FX-tracing flag is stuck, so every compiled function runs uncompiled": _tracing(),
            "torch believes that it is compiling": torch.compiler.is_compiling(),
            "nn.Module.__call__ is still replaced by a tracer's": _module_call_replaced(),
        }
        found = [what for what, holds in wrong.items() if holds]
        if found:
            raise RecompileError("after the warm-up: " + "; ".join(found))
        return 0


def _tracing() -> bool:
    # A process-wide flag up to torch 2.13, one of each thread from 2.14 on; the function is the same. It also asks whether
    # torch is compiling, which is asked apart.
    return bool(_symbolic_trace.is_fx_symbolic_tracing())


def _module_call_replaced() -> bool:
    original: Any = _symbolic_trace._orig_module_call
    return torch.nn.Module.__call__ is not original
