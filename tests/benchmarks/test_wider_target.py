"""A target with neurons that do nothing says what the narrow one says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import tiny_target

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "wider_target.py"


def test_the_same_logits_by_more_weights(tmp_path: Path) -> None:
    made = tiny_target(TargetInfo.load(EMBEDDED))
    made.model.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    made.info.tokenizer.save_pretrained(tmp_path / "narrow")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "narrow"), str(tmp_path / "wide"), "--gib", "0.001"]
    subprocess.run(command, check=True, capture_output=True)
    # Both as they are read: a cast of the model in memory would round its rotary frequencies, too.
    wide, narrow = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("wide", "narrow"))
    ids = torch.tensor([[3, 1, 7, 5]])
    torch.testing.assert_close(wide(ids).logits, narrow(ids).logits)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (wide, narrow)]
    assert sizes[0] > 2 * sizes[1]
    assert FrozenTarget.load(TargetInfo.load(str(tmp_path / "wide")), device="cpu").info.layers == made.info.layers
