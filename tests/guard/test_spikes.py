"""What counts as far above the usual."""

from __future__ import annotations

import random

import pytest

from dflash_lit.guard.spikes import SpikeDetector


def spikes(values: list[float], **settings: float) -> list[int]:
    detector = SpikeDetector(**{"window": 32, "threshold": 10.0, "warmup": 32, **settings})  # type: ignore[arg-type]
    return [place for place, value in enumerate(values) if detector.look({"loss": value})]


def noisy(count: int, spread: float, fall: float = 0.0) -> list[float]:
    rng = random.Random(0)
    return [3.0 + 5.0 * (1 - fall) ** place + rng.gauss(0, spread) for place in range(count)]


def test_noise_and_a_falling_loss_are_none() -> None:
    assert spikes(noisy(2000, 0.3)) == []
    assert spikes(noisy(500, 0.05, fall=0.01)) == []
    assert spikes([2.0, 2.0000001] * 100) == []  # no spread at all


def test_limits() -> None:
    values = noisy(200, 0.1)
    values[10] = values[20] = 1e6  # before the window is full, and not enough to move the median
    values[100], values[150] = 16.0, 0.0
    assert spikes(values) == [100]
    assert spikes(values, threshold=1e5) == []
    assert 100 not in spikes(values, warmup=101)


def test_a_new_level_is_soon_the_usual_one() -> None:
    found = spikes([*noisy(100, 0.1), *(value * 3 for value in noisy(200, 0.1))])
    assert found[0] == 100
    assert 15 <= len(found) <= 17


def test_it_says_what_was_usual_and_goes_on_from_its_state() -> None:
    first, second = SpikeDetector(8, 10, 8), SpikeDetector(8, 10, 8)
    for value in (1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0):
        assert not first.look({"a": value})
    second.load_state_dict(first.state_dict())
    for detector in (first, second):
        (spike,) = detector.look({"a": 17.0})
        assert (spike.usual, spike.limit) == (2.0, pytest.approx(2.0 + 10 * 1.4826 * 0.5))
        assert str(spike).startswith("a 17 is a spike (median 2, limit 9.413)")
