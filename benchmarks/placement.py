"""Target and drafter in processes of their own: what the features' way costs, and what a whole run reaches; a line of JSON.

    python benchmarks/placement.py transport --rows 4 --tokens 3072 --width 20480
    python benchmarks/placement.py run --targets 2 --drafters 1 --sleep-target 80 --sleep-drafter 40 --jitter 0.3
    python benchmarks/placement.py run --target embedded
    python benchmarks/placement.py run --target qwen3-8b --shape S --targets 1 --drafters 1
    python benchmarks/placement.py scaling --target qwen3-8b --shape S --drafters 2

``transport`` moves the features of one batch from a target that has them ready, and lets the drafter compute meanwhile.

``run`` measures three rates, in turn and several times over: the *supply* of targets whose drafters do nothing but ask; the
*demand* of drafters that have features at hand, in the same Trainer; and the split *run*. ``share`` is run / min(supply,
demand), the median over the rounds. With ``--sleep-target`` and ``--sleep-drafter`` (milliseconds a batch) both sides sleep
instead of computing: on few cores supply and demand can then be set, and what is measured is the pipeline between them. On GPUs
``peak_gib`` is what tensors took in the run, and what ``dflash-lit plan`` expects, of a rank of each kind. With
``--equal STEPS`` the drafter then makes the same random target for itself, and compares features and losses with those of the
split run. ``--trace FOLDER`` keeps what every GPU did in a few steps: benchmarks/timeline.py draws it.

``run --targets 0`` measures a fit of drafters that have a target each, in their own process; ``scaling`` compares several with one.

Processes, channel, worker, loader, strategy and Trainer are those of ``train.py``. GPUs are used where there are some (random
weights on them), shared where there are too few.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from common import SHAPES, TARGETS, random_ends
from lightning.pytorch.callbacks import Callback
from online import expected_gib, random_info, random_target, recipe_of, sizes_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dflash_lit.config import (
    DataSection,
    DrafterSection,
    ObjectiveSection,
    PathsSection,
    PlacementSection,
    TargetSection,
    TrainConfig,
    TrainerSection,
)
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.packing import PackedRows
from dflash_lit.doctor.finding import GIB
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.job import Job, load_target, prepare_process, quiet_libraries
from dflash_lit.placement.channel import Channel, ServingChannel
from dflash_lit.placement.feature_loader import PrefetchingLoader
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.placement.started import how_started
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.placement.target_worker import serve
from dflash_lit.placement.world import World, follow, lead
from dflash_lit.plan import Plan, make_plan
from dflash_lit.target.frozen import TargetEnds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BEGAN = time.monotonic()
DEEP = 8
"""Requests in flight of a drafter that does nothing else: more than any number of targets here can serve at a time."""


# -- stand-ins


class Pause:
    """Sleeps for so many milliseconds, each time up to ``jitter`` (a share) more or less; the same sequence for one seed."""

    def __init__(self, milliseconds: float, jitter: float, seed: int) -> None:
        self.milliseconds, self.jitter, self._draws = milliseconds, jitter, random.Random(seed)

    def __call__(self) -> None:
        if self.milliseconds:
            time.sleep(self.milliseconds / 1000 * (1 + self.jitter * self._draws.uniform(-1, 1)))


class ReadyTarget:
    """What :func:`serve` and a local strategy need of a target; its features are one fixed tensor."""

    compiled = False
    fingerprint = "ready"
    eos_ids = ()
    no_trees: str | None = None

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pause: Callable[[], None]) -> None:
        self.device, self._pause = device, pause
        self._features = torch.randn(shape, dtype=dtype, device=device)

    def features(self, *_: Any) -> Tensor:
        self._pause()
        return self._features


class Traced:
    """Records what this process's GPU does, from one call of ``step`` to another (without a GPU: its operators)."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.path, self.first, self.last, self.seen = path, first, last, 0
        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[kind])

    def step(self) -> None:
        self.seen += 1
        if self.seen == self.first:
            self._profile.start()
        if self.seen == self.last:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))


