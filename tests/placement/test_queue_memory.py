"""How many feature batches exist on a drafter: the forecast of its memory counts on it."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lit.placement.feature_loader import PrefetchingLoader
from dflash_lit.placement.link import Begun, Pending


class Source:
    """Answers at once, and counts the answers that somebody holds, whenever it is asked for another one."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.held: list[int] = []

    def ask(self, batch: dict[str, Tensor]) -> Pending:
        features = torch.zeros(8)
        self.made.append(weakref.ref(features))
        self.held.append(sum(one() is not None for one in self.made))
        arrival: Future[Begun] = Future()
        arrival.set_result(None)
        return Pending(arrival, [features], torch.device("cpu"))

    def take(self, batch: dict[str, Tensor], pending: Pending, arrived: int) -> dict[str, Tensor]:
        return {**batch, "features": pending.take()[0]}

    def abandon(self, pending: Any) -> None:
        pass


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_one_batch_more_than_are_asked_for_ahead(ahead: int) -> None:
    """The one that is learnt from; a trainer lets go of it before it wants the next."""
    source = Source()
    for batch in PrefetchingLoader([{} for _ in range(20)], source, ahead):
        del batch
    assert max(source.held) == ahead + 1


def test_memory_for_what_a_lost_target_owes_is_free_at_once() -> None:
    """Although a thread that is to receive it may wait as long as that target is stopped; what has come stays."""
    made = [torch.zeros(8), torch.zeros(8)]
    here: Future[Begun] = Future()
    here.set_result(None)
    came, owed = (Pending(arrival, [one], torch.device("cpu")) for arrival, one in zip((here, Future()), made, strict=True))
    of_thread, refs = owed._buffers, [weakref.ref(one) for one in made]
    made.clear()
    for pending in (came, owed):
        pending.settle()
        pending.let_go()
    assert refs[1]() is None
    assert not of_thread
    assert torch.equal(came.take()[0], torch.zeros(8))
