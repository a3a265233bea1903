"""Command-line options that several commands have: a value, or one line that says what is wrong with it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dflash_lit.errors import UserError

if TYPE_CHECKING:
    import torch

__all__ = ["budgets", "device_of", "natural", "naturals", "temperature", "whole"]


def natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def naturals(text: str) -> list[int]:
    try:
        return [natural(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers with commas between them") from error


def budgets(text: str) -> list[int]:
    """Node budgets of draft trees with commas between them; 0 is a chain.

    Raises:
        UserError: for one that is negative, no whole number, or there twice.
    """
    found: list[int] = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise UserError(f"--budgets {text}: {part.strip()!r} is no whole number from 0 (a chain) up")
        if int(part) in found:
            raise UserError(f"--budgets {text}: {int(part)} is there twice; name each budget once")
        found.append(int(part))
    return found


def device_of(chosen: str) -> torch.device:
    """Of ``--device``: auto, cpu or cuda.

    Raises:
        UserError: for a GPU that is not there.
    """
    import torch  # not before it is asked for: some commands need none

    if chosen == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here")
    return torch.device("cuda" if chosen != "cpu" and torch.cuda.is_available() else "cpu")


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 (greedy) or positive")
    return value


def whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value
