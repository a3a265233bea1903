"""One line of 80 columns, from the first step of a small run to the last of an enormous one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_lit.watching.progress_line import left_text, progress_line

FIGURES = {
    "train/loss": 2.345,
    "train/chain_eal": 3.21,
    "val/tree_eal@64": 4.56,
    "acceptance/tau_greedy": 3.1,
    "pipeline/ktok_s": 12.34,
    "pipeline/wait_share": 0.123,
}


def test_everything_is_on_the_line_of_a_usual_run() -> None:
    line = progress_line(120, 500, FIGURES, 95)
    assert line == "step 120/500 loss 2.35 chain 3.21 tree 4.56 12.3 Ktok/s wait 12% 1m35s left"
    without_targets = {name: value for name, value in FIGURES.items() if name != "pipeline/wait_share"}
    line = progress_line(120, 500, without_targets, 95)
    assert line == "step 120/500 loss 2.35 chain 3.21 tree 4.56 tau 3.10 12.3 Ktok/s 1m35s left"


def test_what_was_not_measured_is_left_out() -> None:
    assert progress_line(1, 4, {"train/loss": 45.3}, None) == "step 1/4 loss 45.30"


def test_a_large_run_keeps_all_but_tau_and_digits() -> None:
    figures = {**FIGURES, "train/loss": 12.3, "train/chain_eal": 15.1, "val/tree_eal@64": 15.9, "pipeline/ktok_s": 1234.5}
    line = progress_line(123_456, 1_000_000, {**figures, "pipeline/wait_share": 1.0}, 3 * 86400 + 7200)
    assert line == "123456/1000000 loss 12.3 chain 15.1 tree 15.9 1234 Ktok/s wait 100% 3d02h left"
    assert len(line) <= 80


@given(
    step=st.integers(0, 10**7),
    values=st.lists(st.floats(), min_size=5, max_size=5),
    left=st.floats(0, 1e12),
    width=st.integers(20, 200),
)
def test_no_figures_break_the_line(step: int, values: list[float], left: float, width: int) -> None:
    metrics = dict(zip(FIGURES, [*values, 1.0], strict=True))
    line = progress_line(step, 10**7, metrics, left, width)
    assert len(line) <= min(width, 80)
    assert "\n" not in line


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (12345.6, "12346"), (3.4e38, "3e+38")])
def test_losses_that_are_no_good_are_seen(loss: float, shown: str) -> None:
    assert f"loss {shown} " in progress_line(1, 2, {**FIGURES, "train/loss": loss}, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90_000, "1d01h"), (1e12, ">999d")],
)
def test_time_left(seconds: float, text: str) -> None:
    assert left_text(seconds) == text
