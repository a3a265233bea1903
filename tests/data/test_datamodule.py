from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from dflash_lit.data.datamodule import EMPTY_ROW, RowDataModule, RowDataset, RowLoader, RowOrder
from dflash_lit.data.documents import Document
from dflash_lit.data.packing import PackedRows, pack
from dflash_lit.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torch")

S = 128


def make_rows(count: int, pad_id: int = 9) -> PackedRows:
    """``count`` rows of one document each."""
    return pack([Document(np.full(S, 100 + i), np.arange(S) >= 4, f"d{i}") for i in range(count)], S, seed=0, pad_id=pad_id)


def loader_of(rows: int, per_batch: int, *, shuffle: bool = True, seed: int = 0, first: int = 0) -> RowLoader:
    packed = PackedRows(
        input_ids=np.arange(first, first + rows * S, dtype=np.int32).reshape(rows, S),
        document_ids=np.zeros((rows, S), dtype=np.int32),
        position_ids=np.tile(np.arange(S, dtype=np.int32), (rows, 1)),
        supervised=np.ones((rows, S), dtype=bool),
        pad_id=7,
    )
    return RowLoader(RowDataset(packed), batch_size=per_batch, sampler=RowOrder(rows, per_batch, shuffle=shuffle, seed=seed))


def row_ids(batches: Any) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in batches]


# ---------------------------------------------------------------------------------------------------------------- batches


def test_batches_keep_the_contract():
    loader = loader_of(5, 2)
    for batch in loader:
        assert {name: (tuple(column.shape), column.dtype) for name, column in batch.items()} == {
            "input_ids": ((2, S), torch.int64),
            "document_ids": ((2, S), torch.int32),
            "position_ids": ((2, S), torch.int32),
            "supervised": ((2, S), torch.bool),
            "row_ids": ((2,), torch.int64),
        }
        for row, ids in zip(batch["row_ids"].tolist(), batch["input_ids"], strict=True):
            assert torch.equal(ids, torch.arange(row * S, (row + 1) * S))


def test_validation_fills_the_last_batch_with_empty_rows():
    loader = loader_of(5, 2, shuffle=False)
    batches = list(loader)
    assert len(loader) == 3
    assert row_ids(batches) == [[0, 1], [2, 3], [4, EMPTY_ROW]]
    last = batches[-1]
    assert (last["document_ids"][1] == -1).all()
    assert (last["input_ids"][1] == 7).all()
    assert not last["position_ids"][1].any()
    assert not last["supervised"][1].any()
    # The row whose place it took is untouched.
    assert last["supervised"][0].all()
    assert row_ids(loader) == [[0, 1], [2, 3], [4, EMPTY_ROW]]


def test_a_lone_training_batch_is_filled_up():
    assert sorted(row_ids(loader_of(3, 4))[0]) == [EMPTY_ROW, 0, 1, 2]
    assert len(loader_of(3, 4)) == 1


@given(
    rows=st.integers(1, 40),
    per_batch=st.integers(1, 6),
    replicas=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_ranks_share_each_epoch(rows: int, per_batch: int, replicas: int, shuffle: bool, seed: int, epoch: int):
    orders = [RowOrder(rows, per_batch, shuffle=shuffle, seed=seed, replicas=replicas, rank=rank) for rank in range(replicas)]
    for order in orders:
        order.set_epoch(epoch)
    dealt = [list(order) for order in orders]
    assert {len(one) for one in dealt} == {len(orders[0])} == {orders[0].batches * per_batch}
    assert dealt == [list(order) for order in orders]
    together = [row for k in range(orders[0].batches) for one in dealt for row in one[k * per_batch : (k + 1) * per_batch]]
    real = [row for row in together if row != EMPTY_ROW]
    assert len(set(real)) == len(real)
    if not shuffle:
        assert real == list(range(rows))
    elif rows >= per_batch * replicas:
        assert len(real) == len(together) == rows // (per_batch * replicas) * per_batch * replicas
    else:
        assert sorted(real) == list(range(rows))
    # One rank with larger batches sees the same global batches.
    lone = RowOrder(rows, per_batch * replicas, shuffle=shuffle, seed=seed)
    lone.set_epoch(epoch)
    assert list(lone) == together


def test_the_order_depends_on_seed_and_epoch_only():
    def epochs(loader: RowLoader, count: int) -> list[list[list[int]]]:
        result = []
        for epoch in range(count):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            result.append(row_ids(loader))
        return result

    first = epochs(loader_of(11, 2), 4)
    before = torch.random.get_rng_state()
    torch.rand(3)
    np.random.seed(5)
    torch.random.set_rng_state(before)
    assert epochs(loader_of(11, 2), 4) == first
    assert torch.equal(torch.random.get_rng_state(), before)  # reading draws nothing from the global generator
    assert epochs(loader_of(11, 2, seed=1), 4) != first
    assert len({str(epoch) for epoch in first}) == 4
    assert all(len(epoch) == 5 for epoch in first)
    # What one epoch leaves out comes in another.
    assert {row for epoch in first for batch in epoch for row in batch} == set(range(11))


# ----------------------------------------------------------------------------------------------------------------- resume


def test_position_counts_batches_handed_out():
    loader = loader_of(10, 2)
    loader.sampler.set_epoch(3)  # type: ignore[attr-defined]
    assert loader.state_dict()["batches"] == 0
    batches = iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (3, 0)
    for taken in range(1, 6):
        next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (3, taken)
    loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (4, 0)


@pytest.mark.parametrize("taken", range(6))
def test_loading_continues_with_the_next_batch(taken: int):
    loader = loader_of(10, 2)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    batches = iter(loader)
    read = row_ids(next(batches) for _ in range(taken))
    state = loader.state_dict()
    rest = row_ids(batches)

    resumed = loader_of(10, 2)
    resumed.load_state_dict(state)
    assert len(resumed) == 5
    assert resumed.state_dict() == state
    iter(resumed)  # one that is never read
    assert row_ids(resumed) == rest
    # Only the next iteration continues.
    assert row_ids(resumed) == read + rest


def test_a_later_epoch_starts_at_its_beginning():
    loader = loader_of(10, 2)
    list(loader)
    resumed = loader_of(10, 2)
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)  # type: ignore[attr-defined]
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert resumed.state_dict() == loader.state_dict()
    assert row_ids(resumed) == row_ids(loader)


