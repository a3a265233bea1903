"""One training step of the drafter on one GPU, Qwen3-8B shapes, random features: a line of JSON.

    python benchmarks/step.py --shape S

``ms`` is forward and backward with the loss (what public trainers' figures are of); the optimizer is timed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from common import SHAPES, Stages, matmul_rate, qwen3_8b, random_ends, timed, token_rows, useful_flop

from dflash_lit.attention.block_mask import block_mask
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.module import DrafterModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1, help="documents a row (default: %(default)s)")
    parser.add_argument("--labels", choices=("hard", "soft"), default="hard")
    parser.add_argument("--chunk-slots", type=int, default=4096)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--profile", metavar="FILE", help="write a table of the kernels of two steps")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    config = qwen3_8b(shape.block, tiny=args.shape == "tiny")
    rate = matmul_rate()
    with device:
        module = DrafterModule(
            config.to_dict(),
            random_ends(config, device),
            {"weights": "dpace", "labels": args.labels, "chunk_slots": args.chunk_slots},
            anchors=shape.anchors,
            optimizer=args.optimizer,
        )
    batch = token_rows(shape, config, device, documents=args.documents)
    batch["features"] = torch.randn(shape.rows, shape.tokens, config.feature_size, device=device, dtype=torch.bfloat16)
    if args.labels == "soft":
        batch["last_hidden"] = torch.randn(shape.rows, shape.tokens, config.hidden_size, device=device, dtype=torch.bfloat16)
    optimizer = module.make_optimizer()
    unit = 1.0 / (shape.rows * shape.anchors)
    parameters = list(module.drafter.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            blocks = module.blocks(batch, 0)
            result = module.loss(batch, blocks, module(batch, blocks))
        (result.numerator * unit).backward()

    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began

    times = timed(step, args.steps, warm_up=3)
    peak = torch.cuda.max_memory_allocated()
    milliseconds = statistics.median(times)

    stages = Stages()

    def staged() -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            with stages("prepare"):
                blocks = module.blocks(batch, 0)
            with stages("mask"):  # timed apart; it is part of the drafter's forward
                block_mask(BlockLayout(blocks.anchors, blocks.valid, batch["document_ids"], shape.block))
            with stages("drafter"):
                hidden = module(batch, blocks)
            with stages("head"):
                result = module.loss(batch, blocks, hidden)
        with stages("backward"):
            (result.numerator * unit).backward()
        with stages("optimizer"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    for _ in range(8):
        staged()
    breakdown = stages.medians()
    sustained = matmul_rate(repeats=500, warm_up=1000)

    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
        with open(args.profile, "w", encoding="utf-8") as file:
            file.write(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90))

    with torch.no_grad():
        flop = useful_flop(module, batch, module.blocks(batch, 0))
    total = sum(flop.values())
    line: dict[str, Any] = {
        "shape": args.shape,
        "ms": round(milliseconds, 1),
        "ms_least": round(min(times), 1),
        "peak_gib": round(peak / 2**30, 2),
        "first_step_s": round(first, 1),
        "tflop": round(total / 1e12, 1),
        "tflop_parts": {name: round(value / 1e12, 1) for name, value in flop.items()},
        "matmul_tflops": round(rate / 1e12, 1),
        "share_of_matmul": round(total / (milliseconds / 1000) / rate, 3),
        "floor_ms": round(total / rate * 1000, 1),
        "sustained_matmul_tflops": round(sustained / 1e12, 1),
        "share_of_sustained": round(total / (milliseconds / 1000) / sustained, 3),
        "breakdown_ms": breakdown,
        "labels": args.labels,
        "optimizer": args.optimizer,
        "steps": args.steps,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
