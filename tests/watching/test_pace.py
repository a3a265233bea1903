"""How long a run is expected to take, and how that is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dflash_lit.doctor.memory import PUBLISHED, SMALL
from dflash_lit.placement.forecast import MEASURED, Verdict, expected_rates, flop_per_token
from dflash_lit.placement.known import QWEN3_8B
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.sizes import measure_sizes
from dflash_lit.watching.pace import Pace, StepClock, expected_time, pace_file, read_pace, said_after, write_pace
from tests.test_conf import configured, planned

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")

PACE = Pace(before_s=30.0, step_s=0.5, validation_s=4.0, after_s=10.0, runs=2)


def file_of(*overrides: str) -> Path:
    return pace_file(configured("trainer.accelerator=cpu", *overrides), planned(*overrides), Path("cache"))


def test_a_pace_is_kept_for_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "pace" / "x.json"
    assert read_pace(file) is None
    write_pace(file, PACE)
    assert read_pace(file) == PACE
    write_pace(tmp_path / "pace" / "x.json" / "y.json", PACE)  # no folder: not a reason to fail


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"step_s": 1}',
        json.dumps({**vars(PACE), "step_s": -1}),
        json.dumps({**vars(PACE), "runs": 10**400}),
        "[" * 99_999,
        "\0\xff",
    ],
)
def test_another_file_there_is_no_pace(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    assert read_pace(tmp_path / "x.json") is None


@pytest.mark.parametrize("same", ["trainer.max_steps=9", "seed=3", "optimizer.lr=1", "logger=csv", "paths.output_dir=/else"])
def test_runs_of_the_same_shapes_share_a_pace(same: str) -> None:
    assert file_of(same) == file_of()


@pytest.mark.parametrize(
    "other", ["drafter.anchors=8", "data.row_tokens=384", "objective=soft", "callbacks.acceptance.prompts=1"]
)
def test_others_do_not(other: str) -> None:
    assert file_of(other) != file_of()


def said(*overrides: str, pace: Pace | None = None, gpu: str | None = None, target: str = "embedded") -> str:
    cfg = configured("trainer.accelerator=cpu", "trainer.max_steps=1000", "trainer.val_every=100", *overrides)
    plan = planned("trainer.max_steps=1000", "trainer.val_every=100", *overrides)
    recipe = PUBLISHED if target == QWEN3_8B else SMALL
    return expected_time(cfg, plan, measure_sizes(target, recipe), recipe, pace, gpu)


def test_the_last_run_here_says_how_long_the_next_takes(tmp_path: Path) -> None:
    # 30 + 1000 * 0.5 + 10 * 4 + 10 seconds
    assert said(pace=PACE) == "first step after about 30s, 9m40s in all (0.5s a step); as the last run of these shapes here"
    # The first one generated responses and compiled; the next finds both.
    assert said(pace=replace(PACE, runs=1)).startswith("first step after at most 30s, ")


def test_of_a_resumed_run_only_what_is_known(tmp_path: Path) -> None:
    cfg = configured("trainer.accelerator=cpu")
    cfg.ckpt_path = "some.ckpt"
    line = expected_time(cfg, planned(), None, SMALL, PACE, None)
    assert line.startswith("first step after about 30s, 0.5s a step, 10s after the last")


@pytest.mark.parametrize("gpu", [None, "NVIDIA A10", "NVIDIA H200"])
def test_nothing_is_made_up(gpu: str | None) -> None:
    """Not of an unknown GPU, nor of a target so small that a known one would not be busy."""
    assert said(gpu=gpu) == "not known yet: no run of these shapes has ended here; said after step 10"
    assert said_after(6) == 3
    assert said("trainer.max_steps=3", "trainer.val_every=3", gpu=gpu).endswith("its steps are too few to foretell")


def test_a_known_gpu_is_foretold_by_the_rates_of_plan() -> None:
    rates = expected_rates(flop_per_token(measure_sizes(QWEN3_8B, PUBLISHED), PUBLISHED), MEASURED)
    tokens = PUBLISHED.rows * PUBLISHED.row_tokens
    alone = tokens * (1 / rates.target + 1 / rates.drafter)
    assert f"({alone:.3g}s each)" in said(gpu="NVIDIA H200", target=QWEN3_8B)
    split = ("placement=split", "placement.targets=1", "placement.drafters=3", "trainer.accumulate_grad_batches=2")
    apart = 3 * 2 * tokens / Verdict.of(Layout(1, 3), rates).rate
    assert f"({apart:.3g}s each)" in said(*split, gpu="NVIDIA H200", target=QWEN3_8B)


# -- measuring


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Module(L.LightningModule):
    """A batch takes a second, the first one ten; a validation 50 and, decoding in it, 50 more."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.weight, self.batches = clock, torch.nn.Parameter(torch.zeros(())), 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches += 1
        self.clock.now += 10 if self.batches == 1 else 1
        return self.weight * batch.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.clock.now += 50

    def on_validation_epoch_end(self) -> None:
        self.clock.now += 50

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([torch.ones(2)] * 100, batch_size=None)

    val_dataloader = train_dataloader


def measured(clock: Clock, folder: Path, **settings: Any) -> Pace | None:
    step_clock = StepClock(0.0, say=settings.pop("say", True))
    usual: dict[str, Any] = {"max_steps": 12, "limit_val_batches": 1, "val_check_interval": 4, "num_sanity_val_steps": 1}
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    L.Trainer(
        accelerator="cpu",
        callbacks=[step_clock],
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        **{**usual, **quiet, **settings},
    ).fit(Module(clock))
    clock.now += 7
    return step_clock.pace(clock.now, runs=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("dflash_lit.watching.pace.time", made)
    return made


def test_the_parts_of_a_run(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Sanity checking comes before the first step; what it and the first step take is not a validation's, not a step's.
    assert measured(clock, tmp_path) == Pace(200.0, 1.0, 100.0, 7.0)
    assert capsys.readouterr().err.count("time: 1s a step, 6s for the 6 left; validation") == 1


def test_accumulated_batches_are_one_step(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, accumulate_grad_batches=3, max_steps=4) == Pace(200.0, 3.0, 100.0, 7.0)


def test_a_pace_that_was_known_is_not_said_again(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(clock, tmp_path, say=False)
    assert "time:" not in capsys.readouterr().err


def test_a_run_without_a_step_has_no_pace(clock: Clock, tmp_path: Path) -> None:
    assert measured(clock, tmp_path, max_steps=0) is None
    assert measured(clock, tmp_path, max_steps=1, limit_val_batches=0) == Pace(200.0 + 7, 10.0, 0.0, 7.0)
