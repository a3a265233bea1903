"""The loss through the target's frozen head, a chunk of blocks at a time.

Logits over all slots would be the largest tensor of a step (32,768 slots x 151,936 tokens x 4 bytes = 20 GB), so each chunk
is recomputed in the backward pass instead of kept (``torch.utils.checkpoint``). This is the readable reference for every
faster head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds

__all__ = ["HeadResult", "Weigh", "head_loss", "tree_lengths"]

Weigh = Callable[[Tensor, Tensor], Tensor]
"""(label probability fp32 [M, B - 1], label_ok bool [M, B - 1]) -> weights fp32 [M, B - 1], without gradient."""


@dataclass(frozen=True)
class HeadResult:
    """Sums and statistics of the supervised slots; only ``numerator`` has a gradient.

    Attributes:
        numerator: fp32 scalar, sum of weight x nll.
        denominator: fp32 scalar, sum of weights.
        nll: fp32 [M, B - 1], -log probability of the label in nats (0 where there is none).
        hit: bool [M, B - 1], whether the label is the most probable token.
    """

    numerator: Tensor
    denominator: Tensor
    nll: Tensor
    hit: Tensor


def _chunk(hidden: Tensor, head: Tensor, labels: Tensor, ok: Tensor, weigh: Weigh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    nll = torch.where(ok, nll, 0.0)
    with torch.no_grad():
        weights = weigh(torch.exp(-nll), ok)
        hit = (logits.argmax(dim=-1) == labels) & ok
    return (weights * nll).sum(), weights.sum(), nll.detach(), hit


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_ok: Tensor,
    weigh: Weigh,
    *,
    chunk_slots: int = 4096,
    use_reentrant: bool = False,
) -> HeadResult:
    """Weighted negative log-likelihood of the labels.

    Args:
        hidden: [M, B - 1, H] the drafter's final hidden states of slots 1..B-1 (slot 0 has no label).
        head: [V, H] the target's head, frozen.
        labels: int64 [M, B - 1]; any valid id where ``label_ok`` is False.
        label_ok: bool [M, B - 1].
        weigh: gives each slot's weight from the label probabilities of its block; whole blocks stay in one chunk.
        chunk_slots: upper limit of slots whose logits exist at a time (at least one block).
        use_reentrant: the older form of checkpointing; same numbers.

    With no label at all the loss is zero and still connected to ``hidden``.
    """
    per_chunk = max(chunk_slots // labels.shape[1], 1)
    numerators, denominators, nlls, hits = [], [], [], []
    for start in range(0, hidden.shape[0], per_chunk):
        part = slice(start, start + per_chunk)
        arguments = (hidden[part], head, labels[part], label_ok[part], weigh)
        if torch.is_grad_enabled():
            # Nothing in the chunk draws random numbers, so there is no generator state to keep.
            out = checkpoint(_chunk, *arguments, use_reentrant=use_reentrant, preserve_rng_state=False)
        else:
            out = _chunk(*arguments)
        numerators.append(out[0])
        # Reentrant checkpointing marks every floating-point output as differentiable.
        denominators.append(out[1].detach())
        nlls.append(out[2].detach())
        hits.append(out[3])
    return HeadResult(torch.stack(numerators).sum(), torch.stack(denominators).sum(), torch.cat(nlls), torch.cat(hits))


@torch.no_grad()
def tree_lengths(hidden: Tensor, head: Tensor, labels: Tensor, budgets: Sequence[int], *, chunk_slots: int = 4096) -> Tensor:
    """Tokens that a draft tree of each budget accepts on the labels, without the bonus; int64 [M, len(budgets)].

    Shapes as in :func:`head_loss`; every label of the given blocks has to exist.
    """
    width = min(max(budgets), head.shape[0])
    per_chunk = max(chunk_slots // labels.shape[1], 1)
    lengths = []
    for start in range(0, hidden.shape[0], per_chunk):
        part = slice(start, start + per_chunk)
        log_probs = F.linear(hidden[part], head.to(hidden.dtype)).float().log_softmax(dim=-1)
        scores = path_scores(log_probs.gather(-1, labels[part][..., None])[..., 0])
        top = log_probs.topk(width, dim=-1).values
        lengths.append(accepted_in_tree(scores, tree_thresholds(top, budgets)))
    return torch.cat(lengths)
