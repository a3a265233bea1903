from __future__ import annotations

import time
from itertools import groupby

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_lit.data.documents import Document
from dflash_lit.data.packing import PackedRows, pack
from dflash_lit.errors import UserError

PAD = 10**6


def make(lengths: list[tuple[int, int]], first_id: int = 0) -> list[Document]:
    """Documents of (length, prompt length), each token with an id of its own."""
    documents = []
    for number, (length, prompt) in enumerate(lengths):
        ids = np.arange(first_id, first_id + length, dtype=np.int32)
        documents.append(Document(ids, np.arange(length) >= prompt, f"document {number}"))
        first_id += length
    return documents


def pieces(rows: PackedRows) -> list[tuple[int, slice]]:
    """Every placed piece as (row, columns)."""
    result = []
    for row, ids in enumerate(rows.document_ids):
        column = 0
        for document, run in groupby(ids.tolist()):
            length = len(list(run))
            if document >= 0:
                result.append((row, slice(column, column + length)))
            column += length
    return result


def equal(a: PackedRows, b: PackedRows) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("input_ids", "document_ids", "position_ids", "supervised")
    )


@st.composite
def document_lists(draw: st.DrawFn) -> list[Document]:
    """Short and long ones, with prompts of any length, and some whose supervision comes in stretches, as in a chat."""
    lengths = draw(st.lists(st.one_of(st.integers(2, 40), st.integers(2, 900)), min_size=1, max_size=40))
    documents = make([(length, draw(st.integers(0, length))) for length in lengths])
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        documents = [Document(d.input_ids, np.repeat(rng.random(len(d)) < 0.5, 7)[: len(d)], d.name) for d in documents]
    if not any(document.supervised.any() for document in documents):
        documents += make([(10, 3)], first_id=sum(map(len, documents)))
    return documents


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(document_lists(), st.sampled_from([128, 256, 384]), st.integers(0, 2**32))
def test_packing_holds_its_promises(documents: list[Document], row_tokens: int, seed: int):
    rows = pack(documents, row_tokens, seed=seed, pad_id=PAD)
    shape = (len(rows), row_tokens)
    assert rows.input_ids.shape == rows.document_ids.shape == rows.position_ids.shape == rows.supervised.shape == shape
    assert rows.input_ids.dtype == rows.document_ids.dtype == rows.position_ids.dtype == np.int32
    assert rows.supervised.dtype == np.bool_

    # No padding but at the end of the last row, and what is there is padding in every array.
    padding = (rows.document_ids < 0).reshape(-1)
    used = int((~padding).sum())
    assert not padding[:used].any()
    assert len(rows) == -(-used // row_tokens)
    assert (rows.input_ids.reshape(-1)[used:] == PAD).all()
    assert not rows.position_ids.reshape(-1)[used:].any()
    assert not rows.supervised.reshape(-1)[used:].any()
    assert rows.efficiency == used / rows.input_ids.size

    # Documents are numbered 0, 1, ... in each row.
    for ids in rows.document_ids:
        numbers = [document for document, _ in groupby(ids.tolist()) if document >= 0]
        assert numbers == list(range(len(numbers)))

    owner = np.concatenate([np.full(len(document), number) for number, document in enumerate(documents)])
    start_of = np.cumsum([0, *map(len, documents)])
    to_learn = np.concatenate([document.supervised for document in documents])
    times_learnt = np.zeros(len(owner), dtype=int)
    for row, columns in pieces(rows):
        tokens = rows.input_ids[row, columns]
        length = len(tokens)
        # One piece is one stretch of one document, positions from 0.
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + length))
        assert len(set(owner[tokens])) == 1
        assert np.array_equal(rows.position_ids[row, columns], np.arange(length))
        # It begins where the document does, or where a window does; then half a row is context.
        offset = int(tokens[0] - start_of[owner[tokens[0]]])
        assert offset % (row_tokens // 2) == 0
        learnt = rows.supervised[row, columns]
        if offset:
            assert len(documents[owner[tokens[0]]]) > row_tokens
            assert not learnt[: row_tokens // 2].any()
        times_learnt[tokens[learnt]] += 1
        # Only a piece that fills its row up may stop before its document or window does.
        if offset + length < len(documents[owner[tokens[0]]]) and length < row_tokens:
            assert columns.stop == row_tokens
    assert np.array_equal(times_learnt, to_learn.astype(int))
    assert rows.supervised_tokens == to_learn.sum()

    assert equal(rows, pack(documents, row_tokens, seed=seed, pad_id=PAD))


def test_the_seed_decides_the_order():
    documents = make([(50 + i, 5) for i in range(60)])
    assert not equal(pack(documents, 256, seed=0, pad_id=PAD), pack(documents, 256, seed=1, pad_id=PAD))


def test_a_document_that_is_cut_comes_again_whole():
    # 100 + 28 of the other, then the other: one of the two is cut after 28 tokens.
    rows = pack(make([(100, 10), (100, 10)]), 128, seed=0, pad_id=PAD)
    assert rows.document_ids.tolist() == [[0] * 100 + [1] * 28, [0] * 100 + [-1] * 28]
    assert rows.supervised[0].tolist() == [False] * 10 + [True] * 90 + [False] * 10 + [True] * 18
    assert rows.supervised[1].tolist() == [False] * 28 + [True] * 72 + [False] * 28
    assert np.array_equal(rows.input_ids[0, 100:], rows.input_ids[1, :28])


def test_a_cut_document_that_has_taught_all_does_not_come_again():
    only_28 = Document(np.arange(1000, 1100), np.arange(100) < 28, "supervised at its beginning")
    rows = pack([*make([(100, 10)]), only_28], 128, seed=0, pad_id=PAD)
    if rows.input_ids[0, 0] == 0:  # the ordinary one was placed first
        assert len(rows) == 1
    assert rows.supervised_tokens == 90 + 28


def test_long_documents_come_in_windows_with_half_a_row_of_context():
    rows = pack(make([(300, 0)]), 128, seed=0, pad_id=PAD)
    starts = sorted(int(rows.input_ids[row, columns][0]) for row, columns in pieces(rows) if columns.start == 0)
    assert starts == [0, 64, 128, 192]
    assert rows.supervised_tokens == 300


def test_best_fit_leaves_little_to_cut():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 600, 2000)
    rows = pack(make([(int(n), 10) for n in lengths]), 2048, seed=0, pad_id=PAD)
    assert rows.efficiency > 0.99
    assert lengths.sum() / rows.input_ids.size > 0.97  # tokens placed twice are the rest


def test_time_is_near_linear():
    documents = make([(20 + i % 300, 10) for i in range(20_000)])
    began = time.perf_counter()
    pack(documents, 1024, seed=0, pad_id=PAD)
    assert time.perf_counter() - began < 10  # about one second; quadratic would be minutes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(document_lists(), st.integers(0, 2**32))
def test_one_document_a_row(documents: list[Document], seed: int):
    rows = pack(documents, 256, seed=seed, pad_id=PAD, one_per_row=True)
    start_of = np.cumsum([0, *map(len, documents)])
    owner = np.concatenate([np.full(len(document), number) for number, document in enumerate(documents)])
    times_learnt = np.zeros(len(owner), dtype=int)
    for row in range(len(rows)):
        length = int((rows.document_ids[row] == 0).sum())
        assert rows.document_ids[row].tolist() == [0] * length + [-1] * (256 - length)
        assert rows.position_ids[row].tolist() == [*range(length), *[0] * (256 - length)]
        assert (rows.input_ids[row, length:] == PAD).all()
        assert not rows.supervised[row, length:].any()
        tokens = rows.input_ids[row, :length]
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + length))
        # A whole document, or a window of one longer than a row.
        document = owner[tokens[0]]
        assert length == min(256, start_of[document + 1] - tokens[0])
        times_learnt[tokens[rows.supervised[row, :length]]] += 1
    assert np.array_equal(times_learnt, np.concatenate([document.supervised for document in documents]).astype(int))


@pytest.mark.parametrize("row_tokens", [0, -128, 100, 200])
def test_row_tokens_must_be_whole_tiles(row_tokens: int):
    with pytest.raises(UserError, match=r"data\.row_tokens"):
        pack(make([(10, 1)]), row_tokens, seed=0, pad_id=PAD)


@pytest.mark.parametrize("documents", [[], make([(10, 10), (300, 300)])])
@pytest.mark.parametrize("one_per_row", [False, True])
def test_nothing_to_learn_is_an_error(documents: list[Document], one_per_row: bool):
    with pytest.raises(UserError, match="nothing to learn"):
        pack(documents, 128, seed=0, pad_id=PAD, one_per_row=one_per_row)


def test_padding_needs_a_token_id():
    with pytest.raises(UserError, match="pad_id"):
        pack(make([(10, 1)]), 128, seed=0, pad_id=-1)
