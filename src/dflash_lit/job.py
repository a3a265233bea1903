"""The parts of a training job that ``train.py`` puts together."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
import transformers
import wandb
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dflash_lit.blocked import refuse_blocked
from dflash_lit.checkpoints.contract import CONTENT, compare
from dflash_lit.checkpoints.file import load
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.commands import one_line, stop_code
from dflash_lit.compilation.cache import use_cache
from dflash_lit.config import TrainConfig
from dflash_lit.data.chat_data import chat_data
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.documents import Document
from dflash_lit.data.offline import StoredFeatures, ensure_features
from dflash_lit.data.packing import pack
from dflash_lit.data.prompts import Prompt, file_prompts, split_held_out, stdlib_prompts
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.data.respond import respond
from dflash_lit.data.stored_rows import load_rows
from dflash_lit.decode.acceptance import MeasuredTarget, measure, measure_together, round_samples
from dflash_lit.decode.proposer import ProposingDrafter
from dflash_lit.decode.static_drafter import can_be_static, static_pair
from dflash_lit.doctor.look import free_memory
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import Interrupted, Pruned, UserError, stop_within
from dflash_lit.export import load_drafter, save_drafter
from dflash_lit.module import DrafterModule
from dflash_lit.placement.channel import Channel, ServingChannel
from dflash_lit.placement.layout import Transport, table
from dflash_lit.placement.layout import transport as transport_between
from dflash_lit.placement.own_gpu import device_seen
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.placement.strategy import ColocatedStrategy, DrafterGroupStrategy, LocalTarget, SplitStrategy, threads_of_a_rank
from dflash_lit.placement.target_worker import serve
from dflash_lit.placement.world import World
from dflash_lit.plan import Plan
from dflash_lit.report import closing_table, load_metrics, write_report
from dflash_lit.responses.on_policy import PolicyQuestion, answer_policy
from dflash_lit.stopping import stopping
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from dflash_lit.trained import SUMMARY, reopen
from dflash_lit.watching.announce import announcement
from dflash_lit.watching.pace import StepClock, pace_file, read_pace, write_pace
from dflash_lit.watching.resumed import run_of_checkpoint
from dflash_lit.watching.terminal import live_console

__all__ = ["Job", "cache_folder", "load_target", "prepare_process", "quiet_libraries"]


def quiet_libraries() -> None:
    """Keep libraries from telling a user what is neither news nor in the user's hands."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # device lists, product tips
    transformers.utils.logging.disable_progress_bar()
    for known in (
        ".*LeafSpec.*",
        # What the module logs is of all ranks already.
        ".*It is recommended to use `self.log.*sync_dist=True.*",
        ".*does not have many workers.*",
        ".*val_check_interval.*",
        ".*`srun` command is available.*",  # on any host of a cluster
    ):
        # A loader in this process is right: rows are cut from memory.
        warnings.filterwarnings("ignore", message=known)


def cache_folder(chosen: str | None) -> Path:
    """``data.cache_dir``, else the user's cache folder."""
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_lit").expanduser()


def prepare_process(cfg: TrainConfig, plan: Plan, device: torch.device) -> None:
    """Settings of a whole process: its device, its share of the host's cores, where it compiles to."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if cfg.trainer.threads is not None:
        torch.set_num_threads(cfg.trainer.threads)
    elif plan.layout.world > 1:
        torch.set_num_threads(threads_of_a_rank(plan.layout.ranks_per_host))
    if device.type == "cuda" or cfg.drafter.compile or cfg.target.compile or cfg.evaluation.compile:
        use_cache()


def load_target(plan: Plan, cfg: TrainConfig, device: torch.device) -> FrozenTarget:
    """Read the target's weights onto a device."""
    return FrozenTarget.load(
        plan.info,
        device=device,
        dtype=plan.dtype,
        attention=cfg.target.attention,
        dense_limit_gib=cfg.target.dense_limit_gib,
        compile=cfg.target.compile,
    )


@dataclass(frozen=True)
class JobData:
    """Everything the data phase yields.

    Attributes:
        figures: for the summary; empty on other ranks than 0, which are only given the rows.
    """

    module: RowDataModule
    eval_prompts: list[list[int]]
    figures: dict[str, Any]


