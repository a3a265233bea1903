from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.errors import UserError
from dflash_lit.objective.config import Objective
from dflash_lit.objective.weights import decay_weights, default_gamma, dpace_weights


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (32, 14.0)])
def test_default_gamma(size: int, gamma: float) -> None:
    assert default_gamma(size) == gamma


def test_decay_is_its_formula() -> None:
    expected = [math.exp(-(k - 1) / 5) for k in range(1, 10)]
    torch.testing.assert_close(decay_weights(10, 5.0), torch.tensor(expected))


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=15), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_dpace_is_its_formula(block: list[tuple[float, bool]], alpha: float) -> None:
    slots = len(block)
    survival = []
    for depth in range(slots):
        factors = [((1 - alpha) * q + alpha) if ok else 0.0 for q, ok in block[: depth + 1]]
        survival.append(math.prod(factors))
    expected = [sum(survival[k:]) if block[k][1] else 0.0 for k in range(slots)]
    probabilities, ok = (torch.tensor(column) for column in zip(*block, strict=True))
    got = dpace_weights(probabilities.requires_grad_(), ok, alpha)
    assert not got.requires_grad
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_dpace_with_full_floor_is_linear() -> None:
    assert dpace_weights(torch.rand(2, 7), torch.ones(2, 7).bool(), 1.0).tolist() == [[7, 6, 5, 4, 3, 2, 1]] * 2


def test_objective_weighs_only_labels() -> None:
    ok = torch.tensor([[True, True, False], [False, False, False]])
    probability = torch.full((2, 3), 0.5)
    weights = Objective(weights="decay", gamma=2.0).weigh(probability, ok)
    torch.testing.assert_close(weights, torch.tensor([[1, math.exp(-0.5), 0], [0, 0, 0]]))
    weights = Objective(weights="dpace", alpha=0.5).weigh(probability, ok)
    torch.testing.assert_close(weights, torch.tensor([[0.75 + 0.75**2, 0.75**2, 0], [0, 0, 0]]))


@pytest.mark.parametrize(
    ("field", "value"), [("weights", "uniform"), ("gamma", 0.0), ("alpha", 1.5), ("alpha", -0.1), ("chunk_slots", 0)]
)
def test_wrong_choices_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"objective.{field}="):
        Objective(**{field: value})  # type: ignore[arg-type]
