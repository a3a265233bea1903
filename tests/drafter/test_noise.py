from __future__ import annotations

import torch

from dflash_lit.drafter.noise import CompiledNoise, add_noise, noise_keys


def drawn(amount: float = 1.0, *, seed: int = 0, epoch: int = 0, rows: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    keys = noise_keys(seed, epoch, torch.tensor(rows), 200)
    return add_noise(torch.zeros(len(rows), 200, 96), keys, amount)


def test_it_is_uniform_and_independent() -> None:
    noise = drawn(0.05)
    assert 0.0499 < float(noise.abs().max()) < 0.05
    assert abs(float(noise.mean())) < 0.05 / 3**0.5 * 4 / noise.numel() ** 0.5
    assert abs(float(noise.std()) / (0.05 / 3**0.5) - 1) < 0.01
    # Neighbouring tokens, features and rows know nothing of each other: correlations within 4.5 standard errors.
    for other in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(1, 2), noise.roll((1, 1), (1, 2))):
        correlation = float((noise * other).mean() / noise.var())
        assert abs(correlation) < 4.5 / noise.numel() ** 0.5
    assert len(noise.unique()) > 0.99 * noise.numel() * (1 - noise.numel() / 2**25)


def test_it_is_a_function_of_seed_epoch_and_row() -> None:
    noise = drawn()
    assert torch.equal(drawn(rows=(9, 4))[1], noise[1])
    for other in (drawn(seed=1), drawn(epoch=1), drawn(rows=(5, 6))):
        assert (other != noise).float().mean() > 0.999


def test_it_is_added_in_fp32() -> None:
    features = torch.full((1, 200, 96), 8.0, dtype=torch.bfloat16)
    keys = noise_keys(0, 0, torch.tensor([3]), 200)
    noisy = add_noise(features, keys, 0.05)
    assert noisy.dtype == torch.bfloat16
    assert torch.equal(noisy, (8.0 + drawn(0.05)[:1]).bfloat16())


def test_the_graph_does_the_same() -> None:
    features, keys = torch.randn(2, 64, 32), noise_keys(1, 2, torch.tensor([0, 7]), 64)
    torch.testing.assert_close(CompiledNoise()(features, keys, 0.05), add_noise(features, keys, 0.05))
