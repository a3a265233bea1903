from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_lit.objective.config import Objective
from dflash_lit.objective.head import HeadResult, fused_available, head_loss, tree_lengths
from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds
from tests.helpers import random

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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chunk_slots", [1, 2 * SLOTS + 1, 10_000])
def test_weights_may_depend_on_the_largest_log_probabilities(reentrant: bool, chunk_slots: int) -> None:
    objective = Objective(weights="tree_survival", tree_budget=6, floor_weights="dpace")
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    result = head_loss(
        hidden, head, labels, ok, objective.weigh, top=objective.top, chunk_slots=chunk_slots, use_reentrant=reentrant
    )
    log_q = (hidden.double() @ head.double().T).log_softmax(-1)
    nll = -log_q.gather(-1, labels[..., None])[..., 0]
    top = torch.where(ok[..., None], log_q.sort(dim=-1, descending=True).values, -torch.inf).detach().float()
    weights = objective.weigh(torch.exp(-nll.detach()).float(), ok, top).double()
    assert len(weights[ok].unique()) > SLOTS  # of each block its own
    torch.testing.assert_close(result.numerator.double(), (weights * nll).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result.denominator.double(), weights.sum(), rtol=1e-5, atol=0)
    expected = torch.autograd.grad((weights * nll).sum(), hidden)[0]
    torch.testing.assert_close(gradient(result, hidden), expected, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.weights)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chunk_slots", [1, 2 * SLOTS + 1, 10_000])
