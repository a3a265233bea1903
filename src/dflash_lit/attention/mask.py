"""Who sees whom: the one rule of the drafter's attention, as a predicate and as a dense oracle.

Keys come in two parts: the ``S`` context tokens of a packed row, then the ``A * B`` noise tokens of its blocks. Query
``a * B + o`` is slot ``o`` of block ``a``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lit.blocks import slot_tokens

__all__ = ["BlockLayout", "block_visible", "context_visible", "dense_mask"]


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a batch of packed rows stand.

    Attributes:
        anchors: int [R, A] index in the row of each block's clean token, sorted.
        valid: bool [R, A]; False on blocks that only pad the count.
        document_ids: int [R, S], -1 on padding. The tokens of a document stand side by side, and no id comes twice in a row.
        block_size: slots a block.
        causal: whether a slot sees only the slots up to itself.
        window: tokens back that a slot of a sliding layer sees, itself included; None sees the whole document.

    Raises:
        ValueError: a window shorter than the block: the block's own part is not windowed.
    """

    anchors: Tensor
    valid: Tensor
    document_ids: Tensor
    block_size: int
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < self.block_size:
            raise ValueError(f"window {self.window} is shorter than a block of {self.block_size} slots")

    @property
    def rows(self) -> int:
        return self.anchors.shape[0]

    @property
    def queries(self) -> int:
        """Noise tokens a row, ``A * B``."""
        return self.anchors.shape[1] * self.block_size

    @property
    def row_tokens(self) -> int:
        return self.document_ids.shape[1]


def context_visible(layout: BlockLayout) -> Tensor:
    """Context token ``j`` is visible to block ``a`` iff ``j < anchor`` strictly and in the same document.

    ``j <= anchor`` is the classic leak: the features at the anchor have seen the anchor's successor's logits in the making,
    which are not there when serving.

    A window asks besides that ``j`` is less than ``window`` tokens before the slot. (A document's tokens stand side by side,
    so distances in the row are distances in the document.)

    Returns:
        bool [R, A, 1, S], the same for all slots, since nothing between anchor and slot is context; with a window
        [R, A, B, S].
    """
    anchors = layout.anchors.long()
    own = layout.document_ids.gather(1, anchors)
    tokens = torch.arange(layout.row_tokens, device=anchors.device)
    before = tokens < anchors[..., None]
    same = layout.document_ids[:, None, :] == own[..., None]
    seen = (before & same & (own[..., None] >= 0) & layout.valid[..., None])[:, :, None]
    if layout.window is None:
        return seen
    return seen & (slot_tokens(anchors, layout.block_size)[..., None] - tokens < layout.window)


def block_visible(layout: BlockLayout) -> Tensor:
    """bool [B, B]: slot ``o`` (row) sees slot ``p`` (column) of its own block.

    Padding blocks see themselves too: a row without any visible key would be NaN in a dense softmax.
    """
    size = layout.block_size
    everything = torch.ones(size, size, dtype=torch.bool, device=layout.anchors.device)
    return everything.tril() if layout.causal else everything


def dense_mask(layout: BlockLayout) -> Tensor:
    """The whole mask, bool [R, A*B, S + A*B]: the oracle of every fast path; quadratic, so for tests and pictures."""
    size, blocks = layout.block_size, layout.anchors.shape[1]
    context = context_visible(layout).expand(-1, -1, size, -1).flatten(1, 2)
    same_block = torch.eye(blocks, dtype=torch.bool, device=layout.anchors.device)
    noise = torch.kron(same_block, block_visible(layout)).bool()
    return torch.cat([context, noise.expand(layout.rows, -1, -1)], dim=2)
