"""Paths through a lattice against a plain heap, and against the head on whole paths."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_lit.decode.lattice import Lattice, greedy_path, grow_paths, make_lattice
from dflash_lit.decode.tree import Tree, accept, build_tree, tree_of_levels
from dflash_lit.drafter.path_head import PathHead
from dflash_lit.objective.path import path_lengths
from dflash_lit.target.frozen import TargetEnds
from tests.helpers import random

Node = tuple[float, int, int, int]
"""(score, depth, row of the parent in the verify pass, token)"""


class Exact(PathHead):
    """Whole numbers stay whole: scores are the same however they are computed."""

    def activate(self, asked: Tensor, state: Tensor) -> Tensor:
        return (asked + state).relu()


def heap_tree(lattice: Lattice, row: int, budget: int) -> list[Node]:
    """One tree, best-first: the readable twin of ``grow_paths``."""
    one = dataclasses.replace(
        lattice,
        **{
            f.name: getattr(lattice, f.name)[row : row + 1]
            for f in dataclasses.fields(lattice)
            if isinstance(getattr(lattice, f.name), Tensor)
        },
    )
    _, depths, candidates = one.tokens.shape
    taken: list[Node] = []
    taken_at = [0] * (depths + 1)
    # Equal scores: the shorter first, then the parent that was taken first among those of its depth, then the earlier candidate.
    waiting: list[tuple[float, int, int, int, int]] = []
    states: dict[int, Tensor] = {}

    def offer(score: float, depth: int, rank: int, parent_row: int, state: Tensor) -> None:
        states[parent_row] = state
        conditional = one.conditional(depth - 1, state[None, None])[0, 0]
        for candidate in range(candidates):
            total = torch.tensor(score) + conditional[candidate]  # fp32 sums
            heapq.heappush(waiting, (-float(total), depth, rank, candidate, parent_row))

    offer(0.0, 1, 0, 0, one.start[0])
    while waiting and len(taken) < budget:
        cost, depth, _, candidate, parent_row = heapq.heappop(waiting)
        if math.isinf(cost):
            break  # impossible tokens are in no tree
        taken.append((-cost, depth, parent_row, int(one.tokens[0, depth - 1, candidate])))
        if depth < depths:
            keep, added = one.keep[0, depth - 1, candidate], one.added[0, depth - 1, candidate]
            offer(-cost, depth + 1, taken_at[depth], len(taken), keep * states[parent_row] + added)
        taken_at[depth] += 1
    return taken


def nodes_of(tree: Tree, row: int) -> list[Node]:
    columns = (tree.scores, tree.depths, tree.parents, tree.tokens)
    return [tuple(column[row, n].item() for column in columns) for n in range(int(tree.valid[row].sum()))]


def grown(lattice: Lattice, budget: int) -> Tree:
    return tree_of_levels(grow_paths(lattice, budget), budget)


def whole_numbers(seed: int, depths: int, candidates: int, *, impossible: float = 0.0, spread: int = 2) -> Lattice:
    """A lattice of few different numbers, so that ties abound."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 3, 2

    def draw(*shape: int) -> Tensor:
        return torch.randint(-spread, spread + 1, shape, generator=generator).float()

    logits = draw(rows, depths, candidates)
    logits[torch.rand(logits.shape, generator=generator) < impossible] = -torch.inf
    return Lattice(
        tokens=torch.stack([torch.randperm(50, generator=generator)[:candidates] for _ in range(rows * depths)]).view(
            rows, depths, candidates
        ),
        logits=logits,
        inside=-0.5 * torch.randint(0, 2, (rows, depths), generator=generator).float(),
        asked=draw(rows, depths, width),
        answers=draw(rows, depths, candidates, width),
        keep=torch.randint(0, 2, (rows, depths, candidates, width), generator=generator).float(),
        added=draw(rows, depths, candidates, width),
        start=draw(rows, width),
        head=Exact(4, width),
    )


