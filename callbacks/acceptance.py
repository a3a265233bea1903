"""Real decoding during training: the only measurement that cannot be fooled by a leak or a shifted label."""

from __future__ import annotations

import logging
import math

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.decode.acceptance import measure
from dflash_lit.module import DrafterModule

__all__ = ["Acceptance"]

_log = logging.getLogger(__name__)


class Acceptance(Callback):
    """Decode a few held-out prompts greedily at the start and after every validation; log ``acceptance/tau_greedy``.

    Prompts come from the data module (``eval_prompts``), the target from the placement (``strategy.target``). Without prompts,
    as for a target that cannot decode with drafts, nothing is logged.

    Args:
        prompts: how many.
        max_new_tokens: tokens each.
        suspicious: warn when decoding accepts less than this share of what the teacher-forced ``val/chain_eal`` promises:
            high accuracy with short decoded blocks means that training saw something that serving does not.
    """

    def __init__(self, prompts: int = 4, max_new_tokens: int = 64, suspicious: float = 0.6) -> None:
        self.prompts, self.max_new_tokens, self.suspicious = prompts, max_new_tokens, suspicious

    def _tau(self, trainer: L.Trainer, module: DrafterModule) -> float:
        """Measured by rank 0 for all: its drafter is everybody's."""
        tau = math.nan
        if trainer.is_global_zero:
            tau = measure(
                trainer.strategy.target,  # type: ignore[attr-defined]
                module.drafter,
                trainer.datamodule.eval_prompts[: self.prompts],  # type: ignore[attr-defined]
                max_new_tokens=self.max_new_tokens,
                plain=False,
            ).tau
        return trainer.strategy.broadcast(tau)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        if not trainer.datamodule.eval_prompts:  # type: ignore[attr-defined]
            return
        tau = self._tau(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics({"acceptance/tau_greedy": tau}, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.datamodule.eval_prompts:  # type: ignore[attr-defined]
            return
        assert isinstance(pl_module, DrafterModule)
        tau = self._tau(trainer, pl_module)
        pl_module.log("acceptance/tau_greedy", tau)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tau, promised = trainer.callback_metrics.get("acceptance/tau_greedy"), trainer.callback_metrics.get("val/chain_eal")
        if tau is not None and promised is not None and float(tau) < self.suspicious * float(promised):
            _log.warning(
                "decoding yields %.2f tokens a pass where teacher-forced validation promises %.2f: look for a leak or shifted labels",
                float(tau),
                float(promised),
            )
