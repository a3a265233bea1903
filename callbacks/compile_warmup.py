"""Compile everything before the first step, in rank order; afterwards compiling is an error."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lit.compilation.seal import Seal, graphs_made
from dflash_lit.compilation.warmup import Made, in_turn, undisturbed, warm_up
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule

__all__ = ["CompileWarmup"]


class CompileWarmup(Callback):
    """Makes the graphs of training (those of validation, too) and, where it lives in this process, of the target.

    Runs in ``on_fit_start``: devices and process groups are there, and nothing has been computed, not even the sanity check.
    Parameters, gradients, optimizer, random numbers and metrics stay as they are: losses are those of a run without it.
    Logs ``compile/recompiles`` (0, or the run ends), ``compile/warmup_s``, ``compile/graphs``, ``compile/cache_hits`` and
    ``compile/cache_misses``.

    Args:
        seal: make compiling an error from then on.
    """

    def __init__(self, seal: bool = True) -> None:
        self.seal = Seal() if seal else None
        self.made: list[Made] = []
        self.seconds = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        began = time.monotonic()
        parts = pl_module.warm_up_parts(trainer)
        if not parts:
            return

        world = getattr(trainer.strategy, "world", None)  # of a run of several processes: ranks are numbered with the targets
        who = f"rank {trainer.global_rank}" if world is None else world.layout.who(world.rank)

        def told(made: Made) -> None:
            print(f"compile, {who}: {made}", file=sys.stderr, flush=True)

        def run() -> None:
            with undisturbed(pl_module.device):
                self.made = warm_up(parts, told)
            if not graphs_made():
                raise UserError(
                    "the drafter was to be compiled, and nothing was: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
                    + (", or set drafter.compile=false" if pl_module.device.type == "cpu" else "")
                )

        in_turn(run, trainer.strategy, trainer.global_rank, trainer.world_size)
        self.seconds = time.monotonic() - began
        self._recompiles = torch.zeros((), device=pl_module.device)
        if self.seal is not None:
            self.seal.close()

    def _check(self) -> None:
        if self.seal is not None and self.seal.closed:
            self.seal.check()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.seal is None or not self.seal.closed:
            return
        self.seal.check()
        # A tensor of the device: Lightning would copy a number there each time, and wait for it.
        pl_module.log("compile/recompiles", self._recompiles)
        if self.made and self.seconds:
            totals = {
                "warmup_s": self.seconds,
                "graphs": sum(m.graphs for m in self.made),
                "cache_hits": sum(m.hits for m in self.made),
                "cache_misses": sum(m.misses for m in self.made),
            }
            for logger in trainer.loggers:
                logger.log_metrics({f"compile/{name}": float(value) for name, value in totals.items()}, step=0)
            self.seconds = 0.0

    def on_validation_batch_end(self, *_: Any) -> None:
        self._check()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._check()

    # The stance is the process's, and a sweep goes on with another job in it: opened again however the fit ends.

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.seal is not None:
            self.seal.open()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.seal is not None:
            self.seal.open()