def a_head(hidden: int = 16, width: int = 8, *, seed: int = 0) -> PathHead:
    """One that has learnt something."""
    head = PathHead(hidden, width)
    with torch.no_grad():
        for n, parameter in enumerate(head.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + n) * 0.5)
    return head.requires_grad_(False)


def a_lattice(seed: int, *, rows: int = 4, depths: int = 5, vocabulary: int = 12, candidates: int = 12) -> Lattice:
    ends = TargetEnds(random(vocabulary, 16, seed=seed), random(vocabulary, 16, seed=seed + 1))
    hidden = random(rows, depths, 16, seed=seed + 2)
    anchors = torch.arange(rows) % vocabulary
    return make_lattice(a_head(seed=seed), ends, anchors, hidden, F.linear(hidden, ends.head), candidates)


seeds, sizes = st.integers(0, 2**31), st.integers(1, 40)


@given(seeds, st.integers(1, 5), st.integers(1, 6), sizes, st.sampled_from([0.0, 0.2, 0.7]), st.integers(0, 3))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_like_the_heap(seed: int, depths: int, candidates: int, budget: int, impossible: float, spread: int) -> None:
    """Ties, impossible tokens, more budget than prefixes, one slot, one candidate."""
    lattice = whole_numbers(seed, depths, candidates, impossible=impossible, spread=spread)
    tree = grown(lattice, budget)
    assert tree.tokens.shape == (3, budget)
    for row in range(3):
        expected = heap_tree(lattice, row, budget)
        assert nodes_of(tree, row) == expected
        assert not tree.valid[row, len(expected) :].any()


def test_probabilities_are_those_of_the_head_on_the_whole_path() -> None:
    """With every token a candidate: log-softmax of the target's head on what ``PathHead.forward`` gives."""
    seed, rows, depths, vocabulary = 3, 2, 4, 12
    ends = TargetEnds(random(vocabulary, 16, seed=seed), random(vocabulary, 16, seed=seed + 1))
    hidden, head = random(rows, depths, 16, seed=seed + 2), a_head(seed=seed)
    anchors = torch.arange(rows)
    tree = grown(make_lattice(head, ends, anchors, hidden, F.linear(hidden, ends.head), vocabulary), 60)
    assert int(tree.depths.max()) > 2
    for row in range(rows):
        paths: list[list[int]] = [[]]
        for score, depth, parent, token in nodes_of(tree, row):
            path = [*paths[parent], token]
            paths.append(path)
            before = torch.tensor([int(anchors[row]), *path[:-1]])
            told = head(hidden[row : row + 1, :depth], F.embedding(before, ends.embed)[None])
            log_probs = F.linear(told, ends.head).log_softmax(-1)[0]
            assert score == pytest.approx(float(log_probs[range(depth), path].sum()), abs=1e-4)


@given(seeds, st.integers(1, 12))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_candidates_are_the_most_probable_and_share_their_probability(seed: int, candidates: int) -> None:
    lattice = a_lattice(seed, candidates=candidates)
    conditional = lattice.conditional(2, random(4, 3, 8, seed=seed))
    assert (conditional <= 0).all()
    # What the plain drafter gives the candidates, however the head divides it among them.
    plain = F.linear(random(4, 5, 16, seed=seed + 2), random(12, 16, seed=seed + 1)).softmax(-1)
    expected = plain.sort(descending=True).values[:, 2, None, :candidates].sum(-1).expand(4, 3)
    torch.testing.assert_close(conditional.exp().sum(-1), expected)