def test_another_order_is_refused_inside_an_epoch():
    loader = loader_of(10, 2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for other, says in (
        (loader_of(10, 2, seed=1), "seed 0 -> 1"),
        (loader_of(11, 2), "rows 10 -> 11"),
        (loader_of(10, 1), "rows_per_batch 2 -> 1"),
        (loader_of(10, 2, first=7), "content "),
    ):
        with pytest.raises(UserError, match=says):
            other.load_state_dict(state)
    list(batches)
    del state["order"]["content"]  # of an earlier version
    loader_of(10, 2, first=7).load_state_dict(state)
    loader_of(11, 2).load_state_dict(loader.state_dict())  # the epoch is over: nothing to make again


@pytest.mark.parametrize("damaged", [False, {}, {"epoch": 0, "trainer_epoch": 0, "batches": 0, "order": 3}])
def test_a_position_that_is_none_is_refused(damaged: Any) -> None:
    with pytest.raises(UserError, match="combined_loader"):
        loader_of(10, 2).load_state_dict(damaged)


class Recorder(BoringModel):
    """Trains on nothing in particular and writes down the rows it gets, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        self.seen.append((self.current_epoch, batch_idx, batch["row_ids"].tolist()))
        return self.layer(batch["input_ids"][:, :32].float() / 1000).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.validated.append(batch["row_ids"].tolist())


class StopAfter(Callback):
    """Ends the run in the middle of whatever, as a crash would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.steps:
            raise KeyboardInterrupt


def fit(folder: Path, *callbacks: Callback, ckpt: Path | None = None, rows: int = 11, **settings: Any) -> Recorder:
    model = Recorder()
    data = RowDataModule(make_rows(rows), make_rows(3), rows_per_batch=2, seed=5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        callbacks=list(callbacks),
        **{"max_epochs": 3, **settings},
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return model


# Each with what Lightning does differently: by epochs or by steps, validation inside an epoch, accumulated gradients.
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_epochs": -1, "max_steps": 13},
    "steps, limited": {"max_epochs": -1, "max_steps": 10, "limit_train_batches": 3},
    "steps, validation inside": {"max_epochs": -1, "max_steps": 13, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "steps, validation at the epoch's end": {
        "max_epochs": -1,
        "max_steps": 13,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
    },
    "steps, accumulated": {
        "max_epochs": -1,
        "max_steps": 7,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "accumulate_grad_batches": 2,
    },
    "validation inside": {"val_check_interval": 2},
    "limited": {"limit_train_batches": 3},
    "no validation": {"limit_val_batches": 0},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_checkpoint_resumes_exactly(name: str, tmp_path: Path):
    """Save after each step and each validation, resume from each: the rows seen are those of the uninterrupted run."""
    settings = RUNS[name]
    saved: list[tuple[Path, int]] = []

    class SaveAll(Callback):
        """Saves where ModelCheckpoint would: after a batch, after validation, after an epoch."""

        def save(self, trainer: Any, module: Recorder) -> None:
            if not trainer.sanity_checking:
                path = tmp_path / f"{len(saved)}.ckpt"
                trainer.save_checkpoint(path)
                saved.append((path, len(module.seen)))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.save(trainer, module)

        on_validation_end = save  # type: ignore[assignment]

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            # With validation counted over epochs, Lightning 2.6.6 itself goes wrong when it resumes from an epoch's end: it
            # trains one batch more in the epoch that is over, and skips the next. Save after batches there.
            if trainer.check_val_every_n_epoch is not None:
                self.save(trainer, module)

    whole = fit(tmp_path, SaveAll(), **settings).seen
    batches = settings.get("limit_train_batches", 5)  # 11 rows, two at a time
    batches -= batches % settings.get("accumulate_grad_batches", 1)  # whole steps
    assert [epoch for epoch, _, _ in whole] == [i // batches for i in range(len(whole))]
    assert len(saved) > len(whole)
    for path, done in saved:
        resumed = fit(tmp_path, ckpt=path, **settings).seen
        assert resumed == whole[done:], f"{path.name}, saved after {done} batches"


def test_a_run_that_was_interrupted_resumes_exactly(tmp_path: Path):
    whole = fit(tmp_path).seen
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, keeper, StopAfter(10))
    resumed = fit(tmp_path, ckpt=tmp_path / "kept" / "step=8.ckpt").seen
    assert resumed == whole[8:]


def test_a_run_resumed_from_a_resumed_run_is_exact(tmp_path: Path):
    # By steps, where Lightning counts an epoch twice when it resumes at its end: once, twice, then in the middle.
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": 18}

    class Save(Callback):
        def __init__(self, name: str, epoch: int, batches: int) -> None:
            self.path, self.epoch, self.batches = tmp_path / name, epoch, batches

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx + 1) == (self.epoch, self.batches):
                trainer.save_checkpoint(self.path)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == self.epoch and not self.batches:
                trainer.save_checkpoint(self.path)

    whole = fit(tmp_path, Save("a.ckpt", 0, 0), **settings).seen
    assert fit(tmp_path, Save("b.ckpt", 1, 0), ckpt=tmp_path / "a.ckpt", **settings).seen == whole[5:]
    assert fit(tmp_path, Save("c.ckpt", 2, 2), ckpt=tmp_path / "b.ckpt", **settings).seen == whole[10:]
    assert fit(tmp_path, ckpt=tmp_path / "c.ckpt", **settings).seen == whole[12:]


def test_validation_and_sanity_check_do_not_disturb_training(tmp_path: Path):
    model = fit(tmp_path, max_epochs=2)
    assert model.seen == fit(tmp_path, max_epochs=2, limit_val_batches=0, num_sanity_val_steps=0).seen
    assert model.validated == [[0, 1], [2, EMPTY_ROW]] * 3


def test_overfit_batches_works(tmp_path: Path):
    model = fit(tmp_path, max_epochs=2, overfit_batches=2)
    assert [rows for _, _, rows in model.seen] == [[0, 1], [2, 3]] * 2


# ------------------------------------------------------------------------------------------------------------- data module


def test_wrong_arguments_are_named():
    rows = make_rows(3)
    none = PackedRows(*(getattr(rows, name)[:0] for name in ("input_ids", "document_ids", "position_ids", "supervised")))
    wide = pack([Document(np.arange(300), np.ones(300, dtype=bool), "d")], 256, seed=0, pad_id=0)
    with pytest.raises(UserError, match=r"data\.rows_per_batch"):
        RowDataModule(rows, rows, 0, 0)
    with pytest.raises(UserError, match="no training rows"):
        RowDataModule(none, rows, 1, 0)
    with pytest.raises(UserError, match="no validation rows"):
        RowDataModule(rows, none, 1, 0)
    with pytest.raises(UserError, match=r"data\.row_tokens"):
        RowDataModule(rows, wide, 1, 0)


def test_without_a_trainer_there_is_one_rank():
    data = RowDataModule(make_rows(5), make_rows(3), rows_per_batch=2, seed=0)
    assert sum(len(batch["row_ids"]) for batch in data.train_dataloader()) == len(data.train_dataloader()) * 2
    assert row_ids(data.val_dataloader())[0] == [0, 1]


@pytest.mark.parametrize(("rows", "size"), [(1000, 4), (65, 2), (64, 2), (7, 1)])
def test_a_step_has_the_same_rows_for_any_number_of_ranks(rows: int, size: int) -> None:
    """If ranks times accumulation is the same, whether or not that divides an epoch."""

    def steps(ranks: int, accumulate: int) -> list[set[int]]:
        dealt = []
        for rank in range(ranks):
            order = RowOrder(rows, size, shuffle=True, seed=3, replicas=ranks, rank=rank, accumulate=accumulate)
            order.set_epoch(2)
            dealt.append(np.array(list(order)).reshape(-1, accumulate * size))
        return [set(np.concatenate(parts).tolist()) for parts in zip(*dealt, strict=True)]

    first = steps(4, 1)
    assert first == steps(2, 2) == steps(1, 4)
    assert len(first) == max(rows // (4 * size), 1)
