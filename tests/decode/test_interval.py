"""Errors and intervals of a mean over prompts."""

from __future__ import annotations

import math
import random

import pytest

from dflash_lit.decode.interval import ratio_error, student_t


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (15, 2.131), (30, 2.042), (10**6, 1.960)],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=0.005)


def test_other_levels() -> None:
    assert student_t(9, 0.9) == pytest.approx(1.833, abs=0.002)
    assert student_t(9, 0.99) == pytest.approx(3.250, abs=0.01)


def test_rounds_of_a_prompt_are_one_observation() -> None:
    alike = [[2, 2, 2, 2], [4, 4, 4, 4], [3, 3, 3, 3]]
    # Prompts of equally many rounds: the standard error of their means.
    assert ratio_error(alike, 3.0) == pytest.approx(1 / math.sqrt(3))
    assert ratio_error([[*prompt, *prompt] for prompt in alike], 3.0) == pytest.approx(1 / math.sqrt(3))
    assert ratio_error([*alike, []], 3.0) == ratio_error(alike, 3.0)
    assert math.isnan(ratio_error([[2, 3], []], 2.5))


def test_an_interval_covers_what_it_says() -> None:
    """Of 400 samples of ten prompts whose rounds go together, 95 % intervals hold the true ratio in 92 to 98 of 100."""
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        rounds = []
        for _ in range(10):
            level, count = draw.choice((1, 2, 3)), draw.randint(10, 30)
            rounds.append([level + draw.choice((0, 1)) for _ in range(count)])
        tau = sum(map(sum, rounds)) / sum(map(len, rounds))
        covered += abs(tau - 2.5) <= student_t(9) * ratio_error(rounds, tau)
    assert 0.92 <= covered / 400 <= 0.98
