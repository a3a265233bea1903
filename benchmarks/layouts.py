"""Layouts as benchmarks take and print them: N+M, target ranks + drafter ranks; of 0+M each drafter has a target in its own process."""

from __future__ import annotations

import argparse
import re

from dflash_lit.placement.layout import Layout

__all__ = ["layout", "layout_overrides", "named"]


def layout(text: str) -> Layout:
    """As the ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: for anything else than N+M.
    """
    if not re.fullmatch(r"\d{1,4}\+[1-9]\d{0,3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: write target ranks + drafter ranks, as 5+3")
    return Layout(*map(int, text.split("+")))


def named(found: Layout) -> str:
    return f"{found.targets}+{found.drafters}"


def layout_overrides(found: Layout) -> list[str]:
    """What a run is given for it."""
    split = ["placement=split", f"placement.targets={found.targets}"] if found.targets else []
    return [*split, f"placement.drafters={found.drafters}"]
