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
