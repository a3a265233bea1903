"""Measuring: the comparison with the target's own text, and the figures."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_lit.data.prompts import stdlib_prompts
from dflash_lit.decode.acceptance import _compare, measure, measure_together, round_samples, sweep
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from dflash_lit.target.reader import TargetReader
from tests.helpers import drafter_for, embedded_config, lively_drafter, tiny_target

PROMPTS = [list(range(5, 25)), list(range(40, 64)), list(range(100, 130))]


def test_figures_of_a_measurement(embedded: FrozenTarget) -> None:
    drafter = lively_drafter(embedded_config()).train()
    got = measure(embedded, drafter, PROMPTS, max_new_tokens=12)
    rounds = [length for response in got.drafted for length in response.rounds]
    assert got.tau == sum(rounds) / len(rounds)
    assert got.lossless is True
    assert (got.identical, got.near_ties, got.prompts) == (3, 0, 3)
    assert got.accepted_by_depth == sorted(got.accepted_by_depth, reverse=True)
    assert got.tokens_per_s_plain > 0
    assert drafter.training
    samples = round_samples(embedded, PROMPTS, got.drafted, 2)
    texts = ["".join(accepted + bonus for accepted, bonus in sample.rounds) for sample in samples]
    assert texts[0].startswith(embedded.tokenizer.decode(got.drafted[0].ids[:3]))


def test_a_sweep_over_budgets(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, vocab_size=16)
    drafter, prompts = lively_drafter(drafter_for(target)).train(), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    results = sweep(target, drafter, prompts, [0, 4, 40], max_new_tokens=24, reference=target, timed=1)
    chain, small, large = results
    assert drafter.training
    assert [(r.budget, r.nodes) for r in results] == [(0, 3), (4, 4), (40, 40)]
    assert chain.tau == measure(target, drafter, prompts, max_new_tokens=24).tau
    for result in results:
        assert result.lossless is True
        assert len(result.accepted_by_depth) == 3
        # A round yields its bonus token, and one for each depth at which a draft was accepted.
        assert result.tau == pytest.approx(1 + sum(result.accepted_by_depth), abs=0.2)
        low, high = result.tau_interval
        assert low <= result.tau <= high
        assert result.tau - low == pytest.approx(4.303 * result.tau_error, rel=1e-3)  # of three prompts
        assert set(result.stage_ms) == {"draft", "build", "verify", "commit"}
        assert min(result.stage_ms.values()) > 0 < result.plain_ms
        assert result.speedup == result.tokens_per_s_drafted / result.tokens_per_s_plain
        assert result.tokens_per_s_plain == chain.tokens_per_s_plain
    assert max(chain.tau, small.tau) < large.tau
    assert large.tau_error > 0


def test_together_is_one_by_one_without_speeds(embedded: FrozenTarget) -> None:
    drafter = lively_drafter(embedded_config())
    alone = measure(embedded, drafter, PROMPTS, max_new_tokens=12, budget=16, plain=False)
    together = measure_together(embedded, drafter, PROMPTS, 16, max_new_tokens=12)
    assert [made.ids for made in together.drafted] == [made.ids for made in alone.drafted]
    assert (together.tau, together.tau_error, together.prompts) == (alone.tau, alone.tau_error, 3)
    assert math.isnan(together.tokens_per_s_drafted)
    assert alone.tokens_per_s_drafted > 0
    assert measure_together(embedded, drafter, [], 16, max_new_tokens=12).prompts == 0


def test_trees_are_refused_before_anything_is_decoded_and_chains_are_not(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, vocab_size=64)
    target.info.config.alibi = True
    drafter = lively_drafter(drafter_for(target))
    with pytest.raises(UserError, match=r"counts columns \(ALiBi\).*decode with a chain \(budget 0\)"):
        sweep(target, drafter, [[1, 2, 3]], [0, 16], max_new_tokens=4, reference=target)
    with pytest.raises(UserError, match="decode with a chain"):
        measure_together(target, drafter, [[1, 2, 3]], 16, max_new_tokens=4)
    assert sweep(target, drafter, [[1, 2, 3]], [0], max_new_tokens=4, reference=target)[0].lossless is True


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
    if not torch.equal(logits[order[0]], logits[order[1]]) or int(logits.argmax()) not in order[:2]:
        pytest.fail("the planted tie is no tie")
    right = greedy_behind(target, [*prompt, order[1]], 3)
    assert _compare(target, prompt, [order[1], *right], [order[0], 9]) == "near tie"
    # Behind a tie, too, every token is the target's.
    for place in range(3):
        wrong = [*right[:place], order[-1], *right[place + 1 :]]
        assert _compare(target, prompt, [order[1], *wrong], [order[0], 9]) == "different"


def greedy_behind(target: FrozenTarget, ids: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        for _ in range(count):
            ids = [*ids, int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


def test_in_bf16_a_defect_of_decoding_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.bfloat16)
    drafter = lively_drafter(embedded_config(block_size=8))
    prompts = [p.input_ids for p in stdlib_prompts(target.tokenizer, count=3, prompt_tokens=32, held_out=True, seed=0)]
    assert measure(target, drafter, prompts, max_new_tokens=48).lossless is True
    forget = TargetReader.forget

    def forget_too_much(self: TargetReader, count: int) -> None:
        forget(self, count)
        self.cache.layers[-1].values[:, :, -1] = 0  # of the last token that stays, in one layer

    monkeypatch.setattr(TargetReader, "forget", forget_too_much)
    assert measure(target, drafter, prompts, max_new_tokens=48).lossless is False


@pytest.mark.parametrize(
    ("drafted", "verdict"),
    [([5, 5, 5], "near tie"), ([5, 3], "near tie"), ([5, 5], "different"), ([5, 3, 5], "different")],
    ids=["full length", "ended", "broken off", "gone on behind its end"],
)
def test_behind_a_tie_a_text_ends_as_all_do(drafted: list[int], verdict: str) -> None:
    target = tiny_target(TargetInfo.load(EMBEDDED), eos=3, vocab_size=16)
    target.model.lm_head = torch.nn.Linear(16, 16)
    with torch.no_grad():  # three tokens are the best behind every text
        target.model.lm_head.weight.zero_()
        target.model.lm_head.bias.fill_(-1.0)
        target.model.lm_head.bias[[3, 5, 6]] = 1.0
    assert _compare(target, [1, 2], drafted, [6, 6, 6]) == verdict


@pytest.mark.parametrize(("steps", "verdict"), [(8, "near tie"), (9, "different"), (-1, "near tie")])
@pytest.mark.parametrize("best", [1.0, 7.9375, 8.0])
def test_a_tie_is_as_wide_as_some_spacings_of_the_logits(best: float, steps: int, verdict: str) -> None:
    """Of bf16 at the best logit: 2**-7 at 1 to 2, 2**-4 at 8 to 16, half of that just below 8."""
    target = tiny_target(TargetInfo.load(EMBEDDED), vocab_size=16)
    spacing = 2.0 ** (math.floor(math.log2(best)) - 7)
    model = target.model.to(torch.bfloat16)
    model.lm_head = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    with torch.no_grad():  # the same logits behind every text
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-1.0)
        model.lm_head.bias[3], model.lm_head.bias[5] = best, best - steps * spacing
    for drafted, own in (([5, 3], [3, 3]), ([3, 3], [5, 3]), ([3, 5], [5, 3])):
        assert _compare(target, [1, 2], drafted, own) == verdict
