"""Cold starts that are equal to the last bit, on GPUs."""

from __future__ import annotations

import csv
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


def losses(folder: Path, **environment: str) -> list[str]:
    folder.mkdir()
    done = run(
        "train.py",
        *QUICK,
        f"hydra.run.dir={folder / 'run'}",
        folder=folder,
        python=sys.executable,  # torch reads the variable when it is imported
        DFLASH_LIT_COMPILE_CACHE=str(folder / "cache"),
        **environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rows = csv.DictReader((folder / "run" / "csv" / "metrics.csv").open())
    return [row["train/loss"] for row in rows if row.get("train/loss")]


def test_what_is_timed_does_not_matter(tmp_path: Path) -> None:
    """The second start takes the slowest of all kernels that it compares."""
    expected = losses(tmp_path / "fastest")
    assert len(expected) > 2
    assert losses(tmp_path / "slowest", TORCHINDUCTOR_DISTORT_BENCHMARKING_RESULT="inverse") == expected
