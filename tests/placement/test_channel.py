"""Two drafters and one target, three real processes over gloo: what they ask, what comes back, and what they keep."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dflash_lit.placement.link import _KEPT
from dflash_lit.placement.target_worker import SENDS
from tests.test_train import run

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """Of both drafters."""
    folder = tmp_path_factory.mktemp("served")
    done = run("tests/placement/served.py", folder=folder, OUT=str(folder), PYTHONPATH=os.pathsep.join(("src", ".")))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def drafter(facts: list[Facts], request: pytest.FixtureRequest) -> Facts:
    return facts[request.param]


def test_each_gets_what_it_asked_for_in_its_order(drafter: Facts) -> None:
    assert drafter["same"] == [True] * 6
    assert drafter["fingerprint"]
    assert drafter["eos_ids"]


def test_what_has_arrived_is_known_before_it_is_taken(drafter: Facts) -> None:
    """Gloo's works do not say so by themselves."""
    assert drafter["arrived"]


def test_calls_come_back_in_order_and_errors_as_themselves(drafter: Facts) -> None:
    assert drafter["doubled"] == [0, 2, 4, 6, 8]
    user, other, stubborn = drafter["errors"]
    assert user == ["UserError", "embedded: that is wrong"]
    assert other == ["ArithmeticError", "1 + 1 = 3"]
    assert stubborn == ["RuntimeError", "StubbornError: a stubborn one"]


def test_a_text_is_read_as_by_a_target_of_ones_own(drafter: Facts) -> None:
    assert drafter["read"] == [True] * 8
    assert drafter["read_trees"] == [True] * 7
    assert drafter["no_trees"]


def test_nothing_is_kept_of_requests_that_are_over(drafter: Facts) -> None:
    assert drafter["kept"] <= _KEPT
    assert drafter["abandoned_arrived"]
    assert drafter["abandoned_kept"] == [0, 0]
    assert drafter["left"] == [0, 0]
    assert drafter["threads"] == []  # a sweep makes a channel for each job


def test_only_what_the_trainer_takes_is_counted(drafter: Facts) -> None:
    assert drafter["flow"] == [6, 6 * 2 * 64]


def test_a_target_waits_for_a_drafter_that_does_not_receive(facts: list[Facts]) -> None:
    """It holds what may be on its way and one batch more, however many were asked for."""
    assert facts[0]["ahead"] == SENDS + 1
    assert facts[0]["then"] == 8


def test_private_names_are_where_they_were() -> None:
    """If this fails, torch has moved what link.py needs: look there for what each is for."""
    gloo = dist.ProcessGroupGloo
    assert all(hasattr(gloo, name) for name in ("send", "recv", "allreduce", "abort", "shutdown"))
    assert hasattr(dist.Work, "is_success")
    if hasattr(dist, "ProcessGroupNCCL"):
        assert hasattr(dist.ProcessGroupNCCL.Options(), "_timeout")


def test_gloo_does_not_say_what_has_arrived() -> None:
    """The reason for the thread that waits for it. If this fails, torch says it now: that thread can go."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        sender, receiver = threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2))
    value = torch.zeros(1)
    received, sent = receiver.recv([value], 0, 1), sender.send([torch.ones(1)], 1, 1)
    deadline = time.monotonic() + 30
    while not value.item() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert value.item() == 1
    assert not received.is_completed()
    assert not sent.is_completed()
    received.wait(), sent.wait()
    assert received.is_completed()
    assert sent.is_completed()
