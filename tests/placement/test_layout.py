"""Ranks, roles, devices and turns: properties of every layout, and the messages of those that cannot be."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout, Role, accumulation, devices, table, transport

quick = settings(deadline=None, derandomize=True, max_examples=60)
layouts = st.builds(Layout, st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))


def test_five_and_three_on_two_hosts() -> None:
    layout = Layout(targets=5, drafters=3, hosts=2)
    assert (layout.world, layout.drafter_world, layout.ranks_per_host) == (16, 6, 8)
    assert [layout.role(rank) for rank in range(8)] == [Role.DRAFTER] * 3 + [Role.TARGET] * 5
    assert [layout.drafter_rank(rank) for rank in (0, 1, 2, 8, 9, 10)] == [0, 1, 2, 3, 4, 5]
    assert list(layout.targets_of_host(1)) == [11, 12, 13, 14, 15]
    assert list(layout.drafters_of_host(1)) == [8, 9, 10]
    assert [layout.target_of(9, request) for request in range(4)] == [12, 15, 13, 11]  # turns 1, 4, 7, 10 of five
    assert layout.who(12) == "rank 12 (target, host 1)"


@quick
@given(layouts)
def test_every_rank_has_one_place(layout: Layout) -> None:
    ranks = range(layout.world)
    assert layout.role(0) is Role.DRAFTER
    drafters = [rank for rank in ranks if layout.role(rank) is Role.DRAFTER]
    assert [layout.drafter_rank(rank) for rank in drafters] == list(range(layout.drafter_world))
    assert [layout.physical_drafter(number) for number in range(layout.drafter_world)] == drafters
    assert [layout.physical_rank(layout.host(rank), layout.local_rank(rank)) for rank in ranks] == list(ranks)
    by_host = [[*layout.drafters_of_host(host), *layout.targets_of_host(host)] for host in range(layout.hosts)]
    assert list(chain.from_iterable(by_host)) == list(ranks)
    for host, members in enumerate(by_host):
        assert {layout.host(rank) for rank in members} == {host}
        assert {layout.role(rank) for rank in layout.targets_of_host(host)} == {Role.TARGET}


@quick
@given(layouts, st.integers(0, 40))
def test_loads_differ_by_one_at_most(layout: Layout, requests: int) -> None:
    """After every request while drafters ask in turn, so after every round too; and no request leaves its host."""
    for host in range(layout.hosts):
        loads = Counter(dict.fromkeys(layout.targets_of_host(host), 0))
        for request in range(requests):
            for drafter in layout.drafters_of_host(host):
                loads[layout.target_of(drafter, request)] += 1
                assert set(loads) == set(layout.targets_of_host(host))
                assert max(loads.values()) - min(loads.values()) <= 1


@quick
@given(layouts)
def test_connecting_in_order_never_waits_in_a_circle(layout: Layout) -> None:
    """Each rank connects its pairs in the common order and blocks until its partner is at the same one."""
    pairs = layout.pairs_of_host(layout.hosts - 1)
    assert len(set(pairs)) == layout.targets * layout.drafters
    ahead = {rank: [pair for pair in pairs if rank in pair] for rank in chain.from_iterable(pairs)}
    while any(ahead.values()):
        ready = [pair for pair in pairs if all(ahead[rank][:1] == [pair] for rank in pair)]
        assert ready
        for rank in ready[0]:
            ahead[rank].pop(0)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((-1, 1, 1), "placement.targets=-1: must be at least 0"),
        ((1, -2, 1), "placement.drafters=-2: must be at least 1"),
        ((1, 1, 0), "placement.hosts=0: must be at least 1"),
    ],
)
def test_nobody_is_missing(numbers: tuple[int, int, int], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        Layout(*numbers)


@pytest.mark.parametrize(("targets", "drafters", "wanted"), [(1, 1, 2), (1, 2, 2), (3, 2, 3), (2, 1, 3), (3, 1, 4), (5, 3, 3)])
def test_requests_in_flight_are_enough_for_the_targets(targets: int, drafters: int, wanted: int) -> None:
    assert Layout(targets, drafters).prefetch == wanted


def test_what_is_not_there_is_a_defect() -> None:
    layout = Layout(2, 1)
    for wrong in (
        lambda: layout.role(3),
        lambda: layout.role(-1),
        lambda: layout.drafter_rank(1),
        lambda: layout.target_of(1, 0),
        lambda: layout.physical_drafter(1),
        lambda: layout.targets_of_host(1),
    ):
        with pytest.raises(ValueError, match="rank"):
            wrong()


# -- devices


def test_a_gpu_each_drafters_first() -> None:
    assert devices(Layout(5, 3, 2), 8) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert devices(Layout(1, 1), 8) == (0, 1)
    assert devices(Layout(5, 3), None) == (None,) * 8  # the CPU


@pytest.mark.parametrize(
    ("visible", "share", "says"),
    [
        (
            4,
            False,
            "placement.targets=5 + placement.drafters=3 need 8 GPUs a host, 4 are visible: lower one, or make more visible "
            "(CUDA_VISIBLE_DEVICES), or let ranks share GPUs with placement.share=true (slower)",
        ),
        (1, False, "need 8 GPUs a host, 1 is visible: lower one"),
        (0, True, "need 8 GPUs a host, 0 are visible: lower one, or make more visible (CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_too_few_gpus(visible: int, share: bool, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        devices(Layout(5, 3), visible, share=share)


@quick
@given(layouts, st.integers(1, 20))
def test_shared_gpus(layout: Layout, visible: int) -> None:
    """In turn: none has two ranks more than another; and only if there are enough is NCCL possible."""
    found = devices(layout, visible, share=True)
    loads = Counter(found)
    assert len(found) == layout.ranks_per_host
    assert set(loads) <= set(range(visible))
    assert max(loads.values()) - min(loads[gpu] for gpu in range(visible)) <= 1
    assert transport(found) == ("nccl" if visible >= layout.ranks_per_host else "gloo")


def test_transport_of_two_ranks() -> None:
    assert transport((0, 1)) == "nccl"
    assert transport((1, 1)) == transport((None, 1)) == transport((None, None)) == "gloo"


# -- the global batch


@quick
@given(layouts, st.integers(1, 8), st.integers(-3, 600))
def test_accumulation_keeps_the_global_batch_or_names_the_nearest(layout: Layout, rows: int, wanted: int) -> None:
    possible = {times: layout.global_rows(rows, times) for times in range(1, 602)}
    assert possible[2] == 2 * rows * layout.hosts * layout.drafters
    if wanted in possible.values():
        assert possible[accumulation(layout, rows, wanted)] == wanted
        return
    with pytest.raises(UserError) as caught:
        accumulation(layout, rows, wanted)
    named = {
        int(times): int(count)
        for count, times in re.findall(r"(\d+) \(trainer.accumulate_grad_batches=(\d+)\)", str(caught.value))
    }
    lower = [count for count in possible.values() if count < wanted]
    assert sorted(named.values()) == [*lower[-1:], min(count for count in possible.values() if count > wanted)]
    assert all(possible[times] == count for times, count in named.items())


def test_the_message_on_the_global_batch() -> None:
    assert accumulation(Layout(5, 3), 4, 24) == 2
    with pytest.raises(UserError) as caught:
        accumulation(Layout(5, 3), 4, 32)
    assert str(caught.value) == (
        "a global batch of 32 rows cannot be had from data.rows_per_batch=4 on 3 drafters; the nearest are "
        "24 (trainer.accumulate_grad_batches=2) and 36 (trainer.accumulate_grad_batches=3)"
    )


# -- for people


def test_the_table() -> None:
    layout = Layout(1, 1, 2)
    assert table(layout, devices(layout, 2)).splitlines() == [
        "rank  host  local  role     trainer rank  device",
        "0     0     0      drafter  0             cuda:0",
        "1     0     1      target   -             cuda:1",
        "2     1     0      drafter  1             cuda:0",
        "3     1     1      target   -             cuda:1",
    ]


def test_the_table_of_many_hosts_shows_one() -> None:
    layout = Layout(5, 3, 64)
    lines = table(layout, devices(layout, None)).splitlines()
    assert len(lines) == 1 + 8 + 1
    assert lines[-2].split() == ["7", "0", "7", "target", "-", "cpu"]
    assert lines[-1] == "... and alike on hosts 1 to 63: 512 processes, 192 drafters"
