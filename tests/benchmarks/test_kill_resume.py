"""Killed runs that go on are the run that nobody killed, and the comparison would see if they were not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WAY = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(("src", ".", "benchmarks")),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
COMPARE = """
import json, sys
from pathlib import Path
from kill_resume import Bound, Outcome, compare
said = []
for bound in (Bound(0.0), Bound(0.02), Bound(0.005)):
    said.append([compare(Path(sys.argv[1]), [Path(sys.argv[2])], bound, Outcome(), set()), bound.largest, bound.where])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def told(work: Path) -> dict[str, Any]:
    """Five kills, in steps with one and with two target ranks."""
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/kill_resume.py",
            "--kills",
            "5",
            "--placement",
            "1+1,2+1",
            "--steps",
            "8",
            "--work",
            str(work),
        ],
        cwd=ROOT,
        env=WAY,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nothing_is_lost_or_different_after_five_kills(told: dict[str, Any]) -> None:
    assert told["kills"] == sum(told["phases"].values()) == 5
    assert told["resumes"] >= 5
    assert told["differences"] == []


def test_what_is_different_or_lost_is_found(told: dict[str, Any], work: Path) -> None:
    folder, reference = work / "1+1_2+1" / "run0", work / "1+1_2+1" / "reference"
    metrics, record = folder / "csv" / "metrics.csv", sorted(folder.glob("seen/0.*.jsonl"))[-1]
    losses = [line for line in map(json.loads, record.read_text().splitlines()) if line["kind"] == "loss"]
    loss = json.dumps(losses[-1]["value"])
    for path, old, new in (
        (metrics, "val/loss", "val/other"),
        (record, '"rng": "', '"rng": "0'),
        (record, loss, json.dumps(1.01 * losses[-1]["value"])),
    ):
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(reference), str(folder)],
        cwd=ROOT,
        env=WAY,
        capture_output=True,
        text=True,
        check=True,
    )
    (exact, _, _), (wide, largest, where), (narrow, _, _) = json.loads(done.stdout)
    for said in (exact, wide, narrow):
        assert any(text.startswith("metrics.csv: val/loss of step 3 is lost") for text in said)
        assert any(".rng: " in text for text in said)
    # On a GPU sums are not of one order: floats may differ by a bound.
    changed = [[text for text in said if loss in text] for said in (exact, wide, narrow)]
    assert [bool(texts) for texts in changed] == [True, False, True]
    assert largest == pytest.approx(0.01 / 1.01)
    assert "loss of step" in where
