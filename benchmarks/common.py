"""What the benchmarks share: the four shapes, random inputs of them, useful FLOP, and timing with device events."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_lit.blocks import Blocks
from dflash_lit.drafter.config import DrafterConfig, feature_layers
from dflash_lit.module import DrafterModule
from dflash_lit.placement.flops import drafter_flop
from dflash_lit.target.frozen import TargetEnds


@dataclass(frozen=True)
class Shape:
    """One batch: rows of so many tokens, anchors a row, slots a block."""

    rows: int
    tokens: int
    anchors: int
    block: int


SHAPES = {
    "S": Shape(4, 3072, 512, 16),
    "M": Shape(1, 8192, 512, 16),
    "L": Shape(1, 40064, 1024, 32),  # 40,000 tokens, as a multiple of 128
    "P": Shape(1, 8192, 3072, 16),
    "tiny": Shape(2, 256, 16, 8),  # for trying the scripts out
}


def qwen3_8b(block: int, *, tiny: bool = False) -> DrafterConfig:
    """The published drafter for Qwen3-8B: 5 layers, 5 feature layers."""
    return DrafterConfig(
        hidden_size=256 if tiny else 4096,
        intermediate_size=512 if tiny else 12288,
        num_hidden_layers=2 if tiny else 5,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=64 if tiny else 128,
        vocab_size=1000 if tiny else 151_936,
        block_size=block,
        mask_token_id=999 if tiny else 151_669,
        target_layer_ids=(1, 2) if tiny else (1, 9, 17, 25, 33),
        num_target_layers=6 if tiny else 36,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def dense_27b(block: int, *, tiny: bool = False) -> DrafterConfig:
    """A dense target of 64 layers and 27 B parameters, of no published model, and the drafter that ``derive_drafter`` makes for it."""
    if tiny:
        return qwen3_8b(block, tiny=True)
    layers = 64
    return replace(
        qwen3_8b(block),
        hidden_size=5120,
        intermediate_size=22_528,
        num_target_layers=layers,
        target_layer_ids=feature_layers(layers, 5),
    )


TARGETS = {"qwen3-8b": qwen3_8b, "dense-27b": dense_27b}
"""Sizes of targets, to be filled with random weights."""


def random_ends(config: DrafterConfig, device: torch.device) -> TargetEnds:
    """Untied embedding and head in bf16."""

    def weights() -> Tensor:
        return torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=torch.bfloat16) * 0.02

    return TargetEnds(weights(), weights())


def token_rows(shape: Shape, config: DrafterConfig, device: torch.device, *, documents: int = 1) -> dict[str, Tensor]:
    """Random token rows, every token supervised, each row cut into equal documents (one: a query sees half the row)."""
    length = -(-shape.tokens // documents)
    place = torch.arange(shape.tokens, device=device, dtype=torch.int32).repeat(shape.rows, 1)
    ids = torch.randint(0, config.vocab_size - 400, (shape.rows, shape.tokens), device=device)
    return {
        "input_ids": ids,
        "document_ids": place // length,
        "position_ids": place % length,
        "supervised": torch.ones_like(ids, dtype=torch.bool),
        "row_ids": torch.arange(shape.rows, device=device),
    }


def useful_flop(module: DrafterModule, batch: dict[str, Tensor], blocks: Blocks) -> dict[str, float]:
    """FLOP that forward and backward need at least, nothing computed twice; the head and the embedding are frozen."""
    c = module.config
    rows, tokens = batch["input_ids"].shape
    # Visible pairs of these very anchors: the tokens of the document before the anchor, and the block itself.
    before = batch["position_ids"].gather(1, blocks.anchors.long()) * blocks.valid
    pairs = float((before + c.block_size).sum()) * c.block_size
    return drafter_flop(c, rows=rows, tokens=tokens, anchors=module.anchors, pairs=pairs)


def matmul_rate(size: int = 8192, repeats: int = 10, *, warm_up: int = 3) -> float:
    """FLOP/s of a square bf16 product of random numbers, median: the ceiling that shares are given of.

    A short burst runs at full clocks. With ``repeats`` and ``warm_up`` of a thousand the GPU comes to its power limit and
    lowers them, as in training: that is the rate a long step can hope for.
    """
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = timed(lambda: torch.mm(a, b, out=out), repeats, warm_up=warm_up)
    return 2 * size**3 / (statistics.median(times) / 1000)


def timed(run: Callable[[], object], repeats: int, *, warm_up: int = 0) -> list[float]:
    """Milliseconds of each call, from device events; the host runs ahead as in training."""
    for _ in range(warm_up):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


class Stages:
    """Milliseconds of named parts of a step, by device events."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._marks.setdefault(name, []).append((begin, end))

    def medians(self) -> dict[str, float]:
        """To be asked once, at the end: waits for the device."""
        torch.cuda.synchronize()
        return {
            name: round(statistics.median(begin.elapsed_time(end) for begin, end in marks), 2)
            for name, marks in self._marks.items()
        }
