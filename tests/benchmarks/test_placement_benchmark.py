"""The placement benchmark compares a split run with a colocated one, and its traces become a picture."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from timeline import Lane, covered, draw, in_common, lanes, summary, union  # noqa: E402

TINY = ("--target", "qwen3-8b", "--shape", "tiny", "--steps", "2", "--warm-up", "4", "--rounds", "1")


def bench(command: str, *arguments: str) -> dict[str, Any]:
    return said("placement.py", command, "--cpu", *arguments)


def said(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_target_elsewhere_makes_the_same_features_and_losses() -> None:
    found = bench("run", *TINY, "--equal", "2")
    assert found["features_equal"] == "2 of 2 batches"
    assert found["losses_equal"] == "6 of 6 steps"
    rates = found["tokens_per_s"]
    assert found["share"] == pytest.approx(rates["run"] / min(rates["supply"], rates["demand"]), rel=0.01)


def test_a_drafter_with_its_own_target_leaves_a_trace(tmp_path: Path) -> None:
    found = bench("run", *TINY, "--targets", "0", "--trace", str(tmp_path), "--steps", "6")
    assert (found["targets"], found["drafters"]) == (0, 1)
    (trace,) = tmp_path.iterdir()
    assert sum(end - begin for lane in lanes(trace) for begin, end in lane.computing) > 0


def test_both_sides_alone_and_what_they_come_to() -> None:
    found = said(
        "sides.py", "--target", "dense-27b", "--shape", "tiny", "--steps", "2", "--warm-up", "1", "--layouts", "2+3", "0+4"
    )
    target, drafter = (found[role]["tokens_per_s"] for role in ("target", "drafter"))
    assert found["reached"]["2+3"] == pytest.approx(min(2 * target, 3 * drafter), rel=1e-3)
    assert found["reached"]["0+4"] == pytest.approx(4 * target * drafter / (target + drafter), rel=1e-3)


def test_what_moves_features_and_does_not_compute() -> None:
    found = bench("transport", "--rows", "2", "--tokens", "128", "--width", "96", "--repeats", "2", "--compute", "1")
    assert found["mb"] == pytest.approx(2 * 128 * 96 * 2 / 1e6, abs=0.1)
    asleep = bench("run", "--sleep-target", "5", "--sleep-drafter", "5", "--steps", "3", "--warm-up", "4", "--rounds", "1")
    assert asleep["work"] == {"sleep_ms": [5.0, 5.0], "jitter": 0.0}
    assert 0 < asleep["share"] < 2


def trace(path: Path, *events: tuple[str, str, int, float, float], base: int = 0) -> Path:
    """(kind, name, stream, begin, duration), in microseconds, as torch.profiler writes them."""
    made = [
        {"ph": "X", "cat": kind, "name": name, "tid": stream, "ts": begin, "dur": length, "args": {"stream": stream}}
        for kind, name, stream, begin, length in events
    ]
    made.append({"ph": "M", "name": "process_name", "args": {}})
    path.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": base, "traceEvents": made}).encode()))
    return path


def test_a_trace_becomes_streams_that_compute_or_move(tmp_path: Path) -> None:
    events = [
        ("kernel", "gemm", 7, 0.0, 100.0),
        ("kernel", "flash", 7, 100.0, 50.0),
        ("kernel", "ncclDevKernel_SendRecv", 20, 120.0, 60.0),
        ("cpu_op", "aten::mm", 1, 0.0, 500.0),  # the host's, not drawn where there is a GPU
    ]
    found = lanes(trace(tmp_path / "drafter-0.json.gz", *events, base=3_000_000_000))
    assert [(lane.process, lane.name) for lane in found] == [("drafter-0", "stream 7"), ("drafter-0", "stream 20")]
    assert found[0].computing == [pytest.approx((3.0, 3.00015))]
    assert found[1].moving == [pytest.approx((3.00012, 3.00018))]
    (_, time) = in_common(found)
    facts = summary(found, time)["drafter-0"]
    assert facts["seconds"] == pytest.approx(0.0002, abs=1e-4)
    assert facts["computing"] == pytest.approx(150 / 180, abs=0.01)
    assert facts["moving_beside_computing"] == pytest.approx(0.5, abs=0.01)
    draw(found, time, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 3000


def test_drawn_is_the_time_in_which_all_were_traced() -> None:
    drafter = Lane("drafter-0", "stream 7", computing=[(2.0, 5.0)], moving=[(6.0, 6.5)])
    target = Lane("target-1", "stream 7", computing=[(0.0, 1.0), (1.5, 3.0), (4.0, 5.5)])
    (first, second), time = in_common([drafter, target])
    assert (first.computing, first.moving) == ([(2.0, 5.0)], [])
    assert second.computing == [(2.0, 3.0), (4.0, 5.5)]
    assert summary([first, second], time)["target-1"]["computing"] == pytest.approx(2.5 / 3.5, abs=1e-3)
    apart = [drafter, Lane("target-1", "stream 7", computing=[(0.0, 1.0)])]
    assert in_common(apart) == (apart, (0.0, 6.5))


def test_of_a_process_that_did_nothing_then_it_says_so() -> None:
    idle = Lane("drafter-0", "stream 7", computing=[(0.0, 1.0), (9.0, 10.0)])
    found, time = in_common([idle, Lane("target-1", "stream 7", computing=[(2.0, 3.0), (4.0, 5.0)])])
    assert time == (2.0, 5.0)
    assert summary(found, time)["drafter-0"]["computing"] == 0


def test_steps_that_would_take_what_waited_before_are_not_timed() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/placement.py", "run", "--cpu", "--warm-up", "3", "--prefetch", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--warm-up 3" in done.stderr


def test_spans_are_joined_and_counted_once() -> None:
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert covered([(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.0)]) == pytest.approx(1.0)
    assert summary([Lane("idle", "stream 0", computing=[(0.0, 1.0)])], (0.0, 1.0))["idle"]["moving_beside_computing"] is None
