"""Steps that are not finite, planted into real trainings, and what becomes of them; and of spikes."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file, save_file
from torch import Tensor

from callbacks.finite_guard import BEHIND, FiniteGuard
from dflash_lit.cli import main
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torchmetrics")
Plant = Callable[["Planted", dict[str, Tensor]], Any]


class Planted(DrafterModule):
    """Calls ``plant(module, batch)`` before the training step of each optimizer step named in ``at`` (from 1 up)."""

    plant: Plant | None = None
    at: tuple[int, ...] = ()
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.plant is not None and self.global_step + 1 in self.at:
            batch = {**batch, "features": batch["features"].clone()}
            made = self.plant(batch)  # type: ignore[misc]
            return super().training_step(batch, batch_idx) * (1.0 if made is None else made)
        return super().training_step(batch, batch_idx)


def in_features(module: Planted, batch: dict[str, Tensor]) -> None:
    batch["features"][1, 7, 256 + 3] = torch.inf  # the second of the layers, second row of the batch


def in_gradient(module: Planted, batch: dict[str, Tensor]) -> None:
    parameter = module.drafter.layers[0].mlp.up_proj.weight  # type: ignore[union-attr]
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * torch.inf)[1])  # type: ignore[union-attr]


def in_weight(module: Planted, batch: dict[str, Tensor]) -> None:
    module.drafter.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan  # type: ignore[union-attr]


class LossPlanted(Planted):
    """A loss that overflows in its first row, as a logit of 1e38 would make it: nothing before it is wrong."""

    def loss(self, batch: Any, blocks: Any, hidden: Tensor, *, top: int = 0) -> Any:
        if self.training and self.global_step + 1 in self.at:
            weight = torch.ones_like(hidden)
            weight[0] = torch.inf
            hidden = hidden * weight
        return super().loss(batch, blocks, hidden, top=top)


@dataclass
class Trained:
    module: DrafterModule
    guard: FiniteGuard | None
    metrics: dict[str, Tensor]
    states: list[dict[str, Tensor]] = field(default_factory=list)
    folder: Path = Path()


class Snapshots(L.Callback):
    """Weights and the optimizer's state after each step, by name; first before any."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        state = {name: x.detach().clone() for name, x in pl_module.named_parameters()}
        if "floor_ratio" in dict(pl_module.named_buffers()):
            state["floor_ratio"] = pl_module.floor_ratio.clone()  # type: ignore[operator]
        for place, values in trainer.optimizers[0].state_dict()["state"].items():
            state |= {f"{place}.{name}": torch.as_tensor(x).clone() for name, x in values.items()}
        self.states.append(state)


def fit(
    target: FrozenTarget,
    folder: Path,
    plant: Plant | None = None,
    at: tuple[int, ...] = (3,),
    *,
    kind: type[Planted] = Planted,
    steps: int = 6,
    guarded: bool = True,
    more: tuple[L.Callback, ...] = (),
    optimizer: str = "adamw",
    objective: dict[str, Any] | None = None,
    lr: float = 1e-2,
    path: str | None = None,
    accumulate: int = 1,
    **settings: Any,
) -> Trained:
    config = embedded_config(target_fingerprint=target.fingerprint)
    torch.manual_seed(0)
    module = kind(config.to_dict(), target.ends(), objective or {"weights": "dpace"}, anchors=8, optimizer=optimizer, lr=lr)
    module.plant, module.at = (None if plant is None else plant.__get__(module)), at  # type: ignore[attr-defined]
    rows = packed_rows([[(100, 8), (20, 2)]] * 8)
    guard = FiniteGuard(str(folder / "bad_steps"), **settings) if guarded else None
    snapshots = Snapshots()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ColocatedStrategy(target, config.target_layer_ids),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        log_every_n_steps=1,
        callbacks=[*([guard] if guard else []), snapshots, *more],
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in more),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    got = Trained(module, guard, {}, snapshots.states, folder)
    try:
        trainer.fit(module, datamodule=RowDataModule(rows, rows, 2, 0), ckpt_path=path, weights_only=True)
    except UserError as error:
        error.states = snapshots.states  # type: ignore[attr-defined]
        raise
    got.metrics = dict(trainer.callback_metrics)
    return got


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """To the last bit; a state that is there before the first update is zero."""
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


