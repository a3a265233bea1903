"""What ranks and starts have in common on GPUs: one compile, and every bit."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.test_train import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 8.0 or more"),
]

QUICK = ("debug=fast", "logger=csv", "callbacks.acceptance=null", "evaluation.prompts=1", "evaluation.temperatures=[]")


def start(folder: Path, *overrides: str, **environment: str) -> str:
    """What a cold start says."""
    folder.mkdir()
    done = run(
        "train.py",
        *QUICK,
        *overrides,
        f"hydra.run.dir={folder / 'run'}",
        folder=folder,
        python=sys.executable,  # torch reads the variable when it is imported
        DFLASH_LIT_COMPILE_CACHE=str(folder / "cache"),
        **environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr


def losses(folder: Path, **environment: str) -> list[str]:
    start(folder, **environment)
    rows = csv.DictReader((folder / "run" / "csv" / "metrics.csv").open())
    return [row["train/loss"] for row in rows if row.get("train/loss")]


def test_what_is_timed_does_not_matter(tmp_path: Path) -> None:
    """The second start takes the slowest of all kernels that it compares."""
    expected = losses(tmp_path / "fastest")
    assert len(expected) > 2
    assert losses(tmp_path / "slowest", TORCHINDUCTOR_DISTORT_BENCHMARKING_RESULT="inverse") == expected


def test_one_rank_compiles_for_all(tmp_path: Path) -> None:
    """On one GPU that both share, too."""
    said = start(tmp_path / "two", "placement.drafters=2", "placement.share=true")
    found = {rank: re.findall(rf"compile, rank {rank} .*cache: (\d+) hits, (\d+) misses", said) for rank in (0, 1)}
    assert sum(int(misses) for _, misses in found[0]) > 0
    assert sum(int(hits) for hits, _ in found[1]) > 0
    assert sum(int(misses) for _, misses in found[1]) == 0
