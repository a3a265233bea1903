from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.blocks import eligible_anchors
from dflash_lit.data.documents import Document
from dflash_lit.data.packing import pack
from dflash_lit.data.row_plan import RowPlan, Spans, plan_rows, shorten
from dflash_lit.errors import UserError

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30).map(np.array), min_size=1, max_size=8)


def log_normal(count: int, seed: int = 0) -> Spans:
    """Lengths as conversations have them: a median of some hundred tokens and a long tail; the last part is the response."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 0.8, count), 16, 8000).astype(np.int64)
    start = (lengths * rng.uniform(0.1, 0.5, count)).astype(np.int64)
    return Spans(lengths, np.arange(count + 1), np.stack([start, lengths], axis=1))


@settings(max_examples=200, deadline=None)
@given(masks, st.data())
def test_spans_count_as_masks_do(documents: list[np.ndarray], data: st.DataObject) -> None:
    spans = Spans.of_masks(documents)
    asked = [
        (number, *sorted([data.draw(st.integers(0, len(mask))), data.draw(st.integers(0, len(mask)))]))
        for number, mask in enumerate(documents)
    ]
    which, start, stop = (np.array(column) for column in zip(*asked, strict=True))
    pieces = [documents[number][a:b] for number, a, b in asked]
    assert spans.count(which, start, stop).tolist() == [int(piece.sum()) for piece in pieces]
    starts = [int((np.diff(piece.astype(int), prepend=0) == 1).sum()) for piece in pieces]
    assert spans.stretches(which, start, stop).tolist() == starts
    chosen = np.array(data.draw(st.lists(st.integers(0, len(documents) - 1), max_size=9)), dtype=np.int64)
    taken, expected = spans.take(chosen), Spans.of_masks([documents[number] for number in chosen])
    assert taken.lengths.tolist() == expected.lengths.tolist()
    assert taken.offsets.tolist() == expected.offsets.tolist()
    assert taken.spans.tolist() == expected.spans.tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_rows_tell_how_many_anchors_they_can_have(seed: int) -> None:
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(30):
        length = int(rng.integers(2, 400))
        documents.append(Document(rng.integers(0, 99, length), np.repeat(rng.random(length) < 0.5, 3)[:length], ""))
    rows = pack(documents, 128, seed=seed, pad_id=0)
    spans = Spans.of_masks([document.supervised for document in documents])
    plan = plan_rows(spans, 128, seed=seed)
    assert plan.learnt(spans).tolist() == rows.supervised.sum(axis=1).tolist()
    eligible = eligible_anchors(torch.from_numpy(rows.supervised), torch.from_numpy(rows.document_ids))
    assert plan.eligible(spans).tolist() == eligible.sum(dim=1).tolist()
    assert plan.filled == pytest.approx(rows.efficiency)


def test_packing_leaves_hardly_anything_unused() -> None:
    spans = log_normal(20_000)
    lengths, counts = shorten(spans, 4096, "truncate")
    plan = plan_rows(spans, 4096, seed=0, lengths=lengths)
    assert counts["truncated"] > 0
    assert plan.filled > 0.999
    assert plan.packed > 0.98
    assert plan.window_context == 0
    # What is placed once and what comes again make up what is placed.
    again = plan.context.sum() / (len(plan) * 4096)
    assert plan.filled - plan.packed == pytest.approx(again)
    split = plan_rows(spans, 4096, seed=0)
    assert split.packed > 0.98
    assert split.window_context > 0


def test_no_step_holds_one_length_class_only() -> None:
    """Best fit looks at lengths, so rows must not come out sorted by them."""
    spans = log_normal(20_000)
    plan = plan_rows(spans, 4096, seed=0, lengths=shorten(spans, 4096, "truncate")[0])
    quartile = np.searchsorted(np.quantile(spans.lengths, [0.25, 0.5, 0.75]), spans.lengths)
    classes = quartile[plan.documents]
    batches = np.random.default_rng(0).permutation(len(plan))[: len(plan) // 4 * 4].reshape(-1, 4)
    present = np.stack([plan.per_row((classes == c).astype(int)) > 0 for c in range(4)])
    assert present[:, batches].any(axis=2).all(axis=0).mean() > 0.95  # all four classes in nearly every step of 4 rows
    assert (present[:, batches].any(axis=2).sum(axis=0) > 1).all()
    # Neither does the plan go from long to short: documents of its beginning and its end are alike, the last few rows apart.
    third = len(plan.documents) // 3
    means = [np.log(spans.lengths[plan.documents[part]]).mean() for part in (slice(0, third), slice(third, 2 * third))]
    assert abs(means[0] - means[1]) < 0.1


def test_long_documents_by_choice() -> None:
    masks = [np.arange(n) >= start for n, start in ((100, 10), (300, 50), (300, 200), (128, 1))]
    spans = Spans.of_masks(masks)
    lengths, counts = shorten(spans, 128, "split")
    assert (lengths.tolist(), counts) == ([100, 300, 300, 128], {"split": 2})
    lengths, counts = shorten(spans, 128, "truncate")
    # The third has nothing supervised before its 200th token.
    assert lengths.tolist() == [100, 128, 0, 128]
    assert counts == {"truncated": 2, "truncated_to_nothing": 1, "supervised_tokens_lost": (300 - 128) + 100}
    plan = plan_rows(spans, 128, seed=0, lengths=lengths)
    assert sorted(set(plan.documents.tolist())) == [0, 1, 3]
    assert plan.stop.max() == 128
    lengths, counts = shorten(spans, 128, "reject")
    assert lengths.tolist() == [100, 0, 0, 128]
    assert counts == {"rejected": 2, "supervised_tokens_lost": 250 + 100}
    assert sorted(set(plan_rows(spans, 128, seed=0, lengths=lengths).documents.tolist())) == [0, 3]
    with pytest.raises(UserError, match="nothing to learn"):
        plan_rows(spans, 128, seed=0, lengths=np.zeros(4, dtype=np.int64))
    with pytest.raises(UserError, match=r"data\.long='cut'"):
        shorten(spans, 128, "cut")


def test_a_plan_is_saved_and_read(tmp_path: Path) -> None:
    plan = plan_rows(log_normal(200), 1024, seed=1)
    plan.save(tmp_path / "plan")
    again = RowPlan.load(tmp_path / "plan")
    for name in ("documents", "start", "stop", "context", "first"):
        assert np.array_equal(getattr(plan, name), getattr(again, name)), name
    assert again.row_tokens == 1024


def test_a_document_of_which_truncation_leaves_one_supervised_token_is_left_out_and_counted() -> None:
    spans = Spans.of_masks([np.arange(300) >= start for start in (126, 127, 128)])
    lengths, counts = shorten(spans, 128, "truncate")
    assert lengths.tolist() == [128, 0, 0]
    assert counts == {"truncated": 3, "truncated_to_nothing": 2, "supervised_tokens_lost": 172 + 173 + 172}
