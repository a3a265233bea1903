"""Which GPU a process that is started sees, and as what."""

from __future__ import annotations

import os

import pytest
import torch

from dflash_lit.placement.own_gpu import VARIABLE, device_seen, gpus_of_host, see_own, variables
from dflash_lit.placement.started import Started, child_environment

STARTED = {"DFLASH_LIT_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("visible", "count", "rank", "seen"),
    [
        (None, 8, 3, "3"),
        ("2,3,5", 3, 1, "3"),
        (" 6 , 7 ", 2, 1, "7"),
        ("GPU-1a,GPU-2b", 2, 0, "GPU-1a"),
        ("0,1,99,3", 2, 1, "1"),  # the driver stops at one that is not there
        (None, 2, 5, "1"),  # shared in turn
        ("3", 8, 5, "3"),  # never one that was not to be seen
        (None, 10**9, 2, "2"),
    ],
)
def test_a_process_sees_the_gpu_of_its_rank(visible: str | None, count: int, rank: int, seen: str) -> None:
    # As in a process that was told how many there are.
    environment = {**STARTED, VARIABLE: str(count), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    assert gpus_of_host(environment) == count
    assert variables(rank, environment) == {"CUDA_VISIBLE_DEVICES": seen, VARIABLE: str(count)}
    assert device_seen(torch.device("cuda", rank), environment) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "environment",
    [{}, {VARIABLE: "8"}, *({**STARTED, VARIABLE: told} for told in ("", "0", "-1", "²", " 8", "8 ", "x"))],
    ids=str,
)
def test_who_was_not_told_sees_all(environment: dict[str, str]) -> None:
    """A variable that was inherited alone, from within a run, says nothing of this process."""
    assert device_seen(torch.device("cuda", 3), environment) == torch.device("cuda", 3)
    assert gpus_of_host(environment) == torch.cuda.device_count()


def test_a_cpu_is_a_cpu() -> None:
    assert device_seen(torch.device("cpu"), {**STARTED, VARIABLE: "8"}) == torch.device("cpu")


def test_those_that_are_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STARTED, VARIABLE: "2", "CUDA_VISIBLE_DEVICES": "4,6"}.items():
        monkeypatch.setenv(name, value)
    made = child_environment(Started("hand"), 1, "127.0.0.1", 4711, "s" * 32)
    assert (made["CUDA_VISIBLE_DEVICES"], made[VARIABLE], made["DFLASH_LIT_LOCAL_RANK"]) == ("6", "2", "1")
    assert device_seen(torch.device("cuda", 1), made) == torch.device("cuda", 0)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_without_gpus_there_is_none_of_its_own(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = dict(os.environ)
    see_own(local_rank)
    assert dict(os.environ) == before
    assert gpus_of_host() == 0
    assert device_seen(torch.device("cuda", 1)) == torch.device("cuda", 1)
