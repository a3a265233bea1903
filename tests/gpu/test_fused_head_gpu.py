"""The Triton head at real vocabulary sizes, in bf16, on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lit.objective.config import Objective
from dflash_lit.objective.head import HeadResult, Weigh, fused_available, head_loss, tree_lengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not fused_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")), reason="no GPU"),
]

BLOCKS, SLOTS, HIDDEN, CHUNK = 40, 15, 256, 256  # 600 rows in three chunks of 200
VOCABS = [151936, 32003]
DPACE: Weigh = Objective(weights="dpace").weigh


def fused(*args: Any, **settings: Any) -> HeadResult:
    from dflash_lit.objective.fused_head import fused_head_loss  # Triton need not be there where these are skipped

    return fused_head_loss(*args, **settings)


def case(
    vocab: int, *, blocks: int = BLOCKS, size: int = HIDDEN, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, labels, label_ok, teacher; half of the labels are likely ones."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    hidden, teacher = (draw(blocks, SLOTS, size).bfloat16() for _ in range(2))
    head = (3 * draw(vocab, size) / size**0.5).bfloat16()
    labels = torch.randint(0, vocab, (blocks, SLOTS), generator=generator, device="cuda")
    labels[::2] = (hidden[::2] @ head.T).argmax(-1)
    ok = torch.rand(blocks, SLOTS, generator=generator, device="cuda") < 0.8
    return hidden.requires_grad_(), head, labels, ok, teacher


def bf16_logits(hidden: Tensor, head: Tensor, chunk: int = 200) -> Tensor:
    """fp32 [M, B-1, V], by products of the same shapes and strides as in the fused head: another algorithm rounds otherwise."""
    rows = hidden.detach().flatten(0, 1)
    width = -(-head.shape[0] // 32) * 32
    logits = []
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        out = part.new_empty(len(part), width)[:, : head.shape[0]]
        logits.append(torch.mm(part, head.T, out=out).float())
    return torch.cat(logits).view(*hidden.shape[:2], -1)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("soft", [False, True])
def test_against_float64_from_the_same_logits(vocab: int, soft: bool) -> None:
    hidden, head, labels, ok, teacher = case(vocab)
    result = fused(hidden, head, labels, ok, DPACE, teacher=teacher if soft else None, temperature=1.3, chunk_slots=CHUNK)
    log_q = bf16_logits(hidden, head).double().log_softmax(-1)
    nll = torch.where(ok, -log_q.gather(-1, labels[..., None])[..., 0], 0.0)
    difference = log_q.exp()
    if soft:
        log_p = (bf16_logits(teacher, head).double() / 1.3).log_softmax(-1)
        loss = torch.where(ok, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
        difference -= log_p.exp()
    else:
        loss = nll
        difference.scatter_add_(-1, labels[..., None], torch.full_like(nll, -1.0)[..., None])
    # fp32 sums of 150,000 terms in a tree, with exp2 good to 2 ulp.
    torch.testing.assert_close(result.nll.double(), nll, rtol=1e-5, atol=1e-5)
    weights = DPACE(torch.exp(-nll).float(), ok).double()
    torch.testing.assert_close(result.numerator.double(), (weights * loss).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result.denominator.double(), weights.sum(), rtol=1e-5, atol=0)

    gradient = torch.autograd.grad(result.numerator, hidden)[0]
    assert gradient.dtype == torch.bfloat16
    expected = weights[..., None] * (difference @ head.double())
    # Each of q - p is rounded to bf16 (2^-9 of itself), then the product, then the product with the weight; cuBLAS may add up
    # partial products in bf16.
    terms = weights[..., None] * (difference.abs() @ head.double().abs())
    assert ((gradient.double() - expected).abs() <= 2**-7 * (expected.abs() + terms)).all()
    # The bound of the worst case is generous: the error as a whole is of the order of bf16's.
    assert (gradient.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("soft", [False, True])
def test_against_the_readable_head(vocab: int, soft: bool) -> None:
    hidden, head, labels, ok, teacher = case(vocab)
    soft_labels = teacher if soft else None
    got = fused(hidden, head, labels, ok, DPACE, teacher=soft_labels, top=64, chunk_slots=CHUNK)
    expected = head_loss(hidden, head, labels, ok, DPACE, teacher=soft_labels, top=64, chunk_slots=CHUNK)
    # The two products may round single logits differently: one step of bf16 is at most 2^-7 of the logit.
    step = 2**-7 * float((hidden.detach() @ head.T).abs().max())
    torch.testing.assert_close(got.nll, expected.nll, rtol=0, atol=step)
    torch.testing.assert_close(got.top, expected.top, rtol=0, atol=step)
    torch.testing.assert_close(got.numerator, expected.numerator, rtol=2e-3, atol=0)
    torch.testing.assert_close(got.denominator, expected.denominator, rtol=2e-3, atol=0)
    assert (got.hit == expected.hit).float().mean() > 0.97  # the largest logit may be a tie in one of them
    ours, theirs = (torch.autograd.grad(result.numerator, hidden)[0].float() for result in (got, expected))
    assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("count", [1, 64, 256])
@pytest.mark.parametrize("train", [False, True])
def test_rank_and_top_are_exact(vocab: int, count: int, train: bool) -> None:
    hidden, head, labels, ok, _ = case(vocab)
    logits = bf16_logits(hidden, head)
    best = logits.topk(count, dim=-1).values
    # Labels at the last returned height: where it decides the length of a tree.
    labels[1::2] = logits[1::2].argsort(dim=-1, descending=True, stable=True)[..., count - 1]
    with torch.set_grad_enabled(train):
        result = fused(hidden, head, labels, ok, DPACE, top=count, chunk_slots=CHUNK)
    assert result.top is not None
    # The largest log-probability is -log(sum): the others follow from it without rounding.
    expected = (best - best[..., :1]) + result.top[..., :1]
    assert torch.equal(result.top, torch.where(ok[..., None], expected, -torch.inf))
    reached = logits.gather(-1, labels[..., None])
    ids = torch.arange(vocab, device="cuda")
    rank = ((logits > reached) | ((logits == reached) & (ids < labels[..., None]))).sum(-1)
    assert torch.equal(result.rank.long(), torch.where(ok, rank, vocab))
    entry = result.top.gather(-1, result.rank.long().clamp(max=count - 1)[..., None])[..., 0]
    inside = result.rank < count
    assert inside.any()
    assert torch.equal(entry[inside], -result.nll[inside])
    if train:  # what is returned was read before the gradient was written
        plain = fused(hidden, head, labels, ok, DPACE, chunk_slots=CHUNK)
        one, two = (torch.autograd.grad(r.numerator, hidden)[0] for r in (result, plain))
        assert torch.equal(one, two)


def test_fp32() -> None:
    hidden, head, labels, ok, teacher = case(5003, blocks=6)
    hidden, head, teacher = hidden.detach().float().requires_grad_(), head.float(), teacher.float()
    got = fused(hidden, head, labels, ok, DPACE, teacher=teacher, top=16, chunk_slots=50)
    expected = head_loss(hidden, head, labels, ok, DPACE, teacher=teacher, top=16, chunk_slots=50)
    for name in ("numerator", "denominator", "nll", "top"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(result.numerator, hidden)[0] for result in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    budgets = [1, 4, 16]
    assert torch.equal(tree_lengths(got, budgets), tree_lengths(expected, budgets))


def test_a_chunk_of_more_than_two_to_the_31_logits() -> None:
    vocab, blocks, size = 151936, 1000, 8  # 15,000 rows x 151,936 = 2.28e9
    generator = torch.Generator("cuda").manual_seed(0)
    # Small whole numbers: every logit is exact in bf16 (at most 32), whatever the algorithm of the product.
    hidden, head = (
        torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()
        for shape in ((blocks, SLOTS, size), (vocab, size))
    )
    labels = torch.randint(0, vocab, (blocks, SLOTS), generator=generator, device="cuda")
    ok = torch.rand(blocks, SLOTS, generator=generator, device="cuda") < 0.9
    hidden.requires_grad_()
    whole = fused(hidden, head, labels, ok, DPACE, chunk_slots=blocks * SLOTS, top=8)
    gradient = torch.autograd.grad(whole.numerator, hidden)[0]
    last = slice(blocks - 40, None)
    part = hidden[last].detach().requires_grad_()
    few = fused(part, head, labels[last], ok[last], DPACE, top=8)
    assert torch.equal(whole.rank[last], few.rank)
    torch.testing.assert_close(whole.nll[last], few.nll, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.top[last], few.top, rtol=1e-6, atol=1e-6)  # type: ignore[index]
    expected = torch.autograd.grad(few.numerator, part)[0]
    assert expected.abs().max() > 0
    # Another shape of the product may add up in another order, in bf16.
    torch.testing.assert_close(gradient[last].float(), expected.float(), rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize("settings", [{}, {"capacity": 400}, {"top": 64}, {"soft": True, "capacity": 400, "top": 64}], ids=str)
def test_nothing_waits_for_the_device(settings: dict[str, Any]) -> None:
    hidden, head, labels, ok, teacher = case(32003)
    settings = dict(settings)
    soft_labels = teacher if settings.pop("soft", False) else None

    def step() -> None:
        result = fused(hidden, head, labels, ok, DPACE, teacher=soft_labels, chunk_slots=CHUNK, **settings)
        (result.numerator * 0.5).backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capacity_drops_the_latest_slots() -> None:
    hidden, head, labels, ok, _ = case(32003)
    count = int(ok.sum())
    whole = fused(hidden, head, labels, ok, DPACE, chunk_slots=CHUNK)
    enough = fused(hidden, head, labels, ok, DPACE, chunk_slots=CHUNK, capacity=count)
    step = 2**-7 * float((hidden.detach() @ head.T).abs().max())
    torch.testing.assert_close(enough.nll, whole.nll, rtol=0, atol=step)
    assert enough.dropped.item() == 0
    decay = Objective(weights="decay").weigh  # D-PACE gives none behind a gap
    few = fused(hidden, head, labels, ok, decay, chunk_slots=CHUNK, capacity=count - 30)
    assert few.dropped.item() == 30
    place = ok.T.flatten().cumsum(0).view(SLOTS, BLOCKS).T
    kept = ok & (place <= count - 30)
    assert torch.equal(few.rank < 32003, kept)
    gradient = torch.autograd.grad(few.numerator, hidden)[0]
    assert (gradient[~kept] == 0).all()
    assert gradient[kept].any(dim=-1).all()


def test_it_leaves_no_logits_behind() -> None:
    hidden, head, labels, ok, _ = case(151936)
    fused(hidden, head, labels, ok, DPACE, chunk_slots=100).numerator.backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = fused(hidden, head, labels, ok, DPACE, chunk_slots=100)
    chunk = 100 * 151936 * 2
    assert torch.cuda.max_memory_allocated() - before < 1.2 * chunk
    assert torch.cuda.memory_allocated() - before < 0.05 * chunk  # the gradient of the hidden states, and statistics
    del result
