"""The benchmark of faults sees when the last process is gone, and who was named."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults import fault, ranks_to_hit
from benchmarks.soak import prepare
from dflash_lit.placement.layout import Layout


def test_which_ranks_are_hit() -> None:
    assert ranks_to_hit(Layout(5, 3)) == [0, 2, 7]
    assert ranks_to_hit(Layout(1, 1)) == [0, 1]
    assert ranks_to_hit(Layout(0, 2)) == [0, 1]


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    prepare(tmp_path, rows=40, tokens=100)
    found = fault(tmp_path, Layout(1, 1), 1, "killed")
    assert found["left"] == 0
    assert found["code"] == 1
    assert found["said"] == ["error: rank 1 (target, host 0) was killed by SIGKILL"]
    assert 0 < found["seconds"] < 60
