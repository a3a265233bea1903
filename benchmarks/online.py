"""Online training on one GPU: the target's forward pass makes the features, the drafter learns from them; a line of JSON.

    python benchmarks/online.py --shape S

Qwen3-8B shapes with random weights, optimizer and clipping included. Tokens are those of the packed rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from common import SHAPES, Shape, Stages, matmul_rate, qwen3_8b, timed, token_rows, useful_flop
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lit.doctor.finding import GIB
from dflash_lit.doctor.memory import Recipe
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.module import DrafterModule
from dflash_lit.placement.flops import layer_weights, target_flop
from dflash_lit.placement.forecast import rank_bytes
from dflash_lit.placement.layout import Role
from dflash_lit.placement.sizes import Sizes, measure_sizes
from dflash_lit.target.frozen import FrozenTarget, TargetInfo


def random_info(config: DrafterConfig) -> TargetInfo:
    """A Qwen3 of the drafter's target's shape, without tokenizer and files."""
    described = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_target_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=40_960,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    described._attn_implementation = "sdpa"  # as a loaded model has it; packed rows go through the target's own attention
    return TargetInfo("random", described, None)  # type: ignore[arg-type]


def sizes_of(config: DrafterConfig, recipe: Recipe) -> Sizes:
    """As ``dflash-lit plan`` takes them from a target's folder."""
    with tempfile.TemporaryDirectory() as folder:
        random_info(config).config.save_pretrained(folder)
        return measure_sizes(folder, recipe)


def recipe_of(config: DrafterConfig, shape: Shape) -> Recipe:
    """The same as ``dflash-lit plan`` is told it."""
    return Recipe(
        "",
        config.num_hidden_layers,
        len(config.target_layer_ids),
        shape.block,
        shape.anchors,
        shape.rows,
        shape.tokens,
        intermediate_size=config.intermediate_size,
    )


def expected_gib(sizes: Sizes, recipe: Recipe, prefetch: int) -> dict[Role, float]:
    """GiB of tensors that ``dflash-lit plan`` expects of a rank."""
    parts = rank_bytes(sizes, recipe, prefetch)
    return {role: sum(count for name, count in of.items() if name != "libraries") / GIB for role, of in parts.items()}


def random_target(config: DrafterConfig, device: torch.device) -> FrozenTarget:
    """That model with random weights, bf16."""
    info = random_info(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen3ForCausalLM(info.config)
    finally:
        torch.set_default_dtype(before)
    return FrozenTarget(info, model)


def used_flop(config: DrafterConfig, batch: dict[str, torch.Tensor]) -> float:
    """FLOP of the target's layers up to its last feature layer: forward only, no logits."""
    layers = max(config.target_layer_ids) + 1
    return target_flop(
        layers * layer_weights(config),
        tokens=batch["input_ids"].numel(),
        pairs=layers * float((batch["position_ids"] + 1).sum()),
        width=config.num_attention_heads * config.head_dim,
    ).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--steps", type=int, default=15, help="timed steps (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1, help="documents a row (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    config = qwen3_8b(shape.block, tiny=args.shape == "tiny")
    rate = matmul_rate()
    target = random_target(config, device)
    with device:
        module = DrafterModule(config.to_dict(), target.ends(), {"weights": "dpace"}, anchors=shape.anchors)
    optimizer = module.make_optimizer()
    parameters = list(module.drafter.parameters())
    rows = [token_rows(shape, config, device, documents=args.documents) for _ in range(4)]
    turn = iter(range(10**9))
    stages = Stages()

    def step() -> None:
        batch = dict(rows[next(turn) % len(rows)])
        with stages("target"):
            batch["features"] = target.features(
                batch["input_ids"], batch["document_ids"], batch["position_ids"], config.target_layer_ids
            )
        with stages("drafter"):
            with torch.autocast("cuda", torch.bfloat16):
                blocks = module.blocks(batch, 0)
                result = module.loss(batch, blocks, module(batch, blocks))
            (result.numerator / (shape.rows * shape.anchors)).backward()
        with stages("optimizer"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(3):
        step()
    stages = Stages()
    torch.cuda.reset_peak_memory_stats()
    times = timed(step, args.steps)
    milliseconds = statistics.median(times)
    parts = stages.medians()
    tokens = shape.rows * shape.tokens
    with torch.no_grad():
        drafter = sum(useful_flop(module, rows[0], module.blocks(rows[0], 0)).values())
    flop = used_flop(config, rows[0])
    line: dict[str, Any] = {
        "shape": args.shape,
        "tokens_per_s": round(tokens / milliseconds * 1000),
        "ms": round(milliseconds, 1),
        "breakdown_ms": parts,
        "share": {name: round(value / sum(parts.values()), 3) for name, value in parts.items()},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(first, 1),
        "tflop": {"target": round(flop / 1e12, 1), "drafter": round(drafter / 1e12, 1)},
        "matmul_tflops": round(rate / 1e12, 1),
        "share_of_matmul": round((flop + drafter) / (milliseconds / 1000) / rate, 3),
        "documents_a_row": args.documents,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
