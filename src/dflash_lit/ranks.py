"""One run as one or several processes: physical rank 0 begins it, the others join it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dflash_lit.commands import exits_on_user_error, run_command
from dflash_lit.config import TrainConfig, register
from dflash_lit.errors import Interrupted, UserError
from dflash_lit.job import Job, quiet_libraries
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.own_gpu import see_own
from dflash_lit.placement.started import Started, how_started
from dflash_lit.placement.world import World, follow, lead
from dflash_lit.plan import Plan, make_plan
from dflash_lit.requeue import checkpoint_of, note_folder, requeue, wanted
from dflash_lit.stopping import stopping
from dflash_lit.sweeps.end import failed_jobs
from dflash_lit.sweeps.outcome import run_job
from dflash_lit.sweeps.submitted import refused
from dflash_lit.trained import has_ended

__all__ = ["begin", "join", "launch"]

Train = Callable[[TrainConfig, Plan, "World | None"], "float | None"]
"""What every drafter does; the result counts on rank 0."""

_NO_RUN = "no run; exit code "
"""Stands where the others expect a config."""

_TELL_S = 25.0
"""For the others to come and hear that."""

_led: list[Layout] = []
"""Runs that this process has told others about."""


def launch(main: Callable[[], object], train: Train, script: str) -> int:
    """The whole of a process, to its exit code. Rank 0 reads the command line, every other one is told what it is.

    Args:
        main: reads the command line and calls :func:`begin`.
        train, script: see :func:`begin`.
    """
    with stopping.listening() if _leads() else contextlib.nullcontext():
        return run_command(lambda: _take_part(main, train, script))


def _leads() -> bool:
    try:
        return how_started().leads
    except UserError:  # said in a moment
        return False


def _take_part(main: Callable[[], object], train: Train, script: str) -> int:
    started = how_started()
    if started.uneven and not started.leads:
        return 2  # rank 0 says why
    started.check_alike()
    if started.by not in ("hand", "us"):  # the former computes on the first GPU, the latter was told
        see_own(started.local_rank)
    return _lead(main) if started.leads else join(train, script)


def _lead(main: Callable[[], object]) -> int:
    """Run ``main``. Where it ends before a run begins (wrong input, ``--cfg job``), so do those whom torchrun or SLURM started.

    Returns:
        the exit code: 1 after a sweep some of whose jobs failed, else 0.
    """
    code = 2
    try:
        main()
        code = 1 if failed_jobs() else 0
    except Exception as error:
        if (why := refused(error)) is not None:
            raise UserError(why) from error
        raise
    finally:
        started = how_started()
        if started.others_wait and not _led:
            # Where one has ended torchrun ends the others; this one has yet to say why.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # A run of all of them that is over at once. What has ended this process is not to be hidden by an error here.
            with contextlib.suppress(Exception), _lead_run(started.everyone(), started, f"{_NO_RUN}{code}", "", _TELL_S):
                pass
    return code


def _lead_run(
    layout: Layout,
    started: Started,
    text: str,
    script: str,
    timeout_s: float,
    interface: str | None = None,
    tolerate: int = 0,
) -> World:
    _led.append(layout)
    command = [sys.executable, script]
    return lead(layout, started, text, command=command, timeout_s=timeout_s, interface=interface, tolerate=tolerate)


def begin(composed: DictConfig, train: Train, script: str) -> float | None:
    """Check the config, start the other processes if there are any, and train.

    As a job of a sweep it raises nothing but what is meant to end the whole sweep; ``job.json`` of its folder says what it came to.

    Args:
        script: run by the other processes of this host; it must call :func:`launch` as this process did.
    """
    register()  # a launcher's process has not run the script from its beginning
    with stopping.listening():
        try:
            if _is_sweep():
                return run_job(lambda: _begin(composed, train, script))
            with exits_on_user_error():
                return _or_again(composed, lambda: _begin(composed, train, script))
        finally:
            stopping.end()


def _or_again(composed: DictConfig, run: Callable[[], float | None]) -> float | None:
    """A run as a batch job of SLURM, which may start it again."""
    folder = Path(composed.paths.output_dir)
    if (checkpoint := checkpoint_of(folder)) is not None:
        if has_ended(folder):
            print(f"{folder}: this run has ended before SLURM started the job again; nothing is left to do", file=sys.stderr)
            return None
        composed.ckpt_path = checkpoint
        print(f"started again by SLURM; going on from ckpt_path={checkpoint}", file=sys.stderr)
    note_folder(folder, composed.trainer.requeue)
    try:
        return run()
    except Interrupted as stop:
        if stop.signal == signal.SIGUSR1 and wanted(composed.trainer.requeue):
            try:
                stop.requeued = requeue()
            except UserError as error:
                saved = f"ckpt_path={stop.checkpoint} goes on from here; " if stop.checkpoint else ""
                raise UserError(f"{saved}{error}") from None
        raise


def _begin(composed: DictConfig, train: Train, script: str) -> float | None:
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, TrainConfig)
    quiet_libraries()
    started, plan = how_started(), make_plan(cfg)
    started.check(plan.layout)
    settings = cfg.trainer
    stopping.begin(limit_s=settings.save_within_s, max_time=settings.max_time, checkpoint=cfg.ckpt_path, per_job=_is_sweep())
    if plan.layout.world == 1:
        return train(cfg, plan, None)
    if started.by == "torchrun" and cfg.placement.tolerate:
        raise UserError(
            f"placement.tolerate={cfg.placement.tolerate}: torchrun ends all processes when one has ended; start the run by hand or by SLURM"
        )
    if _is_sweep() and plan.layout.hosts > 1:
        raise UserError(f"placement.hosts={plan.layout.hosts}: each job of a sweep starts its own processes, on one host")
    told = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    if cfg.ckpt_path is not None:
        told.ckpt_path = str(Path(cfg.ckpt_path).absolute())  # the others may stand in another folder
    text = OmegaConf.to_yaml(told)
    placement = cfg.placement
    with _lead_run(plan.layout, started, text, script, placement.timeout_s, placement.interface, placement.tolerate) as world:
        return train(cfg, plan, world)


def _is_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def join(train: Train, script: str) -> int:
    """Take part as what the layout says this process is; its exit code."""
    world, text = follow(how_started(), [sys.executable, script])
    with exits_on_user_error(quiet=True), contextlib.suppress(Interrupted), world:  # rank 0 says what has happened
        if text.startswith(_NO_RUN):
            return int(text.removeprefix(_NO_RUN))
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.create(text)))
        assert isinstance(cfg, TrainConfig)
        quiet_libraries()
        plan = make_plan(cfg, checkpoint=False)
        if world.role is Role.DRAFTER:
            train(cfg, plan, world)
        else:
            with Job(cfg, plan, world) as job:
                job.serve()
    return 0
