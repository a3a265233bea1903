"""Decoding by captured passes on a GPU: what decoding with growing caches says, and faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dflash_lit.compilation.captured import Captured
from dflash_lit.decode.acceptance import measure_together, sweep
from dflash_lit.decode.chain import decode_chain, decode_plain
from dflash_lit.decode.stages import Stages, untimed
from dflash_lit.decode.static_drafter import static_pair
from dflash_lit.decode.tree import decode_tree, decode_tree_batch
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import drafter_for, lively_drafter, tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3}
PROMPTS = [[3, 9, 27, 5, 6, 6, 1] * 3, [7, 1, 2], [8, 8, 4, 11, 60]]
COUNT = 48


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


OF_DRAFTER: dict[str, dict[str, Any]] = {
    "plain": {},
    "path head": {"path_width": 16, "path_candidates": 32},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12},
}


def both(
    dtype: torch.dtype = torch.float32, of_drafter: dict[str, Any] | None = None, **changes: Any
) -> tuple[FrozenTarget, Drafter]:
    made = tiny_target(TargetInfo.load(EMBEDDED), **{**SIZES, **changes})
    target = FrozenTarget(made.info, made.model.to("cuda", dtype))
    sizes = {"block_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    drafter = lively_drafter(drafter_for(target, **sizes, **(of_drafter or {})))
    return target, drafter.to("cuda", dtype)


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("kind", OF_DRAFTER)
def test_the_same_texts_in_the_same_rounds(kind: str, backend: str | None, changes: dict[str, Any]) -> None:
    """In fp32, where other orders of summation do not change what is chosen."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target, drafter = both(of_drafter=OF_DRAFTER[kind], **changes)
    static = static_pair(target, drafter, longest_prompt=21, max_new_tokens=COUNT, budgets=[64], backend=backend)
    for prompt in PROMPTS:
        pairs = [
            (decode_plain(target, prompt, COUNT), decode_plain(static[0], prompt, COUNT)),
            (decode_chain(target, drafter, prompt, COUNT), decode_chain(*static, prompt, COUNT)),
        ]
        for budget in (5, 64):
            pairs.append((decode_tree(target, drafter, prompt, COUNT, budget), decode_tree(*static, prompt, COUNT, budget)))
        for theirs, ours in pairs:
            assert (ours.ids, ours.rounds) == (theirs.ids, theirs.rounds)
    theirs, ours = decode_tree_batch(target, drafter, PROMPTS, COUNT, 16), decode_tree_batch(*static, PROMPTS, COUNT, 16)
    assert [(made.ids, made.rounds) for made in ours] == [(made.ids, made.rounds) for made in theirs]


def test_bf16_is_lossless_up_to_ties_and_no_slower() -> None:
    target, drafter = both(torch.bfloat16)
    static = static_pair(target, drafter, longest_prompt=21, max_new_tokens=COUNT, budgets=[0, 16])
    captured = sweep(*static, PROMPTS, [0, 16], max_new_tokens=COUNT, reference=target, timed=2)
    eager = sweep(target, drafter, PROMPTS, [0, 16], max_new_tokens=COUNT, reference=target)
    for ours, theirs in zip(captured, eager, strict=True):
        assert ours.lossless or not theirs.lossless
        assert set(ours.stage_ms) == {"draft", "build", "verify", "commit"}
        assert ours.tokens_per_s_plain > 1.5 * theirs.tokens_per_s_plain
        assert ours.tokens_per_s_drafted > 1.5 * theirs.tokens_per_s_drafted


def test_stages_timed_apart_draft_the_same() -> None:
    """Drafting and building are graphs of their own then."""
    target, drafter = both()
    static = static_pair(target, drafter, longest_prompt=21, max_new_tokens=COUNT, budgets=[0, 16])
    for prompt in PROMPTS:
        clock = Stages(target.device)
        chains = [decode_chain(*static, prompt, COUNT, stages=timing) for timing in (untimed, clock)]
        trees = [decode_tree(*static, prompt, COUNT, 16, stages=timing) for timing in (untimed, clock)]
        for whole, parts in (chains, trees):
            assert (whole.ids, whole.rounds) == (parts.ids, parts.rounds)
        assert set(clock.milliseconds()) == {"draft", "build", "verify", "commit"}


def test_nothing_compiles_and_nothing_is_captured_after_the_first_text() -> None:
    target, drafter = both(torch.bfloat16)
    static = static_pair(target, drafter, longest_prompt=21, max_new_tokens=COUNT, budgets=[16])
    decode_tree(*static, PROMPTS[0], 8, 16)
    graphs, captured = counters["stats"]["unique_graphs"], len(static[1].captured)
    for prompt in PROMPTS[1:]:
        decode_tree(*static, prompt, COUNT, 16)
    assert (counters["stats"]["unique_graphs"], len(static[1].captured)) == (graphs, captured)


def test_batches_without_compilation() -> None:
    target, drafter = both()
    got = measure_together(target, drafter, PROMPTS, 16, max_new_tokens=COUNT)
    assert got.tau > 1
    assert not counters["stats"]["unique_graphs"]


def test_other_threads_may_use_the_device_during_a_capture() -> None:
    over, event = threading.Event(), torch.cuda.Event()
    event.record()
    asked: list[bool] = []

    def watch() -> None:
        while not over.is_set():
            asked.append(event.query())

    def double(x: torch.Tensor) -> torch.Tensor:
        before = len(asked)
        while watcher.is_alive() and len(asked) < before + 10:  # until the other thread has asked in the meantime
            time.sleep(0.001)
        return x * 2

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        x = torch.ones(3, device="cuda")
        assert torch.equal(Captured(double, torch.device("cuda"))(x), 2 * x)
    finally:
        over.set()
        watcher.join()


def test_captured_functions() -> None:
    total = torch.zeros((), device="cuda")

    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return x * 2

    harmless = Captured(add, torch.device("cuda"), lambda x: [torch.zeros_like(x)])
    for value in (1.0, 2.0, 3.0):
        x = torch.full((3,), value, device="cuda")
        assert torch.equal(harmless(x), 2 * x)
    assert float(total) == 18
    with pytest.raises(ValueError, match=r"captured for \(3,\), called with \(4,\)"):
        harmless(torch.ones(4, device="cuda"))
