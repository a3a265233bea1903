"""The Triton head against the readable one and against float64, on a CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from dflash_lit.objective import fused_head  # noqa: E402
from dflash_lit.objective.config import Objective  # noqa: E402
from dflash_lit.objective.fused_head import fused_head_loss  # noqa: E402
from dflash_lit.objective.head import HeadResult, Weigh, head_loss, tree_lengths  # noqa: E402

if not torch.cuda.is_available() and isinstance(triton.language.sum, triton.JITFunction):
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1 was set: set it first, in tests/conftest.py")

if not torch.cuda.is_available():
    import numpy as np

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(
            "the interpreter of this Triton does not work with this NumPy (it makes ints of arrays)", allow_module_level=True
        )

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Impossible tokens meet in branches that are not taken; numpy, which stands in for the GPU, mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def suffix_sums(probability: Tensor, ok: Tensor, top: Tensor | None = None) -> Tensor:
    """Weights in which every slot depends on all later ones, and whose first slot of a block may be 0."""
    weights = (probability * ok).flip(-1).cumsum(-1).flip(-1)
    return torch.where(probability[:, :1] > 0.01, weights, 0.0) * ok


WEIGHS: dict[str, Weigh] = {
    "decay": Objective(weights="decay", gamma=2.0).weigh,
    "dpace": Objective(weights="dpace", alpha=0.4).weigh,
    "custom": suffix_sums,
}


class Case:
    """Inputs of the two losses."""

    def __init__(
        self, blocks: int = 4, slots: int = 3, size: int = 8, vocab: int = 75, *, seed: int = 0, whole: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            # Small whole numbers make exact logits with many ties.
            drawn = torch.randint(-2, 3, shape, generator=generator).float()
            return (drawn if whole else torch.randn(shape, generator=generator)).to(DEVICE)

        self.hidden = draw(blocks, slots, size).requires_grad_()
        self.head, self.teacher = draw(vocab, size), draw(blocks, slots, size)
        self.labels = torch.randint(0, vocab, (blocks, slots), generator=generator).to(DEVICE)
        self.ok = (torch.rand(blocks, slots, generator=generator) < 0.75).to(DEVICE)

    def to(self, dtype: torch.dtype) -> Case:
        self.hidden = self.hidden.detach().to(dtype).requires_grad_()
        self.head, self.teacher = self.head.to(dtype), self.teacher.to(dtype)
        return self

    def fused(self, weigh: Weigh = WEIGHS["dpace"], *, soft: bool = False, **changes: Any) -> HeadResult:
        teacher = self.teacher if soft else None
        return fused_head_loss(self.hidden, self.head, self.labels, self.ok, weigh, teacher=teacher, **changes)

    def eager(self, weigh: Weigh = WEIGHS["dpace"], *, soft: bool = False, **changes: Any) -> HeadResult:
        teacher = self.teacher if soft else None
        return head_loss(self.hidden, self.head, self.labels, self.ok, weigh, teacher=teacher, **changes)

    def exact(self, weigh: Weigh, *, soft: bool = False, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator, denominator and nll in float64."""
        log_q = (self.hidden.double() @ self.head.double().T).log_softmax(-1)
        nll = torch.where(self.ok, -log_q.gather(-1, self.labels[..., None])[..., 0], 0.0)
        loss = nll
        if soft:
            log_p = (self.teacher.double() @ self.head.double().T / temperature).log_softmax(-1)
            loss = torch.where(self.ok, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
        weights = weigh(torch.exp(-nll.detach()).float(), self.ok, None).double()
        return (weights * loss).sum(), weights.sum(), nll.detach()

    def gradient(self, numerator: Tensor) -> Tensor:
        return torch.autograd.grad(numerator, self.hidden, retain_graph=True)[0]


def check_same(case: Case, got: HeadResult, expected: HeadResult, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for name in ("numerator", "denominator", "nll"):
        torch.testing.assert_close(
            getattr(got, name), getattr(expected, name), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert getattr(got, name).dtype == torch.float32
    assert torch.equal(got.rank, expected.rank)
    assert got.rank.dtype == torch.int32
    assert (got.top is None) == (expected.top is None)
    if got.top is not None and expected.top is not None:
        torch.testing.assert_close(got.top, expected.top, rtol=rtol, atol=atol)
    torch.testing.assert_close(case.gradient(got.numerator), case.gradient(expected.numerator), rtol=rtol, atol=atol)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "BLOCK", 64)  # so that rows take several


@pytest.mark.parametrize("name", list(WEIGHS))
@pytest.mark.parametrize("soft", [False, True])
def test_loss_and_gradient_are_those_of_float64(name: str, soft: bool) -> None:
    case, weigh = Case(vocab=150), WEIGHS[name]
    temperature = {"temperature": 1.7} if soft else {}
    got = case.fused(weigh, soft=soft, chunk_slots=5, **temperature)
    numerator, denominator, nll = case.exact(weigh, soft=soft, **temperature)
    torch.testing.assert_close(got.numerator.double(), numerator, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.denominator.double(), denominator, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.nll.double(), nll, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.gradient(got.numerator), case.gradient(numerator), rtol=1e-4, atol=1e-6)
    order = (case.hidden @ case.head.T).argsort(dim=-1, descending=True, stable=True)
    rank = (order == case.labels[..., None]).int().argmax(dim=-1).int()
    assert torch.equal(got.rank, torch.where(case.ok, rank, 150))
    assert torch.equal(got.hit, (got.rank == 0) & case.ok)
    assert got.dropped.item() == 0


@given(
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    st.integers(1, 140),
    st.integers(1, 7),
    st.sampled_from([32, 64, 8192]),
    st.booleans(),
    st.sampled_from([0, 1, 3, 1000]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_agrees_with_the_reference(
    seed: int, shape: tuple[int, int, int], vocab: int, chunk_slots: int, block: int, soft: bool, top: int
) -> None:
    case = Case(*shape, vocab, seed=seed, whole=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "BLOCK", block)
        got = case.fused(soft=soft, chunk_slots=chunk_slots, top=top)
    check_same(case, got, case.eager(soft=soft, chunk_slots=chunk_slots, top=top))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 127])
@pytest.mark.parametrize("soft", [False, True])
def test_vocabularies_around_a_tile(vocab: int, soft: bool) -> None:
    case = Case(2, 2, vocab=vocab)
    check_same(case, case.fused(soft=soft), case.eager(soft=soft))


@pytest.mark.parametrize(("vocab", "top"), [(300, 3), (300, 1), (41, 41), (41, 99), (64, 2)])
def test_top_is_exact(vocab: int, top: int) -> None:
    case = Case(2, 2, vocab=vocab, whole=True, seed=2)
    logits = case.hidden.detach() @ case.head.T
    # Labels at every height, the last of the returned ones among them: it decides a tree's length.
    order = logits.argsort(dim=-1, descending=True, stable=True)
    for slot, height in enumerate((0, min(top, vocab) - 1, min(top, vocab - 1), vocab - 1)):
        case.labels.view(-1)[slot] = order.view(-1, vocab)[slot, height]
    case.ok[:] = True
    case.ok[0, 0] = False
    result = case.fused(top=top, chunk_slots=3)
    count = min(top, vocab)
    assert result.top is not None
    assert result.top.shape == (2, 2, count)
    best = logits.sort(dim=-1, descending=True).values[..., :count]
    # The largest log-probability is -log(sum), so that the others follow without rounding.
    expected = (best - best[..., :1]) + result.top[..., :1]
    assert torch.equal(result.top, torch.where(case.ok[..., None], expected, -torch.inf))
    inside = result.rank < count
    entry = result.top.gather(-1, result.rank.long().clamp(max=count - 1)[..., None])[..., 0]
    assert torch.equal(entry[inside], -result.nll[inside])
    assert inside.any()
    check_same(case, result, case.eager(top=top))


def test_the_largest_may_all_be_in_one_group() -> None:
    case = Case(1, 3, size=4, vocab=200, whole=True)
    case.ok[:] = True
    with torch.no_grad():
        case.head[40:50] = 0.5 * case.hidden[0, 1] + 1
        case.head[190:] = case.head[40:50]
    result = case.fused(top=5)
    assert result.top is not None
    torch.testing.assert_close(result.top, (case.hidden @ case.head.T).log_softmax(-1).topk(5).values, rtol=1e-5, atol=1e-5)


def test_tree_lengths_from_both() -> None:
    case = Case(6, 4, vocab=90, whole=True, seed=3)
    ranked = (case.hidden @ case.head.T).topk(2, dim=-1).indices
    case.labels[:3] = ranked[:3, :, 0]
    case.labels[1:3, 2] = ranked[1:3, 2, 1]
    budgets = [1, 4, 30]
    lengths = tree_lengths(case.fused(top=30), budgets)
    assert torch.equal(lengths, tree_lengths(case.eager(top=30), budgets))
    assert (lengths > 0).any()


@pytest.mark.parametrize("soft", [False, True])
def test_weights_may_depend_on_the_largest_log_probabilities(soft: bool) -> None:
    case, objective = Case(blocks=6, slots=4, vocab=150), Objective(weights="tree_survival", tree_budget=9)
    settings: dict[str, Any] = {"soft": soft, "top": objective.top}
    got = case.fused(objective.weigh, chunk_slots=5, **settings)
    check_same(case, got, case.eager(objective.weigh, **settings))
    assert got.denominator != case.fused(WEIGHS["decay"], **settings).denominator


def test_ties_go_to_the_smaller_id() -> None:
    case = Case(1, 4, vocab=70)
    case.ok[:] = True
    with torch.no_grad():
        case.head[:] = 1.0
        case.head[65] = 2.0
        case.hidden[:] = 1.0
    case.labels[0] = torch.tensor([0, 65, 66, 69], device=DEVICE)
    assert case.fused().rank.tolist() == case.eager().rank.tolist() == [[1, 0, 66, 69]]


@pytest.mark.parametrize("soft", [False, True])
def test_a_tile_of_impossible_tokens(soft: bool) -> None:
    case = Case(2, 2, vocab=200)
    with torch.no_grad():
        case.hidden[..., 0] = case.teacher[..., 0] = 2.0
        case.head[:130, 0] = -3e38
    case.labels.clamp_(min=130)
    check_same(case, case.fused(soft=soft), case.eager(soft=soft))


@pytest.mark.parametrize("soft", [False, True])
def test_impossible_tokens(soft: bool) -> None:
    case = Case(3, 4, vocab=75)
    case.ok[:] = True
    with torch.no_grad():
        # 2 x -3e38 is -inf in fp32: the vocabulary's padding of some targets.
        case.hidden[..., 0] = case.teacher[..., 0] = 2.0
        case.head[70:, 0] = -3e38
        case.head[3, 0] = -3e38
    case.labels.clamp_(4, 69)
    got, expected = case.fused(soft=soft, top=75), case.eager(soft=soft, top=75)
    assert got.top is not None
    assert (got.top[..., -6:] == -torch.inf).all()
    assert got.numerator.isfinite()
    assert case.gradient(got.numerator).isfinite().all()
    check_same(case, got, expected)
    # One of them as a label; a weight of 0 takes it out of the sum.
    case.labels[1, 1] = 72
    got = case.fused(soft=soft)
    assert got.nll[1, 1] == torch.inf
    assert got.rank[1, 1] == 69 + 3  # after the possible ones, 3, 70 and 71
    check_same(case, got, case.eager(soft=soft))
    got = case.fused(lambda probability, ok, top: (probability > 0).float(), soft=soft)
    assert got.numerator.isfinite()
    assert (case.gradient(got.numerator)[1, 1] == 0).all()


def test_a_token_that_only_the_drafter_excludes_costs_infinitely_much() -> None:
    case = Case(2, 2)
    case.ok[:] = True
    with torch.no_grad():
        case.hidden[..., 0], case.teacher[..., 0] = 2.0, 0.0
        case.head[3, 0] = -3e38
    case.labels.clamp_(min=4)
    got, expected = case.fused(soft=True), case.eager(soft=True)
    assert got.numerator == expected.numerator == torch.inf
    gradient = case.gradient(got.numerator)[..., 1:]
    torch.testing.assert_close(gradient, case.gradient(expected.numerator)[..., 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("soft", [False, True])
def test_weights_without_a_label_or_below_zero_count_nothing(soft: bool) -> None:
    case = Case()
    everywhere = lambda probability, ok, top: torch.ones_like(probability)  # noqa: E731
    check_same(case, case.fused(everywhere, soft=soft), case.eager(everywhere, soft=soft))
    assert (case.gradient(case.fused(everywhere, soft=soft).numerator)[~case.ok] == 0).all()
    negative = lambda probability, ok, top: torch.where(probability > 0.01, -1.0, 1.0) * ok  # noqa: E731
    check_same(case, case.fused(negative, soft=soft), case.eager(negative, soft=soft))


@pytest.mark.parametrize("scale", [1e4, 1e36])
@pytest.mark.parametrize("soft", [False, True])
def test_huge_logits_stay_finite(scale: float, soft: bool) -> None:
    case = Case()
    with torch.no_grad():
        case.hidden *= scale
        case.teacher *= scale
    got, expected = case.fused(WEIGHS["decay"], soft=soft), case.eager(WEIGHS["decay"], soft=soft)
    assert got.numerator.isfinite()
    assert case.gradient(got.numerator).isfinite().all()
    check_same(case, got, expected)


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("soft", [False, True])
def test_without_labels_the_loss_is_a_connected_zero(capacity: int | None, soft: bool) -> None:
    case = Case(vocab=70)
    case.ok[:] = False
    case.teacher[:] = torch.nan  # padding of another kind
    got = case.fused(soft=soft, chunk_slots=5, capacity=capacity, top=2)
    assert got.numerator.item() == got.denominator.item() == got.dropped.item() == 0
    assert (got.nll == 0).all()
    assert (got.rank == 70).all()
    assert not got.hit.any()
    assert got.top is not None
    assert (got.top == -torch.inf).all()
    assert torch.equal(case.gradient(got.numerator), torch.zeros_like(case.hidden))


@pytest.mark.parametrize("soft", [False, True])
def test_capacity(soft: bool) -> None:
    case = Case(5, 4)
    labels = int(case.ok.sum())
    whole = case.eager(soft=soft, top=4)
    for capacity in (labels, labels + 3, 1000):
        got = case.fused(soft=soft, top=4, capacity=capacity, chunk_slots=4)
        assert got.dropped.item() == 0
        check_same(case, got, whole)
    for capacity in (labels - 1, 6, 1):
        got = case.fused(soft=soft, top=4, capacity=capacity, chunk_slots=4)
        assert got.dropped.item() == labels - capacity
        # What is left: slot 1 of each block, then slot 2, ...
        place = case.ok.T.flatten().cumsum(0).view(4, 5).T
        cut = Case(5, 4)
        cut.hidden, cut.ok = case.hidden, case.ok & (place <= capacity)
        check_same(case, got, cut.eager(soft=soft, top=4))


def test_backward_twice_and_scaled() -> None:
    case = Case()
    result = case.fused(capacity=9)
    once = case.gradient(result.numerator)
    loss = result.numerator * -3.0
    loss.backward(retain_graph=True)
    first = case.hidden.grad
    assert first is not None
    torch.testing.assert_close(first, -3.0 * once, rtol=1e-6, atol=0)
    first = first.clone()
    loss.backward()
    assert torch.equal(case.hidden.grad, 2 * first)


@pytest.mark.parametrize("soft", [False, True])
def test_bf16(soft: bool) -> None:
    case = Case(vocab=150, whole=True).to(torch.bfloat16)
    got, expected = case.fused(soft=soft, top=3), case.eager(soft=soft, top=3)
    gradient = case.gradient(got.numerator)
    assert gradient.dtype == torch.bfloat16
    # The logits are the same bf16 numbers; the gradient is rounded before and after its product with the head.
    torch.testing.assert_close(got.nll, expected.nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.top, expected.top, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.rank, expected.rank)
    torch.testing.assert_close(got.numerator, expected.numerator, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, case.gradient(expected.numerator), rtol=2**-6, atol=2**-6)


def test_autocast_changes_nothing() -> None:
    case = Case()
    plain = case.fused(soft=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        case.head = case.head.double()  # another dtype than hidden's
        mixed = case.fused(soft=True)
    assert torch.equal(plain.nll, mixed.nll)
    assert torch.equal(case.gradient(plain.numerator), case.gradient(mixed.numerator))


def test_views_and_a_head_that_wants_a_gradient() -> None:
    case = Case(3, 4)
    whole = torch.randn(3, 5, 8, device=DEVICE, requires_grad=True)
    case.hidden = whole[:, 1:]  # how the module cuts slot 0 off
    case.head.requires_grad_()
    case.labels = case.labels.T.contiguous().T
    got, expected = case.fused(top=2), case.eager(top=2)
    check_same(case, got, expected)
    assert got.top is not None
    for statistic in (got.denominator, got.nll, got.rank, got.top, got.dropped):
        assert not statistic.requires_grad
    got.numerator.backward()
    assert case.head.grad is None
    assert whole.grad is not None
    assert (whole.grad[:, 0] == 0).all()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return sum(self.seen[name] for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"))


@pytest.mark.parametrize(("soft", "expected"), [(False, 2), (True, 3)])
def test_products_with_the_head(soft: bool, expected: int) -> None:
    case = Case()
    with Products() as products:
        result = case.fused(soft=soft, chunk_slots=6)  # 12 slots: two chunks
        result.numerator.backward()
    assert products.count == 2 * expected
    with torch.no_grad(), Products() as products:
        quiet = case.fused(soft=soft, chunk_slots=6)
    assert products.count == 2 * (expected - 1)
    assert not quiet.numerator.requires_grad
    assert torch.equal(quiet.numerator, result.numerator.detach())
    case.hidden = case.hidden.detach()
    with Products() as products:
        assert not case.fused(soft=soft, chunk_slots=6).numerator.requires_grad
    assert products.count == 2 * (expected - 1)
    with Products() as products:
        case.fused(soft=soft, chunk_slots=6, capacity=5)
    assert products.count == expected - 1


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("top", -1), ("chunk_slots", 0), ("capacity", 0)])
def test_impossible_settings(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Case().fused(**{name: value})


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "_INTERPRETED", False)
    case = Case()
    case.hidden = case.hidden.cpu()
    with pytest.raises(ValueError, match="needs CUDA"):
        case.fused()


@pytest.mark.parametrize("soft", [False, True])
def test_nan_is_neither_a_hit_nor_a_loss_of_zero(soft: bool) -> None:
    """As in the reference: with weights that are NaN themselves (D-PACE), too."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(4, 3, 8, generator=generator), torch.randn(33, 8, generator=generator)
    labels, ok = torch.randint(0, 33, (4, 3), generator=generator), torch.ones(4, 3, dtype=torch.bool)
    teacher = torch.randn(4, 3, 8, generator=generator) if soft else None
    (teacher if teacher is not None else hidden)[2, 1] = torch.nan
    for weights in ("decay", "dpace"):
        leaf = hidden.to(DEVICE).clone().requires_grad_()
        given = None if teacher is None else teacher.to(DEVICE)
        objective = Objective(weights=weights)
        result = fused_head_loss(leaf, head.to(DEVICE), labels.to(DEVICE), ok.to(DEVICE), objective.weigh, teacher=given)
        assert result.numerator.isnan()
        if not soft:
            assert result.rank[2, 1] == 33
            result.numerator.backward()
            assert leaf.grad is not None
            assert leaf.grad[2, 1].isnan().all()
