"""The job's callbacks on real Trainers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.acceptance import Acceptance
from callbacks.export import Export
from callbacks.progress import Progress
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.decode.acceptance import measure_together
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torchmetrics")


class Promising(DrafterModule):
    """Claims a long chain on text with the labels in sight, as a leaking training would."""

    def log(self, name: str, value: Any, *args: Any, **settings: Any) -> None:
        super().log(name, torch.tensor(5.0) if name == "val/chain_eal" else value, *args, **settings)


def fit(
    target: FrozenTarget, folder: Path, kind: type[DrafterModule], *callbacks: L.Callback
) -> tuple[L.Trainer, DrafterModule]:
    config = embedded_config()
    torch.manual_seed(0)
    module = kind(config.to_dict(), target.ends(), anchors=8, seed=0)
    rows = packed_rows([[(128, 16)]] * 4)
    data = RowDataModule(rows, rows, 2, 0)
    data.eval_prompts = [list(range(5, 25)), list(range(30, 50))]  # type: ignore[attr-defined]
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ColocatedStrategy(target, config.target_layer_ids),
        max_steps=2,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data)
    return trainer, module


def test_real_decoding_is_logged_and_a_leak_reported(
    embedded: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer, _ = fit(embedded, tmp_path, Promising, Acceptance(prompts=2, max_new_tokens=8), Progress())
    tau = float(trainer.callback_metrics["acceptance/tau_greedy"])
    assert 1.0 <= tau < 3.0
    messages = [record.getMessage() for record in caplog.records if "look for a leak" in record.getMessage()]
    assert messages == [
        f"decoding yields {tau:.2f} tokens a pass where teacher-forced validation promises 5.00: look for a leak or shifted labels"
    ]


def test_draft_trees_are_decoded_at_every_validation(embedded: FrozenTarget, tmp_path: Path) -> None:
    trainer, module = fit(embedded, tmp_path, DrafterModule, Acceptance(2, 8, budgets=[4, 64]), Progress())
    prompts = [list(range(5, 25)), list(range(30, 50))]
    for budget in (4, 64):
        logged = float(trainer.callback_metrics[f"val/tau@{budget}"])
        assert logged == pytest.approx(measure_together(embedded, module.drafter, prompts, budget, max_new_tokens=8).tau)


@pytest.mark.parametrize("none", [0, [], None])
def test_no_draft_trees(embedded: FrozenTarget, tmp_path: Path, none: Any) -> None:
    trainer, _ = fit(embedded, tmp_path, DrafterModule, Acceptance(1, 4, budgets=none), Progress())
    assert "acceptance/tau_greedy" in trainer.callback_metrics
    assert not any(name.startswith("val/tau@") for name in trainer.callback_metrics)


def test_the_best_checkpoint_may_go_by_the_trees(embedded: FrozenTarget, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "step={step}", monitor="val/tau@16", mode="max", auto_insert_metric_name=False)
    trainer, _ = fit(embedded, tmp_path, DrafterModule, Acceptance(1, 8, budgets=16), best, Progress())
    assert Path(best.best_model_path).name == "step=2.ckpt"
    assert best.best_model_score == trainer.callback_metrics["val/tau@16"]


def test_a_target_that_verifies_no_trees_is_decoded_with_chains(
    embedded: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.info.config, "alibi", True, raising=False)
    trainer, _ = fit(embedded, tmp_path, DrafterModule, Acceptance(1, 4), Progress())
    assert "acceptance/tau_greedy" in trainer.callback_metrics
    assert "val/tau@64" not in trainer.callback_metrics
    best = ModelCheckpoint(tmp_path, monitor="val/tau@64")
    with pytest.raises(UserError, match=r"monitor=val/tau@64: .*ALiBi.*monitor val/tree_eal@64 instead"):
        fit(embedded, tmp_path, DrafterModule, Acceptance(1, 4), best, Progress())


@pytest.mark.parametrize("budgets", [-1, [64, 64], [0, 64], [1.5], ["64"], [True]])
def test_budgets_that_cannot_be(budgets: Any) -> None:
    with pytest.raises(UserError, match="different whole numbers from 1 up, or 0 for no trees"):
        Acceptance(budgets=budgets)


def test_an_honest_run_is_not_suspected(embedded: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit(embedded, tmp_path, DrafterModule, Acceptance(prompts=1, max_new_tokens=8), Progress())
    assert "look for a leak" not in caplog.text


def test_decoding_leaves_training_as_it_was(embedded: FrozenTarget, tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [Acceptance(prompts=1, max_new_tokens=8)]):
        _, module = fit(embedded, tmp_path, DrafterModule, Progress(), *callbacks)
        assert module.drafter.training
        weights.append(torch.cat([p.detach().flatten() for p in module.drafter.parameters()]))
    assert torch.equal(*weights)


def test_export_at_the_end(embedded: FrozenTarget, tmp_path: Path) -> None:
    fit(embedded, tmp_path, DrafterModule, Export(str(tmp_path / "out"), auto_map=True), Progress())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}


def test_progress_lines_without_a_terminal(embedded: FrozenTarget, tmp_path: Path, capsys: Any) -> None:
    fit(embedded, tmp_path, DrafterModule, Progress(lines=2))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert all("Ktok/s" in line and "s left" in line and len(line) <= 80 for line in lines)
