from __future__ import annotations

import heapq
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_lit.objective.tree import accepted_in_tree, frontier_pairs, path_scores, tree_thresholds


def best_first(log_probs: Tensor, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The ``budget`` most probable prefixes by a heap, each with its score, most probable first."""
    depths, vocabulary = log_probs.shape
    table = log_probs.numpy()
    waiting = [(-float(table[0, token]), (token,)) for token in range(vocabulary)]
    heapq.heapify(waiting)
    taken: list[tuple[float, tuple[int, ...]]] = []
    while waiting and len(taken) < budget:
        cost, prefix = heapq.heappop(waiting)
        if math.isinf(cost):
            break  # impossible tokens are in no tree
        taken.append((-cost, prefix))
        if len(prefix) < depths:
            for token in range(vocabulary):
                # fp32 sums, as on the other side.
                score = float(torch.tensor(-cost, dtype=torch.float32) + log_probs[len(prefix), token])
                heapq.heappush(waiting, (-score, (*prefix, token)))
    return taken


def accepted(log_probs: Tensor, path: Tensor, budgets: list[int]) -> list[int]:
    top = log_probs.topk(min(max(budgets), log_probs.shape[1]), dim=1).values
    scores = path_scores(log_probs.gather(1, path[:, None])[:, 0][None])
    return accepted_in_tree(scores, tree_thresholds(top[None], budgets))[0].tolist()


def walk(tree: list[tuple[float, tuple[int, ...]]], path: list[int]) -> int:
    nodes = {prefix for _, prefix in tree}
    return next((d for d in range(len(path)) if tuple(path[: d + 1]) not in nodes), len(path))


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 7), st.integers(1, 40), st.sampled_from([0.3, 1.0, 3.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_threshold_and_heap_agree(seed: int, depths: int, vocabulary: int, budget: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (sharpness * torch.randn(depths, vocabulary, generator=generator)).log_softmax(-1)
    tree = best_first(log_probs, budget)
    threshold = tree_thresholds(log_probs.topk(min(budget, vocabulary)).values[None], [budget])[0, 0]
    assert float(threshold) == (tree[-1][0] if len(tree) == budget else -math.inf)
    paths = [torch.randint(0, vocabulary, (depths,), generator=generator), log_probs.argmax(-1)]
    # And the worst case: a path that is the very last node of the tree.
    paths.append(torch.tensor((*tree[-1][1], *[0] * depths)[:depths]))
    for path in paths:
        assert accepted(log_probs, path, [budget]) == [walk(tree, path.tolist())]


def test_several_budgets_at_once_and_monotone() -> None:
    generator = torch.Generator().manual_seed(5)
    budgets = [1, 3, 16, 64]
    for _ in range(20):
        log_probs = torch.randn(4, 9, generator=generator).log_softmax(-1)
        path = torch.randint(0, 9, (4,), generator=generator)
        lengths = accepted(log_probs, path, budgets)
        assert lengths == sorted(lengths)
        assert lengths == [walk(best_first(log_probs, budget), path.tolist()) for budget in budgets]


def test_a_tie_is_decided_for_the_path() -> None:
    log_probs = torch.full((2, 4), 0.25).log()
    assert accepted(log_probs, torch.tensor([3, 0]), [1, 4, 5, 20]) == [1, 1, 2, 2]


def test_impossible_tokens_are_in_no_tree() -> None:
    log_probs = torch.tensor([[0.6, 0.4, 0.0], [0.9, 0.1, 0.0]]).log()
    assert accepted(log_probs, torch.tensor([0, 0]), [1, 2, 6, 100]) == [1, 2, 2, 2]
    assert accepted(log_probs, torch.tensor([2, 0]), [100]) == [0]
    assert accepted(log_probs, torch.tensor([1, 2]), [100]) == [1]


@pytest.mark.parametrize(("budget", "threshold"), [(3, 0.2), (4, -math.inf)])
def test_depth_one_and_a_budget_over_the_vocabulary(budget: int, threshold: float) -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    expected = math.log(threshold) if threshold > 0 else threshold
    assert float(tree_thresholds(log_probs[None], [budget])) == pytest.approx(expected)
    assert accepted(log_probs, torch.tensor([2]), [budget]) == [1]


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_large_enough_tree_accepts_what_the_chain_does(seed: int, depths: int, hits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(depths, 4, generator=generator)).log_softmax(-1)
    best = log_probs.argmax(-1)
    path = torch.where(torch.arange(depths) < hits, best, (best + 1) % 4)
    # Large enough for every prefix at least as probable as the chain's.
    reach = float(log_probs.max(dim=1).values[:hits].sum())
    budget = sum(score >= reach - 1e-5 for score, _ in best_first(log_probs, 4 + 4**2 + 4**3 + 4**4))
    assert accepted(log_probs, path, [budget])[0] >= min(hits, depths)


def test_pairs_stay_where_a_captured_graph_reads_them() -> None:
    device = torch.device("cpu")
    before = frontier_pairs(7, 3, device)
    for budget in range(100, 200):
        frontier_pairs(budget, 2, device)
    assert frontier_pairs(7, 3, device) is before
