"""How fast one target and one drafter are while nobody makes them wait, and what memory each takes, on one GPU; a line of JSON.

    python benchmarks/sides.py --target qwen3-8b --shape S
    python benchmarks/sides.py --target dense-27b --shape L --layouts 5+3 1+7 0+8

Random weights of the named sizes. The target makes features of the drafter's rows; the drafter learns from features at hand,
optimizer and clipping included. Beside them stands what ``dflash-lit plan`` expects without these figures. ``reached`` is what
they come to in layouts of target + drafter ranks, where the slower side sets the pace; with 0 targets each drafter has its own in its
process. ``dflash-lit plan --target-rate T --drafter-rate D`` says the same of others.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from common import SHAPES, TARGETS, Shape, random_ends, timed, token_rows
from layouts import layout, named
from online import expected_gib, random_target, recipe_of, sizes_of
from torch import Tensor

from dflash_lit.doctor.finding import GIB
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.module import DrafterModule
from dflash_lit.placement.forecast import MEASURED, Rates, Verdict, expected_rates, flop_per_token
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.target_worker import SENDS


def measured(step: Callable[[], object], device: torch.device, steps: int, warm_up: int) -> tuple[float, float]:
    """Seconds of a step, the median, and GiB that tensors took at most; on a GPU the host runs ahead as in training."""
    for _ in range(warm_up):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return statistics.median(timed(step, steps)) / 1000, torch.cuda.max_memory_allocated() / GIB
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), 0.0


def rows_of(shape: Shape, config: DrafterConfig, device: torch.device) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [token_rows(shape, config, device) for _ in range(2)]


def supply(config: DrafterConfig, shape: Shape, device: torch.device, steps: int, warm_up: int) -> tuple[float, float]:
    """Seconds and GiB of a target's batch."""
    target, rows = random_target(config, device), itertools.cycle(rows_of(shape, config, device))
    leaving: deque[Tensor] = deque(maxlen=SENDS)  # as many as may be on their way to drafters

    def step() -> None:
        batch = next(rows)
        leaving.append(
            target.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], config.target_layer_ids)
        )

    return measured(step, device, steps, warm_up)


def demand(
    config: DrafterConfig, shape: Shape, device: torch.device, steps: int, warm_up: int, queue: int
) -> tuple[float, float]:
    """Seconds and GiB of a drafter's step, with ``queue`` feature batches."""
    with device:
        module = DrafterModule(config.to_dict(), random_ends(config, device), {"weights": "dpace"}, anchors=shape.anchors)
    optimizer, parameters = module.make_optimizer(), list(module.drafter.parameters())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = (shape.rows, shape.tokens, config.feature_size)
    features = itertools.cycle([torch.randn(size, device=device, dtype=dtype) for _ in range(queue)])
    rows = itertools.cycle(rows_of(shape, config, device))

    def step() -> None:
        batch = {**next(rows), "features": next(features)}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            blocks = module.blocks(batch, 0)
            result = module.loss(batch, blocks, module(batch, blocks))
        (result.numerator / (shape.rows * shape.anchors)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measured(step, device, steps, warm_up)


def reached(found: Layout, rates: Rates) -> float:
    """Tokens a second of a layout at these rates of a rank."""
    return Verdict.of(found, rates).rate if found.targets else found.drafters * rates.colocated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument(
        "--layouts", nargs="+", type=layout, default=[layout(text) for text in ("5+3", "3+5", "1+7", "0+8")], metavar="N+M"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=2, help="feature batches beside the one in work (default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[args.shape]
    config = TARGETS[args.target](shape.block, tiny=args.shape == "tiny")
    recipe = recipe_of(config, shape)
    sizes = sizes_of(config, recipe)
    flop = flop_per_token(sizes, recipe)
    expected = expected_rates(flop, MEASURED)
    planned = expected_gib(sizes, recipe, args.prefetch)
    tokens = shape.rows * shape.tokens
    found = {Role.TARGET: supply(config, shape, device, args.steps, args.warm_up)}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found[Role.DRAFTER] = demand(config, shape, device, args.steps, args.warm_up, args.prefetch + 1)
    rates = Rates(*(tokens / found[role][0] for role in (Role.TARGET, Role.DRAFTER)))
    line: dict[str, Any] = {
        "sizes": args.target,
        "shape": args.shape,
        "batch": f"{shape.rows} x {shape.tokens}, {shape.anchors} x {shape.block}",
        "parameters": {"target": sizes.target_parameters, "drafter": sizes.drafter_parameters},
    }
    for role, rate, plan in (
        (Role.TARGET, rates.target, expected.target),
        (Role.DRAFTER, rates.drafter, expected.drafter),
    ):
        seconds, gib = found[role]
        line[role] = {
            "tokens_per_s": round(rate),
            "expected": round(plan),
            "ms": round(1000 * seconds, 1),
            "tflops": round(rate * flop[role].total / 1e12, 1),
            "gib": round(gib, 2),
            "expected_gib": round(planned[role], 2),
        }
    line["reached"] = {named(found): round(reached(found, rates)) for found in args.layouts}
    line |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
