"""Tree decoding (DDTree, arXiv 2604.12989): the target verifies the most probable prefixes of a block in one pass.

The drafter's slots are independent given the context, so a prefix is as probable as the product of its tokens, and the
``budget`` most probable prefixes form a tree: whatever is in front of a member is one. Lossless as the chain is: the target makes
one choice behind each node, and a node counts only if it is the very token that the target chose behind its parent.

Rows of the verify pass: 0 is the anchor, ``n + 1`` is node ``n`` of the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.attention.attend import Attends, ContextKV
from dflash_lit.decode.chain import Decoded, DecodingTarget, Reader, choose, draft_lattice, draft_logits, until_end
from dflash_lit.decode.lattice import Levels, grow_paths
from dflash_lit.decode.proposer import Drafts, ProposingDrafter, Settled, proposer_of
from dflash_lit.decode.stages import Timing, untimed
from dflash_lit.drafter.model import Drafter
from dflash_lit.objective.tree import frontier_pairs
from dflash_lit.target.frozen import TargetEnds

__all__ = [
    "Path",
    "Tree",
    "TreeDraft",
    "TreeReader",
    "TreeTarget",
    "accept",
    "ancestor_mask",
    "build_tree",
    "decode_tree",
    "decode_tree_batch",
    "draft_tree",
    "settle_tree",
    "tree_of_levels",
]


@dataclass(frozen=True)
class Tree:
    """Draft trees of R anchors with room for N nodes each, the most probable first, so parents come before children.

    Attributes:
        tokens: int64 [R, N].
        parents: int64 [R, N]: row of the verify pass that holds the parent; 0, the anchor, at depth 1.
        depths: int64 [R, N], from 1.
        scores: fp32 [R, N] log-probabilities of the prefixes; -inf where there is no node (token 0 below the anchor then).
        deepest: the largest depth that a node can have.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    deepest: int

    @property
    def valid(self) -> Tensor:
        """bool [R, N]: where there is a node."""
        return self.scores > -torch.inf


