"""Two drafters and a target that serves both, as processes of a run without a Trainer; the drafters write down what they see.

``$OUT/RANK.json`` has the facts that test_channel.py looks at.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.placement.channel import Channel, ServingChannel
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.link import _ROWS
from dflash_lit.placement.messages import as_bytes
from dflash_lit.placement.remote_target import Asked, RemoteTarget
from dflash_lit.placement.started import how_started
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.placement.target_worker import serve
from dflash_lit.placement.world import World, follow, lead
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import token_batch

LAYERS = (1, 3)
ROWS, TOKENS = 2, 64
CPU = torch.device("cpu")


def batch_of(number: int) -> dict[str, Tensor]:
    return token_batch([[(40, 8)], [(30, 8), (20, 4)]], TOKENS, seed=number)


def load() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.float32)


# -- what drafters have the target call


class StubbornError(Exception):
    """Cannot be sent: it does not come out as it went in."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("a stubborn one")


def double(target: FrozenTarget, number: int) -> int:
    return number * 2


def refuse(target: FrozenTarget, kind: str) -> None:
    if kind == "user":
        raise UserError(f"{target.info.path}: that is wrong")
    if kind == "stubborn":
        raise StubbornError(1, 2)
    raise ArithmeticError("1 + 1 = 3")


# -- the ranks


