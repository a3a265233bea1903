from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_lit.blocks import Blocks, draw_anchors, eligible_anchors, make_blocks, row_noise, slot_tokens
from tests.helpers import Batch, Piece, token_batch

MASK = 2


def draw(batch: Batch, count: int, *, seed: int = 0, epoch: int = 0) -> tuple[Tensor, Tensor]:
    noise = row_noise(seed, epoch, batch["row_ids"], batch["input_ids"].shape[1] + 1)
    return draw_anchors(batch["supervised"], batch["document_ids"], count, noise)


def cut(batch: Batch, anchors: list[list[int]], size: int) -> Blocks:
    places = torch.tensor(anchors, dtype=torch.int32)
    fields = (batch[name] for name in ("input_ids", "document_ids", "position_ids", "supervised"))
    return make_blocks(*fields, places, torch.ones_like(places).bool(), block_size=size, mask_token_id=MASK)


# -- slots and labels


def test_slot_k_stands_for_the_kth_token_after_the_anchor() -> None:
    batch = token_batch([[(20, 4), (30, 0)]], 64)
    blocks = cut(batch, [[5, 30]], 4)
    ids = batch["input_ids"][0]
    assert slot_tokens(blocks.anchors, 4).tolist() == [[[5, 6, 7, 8], [30, 31, 32, 33]]]
    assert blocks.noise_ids.tolist() == [[int(ids[5]), MASK, MASK, MASK, int(ids[30]), MASK, MASK, MASK]]
    assert blocks.labels.tolist() == [[ids[6:9].tolist(), ids[31:34].tolist()]]
    assert blocks.positions.tolist() == [[5, 6, 7, 8, 10, 11, 12, 13]]  # the second document begins at 20
    assert blocks.label_ok.all()


def test_labels_end_with_the_document() -> None:
    batch = token_batch([[(10, 0), (20, 0)]], 64)
    assert cut(batch, [[7]], 6).label_ok.tolist() == [[[True, True, False, False, False]]]
    assert cut(batch, [[9]], 6).label_ok.tolist() == [[[False] * 5]]


def test_labels_end_at_the_first_unsupervised_token() -> None:
    batch = token_batch([[(20, 0)]], 64)
    batch["supervised"][0, 8] = False
    assert cut(batch, [[5]], 6).label_ok.tolist() == [[[True, True, False, False, False]]]


def test_a_block_over_the_rows_end_is_kept() -> None:
    batch = token_batch([[(16, 0)]], 16)
    blocks = cut(batch, [[14]], 4)
    assert blocks.label_ok.tolist() == [[[True, False, False]]]
    assert blocks.labels.tolist() == [[[int(batch["input_ids"][0, 15]), 0, 0]]]
    assert blocks.positions.tolist() == [[14, 15, 16, 17]]


def test_padding_blocks_have_no_labels() -> None:
    batch = token_batch([[(16, 0)]], 16)
    anchors, valid = torch.tensor([[3]], dtype=torch.int32), torch.tensor([[False]])
    fields = (batch[name] for name in ("input_ids", "document_ids", "position_ids", "supervised"))
    assert not make_blocks(*fields, anchors, valid, block_size=4, mask_token_id=MASK).label_ok.any()


# -- anchors


def eligible(batch: Batch, row: int) -> list[int]:
    """Supervised, and the next token is supervised and of the same document."""
    supervised, documents = batch["supervised"][row].tolist(), batch["document_ids"][row].tolist()
    pairs = range(len(documents) - 1)
    return [i for i in pairs if supervised[i] and supervised[i + 1] and documents[i] == documents[i + 1] >= 0]


@st.composite
def rows(draw: st.DrawFn) -> Batch:
    """Rows of one length; some of many tiny documents and a large one, some empty."""
    made: list[list[Piece]] = []
    for _ in range(draw(st.integers(1, 3))):
        pieces: list[Piece] = []
        room = draw(st.integers(0, 96))
        while room >= 2:
            length = min(room, draw(st.one_of(st.integers(2, 6), st.integers(2, 60))))
            pieces.append((length, draw(st.integers(0, length))))
            room -= length
        made.append(pieces)
    batch = token_batch(made, 96)
    batch["row_ids"] += draw(st.integers(0, 1000))
    return batch


