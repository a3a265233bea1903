"""Decoding by trees: the target's own text, by real target passes."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
)

from dflash_lit.attention.attend import Attend, ContextKV
from dflash_lit.data.prompts import stdlib_prompts
from dflash_lit.decode import tree as tree_module
from dflash_lit.decode.acceptance import _compare, _generate
from dflash_lit.decode.cache import ContextCache
from dflash_lit.decode.chain import Decoded, decode_chain, decode_plain, one_block_attention
from dflash_lit.decode.tree import Tree, build_tree, decode_tree, decode_tree_batch
from dflash_lit.decode.tree_cache import RowsCache
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from tests.helpers import drafter_for, embedded_config, lively_drafter, random, tiny_target

COUNT = 12
"""Tokens a response in the long tests."""


class NoisyOracle(Drafter):
    """Knows the target's own continuations of some prompts, the less surely the deeper the slot.

    Its marginals are the target's distributions there, and noise on the hidden states: wrong now and then, and then often nearly
    right, as real drafters are.
    """

    def __init__(
        self, config: DrafterConfig, target: FrozenTarget, prompts: Sequence[list[int]], count: int, noise: float, seed: int = 0
    ) -> None:
        super().__init__(config)
        rows, self.whole = [], []
        for prompt, text in zip(prompts, _generate(target, prompts, count + config.block_size), strict=True):
            ids = torch.tensor([[*prompt, *text]])
            positions = torch.arange(ids.shape[1])[None]
            features = target.features(ids, torch.zeros_like(ids), positions, config.target_layer_ids)
            with torch.no_grad():
                self.whole.append(self.context(features, positions))
                rows.append(target.model.model(ids).last_hidden_state[0])  # number i makes the head pick token i + 1
        longest = max(len(row) for row in rows) + config.block_size
        states = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row), -1)]) for row in rows])
        slots = torch.arange(1, config.block_size + 1)[:, None]
        scale = noise * states.std() * (slots / config.block_size) ** 0.5
        self.states = states[:, :, None] + scale * random(*states.shape[:2], config.block_size, states.shape[2], seed=seed)

    def for_prompt(self, number: int) -> NoisyOracle:
        """The same for one of the prompts alone."""
        alone = NoisyOracle.__new__(NoisyOracle)
        alone.__dict__.update(self.__dict__)
        alone.states, alone.whole = self.states[number : number + 1], self.whole[number : number + 1]
        return alone

    def draft(self, noise: Tensor, positions: Tensor, context: Sequence[ContextKV], attend: Attend) -> Tensor:
        # What has been cached is the context of exactly the tokens before each anchor.
        for row, whole in enumerate(self.whole):
            length = int(positions[row, 0])
            for cached, everything in zip(context, whole, strict=True):
                for part, own in zip(cached, everything, strict=True):
                    torch.testing.assert_close(part[row, :, :length], own[0, :, :length], rtol=1e-3, atol=1e-3)
        rows = torch.arange(len(positions))[:, None]
        slots = torch.arange(positions.shape[1])
        return self.states[rows, (positions - 1).clamp(max=self.states.shape[1] - 1), slots]


@pytest.fixture(scope="module")
def prompts(embedded: FrozenTarget) -> list[list[int]]:
    """200 of different lengths."""
    texts = stdlib_prompts(embedded.tokenizer, count=200, prompt_tokens=24, held_out=True, seed=0)
    return [list(prompt.input_ids)[: 3 + 3 * (number % 8)] for number, prompt in enumerate(texts)]


@pytest.fixture(scope="module")
def references(embedded: FrozenTarget, prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's own greedy outputs."""
    return _generate(embedded, prompts, COUNT)


@pytest.fixture(scope="module")
def oracle(embedded: FrozenTarget, prompts: list[list[int]]) -> NoisyOracle:
    return NoisyOracle(embedded_config(block_size=8), embedded, prompts, COUNT, noise=0.7)


def assert_lossless(
    target: FrozenTarget, prompts: Sequence[list[int]], decoded: Sequence[Decoded], references: Sequence[list[int]]
) -> None:
    """Token for token, but for places where the target's two best tokens are equal within fp32."""
    verdicts = Counter(
        _compare(target, prompt, made.ids, own) for prompt, made, own in zip(prompts, decoded, references, strict=True)
    )
    assert verdicts["different"] == 0
    assert verdicts["identical"] >= 0.99 * len(prompts)
    for made in decoded:
        assert 1 + sum(made.rounds) >= len(made.ids)


