"""The parts of a training job that ``train.py`` puts together."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
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
from rich.text import Text

from dflash_lit.blocked import refuse_blocked
from dflash_lit.cache_folder import cache_folder
from dflash_lit.checkpoints.io import VerifiedCheckpointIO
from dflash_lit.commands import one_line, stop_code
from dflash_lit.compilation.cache import use_cache
from dflash_lit.config import TrainConfig
from dflash_lit.decode.static_drafter import can_be_static
from dflash_lit.decoded import decoded
from dflash_lit.doctor.look import free_memory
from dflash_lit.errors import Interrupted, Pruned, UserError, stop_within
from dflash_lit.export import load_drafter, save_drafter
from dflash_lit.job_data import DataPhase, JobData
from dflash_lit.module import DrafterModule
from dflash_lit.placement.channel import Channel, ServingChannel
from dflash_lit.placement.layout import Transport, table
from dflash_lit.placement.layout import transport as transport_between
from dflash_lit.placement.own_gpu import device_seen
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.placement.strategy import ColocatedStrategy, DrafterGroupStrategy, SplitStrategy, threads_of_a_rank
from dflash_lit.placement.target_worker import serve
from dflash_lit.placement.world import World
from dflash_lit.plan import Plan
from dflash_lit.report import closing_table, load_metrics, write_report
from dflash_lit.stopping import stopping
from dflash_lit.target.frozen import FrozenTarget
from dflash_lit.trained import SUMMARY, reopen
from dflash_lit.watching.announce import announcement
from dflash_lit.watching.pace import StepClock, pace_file, read_pace, write_pace
from dflash_lit.watching.resumed import run_of_checkpoint

__all__ = ["Job", "load_target", "prepare_process", "quiet_libraries"]


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
            teacher=self.plan.objective.needs_teacher,
        )

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
            teacher=self.plan.objective.needs_teacher,
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

    def data(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """See :meth:`dflash_lit.job_data.DataPhase.make`."""
        return DataPhase(self.cfg, self.plan, self.world, self.console).make(target)

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
                self.world,
                self.device,
                target,
                layer_ids,
                teacher=self.plan.objective.needs_teacher,
                transport=self.drafter_transport,
            )
        return ColocatedStrategy(target, layer_ids, self.device, teacher=self.plan.objective.needs_teacher)

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
        summary = decoded(self.cfg, self.plan, target, drafter, data.eval_prompts)
        summary |= {
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
