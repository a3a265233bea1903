"""The loss through the target's frozen head, a chunk of blocks at a time.

Logits over all slots would be the largest tensor of a step (32,768 slots x 151,936 tokens x 4 bytes = 20 GB), so each chunk
is recomputed in the backward pass instead of kept (``torch.utils.checkpoint``). This is the readable reference for every
faster head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds

__all__ = ["HeadResult", "Weigh", "check_settings", "fused_available", "head_loss", "tree_lengths"]

Weigh = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(label probability fp32 [M, B - 1], label_ok bool [M, B - 1], top) -> weights fp32 [M, B - 1], without gradient.

``top`` are the K largest log-probabilities of each slot as in :class:`HeadResult`, None if the loss is to find none. A weight may
depend on its whole block. Only positive ones count; where it is 0, not even an infinite loss does.
"""


@dataclass(frozen=True)
class HeadResult:
    """Sums and statistics of the slots with a label; only ``numerator`` has a gradient, and only for ``hidden``.

    Attributes:
        numerator: fp32 scalar, sum of weight x row loss.
        denominator: fp32 scalar, sum of weights.
        nll: fp32 [M, B-1], -log probability of the label in nats (0 where there is none).
        rank: int32 [M, B-1], how many tokens come before the label when sorted by (logit descending, id ascending): 0 is the
            argmax, and the label is among the first k if rank < k. The vocabulary's size where there is no label, or a logit is NaN.
        top: fp32 [M, B-1, K] or None, the K largest log-probabilities of each slot, descending (-inf where there is no label).
            ``-nll`` of a label among them is equal to its entry to the last bit.
        dropped: int64 scalar, labels left out because they were more than the capacity.
    """

    numerator: Tensor
    denominator: Tensor
    nll: Tensor
    rank: Tensor
    top: Tensor | None
    dropped: Tensor

    @property
    def hit(self) -> Tensor:
        """bool [M, B-1], whether the label is the most probable token."""
        return self.rank == 0


def fused_available(device: torch.device) -> bool:
    """Whether :func:`dflash_lit.objective.fused_head.fused_head_loss` can run there: CUDA, and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def check_settings(temperature: float, top: int, chunk_slots: int) -> None:
    """Raise ValueError unless each is possible."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature:g} must be positive")
    if top < 0:
        raise ValueError(f"top={top} must not be negative")
    if chunk_slots < 1:
        raise ValueError(f"chunk_slots={chunk_slots} must be positive")


def _divergence(log_q: Tensor, teacher_logits: Tensor) -> Tensor:
    """``KL(p || q) = sum p (log p - log q)`` over the last dimension; p is a constant, and its zeros count nothing."""
    log_p = teacher_logits.log_softmax(dim=-1)
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=-1)  # NaN is not 0


