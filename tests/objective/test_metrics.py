from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.objective.metrics import Ratios, accepted_lengths


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000)), min_size=1, max_size=20), st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_ratios_are_exact_over_any_split(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    whole, parts = Ratios(2), Ratios(2)
    numerators = torch.tensor([[n, 2 * n] for n, _ in pairs], dtype=torch.float64)
    denominators = torch.tensor([[d, d + 1] for _, d in pairs], dtype=torch.float64)
    whole.update(numerators.sum(0), denominators.sum(0))
    start = 0
    while start < len(pairs):
        stop = data.draw(st.integers(start + 1, len(pairs)))
        parts.update(numerators[start:stop].sum(0), denominators[start:stop].sum(0))
        start = stop
    torch.testing.assert_close(parts.compute(), whole.compute(), rtol=0, atol=0, equal_nan=True)


def test_nothing_counted_is_nan_and_a_scalar_denominator_serves_all() -> None:
    ratios = Ratios(2)
    ratios.update(torch.tensor([0, 0]), torch.tensor(0))
    assert ratios.compute().isnan().all()
    ratios.update(torch.tensor([1, 2]), torch.tensor(4))
    assert ratios.compute().tolist() == [0.25, 0.5]
    ratios.reset()
    assert ratios.numerators.tolist() == ratios.denominators.tolist() == [0, 0]
    assert not ratios.state_dict()


def test_accepted_lengths_count_leading_hits() -> None:
    hit = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert accepted_lengths(hit).tolist() == [2, 0, 4]