class TracedSteps(Callback):
    """The steps ``first`` to ``last`` of a fit."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self._traced = Traced(path, first, last)

    def on_train_batch_end(self, *_: Any) -> None:
        self._traced.step()


def trace_target(target: Any, task: tuple[str, int, int]) -> None:
    """From now on: trace the target's forward passes ``first`` to ``last`` into a file of the folder."""
    folder, first, last = task
    traced = Traced(Path(folder) / f"target-{os.getpid()}.json.gz", first, last)
    features = target.features

    def counted(*arguments: Any) -> Any:
        traced.step()
        return features(*arguments)

    target.features = counted


def new_peak(*_: Any) -> None:
    """From now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak(*_: Any) -> int:
    """Bytes that this process has had in tensors of its GPU at once."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class Losses(Callback):
    """The loss of every step, on the device."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append((outputs["loss"] if isinstance(outputs, dict) else outputs).detach().clone())


class SleepingDrafter(L.LightningModule):
    """A drafter whose step is a sleep; one small parameter, so that several still average gradients at each step."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.pause = pause
        self.weight = nn.Parameter(torch.zeros(1024))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.pause()
        return (self.weight * batch["features"][0, 0, 0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class TargetOfRandomWeights(RemoteTarget):
    """One that has no files to read embedding and head from."""

    drafter: Any

    def ends(self) -> TargetEnds:
        return same_ends(self.drafter, self.device)


# -- transport


def wait(device: torch.device) -> None:
    """For what the drafter's own stream has in line; transfers go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def calibrated(device: torch.device, milliseconds: float) -> Callable[[], None]:
    """Matrix products that take about so long."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if size > 256 else torch.float32) for _ in range(2))
    out = torch.empty_like(a)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)
        wait(device)

    work(10)
    once = statistics.median(seconds(partial(work, 10)) for _ in range(9)) / 10
    return partial(work, max(round(milliseconds / 1000 / once), 1))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spent(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of this thread on a core."""
    began = time.thread_time()
    return seconds(work), time.thread_time() - began


def endless(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    while True:
        yield batch


def milliseconds(values: list[float]) -> float:
    return round(1000 * statistics.median(values), 2)


def measure_transport(args: argparse.Namespace, world: World, cfg: TrainConfig, plan: Plan) -> dict[str, Any] | None:
    job = Job(cfg, plan, world)
    device, carrier = job.device, job.transport
    prepare_process(cfg, plan, device)
    dtype = DTYPES[args.dtype]

    if world.role is Role.TARGET:
        target: Any = ReadyTarget((args.rows, args.tokens, args.width), dtype, device, lambda: None)
        serve(
            world,
            lambda: ServingChannel(world, device, carrier),
            target,
            (0,),
            teacher=False,
            rows=args.rows,
            row_tokens=args.tokens,
        )
        return None
    world.told(f"target/{world.layout.targets_of_host(0)[0]}")
    began = time.perf_counter()
    link = Channel(world, device, carrier)
    connect = time.perf_counter() - began
    info: Any = SimpleNamespace(text=SimpleNamespace(hidden_size=args.width))
    remote = RemoteTarget(world, link, info, (0,), device=device, dtype=dtype)
    place = torch.arange(args.tokens, dtype=torch.int32).repeat(args.rows, 1)
    batch = {"input_ids": torch.zeros_like(place).long(), "document_ids": torch.zeros_like(place), "position_ids": place}

    def one() -> None:
        remote.with_features(batch)
        wait(device)

    for _ in range(3):
        one()
    alone = [seconds(one) for _ in range(args.repeats)]

    coming: Any = iter(PrefetchingLoader(endless(batch), remote, args.prefetch))
    taken: dict[str, Tensor] = {}

    def take() -> None:
        taken.update(next(coming))  # and asks for another one
        wait(device)

    for _ in range(3):
        take()
    in_a_row = [seconds(take) for _ in range(args.repeats)]
    stream = statistics.median(in_a_row)

    # Twice as long as a transfer: it has to fit behind the drafter's step, of which it is a small part in training.
    work = calibrated(device, args.compute or 2000 * stream)
    quiet, loud, steps = [], [], []
    for _ in range(args.repeats):
        time.sleep(0.05 + 4 * stream)  # now all that was asked for is here
        quiet.append(spent(work))
        for _ in range(2):
            began = time.perf_counter()
            take()  # one arrived before, and another one is on its way from now on
            loud.append(spent(work))
            steps.append(time.perf_counter() - began)
    coming.close()
    remote.goodbye()
    size = args.rows * args.tokens * args.width * dtype.itemsize
    (alone_s, alone_cpu), (with_s, with_cpu) = (map(statistics.median, zip(*of, strict=True)) for of in (quiet, loud))
    return {
        "batch": f"{args.rows} x {args.tokens} x {args.width} {args.dtype}",
        "mb": round(size / 1e6, 1),
        "transport": carrier,
        "devices": [str(of) for of in plan.devices],
        "connect_s": round(connect, 3),
        "ms_alone": milliseconds(alone),
        "ms_in_a_row": milliseconds(in_a_row),
        "gb_s": round(size / stream / 1e9, 2),
        "compute_ms": {"alone": round(1000 * alone_s, 2), "with_transfers": round(1000 * with_s, 2)},
        "slowdown": round(with_s / alone_s, 3),
        # Of the computing thread's own time: what is left of it if others want the cores, too.
        "slowdown_of_thread": round(with_cpu / alone_cpu, 3) if device.type == "cpu" else None,
        "exposed_ms": round(1000 * (statistics.median(steps) - alone_s), 2),
    }


# -- a whole run


def say(world: World, what: str) -> None:
    """Progress, for people."""
    if world.rank == 0:
        print(f"{time.monotonic() - BEGAN:.0f} s: {what}", file=sys.stderr, flush=True)


class Clock(Callback):
    """Seconds from the end of batch ``skip`` to the end of the last, and what this rank's flow did meanwhile."""

    def __init__(self, world: World | None, device: torch.device, skip: int) -> None:
        self._flow, self._device, self._skip = world.flow if world else Flow(), device, skip
        self._marks: list[tuple[float, Flow]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (self._skip, trainer.max_steps):
            wait(self._device)
            self._marks.append((time.perf_counter(), replace(self._flow)))

    @property
    def seconds(self) -> float:
        return self._marks[1][0] - self._marks[0][0]

    @property
    def flow(self) -> Flow:
        return self._marks[1][1] - self._marks[0][1]


def random_rows(count: int, tokens: int, vocab: int) -> PackedRows:
    ids = np.random.default_rng(0).integers(4, vocab - 400 if vocab > 800 else vocab, (count, tokens), dtype=np.int32)
    place = np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape).copy()
    return PackedRows(ids, np.zeros_like(ids), place, np.ones(ids.shape, dtype=np.bool_))


def sum_over_drafters(value: float, device: torch.device) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def own_target(args: argparse.Namespace, cfg: TrainConfig, plan: Plan, device: torch.device) -> Any:
    """The target that computes; random weights are the same in every process."""
    if args.target == "embedded":
        return load_target(plan, cfg, device)
    torch.manual_seed(1)
    return random_target(plan.drafter, device)


class OwnTargetOfRandomWeights:
    """A target in the drafter's process without files to read embedding and head from."""

    def __init__(self, target: Any, drafter: DrafterConfig) -> None:
        self._target, self._drafter = target, drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def ends(self) -> TargetEnds:
        return same_ends(self._drafter, self._target.device)


def same_ends(drafter: DrafterConfig, device: torch.device) -> TargetEnds:
    torch.manual_seed(2)
    return random_ends(drafter, device)


class Fitted(NamedTuple):
    """What a fit came to.

    Attributes:
        rate: tokens/s over all drafters.
        seconds: of the steps timed.
        flow: what this rank moved in them.
    """

    rate: float
    seconds: float
    flow: Flow


class Fits:
    """Fits of one process's job, each with new weights from one seed, on rows that are the same."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self.args, self.job = args, job
        self.batches = args.warm_up + args.steps
        self.tokens = args.rows * args.tokens

    def data(self, batches: int) -> RowDataModule:
        """Of so many batches an epoch, to be dealt to all drafters if there is a Trainer."""
        tokens, vocab = self.args.tokens, self.job.plan.info.text.vocab_size
        rows = random_rows(batches * self.args.rows, tokens, vocab)
        return RowDataModule(rows, random_rows(1, tokens, vocab), self.args.rows, 0)

    def fit(self, target: Any, ends: Any, *callbacks: Callback) -> Fitted:
        """Features come from ``target``, embedding and head from ``ends``."""
        args, job = self.args, self.job
        clock = Clock(job.world, job.device, args.warm_up)
        trainer = job.trainer(target, [clock, *callbacks], [])
        torch.manual_seed(0)
        if args.sleep_target is not None:
            drawn = 100 + (job.world.rank if job.world else 0)
            module: L.LightningModule = SleepingDrafter(Pause(args.sleep_drafter, args.jitter, drawn))
        else:
            with job.device:
                module = job.module(ends)
        trainer.fit(module, datamodule=self.data((args.epoch or self.batches) * args.drafters))
        # Lightning ties callbacks to the module, also those that the job keeps: its memory would count in the next fit.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for name in ("log", "log_dict"):
                vars(callback).pop(name, None)
        return Fitted(args.steps * self.tokens * args.drafters / clock.seconds, clock.seconds, clock.flow)


def same_as_own(args: argparse.Namespace, fits: Fits, remote: RemoteTarget) -> dict[str, Any]:
    """Features and losses of the split run against those with a target in this very process."""
    job, plan = fits.job, fits.job.plan
    own = OwnTargetOfRandomWeights(own_target(args, job.cfg, plan, job.device), plan.drafter)
    local = LocalTarget(own, plan.drafter.target_layer_ids)  # type: ignore[arg-type]
    equal = compared = 0
    for batch in itertools.islice(fits.data(args.equal).train_dataloader(), args.equal):
        rows = {name: value.to(job.device) for name, value in batch.items()}
        equal += int(torch.equal(local.with_features(rows)["features"], remote.with_features(rows)["features"]))
        compared += 1
    losses = []
    for target in (remote, own):
        kept = Losses()
        fits.fit(target, own, kept)
        losses.append(torch.stack(kept.values).double().cpu())
    split, alone = losses
    return {
        "features_equal": f"{equal} of {compared} batches",
        "losses_equal": f"{int((split == alone).sum())} of {len(split)} steps",
        "losses_differ_most": float(((split - alone) / alone).abs().max()),
        "last_losses": [float(split[-1]), float(alone[-1])],
    }


def measure_run(args: argparse.Namespace, world: World | None, cfg: TrainConfig, plan: Plan) -> dict[str, Any] | None:
    if not args.targets:
        return measure_colocated(args, world, cfg, plan)
    assert world is not None
    sleeping = args.sleep_target is not None
    width = args.width if sleeping else plan.drafter.feature_size
    shape = (args.rows, args.tokens, width)
    with Job(cfg, plan, world) as job:
        device = job.device
        if world.role is Role.TARGET:
            if sleeping:
                target: Any = ReadyTarget(shape, plan.dtype, device, Pause(args.sleep_target, args.jitter, world.rank))
            else:
                target = own_target(args, cfg, plan, device)
            serve(
                world,
                lambda: ServingChannel(world, device, job.transport),
                target,
                plan.drafter.target_layer_ids,
                teacher=False,
                rows=args.rows,
                row_tokens=args.tokens,
            )
            return None
        job.console.quiet = True
        for rank in world.layout.targets_of_host(0):
            world.told(f"target/{rank}")
        link = Channel(world, device, job.transport)
        info: Any = SimpleNamespace(text=SimpleNamespace(hidden_size=width)) if sleeping else plan.info
        layers = (0,) if sleeping else plan.drafter.target_layer_ids
        kind = RemoteTarget if sleeping or args.target == "embedded" else TargetOfRandomWeights
        remote = kind(world, link, info, layers, device=device, dtype=plan.dtype)
        if isinstance(remote, TargetOfRandomWeights):
            remote.drafter = plan.drafter
        world.start_drafter_group(device, job.drafter_transport)
        ready: Any = ReadyTarget(shape, plan.dtype, device, lambda: None)
        fits = Fits(args, job)

        def supplied() -> float:
            """Tokens/s of all targets, while all drafters take what comes."""
            loader = PrefetchingLoader(fits.data(fits.batches).train_dataloader(), remote, DEEP)
            dist.barrier()
            began = 0.0
            for count, _ in enumerate(loader, start=1):
                if count == args.warm_up:
                    wait(device)
                    began = time.perf_counter()
            wait(device)
            return sum_over_drafters(args.steps * fits.tokens / (time.perf_counter() - began), device)

        rounds = []
        for turn in range(1, args.rounds + 1):
            supply = supplied()
            say(world, f"round {turn}: supply {supply:,.0f} tokens/s")
            demand = fits.fit(ready, remote).rate
            gc.collect()
            say(world, f"round {turn}: demand {demand:,.0f} tokens/s")
            new_peak()
            list(remote.each(new_peak, [None] * args.targets))
            run, took, flow = fits.fit(remote, remote)
            say(world, f"round {turn}: run {run:,.0f} tokens/s")
            rounds.append({"run": run, "supply": supply, "demand": demand, "share": run / min(supply, demand)})
            rounds[-1] |= {"wait": flow.waited_s / took, "queue": flow.queued / flow.batches}
        # Of the last run; what a fit with features at hand needs is here beside it.
        own = peak() - ready._features.nbytes
        gib = {"drafter": own / GIB, "target": max(remote.each(peak, [None] * args.targets)) / GIB}
        if args.trace:
            step = args.warm_up + 1
            # A target's own passes, of which it may be so many ahead.
            first, most = (count * args.drafters // args.targets for count in (step, fits.batches))
            for _ in remote.each(trace_target, [(args.trace, first, min(first + args.prefetch + 5, most))] * args.targets):
                pass
            fits.fit(remote, remote, TracedSteps(Path(args.trace) / f"drafter-{world.rank}.json.gz", step, step + 4))
            say(world, "traced")
        same = same_as_own(args, fits, remote) if args.equal else {}
        remote.goodbye()
    if world.rank:
        return None
    memory: dict[str, Any] = {}
    if device.type == "cuda" and args.target in TARGETS:
        recipe = recipe_of(plan.drafter, SHAPES[args.shape])
        planned = expected_gib(sizes_of(plan.drafter, recipe), recipe, args.prefetch)
        memory = {"peak_gib": {role: [round(gib[role], 2), round(planned[role], 2)] for role in Role}}
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {
        "targets": args.targets,
        "drafters": args.drafters,
        "prefetch": args.prefetch,
        "work": ({"sleep_ms": [args.sleep_target, args.sleep_drafter], "jitter": args.jitter} if sleeping else args.target),
        "batch": f"{args.rows} x {args.tokens} x {width} {str(plan.dtype).removeprefix('torch.')}",
        "tokens_per_s": {name: round(middle[name]) for name in ("run", "supply", "demand")},
        "share": round(middle["share"], 3),
        "shares": [round(one["share"], 3) for one in rounds],
        "wait_share": round(middle["wait"], 3),
        "queue_depth": round(middle["queue"], 2),
        "transport": job.transport,
        "devices": [str(of) for of in plan.devices],
        "steps": args.steps,
        "epoch": args.epoch,
        **memory,
        **same,
    }


def measure_colocated(args: argparse.Namespace, world: World | None, cfg: TrainConfig, plan: Plan) -> dict[str, Any] | None:
    """Fits of drafters that have a target each in their own process."""
    with Job(cfg, plan, world) as job:
        job.console.quiet = True
        own = own_target(args, cfg, plan, job.device)
        target = own if args.target == "embedded" else OwnTargetOfRandomWeights(own, plan.drafter)
        if world is not None:
            world.start_drafter_group(job.device, job.drafter_transport)
        fits, rates = Fits(args, job), []
        for _ in range(args.rounds):
            rates.append(fits.fit(target, target).rate)
        if args.trace:
            first, rank = args.warm_up + 1, world.rank if world else 0
            fits.fit(target, target, TracedSteps(Path(args.trace) / f"drafter-{rank}.json.gz", first, first + 4))
    if not job.leads:
        return None
    return {
        "targets": 0,
        "drafters": args.drafters,
        "work": args.target,
        "batch": f"{args.rows} x {args.tokens} x {plan.drafter.feature_size} {str(plan.dtype).removeprefix('torch.')}",
        "tokens_per_s": {"run": round(statistics.median(rates))},
        "all": [round(rate) for rate in rates],
        "devices": [str(of) for of in plan.devices],
        "steps": args.steps,
    }


def scaled(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """One drafter and several in turn, each in processes of their own; ``words``: of the command line, passed on."""
    rates: dict[int, list[int]] = {1: [], args.drafters: []}
    for _ in range(args.rounds):
        for drafters, found in rates.items():
            command = [sys.executable, __file__, "run", *words, "--targets", "0", "--drafters", str(drafters), "--rounds", "1"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = json.loads(done.stdout.splitlines()[-1])
            found.append(line["tokens_per_s"]["run"])
    shares = [several / one / args.drafters for one, several in zip(*rates.values(), strict=True)]
    return {
        "drafters": args.drafters,
        "work": args.target,
        "batch": line["batch"],
        "tokens_per_s": {str(count): found for count, found in rates.items()},
        "share": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
        "steps": args.steps,
    }


# -- beginning


def planned(args: argparse.Namespace) -> tuple[TrainConfig, Plan]:
    """What ``train.py`` would make of it; derived by every process for itself."""
    cfg = TrainConfig(
        target=TargetSection(path="embedded"),
        drafter=DrafterSection(intermediate_size=384),
        objective=ObjectiveSection(weights="dpace"),
        data=DataSection(prompts=None, rows_per_batch=args.rows, row_tokens=args.tokens),
        placement=(
            PlacementSection("split", args.drafters, args.targets, prefetch=args.prefetch, share=True)
            if args.targets
            else PlacementSection("colocated", args.drafters)
        ),
        trainer=TrainerSection(
            max_steps=args.warm_up + args.steps,
            accelerator="cpu" if args.cpu else "auto",
            enable_progress_bar=False,
            val_every=args.warm_up + args.steps,
            limit_val_batches=1,
        ),
        paths=PathsSection(args.folder),
    )
    plan = make_plan(cfg)
    if args.command == "run" and args.target != "embedded":
        shape = SHAPES[args.shape]
        config = TARGETS[args.target](shape.block, tiny=args.shape == "tiny")
        cfg.drafter.anchors = shape.anchors
        info = replace(random_info(config), tokenizer=plan.info.tokenizer)  # part of what a checkpoint is for
        plan = replace(plan, info=info, drafter=config, dtype=torch.bfloat16)
    return cfg, plan


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("transport", "run", "scaling"):
        command = commands.add_parser(name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_argument("--rows", type=int, default=4, help="of a batch (default: %(default)s)")
        command.add_argument("--tokens", type=int, default=256, help="of a row (default: %(default)s)")
        command.add_argument("--prefetch", type=int, default=2, help="requests in flight (default: %(default)s)")
        command.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    transport, run, scaling = commands.choices.values()
    transport.add_argument("--width", type=int, default=768, help="of a token's features (default: %(default)s)")
    transport.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    transport.add_argument("--repeats", type=int, default=15, help="of each measurement (default: %(default)s)")
    transport.add_argument("--compute", type=float, help="ms that the drafter computes a batch (default: two transfers)")
    transport.set_defaults(targets=1, drafters=1, warm_up=1, steps=1)
    for command in (run, scaling):
        command.add_argument(
            "--target", choices=("embedded", *TARGETS), default="embedded", help="all but the first with random weights"
        )
        command.add_argument(
            "--shape", choices=SHAPES, default="S", help="rows, tokens and anchors for those (default: %(default)s)"
        )
        command.add_argument("--steps", type=int, default=100, help="timed, a measurement (default: %(default)s)")
        command.add_argument("--warm-up", type=int, default=10, help="steps before them (default: %(default)s)")
        command.add_argument("--rounds", type=int, default=3, help="of all measurements (default: %(default)s)")
    scaling.add_argument("--drafters", type=int, default=2, help="processes to compare with one (default: %(default)s)")
    run.add_argument("--targets", type=int, default=1, help="processes; 0: each drafter has its own (default: %(default)s)")
    run.add_argument("--drafters", type=int, default=1, help="processes (default: %(default)s)")
    run.add_argument("--sleep-target", type=float, metavar="MS", help="instead of a target, a sleep")
    run.add_argument("--sleep-drafter", type=float, metavar="MS", help="instead of a drafter, a sleep")
    run.add_argument("--jitter", type=float, default=0.0, help="share by which each sleep may be longer or shorter")
    run.add_argument("--width", type=int, default=768, help="of a token's features, with sleeps (default: %(default)s)")
    run.add_argument("--epoch", type=int, help="batches of an epoch, after which a loader begins anew (default: one epoch)")
    run.add_argument("--equal", type=int, metavar="BATCHES", help="compare so many batches' features, and all losses")
    run.add_argument("--trace", metavar="FOLDER", help="traces of a few steps of every process, for benchmarks/timeline.py")
    args = parser.parse_args()
    if args.command == "run":
        if (args.sleep_target is None) != (args.sleep_drafter is None):
            parser.error("--sleep-target and --sleep-drafter go together")
        if args.sleep_target is not None and (args.equal or not args.targets):
            parser.error("--sleep-target: with targets of their own processes, and without --equal")
        if args.trace and args.targets and (args.cpu or not torch.cuda.is_available()):
            parser.error(
                "--trace of a split run needs GPUs: torch 2.13 crashes where gloo's threads run under its CPU profiler"
            )
        if args.targets and args.warm_up <= args.prefetch + 1:
            parser.error(
                f"--warm-up {args.warm_up}: more than --prefetch + 1, or the first timed steps take what waited before"
            )
        if args.trace and args.steps * args.drafters < 5 * max(args.targets, args.drafters):
            parser.error(f"--steps {args.steps}: --trace needs five of every process")
        if args.trace:
            Path(args.trace).mkdir(parents=True, exist_ok=True)
            args.trace = str(Path(args.trace).resolve())
    if args.command != "transport" and args.target != "embedded":
        args.rows, args.tokens = SHAPES[args.shape].rows, SHAPES[args.shape].tokens
    return args


def passed_on(args: argparse.Namespace) -> list[str]:
    """Words of a command line of ``run`` for what ``scaling`` shares with it."""
    names = ("rows", "tokens", "target", "shape", "steps", "warm_up")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    return [*words, "--cpu"] if args.cpu else words


def main() -> None:
    quiet_libraries()
    warnings.filterwarnings("ignore", message=".*no `validation_step`.*")  # a sleep needs none
    started, command = how_started(), [sys.executable, __file__]

    def measure(args: argparse.Namespace, world: World | None) -> dict[str, Any] | None:
        of = {"transport": measure_transport, "run": measure_run}[args.command]
        return of(args, world, *planned(args))  # type: ignore[arg-type]

    if not started.leads:
        world, text = follow(started, command)
        with world:
            measure(argparse.Namespace(**json.loads(text)), world)
        return
    args = parsed()
    with tempfile.TemporaryDirectory(prefix="placement_") as args.folder:
        line: dict[str, Any] | None
        if args.command == "scaling":
            line = scaled(args, passed_on(args))
        elif args.targets + args.drafters == 1:
            line = measure(args, None)
        else:
            layout = Layout(args.targets, args.drafters)
            with lead(layout, started, json.dumps(vars(args)), command=command, timeout_s=60.0) as world:
                line = measure(args, world)
    assert line is not None
    line |= {"torch": torch.__version__}
    if torch.cuda.is_available() and not args.cpu:
        line["device"] = torch.cuda.get_device_name()
    print(json.dumps({"command": args.command, **line}))


if __name__ == "__main__":
    main()
