"""Throughput on real Trainers, with a clock and flows that are made up, so that every figure can be had by hand."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks.progress import Progress
from callbacks.throughput import Throughput, _advice
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.forecast import Rates, Verdict
from dflash_lit.placement.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")

TOKENS = 1000  # of a batch of one drafter
LONG = 1000.0  # seconds of what must not count


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("callbacks.throughput.time", made)
    return made


class Colocated(SingleDeviceStrategy):
    """Says that it is one of several; ``passes`` is told of the time that goes by."""

    def __init__(self, world: int = 1, zero: bool = True) -> None:
        super().__init__(device="cpu")
        self.world_size, self.zero = world, zero

    @property
    def is_global_zero(self) -> bool:
        return self.zero

    def passes(self, seconds: float, *, trains: bool) -> None:
        pass


class Split(Colocated):
    """3 targets and 2 drafters. Of a step's time a drafter waits an eighth (rank 0) or a quarter; target r computes r eighths."""

    layout = Layout(targets=3, drafters=2)

    def __init__(self, layout: Layout | None = None, zero: bool = True) -> None:
        self.layout = layout or self.layout
        super().__init__(self.layout.drafter_world, zero)
        self.counters: dict[int, Flow] = {}
        self.asked = 0

    def passes(self, seconds: float, *, trains: bool) -> None:
        for rank in range(self.layout.world):
            flow = self.counters.setdefault(rank, Flow())
            flow.batches += 1
            flow.tokens += TOKENS
            if rank < 2:
                flow.waited_s += seconds * (1 + rank) / 8
                flow.queued += 1 + rank if trains else 1000
            else:
                flow.busy_s += seconds * rank / 8
                flow.waited_s += seconds * (8 - rank) / 8

    def flows(self) -> dict[int, Flow]:
        self.asked += 1
        return self.counters

    def serving(self) -> int:
        return self.layout.targets