def tau(decoded: Sequence[Decoded]) -> float:
    rounds = [length for made in decoded for length in made.rounds]
    return sum(rounds) / len(rounds)


# -- greedy


def test_lossless_on_200_prompts_with_a_good_drafter_which_a_tree_makes_better(
    embedded: FrozenTarget, prompts: list[list[int]], references: list[list[int]], oracle: NoisyOracle
) -> None:
    decoded = [decode_tree(embedded, oracle.for_prompt(n), prompt, COUNT, 16) for n, prompt in enumerate(prompts)]
    assert_lossless(embedded, prompts, decoded, references)
    assert {1, 2, 4, 8} <= {length for made in decoded for length in made.rounds}
    chains = [decode_chain(embedded, oracle.for_prompt(n), prompts[n], COUNT) for n in range(0, 200, 4)]
    assert tau(decoded[::4]) > tau(chains) + 0.5 > 2


@pytest.mark.parametrize("kind", ["untrained", "good"])
def test_a_batch_is_lossless_and_says_what_each_prompt_alone_says(
    embedded: FrozenTarget, prompts: list[list[int]], references: list[list[int]], oracle: NoisyOracle, kind: str
) -> None:
    """All 200 at once, of all lengths."""
    drafter: Drafter = lively_drafter(embedded_config(block_size=4, causal=True))
    budget = 6  # many passes
    if kind == "good":
        drafter, budget = oracle, 16
    decoded = decode_tree_batch(embedded, drafter, prompts, COUNT, budget)
    assert_lossless(embedded, prompts, decoded, references)
    for number in range(0, 200, 20):
        own = oracle.for_prompt(number) if kind == "good" else drafter
        alone = decode_tree(embedded, own, prompts[number], COUNT, budget)
        assert (alone.ids, alone.rounds) == (decoded[number].ids, decoded[number].rounds)


def test_budgets(embedded: FrozenTarget, prompts: list[list[int]], references: list[list[int]], oracle: NoisyOracle) -> None:
    """More nodes accept more; a single one is a chain of one draft; more than there are prefixes is allowed."""
    some = range(0, 200, 20)
    found = []
    for budget in (1, 7, 64):
        decoded = [decode_tree(embedded, oracle.for_prompt(n), prompts[n], COUNT, budget) for n in some]
        assert_lossless(embedded, [prompts[n] for n in some], decoded, [references[n] for n in some])
        found.append(tau(decoded))
    assert found == sorted(found)
    assert 1 < found[0] <= 2
    drafter = lively_drafter(embedded_config(block_size=2))
    assert decode_tree(embedded, drafter, prompts[0], 6, 600).ids == references[0][:6]


class Trees:
    """Records what ``build_tree`` is given and makes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tree]] = []

        def recorded(log_probs: Tensor, token_ids: Tensor, budget: int) -> Tree:
            self.seen.append((log_probs, token_ids, build_tree(log_probs, token_ids, budget)))
            return self.seen[-1][2]

        monkeypatch.setattr(tree_module, "build_tree", recorded)


def test_rounds_are_what_the_teacher_forced_metric_says(
    embedded: FrozenTarget, prompts: list[list[int]], oracle: NoisyOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, checked = 24, Counter[int]()
    texts = _generate(embedded, prompts[::8], COUNT + 8)
    for number in range(0, 200, 8):
        with monkeypatch.context() as patched:
            trees = Trees(patched)
            made = decode_tree(embedded, oracle.for_prompt(number), prompts[number], COUNT, budget)
        text = texts[number // 8]
        assert len(trees.seen) == len(made.rounds)
        place = 1
        for (log_probs, token_ids, _), length in zip(trees.seen, made.rounds, strict=True):
            path = torch.tensor(text[place : place + 7])
            # A token that is not among the best ``budget`` of its slot is in no tree.
            found = token_ids[0, : len(path)] == path[:, None]
            label = torch.where(found, log_probs[0, : len(path)], -torch.inf).max(dim=1).values
            accepted = int(accepted_in_tree(path_scores(label[None]), tree_thresholds(log_probs, [budget]))[0, 0])
            if path.shape[0] == 7 and not set(text[place : place + length]) & set(embedded.eos_ids):
                assert length == accepted + 1
                checked[length] += 1
            place += length
    assert sum(checked.values()) > 60
    assert len(checked) > 4


@pytest.mark.parametrize("stop", range(6))
def test_an_end_token_anywhere_in_a_path(
    embedded: FrozenTarget, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Texts that end at different times, one of them at once, next to others that go on."""
    some, count = prompts[40:44], 24
    drafter = NoisyOracle(embedded_config(block_size=4), embedded, some, count, noise=0.3)
    free = [decode_plain(embedded, prompt, count).ids for prompt in some]
    ends = {free[0][stop], free[1][0]}
    monkeypatch.setattr(embedded.model.generation_config, "eos_token_id", sorted(ends))
    decoded = decode_tree_batch(embedded, drafter, some, count, 16)
    for made, text in zip(decoded, free, strict=True):
        length = next((place + 1 for place, token in enumerate(text) if token in ends), count)
        assert made.ids == text[:length]
        assert 1 + sum(made.rounds) == length or length == count
    assert len(decoded[1].ids) == 1
    assert decoded[1].rounds == []
    assert 0 < min(made.seconds for made in decoded) == decoded[1].seconds


