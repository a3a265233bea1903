"""``dflash-lit evaluate``: decode prompts with and without an exported drafter."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_lit.data.prompts import file_prompts, stdlib_prompts
from dflash_lit.decode.acceptance import Acceptance, measure
from dflash_lit.errors import UserError
from dflash_lit.export import load_drafter
from dflash_lit.options import natural, temperature
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo

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
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the prompts' choice")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """1 if the greedy output was not the target's own, else 0."""
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
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    if args.device == "cuda" and device.type != "cuda":
        raise UserError("--device cuda: torch sees no GPU here")
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
    results: list[Acceptance] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=args.json) as progress:
        for heat in args.temperature:
            results.append(
                measure(
                    target,
                    drafter,
                    [prompt.input_ids for prompt in prompts],
                    max_new_tokens=args.max_new_tokens,
                    temperature=heat,
                    seed=args.seed,
                    progress=progress,
                )
            )
    if args.json:
        print(json.dumps([_facts(result) for result in results], indent=2))
    else:
        Console().print(_table(results))
    return 1 if any(result.lossless is False for result in results) else 0


def _facts(result: Acceptance) -> dict[str, Any]:
    return {
        "temperature": result.temperature,
        "tau": result.tau,
        "tau_error": result.tau_error if result.tau_error == result.tau_error else None,
        "tokens_per_s_plain": result.tokens_per_s_plain,
        "tokens_per_s_drafted": result.tokens_per_s_drafted,
        "accepted_by_slot": result.accepted_by_slot,
        "lossless": result.lossless,
        "prompts": result.prompts,
    }


def _table(results: Sequence[Acceptance]) -> Table:
    table = Table(title="tau: tokens a target pass, bonus included (± standard error over prompts)")
    for heading in ("T", "tau", "tokens/s plain", "tokens/s drafted", "ratio", "as the target"):
        table.add_column(heading, justify="right")
    for r in results:
        same = (
            "sampled"
            if r.identical is None
            else f"{r.identical}/{r.prompts}" + (f" + {r.near_ties} ties" if r.near_ties else "")
        )
        ratio = r.tokens_per_s_drafted / r.tokens_per_s_plain
        table.add_row(
            f"{r.temperature:g}",
            f"{r.tau:.2f} ± {r.tau_error:.2f}",
            f"{r.tokens_per_s_plain:.1f}",
            f"{r.tokens_per_s_drafted:.1f}",
            f"{ratio:.2f}x",
            same,
        )
    return table