def test_soft_labels_are_the_forward_divergence(objective: Objective, reentrant: bool, chunk_slots: int) -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    teacher = random(BLOCKS, SLOTS, HIDDEN, seed=9).requires_grad_()
    settings = {"chunk_slots": chunk_slots, "use_reentrant": reentrant}
    result = head_loss(hidden, head, labels, ok, objective.weigh, teacher=teacher, temperature=0.7, **settings)
    log_q = (hidden.double() @ head.double().T).log_softmax(-1)
    log_p = (teacher.detach().double() @ head.double().T / 0.7).log_softmax(-1)
    nll = -log_q.gather(-1, labels[..., None])[..., 0].detach() * ok
    weights = objective.weigh(torch.exp(-nll).float(), ok).double()
    numerator = (weights * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()
    torch.testing.assert_close(result.numerator.double(), numerator, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.denominator.double(), weights.sum(), rtol=1e-5, atol=0)
    # The statistics and the weights are still those of the labels.
    torch.testing.assert_close(result.nll.double(), nll, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.rank, head_loss(hidden, head, labels, ok, objective.weigh).rank)
    expected = torch.autograd.grad(numerator, hidden)[0]
    torch.testing.assert_close(gradient(result, hidden), expected, rtol=1e-4, atol=1e-6)
    assert teacher.grad is None


def test_the_gradient_of_soft_labels_is_q_minus_p() -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    teacher = random(BLOCKS, SLOTS, HIDDEN, seed=9)
    teacher[~ok] = torch.nan  # anything where there is no label
    result = head_loss(hidden, head, labels, ok, lambda _, ok, top: ok.float(), teacher=teacher)
    difference = (hidden @ head.T).softmax(-1) - (teacher @ head.T).softmax(-1)
    expected = torch.where(ok[..., None], difference @ head, 0.0)
    torch.testing.assert_close(gradient(result, hidden), expected, rtol=1e-4, atol=1e-5)


def test_a_drafter_equal_to_its_teacher_has_nothing_to_learn() -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    result = head_loss(hidden, head, labels, ok, OBJECTIVES[1].weigh, teacher=hidden)
    assert result.numerator.item() == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(gradient(result, hidden), torch.zeros_like(hidden), rtol=0, atol=1e-5)


def test_rank_is_the_place_in_the_order() -> None:
    hidden, head, labels, ok = case()
    head = head.round()
    hidden = hidden.round()  # whole numbers tie
    with torch.no_grad():
        result = head_loss(hidden, head, labels, ok, OBJECTIVES[0].weigh, chunk_slots=SLOTS)
    order = (hidden @ head.T).argsort(dim=-1, descending=True, stable=True)
    place = (order == labels[..., None]).int().argmax(-1)
    assert torch.equal(result.rank, torch.where(ok, place, VOCAB).int())
    assert torch.equal(result.hit, (place == 0) & ok)


@pytest.mark.parametrize(("top", "count"), [(1, 1), (6, 6), (VOCAB + 9, VOCAB)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_top_holds_the_largest_and_the_label_to_the_last_bit(top: int, count: int, reentrant: bool) -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    result = head_loss(hidden, head, labels, ok, OBJECTIVES[0].weigh, top=top, chunk_slots=11, use_reentrant=reentrant)
    assert result.top is not None
    assert not result.top.requires_grad
    expected = (hidden @ head.T).log_softmax(-1).sort(descending=True).values[..., :count]
    torch.testing.assert_close(result.top, torch.where(ok[..., None], expected, -torch.inf), rtol=1e-5, atol=1e-5)
    inside = result.rank < count
    entry = result.top.gather(-1, result.rank.long().clamp(max=count - 1)[..., None])[..., 0]
    assert torch.equal(entry[inside], -result.nll[inside])
    assert gradient(result, hidden).isfinite().all()
    assert result.dropped.item() == 0


def test_a_weight_of_zero_takes_an_impossible_label_out() -> None:
    hidden, head, labels, ok = case()
    hidden[..., 0], head[7, 0], ok[:] = 2.0, -3e38, True  # 2 x -3e38 is -inf
    labels[labels == 7] = 8
    labels[2, 3] = 7
    hidden.requires_grad_()
    result = head_loss(hidden, head, labels, ok, lambda probability, *_: (probability > 0).float())
    assert result.nll[2, 3] == torch.inf
    assert result.rank[2, 3] == VOCAB - 1
    assert result.numerator.isfinite()
    assert gradient(result, hidden).isfinite().all()
    assert head_loss(hidden, head, labels, ok, lambda _, ok, top: ok.float()).numerator == torch.inf


def test_autocast_changes_nothing() -> None:
    hidden, head, labels, ok = case()
    hidden.requires_grad_()
    plain = head_loss(hidden, head, labels, ok, OBJECTIVES[1].weigh)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = head_loss(hidden, head.double(), labels, ok, OBJECTIVES[1].weigh)
    assert torch.equal(plain.nll, mixed.nll)
    torch.testing.assert_close(*(torch.autograd.grad(r.numerator, hidden)[0] for r in (plain, mixed)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("top", -1), ("chunk_slots", 0)])
def test_impossible_settings(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        head_loss(*case(), OBJECTIVES[0].weigh, **{name: value})


def test_a_cpu_has_no_fused_head() -> None:
    assert not fused_available(torch.device("cpu"))


@pytest.mark.parametrize("chunk_slots", [1, 11, 10_000])
def test_tree_lengths_do_not_depend_on_chunks(chunk_slots: int) -> None:
    hidden, head, labels, _ = case(seed=3)
    ranked = (hidden @ head.T).topk(2, dim=-1).indices
    labels[:4] = ranked[:4, :, 0]
    labels[1:4, 2] = ranked[1:4, 2, 1]  # a second choice halfway
    budgets = [1, 16, 64, 256]
    ok = torch.ones_like(labels, dtype=torch.bool)
    with torch.no_grad():
        result = head_loss(hidden, head, labels, ok, OBJECTIVES[0].weigh, top=256, chunk_slots=chunk_slots)
    lengths = tree_lengths(result, budgets)
    log_probs = (hidden @ head.T).log_softmax(-1)
    scores = path_scores(log_probs.gather(-1, labels[..., None])[..., 0])
    assert torch.equal(lengths, accepted_in_tree(scores, tree_thresholds(log_probs.sort(descending=True).values, budgets)))
    assert (lengths[:, 1:] >= lengths[:, :-1]).all()
    assert (lengths[0] > 0).all()


def test_a_slot_without_a_label_ends_the_tree() -> None:
    hidden, head, labels, _ = case(seed=3)
    labels = (hidden @ head.T).argmax(-1)
    lengths = torch.arange(BLOCKS) % (SLOTS + 1)
    ok = torch.arange(SLOTS) < lengths[:, None]
    with torch.no_grad():
        result = head_loss(hidden, head, labels, ok, OBJECTIVES[0].weigh, top=16)
        whole = head_loss(hidden, head, labels, torch.ones_like(ok), OBJECTIVES[0].weigh, top=16)
        cut = [tree_lengths(replace(whole, nll=whole.nll[:, :n], top=whole.top[:, :n]), [16]) for n in range(1, SLOTS + 1)]
    got = tree_lengths(result, [16])
    for block, length in enumerate(lengths.tolist()):
        assert torch.equal(got[block], cut[length - 1][block] if length else torch.zeros(1, dtype=torch.int64))


def test_tree_lengths_need_the_largest() -> None:
    with pytest.raises(ValueError, match="top=max"):
        tree_lengths(head_loss(*case(), OBJECTIVES[0].weigh), [4])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.weights)
@pytest.mark.parametrize("soft", [False, True])
def test_nan_is_neither_a_hit_nor_a_loss_of_zero(objective: Objective, soft: bool) -> None:
    hidden, head, labels, ok = case()
    ok[2] = True
    teacher = torch.randn_like(hidden) if soft else None
    (teacher if teacher is not None else hidden)[2, 1] = torch.nan
    hidden = hidden.requires_grad_()
    result = head_loss(hidden, head, labels, ok, objective.weigh, teacher=teacher)
    assert result.numerator.isnan()
    if not soft:
        assert result.rank[2, 1] == VOCAB
        assert gradient(result, hidden)[2, 1].isnan().all()
