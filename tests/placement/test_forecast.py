"""The forecast against figures made by hand, measured ones of docs/performance.md, and brute force."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, Qwen3MoeConfig, Qwen3NextConfig

from dflash_lit.doctor.memory import PUBLISHED, SMALL, run_bytes
from dflash_lit.errors import UserError
from dflash_lit.placement.flops import block_pairs, causal_pairs, layer_weights
from dflash_lit.placement.forecast import (
    MEASURED,
    Colocated,
    InFlight,
    Rates,
    Verdict,
    expected_rates,
    flop_per_token,
    forecast,
    rank_bytes,
)
from dflash_lit.placement.known import QWEN3_8B
from dflash_lit.placement.layout import Layout, Role, devices
from dflash_lit.placement.sizes import Sizes, measure_sizes
from dflash_lit.placement.target_worker import SENDS

quick = settings(deadline=None, derandomize=True, max_examples=60)
layouts = st.builds(Layout, st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
rates = st.builds(Rates, st.floats(1, 1e6), st.floats(1, 1e6))

LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12_288  # matrices of a layer of Qwen3-8B and of its drafter
ENDS = 2 * 151_936 * 4096


@pytest.fixture(scope="module")
def qwen() -> Sizes:
    return measure_sizes(QWEN3_8B, PUBLISHED)


@cache
def embedded_sizes() -> Sizes:
    return measure_sizes("embedded", SMALL)


# -- sizes


def test_sizes_of_qwen3_8b(qwen: Sizes) -> None:
    assert qwen.target_parameters == 8_190_735_360  # as on its model card
    assert qwen.ends_parameters == ENDS
    assert qwen.used_weights == 34 * LAYER  # layers 0 to 33
    assert qwen.windows == (None,) * 34
    assert (qwen.target_width, qwen.target_intermediate) == (4096, 12_288)
    assert qwen.drafter.target_layer_ids == (1, 9, 17, 25, 33)
    norms = 5 * (2 * 4096 + 2 * 128) + 2 * 4096
    assert qwen.drafter_parameters == 5 * LAYER + 5 * 4096 * 4096 + norms
    assert layer_weights(qwen.drafter) == LAYER


def test_the_embedded_target_ties_its_ends() -> None:
    sizes = embedded_sizes()
    assert sizes.ends_parameters == 512 * 256
    assert sizes.drafter.intermediate_size == 384
    assert sizes.target_intermediate == 768


def test_of_a_folder_only_the_config_is_read(tmp_path: Path) -> None:
    """A mixture: a token goes through 2 of 8 experts, and through the router."""
    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    sizes = measure_sizes(str(tmp_path), replace(PUBLISHED, features=2))
    attention, router, expert = 64 * (2 * 64 + 2 * 32), 64 * 8, 3 * 64 * 32
    assert sizes.used_weights == 4 * (attention + router + 2 * expert)  # feature layers 1 and 3
    assert sizes.target_parameters > 6 * (attention + router + 8 * expert)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (Gemma3TextConfig(num_hidden_layers=8, hidden_size=64, sliding_window=16, vocab_size=100), (16,) * 5),
        (Qwen3NextConfig(num_hidden_layers=8, hidden_size=64, num_experts=4, vocab_size=100), (None,)),
    ],
)
def test_layers_look_at_what_their_kind_sees(tmp_path: Path, config: Any, windows: tuple[int | None, ...]) -> None:
    """Five sliding layers before a full one; three linear ones, which see no pairs, before a full one."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    assert measure_sizes(str(tmp_path), replace(PUBLISHED, features=1)).windows == windows


def test_no_such_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--target .*: no usable config there .*'embedded', or one of .*qwen3-8b"):
        measure_sizes(str(tmp_path), PUBLISHED)


def test_a_target_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr("dflash_lit.placement.sizes.AutoModelForCausalLM.from_config", broken)
    with pytest.raises(UserError) as caught:
        measure_sizes("embedded", SMALL)
    assert str(caught.value) == "--target embedded: its parameters could not be counted (no such kernel)"


