from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.attention.mask import BlockLayout, dense_mask


def visible(documents: list[int], anchors: list[int], valid: list[bool], size: int, causal: bool, query: int, key: int) -> bool:
    """The sentence: key j is visible to (anchor a, slot o) iff it is context, j < a, and in a's document; or noise of the
    same block and, if causal, slot(j) <= o. Blocks that only pad see themselves alone."""
    block, slot = divmod(query, size)
    anchor = anchors[block]
    if key < len(documents):
        return valid[block] and documents[anchor] >= 0 and key < anchor and documents[key] == documents[anchor]
    key_block, key_slot = divmod(key - len(documents), size)
    return key_block == block and (not causal or key_slot <= slot)


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
    return BlockLayout(
        torch.tensor(anchors, dtype=torch.int32),
        torch.tensor(valid),
        torch.stack(documents).int(),
        draw(st.integers(2, 4)),
        draw(st.booleans()),
    )


@given(layouts())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_mask_is_the_sentence(layout: BlockLayout) -> None:
    mask = dense_mask(layout)
    assert mask.shape == (layout.rows, layout.queries, layout.row_tokens + layout.queries)
    for row in range(layout.rows):
        arguments = (layout.document_ids[row].tolist(), layout.anchors[row].tolist(), layout.valid[row].tolist())
        expected = [
            [visible(*arguments, layout.block_size, layout.causal, query, key) for key in range(mask.shape[2])]
            for query in range(mask.shape[1])
        ]
        assert mask[row].tolist() == expected


@given(layouts())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_every_query_sees_itself(layout: BlockLayout) -> None:
    own = dense_mask(layout)[:, :, layout.row_tokens :].diagonal(dim1=1, dim2=2)
    assert own.all()


def test_the_anchor_is_not_its_own_context() -> None:
    layout = BlockLayout(torch.tensor([[3]]), torch.tensor([[True]]), torch.zeros(1, 6, dtype=torch.int32), 2)
    assert dense_mask(layout)[0, 0].tolist() == [True, True, True, False, False, False, True, True]