def build_tree(log_probs: Tensor, token_ids: Tensor, budget: int) -> Tree:
    """The ``budget`` most probable prefixes; ties go to the shorter, then to the more probable parent, then to the earlier token.

    A heap would take them one after the other. Here the best prefixes of each depth come from those of the depth before, and
    the best of all depths are sorted out at the end: static shapes, and nothing waits for the device.

    Args:
        log_probs: fp32 [R, D, K], the K largest log-probabilities of each slot, sorted; exact if K >= min(budget, V).
        token_ids: int64 [R, D, K], their tokens; those of a slot differ.
        budget: nodes of a tree, the anchor not counted.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a tree has at least one node")
    (_, depths, candidates), device = log_probs.shape, log_probs.device
    first, second = frontier_pairs(budget, candidates, device)
    # Of each depth: its best prefixes, their last tokens, and where their parents stand among the prefixes of all depths.
    scores, tokens = [log_probs[:, 0, :budget]], [token_ids[:, 0, :budget]]
    parents = [torch.zeros_like(tokens[0])]
    start = 0
    for depth in range(1, depths):
        width = scores[-1].shape[1]
        known = first.clamp(max=width - 1)
        # Added in the order of ``path_scores``: equal to the last bit.
        sums = torch.where(first < width, scores[-1][:, known] + log_probs[:, depth][:, second], -torch.inf)
        best, order = (x[:, :budget] for x in sums.sort(dim=1, descending=True, stable=True))
        scores.append(best)
        tokens.append(token_ids[:, depth].gather(1, second[order]))
        parents.append(known[order] + start)
        start += width
    return tree_of_levels(Levels(scores, tokens, parents), budget)


def tree_of_levels(levels: Levels, budget: int) -> Tree:
    """The ``budget`` most probable of the prefixes of all depths; ties go to the shorter, then to the one earlier in its level."""
    scores, tokens, parents, device = levels.scores, levels.tokens, levels.parents, levels.tokens[0].device
    depths = torch.cat([torch.full((x.shape[1],), n + 1, device=device) for n, x in enumerate(scores)])

    # Stable, and the shorter ones in front: a child that is as probable as its parent comes after it.
    best, order = (x[:, :budget] for x in torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True))
    valid = best > -torch.inf
    row_of = torch.zeros_like(torch.cat(parents, dim=1))
    row_of.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=device).expand_as(order))
    level = torch.where(valid, depths[order], 1)
    parent = row_of.gather(1, torch.cat(parents, dim=1).gather(1, order))
    room = (0, budget - order.shape[1])
    return Tree(
        tokens=F.pad(torch.where(valid, torch.cat(tokens, dim=1).gather(1, order), 0), room),
        parents=F.pad(torch.where(level > 1, parent, 0), room),
        depths=F.pad(level, room, value=1),
        scores=F.pad(torch.where(valid, best, -torch.inf), room, value=-torch.inf),
        deepest=min(len(scores), budget),
    )


def ancestor_mask(tree: Tree) -> Tensor:
    """Which rows of the verify pass each row sees: itself and what is in front of it on its branch; bool [R, N+1, N+1]."""
    ahead = F.pad(tree.parents, (1, 0))
    size = ahead.shape[1]
    sees = torch.eye(size, dtype=torch.bool, device=ahead.device).expand(len(ahead), -1, -1)
    # After step s each row knows 2^s rows of its branch, and ``ahead`` is the next one.
    for _ in range(tree.deepest.bit_length()):
        sees = sees | sees.gather(1, ahead[..., None].expand_as(sees))
        ahead = ahead.gather(1, ahead)
    return sees


@dataclass(frozen=True)
class Path:
    """What the target accepts of each tree. P = deepest + 1; entries from ``counts`` on mean nothing.

    Attributes:
        rows: int64 [R, P]: rows of the verify pass that stay: the anchor, then the accepted nodes.
        tokens: int64 [R, P]: what the target chose behind each of them: the tokens of the accepted nodes, then the bonus token.
        counts: int64 [R]: how many: accepted nodes and one.
    """

    rows: Tensor
    tokens: Tensor
    counts: Tensor

    @property
    def bonus(self) -> Tensor:
        """The token behind the last accepted node, [R]: the next anchor."""
        return self.tokens.gather(1, self.counts[:, None] - 1)[:, 0]


def accept(tree: Tree, chosen: Tensor) -> Path:
    """The path along the target's own choices ``chosen``: int64 [R, N+1], its token behind each row of the verify pass."""
    hit = tree.valid & (tree.tokens == chosen.gather(1, tree.parents))
    accepted, ahead = F.pad(hit, (1, 0), value=True), F.pad(tree.parents, (1, 0))
    for _ in range(tree.deepest.bit_length()):  # as in ancestor_mask
        accepted = accepted & accepted.gather(1, ahead)
        ahead = ahead.gather(1, ahead)
    # Siblings differ, so there is one accepted row a depth at most; all others go to a column that is cut off.
    places = torch.where(accepted, F.pad(tree.depths, (1, 0)), tree.deepest + 1)
    rows = places.new_zeros(len(places), tree.deepest + 2)
    rows.scatter_(1, places, torch.arange(places.shape[1], device=places.device).expand_as(places))
    rows = rows[:, :-1]
    return Path(rows, chosen.gather(1, rows), accepted.sum(dim=1))


def settle_tree(drafts: Drafts, chosen: Tensor) -> Settled:
    """:func:`accept`, for one round of decoding."""
    assert drafts.tree is not None
    path = accept(drafts.tree, chosen)
    return Settled(path.rows, path.bonus, torch.cat([path.tokens, path.counts[:, None]], dim=1))


def draft_tree(
    drafter: Drafter,
    ends: TargetEnds,
    anchors: Tensor,
    places: Tensor,
    context: Sequence[ContextKV],
    attend: Attends,
    budget: int,
    stages: Timing = untimed,
) -> Tree:
    """One pass of the drafter, and the tree of its ``budget`` most probable prefixes, by its path head if it has one.

    Args:
        anchors: int64 [R] tokens; ``places``: int64 [R] where they stand, right after everything that was verified.
        stages: told of "draft" and of "build".
    """
    arguments = (drafter, ends, anchors, places, context, attend)
    if drafter.path_head is not None:
        with stages("draft"):
            lattice = draft_lattice(*arguments)
        with stages("build"):
            return tree_of_levels(grow_paths(lattice, budget), budget)
    with stages("draft"):
        log_probs = draft_logits(*arguments).float().log_softmax(dim=-1)
    with stages("build"):
        best = log_probs.topk(min(budget, log_probs.shape[-1]), dim=-1)
        return build_tree(best.values, best.indices, budget)


