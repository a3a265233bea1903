"""Attention that exists compiled or not at all.

``flex_attention`` outside a compiled graph computes every score of the dense mask: hundreds of gigabytes at the lengths this
project trains on, and it warns at most once. Whatever made the graph go missing (compilation switched off, a failed compile
that was suppressed, Dynamo's recompile limit, another thread that is tracing), the *body* then runs as ordinary Python. So
the body itself asks, on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflash_lit.errors import UserError

__all__ = ["compiled", "refuse_eager"]


def refuse_eager(what: str, rows: int, heads: int, queries: int, keys: int) -> None:
    """Do nothing while Dynamo traces; otherwise raise, before anything is allocated.

    Args:
        what: whose attention, for the message.
        rows, heads, queries, keys: its sizes.

    Raises:
        UserError: with the bytes of fp32 scores that dense math would take for one layer.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    scores = rows * heads * queries * keys * 4
    raise UserError(
        f"{what} was about to run without compilation: dense math over {rows} x {heads} heads x {queries} queries x {keys} keys "
        f"takes {scores / 1e9:.1f} GB ({scores / 2**30:.1f} GiB) a layer. torch.compile is off or failed here: unset TORCH_COMPILE_DISABLE, "
        "TORCHDYNAMO_DISABLE and torch._dynamo.config.suppress_errors, and see that a C compiler and Triton are installed"
    )


def compiled(function: Callable[..., Any], *, backend: str = "inductor") -> Callable[..., Any]:
    """``function`` as one static graph: a graph break or one variant too many is an error, never a quiet eager run.

    Give each part of the model a function of its own: graphs, and Dynamo's limit on their number, are kept by code object.
    """
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
