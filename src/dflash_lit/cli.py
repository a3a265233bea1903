"""``dflash-lit``: what one does with a drafter after training.

Exit codes: 0 done; 1 the greedy output was not the target's own (evaluate); 2 wrong input, with one line that says what.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_lit.attention.mask import BlockLayout
from dflash_lit.attention.picture import draw_mask, tile_counts
from dflash_lit.blocks import draw_anchors, row_noise
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


def _mask(args: argparse.Namespace) -> int:
    tokens, size, tile = args.row_tokens, args.block_size, args.tile
    if sum(args.documents) > tokens:
        raise UserError(f"--documents come to {sum(args.documents)} tokens, over --row-tokens {tokens}")
    if tokens % tile:
        raise UserError(f"--row-tokens {tokens} is not a multiple of --tile {tile}")
    if size < 2:
        raise UserError(f"--block-size {size}: a block is an anchor and at least one mask token, so 2 or more")
    if args.window is not None and args.window < size:
        raise UserError(f"--window {args.window} is shorter than --block-size {size}")
    if Path(args.out).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {args.out}: the name has to end in .png, .svg or .pdf")
    document_ids = torch.full((1, tokens), -1, dtype=torch.int32)
    supervised = torch.zeros(1, tokens, dtype=torch.bool)
    start = 0
    for number, length in enumerate(args.documents):
        document_ids[0, start : start + length] = number
        # A quarter as the prompt: the drafter is not trained on it, so no anchor stands there.
        supervised[0, start + -(-length // 4) : start + length] = True
        start += length
    noise = row_noise(args.seed, 0, torch.zeros(1, dtype=torch.int64), tokens + 1)
    anchors, valid = draw_anchors(supervised, document_ids, args.anchors, noise)
    if not valid.any():
        raise UserError("--documents: none has room for an anchor, which takes two tokens after the first quarter")
    layout = BlockLayout(anchors, valid, document_ids, size, args.causal, args.window)
    draw_mask(layout, args.out, tile=tile)
    count = tile_counts(layout, tile)
    print(
        f"{args.out}: {layout.queries} queries x {tokens + layout.queries} keys in {count['all']} tiles of {tile} x {tile}: "
        f"{count['full']} full, {count['partial']} partial, {count['skipped']} skipped; "
        f"{1 - count['skipped'] / count['all']:.0%} are computed"
    )
    return 0


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _naturals(text: str) -> list[int]:
    try:
        return [_natural(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers with commas between them") from error


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

    mask = commands.add_parser("mask", help="draw who sees whom in the drafter's attention, and the tiles it computes")
    mask.add_argument("--out", default="mask.png", help="a .png, .svg or .pdf file (default: %(default)s)")
    mask.add_argument("--row-tokens", type=_natural, default=512, help="of the packed row (default: %(default)s)")
    mask.add_argument(
        "--documents", type=_naturals, default=[200, 180, 90], help="their tokens; the rest of the row is padding (200,180,90)"
    )
    mask.add_argument("--anchors", type=_natural, default=12, help="blocks of the row (default: %(default)s)")
    mask.add_argument("--block-size", type=_natural, default=16, help="slots a block (default: %(default)s)")
    mask.add_argument("--causal", action="store_true", help="a slot sees its own block only up to itself")
    mask.add_argument("--window", type=_natural, help="tokens back that a slot of a sliding layer sees (default: all)")
    mask.add_argument("--tile", type=_natural, default=32, help="of the tiles drawn; training uses 128 (default: %(default)s)")
    mask.add_argument("--seed", type=int, default=0, help="of the anchors (default: %(default)s)")
    mask.set_defaults(run=_mask)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = parser().parse_args(argv)
    return run_command(lambda: args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
