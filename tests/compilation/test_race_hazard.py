"""What torch does to a process in which several threads compile, and that nothing here can meet it.

These tests are about torch as much as about this package. They state what was found on torch 2.11, 2.13 and 2.14 (docs/compile.md);
one that fails after an update says which part of that story has changed. Each runs in a process of its own: some leave it broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dflash_lit.attention.compiled import compiled, refuse_eager
from tests.compilation.processes import CONTEXT, Child, alone, pick

# From this version on the flag "somebody traces" is one of each thread, before it is the process's.
FLAG_OF_THREADS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
NESTED = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function"
REFUSED = "UserError: the test was about to run without compilation"
WAIT = 60.0


class Counted:
    """``x.sin() * 2``, and how often it ran as Python."""

    def __init__(self) -> None:
        self.eager = 0

    def function(self) -> Callable[[Tensor], Tensor]:
        def double(x: Tensor) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                self.eager += 1
            return x.sin() * 2

        return double


def probed(x: Tensor) -> Tensor:
    refuse_eager(torch.compiler.is_dynamo_compiling(), "the test", 1, 1, 1, 1)
    return x.sin() * 2


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return pick(error)
    return ""


class Tracing:
    """Inside the block another thread, named A, is within an FX trace, until :meth:`end` or the end of the block."""

    def __enter__(self) -> Tracing:
        inside, self._release = threading.Event(), threading.Event()

        def traced(x: Tensor) -> Tensor:
            inside.set()
            assert self._release.wait(WAIT)
            return x + 1

        self._thread = threading.Thread(target=lambda: make_fx(traced)(torch.ones(2)), name="A")
        self._thread.start()
        assert inside.wait(WAIT)
        return self

    def end(self) -> None:
        self._release.set()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.end()


# -- (a) the flag


def _warm_call_during_a_trace(nested_is_error: bool) -> tuple[str, int]:
    counted = Counted()
    graph = torch.compile(counted.function(), dynamic=False, backend="eager")
    x = torch.ones(3)
    graph(x)
    graph(x)
    assert counted.eager == 0
    torch._dynamo.config.error_on_nested_fx_trace = nested_is_error
    with Tracing():
        error = error_of(lambda: graph(x))
    graph(x)  # the other thread is done
    return error, counted.eager


def test_a_thread_that_traces_breaks_a_warm_call_of_another() -> None:
    error, eager = alone(_warm_call_during_a_trace, True)
    assert error.startswith(NESTED) if not FLAG_OF_THREADS else error == ""
    assert eager == 0


def test_without_the_error_the_warm_call_is_silently_eager() -> None:
    """The setting that was tried as a cure: it takes the message away, and the compilation with it."""
    assert alone(_warm_call_during_a_trace, False) == ("", 0 if FLAG_OF_THREADS else 1)


# -- (b) processes


def _hold_a_trace(inside: Any, release: Any) -> None:
    def traced(x: Tensor) -> Tensor:
        inside.set()
        assert release.wait(WAIT)
        return x + 1

    make_fx(traced)(torch.ones(2))


def _work_meanwhile(inside: Any, release: Any) -> int:
    """A warm call, a new graph, a backward pass and an ordinary module, while the other process traces."""
    counted = Counted()
    graph = torch.compile(counted.function(), dynamic=False, fullgraph=True, backend="aot_eager")
    graph(torch.ones(3))
    try:
        assert inside.wait(WAIT)
        graph(torch.ones(3))
        x = torch.ones(4, requires_grad=True)
        graph(x).sum().backward()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    finally:
        release.set()
    return counted.eager


def test_processes_do_not_disturb_each_other() -> None:
    inside, release = CONTEXT.Event(), CONTEXT.Event()
    tracing, working = Child(_hold_a_trace, inside, release), Child(_work_meanwhile, inside, release)
    assert working.result() == 0
    tracing.result()


# -- (c) the recompile limit

VARIANTS = 9
"""One more than Dynamo keeps of one code object."""


def _ninth_variant_without_fullgraph() -> tuple[list[str], int, list[str]]:
    counted = Counted()
    plain = torch.compile(counted.function(), dynamic=False, backend="eager")
    errors = [error_of(lambda size=size: plain(torch.ones(size))) for size in range(3, 3 + VARIANTS)]  # type: ignore[misc]
    guarded = torch.compile(probed, dynamic=False, backend="eager")
    return (
        errors,
        counted.eager,
        [error_of(lambda size=size: guarded(torch.ones(size))) for size in range(3, 3 + VARIANTS)],  # type: ignore[misc]
    )


def test_the_ninth_variant_of_a_function_is_silently_eager() -> None:
    """No thread is needed: eight GPUs or shapes in one process, each with and without gradients, are more than eight."""
    errors, eager, guarded = alone(_ninth_variant_without_fullgraph)
    assert errors == [""] * VARIANTS
    assert eager == 1
    assert guarded[:-1] == [""] * (VARIANTS - 1)
    assert guarded[-1].startswith(REFUSED)


def _ninth_variant_of_ours() -> tuple[list[str], int, str]:
    counted = Counted()
    graph = compiled(counted.function(), backend="eager")
    errors = [error_of(lambda size=size: graph(torch.ones(size))) for size in range(3, 3 + VARIANTS)]  # type: ignore[misc]
    return errors, counted.eager, error_of(lambda: graph(torch.ones(3)))


def test_the_ninth_variant_of_ours_is_an_error() -> None:
    errors, eager, warm_one_afterwards = alone(_ninth_variant_of_ours)
    assert errors[:-1] == [""] * (VARIANTS - 1)
    assert errors[-1].startswith("FailOnRecompileLimitHit")
    assert eager == 0
    assert warm_one_afterwards == ""


# -- (d) the stuck flag


@torch.no_grad()
def _eager_flex_during_a_trace(probe: bool) -> tuple[str, int]:
    """Whether compiled functions still are, after another thread's trace is over."""
    torch._dynamo.config.error_on_nested_fx_trace = False
    counted = Counted()
    other = torch.compile(counted.function(), dynamic=False, backend="eager")

    def attend(x: Tensor) -> Tensor:
        if probe:
            refuse_eager(torch.compiler.is_dynamo_compiling(), "the test", 1, 1, 1, 1)
        out = flex.flex_attention(x, x, x)
        assert isinstance(out, Tensor)
        return out

    attention = torch.compile(attend, dynamic=False, backend="aot_eager")
    x = torch.ones(1, 1, 128, 16)
    other(x)
    attention(x)

    with Tracing() as tracing:
        inner = flex.setup_compilation_env  # type: ignore[attr-defined]

        @contextmanager
        def until_the_trace_is_over() -> Iterator[Any]:
            # Eager flex_attention switches the flag off for its own compile, and on again as it was before.
            with inner() as backend:
                tracing.end()
                yield backend

        flex.setup_compilation_env = until_the_trace_is_over  # type: ignore[attr-defined]
        error = error_of(lambda: attention(x))
    assert counted.eager == 0
    for _ in range(5):
        other(x)
    return error, counted.eager