class Module(L.LightningModule):
    """Takes a second for a step; the second step takes three, the first after a validation or checkpoint very long."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.weight = clock, torch.nn.Parameter(torch.zeros(()))
        self.disturbed = True
        self.batches = 0

    def goes_by(self, seconds: float, *, trains: bool = False) -> None:
        self.clock.now += seconds
        self.trainer.strategy.passes(seconds, trains=trains)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        self.goes_by(LONG if self.disturbed else 3.0 if self.batches == 2 else 1.0, trains=True)
        self.disturbed = False
        return self.weight * batch["input_ids"].sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.goes_by(LONG)
        self.disturbed = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.goes_by(LONG)
        self.disturbed = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([{"input_ids": torch.ones(2, TOKENS // 2)}] * 100, batch_size=None)

    val_dataloader = train_dataloader


def fit(
    clock: Clock, folder: Path, strategy: SingleDeviceStrategy, *more: L.Callback, **settings: Any
) -> tuple[Throughput, list[dict[str, float]]]:
    """The callback, and the rows with its figures that a CSV logger wrote."""
    throughput = Throughput()
    usual: dict[str, Any] = {
        "max_steps": 9,
        "log_every_n_steps": 3,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 1,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in more),
        "enable_progress_bar": any(isinstance(c, Progress) for c in more),
    }
    L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=[throughput, *more],
        logger=CSVLogger(folder, name="", version=""),
        enable_model_summary=False,
        default_root_dir=folder,
        **{**usual, **settings},
    ).fit(Module(clock))
    return throughput, list(rows(folder / "metrics.csv"))


def rows(file: Path) -> Iterator[dict[str, float]]:
    if not file.is_file():
        return
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            figures = {name.removeprefix("pipeline/"): float(cell) for name, cell in row.items() if cell}
            if "ktok_s" in figures:
                yield figures


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("throughput: ")]


def test_colocated_only_the_rate_is_known(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    throughput, logged = fit(clock, tmp_path, Colocated(world=4))
    assert logged == [
        {"step": 3, "ktok_s": 2.0},  # the first batch is left out: 2 batches of 4 drafters, 3 + 1 s
        {"step": 6, "ktok_s": 4.0},  # validation and batch 5 are left out
        {"step": 9, "ktok_s": 4.0},
    ]
    assert throughput.last == {"pipeline/ktok_s": 4.0}
    assert said(capsys) == ["throughput: 4.0 Ktok/s"]  # without the first window


def test_drafters_with_a_target_in_each_are_colocated(clock: Clock, tmp_path: Path) -> None:
    throughput, _ = fit(clock, tmp_path, Split(Layout(targets=0, drafters=4)))
    assert throughput.last == {"pipeline/ktok_s": 4.0}


def test_split_says_who_waits(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    throughput, logged = fit(clock, tmp_path, Split())
    # Of the window of steps 4 to 6, batches 4 and 6 count, a second each. Target r computes r/8 s a batch, so it could supply
    # 8/r Ktok/s; the drafters could take 8/7 and 8/6.
    supply, demand = 8 / 2 + 8 / 3 + 8 / 4, 8 / 7 + 8 / 6
    shares = {
        "wait_share": (1 / 8 + 2 / 8) / 2,
        "target_wait_share": (6 / 8 + 5 / 8 + 4 / 8) / 3,
        "queue_depth": (1 + 2) / 2,
        "targets": 3,
    }
    assert [row["step"] for row in logged] == [3, 6, 9]
    for row, pace in zip(logged, (2 / 4, 1, 1), strict=True):
        expected = {"ktok_s": 2 * pace, "supply_ktok_s": supply * pace, "demand_ktok_s": demand * pace, **shares}
        assert {name: value for name, value in row.items() if name != "step"} == pytest.approx(expected)
    assert throughput.last == pytest.approx({f"pipeline/{k}": v for k, v in logged[-1].items() if k != "step"})
    assert said(capsys) == [
        "throughput: 2.0 Ktok/s; drafter-bound: 3 targets supply 8.67 Ktok/s, 2 drafters take 2.48 Ktok/s; "
        "2 targets + 3 drafters would reach 3.71 Ktok/s: move 1 rank from targets to drafters "
        "(placement.targets=2 placement.drafters=3)"
    ]


def test_checkpoints_do_not_count(clock: Clock, tmp_path: Path) -> None:
    """Whether they are saved after a batch, in the midst of a window and at its end, or after a validation."""
    saves = [ModelCheckpoint(tmp_path / "a", every_n_train_steps=5), ModelCheckpoint(tmp_path / "b", every_n_train_steps=6)]
    _, logged = fit(clock, tmp_path, Split(), *saves, ModelCheckpoint(tmp_path / "c", every_n_epochs=1), max_steps=12)
    # Left out: 1, 5 (validation), 6, 7 (checkpoints), 9 (validation), 11 (checkpoint).
    assert [(row["step"], row["ktok_s"]) for row in logged] == [(3, 1.0), (6, 2.0), (9, 2.0), (12, 2.0)]
    assert all(row["queue_depth"] == 1.5 for row in logged)


def test_accumulation_and_a_window_without_a_batch(clock: Clock, tmp_path: Path) -> None:
    """Windows are of optimizer steps; one in which every batch was left out is joined to the next."""
    _, logged = fit(clock, tmp_path, Split(), accumulate_grad_batches=2, log_every_n_steps=1, val_check_interval=8, max_steps=6)
    assert [(row["step"], round(row["ktok_s"], 9)) for row in logged] == [(1, round(2 / 3, 9))] + [
        (n, 2.0) for n in range(2, 7)
    ]
    _, logged = fit(clock, tmp_path / "b", Split(), log_every_n_steps=1, val_check_interval=2, max_steps=6)
    assert [(row["step"], round(row["ktok_s"], 9)) for row in logged] == [(2, round(2 / 3, 9)), (4, 2.0), (6, 2.0)]


def test_a_run_of_less_than_two_windows(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    throughput, logged = fit(clock, tmp_path, Split(), max_steps=2)
    assert not logged
    assert not throughput.last
    (line,) = said(capsys)
    assert line.startswith("throughput: 0.7 Ktok/s; drafter-bound: ")
    fit(clock, tmp_path, Split(), max_steps=1)
    assert not said(capsys)


def test_other_ranks_are_silent(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = Split(zero=False)
    throughput, logged = fit(clock, tmp_path, strategy, Progress())
    assert not logged
    assert not throughput.last
    assert strategy.asked == 0
    assert "tok/s" not in "".join(capsys.readouterr())


def test_flows_that_are_late(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing yet from other processes: their rates are left out, or unknown, and a share is never more than all of it."""

    class Late(Split):
        known: tuple[int, ...] = (0, 3)

        def flows(self) -> dict[int, Flow]:
            return {rank: flow for rank, flow in self.counters.items() if rank in self.known}

        def passes(self, seconds: float, *, trains: bool) -> None:
            super().passes(seconds, trains=trains)
            self.counters[3].waited_s += 5 * seconds

    throughput, _ = fit(clock, tmp_path, Late())
    assert throughput.last == pytest.approx(
        {
            "pipeline/ktok_s": 2.0,
            "pipeline/supply_ktok_s": 3 * 8 / 3,
            "pipeline/demand_ktok_s": 2 * 8 / 7,
            "pipeline/wait_share": (1 / 8 + 0) / 2,
            "pipeline/target_wait_share": (0 + 1 + 0) / 3,
            "pipeline/queue_depth": 1.0,
            "pipeline/targets": 3,
        }
    )
    capsys.readouterr()

    silent = Late()
    silent.known = (0, 1)
    throughput, _ = fit(clock, tmp_path / "b", silent)
    assert "pipeline/supply_ktok_s" not in throughput.last
    assert said(capsys) == ["throughput: 2.0 Ktok/s"]


