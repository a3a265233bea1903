"""Packed rows into batches, in an order that can be taken up again at any batch.

Every batch of a run has the same shapes: rows that do not exist are filled in as empty ones, which teach nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from dflash_lit.checkpoints.contract import BATCHES, CONTENT
from dflash_lit.checkpoints.form import check_count
from dflash_lit.data.packing import Rows
from dflash_lit.errors import UserError

__all__ = ["RowDataModule", "RowDataset", "RowLoader", "RowOrder"]

EMPTY_ROW = -1


class KnownFeatures(Protocol):
    """Features of rows that need no target any more; see :class:`dflash_lit.data.offline.StoredFeatures`."""

    def take(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Tensors [R, S, ...] of the rows, as a target adds them to a batch."""


class RowDataset(Dataset[dict[str, Tensor]]):
    """Packed rows by number. Row ``EMPTY_ROW`` is padding throughout.

    Args:
        rows: the rows.
        features: added to each batch, if they are known.
    """

    def __init__(self, rows: Rows, features: KnownFeatures | None = None) -> None:
        self._rows = rows
        self._features = features

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def digest(self) -> str:
        """Names the content of the rows."""
        return self._rows.digest()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[0] for name, column in self.batch([index], 1).items()}

    def batch(self, indices: Sequence[int], rows: int) -> dict[str, Tensor]:
        """Put the rows ``indices`` together, with empty ones after them up to ``rows`` = R.

        Returns:
            ``input_ids`` int64 [R, S], ``document_ids`` int32 [R, S], ``position_ids`` int32 [R, S], ``supervised``
            bool [R, S], ``row_ids`` int64 [R] (``EMPTY_ROW`` for empty rows), and the features, if they are known.
        """
        given = [index for index in indices if index != EMPTY_ROW]
        row_ids = torch.full((rows,), EMPTY_ROW, dtype=torch.int64)
        places = [place for place, index in enumerate(indices) if index != EMPTY_ROW]
        row_ids[places] = torch.tensor(given, dtype=torch.int64)
        taken = self._rows.take(given)

        def filled(column: np.ndarray, dtype: torch.dtype, empty: int) -> Tensor:
            whole = torch.full((rows, self._rows.row_tokens), empty, dtype=dtype)
            whole[places] = torch.from_numpy(column).to(dtype)
            return whole

        known = {} if self._features is None else self._features.take(row_ids.tolist())
        return {
            **known,
            "input_ids": filled(taken.input_ids, torch.int64, self._rows.pad_id),
            "document_ids": filled(taken.document_ids, torch.int32, -1),
            "position_ids": filled(taken.position_ids, torch.int32, 0),
            "supervised": filled(taken.supervised, torch.bool, 0),
            "row_ids": row_ids,
        }