@pytest.mark.parametrize("count", [1, 2, 5])
def test_output_is_cut_at_max_new_tokens(
    embedded: FrozenTarget, prompts: list[list[int]], references: list[list[int]], count: int
) -> None:
    drafter = NoisyOracle(embedded_config(block_size=8), embedded, prompts[:3], COUNT, noise=0.01)
    decoded = decode_tree_batch(embedded, drafter, prompts[:3], count, 16)
    assert [made.ids for made in decoded] == [reference[:count] for reference in references[:3]]
    for made in decoded:
        assert sum(made.rounds[:-1]) < count - 1 <= sum(made.rounds) if count > 1 else made.rounds == []


def test_a_text_that_has_ended_stays_as_it_is(embedded: FrozenTarget, prompts: list[list[int]]) -> None:
    """Next to one that goes on it must not grow past the target's positions."""
    target = tiny_target(embedded.info, vocab_size=64)
    some = [[3, 9, 27, 5], [7, 7, 8]]
    free = [decode_plain(target, prompt, 60).ids for prompt in some]
    target.model.generation_config.eos_token_id = free[0][1]
    readers: list[Any] = []

    class Watched:
        device, eos_ids, ends = target.device, target.eos_ids, target.ends

        def reader(self, layer_ids: Sequence[int]) -> Any:
            readers.append(target.reader(layer_ids))
            return readers[-1]

    drafter = lively_drafter(drafter_for(target, block_size=4))
    decoded = decode_tree_batch(Watched(), drafter, some, 60, 16)
    assert [made.ids for made in decoded] == [decode_tree(target, drafter, prompt, 60, 16).ids for prompt in some]
    lengths = readers[0].lengths
    assert lengths[0] < len(some[0]) + 6
    assert lengths[1] >= len(some[1]) + len(decoded[1].ids) - 4


# -- the target's side


def branching(rows: int, vocabulary: int, seed: int) -> Tree:
    log_probs, ids = (0.7 * random(rows, 4, vocabulary, seed=seed)).log_softmax(-1).sort(dim=-1, descending=True)
    return build_tree(log_probs, ids, 12)