@pytest.mark.parametrize(
    ("layout", "rates", "unit", "advice"),
    [
        (
            Layout(5, 3),
            Rates(42_800, 24_800),
            "GPU",
            ": move 2 GPUs from targets to drafters (placement.targets=3 placement.drafters=5)",
        ),
        (
            Layout(1, 3, 2),
            Rates(10, 10),
            "rank",
            ": move 1 rank of each host from drafters to targets (placement.targets=2 placement.drafters=2)",
        ),
        (Layout(1, 1), Rates(1, 9), "GPU", ""),  # there is no other split
        (Layout(50, 52), Rates(10, 10), "GPU", ""),  # 51 + 51 is 2 % faster: too little to be sure of
    ],
)
def test_advice(layout: Layout, rates: Rates, unit: str, advice: str) -> None:
    assert _advice(Verdict.of(layout, rates), unit) == advice


def test_progress_shows_the_last_window(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(clock, tmp_path, Split(), Progress(lines=3))
    lines = [line.rpartition("% ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert lines == [f"step {step}/9 {rate} Ktok/s wait 19" for step, rate in ((3, "1.0"), (6, "2.0"), (9, "2.0"))]


def test_progress_alone_counts_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    clock = Clock()
    monkeypatch.setattr("callbacks.progress.time", clock)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=Colocated(world=4),
        max_steps=2,
        limit_val_batches=0,
        callbacks=[Progress(lines=1)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Module(clock)
    module.disturbed = False
    trainer.fit(module)
    # 2 batches of 4 ranks in 1 + 3 s.
    assert capsys.readouterr().err.splitlines()[-1] == "step 2/2 2.0 Ktok/s 0s left"


def test_a_long_run_says_early_how_long_it_takes(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(clock, tmp_path, Split(), Progress(lines=1))
    steps = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert steps == ["5/9", "9/9"]