@runtime_checkable
class TakesSummary(Protocol):
    """A callback that wants the run's summary."""

    def on_summary(self, trainer: L.Trainer, summary: Mapping[str, Any], drafter: Path) -> None:
        """Called on rank 0 before ``summary.json`` is written; ``drafter`` is the folder of the exported one."""


class _Listen(Callback):
    """First of all callbacks, when Lightning has set up its signal handlers."""

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stopping.again()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stopping.again()


class Job:
    """One run, as one of its drafters sees it: its folder, its console, and the time each phase took.

    Args:
        cfg: the composed config.
        plan: what :func:`dflash_lit.plan.make_plan` derived from it.
        world: of this rank, if the run has several.
    """

    def __init__(self, cfg: TrainConfig, plan: Plan, world: World | None = None) -> None:
        self.cfg, self.plan, self.world = cfg, plan, world
        self.device = device_seen(plan.devices[plan.layout.local_rank(world.rank)]) if world else plan.device
        self.folder = Path(cfg.paths.output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console = Console(stderr=True, quiet=not self.leads)
        self.phases: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.exported = self.folder / "drafter"
        self.started = time.monotonic()
        self.pace_file = pace_file(cfg, plan, cache_folder(cfg.data.cache_dir))
        self.last_pace = read_pace(self.pace_file)
        self.clock = StepClock(self.started, say=self.last_pace is None)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the run, makes its data and measures its result."""
        return self.world is None or self.world.rank == 0

    def __enter__(self) -> Job:
        prepare_process(self.cfg, self.plan, self.device)
        # W&B keeps what an offline run has yet to upload in the user's home, unless told where: it belongs to the run.
        self._wandb_data = os.environ.get("WANDB_DATA_DIR")
        os.environ.setdefault("WANDB_DATA_DIR", str((self.folder / "wandb_data").absolute()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """End the W&B run, with what went wrong if anything did, and forget the graphs: the next job of a sweep starts its own."""
        torch.compiler.reset()
        stop = stop_within(error)
        # Lightning makes a SystemExit of Ctrl-C, as it should.
        over = isinstance(error, Exception) and stop is not None
        error = stop if over else error
        try:
            if wandb.run is not None:
                code = 0
                if isinstance(error, Pruned):  # as it was meant to be
                    wandb.run.summary["pruned_at_step"] = error.step
                elif isinstance(error, Interrupted):
                    wandb.run.summary["stopped_by"] = stopping.name(error.signal)
                    code = stop_code(error)
                elif error is not None:
                    wandb.run.summary["error"] = f"{type(error).__name__}: {one_line(error)}"
                    code = 1
                wandb.finish(exit_code=code)
        finally:
            if self._wandb_data is None:
                os.environ.pop("WANDB_DATA_DIR", None)
        if over and stop is not None:
            raise stop

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the run."""
        self.console.print(f"[bold]{name}[/bold]")
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(time.monotonic() - began, 2)

    def announce(self) -> None:
        """Print what will happen, before anything heavy does."""
        if self.leads:
            gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
            free = torch.cuda.mem_get_info(self.device)[0] if gpu else free_memory()
            for name, text in announcement(self.cfg, self.plan, free, pace=self.last_pace, gpu=gpu).items():
                self.console.print(Text(f"  {name:<9} {text}"), soft_wrap=True)

    # -- building

    def instances(self) -> tuple[list[Callback], list[Logger]]:
        """Callbacks and loggers of the config.

        Raises:
            UserError: naming the entry that cannot be made, or what is in the way of what they are going to write.
        """
        made: dict[str, list[Any]] = {}
        kinds: dict[str, type] = {"callbacks": Callback, "logger": Logger}
        for section, kind in kinds.items():
            made[section] = []
            for name, node in getattr(self.cfg, section).items():
                if node is None:  # `callbacks.acceptance=null` leaves it out
                    continue
                if name == "wandb" and os.environ.get("WANDB_MODE") == "disabled":
                    continue
                try:
                    value = instantiate(node, _convert_="all", **self._resumed(node))
                except Exception as error:  # whatever the constructor raises, the key is what helps
                    cause = error.__cause__ or error
                    if isinstance(cause, ModuleNotFoundError) and "tensorboard" in str(cause):
                        raise UserError(f"{section}.{name}: tensorboard is not installed; pip install tensorboard") from None
                    reason = str(cause).strip().splitlines()[0]
                    raise UserError(f"{section}.{name}: {reason}") from error
                if not isinstance(value, kind):
                    raise UserError(f"{section}.{name}: is no {kind.__name__}; check its _target_")
                made[section].append(value)
        _check_monitors(made["callbacks"], self.cfg.evaluation.tree_budgets)
        if self.leads:
            refuse_blocked(self.folder, made["callbacks"], made["logger"])
        return made["callbacks"], made["logger"]

    def _resumed(self, node: Any) -> dict[str, str]:
        """What a logger needs of the run whose checkpoint this one goes on from: W&B's its id, unless the config gives one; CSV its file."""
        kind = str(node.get("_target_")).rsplit(".", 1)[-1]
        if self.cfg.ckpt_path is not None and kind == "MetricsLogger":
            return {"resumes": self.cfg.ckpt_path}
        if self.cfg.ckpt_path is None or not kind.endswith("WandbLogger"):
            return {}
        if node.get("id") or node.get("version"):
            return {}
        found = run_of_checkpoint(self.cfg.ckpt_path)
        return {"id": found} if found else {}

    def target(self) -> FrozenTarget | RemoteTarget:
        """The target in this process, or the one that target ranks hold."""
        if self.world is None or not self.plan.layout.targets:
            whole = load_target(self.plan, self.cfg, self.device)
            if self.cfg.evaluation.compile and not can_be_static(whole):
                raise UserError(
                    f"evaluation.compile=true: the layers of {self.plan.info.path} cannot be compiled for decoding; leave it null"
                )
            return whole
        world = self.world
        for rank in self.plan.layout.targets_of_host(world.host):
            world.told(f"target/{rank}")  # has read its weights
        return RemoteTarget(
            world,
            self._channel(world),
            self.plan.info,
            self.plan.drafter.target_layer_ids,
            device=self.device,
            dtype=self.plan.dtype,
            teacher=self.teacher,
        )

    @property
    def teacher(self) -> bool:
        return self.plan.objective.labels == "soft"

    @property
    def transport(self) -> Transport:
        """Of features: NCCL if every rank of a host has a GPU of its own."""
        return transport_between([device.index for device in self.plan.devices])

    @property
    def drafter_transport(self) -> Transport:
        """Of gradients: NCCL if every drafter of a host has a GPU of its own."""
        return transport_between([device.index for device in self.plan.devices[: self.plan.layout.drafters]])

    def _channel(self, world: World) -> Channel:
        return Channel(world, self.device, self.transport, limit_gib=self.cfg.placement.message_limit_gib)

    def serve(self) -> None:
        """What a target rank does instead of everything below."""
        world = self.world
        assert world is not None
        serve(
            world,
            lambda: ServingChannel(world, self.device, self.transport, limit_gib=self.cfg.placement.message_limit_gib),
            load_target(self.plan, self.cfg, self.device),
            self.plan.drafter.target_layer_ids,
            teacher=self.teacher,
            rows=self.cfg.data.rows_per_batch,
            row_tokens=self.cfg.data.row_tokens,
        )

    def trained(self, trainer: L.Trainer) -> None:
        """Training is over; what is left, to decode with the drafter, can be done by a run that resumes this one's checkpoint."""
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def leave(self, target: FrozenTarget | RemoteTarget) -> FrozenTarget | None:
        """Training is over: the other processes end. On rank 0 a whole target comes back, to decode with."""
        if isinstance(target, RemoteTarget):
            target.goodbye()
        if self.world is not None:
            self.world.goodbye()
        if not self.leads:
            return None
        stopping.obey()
        return target if isinstance(target, FrozenTarget) else load_target(self.plan, self.cfg, self.device)

    def _prompts(self, target: FrozenTarget | RemoteTarget) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
        """Prompts to train on, to validate on, and to decode."""
        data, seed = self.cfg.data, self.cfg.seed
        evaluated = self.cfg.evaluation.prompts
        wanted = data.val_prompts + evaluated
        if data.prompts is None:
            size = data.prompt_tokens
            train = stdlib_prompts(target.tokenizer, count=data.train_prompts, prompt_tokens=size, held_out=False, seed=seed)
            held = stdlib_prompts(target.tokenizer, count=wanted, prompt_tokens=size, held_out=True, seed=seed)
        else:
            everything = file_prompts(data.prompts, target.tokenizer, max_prompt_tokens=data.prompt_tokens)
            train, held = split_held_out(everything, data.held_out_share, seed)
            if not train or len(held) < 2:
                raise UserError(
                    f"data.prompts={data.prompts!r}: {len(everything)} different prompts give {len(train)} to train on and {len(held)} held "
                    "out; at least 1 and 2 are needed: add prompts or raise data.held_out_share"
                )
            train = train[: data.train_prompts]
        cut = min(data.val_prompts, len(held) // 2 if len(held) < wanted else data.val_prompts)
        val, decoded = held[:cut], held[cut:][:evaluated]
        if data.validate_on_train:
            val = decoded = train
        return train, val, decoded

    def _refuse_mask_token(self, prompts: list[Prompt]) -> None:
        mask = self.plan.drafter.mask_token_id
        for prompt in prompts:
            if mask in prompt.input_ids:
                raise UserError(
                    f"drafter.mask_token_id={mask} occurs in the data (prompt {prompt.name!r}); choose a reserved id that is never text"
                )

    def data(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """Prompts, the target's responses to them, packed rows; made by rank 0 for all.

        Raises:
            UserError: also if another host does not see the folder of the run.
        """
        if self.world is None or self.plan.layout.drafter_world == 1:
            made = self._make_data(target)
            self._attach(made.module, self._offline(made.module, target))
            return made
        folder = self.folder / ".rows"
        if self.leads:
            made = self._make_data(target)
            self.world.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            for side, rows in (("train", made.module.train), ("val", made.module.val)):
                rows.save(folder / side)
            offline = self._offline(made.module, target)
            self._attach(made.module, offline)
            self.world.tell("data", (made.eval_prompts, [str(folder) for folder in offline]))
            return made
        prompts, offline = self.world.told("data")
        if not folder.is_dir():
            raise UserError(
                f"paths.output_dir={self.cfg.paths.output_dir!r}: {folder.resolve()} of rank 0 is not there on host {self.world.host}; "
                "put the run on a file system that all hosts see"
            )
        train, val = (load_rows(folder / side) for side in ("train", "val"))
        module = RowDataModule(train, val, self.cfg.data.rows_per_batch, self.cfg.seed)
        module.eval_prompts = prompts  # type: ignore[attr-defined]
        self._attach(module, [Path(folder) for folder in offline])
        return JobData(module, prompts, {})

    def _offline(self, module: RowDataModule, target: FrozenTarget | RemoteTarget) -> list[Path]:
        """Folders with the features of training and validation rows, written now unless they are there; none without data.offline.

        Raises:
            UserError: if they would be too large.
        """
        data, plan = self.cfg.data, self.plan
        if not data.offline:
            return []
        assert isinstance(target, FrozenTarget)  # plan.py: not with a split placement
        return ensure_features(
            (module.train, module.val),
            LocalTarget(target, plan.drafter.target_layer_ids, teacher=self.teacher),
            cache_folder(data.cache_dir) / "features",
            widths=[plan.drafter.feature_size, *([plan.drafter.hidden_size] if self.teacher else [])],
            limit_gib=data.offline_limit_gib,
            rows_per_batch=data.rows_per_batch,
            console=self.console,
        )

    def _attach(self, module: RowDataModule, folders: list[Path]) -> None:
        if folders:
            train, val = (StoredFeatures.open(folder) for folder in folders)
            module.features = (train, val)

    def _make_data(self, target: FrozenTarget | RemoteTarget) -> JobData:
        make = self._chats if self.cfg.data.kind == "chat" else self._responses
        if self.cfg.ckpt_path is None:
            return make(target)
        # What plan.py could not know yet, each before the work that comes next.
        saved = load(self.cfg.ckpt_path, mmap=True)
        compare(saved, {"drafter.target_fingerprint": target.fingerprint})
        made = make(target)
        compare(saved, {CONTENT: made.module.contract()[CONTENT]})
        return made

    def _chats(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """Conversations as they are."""
        data, info = self.cfg.data, target.info
        made = chat_data(
            data,
            info,
            mask_token_id=self.plan.drafter.mask_token_id,
            seed=self.cfg.seed,
            cache_dir=cache_folder(data.cache_dir),
            decoded=self.cfg.evaluation.prompts if info.packs else 0,
        )
        module = RowDataModule(made.train, made.val, data.rows_per_batch, self.cfg.seed)
        module.eval_prompts = made.prompts  # type: ignore[attr-defined]
        figures = made.figures(self.cfg.drafter.anchors)
        for line in made.lines(figures):
            self.console.print(f"  {line}", highlight=False, markup=False)
        self._say_one_a_row(info, made.train.efficiency)
        if data.policy_documents and not (documents := made.val_documents(data.policy_documents)):
            self.console.print(
                "  no held-out document has a supervised token in its first row, so none is checked for being the target's own",
                highlight=False,
            )
        elif data.policy_documents:
            figures |= self._check_policy(
                target, PolicyQuestion(documents, data.temperature, data.row_tokens, data.rows_per_batch)
            )
        return JobData(module, made.prompts, figures)

    def _check_policy(self, target: FrozenTarget | RemoteTarget, question: PolicyQuestion) -> dict[str, Any]:
        """Say whether the conversations are what the target would have said."""
        (check,) = target.each(answer_policy, [question])
        says = (
            f"{check.documents} held-out documents: {check.nll:.3f} nats a token, {check.entropy:.3f} if the target had written them "
            f"at T={check.temperature:g}"
        )
        if check.off_policy:
            logging.getLogger(__name__).warning(
                "%s: this is another's text, or of another temperature (data.temperature). A drafter learns what its target says: let it "
                "respond to the prompts (dflash-lit respond)",
                says,
            )
        else:
            self.console.print(f"  {says}: its own text", highlight=False)
        return {"policy_nll": check.nll, "policy_entropy": check.entropy, "off_policy": check.off_policy}

    def _responses(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """The target responds to prompts."""
        data = self.cfg.data
        train, val, decoded = self._prompts(target)
        self._refuse_mask_token([*train, *val, *decoded])
        everything = respond(
            target,
            [*train, *val] if not data.validate_on_train else train,
            max_new_tokens=data.response_tokens,
            temperature=data.temperature,
            batch_size=data.responses_per_batch,
            seed=self.cfg.seed,
            cache_dir=cache_folder(data.cache_dir) / "responses",
        )
        # A sampled mask token is a one in a million accident: the document is dropped, not the run.
        documents = [d for d in everything.documents if not (d.input_ids == self.plan.drafter.mask_token_id).any()]
        names = {prompt.name for prompt in val}
        sides: tuple[list[Document], list[Document]] = (
            [d for d in documents if data.validate_on_train or d.name not in names],
            [d for d in documents if d.name in names],
        )
        info = target.info
        arguments: dict[str, Any] = {"seed": self.cfg.seed, "pad_id": info.pad_id, "one_per_row": not info.packs}
        rows = [pack(side, data.row_tokens, **arguments) for side in sides]
        module = RowDataModule(rows[0], rows[1], data.rows_per_batch, self.cfg.seed)
        # Decoding on the training text: only what was trained on, and not the prompts whose responses were dropped.
        learnt = {d.name for d in documents}
        decoded = [prompt for prompt in decoded if not data.validate_on_train or prompt.name in learnt]
        prompts = [list(prompt.input_ids) for prompt in decoded[: self.cfg.evaluation.prompts if info.packs else 0]]
        module.eval_prompts = prompts  # type: ignore[attr-defined]
        said = (
            f"{len(everything.documents)} responses of {target.info.path} at T={data.temperature:g}"
            f" ({everything.repetitive} repetitive and {everything.empty} empty ones dropped"
            + (", from the cache)" if everything.from_cache else f", {everything.tokens_per_second:.0f} tokens/s)")
            + f"; {len(rows[0])} + {len(rows[1])} rows of {data.row_tokens} tokens, {100 * rows[0].efficiency:.1f} % filled"
        )
        # A path may hold what rich takes for markup, and a line of a log stays a line.
        self.console.print(Text(f"  {said}"), soft_wrap=True)
        self._say_one_a_row(info, rows[0].efficiency)
        figures = {
            "responses": len(everything.documents),
            "responses_repetitive": everything.repetitive,
            "responses_from_cache": everything.from_cache,
        }
        return JobData(module, prompts, figures)

    def _say_one_a_row(self, info: TargetInfo, filled: float) -> None:
        if not info.packs:
            self.console.print(
                f"  {info.path} has layers of kind {info.not_packed!r}, which no mask keeps to one document: each row holds one, "
                f"{100 * filled:.1f} % filled (data.row_tokens near the documents' length fills more); nothing is "
                "decoded, since rejected drafts cannot be taken back from their state"
            )

    def module(self, target: FrozenTarget | RemoteTarget) -> DrafterModule:
        """The drafter, new or warm-started, under its training step."""
        cfg, plan = self.cfg, self.plan
        module = DrafterModule(ends=target.ends(), **plan.module_settings(cfg, target.fingerprint))
        if cfg.drafter.init_from is not None:
            warm = load_drafter(cfg.drafter.init_from)
            # Complete but for a path head that the run adds to a drafter without one.
            module.drafter.load_state_dict(warm.state_dict(), strict=warm.config.path_width == plan.drafter.path_width)
        if self.world is not None:
            self.console.print(table(plan.layout, [device.index for device in plan.devices]), highlight=False)
        return module

    def strategy(self, target: FrozenTarget | RemoteTarget) -> Strategy:
        """The placement, as Lightning takes it."""
        layer_ids = self.plan.drafter.target_layer_ids
        if isinstance(target, RemoteTarget):
            assert self.world is not None
            chosen = self.cfg.placement.prefetch
            prefetch = self.plan.layout.prefetch if chosen is None else chosen
            return SplitStrategy(self.world, self.device, target, prefetch=prefetch, transport=self.drafter_transport)
        if self.world is not None:
            return DrafterGroupStrategy(
                self.world, self.device, target, layer_ids, teacher=self.teacher, transport=self.drafter_transport
            )
        return ColocatedStrategy(target, layer_ids, self.device, teacher=self.teacher)

    def trainer(self, target: FrozenTarget | RemoteTarget, callbacks: list[Callback], loggers: list[Logger]) -> L.Trainer:
        """Lightning's Trainer with the placement as its strategy."""
        settings = self.cfg.trainer
        if not settings.enable_progress_bar:
            callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]
        if not loggers:
            callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
        if self.leads:
            reopen(self.folder)
            callbacks = [*callbacks, self.clock]
            for logger in loggers:
                logger.log_hyperparams(self.described())
        # Lightning would look for SLURM: take a batch script's number of tasks for processes, requeue the job by itself, and save inside of a
        # signal handler.
        alone = self.world is None and not TorchElasticEnvironment.detect()
        return L.Trainer(
            plugins=[VerifiedCheckpointIO(), *([LightningEnvironment()] if alone else [])],
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            strategy=self.strategy(target),
            devices=1 if self.device.type == "cuda" else self.plan.layout.drafters,  # of this process
            num_nodes=self.plan.layout.hosts,
            precision=self.plan.precision,  # type: ignore[arg-type]
            inference_mode=False,  # no_grad instead: one kind of tensors, so one set of graphs
            max_steps=settings.max_steps,
            max_epochs=-1,
            accumulate_grad_batches=settings.accumulate_grad_batches,
            gradient_clip_val=settings.gradient_clip_val,
            val_check_interval=self.plan.val_every * settings.accumulate_grad_batches,
            check_val_every_n_epoch=None,
            limit_val_batches=settings.limit_val_batches,
            num_sanity_val_steps=settings.num_sanity_val_steps,
            log_every_n_steps=settings.log_every_n_steps,
            enable_progress_bar=settings.enable_progress_bar,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            callbacks=[_Listen(), *callbacks],
            logger=loggers,
            default_root_dir=self.folder,
        )

    def described(self) -> dict[str, Any]:
        """The config without interpolations, as plain values, and under ``derived`` what was derived from it and the target."""
        plan = self.plan
        derived = {
            "drafter": plan.drafter.to_dict(),
            "objective": plan.objective.to_dict(),
            "device": plan.device.type,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "precision": plan.precision,
            "val_every": plan.val_every,
            "max_new_tokens": plan.max_new_tokens,
            "processes": plan.layout.world,
            "drafters": plan.layout.drafter_world,
        }
        config = OmegaConf.to_container(OmegaConf.structured(self.cfg), resolve=True)
        assert isinstance(config, dict)
        return {**{str(key): value for key, value in config.items()}, "derived": derived}

    # -- finishing

    def summarise(self, trainer: L.Trainer, module: DrafterModule, target: FrozenTarget, data: JobData) -> dict[str, Any]:
        """Decode for real with the *exported* drafter and put all figures together."""
        # The export callback says where it wrote; without one the job exports itself.
        made = [found for callback in trainer.callbacks if (found := getattr(callback, "exported_to", None))]  # type: ignore[attr-defined]
        export = made[0] if made else save_drafter(module.drafter, self.folder / "drafter")
        self.exported = export
        drafter = load_drafter(export).to(self.plan.device, target.dtype)
        settings = self.cfg.evaluation
        summary: dict[str, Any] = {}
        if not target.info.packs:
            summary["not_decoded"] = f"rejected drafts cannot be taken back from layers of kind {target.info.not_packed!r}"
        sides = self._sides(target, drafter, data)
        for temperature in settings.temperatures if target.info.packs else ():
            with Progress(console=Console(stderr=True), transient=True, disable=live_console() is None) as progress:
                got = measure(
                    *sides,
                    data.eval_prompts,
                    max_new_tokens=self.plan.max_new_tokens,
                    temperature=temperature,
                    seed=self.cfg.seed,
                    progress=progress,
                )
            tau = "tau_greedy" if temperature == 0 else f"tau_t{temperature:g}"
            tag = "" if temperature == 0 else f"_t{temperature:g}"
            summary |= {
                tau: got.tau,
                f"{tau}_error": got.tau_error,
                f"tokens_per_s_plain{tag}": got.tokens_per_s_plain,
                f"tokens_per_s_drafted{tag}": got.tokens_per_s_drafted,
                f"accepted_by_slot{tag}": got.accepted_by_depth,
            }
            for budget in settings.budgets if target.no_trees is None else ():
                trees = measure_together(
                    target,
                    drafter,
                    data.eval_prompts,
                    budget,
                    max_new_tokens=self.plan.max_new_tokens,
                    temperature=temperature,
                    seed=self.cfg.seed,
                )
                summary |= {f"{tau}@{budget}": trees.tau, f"{tau}@{budget}_error": trees.tau_error}
            if got.lossless is not None:
                summary["lossless"] = got.lossless
                summary["lossless_prompts"] = f"{got.identical}/{got.prompts}"
                summary["lossless_near_ties"] = got.near_ties
                summary["greedy_repetitive"] = sum(is_repetitive(np.array(d.ids)) for d in got.drafted)
                samples = round_samples(target, data.eval_prompts, got.drafted, 3)
                summary["samples"] = [
                    {"prompt": s.prompt, "rounds": [{"text_accepted": a, "text_bonus": b} for a, b in s.rounds]}
                    for s in samples
                ]
        summary |= {
            "tau_untrained": self._untrained(target, data),
            **{key: value for key, value in self.metrics.items() if key.startswith("val/")},
            "train_loss": self.metrics.get("train/loss", math.nan),
            "steps": trainer.global_step,
            "target": self.plan.info.path,
            "validated_on_train": self.cfg.data.validate_on_train,
            "block_size": self.plan.drafter.block_size,
            "objective": str(self.plan.objective),
            "drafter_parameters": sum(p.numel() for p in module.drafter.parameters()),
            "target_parameters": sum(p.numel() for p in target.model.parameters()),
            **data.figures,
            "train_tokens": trainer.global_step
            * self.cfg.trainer.accumulate_grad_batches
            * self.cfg.data.rows_per_batch
            * self.cfg.data.row_tokens
            * trainer.world_size,
            "export_dir": _shown(export),
            "report": _shown(self.folder / "report.html"),
        }
        return summary

    def _sides(
        self, target: FrozenTarget, drafter: Drafter, data: JobData
    ) -> tuple[MeasuredTarget, Drafter | ProposingDrafter]:
        """What is decoded one by one, for its speed: plain and drafted passes alike compiled, or alike not."""
        compiles = self.cfg.evaluation.compile
        if compiles is None:
            compiles = self.device.type == "cuda"
        if not compiles or not data.eval_prompts or not can_be_static(target):
            return target, drafter
        longest = max(map(len, data.eval_prompts))
        return static_pair(target, drafter, longest_prompt=longest, max_new_tokens=self.plan.max_new_tokens, budgets=[0])

    def _untrained(self, target: FrozenTarget, data: JobData) -> float:
        """Tau of a drafter with fresh random weights on a few of the same prompts: the floor; NaN if none is decoded."""
        drafter = Drafter(self.plan.drafter).to(self.plan.device)
        few = data.eval_prompts[:4]
        return measure(target, drafter, few, max_new_tokens=min(self.plan.max_new_tokens, 48), plain=False).tau

    def close(self, summary: dict[str, Any], trainer: L.Trainer) -> None:
        """Write ``report.html``, log the summary, end the W&B run, print the table; and at the very end write ``summary.json``."""
        # On Linux in KiB, on macOS in bytes.
        unit = 2**30 if sys.platform == "darwin" else 2**20
        summary["phases"] = self.phases
        summary["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 3)
        summary["wall_s"] = round(time.monotonic() - self.started, 1)
        config = OmegaConf.to_yaml(OmegaConf.structured(self.cfg) if not OmegaConf.is_config(self.cfg) else self.cfg)
        metrics_file = self.folder / "csv" / "metrics.csv"
        metrics = load_metrics(metrics_file) if metrics_file.is_file() else {}
        report = write_report(self.folder / "report.html", summary, metrics, config)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, TakesSummary):
                callback.on_summary(trainer, summary, self.exported)
        Console().print(closing_table(summary, _shown(report)))
        if pace := self.clock.pace(time.monotonic(), runs=self.last_pace.runs + 1 if self.last_pace else 1):
            write_pace(self.pace_file, pace)
        if wandb.run is not None:
            wandb.finish()
        _write_json(self.folder / SUMMARY, summary)  # from here on a run that goes on from its checkpoint has nothing to do


def _check_monitors(callbacks: Sequence[Callback], tree_budgets: Sequence[int]) -> None:
    """Lengths of draft trees are logged only at the budgets asked for; Lightning would say so after hours."""
    decoded = [budget for callback in callbacks for budget in getattr(callback, "budgets", ())]
    for kind, budgets, setting in (
        ("val/tau@", decoded, "callbacks.acceptance.budgets"),
        ("val/tree_eal@", tree_budgets, "evaluation.tree_budgets"),
    ):
        logged = [f"{kind}{budget}" for budget in budgets]
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str) and monitor.startswith(kind) and monitor not in logged:
                raise UserError(
                    f"monitor={monitor} of {type(callback).__name__}: will not be logged, only {', '.join(logged) or f'no {kind[:-1]}'}; "
                    f"add its budget to {setting}"
                )


def _shown(path: Path) -> str:
    """The path as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Strict JSON, complete or not at all; NaN becomes null."""

    def clean(item: Any) -> Any:
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, dict):
            return {k: clean(v) for k, v in item.items()}
        return [clean(v) for v in item] if isinstance(item, list | tuple) else item

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(clean(dict(value)), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