def test_eager_flex_attention_leaves_the_flag_stuck() -> None:
    """From then on everything compiled runs eagerly, in all threads, with no message: hence dense attention, and no memory."""
    assert alone(_eager_flex_during_a_trace, False) == ("", 0 if FLAG_OF_THREADS else 5)


def test_the_probe_ends_it_before_the_flag_sticks() -> None:
    error, eager = alone(_eager_flex_during_a_trace, True)
    assert error.startswith(REFUSED) if not FLAG_OF_THREADS else error == ""
    assert eager == 0


# -- (e) every other road to an eager run


def _run_on(road: str) -> str:
    """The error of a compiled function that is made, or called, where torch does not compile it."""
    config = torch._dynamo.config
    if road == "not compiled":
        return error_of(lambda: probed(torch.ones(3)))
    if road == "disabled":
        config.disable = True
    graph = compiled(probed, backend="eager")
    if road == "disabled later":
        graph(torch.ones(3))
        config.disable = True
    elif road == "stance":
        torch.compiler.set_stance("force_eager")
    elif road == "nested trace":
        graph(torch.ones(3))
        config.error_on_nested_fx_trace = False
    with Tracing() if road == "nested trace" else nullcontext():
        return error_of(lambda: graph(torch.ones(3)))


@pytest.mark.parametrize("road", ["not compiled", "disabled", "stance"])
def test_the_probe_ends_every_eager_run(road: str) -> None:
    assert alone(_run_on, road).startswith(REFUSED)


def test_what_is_compiled_stays_so_when_compiling_is_disabled_later() -> None:
    assert alone(_run_on, "disabled later") == ""


def test_the_probe_ends_a_run_that_fell_through_a_trace() -> None:
    error = alone(_run_on, "nested trace")
    assert error.startswith(REFUSED) if not FLAG_OF_THREADS else error == ""


def _failed_compile_with_suppressed_errors() -> tuple[str, int]:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no compiler")

    torch._dynamo.config.suppress_errors = True
    counted = Counted()
    graph = compiled(counted.function(), backend=broken)  # type: ignore[arg-type]
    return error_of(lambda: graph(torch.ones(3))), counted.eager


def test_an_error_of_the_compiler_is_not_suppressed() -> None:
    error, eager = alone(_failed_compile_with_suppressed_errors)
    assert error.startswith("BackendCompilerFailed")
    assert eager == 0


# -- (f) one thread


def _call_from_threads() -> list[str]:
    graph, other = compiled(probed, backend="eager"), compiled(probed, backend="eager")
    x, errors = torch.ones(3), []

    def call(function: Callable[[Tensor], Tensor], name: str) -> None:
        thread = threading.Thread(target=lambda: errors.append(error_of(lambda: function(x))), name=name)
        thread.start()
        thread.join(WAIT)

    call(graph, "early")  # ends, and leaves its place
    graph(x)
    call(graph, "second")
    call(other, "third")
    errors.append(error_of(lambda: graph(x)))
    return errors


def test_a_second_thread_is_refused() -> None:
    early, second, third, first_again = alone(_call_from_threads)
    assert early == first_again == ""
    assert second.startswith("ThreadError: probed is compiled and was called from thread 'second', but thread 'MainThread'")
    assert third.startswith("ThreadError")
