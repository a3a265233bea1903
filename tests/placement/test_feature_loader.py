"""Asking ahead changes when features are asked for, and nothing else: same batches, same positions to resume from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lit.data.datamodule import RowDataModule, RowLoader
from dflash_lit.placement.feature_loader import FeatureLoader, PrefetchingLoader
from tests.helpers import packed_rows

ROWS = 12
BATCHES = 6
AHEAD = [0, 1, 2, 3, 7]


class Source:
    """Makes the features of a batch of its tokens; knows what is in flight. What was asked for first arrives first."""

    def __init__(self) -> None:
        self.coming: list[Wish] = []
        self.arrived: list[int] = []
        self.given_up: list[Wish] = []

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "features": batch["input_ids"].float() + 0.5}

    def ask(self, batch: dict[str, Tensor]) -> Wish:
        self.coming.append(Wish(batch, self))
        return self.coming[-1]

    def take(self, batch: dict[str, Tensor], pending: Wish, arrived: int) -> dict[str, Tensor]:
        assert self.coming.pop(0) is pending
        assert pending.batch is batch
        self.arrived.append(arrived)
        return self.with_features(batch)

    def abandon(self, pending: Wish) -> None:
        self.coming.remove(pending)
        self.given_up.append(pending)


class Wish:
    def __init__(self, batch: dict[str, Tensor], source: Source) -> None:
        self.batch, self.source = batch, source

    def arrived(self) -> bool:
        return self is self.source.coming[0]


def loader(seed: int = 5) -> RowLoader:
    return RowDataModule(packed_rows([[(40, 8)]] * ROWS, 64), packed_rows([[(40, 8)]], 64), 2, seed).train_dataloader()


def prefetching(ahead: int) -> tuple[PrefetchingLoader, Source]:
    source = Source()
    return PrefetchingLoader(loader(), source, ahead), source


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in batches]


def of_epoch(wrapped: Any, epoch: int) -> Iterator[dict[str, Tensor]]:
    wrapped.sampler.set_epoch(epoch)
    return iter(wrapped)


@pytest.mark.parametrize("ahead", AHEAD)
def test_same_batches_in_the_same_order(ahead: int) -> None:
    """Also where the loader is shorter than what is asked for ahead."""
    plain = FeatureLoader(loader(), Source())
    wrapped, source = prefetching(ahead)
    assert len(wrapped) == len(plain) == BATCHES
    for epoch in range(3):
        expected, got = list(of_epoch(plain, epoch)), list(of_epoch(wrapped, epoch))
        assert rows_of(got) == rows_of(expected)
        assert all(torch.equal(one["features"], other["features"]) for one, other in zip(got, expected, strict=True))
        assert set(got[0]) == set(expected[0])
    assert not source.coming
    assert not source.given_up
    assert source.arrived == [1] * 3 * BATCHES  # the oldest, as this source has it


@pytest.mark.parametrize("ahead", AHEAD)
def test_no_more_in_flight_than_asked_for(ahead: int) -> None:
    """While a batch is trained on; so memory is ``ahead + 1`` batches. And as many as there are left."""
    wrapped, source = prefetching(ahead)
    for passed_on, _ in enumerate(wrapped, start=1):
        assert len(source.coming) == min(ahead, BATCHES - passed_on)


@pytest.mark.parametrize("ahead", AHEAD)
def test_nothing_is_asked_for_before_the_first_batch_is_wanted(ahead: int) -> None:
    """Lightning makes the first epoch's iterator before it sets the epoch, and some that it never uses."""
    wrapped, source = prefetching(ahead)
    iter(wrapped)
    assert not source.coming
    assert wrapped.state_dict()["batches"] == 0


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_position_is_that_of_the_batches_passed_on(ahead: int, epoch: int) -> None:
    plain = FeatureLoader(loader(), Source())
    wrapped, _ = prefetching(ahead)
    list(of_epoch(plain, 0)), list(of_epoch(wrapped, 0))  # an epoch before, of which nothing is left
    here, there = of_epoch(plain, epoch), of_epoch(wrapped, epoch)
    for passed_on in range(1, BATCHES + 1):
        next(here), next(there)
        state = wrapped.state_dict()
        assert state == plain.state_dict()
        assert state["batches"] == passed_on
        # And from there it goes on, with requests ahead or without.
        left = BATCHES - passed_on
        for goes_on in (prefetching(ahead)[0], FeatureLoader(loader(), Source())):
            goes_on.load_state_dict(state)
            assert goes_on.state_dict() == state
            # After the last batch of an epoch comes the next epoch.
            rest = list(of_epoch(goes_on, epoch if left else epoch + 1))
            assert len(rest) == (left or BATCHES)
            expected = rows_of(of_epoch(FeatureLoader(loader(), Source()), epoch if left else epoch + 1))
            assert rows_of(rest) == expected[-len(rest) :]


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("taken", [1, 3, BATCHES])
def test_an_iterator_that_is_dropped_gives_up_what_is_in_flight(ahead: int, taken: int) -> None:
    wrapped, source = prefetching(ahead)
    expected = rows_of(FeatureLoader(loader(), Source()))
    for _ in range(3):  # as a limit on the batches does, at every validation
        coming = iter(wrapped)
        assert rows_of(islice(coming, taken)) == expected[:taken]
        del coming
        assert not source.coming
        # Saved now, it would go on after those that were passed on.
        assert wrapped.state_dict()["batches"] == taken
    assert len(source.given_up) == 3 * min(ahead, BATCHES - taken)
    assert rows_of(wrapped) == expected


def test_a_dropped_iterator_does_not_count_in_the_next_epoch() -> None:
    wrapped, _ = prefetching(3)
    next(iter(wrapped))
    wrapped.sampler.set_epoch(1)
    assert wrapped.state_dict()["batches"] == 0


def test_a_loaded_position_replaces_what_was_in_flight() -> None:
    wrapped, _ = prefetching(3)
    coming = iter(wrapped)
    next(coming)
    state = {**wrapped.state_dict(), "batches": 2}
    wrapped.load_state_dict(state)
    assert wrapped.state_dict() == state


def test_an_error_of_the_source_is_the_loops() -> None:
    class Broken(Source):
        def take(self, batch: dict[str, Tensor], pending: Wish, arrived: int) -> dict[str, Tensor]:
            self.coming.remove(pending)
            raise RuntimeError("gone")

    source = Broken()
    with pytest.raises(RuntimeError, match="gone"):
        next(iter(PrefetchingLoader(loader(), source, 2)))
    assert len(source.given_up) == 2


@pytest.mark.parametrize("ahead", [0, 2])
def test_everything_else_is_the_wrapped_loaders(ahead: int) -> None:
    wrapped, _ = prefetching(ahead)
    assert wrapped.sampler is wrapped.loader.sampler
    assert wrapped.batch_size == 2
    with pytest.raises(AttributeError):
        _ = wrapped.nothing_of_this_name
