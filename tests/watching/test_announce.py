"""What a run says before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_lit.doctor.memory import SMALL, run_bytes
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.sizes import measure_sizes
from dflash_lit.watching.announce import announcement, expected_memory
from tests.test_conf import configured, planned

GIB = 2**30
SHORT = ("data.prompt_tokens=48", "data.response_tokens=208")


def said(*overrides: str, free: int | None = 8 * GIB) -> dict[str, str]:
    overrides = ("trainer.accelerator=cpu", *overrides)
    return announcement(configured(*overrides), planned(*overrides), free)


def test_model_data_placement_steps(tmp_path: Path) -> None:
    lines = said("trainer.accumulate_grad_batches=2", "trainer.max_steps=1000")
    assert lines["target"] == "embedded: 4.9 M parameters, float32"
    assert lines["drafter"].startswith("1.2 M parameters, 2 layers, 32 blocks of 8 a row, features of layers 1, 2, 3")
    assert lines["data"] == (
        "at most 640 prompts of the standard library, responses of 208 tokens at T=0.7; rows of 256 tokens"
    )
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.touch()
    chats = said("data=chat", f"data.path=[{files[0]},{files[1]}]", "data.row_tokens=256", "data.offline=true", *SHORT)["data"]
    assert chats == f"conversations of {files[0]}, {files[1]}; rows of 256 tokens; features written once, and read"
    assert lines["placement"] == "colocated: 1 drafter process on cpu (32-true)"
    assert lines["steps"] == "1,000 of 8 rows, 2,048 tokens (2.0 M in all); validation every 200"


def test_several_processes() -> None:
    lines = said("placement=split", "placement.targets=2", "placement.drafters=2")
    assert lines["placement"] == "split: 2 target and 2 drafter processes on cpu (32-true)"
    assert "a drafter about" in lines["memory"]
    assert "a target about" in lines["memory"]


@pytest.mark.parametrize(("free", "warned"), [(8 * GIB, False), (GIB, True), (None, False)])
def test_too_little_memory_is_said_before_it_runs_out(free: int | None, warned: bool) -> None:
    assert ("TOO LITTLE" in said(free=free)["memory"]) is warned


def test_memory_is_that_of_the_doctor_and_grows_with_the_batch() -> None:
    plan = planned()
    sizes = measure_sizes("embedded", SMALL)
    (alone,) = expected_memory(sizes, SMALL, plan, None).values()
    assert alone == run_bytes(sizes.target_parameters, sizes.drafter_parameters, sizes.drafter, SMALL, gpu=False)
    split = replace(plan, layout=Layout(1, 1, 1), devices=(torch.device("cpu"),) * 2)
    once = expected_memory(sizes, SMALL, split, None)
    twice = expected_memory(sizes, replace(SMALL, rows=8), split, None)
    for who in ("a drafter", "a target"):
        assert sum(twice[who].values()) > sum(once[who].values())
    # On a CPU everything is fp32.
    gpu = expected_memory(sizes, SMALL, replace(split, devices=(torch.device("cuda", 0), torch.device("cuda", 1))), None)
    assert once["a target"]["weights"] == 2 * gpu["a target"]["weights"] == 4 * sizes.target_parameters