def test_a_head_that_says_nothing_leaves_the_plain_tree() -> None:
    seed, vocabulary = 5, 12
    ends = TargetEnds(random(vocabulary, 16, seed=seed), random(vocabulary, 16, seed=seed + 1))
    hidden = random(3, 5, 16, seed=seed + 2)
    logits = F.linear(hidden, ends.head)
    lattice = make_lattice(PathHead(16, 8), ends, torch.zeros(3, dtype=torch.long), hidden, logits, 8)
    best = logits.log_softmax(-1).topk(8, dim=-1)
    plain, tree = build_tree(best.values, best.indices, 20), grown(lattice, 20)
    assert torch.equal(tree.tokens, plain.tokens)
    assert torch.equal(tree.parents, plain.parents)
    torch.testing.assert_close(tree.scores, plain.scores)
    assert torch.equal(greedy_path(lattice), logits.argmax(-1))


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    lattice = a_lattice(7)
    large = grown(lattice, 64)
    for budget in (1, 7, 16, 63):
        small = grown(lattice, budget)
        for name in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(small, name), getattr(large, name)[:, :budget])


def test_the_greedy_path_follows_the_best_child() -> None:
    lattice = a_lattice(9)
    path = greedy_path(lattice)
    for row in range(len(path)):
        children: dict[int, tuple[int, int]] = {}
        for n, (_, _, parent, token) in enumerate(nodes_of(grown(lattice, 12**3), row)):
            children.setdefault(parent, (token, n + 1))  # the first is the most probable
        at, walked = 0, []
        while at in children and len(walked) < 3:
            token, at = children[at]
            walked.append(token)
        assert walked == path[row, : len(walked)].tolist()
        assert walked


@given(seeds, st.sampled_from([0.0, 0.3]), st.integers(1, 6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_lengths_on_labels_are_those_of_walks(seed: int, impossible: float, candidates: int) -> None:
    lattice = whole_numbers(seed, 4, candidates, impossible=impossible)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, max(candidates // 2, 1), (3, 4, 1), generator=generator)
    labels = torch.where(torch.rand(3, 4, generator=generator) < 0.8, lattice.tokens.gather(2, index)[..., 0], 60)
    ok = torch.rand(3, 4, generator=generator) < 0.9
    budgets = [1, 3, 9, 40]
    chain, trees = path_lengths(lattice, labels, ok, budgets)
    for row, (n, budget) in itertools.product(range(3), enumerate(budgets)):
        children = {(p, token): i + 1 for i, (_, _, p, token) in enumerate(heap_tree(lattice, row, budget))}
        at = length = 0
        while length < 4 and ok[row, length] and (at, int(labels[row, length])) in children:
            at = children[at, int(labels[row, length])]
            length += 1
        assert int(trees[row, n]) == length
    agree = (greedy_path(lattice) == labels) & ok
    assert chain.tolist() == [next((d for d in range(4) if not agree[row, d]), 4) for row in range(3)]


def test_a_drafter_gone_bad_drafts_nothing() -> None:
    lattice = a_lattice(1)
    bad = dataclasses.replace(lattice, logits=torch.full_like(lattice.logits, torch.nan))
    tree = grown(bad, 6)
    assert not tree.valid.any()
    assert accept(tree, torch.zeros(4, 7, dtype=torch.long)).counts.tolist() == [1] * 4


def test_without_a_budget_there_is_no_tree() -> None:
    with pytest.raises(ValueError, match="budget=0"):
        grow_paths(a_lattice(1), 0)


def test_nothing_waits_for_the_device() -> None:
    """Tensors without data: any look at a value would be an error, and so would a shape that depends on one."""
    with torch.device("meta"):
        head = PathHead(16, 8)
        ends = TargetEnds(torch.empty(50, 16), torch.empty(50, 16))
        hidden = torch.empty(2, 15, 16)
        lattice = make_lattice(head, ends, torch.empty(2, dtype=torch.long), hidden, F.linear(hidden, ends.head), 8)
    assert grown(lattice, 64).tokens.shape == (2, 64)
    assert greedy_path(lattice).shape == (2, 15)
    labels = torch.empty(2, 15, device="meta", dtype=torch.long)
    chain, trees = path_lengths(lattice, labels, labels > 0, [4, 16])
    assert (chain.shape, trees.shape) == ((2,), (2, 2))
