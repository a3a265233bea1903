"""Which GPU a process that is started sees, and as what."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.placement.own_gpu import VARIABLE, device_seen, gpus_of_host, variables


@pytest.mark.parametrize(
    ("visible", "count", "rank", "seen"),
    [
        (None, 8, 3, "3"),
        ("2,3,5", 3, 1, "3"),
        (" 6 , 7 ", 2, 1, "7"),
        ("GPU-1a,GPU-2b", 2, 0, "GPU-1a"),
        ("0,1,99,3", 2, 1, "1"),  # the driver stops at one that is not there
        (None, 2, 5, "1"),  # shared in turn
    ],
)
def test_a_process_sees_the_gpu_of_its_rank(visible: str | None, count: int, rank: int, seen: str) -> None:
    # As in a process that was told how many there are.
    environment = {VARIABLE: str(count), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    assert gpus_of_host(environment) == count
    assert variables(rank, environment) == {"CUDA_VISIBLE_DEVICES": seen, VARIABLE: str(count)}
    assert device_seen(torch.device("cuda", rank), environment) == torch.device("cuda", 0)


def test_nothing_changes_for_who_sees_all_or_has_none() -> None:
    assert device_seen(torch.device("cuda", 3), {}) == torch.device("cuda", 3)
    assert device_seen(torch.device("cpu"), {VARIABLE: "8"}) == torch.device("cpu")
    assert variables(1, {VARIABLE: "0"}) == {}
