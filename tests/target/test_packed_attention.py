from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget, document_mask
from dflash_lit.target.packed_attention import document_intervals, packed_attention, packed_mask, unsupported
from tests.helpers import random, tiny_target

INDICES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@st.composite
def document_rows(draw: st.DrawFn) -> Tensor:
    """int32 [R, S]: runs of documents, short and of whole tiles, and padding at some ends."""
    tokens = draw(st.sampled_from([128, 300, 512]))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 300), st.just(128)), min_size=1, max_size=9))
        ids = [number for number, length in enumerate(lengths) for _ in range(length)][:tokens]
        rows.append(ids + [-1] * (tokens - len(ids)))
    return torch.tensor(rows, dtype=torch.int32)


@settings(max_examples=40, deadline=None)
@given(document_rows(), st.sampled_from([None, 1, 7, 128, 200]))
def test_the_mask_is_that_of_trying_all_pairs(documents: Tensor, window: int | None) -> None:
    visible = document_mask(documents, window)
    rows, _, tokens, _ = visible.shape
    expected = create_block_mask(lambda b, h, q, k: visible[b, 0, q, k], rows, None, tokens, tokens, device="cpu")
    found = packed_mask(documents, window)
    assert found.shape == (rows, 1, tokens, tokens)
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in INDICES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    # Its mask_mod says it all, not only what the tiles leave open.
    row, query, key = (torch.arange(n) for n in (rows, tokens, tokens))
    said = found.mask_mod(row[:, None, None], torch.tensor(0), query[:, None], key)
    assert torch.equal(said, visible[:, 0])


def test_intervals() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1]])
    assert document_intervals(documents)[0].tolist() == [[0, 0, 0, 3, 3, 5, 5, 5]]
    lo, hi = document_intervals(documents, 2)
    assert lo.tolist() == [[0, 0, 1, 3, 3, 5, 5, 6]]
    assert hi.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_it_does_not_run_uncompiled() -> None:
    query, key = random(2, 4, 1024, 16), random(2, 2, 1024, 16)
    mask = packed_mask(torch.zeros(2, 1024, dtype=torch.int32))
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UserError, match=r"target's attention .* 2 x 4 heads x 1024 queries x 1024 keys takes 0\.0 GB"),
    ):
        packed_attention(torch.nn.Module(), query, key, key, mask)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_it_cannot_compute_is_refused(name: str) -> None:
    mask = packed_mask(torch.zeros(1, 128, dtype=torch.int32))
    x = random(1, 1, 128, 16)
    with pytest.raises(NotImplementedError, match=name):
        packed_attention(torch.nn.Module(), x, x, x, mask, **{name: 1.0})


def test_models_it_does_not_suit(embedded: FrozenTarget) -> None:
    model = tiny_target(embedded.info).model
    assert unsupported(model) is None
    model.config.attn_logit_softcapping = 50.0
    assert "caps" in str(unsupported(model))
    model.config.attn_logit_softcapping = None
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(2))
    assert "sinks" in str(unsupported(model))
    assert "AttentionInterface" in str(unsupported(torch.nn.Linear(1, 1)))
