from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.attention.mask import BlockLayout, context_visible, dense_mask


def visible(layout: BlockLayout, row: int, query: int, key: int) -> bool:
    """The sentence: key j is visible to (anchor a, slot o) iff it is context, j < a, in a's document and, if there is a window,
    pos(a) + o - pos(j) < window; or noise of the same block and, if causal, slot(j) <= o. Blocks that only pad see themselves
    alone."""
    documents, anchors, valid = (t[row].tolist() for t in (layout.document_ids, layout.anchors, layout.valid))
    block, slot = divmod(query, layout.block_size)
    anchor = anchors[block]
    if key < len(documents):
        positions = [index - documents.index(document) for index, document in enumerate(documents)]
        near = layout.window is None or positions[anchor] + slot - positions[key] < layout.window
        return valid[block] and documents[anchor] >= 0 and key < anchor and documents[key] == documents[anchor] and near
    key_block, key_slot = divmod(key - len(documents), layout.block_size)
    return key_block == block and (not layout.causal or key_slot <= slot)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    rows, tokens, blocks = draw(st.integers(1, 2)), draw(st.integers(2, 14)), draw(st.integers(1, 4))
    documents, anchors, valid = [], [], []
    for _ in range(rows):
        cuts = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
        padding = draw(st.integers(0, tokens))
        numbers = torch.tensor(cuts).long().cumsum(0)
        numbers[tokens - padding :] = -1
        documents.append(numbers)
        anchors.append(sorted(draw(st.lists(st.integers(0, tokens - 1), min_size=blocks, max_size=blocks))))
        valid.append(draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)))
    size = draw(st.integers(2, 4))
    return BlockLayout(
        torch.tensor(anchors, dtype=torch.int32),
        torch.tensor(valid),
        torch.stack(documents).int(),
        size,
        draw(st.booleans()),
        draw(st.none() | st.integers(size, size + 8)),
    )


@given(layouts())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_mask_is_the_sentence(layout: BlockLayout) -> None:
    mask = dense_mask(layout)
    assert mask.shape == (layout.rows, layout.queries, layout.row_tokens + layout.queries)
    for row in range(layout.rows):
        expected = [[visible(layout, row, query, key) for key in range(mask.shape[2])] for query in range(mask.shape[1])]
        assert mask[row].tolist() == expected


@given(layouts())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_every_query_sees_itself(layout: BlockLayout) -> None:
    own = dense_mask(layout)[:, :, layout.row_tokens :].diagonal(dim1=1, dim2=2)
    assert own.all()


def test_the_anchor_is_not_its_own_context() -> None:
    layout = BlockLayout(torch.tensor([[3]]), torch.tensor([[True]]), torch.zeros(1, 6, dtype=torch.int32), 2)
    assert dense_mask(layout)[0, 0].tolist() == [True, True, True, False, False, False, True, True]


def test_a_window_counts_from_the_slot() -> None:
    layout = BlockLayout(torch.tensor([[5]]), torch.tensor([[True]]), torch.zeros(1, 6, dtype=torch.int32), 2, window=3)
    context = dense_mask(layout)[0, :, :6].int().tolist()
    assert context == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0]]


def test_a_window_shorter_than_the_block_is_refused() -> None:
    anchors, documents = torch.tensor([[3]]), torch.zeros(1, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="window 3 is shorter than a block of 4 slots"):
        BlockLayout(anchors, anchors > 0, documents, 4, window=3)
    assert context_visible(BlockLayout(anchors, anchors > 0, documents, 4, window=4))[0, 0, 3].sum() == 0


def test_without_a_window_the_slots_share_their_context() -> None:
    """Or the dense path would hold ``B`` times the mask for nothing."""
    layout = BlockLayout(torch.tensor([[3]]), torch.tensor([[True]]), torch.zeros(1, 6, dtype=torch.int32), 2)
    assert context_visible(layout).shape == (1, 1, 1, 6)