def target_rank(world: World) -> None:
    target = load()
    counted = target.features_and_last_hidden
    calls = 0

    def features_and_last_hidden(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        world.tell("computed", calls)
        return counted(*arguments)

    target.features_and_last_hidden = features_and_last_hidden  # type: ignore[method-assign]
    serve(world, lambda: ServingChannel(world, CPU, "gloo"), target, LAYERS, teacher=True, rows=ROWS, row_tokens=TOKENS)


def drafter_rank(world: World) -> None:
    own = load()
    local = LocalTarget(own, LAYERS, teacher=True)
    world.told("target/2")
    channel = Channel(world, CPU, "gloo")
    remote = RemoteTarget(world, channel, own.info, LAYERS, device=CPU, dtype=torch.float32, teacher=True)
    facts: dict[str, Any] = {"fingerprint": remote.fingerprint == own.fingerprint, "eos_ids": remote.eos_ids == own.eos_ids}
    facts |= asked_by_both(world, remote, local)
    facts |= called(channel, remote)
    facts |= read(remote, own)
    facts |= read_trees(remote, own)
    facts |= remembered(world, channel, remote)
    meet(world, "apart")
    if world.rank == 0:
        facts |= not_received(world, channel)
    remote.goodbye()
    facts["left"] = [len(channel.links), len(remote._asked)]
    facts["threads"] = [thread.name for thread in threading.enumerate() if "arrivals" in thread.name]
    facts["flow"] = [world.flow.batches, world.flow.tokens]
    (Path(os.environ["OUT"]) / f"{world.rank}.json").write_text(json.dumps(facts))


def meet(world: World, where: str) -> None:
    world.tell(f"{where}/{world.rank}", True)
    for rank in (0, 1):
        world.told(f"{where}/{rank}")


def wait_for(pendings: list[Asked], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not all(pending.arrived() for pending in pendings):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def asked_by_both(world: World, remote: RemoteTarget, local: LocalTarget) -> dict[str, Any]:
    """Each drafter gets what it asked for, in its order, while the other asks, too."""
    batches = [batch_of(100 * world.rank + number) for number in range(6)]
    meet(world, "ask")
    pendings = [remote.ask(batch) for batch in batches]
    arrived = wait_for(pendings)
    same = []
    for batch, pending in zip(batches, pendings, strict=True):
        got, expected = remote.take(batch, pending, 0), local.with_features(batch)
        same.append(set(got) == set(expected) and all(torch.equal(value, got[name]) for name, value in expected.items()))
    return {"arrived": arrived, "same": same}


def called(channel: Channel, remote: RemoteTarget) -> dict[str, Any]:
    errors = []
    for kind in ("user", "other", "stubborn"):
        answer = channel.call(2, refuse, kind)
        try:
            answer.take()
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    return {"doubled": list(remote.each(double, range(5))), "errors": errors}


def read(remote: RemoteTarget, own: FrozenTarget) -> dict[str, Any]:
    """A text read by the remote target, with rejected tokens taken back, and by one here; both drafters at once."""
    ids = batch_of(7)["input_ids"][:1, :40]
    here, there = own.reader(LAYERS), remote.reader(LAYERS)
    same = []
    with torch.inference_mode():
        for start, stop, gone, last_only in ((0, 20, 0, True), (20, 28, 5, False), (23, 31, 0, False), (31, 40, 9, False)):
            (logits, features), (other, theirs) = (r.read(ids[:, start:stop], last_only=last_only) for r in (here, there))
            assert features is not None
            assert theirs is not None
            same.append(torch.equal(logits, other) and torch.equal(features, theirs))
            here.forget(gone), there.forget(gone)
            same.append(here.length == there.length)
    return {"read": same}


def read_trees(remote: RemoteTarget, own: FrozenTarget) -> dict[str, Any]:
    """Texts that branch, read there and here: logits, features and what is kept of them, over several rounds."""
    ids = batch_of(7)["input_ids"][:1].reshape(2, 32)
    here, there = own.reader(LAYERS), remote.reader(LAYERS)
    depths = torch.tensor([[0, 1, 1, 2]] * 2)
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool().expand(2, -1, -1)
    same = []

    def compare(name: str, *arguments: Any) -> None:
        (logits, features), (other, theirs) = (getattr(r, name)(*arguments) for r in (here, there))
        assert features is not None
        assert theirs is not None
        same.append(torch.equal(logits, other) and torch.equal(features, theirs))

    with torch.inference_mode():
        compare("read_prompts", ids[:, :20], [20, 12])
        for start, counts in ((20, [3, 1]), (24, [0, 2]), (28, [2, 3])):
            compare("read_tree", ids[:, start : start + 4], depths, sees)
            for reader in (here, there):
                reader.keep(torch.tensor([[0, 2, 3], [0, 1, 0]]), counts)
            same.append(here.lengths == there.lengths and here.length == there.length)
    return {"read_trees": same, "no_trees": remote.no_trees == own.no_trees}


def remembered(world: World, channel: Channel, remote: RemoteTarget) -> dict[str, Any]:
    """What is kept of requests that are over, and of some that nobody waits for."""
    batch = batch_of(1)
    for _ in range(50):
        remote.with_features(batch)
    kept = len(channel.links[2]._sent)
    gone = [remote.ask(batch) for _ in range(3)]
    for pending in gone:
        remote.abandon(pending)
    arrived = wait_for(gone)
    remote.with_features(batch)
    return {"kept": kept, "abandoned_arrived": arrived, "abandoned_kept": [len(remote._asked), len(remote._abandoned)]}


def not_received(world: World, channel: Channel) -> dict[str, Any]:
    """How much a target computes for a drafter that asks and does not receive."""
    batch = batch_of(3)
    names = ("input_ids", "document_ids", "position_ids")
    rows = torch.stack([batch[name].to(torch.int32) for name in names]).contiguous()
    before, wanted = world.told("computed"), 8
    for _ in range(wanted):
        channel.links[2]._request(_ROWS, rows, *rows.shape[1:])
    ahead, still = 0, time.monotonic()
    while time.monotonic() - still < 1.0:  # until it has computed nothing for so long
        time.sleep(0.02)
        if (now := world.told("computed") - before) != ahead:
            ahead, still = now, time.monotonic()
    buffers = [torch.empty(ROWS, TOKENS, width) for width in (2 * 256, 256)]
    for _ in range(wanted):
        for buffer in buffers:
            channel.links[2]._data.recv([as_bytes(buffer)], 1, 5).wait()
    return {"ahead": ahead, "then": world.told("computed") - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    started, command = how_started(), [sys.executable, __file__]
    if started.leads:
        joined = lead(Layout(targets=1, drafters=2), started, "", command=command, timeout_s=25)
    else:
        joined, _ = follow(started, command)
    with joined:
        (drafter_rank if joined.role is Role.DRAFTER else target_rank)(joined)