def _chunk(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    ok: Tensor,
    weigh: Weigh,
    teacher: Tensor | None,
    temperature: float,
    top: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, head).float()
        log_q = logits.log_softmax(dim=-1)
        label = labels[..., None]
        nll = torch.where(ok, -log_q.gather(-1, label)[..., 0], 0.0)
        loss = nll
        if teacher is not None:
            with torch.no_grad():
                # Without a label there may be anything, and zero times NaN would get into the gradient.
                teacher = torch.where(ok[..., None], teacher, 0.0).to(hidden.dtype)
                teacher_logits = F.linear(teacher, head).float() / temperature
            loss = torch.where(ok, _divergence(log_q, teacher_logits), 0.0)
        with torch.no_grad():
            best = None
            if top:
                best = log_q.topk(min(top, logits.shape[-1]), dim=-1).values
                best = torch.where(ok[..., None], best, -torch.inf)
            weights = weigh(torch.exp(-nll), ok, best)
            reached = logits.gather(-1, label)
            ids = torch.arange(logits.shape[-1], device=logits.device)
            before = (logits > reached) | ((logits == reached) & (ids < label))
            # Next to NaN nothing compares: that must not read as the first place.
            rank = torch.where(ok & ~nll.isnan(), before.sum(dim=-1, dtype=torch.int32), logits.shape[-1])
        return torch.where(weights == 0, 0.0, weights * loss).sum(), weights.sum(), nll.detach(), rank, best


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_ok: Tensor,
    weigh: Weigh,
    *,
    teacher: Tensor | None = None,
    temperature: float = 1.0,
    top: int = 0,
    chunk_slots: int = 4096,
    use_reentrant: bool = False,
) -> HeadResult:
    """Weighted loss of the slots with a label: -log q(label), or with a teacher ``KL(p || q)``.

    q is the softmax of ``head @ hidden``, p that of ``head @ teacher / temperature``. Everything runs in hidden's dtype,
    autocast or not, with log-probabilities in fp32.

    Args:
        hidden: [M, B-1, H] the drafter's final hidden states of slots 1..B-1 (slot 0 has no label).
        head: [V, H] the target's head, frozen.
        labels: int64 [M, B-1]; any valid id where ``label_ok`` is False.
        label_ok: bool [M, B-1].
        weigh: gives each slot's weight from the label probabilities (under q) of its block; whole blocks stay in one chunk.
        teacher: [M, B-1, H] the target's last hidden states, normed, at the token before each label; soft labels.
        temperature: of the teacher's softmax.
        top: how many of each slot's largest log-probabilities to return (at most V); 0: none.
        chunk_slots: upper limit of slots whose logits exist at a time (at least one block).
        use_reentrant: the older form of checkpointing; same numbers.

    With no label at all the loss is zero and still connected to ``hidden``.

    Raises:
        ValueError: for a setting out of its range.
    """
    check_settings(temperature, top, chunk_slots)
    head = head.detach().to(hidden.dtype)
    per_chunk = max(chunk_slots // labels.shape[1], 1)
    numerators, denominators, nlls, ranks, tops = [], [], [], [], []
    for start in range(0, hidden.shape[0], per_chunk):
        part = slice(start, start + per_chunk)
        soft = None if teacher is None else teacher[part].detach()
        arguments = (hidden[part], head, labels[part], label_ok[part], weigh, soft, temperature, top)
        if torch.is_grad_enabled():
            # Nothing in the chunk draws random numbers, so there is no generator state to keep.
            out = checkpoint(_chunk, *arguments, use_reentrant=use_reentrant, preserve_rng_state=False)
        else:
            out = _chunk(*arguments)
        numerators.append(out[0])
        # Reentrant checkpointing marks every floating-point output as differentiable.
        denominators.append(out[1].detach())
        nlls.append(out[2].detach())
        ranks.append(out[3])
        if top:
            tops.append(out[4].detach())
    return HeadResult(
        numerator=torch.stack(numerators).sum(),
        denominator=torch.stack(denominators).sum(),
        nll=torch.cat(nlls),
        rank=torch.cat(ranks),
        top=torch.cat(tops) if top else None,
        dropped=torch.zeros((), dtype=torch.int64, device=hidden.device),
    )


@torch.no_grad()
def tree_lengths(result: HeadResult, budgets: Sequence[int]) -> Tensor:
    """Tokens that a draft tree of each budget accepts on the labels, without the bonus; int64 [M, len(budgets)].

    A slot without a label ends both the path and the tree.

    Args:
        result: with ``top``, whose K is at least min(max(budgets), V).
        budgets: tree sizes in nodes, the root not counted.

    Raises:
        ValueError: if ``result`` has no ``top``.
    """
    if result.top is None:
        raise ValueError("tree lengths need the largest log-probabilities: call the head loss with top=max(budgets)")
    label = torch.where(result.top[..., 0] > -torch.inf, -result.nll, -torch.inf)
    return accepted_in_tree(path_scores(label), tree_thresholds(result.top, budgets))
