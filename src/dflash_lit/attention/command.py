"""``dflash-lit mask``: draw who sees whom."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dflash_lit.attention.mask import BlockLayout
from dflash_lit.attention.picture import draw_mask, tile_counts
from dflash_lit.blocks import draw_anchors, row_noise
from dflash_lit.errors import UserError
from dflash_lit.options import natural, naturals

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="mask.png", help="a .png, .svg or .pdf file (default: %(default)s)")
    parser.add_argument("--row-tokens", type=natural, default=512, help="of the packed row (default: %(default)s)")
    parser.add_argument(
        "--documents", type=naturals, default=[200, 180, 90], help="their tokens; the rest of the row is padding (200,180,90)"
    )
    parser.add_argument("--anchors", type=natural, default=12, help="blocks of the row (default: %(default)s)")
    parser.add_argument("--block-size", type=natural, default=16, help="slots a block (default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="a slot sees its own block only up to itself")
    parser.add_argument("--window", type=natural, help="tokens back that a slot of a sliding layer sees (default: all)")
    parser.add_argument("--tile", type=natural, default=32, help="of the tiles drawn; training uses 128 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the anchors (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
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