WHAT = {
    "feature": (
        Planted,
        in_features,
        r"features of target layer 2 \(row (\d)\); train/loss; gradient of drafter\.fc\.weight, .* and 10 more",
    ),
    "gradient": (Planted, in_gradient, r"gradient of drafter\.layers\.0\.mlp\.up_proj\.weight, in the step of rows \d, \d"),
    "loss": (LossPlanted, None, r"train/loss; gradient of .*, in row (\d)"),
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_that_is_not_finite_is_left_out(
    embedded: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, optimizer: str
) -> None:
    kind, plant, message = WHAT[what]
    objective = {"weights": "tree_survival"} if what == "loss" else None  # which has a buffer of its own
    with caplog.at_level(logging.WARNING):
        got = fit(embedded, tmp_path, plant, kind=kind, optimizer=optimizer, objective=objective)
    assert [same(a, b) for a, b in zip(got.states, got.states[1:], strict=False)] == [False, False, True, False, False, False]
    assert all(x.isfinite().all() for x in got.states[-1].values())
    assert float(got.metrics["train/skipped_steps"]) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    found = re.match(
        rf"step 3: not finite: {message}; its update was left out \(1 of at most 5 lately\); saved: dflash-lit replay (\S+)",
        told,
    )
    assert found, told
    assert Path(found.groups()[-1]) == tmp_path / "bad_steps" / "step=3"


@pytest.mark.parametrize("what", WHAT)
def test_a_run_is_stopped_with_the_weights_of_before(embedded: FrozenTarget, tmp_path: Path, what: str) -> None:
    kind, plant, message = WHAT[what]
    last = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(
        UserError, match=f"step 3: not finite: {message}; that update did not happen, and training was stopped"
    ) as error:
        fit(embedded, tmp_path, plant, kind=kind, non_finite="stop", more=(last,))
    states = error.value.states  # type: ignore[attr-defined]
    assert all(same(states[2], state) for state in states[3:])  # those of the steps until it was seen, too
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt"]  # none of after it


@pytest.mark.parametrize("choice", ["skip", "stop"])
def test_a_weight_that_is_not_finite_always_stops(embedded: FrozenTarget, tmp_path: Path, choice: str) -> None:
    message = r"step 3: not finite: weight drafter\.layers\.0\.mlp\.up_proj\.weight; train/loss; .*; no update can mend that.*ckpt_path"
    with pytest.raises(UserError, match=message):
        fit(embedded, tmp_path, in_weight, non_finite=choice)
    facts = json.loads((tmp_path / "bad_steps" / "step=3" / "step.json").read_text())
    assert facts["losses"]["train/loss"] == "nan"


def test_a_weight_is_found_without_a_loss_that_shows_it(embedded: FrozenTarget, tmp_path: Path) -> None:
    """The last update spoils it: there is no step after it to notice."""

    class Late(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == trainer.max_steps:
                in_weight(pl_module, {})  # type: ignore[arg-type]

    with pytest.raises(
        UserError, match=r"step 2: not finite: weight drafter\.layers\.0\.mlp\.up_proj\.weight; no update can mend"
    ):
        fit(embedded, tmp_path, steps=2, more=(Late(),))


def test_too_many_end_the_run(embedded: FrozenTarget, tmp_path: Path) -> None:
    every = tuple(range(2, 9))
    with pytest.raises(
        UserError, match=r"step 4: .*; 3 of the last 100 updates were left out, callbacks\.finite_guard\.max_skips=2"
    ):
        fit(embedded, tmp_path, in_gradient, every, max_skips=2, steps=9, saved_steps=1)
    assert [path.name for path in (tmp_path / "bad_steps").iterdir()] == [
        "step=2"
    ]  # no more than asked for, nothing half written
    got = fit(embedded, tmp_path / "apart", in_gradient, (2, 5, 8), max_skips=1, skip_window=3, steps=9, saved_steps=0)
    assert float(got.metrics["train/skipped_steps"]) == 3
    assert not (tmp_path / "apart" / "bad_steps").exists()


def test_a_healthy_run_is_the_same_with_and_without_it(embedded: FrozenTarget, tmp_path: Path) -> None:
    for optimizer in ("muon", "adamw"):
        runs = [
            fit(
                embedded,
                tmp_path / f"{optimizer}{guarded}",
                guarded=guarded,
                optimizer=optimizer,
                accumulate=2,
                steps=4,
                weights_every=2,
            )
            for guarded in (True, False)
        ]
        first, second = runs
        for name, value in second.states[-1].items():
            assert torch.equal(first.states[-1][name], value), name
        for name in ("train/loss", "train/gradient_norm"):
            assert torch.equal(first.metrics[name], second.metrics[name])


def test_numbers_are_read_two_steps_later(embedded: FrozenTarget, tmp_path: Path) -> None:
    """And in no other way: nothing else of the step goes to the host."""
    read: list[tuple[int, int]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            guard = trainer.callbacks[0]  # type: ignore[attr-defined]
            assert isinstance(guard, FiniteGuard)
            waiting = [about["step"] for about, _ in guard.mailbox.peek()]
            read.append((trainer.global_step, min(waiting)))
            assert sorted(guard._held) == list(range(max(trainer.global_step - BEHIND, 1), trainer.global_step + 1))

    fit(embedded, tmp_path, more=(Look(),))
    assert read == [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)]


# -- spikes


def times_a_thousand(module: Planted, batch: dict[str, Tensor]) -> float:
    return 1e3  # of the gradient; the loss that is logged stays


SPIKES = {"spike_window": 8, "spike_warmup": 8, "keep_every": 10}


@pytest.mark.parametrize("spikes", ["off", "warn"])
def test_a_spike_is_told_of(embedded: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, spikes: str) -> None:
    with caplog.at_level(logging.WARNING):
        got = fit(embedded, tmp_path, times_a_thousand, (12,), spikes=spikes, steps=15, lr=1e-4, **SPIKES)
    told = [record.getMessage() for record in caplog.records]
    if spikes == "off":
        assert told == []
        assert "train/spikes" not in got.metrics
        return
    assert len(told) == 1
    assert re.match(
        r"step 12: train/gradient_norm \S+ is a spike \(median \S+, limit \S+\), in the step of rows \d, \d; saved: ", told[0]
    )
    assert float(got.metrics["train/spikes"]) == 1
    assert float(got.metrics["train/rollbacks"]) == float(got.metrics["train/skipped_steps"]) == 0


def test_a_spike_is_undone(embedded: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rates: list[float] = []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    with caplog.at_level(logging.WARNING):
        got = fit(embedded, tmp_path, times_a_thousand, (13,), spikes="rollback", steps=16, lr=1e-4, more=(Rates(),), **SPIKES)
    # Seen two steps later, and undone at once: the state after step 15 is that after step 10.
    assert same(got.states[15], got.states[10])
    assert not same(got.states[16], got.states[15])
    assert "went back to the weights of step 10, and on with the data after step 15" in caplog.text
    assert float(got.metrics["train/rollbacks"]) == 1
    # The learning rate goes on with the step's number, to the schedule's end.
    schedule: Any = got.module.lr_schedulers()
    assert rates == [schedule.base_lrs[0] * schedule.lr_lambdas[0](step) for step in range(16)]
    assert schedule.get_last_lr() == [0.0] * len(schedule.base_lrs)


def test_going_back_has_an_end(embedded: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step 16: .* is a spike .*; it was gone back 1 times already .*max_rollbacks"):
        fit(embedded, tmp_path, times_a_thousand, (12, 16), spikes="rollback", max_rollbacks=1, steps=20, lr=1e-4, **SPIKES)


def test_a_spoilt_weight_is_undone_too(embedded: FrozenTarget, tmp_path: Path) -> None:
    got = fit(embedded, tmp_path, in_weight, (4,), spikes="rollback", steps=8, **SPIKES)
    assert same(
        {k: v for k, v in got.states[6].items() if "." in k and k.startswith("drafter")},
        {k: v for k, v in got.states[0].items() if k.startswith("drafter")},
    )
    assert all(x.isfinite().all() for x in got.states[-1].values())


def test_a_resumed_run_decides_as_the_whole_one(embedded: FrozenTarget, tmp_path: Path) -> None:
    """Saved just after a bad step, before it was read."""
    settings: dict[str, Any] = {"steps": 8, "max_skips": 5, "optimizer": "adamw", "spike_warmup": 8}
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(embedded, tmp_path / "whole", in_gradient, (2, 4), more=(saving,), **settings)
    again = fit(embedded, tmp_path / "again", in_gradient, (2, 4), path=str(tmp_path / "step=4.ckpt"), **settings)
    assert same(whole.states[-1], again.states[-1])
    assert whole.guard is not None
    assert again.guard is not None
    assert again.guard.state_dict() == whole.guard.state_dict()
    assert whole.guard.skip_count == 2


def test_a_spoilt_weight_is_not_exported_by_a_run_that_has_only_to_finish(embedded: FrozenTarget, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(UserError, match="not finite"):
        fit(embedded, tmp_path / "whole", in_weight, (4,), steps=4, more=(saving,))
    with pytest.raises(UserError, match="step 4: not finite: weight drafter"):
        fit(embedded, tmp_path / "again", steps=4, path=str(tmp_path / "step=4.ckpt"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"non_finite": "ignore"}, "non_finite='ignore': choose skip or stop"),
        ({"spikes": "on"}, "spikes='on': choose off, warn or rollback"),
        ({"max_skips": -1}, "max_skips=-1: must be a whole number from 0 up"),
        ({"keep_every": 5}, "keep_every=5: must be a whole number from 10 up"),
        ({"spike_window": 2.5}, "spike_window=2.5: must be a whole number from 8 up"),
        ({"features_gib": -1}, "features_gib=-1: must be 0 or positive"),
        ({"spike_threshold": 0}, "spike_threshold=0: .* use spikes=off"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FiniteGuard("nowhere", **setting)
    assert FiniteGuard("nowhere", spikes=False).spikes == "off"  # type: ignore[arg-type]  # YAML's off


# -- replay


def replayed(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["replay", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_replay_names_what_was_not_finite_first(
    embedded: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError):
        fit(embedded, tmp_path, in_features, non_finite="stop", accumulate=2)
    # The plant changes a copy of the batch, which the run's own is not: it is put into the file here.
    folder = tmp_path / "bad_steps" / "step=3"
    said = replayed(folder, capsys)
    assert "nothing non-finite here" in said
    tensors = load_file(folder / "batch-0.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"0", "1"}
    tensors["1/features"][1, 7, 259] = torch.inf
    save_file(tensors, folder / "batch-0.safetensors")
    said = replayed(folder, capsys)
    row = int(tensors["1/row_ids"][1])
    assert re.search(r"not finite first: features of target layer 2: 0 NaN and 1 infinite of 65536 values", said)
    assert "then input of drafter.fc" in said
    assert f"row {row} begins " in said


def test_replay_of_a_weight_and_of_a_gradient(
    embedded: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError):
        fit(embedded, tmp_path, in_weight)
    said = replayed(tmp_path / "bad_steps" / "step=3", capsys, "--lines", "3")
    assert "not finite first: weight drafter.layers.0.mlp.up_proj.weight: 1 NaN" in said
    assert "then output of drafter.layers.0.mlp.up_proj" in said


def test_a_healthy_step_is_computed_as_it_was(
    embedded: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step saved for a gradient that only the run spoilt: the loss is the run's to the printed digit, with and without features."""
    for name, gib in (("with", 1.0), ("without", 0.0)):
        with pytest.raises(UserError):
            fit(embedded, tmp_path / name, in_gradient, non_finite="stop", features_gib=gib)
        said = replayed(tmp_path / name / "bad_steps" / "step=3", capsys)
        now, then = re.search(r"train/loss +(\S+) +then +(\S+)", said).groups()  # type: ignore[union-attr]
        assert float(now) == pytest.approx(float(then), rel=1e-5)
        assert "nothing non-finite here" in said
        assert ("the target made them again" in said) == (name == "without")
        assert "figures may differ" not in said


def test_a_saved_step_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "step.json: cannot be read" in capsys.readouterr().err
    (tmp_path / "step.json").write_text(
        '{"format": 1, "step": 3, "epoch": 0, "drafters": 1, "weights_step": 2, "module": {}, "target": {}}'
    )
    whole = (tmp_path / "step.json").read_text()
    for wrong, says in (
        ('"found": [1]', "'found' is no list of texts"),
        ('"losses": {"train/loss": "much"}', "'losses' or 'gradient_norms'"),
    ):
        (tmp_path / "step.json").write_text(f"{whole[:-1]}, {wrong}}}")
        assert main(["replay", str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "step.json").write_text(whole)
    os.mkfifo(tmp_path / "weights.safetensors")
    assert main(["replay", str(tmp_path)]) == 2
    assert "weights.safetensors: cannot be read (it is a device or a pipe" in capsys.readouterr().err
    (tmp_path / "weights.safetensors").unlink()
    (tmp_path / "weights.safetensors").write_bytes(b"\x00" * 40)
    assert main(["replay", str(tmp_path)]) == 2
    assert "weights.safetensors: cannot be read" in capsys.readouterr().err
