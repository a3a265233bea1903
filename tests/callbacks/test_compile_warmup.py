"""The warm-up leaves no trace but graphs, and after it nothing compiles: on a CPU, where the drafter's graphs have a dense mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch._dynamo.utils import counters

from callbacks.acceptance import Acceptance
from callbacks.compile_warmup import CompileWarmup
from callbacks.finite_guard import FiniteGuard
from dflash_lit.attention.compiled import RecompileError
from dflash_lit.compilation.seal import graphs_made
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics"),
]


def build(target: FrozenTarget, *, compile_on_cpu: bool = True, path_width: int = 0, **objective: Any) -> DrafterModule:
    torch.manual_seed(0)
    config = embedded_config(target_fingerprint=target.fingerprint, num_hidden_layers=2, path_width=path_width)
    objective = {"weights": "dpace", **objective}
    module = DrafterModule(
        config.to_dict(), target.ends(), objective, anchors=8, seed=3, lr=1e-2, compile_on_cpu=compile_on_cpu
    )
    # The graphs are those of any backend; this one makes them without a C++ compiler.
    module._compiled = CompiledDrafter(module.drafter, backend="aot_eager")
    return module


def rows() -> RowDataModule:
    """Eight training rows, and five of validation: the last batch of both sides' loaders is partial."""
    train = packed_rows([[(128, 0)], [(60, 10), (40, 18)]] * 4)
    return RowDataModule(train, packed_rows([[(128, 10)]] * 5, seed=1), 2, seed=1)


def trainer(target: FrozenTarget, folder: Path, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 6,
        "max_epochs": -1,
        "logger": CSVLogger(folder, name="", version=""),
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "inference_mode": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        "strategy": ColocatedStrategy(target, embedded_config().target_layer_ids),
    }
    return L.Trainer(callbacks=callbacks, **{**usual, **settings})


