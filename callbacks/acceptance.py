"""Real decoding during training: the only measurement that cannot be fooled by a leak or a shifted label."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.decode.acceptance import MeasuredTarget, measure, measure_together
from dflash_lit.errors import UserError
from dflash_lit.module import DrafterModule
from dflash_lit.stopping import stopping

__all__ = ["Acceptance"]

_log = logging.getLogger(__name__)


class Acceptance(Callback):
    """Decode a few held-out prompts greedily; log ``acceptance/tau_greedy`` of chains and ``val/tau@BUDGET`` of draft trees.

    Chains before the first step and after every validation, trees after every validation: all prompts of a budget in one batch. Any of
    these can be the ``monitor`` of a checkpoint callback. Nothing is compiled for it.

    Prompts come from the data module (``eval_prompts``), the target from the placement (``strategy.target``). Without prompts,
    as for a target that cannot decode with drafts, nothing is logged; nor are trees for a target that cannot verify them.

    Args:
        prompts: how many.
        max_new_tokens: tokens each.
        suspicious: warn when decoding accepts less than this share of what the teacher-forced ``val/chain_eal`` promises:
            high accuracy with short decoded blocks means that training saw something that serving does not.
        budgets: nodes of the draft trees, one budget or several; 0 or none for no trees.

    Raises:
        UserError: for budgets that are negative, no whole numbers, or there twice.
    """

    def __init__(
        self,
        prompts: int = 4,
        max_new_tokens: int = 64,
        suspicious: float = 0.6,
        budgets: int | Sequence[int] | None = (64,),
    ) -> None:
        self.prompts, self.max_new_tokens, self.suspicious = prompts, max_new_tokens, suspicious
        given = [budgets] if isinstance(budgets, int) else list(budgets or ())
        if given == [0]:
            given = []
        if any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in given) or len(set(given)) < len(given):
            raise UserError(f"budgets={given}: give different whole numbers from 1 up, or 0 for no trees")
        self.budgets = given

    def _taus(self, trainer: L.Trainer, module: DrafterModule, budgets: Sequence[int]) -> dict[str, float]:
        """Measured by rank 0 for all: its drafter is everybody's."""
        taus: dict[str, float] = {}
        if trainer.is_global_zero:
            target: MeasuredTarget = trainer.strategy.target  # type: ignore[attr-defined]
            prompts = trainer.datamodule.eval_prompts[: self.prompts]  # type: ignore[attr-defined]
            length = self.max_new_tokens
            if stopping.signal:  # nobody goes by them
                return trainer.strategy.broadcast(taus)
            taus["acceptance/tau_greedy"] = measure(target, module.drafter, prompts, max_new_tokens=length, plain=False).tau
            for budget in budgets if target.no_trees is None else ():
                if stopping.signal:
                    break
                got = measure_together(target, module.drafter, prompts, budget, max_new_tokens=length)
                taus[f"val/tau@{budget}"] = got.tau
        return trainer.strategy.broadcast(taus)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a monitor that would never be logged: Lightning says so only after the first validation.

        Raises:
            UserError: naming it and the cure.
        """
        monitors = [str(getattr(callback, "monitor", None)) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        for monitor in monitors:
            if not monitor.startswith("val/tau@"):
                continue
            instead = "monitor val/tree_eal@64 instead"
            if not trainer.datamodule.eval_prompts:  # type: ignore[attr-defined]
                raise UserError(f"monitor={monitor}: nothing is decoded for this target; {instead}")
            if reason := trainer.strategy.target.no_trees:  # type: ignore[attr-defined]
                raise UserError(f"monitor={monitor}: {reason}; {instead}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        # A run that goes on has been measured: it is to log what it would have logged uninterrupted.
        if trainer.global_step or not trainer.datamodule.eval_prompts:  # type: ignore[attr-defined]
            return
        taus = self._taus(trainer, pl_module, ())
        for logger in trainer.loggers:
            logger.log_metrics(taus, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.datamodule.eval_prompts:  # type: ignore[attr-defined]
            return
        assert isinstance(pl_module, DrafterModule)
        for name, tau in self._taus(trainer, pl_module, self.budgets).items():
            pl_module.log(name, tau)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tau, promised = trainer.callback_metrics.get("acceptance/tau_greedy"), trainer.callback_metrics.get("val/chain_eal")
        if tau is not None and promised is not None and float(tau) < self.suspicious * float(promised):
            _log.warning(
                "decoding yields %.2f tokens a pass where teacher-forced validation promises %.2f: look for a leak or shifted labels",
                float(tau),
                float(promised),
            )
