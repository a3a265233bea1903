"""Decoding by static shapes: token for token and round for round what decoding with growing caches says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from dflash_lit.attention.attend import ContextKV
from dflash_lit.decode.acceptance import measure, sweep
from dflash_lit.decode.chain import decode_chain, decode_plain
from dflash_lit.decode.proposer import one_block_attention
from dflash_lit.decode.static_drafter import PlacedAttention, StaticDrafter, can_be_static, static_pair
from dflash_lit.decode.tree import decode_tree, decode_tree_batch
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import FrozenTarget
from dflash_lit.target.static_reader import StaticTarget
from tests.helpers import drafter_for, lively_drafter, random, tiny_target

PROMPTS = [[3, 9, 2, 5, 6, 6, 1], [7], [8, 8, 4]]
COUNT = 20


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def target(embedded: FrozenTarget) -> FrozenTarget:
    return tiny_target(embedded.info, vocab_size=12, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)


def pair(target: FrozenTarget, drafter: Drafter, backend: str | None) -> tuple[StaticTarget, StaticDrafter]:
    return static_pair(target, drafter, longest_prompt=7, max_new_tokens=COUNT, budgets=[0, 40], backend=backend)


def made(target: FrozenTarget | StaticTarget, drafter: Drafter | StaticDrafter) -> list[tuple[list[int], list[int]]]:
    """Of each kind of decoding: ids and rounds."""
    found = []
    for prompt in PROMPTS:
        found.append(decode_plain(target, prompt, COUNT))
        found.append(decode_chain(target, drafter, prompt, COUNT))
        found += [decode_tree(target, drafter, prompt, COUNT, budget) for budget in (3, 40)]
        generator = torch.Generator().manual_seed(0)
        found.append(decode_tree(target, drafter, prompt, COUNT, 8, temperature=1.0, generator=generator))
        found.append(decode_chain(target, drafter, prompt, COUNT, temperature=1.0, generator=generator))
    found += decode_tree_batch(target, drafter, PROMPTS, COUNT, 8)
    return [(response.ids, response.rounds) for response in found]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_same_texts_in_the_same_rounds(target: FrozenTarget, backend: str | None, causal: bool) -> None:
    drafter = lively_drafter(drafter_for(target, causal=causal))
    expected = made(target, drafter)
    assert max(length for _, rounds in expected for length in rounds) > 2
    assert made(*pair(target, drafter, backend)) == expected
    if backend:
        # Passes of the target over 1, 4 (a block, or a tree of 3), 9 and 41 tokens, and over 9 of 3 texts. The drafter's layer for
        # 1 text and for 3, and its context of 4 tokens (a block, or the longest path of a tree) of as many.
        assert counters["stats"]["unique_graphs"] == 5 + 2 + 2
        assert not counters["graph_break"]
    assert not any("forward" in vars(layer) for layer in drafter.layers)


def test_by_the_real_compiler(target: FrozenTarget) -> None:
    drafter = lively_drafter(drafter_for(target))
    static = pair(target, drafter, "inductor")
    for prompt in PROMPTS[:2]:
        assert decode_plain(static[0], prompt, COUNT).ids == decode_plain(target, prompt, COUNT).ids
        for theirs, ours in (
            (decode_chain(target, drafter, prompt, COUNT), decode_chain(*static, prompt, COUNT)),
            (decode_tree(target, drafter, prompt, COUNT, 8), decode_tree(*static, prompt, COUNT, 8)),
        ):
            assert (ours.ids, ours.rounds) == (theirs.ids, theirs.rounds)


def test_nothing_compiles_after_the_first_rounds(target: FrozenTarget) -> None:
    drafter = lively_drafter(drafter_for(target))
    static = pair(target, drafter, "aot_eager")
    decode_tree(*static, PROMPTS[0], 4, 8)
    graphs = counters["stats"]["unique_graphs"]
    for prompt in PROMPTS[1:]:
        decode_tree(*static, prompt, COUNT, 8)
    assert counters["stats"]["unique_graphs"] == graphs


def test_measuring(target: FrozenTarget) -> None:
    drafter = lively_drafter(drafter_for(target))
    for ours, theirs in zip(
        sweep(*pair(target, drafter, None), PROMPTS, [0, 40], max_new_tokens=COUNT, reference=target, timed=1),
        sweep(target, drafter, PROMPTS, [0, 40], max_new_tokens=COUNT, reference=target),
        strict=True,
    ):
        assert ours.lossless is True
        assert (ours.tau, ours.accepted_by_depth) == (theirs.tau, theirs.accepted_by_depth)
        assert set(ours.stage_ms) == {"draft", "build", "verify", "commit"}
        assert ours.speedup > 0
    assert measure(*pair(target, drafter, None), PROMPTS, max_new_tokens=COUNT).lossless is True


def test_texts_that_outgrow_the_room_are_refused(target: FrozenTarget) -> None:
    drafter = lively_drafter(drafter_for(target))
    with pytest.raises(ValueError, match="more than the room of 128"):
        decode_chain(*pair(target, drafter, None), PROMPTS[0], 200)


def test_what_can_be_static(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_be_static(target)
    monkeypatch.setattr(target.model, "_can_compile_fullgraph", False)
    assert not can_be_static(target)


def test_a_drafter_with_sliding_layers(target: FrozenTarget) -> None:
    kinds = ("sliding_attention", "full_attention")
    config = drafter_for(target, layer_types=kinds, sliding_window=6)
    drafter = lively_drafter(config)
    expected = made(target, drafter)
    assert made(*pair(target, drafter, None)) == expected
    everywhere = lively_drafter(drafter_for(target))
    everywhere.load_state_dict(drafter.state_dict())
    assert made(target, everywhere) != expected  # texts are longer than the window


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_placed_attention_is_attention_over_what_is_there(causal: bool, window: int | None) -> None:
    lengths = [5, 2, 0]
    queries, context = random(3, 4, 3, 8), (random(3, 2, 9, 8), random(3, 2, 9, 8, seed=1))
    block: ContextKV = (random(3, 2, 3, 8, seed=2), random(3, 2, 3, 8, seed=3))
    given = tuple(part.clone() for part in context)
    got = PlacedAttention(torch.tensor(lengths), 3, 9, causal, torch.float32, window)(queries, (given[0], given[1]), block)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1)
        own = (block[0][part], block[1][part])
        before = (context[0][part, :, :length], context[1][part, :, :length])
        attend = one_block_attention(causal, places=torch.tensor([length]), window=window)
        torch.testing.assert_close(got[part], attend(queries[part], before, own))
        for buffer, kept in zip(given, context, strict=True):
            assert torch.equal(buffer[row, :, :length], kept[row, :, :length])
