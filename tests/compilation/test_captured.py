"""Captured functions where nothing is captured; on a GPU see tests/gpu/test_decode_gpu.py."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from dflash_lit.compilation.captured import Captured, CapturedStages, captures, on_device

CPU = torch.device("cpu")


def test_functions_are_called_as_they_are_on_a_cpu() -> None:
    assert not captures(CPU)
    seen: list[str] = []

    def add(x: Tensor, y: Tensor, stages: object = None) -> Tensor:
        if stages is not None:
            seen.append("timed")
        return x + y

    def never(*_: Tensor) -> list[Tensor]:
        raise AssertionError("nothing is warmed up")

    one, two = torch.ones(2), torch.arange(2.0)
    for _ in range(2):
        assert torch.equal(Captured(add, CPU, never)(one, two), one + two)
        assert torch.equal(CapturedStages(add, CPU)(one, two, stages=lambda _: nullcontext()), one + two)
    assert seen == ["timed", "timed"]


def test_numbers_on_a_device() -> None:
    made = on_device([3, 0, 7], CPU)
    assert made.dtype == torch.int64
    assert made.tolist() == [3, 0, 7]
