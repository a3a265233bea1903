from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.decode.cache import ContextCache
from dflash_lit.decode.chain import decode_chain, decode_plain, one_block_attention
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import drafter_for, embedded_config, lively_drafter, random, tiny_target

TEXTS = ["def main(", "import os\n\nclass Path:\n    def", "for index in range(", "\n"]


def generate(target: FrozenTarget, prompt: list[int], count: int) -> list[int]:
    """Hugging Face's own greedy output."""
    ids = torch.tensor([prompt])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


class Oracle(Drafter):
    """Knows the target's own continuation, and is wrong just at the places it is told to be."""

    def __init__(
        self, config: DrafterConfig, target: FrozenTarget, prompt: list[int], count: int, wrong: Sequence[int]
    ) -> None:
        super().__init__(config)
        ids = torch.tensor([[*prompt, *decode_plain(target, prompt, count + config.block_size).ids]])
        with torch.no_grad():
            self.states = target.model.model(ids).last_hidden_state[0]  # number i makes the head pick token i + 1
            self.states = torch.cat([self.states, self.states[-1:].expand(config.block_size, -1)])
        self.wrong = set(wrong)
        positions = torch.arange(ids.shape[1])[None]
        features = target.features(ids, torch.zeros_like(ids), positions, config.target_layer_ids)
        with torch.no_grad():
            self.whole = self.context(features, positions)

    def draft(self, noise: Tensor, positions: Tensor, context: Sequence[ContextKV], attend: Attend) -> Tensor:
        # What has been cached is the context of exactly the tokens before the anchor.
        for cached, whole in zip(context, self.whole, strict=True):
            assert cached[0].shape[2] == positions[0, 0]
            for part, everything in zip(cached, whole, strict=True):
                torch.testing.assert_close(part, everything[:, :, : part.shape[2]], rtol=1e-3, atol=1e-3)
        signs = torch.tensor([-1.0 if int(place) in self.wrong else 1.0 for place in positions[0]])
        return (self.states[positions[0] - 1] * signs[:, None])[None]


def expected_rounds(prompt: int, count: int, size: int, wrong: Sequence[int]) -> list[int]:
    rounds, made, anchor = [], 1, prompt
    while made < count:
        accepted = next((k - 1 for k in range(1, size) if anchor + k in wrong), size - 1)
        rounds.append(accepted + 1)
        made, anchor = made + accepted + 1, anchor + accepted + 1
    return rounds


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("causal", [False, True])
def test_an_untrained_drafter_changes_nothing(embedded: FrozenTarget, text: str, causal: bool) -> None:
    prompt = embedded.tokenizer.encode(text)
    drafter = lively_drafter(embedded_config(block_size=5, causal=causal))
    drafted = decode_chain(embedded, drafter, prompt, 16)
    assert drafted.ids == decode_plain(embedded, prompt, 16).ids == generate(embedded, prompt, 16)
    assert 1 + sum(drafted.rounds) >= len(drafted.ids)


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("kind", ["never wrong", "always wrong", "sometimes wrong"])
def test_drafted_output_is_the_targets_and_tau_is_what_it_must_be(embedded: FrozenTarget, kind: str, size: int) -> None:
    prompt, count = embedded.tokenizer.encode(TEXTS[0]), 22
    first = len(prompt)
    wrong = {
        "never wrong": [],
        "always wrong": range(first + 60),
        "sometimes wrong": [first + i for i in (2, 3, 7, 12, 13, 17)],
    }
    drafter = Oracle(embedded_config(block_size=size), embedded, prompt, count, wrong[kind])
    drafted = decode_chain(embedded, drafter, prompt, count)
    assert drafted.ids == decode_plain(embedded, prompt, count).ids == generate(embedded, prompt, count)
    assert drafted.rounds == expected_rounds(first, count, size, wrong[kind])
    if kind != "sometimes wrong":
        assert drafted.tau == {"never wrong": size, "always wrong": 1}[kind]
    else:
        assert len(set(drafted.rounds)) > 1


