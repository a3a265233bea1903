"""The job's callbacks on real Trainers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from callbacks.acceptance import Acceptance
from callbacks.export import Export
from callbacks.finite_guard import FiniteGuard
from callbacks.progress import Progress
from dflash_lit.data.datamodule import RowDataModule
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
        enable_checkpointing=False,
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


def test_a_run_that_diverges_is_stopped(embedded: FrozenTarget, tmp_path: Path) -> None:
    class Spoiled(DrafterModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if self.global_step == 1:
                self.drafter.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan

    with pytest.raises(UserError, match=r"step 2: '.*' is not finite, so training was stopped"):
        fit(embedded, tmp_path, Spoiled, FiniteGuard(every=2), Progress())


def test_progress_lines_without_a_terminal(embedded: FrozenTarget, tmp_path: Path, capsys: Any) -> None:
    fit(embedded, tmp_path, DrafterModule, Progress(lines=2))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert all("Ktok/s" in line and "s left" in line and len(line) <= 100 for line in lines)
