"""``dflash-lit``: what one does with a drafter after training.

Exit codes: 0 done; 1 the greedy output was not the target's own (evaluate); 2 wrong input, with one line that says what.
"""

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

from dflash_lit.commands import run_command
from dflash_lit.data.prompts import file_prompts, stdlib_prompts
from dflash_lit.decode.acceptance import Acceptance, measure
from dflash_lit.errors import UserError
from dflash_lit.export import drafter_from_checkpoint, load_drafter, save_drafter
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo

__all__ = ["main"]


def _evaluate(args: argparse.Namespace) -> int:
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
        for temperature in args.temperature:
            results.append(
                measure(
                    target,
                    drafter,
                    [prompt.input_ids for prompt in prompts],
                    max_new_tokens=args.max_new_tokens,
                    temperature=temperature,
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


def _export(args: argparse.Namespace) -> int:
    folder = save_drafter(drafter_from_checkpoint(args.checkpoint), args.out, auto_map=args.auto_map)
    print(folder)
    return 0


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 (greedy) or positive")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line; ``dflash-lit COMMAND --help`` prints it."""
    main_parser = argparse.ArgumentParser(prog="dflash-lit", description="Tools for DFlash drafters.")
    commands = main_parser.add_subparsers(dest="command", required=True)

    evaluate = commands.add_parser("evaluate", help="decode prompts with and without an exported drafter")
    evaluate.add_argument("drafter", help="folder of an exported drafter")
    evaluate.add_argument("--target", default=EMBEDDED, help="Hugging Face folder or name (default: the embedded target)")
    evaluate.add_argument("--prompts", help="a .jsonl or .txt file (default: held-out files of the standard library)")
    evaluate.add_argument("--count", type=_natural, default=16, help="prompts to decode (default: %(default)s)")
    evaluate.add_argument("--prompt-tokens", type=_natural, default=48, help="longest prompt (default: %(default)s)")
    evaluate.add_argument("--max-new-tokens", type=_natural, default=96, help="tokens a response (default: %(default)s)")
    evaluate.add_argument(
        "--temperature", type=_temperature, nargs="+", default=[0.0], help="0 is greedy (default); several are run in turn"
    )
    evaluate.add_argument("--seed", type=int, default=0, help="of sampling and of the prompts' choice")
    evaluate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    evaluate.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    evaluate.set_defaults(run=_evaluate)

    export = commands.add_parser("export", help="write a Lightning checkpoint's drafter in the served format")
    export.add_argument("checkpoint", help="a .ckpt file of a run")
    export.add_argument("--out", default="drafter", help="folder to write (default: %(default)s)")
    export.add_argument("--auto-map", action="store_true", help="add the field that z-lab's loader wants; SGLang does not")
    export.set_defaults(run=_export)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = parser().parse_args(argv)
    return run_command(lambda: args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
