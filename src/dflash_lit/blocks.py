"""Anchors, slots and labels: the one place that says which token a slot predicts.

Everything here has static shapes, runs on the batch's device and never waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Blocks", "draw_anchors", "eligible_anchors", "make_blocks", "row_noise", "slot_tokens"]


def slot_tokens(anchors: Tensor, block_size: int) -> Tensor:
    """Index of the token that slot ``k`` of each block stands for and predicts: ``anchor + k``; int64 [..., B].

    Slot 0 holds the anchor itself and is input only. Training labels and decoded drafts both come from this function:
    off by one here is the most reported bug of all.
    """
    return anchors.long()[..., None] + torch.arange(block_size, device=anchors.device)


def row_noise(seed: int, epoch: int, row_ids: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1), fp32 [R, count]: a function of (seed, epoch, row id, place) and of nothing else.

    A counter-based hash (the finaliser of SplitMix64, Steele et al. 2014), so no generator state has to be kept, moved
    between devices or restored: batches do not depend on ranks or on arrival, and a resumed run draws the same anchors.
    """

    def mix(x: Tensor) -> Tensor:
        # int64 products wrap; the shifts have to be logical ones.
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    golden = -0x61C8864680B583EB
    places = torch.arange(1, count + 1, device=row_ids.device)
    keys = mix(mix(mix(torch.full_like(row_ids, seed)) + epoch * 2 + 1) ^ (row_ids * golden))
    bits = mix(keys[:, None] + places * golden)
    return ((bits >> 40) & 0xFFFFFF).float() / 2**24


def eligible_anchors(supervised: Tensor, document_ids: Tensor) -> Tensor:
    """bool [R, S]: supervised tokens whose next token is supervised too, in the same document."""
    following = supervised[:, 1:] & (document_ids[:, 1:] == document_ids[:, :-1])
    eligible = torch.zeros_like(supervised)
    eligible[:, :-1] = supervised[:, :-1] & following & (document_ids[:, :-1] >= 0)
    return eligible


def draw_anchors(supervised: Tensor, document_ids: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors a row without replacement, each document in proportion to its eligible tokens.

    Systematic sampling: the eligible tokens are laid out document after document, shuffled within each, and every
    ``n / count``-th of them is taken from a random start. So all tokens are equally likely, and every document gets its share
    rounded up or down, where independent draws would leave short documents out.

    Args:
        supervised: bool [R, S].
        document_ids: int [R, S], -1 on padding.
        count: anchors a row, static.
        noise: fp32 [R, S + 1] in [0, 1), see :func:`row_noise`.

    Returns:
        ``anchors`` int32 [R, count] sorted, the padding at the end with index S - 1; ``valid`` bool [R, count].
    """
    rows, tokens = supervised.shape
    eligible = eligible_anchors(supervised, document_ids)
    documents = document_ids.clamp(min=0).long()
    # Documents apart, tokens of a document in random order: ranks within the document without a loop.
    shuffle = documents + noise[:, :tokens].double() * 0.999
    order = torch.where(eligible, shuffle, torch.inf).argsort(dim=1, stable=True)
    index = torch.arange(tokens, device=order.device).expand(rows, -1)
    overall = torch.empty_like(order).scatter_(1, order, index)
    total = eligible.sum(dim=1, keepdim=True)
    drawn = total.clamp(max=count)
    start = (noise[:, tokens:] * total).long()
    # Whole numbers: exactly ``drawn`` of ``total`` consecutive places cross a multiple of ``total``.
    place = overall * drawn + start
    steps = (place + drawn) // total.clamp(min=1) - place // total.clamp(min=1)
    width = min(count, tokens)
    places = torch.where(eligible & (steps > 0), index, tokens).sort(dim=1).values[:, :width]
    if width < count:
        places = torch.cat([places, places.new_full((rows, count - width), tokens)], dim=1)
    return places.clamp(max=tokens - 1).int(), places < tokens


@dataclass(frozen=True)
class Blocks:
    """The drafter's side of a batch; see the shapes in the attributes.

    Attributes:
        anchors: int32 [R, A]; valid: bool [R, A].
        noise_ids: int64 [R, A * B]: anchor token, then mask tokens.
        positions: int64 [R, A * B]: position of the anchor in its document plus the slot.
        labels: int64 [R, A, B - 1]: the token that slots 1..B-1 predict (0 where there is none).
        label_ok: bool [R, A, B - 1]: inside the document, supervised, and nothing unsupervised since the anchor.
    """

    anchors: Tensor
    valid: Tensor
    noise_ids: Tensor
    positions: Tensor
    labels: Tensor
    label_ok: Tensor


def make_blocks(
    input_ids: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    supervised: Tensor,
    anchors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Cut the blocks at ``anchors`` out of packed rows (all arguments [R, S] or [R, A]).

    Blocks over a document's end are kept and their missing labels marked, so that the last tokens of an answer are trained.
    """
    tokens = input_ids.shape[1]
    places = slot_tokens(anchors, block_size)  # [R, A, B]
    inside = places < tokens
    flat = places.clamp(max=tokens - 1).flatten(1)

    def at(source: Tensor) -> Tensor:
        return source.gather(1, flat).view_as(places)

    own = document_ids.gather(1, anchors.long())[..., None]
    fine = inside & at(supervised) & (at(document_ids) == own) & (own >= 0) & valid[..., None]
    unbroken = fine.long().cumprod(dim=-1).bool()[..., 1:]
    labels = torch.where(unbroken, at(input_ids)[..., 1:], 0)

    noise_ids = torch.full_like(places, mask_token_id)
    noise_ids[..., 0] = input_ids.gather(1, anchors.long())
    start = position_ids.gather(1, anchors.long())
    positions = start.long()[..., None] + torch.arange(block_size, device=start.device)
    return Blocks(anchors, valid, noise_ids.flatten(1), positions.flatten(1), labels, unbroken)
