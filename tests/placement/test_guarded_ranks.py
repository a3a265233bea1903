"""Two drafters over gloo: what one of them finds, both act upon at the same step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dflash_lit.cli import main
from dflash_lit.export import load_drafter
from dflash_lit.guard.saved_step import read_step
from tests.placement.spoiler import FEATURE, GRADIENT, WEIGHT
from tests.placement.test_same_run import column, metrics
from tests.test_train import QUICK, run

GUARD = "callbacks.finite_guard"


def test_two_drafters_leave_out_the_same_steps_and_go_back_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(
        "train.py",
        *QUICK,
        "logger=csv",
        "data.train_prompts=10",
        "data.val_prompts=3",
        "data.response_tokens=64",
        "data.row_tokens=128",
        "data.rows_per_batch=1",
        "drafter.anchors=8",
        "evaluation.prompts=1",
        "evaluation.temperatures=[]",
        "placement.drafters=2",
        "trainer.max_steps=9",
        "trainer.val_every=9",
        "callbacks.acceptance=null",
        f"{GUARD}.spikes=rollback",
        f"{GUARD}.keep_every=10",
        "+callbacks.spoiler._target_=tests.placement.spoiler.Spoiler",
        f"+callbacks.spoiler.folder={tmp_path / 'digests'}",
        f"hydra.run.dir={tmp_path / 'run'}",
        folder=tmp_path,
        PYTHONPATH="src:.",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = ((tmp_path / "digests" / f"{rank}.txt").read_text().split() for rank in (0, 1))
    assert one == other
    left_out = [step for step in range(2, 10) if one[step - 1] == one[step - 2]]
    # With a weight that is not finite no step is one, until it is seen and undone.
    assert left_out == [FEATURE, GRADIENT, WEIGHT + 1]
    said = [line for line in done.stdout.splitlines() if "not finite" in line]
    assert len(said) == 3  # each once, by rank 0
    assert re.search(rf"step {FEATURE}: not finite: features of target layer \d \(row \d+\); train/loss;", said[0])
    assert re.search(rf"step {GRADIENT}: not finite: gradient of drafter\.fc\.weight, in the step of rows", said[1])
    assert re.search(rf"step {WEIGHT}: not finite: weight drafter\.fc\.weight; .* went back to the weights of step 0", said[2])
    rows = metrics(tmp_path / "run")
    assert column(rows, "train/skipped_steps")[-1] == 5  # three of the spoilt weight: it is seen two steps later
    assert column(rows, "train/rollbacks")[-1] == 1
    assert all(x.isfinite().all() for x in load_drafter(tmp_path / "run" / "drafter").parameters())

    folder = tmp_path / "run" / "bad_steps" / f"step={FEATURE}"
    saved = read_step(folder)
    assert [len(batches) for batches in saved.batches] == [1, 1]
    assert bool(torch.isnan(saved.batches[1][0]["features"]).any())
    assert main(["replay", str(folder)]) == 0
    assert "not finite first: features of target layer" in capsys.readouterr().out
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(f"step={n}" for n in (FEATURE, GRADIENT, WEIGHT))
