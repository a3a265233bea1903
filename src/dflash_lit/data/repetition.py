"""Whether a response got stuck: decoding that goes round in a circle teaches a drafter the circle."""

from __future__ import annotations

import numpy as np

__all__ = ["is_repetitive", "is_repetitive_text"]


def is_repetitive(ids: np.ndarray, *, max_period: int = 16, share: float = 0.5, repeats: int = 3, min_run: int = 16) -> bool:
    """Whether the end of ``ids`` is a short cycle that fills much of them.

    Args:
        ids: integers [n], a response without its end token.
        max_period: longest cycle looked for, in tokens.
        share: of the n tokens that the cycle must fill.
        repeats: how many times it must come, at least.
        min_run: tokens it must fill, at least: four equal tokens in a short answer are no loop.
    """
    ids = np.asarray(ids)
    for period in range(1, min(max_period, len(ids) - 1) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        # Everything after the last difference repeats what stands one period before, beginning with that first period.
        run = len(ids) - (int(differs[-1]) + 1 if len(differs) else 0)
        if run >= max(share * len(ids), repeats * period, min_run):
            return True
    return False


def is_repetitive_text(text: str) -> bool:
    """:func:`is_repetitive` for characters: a token is about four of them."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return is_repetitive(characters, max_period=64, min_run=64)