class Watch(L.Callback):
    """Losses of every step, and what the warm-up left behind; runs after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.graphs: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.random = torch.get_rng_state()
        self.weights = [p.detach().clone() for p in pl_module.parameters()]
        self.gradients = [p.grad for p in pl_module.parameters()]
        self.training = pl_module.training
        self.graphs.append(graphs_made())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if "train/loss" not in trainer.callback_metrics:  # in the midst of the first accumulation
            return
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.graphs.append(graphs_made())


def fit(target: FrozenTarget, folder: Path, *, warm: bool, compile_on_cpu: bool = True) -> tuple[Watch, L.Trainer]:
    watch = Watch()
    # With a guard, which is to need no graphs and to change nothing.
    callbacks = [CompileWarmup(), FiniteGuard(str(folder), spikes="rollback", weights_every=2)] if warm else []
    fitter = trainer(target, folder, [*callbacks, watch], accumulate_grad_batches=2)
    fitter.fit(build(target, compile_on_cpu=compile_on_cpu), rows())
    return watch, fitter


def test_losses_are_those_of_a_run_without_it(embedded: FrozenTarget, tmp_path: Path) -> None:
    warm, fitter = fit(embedded, tmp_path / "warm", warm=True)
    cold, _ = fit(embedded, tmp_path / "cold", warm=False)
    assert warm.losses == cold.losses
    assert len(set(warm.losses)) > 3
    assert torch.equal(warm.random, cold.random)
    assert warm.training == cold.training
    assert all(torch.equal(one, other) for one, other in zip(warm.weights, cold.weights, strict=True))
    assert warm.gradients == cold.gradients == [None] * len(cold.gradients)

    # Everything was compiled before the sanity check; without the callback, in the midst of it.
    assert len(set(warm.graphs)) == 1
    assert cold.graphs[0] < cold.graphs[-1]
    metrics = fitter.callback_metrics
    assert float(metrics["compile/recompiles"]) == 0
    text = (tmp_path / "warm" / "metrics.csv").read_text()
    assert "compile/warmup_s" in text
    assert "compile/graphs" in text


def test_a_path_head_is_warmed_up_too(embedded: FrozenTarget, tmp_path: Path) -> None:
    watch = Watch()
    trainer(embedded, tmp_path, [CompileWarmup(), watch]).fit(build(embedded, path_width=8), rows())
    assert len(watch.losses) == 6
    assert len(set(watch.graphs)) == 1


def test_plain_runs_are_as_good(embedded: FrozenTarget, tmp_path: Path) -> None:
    compiled, _ = fit(embedded, tmp_path / "a", warm=True)
    plain, fitter = fit(embedded, tmp_path / "b", warm=True, compile_on_cpu=False)
    assert plain.losses == pytest.approx(compiled.losses, rel=1e-4)
    assert "compile/recompiles" not in fitter.callback_metrics  # nothing is compiled, so nothing is warmed up


def test_nothing_compiles_through_checkpoints_and_resuming(embedded: FrozenTarget, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    first = Watch()
    trainer(embedded, tmp_path, [CompileWarmup(), save, first]).fit(build(embedded), rows())
    second = Watch()
    again = trainer(embedded, tmp_path, [CompileWarmup(), second])
    again.fit(build(embedded), rows(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    assert second.losses == first.losses[4:]
    for watch in (first, second):
        assert len(set(watch.graphs)) == 1


def test_both_forms_of_checkpointing_survive_it(embedded: FrozenTarget, tmp_path: Path) -> None:
    losses = []
    for use_reentrant in (False, True):
        watch = Watch()
        module = build(embedded, use_reentrant=use_reentrant)
        trainer(embedded, tmp_path, [CompileWarmup(), watch], max_steps=3).fit(module, rows())
        losses.append(watch.losses)
        assert len(set(watch.graphs)) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_compilation_that_is_off_is_an_error(embedded: FrozenTarget, tmp_path: Path) -> None:
    """Not a run that is slow on a CPU and dense on a GPU."""
    counters.clear()  # of the tests before
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UserError, match="was to be compiled, and nothing was"),
    ):
        trainer(embedded, tmp_path, [CompileWarmup()]).fit(build(embedded), rows())


class OtherRows(L.Callback):
    """Cuts a batch shorter in the middle of the run."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            for name in ("input_ids", "document_ids", "position_ids", "supervised", "features"):
                batch[name] = batch[name][:, :64].contiguous()


def test_another_shape_ends_the_run_and_says_which(embedded: FrozenTarget, tmp_path: Path) -> None:
    watch = Watch()
    warmup = CompileWarmup()
    with pytest.raises(RecompileError, match=r"context would have to be compiled again .* expected 128, actual 64"):
        trainer(embedded, tmp_path, [warmup, OtherRows(), watch]).fit(build(embedded), rows())
    assert len(watch.losses) == 2
    assert warmup.seal is not None
    assert not warmup.seal.closed  # a sweep goes on in this process, and its next job compiles
    assert fit(embedded, tmp_path / "next", warm=True)[0].losses


def test_it_tells_what_it_does(embedded: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(embedded, tmp_path, warm=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compile, rank 0: ")]
    assert [line.split(": ")[1] for line in lines] == ["features", "train", "validation"]
    assert "3 graphs" in lines[1]
    assert "0 graphs" in lines[2]  # validation runs through those of training


def test_decoding_at_every_validation_compiles_nothing(embedded: FrozenTarget, tmp_path: Path) -> None:
    """Chains and draft trees, of a drafter whose graphs are sealed."""
    module, data = build(embedded), rows()
    data.eval_prompts = [list(range(5, 25)), list(range(30, 45))]  # type: ignore[attr-defined]
    made = trainer(embedded, tmp_path, [CompileWarmup(), Acceptance(2, 8, budgets=[16])])
    graphs: list[int] = []
    made.callbacks.append(L.pytorch.callbacks.LambdaCallback(on_train_start=lambda *_: graphs.append(graphs_made())))  # type: ignore[attr-defined]
    made.fit(module, datamodule=data)
    assert "val/tau@16" in made.callback_metrics
    assert graphs[0] == graphs_made() > 0
