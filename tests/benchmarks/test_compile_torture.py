"""When the torture of cold starts has been survived."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compile_torture import survived

GOOD: dict[str, Any] = {"failures": 0, "recompiles": 0, "loss_spread": 0.0, "deletions": 3}


@pytest.mark.parametrize(
    ("said", "delete", "good"),
    [
        ({}, "during", True),
        ({"deletions": 0}, "between", True),
        ({"deletions": 0}, "during", False),  # none was tested
        ({"failures": 1}, "during", False),
        ({"recompiles": 1}, "during", False),
        ({"loss_spread": 1e-7}, "during", False),
        ({"loss_spread": None}, "never", False),  # nothing was trained
    ],
)
def test_what_counts_as_survived(said: dict[str, Any], delete: str, good: bool) -> None:
    assert survived(GOOD | said, delete) is good
