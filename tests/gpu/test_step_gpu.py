"""The training step on a GPU: right, compiled once, and never waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch._dynamo.utils import counters

from callbacks.compile_warmup import CompileWarmup
from callbacks.finite_guard import FiniteGuard
from dflash_lit.attention.block_mask import block_mask
from dflash_lit.attention.dense import full_attention
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import drafter_config, embedded_config, lively_drafter, packed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 8.0 or more"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROWS, TOKENS, ANCHORS, SIZE, HIDDEN = 2, 512, 24, 16, 256


def layout(*, causal: bool = False, window: int | None = None, size: int = SIZE) -> BlockLayout:
    generator = torch.Generator().manual_seed(3)
    anchors = torch.stack([torch.randperm(TOKENS - 1, generator=generator)[:ANCHORS].sort().values for _ in range(ROWS)])
    documents = torch.zeros(ROWS, TOKENS, dtype=torch.int32)
    documents[0, 200:] = 1
    documents[1, 450:] = -1
    valid = anchors < torch.tensor([[TOKENS], [440]])
    anchors = torch.where(valid, anchors, TOKENS - 1).int()
    return BlockLayout(anchors.cuda(), valid.cuda(), documents.cuda(), size, causal, window)


def inputs(of: BlockLayout, features: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    positions = torch.arange(TOKENS, device="cuda").repeat(ROWS, 1)
    return {
        "features": torch.randn(ROWS, TOKENS, features, generator=generator, device="cuda"),
        "noise": torch.randn(ROWS, of.queries, HIDDEN, generator=generator, device="cuda"),
        "context_positions": positions,
        "positions": (of.anchors[..., None] + torch.arange(of.block_size, device="cuda")).flatten(1),
    }


def plain(drafter: Drafter, given: dict[str, Tensor], of: BlockLayout) -> Tensor:
    context = drafter.context(given["features"], given["context_positions"])
    hidden = drafter.draft(given["noise"], given["positions"], context, full_attention(of))
    return hidden.view(-1, of.block_size, HIDDEN)[:, 1:]


def gradients(drafter: Drafter, hidden: Tensor, seed: int = 5) -> dict[str, Tensor]:
    drafter.zero_grad()
    direction = torch.randn(hidden.shape, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda")
    (hidden.float() * direction).sum().backward()
    return {name: parameter.grad.double() for name, parameter in drafter.named_parameters() if parameter.grad is not None}


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("kind", ["block", "causal", "window", "incomplete tiles", "wide heads"])
def test_values_and_gradients_are_those_of_dense_attention(kind: str) -> None:
    """Kernels in bf16 against the plain model in float64, measured in what plain bf16 itself is off."""
    size = 5 if kind == "incomplete tiles" else SIZE  # 24 blocks of 5 are no multiple of 128
    of = layout(causal=kind == "causal", window=100 if kind == "window" else None, size=size)
    config = drafter_config(
        hidden_size=HIDDEN,
        intermediate_size=384,
        head_dim=256 if kind == "wide heads" else 64,
        num_hidden_layers=3,
        block_size=size,
        causal=of.causal,
    )
    drafter = lively_drafter(config).cuda()
    given = inputs(of, config.feature_size)
    exact_drafter = lively_drafter(config).double().cuda()
    exact = plain(exact_drafter, {name: x.double() if x.is_floating_point() else x for name, x in given.items()}, of)
    exact_gradients = gradients(exact_drafter, exact)

    with torch.autocast("cuda", torch.bfloat16):
        bf16 = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
        usual = plain(drafter, bf16, of)
        usual_gradients = gradients(drafter, usual)
        hidden = CompiledDrafter(drafter)(**bf16, mask=block_mask(of))
        compiled_gradients = gradients(drafter, hidden)

    real = of.valid.flatten()
    assert distance(hidden[real], exact[real]) < 1.5 * distance(usual[real], exact[real]) + 1e-3
    assert compiled_gradients.keys() == exact_gradients.keys()
    for name, gradient in compiled_gradients.items():
        assert gradient.isfinite().all(), name
        assert (
            distance(gradient, exact_gradients[name]) < 1.5 * distance(usual_gradients[name], exact_gradients[name]) + 5e-3
        ), name


def build(target: FrozenTarget, path_width: int = 0, **objective: Any) -> DrafterModule:
    torch.manual_seed(0)
    sizes = {"block_size": 8, "head_dim": 64, "num_hidden_layers": 2, "path_width": path_width}
    config = embedded_config(target_fingerprint=target.fingerprint, **sizes)
    return DrafterModule(config.to_dict(), target.ends(), {"weights": "dpace", **objective}, anchors=16, seed=3, lr=1e-3)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), device="cuda", dtype=torch.bfloat16)


def data(rows: int = 64) -> RowDataModule:
    return RowDataModule(
        packed_rows([[(128, 4)], [(60, 4), (40, 30)]] * (rows // 2)), packed_rows([[(128, 4)]] * 8, seed=1), 4, 1
    )


def trainer(target: FrozenTarget, folder: Path, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    strategy = ColocatedStrategy(target, embedded_config().target_layer_ids, "cuda:0", teacher=settings.pop("teacher", False))
    return L.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        inference_mode=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=-1,
        callbacks=callbacks,
        default_root_dir=folder,
        **{"logger": False, **settings},
    )


class NoWaiting(L.Callback):
    """From the end of step ``first`` to the end of ``last``, waiting for the device is an error: loader, target and all."""

    def __init__(self, first: int = 3, last: int = 10) -> None:
        self.first, self.last = first, last
        self.batches = 0
        self.graphs: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.graphs.append(counters["stats"]["unique_graphs"])
        self.batches += torch.cuda.get_sync_debug_mode() == 2
        if trainer.global_step == self.first:
            torch.cuda.set_sync_debug_mode("error")
        elif trainer.global_step == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings",
    [{}, {"labels": "soft", "temperature": 0.7}, {"capacity": 0.8}, {"path_width": 32}],
    ids=["hard", "soft", "capacity", "path head"],
)
def test_a_steady_step_never_waits_for_the_device(target: FrozenTarget, tmp_path: Path, settings: dict[str, Any]) -> None:
    watch = NoWaiting()
    guard = FiniteGuard(str(tmp_path), spikes="rollback", keep_every=10, weights_every=2)
    fitter = trainer(
        target,
        tmp_path,
        [CompileWarmup(), guard, watch],
        logger=CSVLogger(tmp_path),
        max_steps=12,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        log_every_n_steps=1000,
        teacher=settings.get("labels") == "soft",
    )
    try:
        fitter.fit(build(target, **settings), data())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.batches == 2 * (watch.last - watch.first)
    assert watch.graphs[0] == watch.graphs[-1] > 0  # nothing was compiled after the first batch
    assert float(fitter.callback_metrics["train/loss"]) > 0


class Spoil(L.Callback):
    """Makes a feature of the third step NaN, and keeps weights and optimizer state after each step."""

    def __init__(self) -> None:
        self.states: list[list[Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            batch["features"] = batch["features"].clone()
            batch["features"][1, 3, 5] = torch.nan

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        state = [x for values in trainer.optimizers[0].state.values() for x in values.values()]
        self.states.append([x.detach().clone() for x in (*pl_module.parameters(), *state)])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_left_out_on_the_device(target: FrozenTarget, tmp_path: Path, optimizer: str) -> None:
    module, spoil = build(target), Spoil()
    module.optimizer_kind = optimizer
    guard = FiniteGuard(str(tmp_path / "bad_steps"))
    trainer(target, tmp_path, [CompileWarmup(), guard, spoil], max_steps=6, limit_val_batches=0).fit(module, data())
    same = [
        all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in zip(spoil.states, spoil.states[1:], strict=False)
    ]
    assert same == [False, True, False, False, False]
    assert guard.skip_count == 1
    assert (tmp_path / "bad_steps" / "step=3" / "step.json").is_file()


@pytest.mark.parametrize("path_width", [0, 32])
def test_the_loss_falls_and_validation_measures_trees(target: FrozenTarget, tmp_path: Path, path_width: int) -> None:
    module = build(target, path_width)
    fitter = trainer(
        target, tmp_path, [], max_steps=30, val_check_interval=15, check_val_every_n_epoch=None, limit_val_batches=2
    )
    fitter.fit(module, data())
    metrics = fitter.callback_metrics
    assert float(metrics["val/chain_eal"]) <= float(metrics["val/tree_eal@16"]) <= float(metrics["val/tree_eal@256"])
    assert all(parameter.isfinite().all() for parameter in module.drafter.parameters())


def test_the_gpu_step_is_the_cpu_step(target: FrozenTarget, embedded: FrozenTarget) -> None:
    """Same batch, same anchors: kernels and fused head in bf16 against dense attention and the reference head in fp32."""
    rows = data().train_dataloader().dataset.batch([0, 1, 2, 3], 4)  # type: ignore[attr-defined]
    cpu = build(embedded)
    features = embedded.features(rows["input_ids"], rows["document_ids"], rows["position_ids"], cpu.config.target_layer_ids)
    batch = {**rows, "features": features}
    blocks = cpu.blocks(batch, 0)
    expected = cpu.loss(batch, blocks, cpu(batch, blocks), top=16)
    expected.numerator.backward()

    gpu = build(target).cuda()
    gpu.drafter.load_state_dict(cpu.drafter.state_dict())
    batch = {name: value.cuda() for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        blocks = gpu.blocks(batch, 0)
        result = gpu.loss(batch, blocks, gpu(batch, blocks), top=16)
    result.numerator.backward()
    assert torch.equal(blocks.anchors.cpu(), cpu.blocks({**rows}, 0).anchors)
    assert float(result.numerator / result.denominator) == pytest.approx(
        float(expected.numerator / expected.denominator), rel=2e-3
    )
    assert distance(result.nll.cpu(), expected.nll) < 5e-3
    for (name, ours), (_, theirs) in zip(gpu.drafter.named_parameters(), cpu.drafter.named_parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert distance(ours.grad.cpu(), theirs.grad) < 0.05, name


def test_without_compilation_nothing_is_allocated() -> None:
    of = layout()
    config = drafter_config(hidden_size=HIDDEN, intermediate_size=384, head_dim=64, block_size=SIZE)
    drafter = lively_drafter(config).cuda()
    given, mask = inputs(of, config.feature_size), block_mask(of)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match="without compilation"):
        CompiledDrafter(drafter)(**given, mask=mask)
