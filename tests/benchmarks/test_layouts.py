"""Layouts as benchmarks take them."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.faults import several
from benchmarks.kill_resume import in_turn
from benchmarks.layouts import layout, layout_overrides, named
from dflash_lit.placement.layout import Layout


@pytest.mark.parametrize("text", ["0+1", "5+3", "12+20"])
def test_a_layout_is_named_as_it_was_given(text: str) -> None:
    assert named(layout(text)) == text


@pytest.mark.parametrize("text", ["", "1", "1+0", "+1", "1+", "-1+1", "1+1+1", "1 + 1", "1+1,2+1", "٣+1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write target ranks \+ drafter ranks, as 5\+3"):
        layout(text)


def test_what_a_run_is_given() -> None:
    assert layout_overrides(Layout(0, 2)) == ["placement.drafters=2"]
    assert layout_overrides(Layout(5, 3)) == ["placement=split", "placement.targets=5", "placement.drafters=3"]


def test_what_some_benchmarks_do_not_take() -> None:
    assert in_turn("1+1,2+1") == [Layout(1, 1), Layout(2, 1)]
    for text in ("1+1,1+2", "0+1,1+1"):
        with pytest.raises(argparse.ArgumentTypeError, match="as many drafters as it had"):
            in_turn(text)
    assert several("0+2") == Layout(0, 2)
    with pytest.raises(argparse.ArgumentTypeError, match="two or more ranks"):
        several("0+1")
