"""The batched chain against the chain of one text, token for token."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.data.prompts import stdlib_prompts
from dflash_lit.decode.chain import decode_chain
from dflash_lit.decode.chain_tree import draft_chain_tree
from dflash_lit.decode.tree import decode_tree_batch
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import drafter_for, lively_drafter, tiny_target

TOKENS = 24


@pytest.fixture
def small(embedded: FrozenTarget) -> FrozenTarget:
    return tiny_target(embedded.info)


def agreeable(target: FrozenTarget) -> Drafter:
    """A drafter that is right now and then: of eight tokens there are not many to miss."""
    return lively_drafter(drafter_for(target, block_size=5))


def prompts_of(target: FrozenTarget) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, (3 + 2 * number,), generator=generator).tolist() for number in range(6)]


def test_texts_and_rounds_are_those_of_the_chain(small: FrozenTarget) -> None:
    drafter, prompts = agreeable(small), prompts_of(small)
    batched = decode_tree_batch(small, drafter, prompts, TOKENS, 4, draft=draft_chain_tree)
    alone = [decode_chain(small, drafter, prompt, TOKENS) for prompt in prompts]
    assert [d.ids for d in batched] == [d.ids for d in alone]
    assert [d.rounds for d in batched] == [d.rounds for d in alone]
    assert max(max(d.rounds) for d in alone) > 2  # some drafts were accepted, or nothing was tested


def test_samples_are_those_of_the_chain(small: FrozenTarget) -> None:
    drafter = agreeable(small)
    for prompt in prompts_of(small)[:3]:
        (one,) = decode_tree_batch(
            small,
            drafter,
            [prompt],
            TOKENS,
            4,
            temperature=0.7,
            generator=torch.Generator().manual_seed(1),
            draft=draft_chain_tree,
        )
        two = decode_chain(small, drafter, prompt, TOKENS, temperature=0.7, generator=torch.Generator().manual_seed(1))
        assert (one.ids, one.rounds) == (two.ids, two.rounds)


def test_a_real_target_and_prompts_of_several_lengths(embedded: FrozenTarget) -> None:
    drafter = lively_drafter(drafter_for(embedded, block_size=8, mask_token_id=2))
    found = stdlib_prompts(embedded.tokenizer, count=4, prompt_tokens=24, held_out=True, seed=0)
    prompts = [list(prompt.input_ids[: 24 - 3 * number]) for number, prompt in enumerate(found)]
    batched = decode_tree_batch(embedded, drafter, prompts, 8, 7, draft=draft_chain_tree)
    assert [d.ids for d in batched] == [decode_chain(embedded, drafter, prompt, 8).ids for prompt in prompts]


def test_a_shorter_chain_drafts_the_first_slots(small: FrozenTarget) -> None:
    drafter, prompts = agreeable(small), prompts_of(small)
    short = decode_tree_batch(small, drafter, prompts, TOKENS, 1, draft=draft_chain_tree)
    whole = decode_tree_batch(small, drafter, prompts, TOKENS, 4, draft=draft_chain_tree)
    assert [d.ids for d in short] == [d.ids for d in whole]
    assert max(max(d.rounds) for d in short) == 2


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_beyond_the_block_is_refused(small: FrozenTarget, budget: int) -> None:
    with pytest.raises(ValueError, match="1 to 4 nodes"):
        decode_tree_batch(small, agreeable(small), [[1, 2]], 4, budget, draft=draft_chain_tree)
