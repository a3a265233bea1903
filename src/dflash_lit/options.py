"""Types of command-line options: a value, or one line that says what is wrong with it."""

from __future__ import annotations

import argparse

__all__ = ["natural", "naturals", "temperature"]


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


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 (greedy) or positive")
    return value
