"""Draft paths through the candidates of a block's slots, each scored by what is before it on its path.

Of each slot the K most probable tokens of the plain drafter are candidates. On a path they have the probabilities of the
:class:`~dflash_lit.drafter.path_head.PathHead`, normalised over the candidates, times the plain drafter's probability that the
token is one of them at all: the mass outside is taken to be the same on every path. So a prefix never is more probable than what
is before it, a set of the most probable prefixes is a tree, and with all tokens as candidates the probabilities are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.drafter.path_head import PathHead
from dflash_lit.target.frozen import TargetEnds

__all__ = ["Lattice", "Levels", "greedy_path", "grow_paths", "make_lattice"]


@dataclass(frozen=True)
class Lattice:
    """K candidates of each of D slots, for R anchors, and all that their conditional probabilities are made of.

    Attributes:
        tokens: int64 [R, D, K], the most probable first.
        logits: fp32 [R, D, K], without condition.
        inside: fp32 [R, D], log-probability that the token is among the candidates.
        asked: [R, D, r] of the slots' hidden states.
        answers: [R, D, K, r] what each unit of the head adds to a candidate's logit.
        keep, added: [R, D, K, r] what a candidate does to the state of the path that takes it.
        start: [R, r] the state behind the anchor.
        head: whose numbers these are.
    """

    tokens: Tensor
    logits: Tensor
    inside: Tensor
    asked: Tensor
    answers: Tensor
    keep: Tensor
    added: Tensor
    start: Tensor
    head: PathHead

    def conditional(self, slot: int, states: Tensor) -> Tensor:
        """Log-probabilities fp32 [R, N, K] of a slot's candidates behind the paths with ``states`` [R, N, r]; at most 0."""
        active = self.head.activate(self.asked[:, slot, None], states)
        shifts = active @ self.answers[:, slot].mT
        logits = self.logits[:, slot, None] + shifts.float()
        scores = logits.log_softmax(dim=-1) + self.inside[:, slot, None, None]
        return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a drafter gone bad, or no candidate that is possible


def make_lattice(head: PathHead, ends: TargetEnds, anchors: Tensor, hidden: Tensor, logits: Tensor, candidates: int) -> Lattice:
    """The lattice of one drafter pass.

    Args:
        anchors: int64 [R] tokens.
        hidden: [R, D, H] of slots 1..D.
        logits: [R, D, V] the plain drafter's.
        candidates: K; at most V are there.
    """
    logits = logits.float()
    best = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    # By rounding it may come out above 0.
    inside = (best.values.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).clamp(max=0)
    weight = head.out_proj.weight
    answers = F.linear(F.embedding(best.indices, ends.head).to(weight.dtype), weight.T)
    keep, added = head.read(F.embedding(best.indices, ends.embed))
    _, start = head.read(F.embedding(anchors, ends.embed))
    return Lattice(
        best.indices, best.values, inside, head.hidden_proj(hidden.to(weight.dtype)), answers, keep, added, start, head
    )


def greedy_path(lattice: Lattice) -> Tensor:
    """The path that takes the most probable candidate of each slot in turn; int64 [R, D]."""
    state, path = lattice.start[:, None], []
    for slot in range(lattice.tokens.shape[1]):
        best = lattice.conditional(slot, state).argmax(dim=-1)  # [R, 1]
        path.append(lattice.tokens[:, slot].gather(1, best))
        state = _advance(lattice, slot, state, torch.zeros_like(best), best)
    return torch.cat(path, dim=1)


@dataclass(frozen=True)
class Levels:
    """The most probable prefixes of each depth, best first: lists over the depths of [R, N_d].

    Attributes:
        scores: fp32 log-probabilities; -inf for what cannot be.
        tokens: int64, the last of each prefix.
        parents: int64, where what is before it stands among the prefixes of *all* depths, one after the other; 0 at depth 1.
    """

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]


def grow_paths(lattice: Lattice, budget: int) -> Levels:
    """The ``budget`` most probable prefixes of each depth, of which those of all depths are sure to be among.

    A heap would take prefixes one after the other. Each depth is made of the one before: static shapes, and nothing waits for the
    device. Ties go to the more probable parent, then to the earlier candidate.

    Raises:
        ValueError: if ``budget`` is not positive.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a tree has at least one node")
    rows, depths, candidates = lattice.tokens.shape
    states, scores = lattice.start[:, None], lattice.inside.new_zeros(rows, 1)
    levels = Levels([], [], [])
    start = 0
    for slot in range(depths):
        width = scores.shape[1]
        sums = (scores[..., None] + lattice.conditional(slot, states)).flatten(1)
        best, order = (x[:, :budget] for x in sums.sort(dim=1, descending=True, stable=True))
        parent, candidate = order // candidates, order % candidates
        states = _advance(lattice, slot, states, parent, candidate)
        levels.scores.append(best)
        levels.tokens.append(lattice.tokens[:, slot].gather(1, candidate))
        # ``start`` is where the depth before begins.
        levels.parents.append(parent + start if slot else parent)
        start += width if slot else 0
        scores = best
    return levels


def _advance(lattice: Lattice, slot: int, states: Tensor, parent: Tensor, candidate: Tensor) -> Tensor:
    """States [R, N, r] of the prefixes that go on from ``parent`` [R, N] with ``candidate`` [R, N]."""

    def at(source: Tensor, index: Tensor) -> Tensor:
        return source.gather(1, index[..., None].expand(-1, -1, source.shape[-1]))

    return at(lattice.keep[:, slot], candidate) * at(states, parent) + at(lattice.added[:, slot], candidate)
