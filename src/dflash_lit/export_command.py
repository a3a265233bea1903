"""``dflash-lit export``: write a Lightning checkpoint's drafter in the served format."""

from __future__ import annotations

import argparse

from dflash_lit.export import drafter_from_checkpoint, save_drafter

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a .ckpt file of a run")
    parser.add_argument("--out", default="drafter", help="folder to write (default: %(default)s)")
    parser.add_argument("--auto-map", action="store_true", help="add the field that z-lab's loader wants; SGLang does not")


def run(args: argparse.Namespace) -> int:
    folder = save_drafter(drafter_from_checkpoint(args.checkpoint), args.out, auto_map=args.auto_map)
    print(folder)
    return 0
