"""The drafter's training forward pass, compiled: three graphs, whatever the number of layers, and one of a path head.

Context, layer and end are compiled apart. All layers share one graph: a fifth of the compile time of a whole model of five,
and gradients become ready layer by layer, so that a data-parallel reduction can overlap the rest of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_lit.attention.attend import ContextKV
from dflash_lit.attention.compiled import compiled
from dflash_lit.attention.dense import DenseMask, attend_blocks
from dflash_lit.attention.flex import KernelOptions, flex_attend, kernel_options
from dflash_lit.drafter.model import Drafter, Layer
from dflash_lit.drafter.path_head import PathHead

__all__ = ["CompiledDrafter"]


def _context(drafter: Drafter, features: Tensor, cos: Tensor, sin: Tensor) -> list[ContextKV]:
    return drafter.context_turned(features, cos, sin)


def _layer(
    layer: Layer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    context: ContextKV,
    mask: BlockMask | DenseMask,
    options: KernelOptions,
) -> Tensor:
    attend = attend_blocks(mask) if isinstance(mask, DenseMask) else flex_attend(mask, options)
    return layer(x, cos, sin, context, attend)


def _end(drafter: Drafter, x: Tensor) -> Tensor:
    """Final norm of slots 1..B-1, [R * A, B - 1, H]: slot 0 is input only."""
    slots = x.view(-1, drafter.config.block_size, x.shape[-1])[:, 1:]
    return drafter.norm(slots)


def _path(head: PathHead, hidden: Tensor, previous: Tensor) -> Tensor:
    return head(hidden, previous)


class CompiledDrafter:
    """Calls ``drafter`` through its graphs; parameters and results are those of ``context`` and ``draft``.

    Args:
        drafter: the model; stays as it is, under its 11 names a layer.
        backend: of ``torch.compile``.
    """

    def __init__(self, drafter: Drafter, *, backend: str = "inductor") -> None:
        self.drafter = drafter
        self._context = compiled(_context, backend=backend)
        self._layer = compiled(_layer, backend=backend)
        self._end = compiled(_end, backend=backend)
        self._path = compiled(_path, backend=backend)

    def __call__(
        self,
        features: Tensor,
        noise: Tensor,
        context_positions: Tensor,
        positions: Tensor,
        mask: BlockMask | DenseMask | list[BlockMask] | list[DenseMask],
    ) -> Tensor:
        """Hidden states of slots 1..B-1 after the final norm, [R * A, B - 1, H].

        Args:
            features: [R, S, n_ids * H].
            noise: [R, A * B, H] embeddings of the blocks' slots.
            context_positions: int [R, S]; positions: int [R, A * B].
            mask: of the batch's layout, one for each layer where some slide; a dense one is for CPUs, where flex_attention has no
                backward pass.
        """
        # Outside the graphs: the frequencies move to the device when they are first used.
        angles = self.drafter.rotary(context_positions)
        context: Sequence[ContextKV] = self._context(self.drafter, features, *angles)
        cos, sin = self.drafter.rotary(positions)
        # The embeddings are frozen. Asking for their gradient all the same makes the first layer's graph that of the others.
        x = noise.detach().requires_grad_(torch.is_grad_enabled())
        options = kernel_options(x.dtype, self.drafter.config.head_dim, x.device)
        masks = mask if isinstance(mask, list) else [mask] * len(self.drafter.layers)
        for layer, cached, own in zip(self.drafter.layers, context, masks, strict=True):
            x = self._layer(layer, x, cos, sin, cached, own, options)
        return self._end(self.drafter, x)

    def condition(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The path head on hidden states [M, B - 1, H] and embeddings [M, B - 1, H] of the tokens before the slots."""
        return self._path(self.drafter.path_head, hidden, previous)
