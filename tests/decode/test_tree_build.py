"""Draft trees against a plain heap, their masks and accepted paths against plain walks."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_lit.decode.tree import Tree, accept, ancestor_mask, build_tree
from dflash_lit.objective.tree import accepted_in_tree, path_scores, tree_thresholds

Node = tuple[float, int, int, int]
"""(score, depth, row of the parent in the verify pass, token)"""


def heap_tree(log_probs: Tensor, token_ids: Tensor, budget: int) -> list[Node]:
    """One tree [D, K], best-first: the readable twin of ``build_tree``."""
    depths, candidates = log_probs.shape
    taken: list[Node] = []
    taken_at = [0] * (depths + 1)
    # Equal scores: the shorter first, then the parent that was taken first among those of its depth, then the earlier token.
    waiting: list[tuple[float, int, int, int, int]] = []

    def offer(score: Tensor, depth: int, rank: int, parent_row: int) -> None:
        for token in range(candidates):
            total = score + log_probs[depth - 1, token] if depth > 1 else log_probs[0, token]  # fp32 sums
            heapq.heappush(waiting, (-float(total), depth, rank, token, parent_row))

    offer(torch.zeros(()), 1, 0, 0)
    while waiting and len(taken) < budget:
        cost, depth, _, token, parent_row = heapq.heappop(waiting)
        if math.isinf(cost):
            break  # impossible tokens are in no tree
        taken.append((-cost, depth, parent_row, int(token_ids[depth - 1, token])))
        if depth < depths:
            offer(torch.tensor(-cost), depth + 1, taken_at[depth], len(taken))
        taken_at[depth] += 1
    return taken


def nodes_of(tree: Tree, row: int) -> list[Node]:
    columns = (tree.scores, tree.depths, tree.parents, tree.tokens)
    return [tuple(column[row, n].item() for column in columns) for n in range(int(tree.valid[row].sum()))]


def top(log_probs: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    values, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    width = min(budget, log_probs.shape[-1])
    return values[..., :width], ids[..., :width]


def assert_like_the_heap(log_probs: Tensor, budget: int) -> Tree:
    """``log_probs`` [R, D, V]"""
    values, ids = top(log_probs, budget)
    tree = build_tree(values, ids, budget)
    assert tree.tokens.shape == tree.parents.shape == tree.depths.shape == tree.scores.shape == (len(log_probs), budget)
    assert tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == torch.int64
    for row in range(len(log_probs)):
        expected = heap_tree(values[row], ids[row], budget)
        assert nodes_of(tree, row) == expected
        unused = slice(len(expected), budget)
        assert not tree.valid[row, unused].any()
        assert (tree.depths[row, unused] == 1).all()
        assert (tree.parents[row, unused] == 0).all()
    return tree


def prefixes(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the anchor to each node."""
    found: list[tuple[int, ...]] = [()]
    for _, _, parent, token in nodes_of(tree, row):
        found.append((*found[parent], token))
    return found[1:]


seeds, sizes = st.integers(0, 2**31), st.integers(1, 40)