class RowOrder(DistributedSampler[int]):
    """The order of the rows: a function of (rows, seed, epoch), dealt to the ranks batch by batch.

    Being a ``DistributedSampler``, Lightning leaves it alone, and sets the epoch before each. Global batch ``k`` takes the
    next ``rows_per_batch * replicas`` rows of the epoch's order, and rank ``r`` the ``r``-th share of them. All ranks have
    equally many batches. A shuffled order leaves out an incomplete last batch, unless it is the only one: the rows left out
    differ from epoch to epoch. Otherwise it is filled with ``EMPTY_ROW``.

    Args:
        rows: how many there are, >= 1.
        rows_per_batch: R of one rank.
        shuffle: for training.
        seed: of the shuffle.
        replicas: ranks that share the rows.
        rank: of this one.
        accumulate: batches of an optimizer step; a shuffled order leaves out an incomplete step in the same way, so that a step
            has the same rows for any number of replicas with which ``replicas * accumulate`` is the same.
    """

    def __init__(
        self,
        rows: int,
        rows_per_batch: int,
        *,
        shuffle: bool,
        seed: int = 0,
        replicas: int = 1,
        rank: int = 0,
        accumulate: int = 1,
    ) -> None:
        super().__init__(range(rows), num_replicas=replicas, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.rows = rows
        self.rows_per_batch = rows_per_batch
        self.ahead = 0  # how far the Trainer's count of epochs is ahead of the data's; see RowLoader
        whole, rest = divmod(rows, rows_per_batch * replicas)
        if shuffle and whole >= accumulate:
            self.batches = whole - whole % accumulate
        else:
            self.batches = whole if shuffle and whole else whole + (rest > 0)

    def __iter__(self) -> Iterator[int]:
        # Not torch's or Python's global generator: the order must not depend on what else has drawn from it.
        rng = np.random.default_rng([self.seed, self.epoch - self.ahead])
        order = rng.permutation(self.rows) if self.shuffle else np.arange(self.rows)
        dealt = np.full(self.batches * self.num_replicas * self.rows_per_batch, EMPTY_ROW)
        dealt[: min(len(order), len(dealt))] = order[: len(dealt)]
        return iter(dealt.reshape(self.batches, self.num_replicas, self.rows_per_batch)[:, self.rank].reshape(-1).tolist())

    def __len__(self) -> int:
        return self.batches * self.rows_per_batch


class RowLoader(DataLoader[dict[str, Tensor]]):
    """Loads :class:`RowDataset` batches, and can be saved and resumed between any two of them.

    Lightning's fit loop stores ``state_dict()`` in checkpoints. It takes a batch only when it needs it (a loader with a length
    is not read ahead), so the batches handed out are those trained on. ``len`` is that of a whole epoch, also after resuming:
    the fit loop adds the batches of before to its count. A wrapper that reads ahead must store the number of batches it has
    passed on itself: ``{**loader.state_dict(), "batches": passed_on}``.

    Lightning tells the sampler which epoch comes. After resuming a run limited by steps from a checkpoint of an epoch's end,
    it counts that epoch twice there (not in ``trainer.current_epoch``). So the state holds both counts, and the difference is
    taken off from then on: the next epoch is the one after the saved one, whatever the Trainer calls it.

    Batches are cut from memory here, in the loader's own process: workers would only add copies.
    """

    def __init__(self, dataset: RowDataset, batch_size: int, sampler: RowOrder, **kwargs: Any) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **kwargs)
        # The last known position: the epoch as the Trainer counts it, and the batches handed out in it.
        self._trainer_epoch = 0
        self._batches = 0
        self._resumed = False

    def _position(self) -> tuple[int, int, int]:
        """Where the next iteration begins, or this one is: the Trainer's epoch, how far that is ahead, batches handed out."""
        # For `overfit_batches`, Lightning replaces the sampler by one that knows no epochs.
        epoch, ahead = int(getattr(self.sampler, "epoch", 0)), int(getattr(self.sampler, "ahead", 0))
        if epoch == self._trainer_epoch:
            return epoch, ahead, self._batches
        if self._resumed and epoch > self._trainer_epoch:
            ahead += epoch - self._trainer_epoch - 1
        return epoch, ahead, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        # A generator, so nothing is decided before the first batch is asked for: Lightning makes the first epoch's iterator
        # before it sets the epoch, and makes some that it never uses.
        self._trainer_epoch, ahead, batches = self._position()
        self._batches = batches if self._resumed else 0
        self._resumed = False
        if isinstance(self.sampler, RowOrder):
            self.sampler.ahead = ahead
        assert isinstance(self.dataset, RowDataset)
        assert self.batch_size is not None
        assert self.batch_sampler is not None
        for indices in islice(iter(self.batch_sampler), self._batches, None):
            self._batches += 1  # before it is handed out: a checkpoint during its step counts it
            batch = self.dataset.batch(indices, self.batch_size)
            # From pinned memory the copy to the GPU does not hold up the host.
            yield {name: value.pin_memory() for name, value in batch.items()} if self.pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """Say which epoch this is (by the data's and the Trainer's count), how many batches it has given, in which order."""
        trainer_epoch, ahead, batches = self._position()
        return {"epoch": trainer_epoch - ahead, "trainer_epoch": trainer_epoch, "batches": batches, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue after the batches that ``state`` counts.

        If the Trainer goes on with a later epoch, because that of ``state`` was complete, the next one is read from its
        beginning.

        Raises:
            UserError: if ``state`` was saved inside an epoch of other rows, another seed or other batches.
        """
        if not isinstance(state, dict):
            raise UserError(f"ckpt_path: its entry combined_loader is {str(state)[:60]!r}; use another checkpoint")
        for name in ("epoch", "trainer_epoch", "batches"):
            check_count(state.get(name), f"loops.fit_loop.state_dict.combined_loader: {name}")
        if not isinstance(state.get("order"), dict):
            raise UserError(
                f"ckpt_path: its entry combined_loader.order is {str(state.get('order'))[:60]!r}; use another checkpoint"
            )
        check_count(state["order"].get("batches"), "loops.fit_loop.state_dict.combined_loader: order.batches")
        here = self._order()
        saved = {"content": here["content"], **state["order"]}  # earlier checkpoints do not name it
        if 0 < state["batches"] < saved["batches"] and saved != here:
            changed = ", ".join(f"{name} {saved.get(name)} -> {here[name]}" for name in here if saved.get(name) != here[name])
            raise UserError(
                f"the checkpoint was saved inside an epoch whose batches cannot be made again ({changed}); resume with the "
                f"same data, seed, rows per batch and number of drafter ranks, or from a checkpoint at an epoch's end"
            )
        self._trainer_epoch = int(state["trainer_epoch"])
        self._batches = int(state["batches"])
        self._resumed = True
        if isinstance(self.sampler, RowOrder):
            self.sampler.set_epoch(self._trainer_epoch)
            self.sampler.ahead = self._trainer_epoch - int(state["epoch"])

    def _order(self) -> dict[str, int | str]:
        """What decides the batches of an epoch."""
        assert isinstance(self.dataset, RowDataset)
        order: dict[str, int | str] = {"batches": len(self), "rows_per_batch": int(self.batch_size or 0)}
        order["content"] = self.dataset.digest
        if isinstance(self.sampler, RowOrder):
            order |= {"rows": self.sampler.rows, "seed": self.sampler.seed, "ranks": self.sampler.num_replicas}
        return order


class RowDataModule(lightning.LightningDataModule):
    """Serves packed rows as batches; see :meth:`RowDataset.batch` for what is in one.

    Args:
        train: rows to learn from. Their order is a function of (seed, epoch); a last incomplete batch is left out, unless it
            is the only one.
        val: rows to measure on, in their order; the last batch is filled up with empty rows.
        rows_per_batch: R, the rows of one batch of one rank, >= 1.
        seed: of the order.
        features: of the training and of the validation rows, if they are known.

    Raises:
        UserError: if there are no rows, or the two sides have rows of different lengths.
    """

    def __init__(
        self,
        train: Rows,
        val: Rows,
        rows_per_batch: int,
        seed: int,
        *,
        features: tuple[KnownFeatures, KnownFeatures] | None = None,
    ) -> None:
        super().__init__()
        if rows_per_batch < 1:
            raise UserError(f"data.rows_per_batch: {rows_per_batch} is too small; at least 1")
        for side, rows in (("training", train), ("validation", val)):
            if not len(rows):
                raise UserError(f"there are no {side} rows; give more documents")
        if train.row_tokens != val.row_tokens:
            raise UserError(
                f"training rows have {train.row_tokens} tokens, validation rows {val.row_tokens}; pack both with the same "
                f"data.row_tokens"
            )
        self.train = train
        self.val = val
        self.rows_per_batch = rows_per_batch
        self.seed = seed
        self.features: tuple[KnownFeatures | None, KnownFeatures | None] = features or (None, None)

    @cached_property
    def _content(self) -> str:
        return self.train.digest()

    def contract(self) -> dict[str, Any]:
        """The data plan: which rows are trained on, and how an epoch of them is cut into steps; see :mod:`dflash_lit.checkpoints.contract`."""
        ranks, accumulate = (self.trainer.world_size, self.trainer.accumulate_grad_batches) if self.trainer else (1, 1)
        return {
            CONTENT: self._content,
            "data.row_tokens": self.train.row_tokens,
            **dict(zip(BATCHES, (self.rows_per_batch, ranks, accumulate), strict=True)),
        }

    def example_batch(self) -> dict[str, Tensor]:
        """The first training rows as a batch, whose shapes are those of every batch; no loader moves for it."""
        return RowDataset(self.train, self.features[0]).batch(
            range(min(self.rows_per_batch, len(self.train))), self.rows_per_batch
        )

    def train_dataloader(self) -> RowLoader:
        return self._loader(RowDataset(self.train, self.features[0]), shuffle=True)

    def val_dataloader(self) -> RowLoader:
        return self._loader(RowDataset(self.val, self.features[1]), shuffle=False)

    def _loader(self, rows: RowDataset, *, shuffle: bool) -> RowLoader:
        order = RowOrder(
            len(rows),
            self.rows_per_batch,
            shuffle=shuffle,
            seed=self.seed,
            # The Trainer's world is that of the drafters; without a Trainer there is one rank.
            replicas=self.trainer.world_size if self.trainer else 1,
            rank=self.trainer.global_rank if self.trainer else 0,
            accumulate=self.trainer.accumulate_grad_batches if self.trainer else 1,
        )
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return RowLoader(rows, batch_size=self.rows_per_batch, sampler=order, pin_memory=pin)
