"""``dflash-lit evaluate``: decode prompts with and without an exported drafter."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_lit.compilation.cache import use_cache
from dflash_lit.data.prompts import file_prompts, stdlib_prompts
from dflash_lit.decode.acceptance import Acceptance, MeasuredTarget, sweep
from dflash_lit.decode.picture import draw_budgets
from dflash_lit.decode.proposer import ProposingDrafter
from dflash_lit.decode.static_drafter import can_be_static, static_pair
from dflash_lit.decode.tables import depths_table, stages_table, tau_table
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.export import load_drafter
from dflash_lit.options import budgets, device_of, natural, temperature, whole
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from dflash_lit.watching.terminal import bars

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", help="folder of an exported drafter")
    parser.add_argument("--target", default=EMBEDDED, help="Hugging Face folder or name (default: the embedded target)")
    parser.add_argument("--prompts", help="a .jsonl or .txt file (default: held-out files of the standard library)")
    parser.add_argument("--count", type=natural, default=16, help="prompts to decode (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=natural, default=48, help="longest prompt (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=natural, default=96, help="tokens a response (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0], help="0 is greedy (default); several are run in turn"
    )
    parser.add_argument(
        "--budgets",
        default="0,16,64,256",
        help="nodes of the draft trees, with commas between them; 0 is a chain (default: %(default)s)",
    )
    parser.add_argument(
        "--stage-prompts",
        type=whole,
        default=2,
        help="prompts that are decoded once more to time the stages of a round; 0: none (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the prompts' choice")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="decode, plainly too, by compiled passes of static shapes (default: on a GPU, if the target's code allows it)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--draw", metavar="FILE", help="draw tau and speed against the budget: a .png, .svg or .pdf file")


def run(args: argparse.Namespace) -> int:
    """1 if the greedy output was not the target's own, else 0."""
    nodes = budgets(args.budgets)
    if args.draw is not None and Path(args.draw).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--draw {args.draw}: the name has to end in .png, .svg or .pdf")
    drafter = load_drafter(args.drafter)
    info = TargetInfo.load(args.target, trust_remote_code=args.trust_remote_code)
    for name, ours, theirs in (
        ("hidden_size", drafter.config.hidden_size, int(info.text.hidden_size)),
        ("vocab_size", drafter.config.vocab_size, int(info.text.vocab_size)),
        ("num_target_layers", drafter.config.num_target_layers, info.layers),
    ):
        if ours != theirs:
            raise UserError(f"--target {args.target}: the drafter was made for {name}={ours}, this target has {theirs}")
    if args.prompts is None:
        prompts = stdlib_prompts(
            info.tokenizer, count=args.count, prompt_tokens=args.prompt_tokens, held_out=True, seed=args.seed
        )
    else:
        prompts = file_prompts(args.prompts, info.tokenizer, max_prompt_tokens=args.prompt_tokens)[: args.count]
    device = device_of(args.device)
    positions = int(getattr(info.text, "max_position_embeddings", 0) or 0)
    longest = max(len(prompt.input_ids) for prompt in prompts) + args.max_new_tokens + drafter.config.block_size
    if positions and longest > positions:
        raise UserError(
            f"--max-new-tokens {args.max_new_tokens}: prompts and responses come to {longest} tokens, the target has {positions}"
        )
    target = FrozenTarget.load(info, device=device)
    drafter = drafter.to(device, target.dtype)
    made_for = drafter.config.target_fingerprint
    if made_for and made_for != target.fingerprint:
        print(
            f"warning: the drafter was trained for another target ({made_for}, this is {target.fingerprint})", file=sys.stderr
        )
    texts = [prompt.input_ids for prompt in prompts]
    if any(nodes) and target.no_trees:
        raise UserError(f"{target.no_trees} (--budgets 0)")
    sides: tuple[MeasuredTarget, Drafter | ProposingDrafter] = (target, drafter)
    if args.compile or (args.compile is None and device.type == "cuda" and can_be_static(target)):
        if device.type == "cuda":
            use_cache()
        sides = static_pair(
            target, drafter, longest_prompt=max(map(len, texts)), max_new_tokens=args.max_new_tokens, budgets=nodes
        )
    results: list[Acceptance] = []
    with bars(show=not args.json) as progress:
        for heat in args.temperature:
            results += sweep(
                *sides,
                texts,
                nodes,
                max_new_tokens=args.max_new_tokens,
                temperature=heat,
                seed=args.seed,
                reference=target,
                timed=args.stage_prompts,
                progress=progress,
            )
    if args.json:
        print(json.dumps([_facts(result) for result in results], indent=2))
    else:
        console = Console()
        console.print(tau_table(results))
        console.print(depths_table(results))
        if args.stage_prompts:
            console.print(stages_table(results))
    if args.draw is not None:
        draw_budgets(results, args.draw)
    return 1 if any(result.lossless is False for result in results) else 0


def _number(value: float) -> float | None:
    """NaN is no JSON."""
    return value if math.isfinite(value) else None


def _facts(result: Acceptance) -> dict[str, Any]:
    return {
        "temperature": result.temperature,
        "budget": result.budget,
        "nodes": result.nodes,
        "tau": _number(result.tau),
        "tau_error": _number(result.tau_error),
        "tau_interval": [_number(end) for end in result.tau_interval],
        "tokens_per_s_plain": _number(result.tokens_per_s_plain),
        "tokens_per_s_drafted": _number(result.tokens_per_s_drafted),
        "speedup": _number(result.speedup),
        "accepted_by_depth": result.accepted_by_depth,
        "stage_ms": result.stage_ms,
        "plain_ms": _number(result.plain_ms),
        "lossless": result.lossless,
        "identical": result.identical,
        "near_ties": result.near_ties,
        "prompts": result.prompts,
    }