@given(seeds, st.integers(1, 6), st.integers(2, 9), sizes, st.sampled_from([0.3, 1.0, 3.0, 30.0]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_trees(seed: int, depths: int, vocabulary: int, budget: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (sharpness * torch.randn(3, depths, vocabulary, generator=generator)).log_softmax(-1)
    tree = assert_like_the_heap(log_probs, budget)
    thresholds = tree_thresholds(top(log_probs, budget)[0], [budget])[:, 0]
    for row in range(3):
        # By definition: of all prefixes, those not below the threshold.
        everything = {
            path: float(path_scores(log_probs[row, range(length), path][None])[0, -1])
            for length in range(1, min(depths, 3) + 1)
            for path in itertools.product(range(vocabulary), repeat=length)
        }
        inside = {path for path, score in everything.items() if score >= thresholds[row]}
        got = {path for path in prefixes(tree, row) if len(path) <= 3}
        if len(set(everything.values())) == len(everything):
            assert got == inside
        else:
            assert got <= inside


@given(seeds, st.integers(1, 5), st.integers(1, 6), sizes, st.sampled_from([0.0, 0.2, 0.6]))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_ties_and_impossible_tokens(seed: int, depths: int, vocabulary: int, budget: int, impossible: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few different values, and zeros, so that children are as probable as their parents.
    log_probs = -0.5 * torch.randint(0, 3, (3, depths, vocabulary), generator=generator).float()
    log_probs[torch.rand(log_probs.shape, generator=generator) < impossible] = -torch.inf
    assert_like_the_heap(log_probs, budget)


CERTAIN = torch.tensor([[0.0, -torch.inf, -torch.inf]] * 4)
CASES = {
    "all equal": torch.full((3, 4), 0.25).log(),
    "certain": CERTAIN,
    "certain but for the last": torch.cat([CERTAIN, torch.full((1, 3), 1 / 3).log()]),
    "nothing possible": torch.full((3, 3), -torch.inf),
    "nothing possible at depth 2": torch.tensor([[-0.5, -1.5], [-torch.inf, -torch.inf], [-0.1, -3.0]]),
    "nearly certain": torch.tensor([[-3.0, -4.0], [-1e-9, -20.0], [-1e-9, -20.0]]),  # too small to change a sum
    "one slot": torch.tensor([[-0.5, -1.0, -2.0, -4.0]]),
    "one token": torch.tensor([[-0.1], [-0.2], [-0.3]]),
    "overflow": torch.tensor([[-1e38, -3e38], [-3e38, -3.2e38], [-0.1, -0.2]]),
}


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 200])
@pytest.mark.parametrize("case", CASES)
def test_adversarial_trees(case: str, budget: int) -> None:
    assert_like_the_heap(CASES[case][None], budget)


def test_what_is_in_front_of_a_node_is_in_front_of_it() -> None:
    """Where a child is as probable as its parent and only one fits, it is the parent."""
    values, ids = top(CASES["nearly certain"][None], 3)
    for budget, expected in ((1, [(0,)]), (2, [(0,), (0, 0)]), (3, [(0,), (0, 0), (0, 0, 0)])):
        assert prefixes(build_tree(values, ids, budget), 0) == expected


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = (2 * torch.randn(4, 7, 30, generator=generator)).log_softmax(-1)
    large = build_tree(*top(log_probs, 64), 64)
    for budget in (1, 7, 16, 63):
        small = build_tree(*top(log_probs, budget), budget)
        for name in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(small, name), getattr(large, name)[:, :budget])


def test_without_a_budget_there_is_no_tree() -> None:
    with pytest.raises(ValueError, match="budget=0"):
        build_tree(*top(CASES["all equal"][None], 1), 0)


def test_a_drafter_gone_bad_drafts_nothing() -> None:
    tree = build_tree(torch.full((2, 3, 4), torch.nan), torch.arange(4).expand(2, 3, 4), 6)
    assert not tree.valid.any()
    assert accept(tree, torch.zeros(2, 7, dtype=torch.long)).counts.tolist() == [1, 1]


def some_trees(seed: int, depths: int, vocabulary: int, budget: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(4, depths, vocabulary, generator=generator)).log_softmax(-1)
    log_probs[0, -1] = -torch.inf  # one tree that may not fill its budget
    return build_tree(*top(log_probs, budget), budget)


@given(seeds, st.integers(1, 9), st.integers(1, 4), st.integers(1, 24))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_row_sees_itself_and_its_branch(seed: int, depths: int, vocabulary: int, budget: int) -> None:
    tree = some_trees(seed, depths, vocabulary, budget)
    expected = torch.zeros(4, budget + 1, budget + 1, dtype=torch.bool)
    for row, start in itertools.product(range(4), range(budget + 1)):
        node, steps = start, 0
        while True:
            expected[row, start, node] = True
            if node == 0:
                break
            node, steps = int(tree.parents[row, node - 1]), steps + 1
        assert steps == (int(tree.depths[row, start - 1]) if start else 0)
    assert torch.equal(ancestor_mask(tree), expected)


@given(seeds, st.integers(1, 9), st.integers(1, 3), st.integers(1, 24))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_accepted_path(seed: int, depths: int, vocabulary: int, budget: int) -> None:
    tree = some_trees(seed, depths, vocabulary, budget)
    chosen = torch.randint(0, vocabulary, (4, budget + 1), generator=torch.Generator().manual_seed(seed))
    path = accept(tree, chosen)
    assert path.rows.shape == path.tokens.shape == (4, min(depths, budget) + 1)
    for row in range(4):
        children = {(parent, token): n + 1 for n, (_, _, parent, token) in enumerate(nodes_of(tree, row))}
        walked = [0]
        while (walked[-1], int(chosen[row, walked[-1]])) in children:
            walked.append(children[walked[-1], int(chosen[row, walked[-1]])])
        count = int(path.counts[row])
        assert path.rows[row, :count].tolist() == walked
        assert path.tokens[row, :count].tolist() == chosen[row, walked].tolist()
        assert int(path.bonus[row]) == int(chosen[row, walked[-1]])


@given(seeds, st.integers(1, 8), sizes, st.sampled_from([1.0, 4.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_accepted_length_is_that_of_the_metric(seed: int, depths: int, budget: int, sharpness: float) -> None:
    """On a known continuation, the walk through the real tree and the threshold count the same."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (sharpness * torch.randn(8, depths, 6, generator=generator)).log_softmax(-1)
    path = torch.where(torch.rand(8, depths, generator=generator) < 0.7, log_probs.argmax(-1), 3)
    values, ids = top(log_probs, budget)
    tree = build_tree(values, ids, budget)
    # A target that says ``path`` whatever the branch.
    following = torch.cat([path, path[:, -1:]], dim=1)
    chosen = following.gather(1, torch.nn.functional.pad(tree.depths, (1, 0)))
    scores = path_scores(log_probs.gather(2, path[..., None])[..., 0])
    expected = accepted_in_tree(scores, tree_thresholds(values, [budget]))[:, 0]
    assert torch.equal(accept(tree, chosen).counts - 1, expected)


def test_nothing_waits_for_the_device() -> None:
    """Tensors without data: any look at a value would be an error, and so would a shape that depends on one."""
    values, ids = torch.empty(2, 15, 64, device="meta"), torch.empty(2, 15, 64, device="meta", dtype=torch.long)
    tree = build_tree(values, ids, 64)
    assert ancestor_mask(tree).shape == (2, 65, 65)
    path = accept(tree, torch.empty(2, 65, device="meta", dtype=torch.long))
    assert path.rows.shape == path.tokens.shape == (2, 16)
    assert path.bonus.shape == (2,)
