"""Noise on the context features: a drafter that has seen none relies on digits that serving does not reproduce.

A server computes features in other kernels, batch sizes and quantisations than training did.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lit.attention.compiled import compiled
from dflash_lit.blocks import row_noise

__all__ = ["CompiledNoise", "add_noise", "noise_keys"]


def noise_keys(seed: int, epoch: int, row_ids: Tensor, tokens: int) -> Tensor:
    """int32 [R, S]: what :func:`add_noise` makes its numbers of, different for each token, epoch and seed."""
    return (row_noise(seed, epoch, row_ids, tokens) * 2**24).int() * 256 + 1


def add_noise(features: Tensor, keys: Tensor, amount: float) -> Tensor:
    """``features`` plus independent uniform numbers in (-amount, amount).

    A function of the keys and of each feature's place (the finaliser of MurmurHash3, Appleby 2011), like the anchors: it does not
    depend on ranks or accumulation, and needs no state to resume.

    Args:
        features: [R, S, F], any floating dtype; the noise is added in fp32.
        keys: int32 [R, S] from :func:`noise_keys`.
        amount: in the features' own units.
    """
    # int32 products wrap, and the shifts have to be logical ones.
    x = keys[..., None] + torch.arange(1, features.shape[-1] + 1, dtype=torch.int32, device=keys.device) * -0x61C88647
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        x = (x ^ ((x >> shift) & (2 ** (32 - shift) - 1))) * factor
    x = x ^ ((x >> 16) & 0xFFFF)
    uniform = ((x >> 8) & 0xFFFFFF).float() / 2**23 - 1 + 2.0**-24
    return (features.float() + amount * uniform).to(features.dtype)


class CompiledNoise:
    """:func:`add_noise` as one graph: otherwise a dozen tensors of the features' size would come and go."""

    def __init__(self, *, backend: str = "inductor") -> None:
        self._add = compiled(add_noise, backend=backend)

    def __call__(self, features: Tensor, keys: Tensor, amount: float) -> Tensor:
        return self._add(features, keys, amount)
