from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_lit.objective.config import Objective
from dflash_lit.objective.head import HeadResult, head_loss, tree_lengths
from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds

BLOCKS, SLOTS, HIDDEN, VOCAB = 7, 5, 8, 40
OBJECTIVES = [Objective(weights="decay", gamma=3.0), Objective(weights="dpace", alpha=0.4)]


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS), generator=generator)
    lengths = torch.randint(0, SLOTS + 1, (BLOCKS, 1), generator=generator)
    return hidden, head, labels, torch.arange(SLOTS) < lengths


def reference(hidden: Tensor, head: Tensor, labels: Tensor, ok: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    nll = -(hidden.double() @ head.double().T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weights = objective.weigh(torch.exp(-nll.detach()).float(), ok).double()
    return (weights * nll).sum(), weights.sum()


def gradient(result: HeadResult, hidden: Tensor) -> Tensor:
    result.numerator.backward()
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.weights)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chunk_slots", [1, 2 * SLOTS + 1, 10_000])
def test_chunks_add_up_to_the_reference(objective: Objective, reentrant: bool, chunk_slots: int) -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    result = head_loss(hidden, head, labels, ok, objective.weigh, chunk_slots=chunk_slots, use_reentrant=reentrant)
    numerator, denominator = reference(hidden, head, labels, ok, objective)
    torch.testing.assert_close(result.numerator.double(), numerator, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.denominator.double(), denominator, rtol=1e-5, atol=0)
    expected = torch.autograd.grad(numerator, hidden)[0]
    torch.testing.assert_close(gradient(result, hidden), expected, rtol=1e-4, atol=1e-6)
    assert not result.nll.requires_grad
    assert not result.denominator.requires_grad


def test_hits_are_right_argmaxes_with_a_label() -> None:
    hidden, head, labels, ok = case()
    labels[0] = (hidden[0] @ head.T).argmax(-1)
    ok[0] = torch.tensor([True, True, False, False, False])
    with torch.no_grad():
        result = head_loss(hidden, head, labels, ok, OBJECTIVES[0].weigh)
    assert torch.equal(result.hit, ((hidden @ head.T).argmax(-1) == labels) & ok)
    assert result.hit[0].tolist() == [True, True, False, False, False]
    assert (result.nll[~ok] == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.weights)
@pytest.mark.parametrize("reentrant", [False, True])
def test_without_labels_the_loss_is_a_connected_zero(objective: Objective, reentrant: bool) -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    result = head_loss(hidden, head, labels, torch.zeros_like(ok), objective.weigh, chunk_slots=5, use_reentrant=reentrant)
    assert result.numerator.item() == result.denominator.item() == 0
    assert (gradient(result, hidden) == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.weights)
def test_extreme_logits_stay_finite(objective: Objective) -> None:
    hidden, head, labels, ok = case()
    hidden = (hidden * 1e6).requires_grad_()
    result = head_loss(hidden, head, labels, ok, objective.weigh)
    assert result.numerator.isfinite()
    assert gradient(result, hidden).isfinite().all()


@pytest.mark.parametrize("chunk_slots", [1, 11, 10_000])
def test_tree_lengths_do_not_depend_on_chunks(chunk_slots: int) -> None:
    hidden, head, labels, _ = case(seed=3)
    ranked = (hidden @ head.T).topk(2, dim=-1).indices
    labels[:4] = ranked[:4, :, 0]
    labels[1:4, 2] = ranked[1:4, 2, 1]  # a second choice halfway
    budgets = [1, 16, 64, 256]
    lengths = tree_lengths(hidden, head, labels, budgets, chunk_slots=chunk_slots)
    log_probs = (hidden @ head.T).log_softmax(-1)
    scores = path_scores(log_probs.gather(-1, labels[..., None])[..., 0])
    assert torch.equal(lengths, accepted_in_tree(scores, tree_thresholds(log_probs.sort(descending=True).values, budgets)))
    assert (lengths[:, 1:] >= lengths[:, :-1]).all()
    assert (lengths[0] > 0).all()