@pytest.mark.parametrize("stop", range(8))
def test_an_end_token_anywhere_in_a_block(embedded: FrozenTarget, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, count = embedded.tokenizer.encode(TEXTS[1]), 24
    drafter = Oracle(embedded_config(block_size=4), embedded, prompt, count, [])
    free = decode_plain(embedded, prompt, count).ids
    end = free[stop]
    monkeypatch.setattr(embedded.model.generation_config, "eos_token_id", [end, 0])
    drafted = decode_chain(embedded, drafter, prompt, count)
    assert drafted.ids == free[: free.index(end) + 1]
    assert drafted.ids == decode_plain(embedded, prompt, count).ids == generate(embedded, prompt, count)
    assert 1 + sum(drafted.rounds) == len(drafted.ids)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_output_is_cut_at_max_new_tokens(embedded: FrozenTarget, count: int) -> None:
    prompt = embedded.tokenizer.encode(TEXTS[2])
    drafter = Oracle(embedded_config(block_size=4), embedded, prompt, 12, [])
    drafted = decode_chain(embedded, drafter, prompt, count)
    assert drafted.ids == decode_plain(embedded, prompt, 12).ids[:count]
    assert drafted.rounds == [4] * -(-(count - 1) // 4)


def test_a_target_with_sliding_layers(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, vocab_size=64, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    prompt, count = [3, 9, 27, 5], 30
    wrong = [len(prompt) + i for i in (3, 11, 12, 20)]
    drafter = Oracle(drafter_for(target, block_size=4), target, prompt, count, wrong)
    drafted = decode_chain(target, drafter, prompt, count)
    assert drafted.ids == decode_plain(target, prompt, count).ids == generate(target, prompt, count)
    assert drafted.rounds == expected_rounds(len(prompt), count, 4, wrong)


def test_sampled_output_has_the_targets_distribution(embedded: FrozenTarget) -> None:
    """Three sampled tokens against their exact joint distribution, by chi-square."""
    target = tiny_target(embedded.info, seed=3, vocab_size=5, num_hidden_layers=2, initializer_range=0.3)
    drafter = lively_drafter(drafter_for(target, block_size=3, num_hidden_layers=1, target_layer_ids=(0,)), seed=1)
    prompt, temperature, tries = [1, 3], 1.3, 600
    paths = list(itertools.product(range(5), repeat=3))
    with torch.no_grad():
        logits = target.model(torch.tensor([[*prompt, *path] for path in paths])).logits / temperature
    steps = logits[:, 1:4].log_softmax(-1).gather(-1, torch.tensor(paths)[..., None])
    probability = dict(zip(paths, steps[..., 0].sum(-1).exp().double().tolist(), strict=True))
    assert sum(probability.values()) == pytest.approx(1)

    generator = torch.Generator().manual_seed(0)
    decoded = [decode_chain(target, drafter, prompt, 3, temperature=temperature, generator=generator) for _ in range(tries)]
    rounds = Counter(d.rounds[0] for d in decoded)
    assert all(rounds[length] > 0.02 * tries for length in (1, 2, 3))  # rejection, part and all of a block
    seen = Counter(tuple(d.ids) for d in decoded)

    frequent = [path for path in paths if probability[path] * tries >= 5]
    cells = [(seen[path], probability[path] * tries) for path in frequent]
    cells.append((tries - sum(n for n, _ in cells), tries - sum(e for _, e in cells)))
    chi_square = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    assert torch.special.gammaincc(half[0], half[1]) > 1e-3


def test_one_seed_one_output(embedded: FrozenTarget) -> None:
    prompt, drafter = embedded.tokenizer.encode(TEXTS[0]), lively_drafter(embedded_config())

    def sample(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return decode_chain(embedded, drafter, prompt, 12, temperature=1.0, generator=generator).ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_the_cache_grows_and_keeps_what_it_holds() -> None:
    cache, parts = ContextCache(), []
    for number, tokens in enumerate([3, 1, 124, 1, 1, 400, 7]):
        parts.append(
            [
                (random(2, 2, tokens, 4, seed=10 * number + i), random(2, 2, tokens, 4, seed=-10 * number - i - 1))
                for i in (0, 1)
            ]
        )
        cache.append(parts[-1])
        assert cache.length == sum(part[0][0].shape[2] for part in parts)
        for layer, (keys, values) in enumerate(cache.views()):
            assert torch.equal(keys, torch.cat([part[layer][0] for part in parts], dim=2))
            assert torch.equal(values, torch.cat([part[layer][1] for part in parts], dim=2))


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_attention(causal: bool) -> None:
    queries, context, block = (
        random(1, 4, 3, 8),
        (random(1, 2, 5, 8), random(1, 2, 5, 8, seed=1)),
        (random(1, 2, 3, 8), random(1, 2, 3, 8)),
    )
    got = one_block_attention(causal)(queries, context, block)
    for slot in range(3):
        seen = slice(0, 5 + (slot + 1 if causal else 3))
        keys, values = (torch.cat(pair, dim=2)[:, :, seen].repeat_interleave(2, 1) for pair in zip(context, block, strict=True))
        expected = F.scaled_dot_product_attention(queries[:, :, slot : slot + 1], keys, values)
        torch.testing.assert_close(got[:, :, slot : slot + 1], expected)
