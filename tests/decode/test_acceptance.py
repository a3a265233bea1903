"""Measuring: the comparison with the target's own text, and the figures."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_lit.decode.acceptance import _compare, measure, round_samples
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import embedded_config, lively_drafter

PROMPTS = [list(range(5, 25)), list(range(40, 64)), list(range(100, 130))]


def test_figures_of_a_measurement(embedded: FrozenTarget) -> None:
    drafter = lively_drafter(embedded_config()).train()
    got = measure(embedded, drafter, PROMPTS, max_new_tokens=12)
    rounds = [length for response in got.drafted for length in response.rounds]
    assert got.tau == sum(rounds) / len(rounds)
    assert got.lossless is True
    assert (got.identical, got.near_ties, got.prompts) == (3, 0, 3)
    assert got.accepted_by_slot == sorted(got.accepted_by_slot, reverse=True)
    assert got.tokens_per_s_plain > 0
    assert drafter.training
    samples = round_samples(embedded, PROMPTS, got.drafted, 2)
    texts = ["".join(accepted + bonus for accepted, bonus in sample.rounds) for sample in samples]
    assert texts[0].startswith(embedded.tokenizer.decode(got.drafted[0].ids[:3]))


def test_sampling_compares_nothing(embedded: FrozenTarget) -> None:
    got = measure(embedded, lively_drafter(embedded_config()), PROMPTS[:1], max_new_tokens=8, temperature=0.7)
    assert got.lossless is None
    assert math.isnan(got.tau_error)


def test_penalties_of_the_models_own_settings_do_not_disturb_the_reference(embedded: FrozenTarget) -> None:
    settings = embedded.model.generation_config
    settings.repetition_penalty = 3.0
    try:
        assert measure(embedded, lively_drafter(embedded_config()), PROMPTS, max_new_tokens=16).lossless is True
    finally:
        settings.repetition_penalty = None


def test_a_wrong_token_is_different_and_a_tie_is_not() -> None:
    """In bf16 the passes over one and over several tokens round differently: only then may a text differ, and only at a tie."""
    target = FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.bfloat16)
    prompt = PROMPTS[0]
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    order = logits.float().argsort(descending=True).tolist()
    assert _compare(target, prompt, [order[0], 7], [order[0], 7]) == "identical"
    assert _compare(target, prompt, [order[-1], 7], [order[0], 7]) == "different"
    assert _compare(target, prompt, [order[0]], [order[0], 7]) == "different"
    with torch.no_grad():  # make a tie: the second best gets the head of the best
        target.model.lm_head.weight[order[1]] = target.model.lm_head.weight[order[0]]
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    if torch.equal(logits[order[0]], logits[order[1]]) and int(logits.argmax()) in order[:2]:
        assert _compare(target, prompt, [order[1], 7], [order[0], 9]) == "near tie"
    else:
        pytest.fail("the planted tie is no tie")
