"""``benchmarks/checkpoints.py``."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import checkpoints


def test_a_line_with_both_ways(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkpoints, "MATRIX", 2**16)
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "--gib", "0.0005", "--rounds", "1"])
    checkpoints.main()
    line = json.loads(capsys.readouterr().out)
    assert line["gib"] == 0.0
    assert all(line[f"{kind}_s"] >= 0 for kind in ("save", "check", "save_plainly", "check_plainly"))
