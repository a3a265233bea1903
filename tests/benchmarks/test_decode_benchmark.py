"""The decoding benchmark runs, and its figures fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "benchmarks/decode.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("how", [[], ["--eager"]], ids=["static", "eager"])
def test_it_runs_on_a_cpu(how: list[str]) -> None:
    found = bench("--shape", "tiny", "--context", "40", "--steps", "3", "--budgets", "4,20", "--block-size", "4", *how)
    chain = found["chain"]
    assert found["plain"]["round_ms"] > 0
    assert chain["break_even_plain"] == pytest.approx(chain["round_ms"] / found["plain"]["round_ms"], rel=0.01)
    assert set(found["trees"]) == {"4", "20"}
    for tree in found["trees"].values():
        assert set(tree["stage_ms"]) == {"draft", "build", "verify", "commit"}
        assert tree["break_even_chain"] == pytest.approx(tree["round_ms"] / chain["round_ms"], rel=0.01)
