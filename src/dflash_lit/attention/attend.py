"""What the drafter asks of an attention: the types between ``drafter/`` and ``attention/``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["Attend", "Attends", "ContextKV"]

ContextKV = tuple[Tensor, Tensor]
"""Keys and values for one layer: each [R, Hkv, T, D]."""

Attend = Callable[[Tensor, ContextKV, ContextKV], Tensor]
"""(queries [R, H, Q, D], context keys and values [R, Hkv, S, D], block keys and values [R, Hkv, Q, D]) -> [R, H, Q, D]."""

Attends = Attend | list[Attend]
"""One attention for all layers, or one for each."""
