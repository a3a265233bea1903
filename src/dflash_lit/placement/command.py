"""``dflash-lit plan``: what a split run will need and reach, before it is started."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import torch

from dflash_lit.doctor.finding import gib
from dflash_lit.doctor.memory import PUBLISHED, SMALL
from dflash_lit.errors import UserError
from dflash_lit.placement.forecast import ATTENTION, MEASURED, Forecast, Rates, expected_rates, flop_per_token, forecast
from dflash_lit.placement.known import KNOWN, QWEN3_8B
from dflash_lit.placement.layout import Layout, Role, devices
from dflash_lit.placement.sizes import measure_sizes
from dflash_lit.target.frozen import EMBEDDED

__all__ = ["add_options", "run"]

_RECIPE = {
    "rows": "rows a batch",
    "row_tokens": "tokens of a packed row",
    "anchors": "blocks a row",
    "block_size": "slots a block",
    "layers": "of the drafter",
    "features": "target layers that it reads",
}

_NARROW = 1024
"""Of models narrower than this, a GPU spends its time on other things than products."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default=QWEN3_8B,
        help="a folder or a name on a hub, of which only the config is read, or 'embedded'; the sizes of "
        f"{', '.join(KNOWN)} are known without a hub (default: %(default)s)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--targets", type=int, default=5, help="target ranks a host (default: %(default)s)")
    parser.add_argument("--drafters", type=int, default=3, help="drafter ranks a host (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--gpus", type=int, help="visible GPUs a host (default: this machine's; without any, as many as needed)"
    )
    for name, meaning in _RECIPE.items():
        published, small = getattr(PUBLISHED, name), getattr(SMALL, name)
        default = f"{published}; {small} for the embedded target" if published != small else published
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{meaning} (default: {default})")
    parser.add_argument(
        "--prefetch",
        type=int,
        help="requests that a drafter keeps in flight (default: as in a run, targets / drafters and one)",
    )
    parser.add_argument("--share", action="store_true", help="let ranks share GPUs, as placement.share=true does")
    for role in Role:
        speed = parser.add_mutually_exclusive_group()
        speed.add_argument(
            f"--tflops-{role}",
            type=float,
            default=MEASURED[role] / 1e12,
            help=f"useful TFLOP/s of a {role} GPU in products with weights; attention reaches {100 * ATTENTION:.0f} %% of that (default: "
            f"{MEASURED[role] / 1e12:.0f}, measured on an H200 with Qwen3-8B's sizes)",
        )
        speed.add_argument(f"--{role}-rate", type=float, help=f"tokens/s of a {role} GPU, if you have measured them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the forecast; always 0, as wrong input is raised."""
    if args.targets < 1:
        raise UserError(f"--targets {args.targets}: must be at least 1")
    layout = Layout(args.targets, args.drafters, args.hosts)
    recipe = SMALL if args.target == EMBEDDED else PUBLISHED
    given = {name: value for name in _RECIPE if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    recipe = replace(recipe, **given)
    if recipe.row_tokens % 128:
        raise UserError(f"--row-tokens {recipe.row_tokens}: must be a multiple of 128")
    if args.prefetch is not None and args.prefetch < 0:
        raise UserError(f"--prefetch {args.prefetch}: must be at least 0")
    for role in Role:
        for option in (f"tflops_{role}", f"{role}_rate"):
            value = getattr(args, option)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{option.replace('_', '-')} {value:g}: must be positive")
    here = torch.cuda.device_count()
    visible = args.gpus if args.gpus is not None else here or layout.ranks_per_host
    of_local = devices(layout, visible, share=args.share)

    sizes = measure_sizes(args.target, recipe, trust_remote_code=args.trust_remote_code)
    expected = expected_rates(flop_per_token(sizes, recipe), {role: getattr(args, f"tflops_{role}") * 1e12 for role in Role})
    rates = Rates(args.target_rate or expected.target, args.drafter_rate or expected.drafter)
    result = forecast(
        layout, of_local, sizes, recipe, prefetch=layout.prefetch if args.prefetch is None else args.prefetch, rates=rates
    )
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
        return 0
    print(result)
    if sizes.drafter.hidden_size < _NARROW and None in (args.target_rate, args.drafter_rate):
        print(
            "note      products as small as these reach a fraction of such rates: measure, and give --target-rate and --drafter-rate"
        )
    if args.gpus is None and here:
        print(_fit(result, min(torch.cuda.get_device_properties(index).total_memory for index in range(here))))
    return 0


def _fit(result: Forecast, total: int) -> str:
    """A line on whether the ranks fit onto GPUs of ``total`` bytes; nine tenths, since the estimate is rough."""
    needs = {role: sum(parts.values()) for role, parts in result.memory.items()}
    large = [f"a {role} takes about {gib(need)}" for role, need in needs.items() if need > 0.9 * total]
    if not large:
        return f"memory    fits the GPUs here, which have {gib(total)}"
    return f"memory    {' and '.join(large)}, the GPUs here have {gib(total)}: lower --rows"
