from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.errors import UserError
from dflash_lit.objective.config import Objective
from dflash_lit.objective.weights import decay_weights, default_gamma, dpace_weights, tree_survival_weights


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


def tops(blocks: int, slots: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [M, D, V], labels [M, D], and blocks of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(blocks, slots, vocabulary, generator=generator)).log_softmax(-1)
    labels = torch.randint(0, vocabulary, (blocks, slots), generator=generator)
    lengths = torch.randint(1, slots + 1, (blocks, 1), generator=generator)
    lengths[0] = slots
    return log_probs, labels, torch.arange(slots) < lengths


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tree_survival_is_the_gradient_of_the_smoothed_length(temperature: float) -> None:
    """Against autograd on sum_d sigmoid((c_d - t) / T), with t from all prefixes one by one."""
    budget = 6
    log_probs, labels, ok = tops(8, 4, 5)
    label = log_probs.gather(-1, labels[..., None])[..., 0].requires_grad_()
    surrogate = torch.zeros(())
    for block in range(8):
        depths = int(ok[block].sum())
        prefixes = [
            sum(log_probs[block, d, token].item() for d, token in enumerate(prefix))
            for depth in range(1, depths + 1)
            for prefix in itertools.product(range(5), repeat=depth)
        ]
        edge = sorted(prefixes, reverse=True)[budget - 1] if len(prefixes) >= budget else -math.inf
        surrogate = surrogate + torch.sigmoid((label[block, :depths].cumsum(0) - edge) / temperature).sum()
    (expected,) = torch.autograd.grad(surrogate, label)
    top = torch.where(ok[..., None], log_probs.sort(dim=-1, descending=True).values, -torch.inf)
    got = tree_survival_weights(label.exp(), ok, top, budget=budget, temperature=temperature)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert (got[0] > 0).all()


def test_a_tree_of_everything_leaves_nothing_to_gain() -> None:
    log_probs, labels, ok = tops(3, 2, 4)
    top = log_probs.sort(dim=-1, descending=True).values
    probability = log_probs.gather(-1, labels[..., None])[..., 0].exp()
    assert not tree_survival_weights(probability, ok, top, budget=4 + 16 + 1, temperature=2.0).any()
    # An impossible token is outside of any tree, and says nothing of the slots before it.
    probability[:, 1] = 0.0
    weights = tree_survival_weights(probability, torch.ones_like(ok), top, budget=3, temperature=2.0)
    assert weights.isfinite().all()
    assert (weights[:, 0] > 0).all()
    assert not weights[:, 1].any()


@pytest.mark.parametrize("floor_weights", ["decay", "dpace"])
def test_the_floor_has_its_share_of_the_weight(floor_weights: str) -> None:
    log_probs, labels, ok = tops(9, 5, 7)
    top = log_probs.sort(dim=-1, descending=True).values
    probability = log_probs.gather(-1, labels[..., None])[..., 0].exp()
    objective = Objective(weights="tree_survival", tree_budget=4, floor=0.25, floor_weights=floor_weights)
    tree, floor = objective.parts(probability, ok, top)
    torch.testing.assert_close(floor, Objective(weights=floor_weights).weigh(probability, ok))
    mixed = objective.weigh(probability, ok, top, floor_ratio=floor.sum() / tree.sum())
    torch.testing.assert_close(0.25 * floor.sum() / mixed.sum(), torch.tensor(0.25))
    assert not mixed[~ok].any()
    with pytest.raises(ValueError, match=r"top=objective\.top"):
        objective.weigh(probability, ok)


def test_objective_weighs_only_labels() -> None:
    ok = torch.tensor([[True, True, False], [False, False, False]])
    probability = torch.full((2, 3), 0.5)
    weights = Objective(weights="decay", gamma=2.0).weigh(probability, ok)
    torch.testing.assert_close(weights, torch.tensor([[1, math.exp(-0.5), 0], [0, 0, 0]]))
    weights = Objective(weights="dpace", alpha=0.5).weigh(probability, ok)
    torch.testing.assert_close(weights, torch.tensor([[0.75 + 0.75**2, 0.75**2, 0], [0, 0, 0]]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "uniform"),
        ("gamma", 0.0),
        ("alpha", 1.5),
        ("alpha", -0.1),
        ("chunk_slots", 0),
        ("tree_budget", 0),
        ("tree_temperature", 0.0),
        ("floor", 0.0),
        ("floor", 1.1),
        ("floor_weights", "tree_survival"),
    ],
)
def test_wrong_choices_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"objective.{field}="):
        Objective(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", [0.0, 1e-44, 1e-37, 2.0])
def test_weights_stay_finite_where_hardly_a_block_is_near_its_edge(tree: float) -> None:
    objective = Objective(weights="tree_survival", tree_temperature=0.01, tree_budget=1)
    ratio = objective.floor_ratio(torch.tensor(tree), torch.tensor(4.0))
    assert float(ratio) == {0.0: 1.0, 2.0: 2.0}.get(tree, 1e6)
    # The first block is on its edge, the second infinitely far from it.
    probability, top = torch.tensor([[0.5, 0.5], [0.1, 0.1]]), torch.full((2, 2, 1), 0.5).log()
    weights = objective.weigh(probability, torch.ones(2, 2, dtype=torch.bool), top, floor_ratio=ratio)
    assert weights.isfinite().all()
    assert (weights[1] > 0).all()
