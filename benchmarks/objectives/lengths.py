"""Accepted lengths of blocks in a record: one character each."""

from __future__ import annotations

import string
from collections.abc import Iterable

import numpy as np

__all__ = ["lengths_text", "read_lengths"]

_DIGITS = string.digits + string.ascii_lowercase


def lengths_text(lengths: Iterable[int], complete: Iterable[bool]) -> str:
    """Accepted lengths [M] as one digit each ("a" is 10), "." for a block without all labels."""
    return "".join(_DIGITS[length] if whole else "." for length, whole in zip(lengths, complete, strict=True))


def read_lengths(text: str) -> np.ndarray:
    """Inverse of :func:`lengths_text`: fp64 [M], NaN for "."."""
    return np.array([np.nan if digit == "." else _DIGITS.index(digit) for digit in text], dtype=float)
