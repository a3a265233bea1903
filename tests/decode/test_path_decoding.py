"""Decoding with a path head: the target's own text, by chains and trees that follow their own tokens."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.data.prompts import stdlib_prompts
from dflash_lit.decode import chain as chain_module
from dflash_lit.decode import tree as tree_module
from dflash_lit.decode.acceptance import _generate, measure
from dflash_lit.decode.chain import decode_chain, decode_plain
from dflash_lit.decode.lattice import Lattice
from dflash_lit.decode.tree import decode_tree, decode_tree_batch
from dflash_lit.objective.path import path_lengths
from dflash_lit.target.frozen import FrozenTarget
from tests.decode.test_tree_decoding import NoisyOracle
from tests.helpers import embedded_config, lively_drafter, random

COUNT, BLOCK = 16, 6


@pytest.fixture(scope="module")
def prompts(embedded: FrozenTarget) -> list[list[int]]:
    texts = stdlib_prompts(embedded.tokenizer, count=8, prompt_tokens=24, held_out=True, seed=0)
    return [list(prompt.input_ids)[: 10 + 2 * number] for number, prompt in enumerate(texts)]


@pytest.fixture(scope="module")
def oracle(embedded: FrozenTarget, prompts: list[list[int]]) -> NoisyOracle:
    """Mostly right before its path head has a say, which is enough to change paths."""
    config = embedded_config(block_size=BLOCK, path_width=8, path_candidates=16)
    drafter = NoisyOracle(config, embedded, prompts, COUNT, noise=0.5)
    assert drafter.path_head is not None
    with torch.no_grad():
        drafter.path_head.out_proj.weight.copy_(random(256, 8) * 0.3)
    return drafter


@pytest.mark.parametrize("causal", [False, True])
def test_greedy_output_is_the_targets(embedded: FrozenTarget, prompts: list[list[int]], causal: bool) -> None:
    drafter = lively_drafter(embedded_config(block_size=5, causal=causal, path_width=8))
    for prompt in prompts[:3]:
        expected = decode_plain(embedded, prompt, COUNT).ids
        assert decode_chain(embedded, drafter, prompt, COUNT).ids == expected
        assert decode_tree(embedded, drafter, prompt, COUNT, 20).ids == expected


def test_few_candidates_make_small_trees(embedded: FrozenTarget, prompts: list[list[int]]) -> None:
    drafter = lively_drafter(embedded_config(block_size=4, path_width=8, path_candidates=2))
    assert measure(embedded, drafter, prompts[:1], max_new_tokens=4, budget=40, plain=False).nodes == 2 + 4 + 8


def test_a_batch_of_good_drafts_is_the_targets(embedded: FrozenTarget, prompts: list[list[int]], oracle: NoisyOracle) -> None:
    references = _generate(embedded, prompts, COUNT)
    decoded = decode_tree_batch(embedded, oracle, prompts, COUNT, 24)
    assert [made.ids for made in decoded] == references
    lengths = [length for made in decoded for length in made.rounds]
    assert sum(lengths) / len(lengths) > 2


@pytest.mark.parametrize("budget", [0, 5, 40])
def test_rounds_are_what_the_teacher_forced_metric_says(
    embedded: FrozenTarget, prompts: list[list[int]], oracle: NoisyOracle, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Lattice] = []
    draft_lattice = chain_module.draft_lattice

    def recorded(*arguments: object) -> Lattice:
        seen.append(draft_lattice(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    for module in (chain_module, tree_module):
        monkeypatch.setattr(module, "draft_lattice", recorded)
    found = set()
    for number, text in enumerate(_generate(embedded, prompts, COUNT + BLOCK)):
        alone = oracle.for_prompt(number)
        seen.clear()
        if budget:
            made = decode_tree(embedded, alone, prompts[number], COUNT, budget)
        else:
            made = decode_chain(embedded, alone, prompts[number], COUNT)
        place = 1
        for lattice, length in zip(seen, made.rounds, strict=True):
            labels = torch.tensor([text[place : place + BLOCK - 1]])
            chain, trees = path_lengths(lattice, labels, torch.ones_like(labels, dtype=torch.bool), [budget or 1])
            assert length == 1 + int(trees[0, 0] if budget else chain[0])
            place += length
            found.add(length)
    assert len(found) > 2