SLIDING = {"use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", [{}, {**SLIDING, "max_window_layers": 1}, {**SLIDING, "max_window_layers": 0}])
def test_a_tree_pass_is_a_pass_for_each_branch_and_the_cache_is_that_of_reading(
    embedded: FrozenTarget, changes: dict[str, Any], attention: str
) -> None:
    """Several rounds over three texts of different lengths, against reading each text and branch by itself."""
    target = tiny_target(embedded.info, vocab_size=32, num_hidden_layers=4, **changes)
    target.model.set_attn_implementation(attention)
    assert len(target.info.windows) == (2 if changes.get("max_window_layers") else 1)
    layers, texts = (0, 2), [[3, 9, 27, 5, 1, 2, 30], [7], [8, 8, 4]]
    close = {"rtol": 1e-4, "atol": 1e-4}

    def alone(ids: list[int]) -> tuple[Tensor, Tensor, Any]:
        reader = target.reader(layers)
        logits, features = reader.read(torch.tensor([ids]))
        assert features is not None
        return logits[0], features[0], reader.cache

    reader = target.reader(layers)
    padded = torch.tensor([[*text, *[31] * (7 - len(text))] for text in texts])
    logits, features = reader.read_prompts(padded, [len(text) for text in texts])
    for row, text in enumerate(texts):
        expected = alone(text)
        torch.testing.assert_close(logits[row], expected[0][-1], **close)
        torch.testing.assert_close(features[row, : len(text)], expected[1], **close)

    for seed in range(4):
        tree = branching(3, 32, seed)
        tokens = torch.cat([torch.tensor([[seed], [5], [6]]), tree.tokens], dim=1)
        logits, features = reader.read_tree(tokens, F.pad(tree.depths, (1, 0)), tree_module.ancestor_mask(tree))
        branches = []
        for row, text in enumerate(texts):
            paths = [[0]]
            for parent in tree.parents[row].tolist():
                paths.append([*paths[parent], len(paths)])
            branches.append(paths)
            for node in range(0, 13, 3):
                expected = alone([*text, *tokens[row, paths[node]].tolist()])
                torch.testing.assert_close(logits[row, node], expected[0][-1], **close)
                torch.testing.assert_close(features[row, node], expected[1][-1], **close)
        # Paths of different lengths, and in the last round nothing of the second text.
        kept = [max(branches[0], key=len), branches[1][-1], [0]]
        counts = [len(path) if (row, seed) != (1, 3) else 0 for row, path in enumerate(kept)]
        rows = torch.tensor([[*path, *[0] * (5 - len(path))] for path in kept])
        reader.keep(rows, counts)
        for row, count in enumerate(counts):
            texts[row] += tokens[row, kept[row][:count]].tolist()
        assert reader.lengths == [len(text) for text in texts]
        assert reader.length == reader.cache.get_seq_length() == max(reader.lengths)
        for row, text in enumerate(texts):
            for got, own in zip(reader.cache.layers, alone(text)[2].layers, strict=True):
                torch.testing.assert_close(got.keys[row, :, : len(text)], own.keys[0], **close)
                torch.testing.assert_close(got.values[row, :, : len(text)], own.values[0], **close)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
LEARNED = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}


def target_of(info: TargetInfo, config: PretrainedConfig, attention: str) -> FrozenTarget:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = 10**6
    return FrozenTarget(TargetInfo("tiny", model.config, info.tokenizer), model)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (LlamaConfig(**SIZES), "sdpa"),
        (MistralConfig(**SIZES, sliding_window=6), "sdpa"),
        (Cohere2Config(**SIZES, **MIXED, logit_scale=1.0), "sdpa"),
        (GptOssConfig(**SIZES, **EXPERTS, **MIXED), "eager"),  # sinks and experts
        (DeepseekV3Config(**{**SIZES, **LATENT}), "sdpa"),  # keys and values of different widths
        (GPT2Config(**LEARNED, bos_token_id=None, eos_token_id=None), "eager"),  # learned positions
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else value,
)
def test_other_families(embedded: FrozenTarget, config: PretrainedConfig, attention: str) -> None:
    target = target_of(embedded.info, config, attention)
    drafter = lively_drafter(drafter_for(target, block_size=4))
    texts = [[3, 9, 27, 5], [7] * 9, [11]]
    alone = [decode_plain(target, text, 20).ids for text in texts]
    decoded = decode_tree_batch(target, drafter, texts, 20, 80)
    assert [made.ids for made in decoded] == alone
    assert tau(decoded) > 1
    assert [made.rounds for made in decoded] == [decode_tree(target, drafter, text, 20, 80).rounds for text in texts]


def test_a_model_that_makes_all_logits_whatever_is_asked(embedded: FrozenTarget) -> None:
    """As the code of a model on a hub may do."""
    target = tiny_target(embedded.info, vocab_size=64)
    texts = [[3, 9, 27, 5], [7] * 9, [11]]
    ids = torch.tensor([[*text, *[0] * (9 - len(text))] for text in texts])
    expected, _ = target.reader(()).read_prompts(ids, [4, 9, 1])
    forward = target.model.forward

    @functools.wraps(forward)
    def all_of_them(**arguments: Any) -> Any:
        del arguments["logits_to_keep"]
        return forward(**arguments)

    target.model.forward = all_of_them
    torch.testing.assert_close(target.reader(()).read_prompts(ids, [4, 9, 1])[0], expected)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=True), "sdpa"),
        (MptConfig(vocab_size=64, d_model=32, n_layers=3, n_heads=4), "eager"),
    ],
    ids=["a switch", "always"],
)
def test_attention_that_counts_columns_is_refused(embedded: FrozenTarget, config: PretrainedConfig, attention: str) -> None:
    target = target_of(embedded.info, config, attention)
    with pytest.raises(UserError, match=r"counts columns \(ALiBi\) rather than positions.*decode with a chain"):
        decode_tree(target, lively_drafter(drafter_for(target)), [5, 6, 7], 4, 8)