@given(rows(), st.integers(1, 120))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_anchors(batch: Batch, count: int) -> None:
    anchors, valid = draw(batch, count)
    assert anchors.shape == valid.shape == (len(batch["row_ids"]), count)
    assert anchors.dtype == torch.int32
    for row in range(len(anchors)):
        can = eligible(batch, row)
        assert eligible_anchors(batch["supervised"], batch["document_ids"])[row].nonzero()[:, 0].tolist() == can
        drawn = anchors[row][valid[row]].tolist()
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(can)
        assert len(drawn) == min(count, len(can))
        # Padding stands at the end, at an index that exists.
        assert valid[row].tolist() == [True] * len(drawn) + [False] * (count - len(drawn))
        assert (anchors[row][~valid[row]] == 95).all()
        documents = batch["document_ids"][row].tolist()
        for document in {documents[i] for i in can}:
            share = len(drawn) * sum(documents[i] == document for i in can) / len(can)
            assert abs(sum(documents[i] == document for i in drawn) - share) < 1


def test_every_eligible_token_is_drawn_equally_often() -> None:
    batch = token_batch([[(21, 0), (5, 0), (70, 30)]], 96)
    can = eligible(batch, 0)
    epochs, count = 600, 16
    drawn = torch.zeros(96)
    for epoch in range(epochs):
        anchors, valid = draw(batch, count, epoch=epoch)
        drawn[anchors[valid].long()] += 1
    expected = epochs * count / len(can)
    spread = (expected * (1 - count / len(can))) ** 0.5
    assert ((drawn[can] - expected).abs() < 4.5 * spread).all()


def test_a_row_without_anchor() -> None:
    batch = token_batch([[(20, 20)], [(20, 19)], []], 32)
    anchors, valid = draw(batch, 5)
    assert not valid.any()
    assert not cut(batch, anchors.tolist(), 4).label_ok[:, :, 1:].any()


# -- noise


@given(st.integers(0, 2**31), st.integers(-1, 50), st.lists(st.integers(-1, 2**40), min_size=1, max_size=6, unique=True))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_noise_is_a_function_of_seed_epoch_and_row(seed: int, epoch: int, ids: list[int]) -> None:
    together = row_noise(seed, epoch, torch.tensor(ids), 64)
    assert ((together >= 0) & (together < 1)).all()
    for place, row in enumerate(ids):
        assert torch.equal(together[place], row_noise(seed, epoch, torch.tensor([row]), 64)[0])
    assert torch.equal(together.flip(0), row_noise(seed, epoch, torch.tensor(ids).flip(0), 64))
    assert torch.equal(together[:, :10], row_noise(seed, epoch, torch.tensor(ids), 10))
    for other in (row_noise(seed + 1, epoch, torch.tensor(ids), 64), row_noise(seed, epoch + 1, torch.tensor(ids), 64)):
        assert not torch.isclose(together, other).all(dim=1).any()
    assert len({tuple(row) for row in together.tolist()}) == len(ids)


def test_noise_is_uniform_and_its_rows_are_independent() -> None:
    noise = row_noise(0, 0, torch.arange(256), 512).double()
    counts = torch.histc(noise.float(), bins=64, min=0, max=1)
    assert ((counts - counts.mean()).abs() < 5 * counts.mean().sqrt()).all()
    standard = (noise - 0.5) * 12**0.5
    neighbours = {
        "rows": standard[1:] * standard[:-1],
        "places": standard[:, 1:] * standard[:, :-1],
        "epochs": standard * (row_noise(0, 1, torch.arange(256), 512) - 0.5) * 12**0.5,
        "seeds": standard * (row_noise(1, 0, torch.arange(256), 512) - 0.5) * 12**0.5,
    }
    for name, products in neighbours.items():
        assert abs(float(products.mean())) < 5 / products.numel() ** 0.5, name


def test_anchors_do_not_depend_on_how_rows_are_dealt() -> None:
    batch = token_batch([[(40, 5)], [(20, 0), (30, 10)], [(64, 30)], [(10, 0)] * 6], 64)
    anchors, valid = draw(batch, 12, epoch=3)
    for part in ([0], [1, 3], [3, 2, 1, 0]):
        mine = {name: value[part] for name, value in batch.items()}
        assert torch.equal(draw(mine, 12, epoch=3)[0], anchors[part])
        assert torch.equal(draw(mine, 12, epoch=3)[1], valid[part])
    assert not torch.equal(draw(batch, 12, epoch=4)[0], anchors)
