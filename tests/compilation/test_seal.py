"""Once closed, nothing compiles unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx import _symbolic_trace

from dflash_lit.attention.compiled import RecompileError, compiled
from dflash_lit.compilation.seal import Seal, graphs_made


def _double(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


@pytest.fixture
def seal() -> Iterator[Seal]:
    seal = Seal()
    yield seal
    seal.open()


def test_what_was_made_before_goes_on_running(seal: Seal) -> None:
    double = compiled(_double, backend="eager")
    made = graphs_made()
    double(torch.ones(3), torch.ones(3))
    assert graphs_made() == made + 1
    seal.close()
    for number in range(3):  # other contents are no other graph
        assert double(torch.full((3,), float(number)), torch.ones(3)).tolist() == [2 * number + 1] * 3
        assert seal.check() == 0


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.ones(4), "size mismatch at index 0. expected 3, actual 4"),
        (torch.ones(3, requires_grad=True), "requires_grad mismatch"),
        (torch.ones(3, dtype=torch.bfloat16), "dtype mismatch"),
    ],
)
def test_another_shape_dtype_or_mode_is_an_error_that_names_it(seal: Seal, x: Tensor, says: str) -> None:
    double = compiled(_double, backend="eager")
    double(torch.ones(3), torch.ones(3))
    seal.close()
    with pytest.raises(RecompileError) as caught:
        double(x, torch.ones(x.shape))
    message = str(caught.value)
    assert message.startswith("double would have to be compiled again after the warm-up")
    assert says in message
    assert f"called with {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" in message
    assert seal.check() == 0  # it raised instead of compiling


def test_a_function_never_made_is_an_error(seal: Seal) -> None:
    seal.close()
    with pytest.raises(RecompileError, match="no graph of it was made before"):
        compiled(_double, backend="eager")(torch.ones(3), torch.ones(3))


def test_a_compile_that_slips_past_is_counted(seal: Seal) -> None:
    seal.close()
    torch.compiler.set_stance("default")  # as another library might
    compiled(_double, backend="eager")(torch.ones(3), torch.ones(3))
    assert seal.recompiles() == 1
    with pytest.raises(RecompileError, match="1 graphs were compiled"):
        seal.check()


def test_the_recompile_limit_is_noticed(seal: Seal) -> None:
    def own(x: Tensor) -> Tensor:
        return x + 1

    quiet = torch.compile(own, dynamic=False, backend="eager")  # without fullgraph: over the limit it runs uncompiled
    seal.close()
    torch.compiler.set_stance("default")
    for size in range(2, 12):
        quiet(torch.ones(size))
    with pytest.raises(RecompileError, match="recompile limit was hit"):
        seal.check()


def test_a_stuck_tracing_flag_is_noticed(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    seal.close()
    # Set as a tracer sets it: one flag of the process up to torch 2.13, one of each thread later.
    if hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
        monkeypatch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)
    else:
        monkeypatch.setattr(_symbolic_trace, "is_fx_symbolic_tracing", lambda: True)
    with pytest.raises(RecompileError, match="FX-tracing flag is stuck"):
        seal.check()


def test_a_module_call_left_replaced_is_noticed(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    seal.close()
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda self: None)
    with pytest.raises(RecompileError, match="replaced by a tracer's"):
        seal.check()


def test_it_opens_after_a_reset_too(seal: Seal) -> None:
    seal.close()
    torch.compiler.reset()
    seal.open()
    assert not seal.closed
    compiled(_double, backend="eager")(torch.ones(2), torch.ones(2))


def test_opened_again_everything_compiles(seal: Seal) -> None:
    double = compiled(_double, backend="eager")
    double(torch.ones(3), torch.ones(3))
    seal.close()
    seal.open()
    seal.open()
    assert not seal.closed
    assert double(torch.ones(5), torch.ones(5)).shape == (5,)


def test_compilation_switched_off_is_one_line() -> None:
    """In a process of its own: torch reads the variable when it is imported."""
    code = """
import torch
from dflash_lit.attention.compiled import compiled
from dflash_lit.errors import UserError

def double(x):
    return x * 2

try:
    compiled(double)(torch.ones(3))
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.startswith("double has to be compiled, and torch.compile is switched off: unset TORCH_COMPILE_DISABLE")
