"""What a target rank does: it loads the target, compiles it, and serves the drafters of its host until they are done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dflash_lit.compilation.seal import Seal
from dflash_lit.compilation.warmup import Made, undisturbed, warm_up
from dflash_lit.errors import UserError
from dflash_lit.placement.channel import ServingChannel
from dflash_lit.placement.flow import DeviceTimer
from dflash_lit.placement.link import Call
from dflash_lit.placement.world import World
from dflash_lit.target.frozen import FrozenTarget
from dflash_lit.target.reader import TargetReader

__all__ = ["SENDS", "each_of", "forget", "keep", "open_reader", "read", "read_prompts", "read_tree", "serve"]

SENDS = 2
"""Requests whose tensors may be on their way while the next is computed."""


def serve(
    world: World,
    channel: Callable[[], ServingChannel],
    target: FrozenTarget,
    layer_ids: Sequence[int],
    *,
    teacher: bool,
    rows: int,
    row_tokens: int,
) -> None:
    """Answer requests until every drafter of this host has said goodbye.

    Args:
        channel: connects to the drafters, which wait for this rank to be ready.
        layer_ids: the feature layers.
        teacher: send the last hidden state, too.
        rows, row_tokens: R and S of every request; what is compiled is compiled for these before the first.
    """

    def features(ids: Tensor, documents: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        if teacher:
            return target.features_and_last_hidden(ids, documents, positions, layer_ids)
        return (target.features(ids, documents, positions, layer_ids),)

    seal = _warm_up(world, target, features, rows, row_tokens)
    facts = {"fingerprint": target.fingerprint, "eos_ids": target.eos_ids, "no_trees": target.no_trees}
    if world.life:
        _check_same(world, facts)
        world.announce("ready")
    else:
        world.tell(f"target/{world.rank}", facts)
    link = channel()
    world.announce("joined")
    timer, flow = DeviceTimer(target.device), world.flow
    tensors = 2 if teacher else 1
    while True:
        began = time.perf_counter()
        request = link.next_request()
        if request is None:
            break
        flow.waited_s += time.perf_counter() - began
        if isinstance(request, Call):
            try:
                good, value = True, request.function(target, *request.arguments)
            except Exception as error:  # the caller's to handle, or to end the run with
                good, value = False, error
            link.send_answer(request.source, good, value)
        else:
            with timer.measure():
                made = features(*request.rows)
            link.send_features(request.source, made, most=SENDS * tensors)
            flow.tokens += request.rows[0].numel()
            flow.batches += 1
            if seal is not None:
                seal.check()
        flow.busy_s = timer.seconds()
    link.finish()
    if seal is not None:
        seal.open()


def _check_same(world: World, facts: Mapping[str, object]) -> None:
    """Whether a rank that was started again holds the model that it held before.

    Raises:
        UserError: if not.
    """
    before = world.told(f"target/{world.rank}")
    if json.loads(json.dumps(facts)) != before:
        raise UserError(
            f"{world.layout.who(world.rank)} has read another model than before it was lost: put back the same files"
        )


def _warm_up(
    world: World, target: FrozenTarget, features: Callable[..., tuple[Tensor, ...]], rows: int, row_tokens: int
) -> Seal | None:
    """Compile one target after the other, so that those after the first find its work in the cache; then no more."""
    if not target.compiled:
        return None
    ids = torch.zeros(rows, row_tokens, dtype=torch.int32)
    positions = torch.arange(row_tokens, dtype=torch.int32).repeat(rows, 1)
    before = world.rank - 1
    if before in world.layout.targets_of_host(world.host):
        world.told(f"warm/{before}")

    def told(made: Made) -> None:
        print(f"compile, {world.layout.who(world.rank)}: {made}", file=sys.stderr, flush=True)

    with undisturbed(target.device):
        warm_up({"features": lambda: features(ids, torch.zeros_like(ids), positions)}, told)
    world.tell(f"warm/{world.rank}", True)
    seal = Seal()
    seal.close()
    return seal


# -- functions that drafters call here


_readers: dict[int, TargetReader] = {}
"""The text that each drafter is decoding here, by the drafter's local rank; one at a time."""


def open_reader(target: FrozenTarget, drafter: int, layer_ids: Sequence[int]) -> None:
    """Begin a text, in place of the last one."""
    _readers[drafter] = target.reader(tuple(layer_ids))


@torch.inference_mode()
def read(target: FrozenTarget, drafter: int, ids: Tensor, last_only: bool) -> tuple[Tensor, Tensor | None]:
    """See :meth:`TargetReader.read`; tensors on the CPU."""
    return _on_host(*_readers[drafter].read(ids.to(target.device), last_only=last_only))


@torch.inference_mode()
def read_prompts(target: FrozenTarget, drafter: int, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """See :meth:`TargetReader.read_prompts`; tensors on the CPU."""
    return _on_host(*_readers[drafter].read_prompts(ids.to(target.device), lengths))


@torch.inference_mode()
def read_tree(target: FrozenTarget, drafter: int, ids: Tensor, depths: Tensor, sees: Tensor) -> tuple[Tensor, Tensor | None]:
    """See :meth:`TargetReader.read_tree`; tensors on the CPU."""
    return _on_host(*_readers[drafter].read_tree(ids.to(target.device), depths.to(target.device), sees.to(target.device)))


@torch.inference_mode()
def keep(target: FrozenTarget, drafter: int, rows: Tensor, counts: Sequence[int]) -> None:
    """See :meth:`TargetReader.keep`."""
    _readers[drafter].keep(rows.to(target.device), counts)


def _on_host(logits: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return logits.cpu(), None if features is None else features.cpu()


def forget(target: FrozenTarget, drafter: int, count: int) -> None:
    """See :meth:`TargetReader.forget`."""
    _readers[drafter].forget(count)


def each_of(target: FrozenTarget, function: Callable[[FrozenTarget, object], object], item: object) -> object:
    """``function`` of one item."""
    return function(target, item)
