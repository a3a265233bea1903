"""What is counted outside the training, in a log file and in a terminal."""

from __future__ import annotations

import re

import pytest

from dflash_lit.watching.counted import Counted
from tests.helpers import in_terminal


def count(total: int, **settings: float) -> None:
    with Counted("responses", total, **settings) as counted:  # type: ignore[arg-type]
        for _ in range(total):
            counted.advance(1, "640 tokens/s")


def test_a_log_has_plain_lines_and_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    count(200, quiet_s=0)
    said = capsys.readouterr().err
    assert "\r" not in said
    assert "\x1b" not in said
    lines = said.splitlines()
    assert lines[0] == "responses 0/200"
    assert re.fullmatch(r"responses 1/200 640 tokens/s \d+s left", lines[1])
    assert [line.split()[1] for line in lines[2:]] == [f"{done}/200" for done in range(20, 201, 20)]
    assert max(map(len, lines)) <= 80
    count(200, quiet_s=3600)  # what is quick says only that it begins and ends
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["0/200", "200/200"]


def test_what_was_done_before_is_no_pace_and_nothing_needs_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Counted("parts", 10, done=9) as counted:
        assert counted.line() == "parts 9/10"
        counted.advance()
        assert counted.line() == "parts 10/10 0s left"
    capsys.readouterr()
    count(0)
    with Counted("parts", 2, show=False) as counted:
        counted.advance(2)
    assert capsys.readouterr().err == ""


def test_no_figures_break_the_line() -> None:
    with Counted("x" * 70, 10**12, done=10**11, show=False) as counted:
        counted.advance(1, "1,234,567 tokens/s")
        assert len(counted.line()) == 80
        assert len(counted.line(40)) == 40


@pytest.mark.parametrize("ci", [False, True])
def test_in_a_terminal_it_is_drawn_over_itself(ci: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_terminal(monkeypatch, ci=ci) as shown, Counted("responses", 2) as counted:
        counted.advance(2, "640 tokens/s")
    states = [part for part in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", shown[0]) if part.strip()]
    assert states
    assert max(map(len, states)) <= 80
    assert any("2/2 640 tokens/s 0s left" in state for state in states)
    assert ("\x1b[2K" in shown[0]) != ci
    assert len(states) == 2 or not ci
