"""Several ranks that compile: through the Trainer, in turn, from one cold cache, and never again."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from tests.test_train import QUICK, run


def test_drafter_ranks_compile_in_turn_and_then_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(
        "train.py",
        *QUICK,
        f"hydra.run.dir={folder}",
        "placement=split",
        "placement.drafters=2",
        "drafter.compile=true",
        "drafter.layers=1",
        "callbacks.acceptance=null",
        "evaluation.prompts=1",
        "evaluation.temperatures=[]",
        folder=tmp_path,
        DFLASH_LIT_COMPILE_CACHE=str(tmp_path / "compiled"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = re.findall(
        r"^compile, rank (\d) \(drafter, host 0\): train: .* (\d+) graphs, cache: (\d+) hits, (\d+) misses$", done.stderr, re.M
    )
    assert [rank for rank, *_ in made] == ["0", "1"]  # one after the other
    (_, graphs, _, missed), (_, same, hits, misses) = made
    assert graphs == same == "3"
    assert int(missed) > 0
    assert (int(hits), int(misses)) == (int(missed), 0)  # rank 1 found all that rank 0 had made
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    recompiles = [float(row["compile/recompiles"]) for row in rows if row.get("compile/recompiles")]
    assert recompiles
    assert not any(recompiles)