def test_recurrent_layers_are_refused(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info, vocab_size=64)
    target.info.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UserError, match="'linear_attention', from whose state rejected drafts cannot be taken back"):
        decode_tree(target, lively_drafter(drafter_for(target)), [5, 6, 7], 4, 8)


# -- the drafter's side


def test_a_cache_of_rows_is_a_cache_for_each_row() -> None:
    together, alone = RowsCache(3), [ContextCache() for _ in range(3)]
    for number, counts in enumerate([[5, 1, 3], [1, 1, 1], [0, 4, 2], [130, 0, 7], [1, 2, 3]]):
        new = [
            (random(3, 2, max(counts), 4, seed=10 * number + i), random(3, 2, max(counts), 4, seed=-10 * number - i - 1))
            for i in (0, 1)
        ]
        together.append_rows(new, counts)
        present = together.present()
        assert (present is None) == (len(set(together.lengths)) == 1)
        for row, cache in enumerate(alone):
            cache.append([(k[row : row + 1, :, : counts[row]], v[row : row + 1, :, : counts[row]]) for k, v in new])
            assert together.lengths[row] == cache.length
            assert present is None or int(present[row].sum()) == cache.length
            for ours, theirs in zip(together.views(), cache.views(), strict=True):
                for part, whole in zip(ours, theirs, strict=True):
                    assert torch.equal(part[row : row + 1, :, : cache.length], whole)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sees_what_is_present(causal: bool) -> None:
    queries, (keys, values), block = random(3, 4, 3, 8), random(2, 3, 2, 5, 8), (random(3, 2, 3, 8), random(3, 2, 3, 8, seed=1))
    lengths = [5, 2, 0]
    got = one_block_attention(causal, torch.arange(5) < torch.tensor(lengths)[:, None])(queries, (keys, values), block)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1)
        context, own = (keys[part, :, :length], values[part, :, :length]), (block[0][part], block[1][part])
        torch.testing.assert_close(got[part], one_block_attention(causal)(queries[part], context, own))


# -- sampled


def chi_square_p(seen: Counter[tuple[int, ...]], probability: dict[tuple[int, ...], float], tries: int) -> float:
    """Of the frequencies under the exact probabilities; rare outcomes are one cell."""
    frequent = [path for path in probability if probability[path] * tries >= 5]
    cells = [(seen[path], probability[path] * tries) for path in frequent]
    cells.append((tries - sum(n for n, _ in cells), tries - sum(e for _, e in cells)))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(("together", "runs"), [(1, 400), (100, 30)])
def test_sampled_output_has_the_targets_distribution(embedded: FrozenTarget, together: int, runs: int) -> None:
    """Three sampled tokens against their exact joint distribution: p > 0.001 by chi-square, for one prompt and in a batch."""
    target = tiny_target(embedded.info, seed=3, vocab_size=5, num_hidden_layers=2, initializer_range=0.3)
    drafter = lively_drafter(drafter_for(target, block_size=3, num_hidden_layers=1, target_layer_ids=(0,)), seed=1)
    texts, temperature = [[1, 3], [4, 0, 0, 2]][:together], 1.3
    generator = torch.Generator().manual_seed(0)
    decoded: list[list[Decoded]] = [[] for _ in texts]
    for _ in range(runs):
        batch = [texts[row % len(texts)] for row in range(together)]
        for row, made in enumerate(
            decode_tree_batch(target, drafter, batch, 3, 6, temperature=temperature, generator=generator)
        ):
            decoded[row % len(texts)].append(made)

    paths = list(itertools.product(range(5), repeat=3))
    for text, responses in zip(texts, decoded, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([[*text, *path] for path in paths])).logits / temperature
        steps = logits[:, len(text) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(paths)[..., None])
        probability = dict(zip(paths, steps[..., 0].sum(-1).exp().double().tolist(), strict=True))
        assert sum(probability.values()) == pytest.approx(1)
        rounds = Counter(made.rounds[0] for made in responses)
        assert all(rounds[length] > 0.02 * len(responses) for length in (1, 2, 3))  # rejection, part and all of a path
        assert chi_square_p(Counter(tuple(made.ids) for made in responses), probability, len(responses)) > 1e-3


def test_one_seed_one_output(embedded: FrozenTarget, prompts: list[list[int]]) -> None:
    drafter = lively_drafter(embedded_config())

    def sample(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        decoded = decode_tree_batch(embedded, drafter, prompts[:3], 12, 16, temperature=1.0, generator=generator)
        return [made.ids for made in decoded]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