@dataclass(frozen=True)
class TreeDraft:
    """:func:`draft_tree`, or what takes its place, at a budget, as the target reads it."""

    budget: int
    draft: Callable[..., Tree] = draft_tree

    def __call__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        anchors: Tensor,
        places: Tensor,
        context: Sequence[ContextKV],
        attend: Attends,
        stages: Timing,
    ) -> Drafts:
        tree = self.draft(drafter, ends, anchors, places, context, attend, self.budget, stages)
        with stages("build"):
            tokens = torch.cat([anchors[:, None], tree.tokens], dim=1)
            return Drafts(tokens, F.pad(tree.depths, (1, 0)), ancestor_mask(tree), tree)


class TreeReader(Reader, Protocol):
    """Texts that a target reads, a tree at a time; see :class:`~dflash_lit.target.reader.TargetReader`."""

    lengths: list[int]

    def read_prompts(self, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Begin with ids [R, T]; logits [R, V] of each text's last token, features [R, T, n_ids * H]."""

    def read_tree(self, ids: Tensor, depths: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read ids [R, Q] that branch; logits [R, Q, V], features [R, Q, n_ids * H]."""

    def keep(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Keep ``counts[r]`` of those, ``rows`` [R, P], and drop the others."""


class TreeTarget(DecodingTarget, Protocol):
    """A target that verifies trees."""

    def reader(self, layer_ids: Sequence[int]) -> TreeReader:
        """Begin texts whose features are the outputs of ``layer_ids``."""


def decode_tree(
    target: TreeTarget,
    drafter: Drafter | ProposingDrafter,
    prompt: list[int],
    max_new_tokens: int,
    budget: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stages: Timing = untimed,
) -> Decoded:
    """Decode one prompt with draft trees of ``budget`` nodes; see :func:`decode_tree_batch`."""
    return decode_tree_batch(
        target, drafter, [prompt], max_new_tokens, budget, temperature=temperature, generator=generator, stages=stages
    )[0]


@torch.inference_mode()
def decode_tree_batch(
    target: TreeTarget,
    drafter: Drafter | ProposingDrafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    budget: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    draft: Callable[..., Tree] = draft_tree,
    stages: Timing = untimed,
) -> list[Decoded]:
    """Decode several prompts at once, each of its own length; a response that has ended waits for the others.

    The tree is that of the drafter's own distribution, whatever the temperature; so its accepted length is what the
    teacher-forced metric of :mod:`dflash_lit.objective.tree` says for the same text.

    Args:
        prompts: each of at least one token id.
        max_new_tokens: the responses are cut there (or end with an end token).
        budget: nodes of a tree, the anchor not counted; the target verifies ``budget + 1`` tokens of each prompt a pass.
        draft: makes the trees, with the arguments of :func:`draft_tree`.
        stages: told of the stages of each round.

    Returns:
        a response for each prompt; ``seconds`` from the start of all to its end.

    Raises:
        UserError: if the target has recurrent layers: a state knows no branches, and nothing can be taken back from it.
    """
    started = time.perf_counter()
    device, whole = target.device, TreeDraft(budget, draft)
    state = target.reader(drafter.config.target_layer_ids)
    proposer = proposer_of(drafter, target.ends(), len(prompts))

    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=device)
    logits, features = state.read_prompts(padded, lengths)
    assert features is not None
    proposer.remember(features, lengths)
    anchors = choose(logits, temperature, generator)  # [R]
    ids: list[list[int]] = [[token] for token in anchors.tolist()]
    rounds: list[list[int]] = [[] for _ in prompts]
    seconds = [time.perf_counter() - started] * len(prompts)

    def unfinished() -> list[int]:
        return [row for row, made in enumerate(ids) if len(made) < max_new_tokens and made[-1] not in target.eos_ids]

    while going := unfinished():
        drafts = proposer.propose(whole, anchors, stages)
        with stages("verify"):
            logits, features = state.read_tree(drafts.tokens, drafts.depths, drafts.sees)
            assert features is not None
            chosen = choose(logits, temperature, generator)
        with stages("commit"):
            settled = proposer.settle(settle_tree, drafts, chosen)
            anchors = settled.anchors
            made = settled.packed.tolist()
            # A text that had ended before stays as it is: it must not grow past the target's positions.
            counts = [yielded[-1] if row in going else 0 for row, yielded in enumerate(made)]
            state.keep(settled.rows, counts)
            proposer.remember(features.gather(1, settled.rows[..., None].expand(-1, -1, features.shape[2])), counts)
            for row in going:
                new = until_end(made[row][: counts[row]], target.eos_ids)
                ids[row] += new
                rounds[row].append(len(new))
                seconds[row] = time.perf_counter() - started
    return [Decoded(i[:max_new_tokens], r, s) for i, r, s in zip(ids, rounds, seconds, strict=True)]