# -- FLOP


@quick
@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_causal_pairs_by_counting(tokens: int, window: int | None) -> None:
    seen = sum(q - k < (window or tokens) for q in range(tokens) for k in range(q + 1))
    assert causal_pairs(tokens, window) == seen


@quick
@given(st.integers(1, 8), st.integers(2, 40))
def test_block_pairs_are_the_mean_over_anchors(block: int, tokens: int) -> None:
    each = [block * (anchor + block) for anchor in range(tokens - 1)]
    assert block_pairs(1, block, tokens) == pytest.approx(sum(each) / len(each))
    # All of them drawn, and one block more that only pads.
    assert block_pairs(tokens, block, tokens) == pytest.approx(sum(each) + block * block)


@pytest.mark.parametrize(
    ("rows", "tokens", "anchors", "block", "tflop"),
    [(4, 3072, 512, 16, 288), (1, 8192, 512, 16, 81), (1, 40_064, 1024, 32, 485), (1, 8192, 3072, 16, 461)],
)
def test_drafter_flop_are_those_of_the_benchmarks(
    qwen: Sizes, rows: int, tokens: int, anchors: int, block: int, tflop: float
) -> None:
    """docs/performance.md, which counts the pairs of anchors that were drawn."""
    recipe = replace(PUBLISHED, rows=rows, row_tokens=tokens, anchors=anchors, block_size=block)
    sizes = replace(qwen, drafter=replace(qwen.drafter, block_size=block))
    flop = flop_per_token(sizes, recipe)[Role.DRAFTER].total * rows * tokens
    assert flop / 1e12 == pytest.approx(tflop, rel=0.01)


def test_target_flop_by_hand(qwen: Sizes) -> None:
    """Two FLOP a weight; scores and their product with the values: four for each pair and entry of a head."""
    flop = flop_per_token(qwen, PUBLISHED)[Role.TARGET]
    assert flop == (34 * 2 * LAYER, 34 * 4 * (3072 + 1) / 2 * 4096)
    assert flop.total * 12_288 / 1e12 == pytest.approx(172, rel=0.005)


@pytest.mark.parametrize(
    ("rows", "tokens", "anchors", "block", "supply", "demand"),
    [(4, 3072, 512, 16, 42_200, 24_070), (1, 40_064, 1024, 32, 20_645, 39_404)],
)
def test_expected_rates_are_those_measured(
    qwen: Sizes, rows: int, tokens: int, anchors: int, block: int, supply: float, demand: float
) -> None:
    """docs/performance.md, either side alone."""
    recipe = replace(PUBLISHED, rows=rows, row_tokens=tokens, anchors=anchors, block_size=block)
    sizes = replace(qwen, drafter=replace(qwen.drafter, block_size=block))
    expected = expected_rates(flop_per_token(sizes, recipe), MEASURED)
    assert expected.target == pytest.approx(supply, rel=0.025)
    assert expected.drafter == pytest.approx(demand, rel=0.025)


# -- memory


def test_memory_of_qwen3_8b(qwen: Sizes) -> None:
    parts = rank_bytes(qwen, PUBLISHED, prefetch=2)
    drafter, target = parts[Role.DRAFTER], parts[Role.TARGET]
    parameters = qwen.drafter_parameters
    assert target["weights"] / 1e9 == pytest.approx(16.4, rel=0.002)
    assert drafter["weights"] + drafter["optimizer"] == 12 * parameters  # fp32 master and two moments
    assert drafter["gradients"] == 4 * parameters
    assert drafter["embedding, head"] == 2 * ENDS
    batch = 12_288 * 40 * 1024  # 40 KiB a token
    assert drafter["feature queue"] == 3 * batch
    assert target["feature queue"] == (SENDS + 1) * batch


