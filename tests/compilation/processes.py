"""Functions in processes of their own: a test of what a process does to itself must leave nothing in that of the tests.

Forked from a server that has imported torch and its compilers and has used neither: a fresh state without seconds of imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["CONTEXT", "Child", "alone", "pick"]

CONTEXT = multiprocessing.get_context("forkserver")


def preload() -> None:
    """What the server imports when it starts, with the first process."""
    modules = ["dflash_lit.attention.compiled", "torch._inductor.compile_fx", "torch._inductor.async_compile"]
    CONTEXT.set_forkserver_preload(modules)


preload()

TIMEOUT = 120.0


class Child:
    """``function(*arguments)`` in a process; its value, or its exception as text, is sent back."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        self._receive, send = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(send, environment, function, arguments), daemon=True)
        self._process.start()
        send.close()

    def result(self) -> Any:
        """What ``function`` returned.

        Raises:
            AssertionError: with the traceback of what it raised, or if it died or took too long.
        """
        try:
            assert self._receive.poll(TIMEOUT), f"no result after {TIMEOUT:.0f} s"
            good, value = self._receive.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"the process died with exit code {self._process.exitcode}") from None
        finally:
            self.stop()
        assert good, value
        return value

    def stop(self) -> None:
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(send: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    # Set by torch.compile in the server, if a module that was imported there has called it.
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)
    os.environ.update({"TORCH_WARM_POOL": "0", **environment})  # no workers for Triton
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs what these tests provoke, with tracebacks
    try:
        send.send((True, function(*arguments)))
    except BaseException:
        send.send((False, traceback.format_exc()))


def alone(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    return Child(function, *arguments, **environment).result()


def pick(error: BaseException | None) -> str:
    """What crosses to the test of an exception: its class and the start of its message."""
    return "" if error is None else f"{type(error).__name__}: {str(error)[:300]}"
