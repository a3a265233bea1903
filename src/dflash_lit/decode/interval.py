"""How sure a mean over prompts is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

__all__ = ["ratio_error", "student_t"]


def ratio_error(rounds: Sequence[Sequence[int]], tau: float) -> float:
    """Standard error of the ratio tokens / rounds, with prompts as clusters (linearised); NaN for fewer than two.

    Args:
        rounds: tokens of each round, of each prompt; prompts without a round count as if they were not there.
        tau: the ratio over all.
    """
    used = [prompt for prompt in rounds if prompt]
    if len(used) < 2:
        return math.nan
    mean_rounds = sum(map(len, used)) / len(used)
    squares = sum((sum(prompt) - tau * len(prompt)) ** 2 for prompt in used)
    return math.sqrt(squares / (len(used) - 1) / len(used)) / mean_rounds


def student_t(freedom: int, level: float = 0.95) -> float:
    """The two-sided quantile of Student's t: that share of it lies within plus and minus this.

    Exact for 1 and 2 degrees of freedom, else Fisher's expansion around the normal (Abramowitz and Stegun, 26.7.5): within
    0.004 at 95 %.
    """
    if freedom < 1:
        raise ValueError(f"freedom={freedom}: at least 1")
    if freedom == 1:
        return math.tan(math.pi / 2 * level)
    if freedom == 2:
        return level * math.sqrt(2 / (1 - level**2))
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