@quick
@given(st.integers(0, 20))
def test_a_drafter_takes_what_the_doctor_says_and_the_queue(prefetch: int) -> None:
    """Colocated, one feature batch exists: it is not counted twice."""
    sizes = embedded_sizes()
    run = run_bytes(sizes.ends_parameters, sizes.drafter_parameters, sizes.drafter, SMALL, gpu=True)
    batch = 4 * 256 * 3 * 256 * 2
    assert sum(rank_bytes(sizes, SMALL, prefetch)[Role.DRAFTER].values()) == sum(run.values()) + prefetch * batch


# -- the wire and the verdict


def test_wire_of_five_and_three(qwen: Sizes) -> None:
    result = forecast(Layout(5, 3), devices(Layout(5, 3), 8), qwen, PUBLISHED, prefetch=2, rates=Rates(40_000, 20_000))
    wire = result.wire
    assert (wire.transport, wire.bytes_per_token) == ("nccl", 40 * 1024)
    assert wire.features == 60_000 * 40 * 1024
    assert wire.into_drafter == 20_000 * 40 * 1024
    assert wire.out_of_target == 12_000 * 40 * 1024
    assert wire.requests == 60_000 * 12  # id, document, position
    assert wire.gradients_per_step == pytest.approx(4 / 3 * 4 * qwen.drafter_parameters)  # ring of three


def test_a_single_drafter_has_nobody_to_average_with(qwen: Sizes) -> None:
    result = forecast(Layout(1, 1), devices(Layout(1, 1), 1, share=True), qwen, PUBLISHED, prefetch=2)
    assert result.wire.gradients_per_step == 0
    assert result.wire.transport == "gloo"
    assert "gradients:" not in str(result)
    assert result.to_dict()["wire"]["gradients_per_step"] == 0


@quick
@given(layouts, rates)
@example(Layout(2, 1), Rates(7, 7))  # 1 + 2 is as fast
def test_the_best_split_is_the_best(layout: Layout, rates: Rates) -> None:
    verdict = Verdict.of(layout, rates)
    ranks = layout.ranks_per_host
    reach = [min(layout.hosts * n * rates.target, layout.hosts * (ranks - n) * rates.drafter) for n in range(1, ranks)]
    assert verdict.best_rate == max(reach)
    assert verdict.best.ranks_per_host == ranks
    assert verdict.rate == reach[layout.targets - 1] == min(verdict.supply, verdict.demand)
    assert (verdict.best == layout) == (verdict.rate == verdict.best_rate)
    slower = {"target": verdict.supply, "drafter": verdict.demand}.get(verdict.bound)
    if slower is None:
        assert verdict.rate >= 0.95 * max(verdict.supply, verdict.demand)
    else:
        assert slower == verdict.rate < 0.95 * max(verdict.supply, verdict.demand)


@quick
@given(layouts, rates)
def test_no_split_is_faster_than_colocated(qwen: Sizes, layout: Layout, rates: Rates) -> None:
    """And one whose sides are as fast as each other is as fast."""
    colocated = Colocated.of(layout, rates, qwen, PUBLISHED)
    assert colocated.drafters == layout.world
    assert colocated.rate >= Verdict.of(layout, rates).best_rate * (1 - 1e-9)
    balanced = Rates(rates.target, rates.target * layout.targets / layout.drafters)
    assert Colocated.of(layout, balanced, qwen, PUBLISHED).rate == pytest.approx(Verdict.of(layout, balanced).rate)
    assert colocated.memory == run_bytes(qwen.target_parameters, qwen.drafter_parameters, qwen.drafter, PUBLISHED, gpu=True)


