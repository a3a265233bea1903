from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.nn.parallel import DistributedDataParallel

from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.module import DrafterModule
from dflash_lit.placement import strategy as placements
from dflash_lit.placement.feature_loader import FeatureLoader
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.started import Started
from dflash_lit.placement.strategy import ColocatedStrategy, DrafterGroupStrategy, threads_of_a_rank
from dflash_lit.placement.world import World, lead
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows, token_batch

LAYERS = (1, 3)


def test_batches_get_features(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0), (20, 0)]], 64)
    strategy = ColocatedStrategy(embedded, LAYERS)
    loader = strategy.process_dataloader([batch, batch])
    assert isinstance(loader, FeatureLoader)
    first, _ = loader
    assert set(first) == {*batch, "features"}
    assert first["features"].shape == (1, 64, 2 * 256)
    assert torch.equal(first["features"], strategy.with_features(batch)["features"])


def test_a_teacher_gives_its_last_hidden_state_too(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0), (20, 0)]], 64)
    (got,) = ColocatedStrategy(embedded, LAYERS, teacher=True).process_dataloader([batch])
    assert set(got) == {*batch, "features", "last_hidden"}
    assert torch.equal(got["features"], ColocatedStrategy(embedded, LAYERS).with_features(batch)["features"])
    # What the head makes of it are the logits of each document alone.
    with torch.no_grad():
        alone = embedded.model(batch["input_ids"][:, 40:60]).logits
    torch.testing.assert_close(got["last_hidden"][:, 40:60] @ embedded.ends().head.T, alone, rtol=1e-3, atol=1e-2)


# -- drafters as a group: one of a single drafter, which needs no other process


class Look(Callback):
    """At what there is only while a fit runs."""

    synced: bool | None = None
    asks: bool | None = None
    collectives: set[str]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self.synced = trainer.strategy.model.broadcast_buffers
        # The instance's own, in place of the class's.
        self.asks = "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == 2:  # with the second DDP tells the others of its buckets
            self.profile = torch.profiler.profile().__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self.profile.__exit__(None, None, None)
            self.collectives = {event.key for event in self.profile.key_averages() if event.key.startswith("c10d::")}


@pytest.fixture
def world() -> Iterator[World]:
    with lead(Layout(0, 1), Started("hand"), "", command=[], timeout_s=25) as world:
        yield world


def test_a_group_of_one_drafter_trains_as_one_alone(embedded: FrozenTarget, world: World, tmp_path: Path) -> None:
    losses, looks = [], [Look(), Look()]
    layers = embedded_config().target_layer_ids
    group = DrafterGroupStrategy(world, torch.device("cpu"), embedded, layers)
    for strategy, look in zip((ColocatedStrategy(embedded, layers), group), looks, strict=True):
        torch.manual_seed(0)
        module = DrafterModule(embedded_config().to_dict(), embedded.ends(), anchors=4)
        rows = packed_rows([[(60, 8)]] * 6, 64)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_steps=3,
            callbacks=[look],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, train_dataloaders=RowDataModule(rows, rows, 2, 0).train_dataloader())
        losses.append(float(trainer.callback_metrics["train/loss"]))
    # To the last bit with one thread; several add in an order that depends on where the gradients lie, here in DDP's buckets.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert [look.synced for look in looks] == [None, False]  # embedding and head are sent to nobody
    assert [look.asks for look in looks] == [True, False]  # and no batch waits to hear of signals
    assert [look.collectives for look in looks] == [set(), {"c10d::allreduce_"}]  # a barrier would wait for the device


@pytest.mark.parametrize(
    ("values", "reduce_op", "expected"),
    [([1.0, 2.0], "mean", [1.0, 2.0]), ([3, 4], "sum", [3, 4]), ([5, 6], dist.ReduceOp.MAX, [5, 6]), ([7], "AVG", [7])],
)
def test_sums_and_means_of_drafters(
    embedded: FrozenTarget, world: World, values: list, reduce_op: object, expected: list
) -> None:
    """Of one; of more in test_same_run.py."""
    group = DrafterGroupStrategy(world, torch.device("cpu"), embedded, LAYERS)
    world.start_drafter_group(torch.device("cpu"), None)
    tensor = torch.tensor(values)
    assert group.reduce(tensor, reduce_op=reduce_op) is tensor  # type: ignore[arg-type]
    assert tensor.tolist() == expected
    assert group.reduce("no tensor") == "no tensor"


def test_lightning_still_asks_all_ranks_for_a_signal_in_a_method_of_its_own() -> None:
    """If this fails, look for what ``DrafterGroupStrategy.setup`` replaces: else every batch waits for the device again."""
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_torch_still_knows_the_argument_that_keeps_buffers_where_they_are() -> None:
    """If this fails, look for ``_KEEP_BUFFERS``: else embedding and head are sent to all drafters at every step."""
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    (name,) = placements._KEEP_BUFFERS
    assert name in arguments
    # The old name warns where there is a new one.
    assert name == ("forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [threads_of_a_rank(ranks) for ranks in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