def deterministic(targets: int, target_s: float, drafter_s: float, prefetch: int, steps: int = 300) -> float:
    """Batches a second of one drafter whose requests are dealt in turn; the first third is left out."""
    free, arrives, now, began = [0.0] * targets, [], 0.0, 0.0
    for step in range(steps):
        while len(arrives) <= step + prefetch:
            turn = len(arrives) % targets
            free[turn] = max(free[turn], now) + target_s
            arrives.append(free[turn])
        now = max(now, arrives[step]) + drafter_s
        began = now if step == steps // 3 else began
    return (steps - steps // 3 - 1) / (now - began)


@quick
@given(st.integers(1, 8), st.integers(0, 9), st.floats(0.1, 10))
@example(1, 2, 1.0)
@example(3, 3, 3.0)
def test_requests_in_flight_bound_the_rate(targets: int, prefetch: int, target_s: float) -> None:
    layout, rates = Layout(targets, 1), Rates(1 / target_s, 1.0)
    unbound = Verdict.of(layout, rates).rate
    in_flight = InFlight.of(layout, rates, unbound, prefetch)
    reached = deterministic(targets, target_s, 1.0, prefetch)
    assert reached == pytest.approx(min(unbound, in_flight.most), rel=0.05)
    # One of them is for uneven steps.
    assert deterministic(targets, target_s, 1.0, in_flight.enough - 1) == pytest.approx(unbound, rel=0.05)
    assert in_flight.enough < 2 or InFlight.of(layout, rates, unbound, in_flight.enough - 2).most < unbound


def test_too_few_in_flight_in_words(qwen: Sizes) -> None:
    layout = Layout(3, 1)
    lines = str(forecast(layout, devices(layout, 4), qwen, PUBLISHED, prefetch=2, rates=Rates(100, 300))).splitlines()
    assert lines[-3] == (
        "prefetch  2 requests in flight of each drafter allow 0.225 Ktok/s; placement.prefetch=4 is enough, for uneven steps too"
    )
    assert "prefetch" not in str(forecast(layout, devices(layout, 4), qwen, PUBLISHED, prefetch=4, rates=Rates(100, 300)))


@pytest.mark.parametrize(
    ("layout", "rates", "line"),
    [
        (
            Layout(5, 3),
            Rates(42_800, 24_800),
            "drafter-bound: 5 targets supply 214 Ktok/s, 3 drafters take 74.4 Ktok/s; 3 targets + 5 drafters would reach 124 Ktok/s",
        ),
        (
            Layout(1, 7, 2),
            Rates(42_800, 24_800),
            "target-bound: 2 targets supply 85.6 Ktok/s, 14 drafters take 347 Ktok/s; "
            "3 targets + 5 drafters a host would reach 248 Ktok/s",
        ),
        (
            Layout(1, 1),
            Rates(400, 200),
            "drafter-bound: 1 target supplies 0.4 Ktok/s, 1 drafter takes 0.2 Ktok/s; no other split of 2 ranks is faster",
        ),
        (
            Layout(2, 2),
            Rates(1e6, 0.98e6),
            "balanced: 2 targets supply 2,000 Ktok/s, 2 drafters take 1,960 Ktok/s; no other split of 4 ranks is faster",
        ),
    ],
)
def test_the_verdict_in_words(layout: Layout, rates: Rates, line: str) -> None:
    assert str(Verdict.of(layout, rates)) == line


def test_in_words(qwen: Sizes) -> None:
    layout = Layout(5, 3)
    lines = str(forecast(layout, devices(layout, 8), qwen, PUBLISHED, prefetch=2)).splitlines()
    assert lines[0] == "target    qwen3-8b: 8.19 B parameters, features of layers 1, 9, 17, 25, 33"
    assert lines[1] == "drafter   1.05 B parameters in 5 layers"
    assert lines[2].endswith("12 rows a step over 3 drafters, times accumulation")
    assert "2     0     2      drafter  2             cuda:2" in lines
    assert "weights               3.9 GiB     15.3 GiB" in lines
    assert "optimizer             7.8 GiB            -" in lines
    assert "feature queue         1.4 GiB      1.4 GiB" in lines
    assert any("a target 42.3 Ktok/s (14 GFLOP a token, 591 TFLOP/s)" in line for line in lines)
    assert any(
        re.match(r"wire +40\.0 KiB of features a token over nccl: 2\.96 GB/s, 988 MB/s into a drafter", line) for line in lines
    )
    assert lines[-2].startswith("verdict   drafter-bound: 5 targets supply 212 Ktok/s")
    assert lines[-1].startswith("colocated 8 drafters with a target each would reach 123 Ktok/s, if a GPU holds ")
