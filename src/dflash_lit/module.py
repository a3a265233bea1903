"""The training step as a LightningModule: batch with features -> loss and metrics. Knows no placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import get_cosine_schedule_with_warmup

from dflash_lit.attention.block_mask import block_mask
from dflash_lit.attention.dense import block_attention, dense_block_mask, refuse_large
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.blocks import Blocks, draw_anchors, make_blocks, row_noise, slot_tokens
from dflash_lit.checkpoints.contract import CONTRACT, compare, settings
from dflash_lit.checkpoints.form import check_loops, check_schedules, check_tensors
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.decode.chain import head_logits
from dflash_lit.decode.lattice import make_lattice
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.drafter.noise import CompiledNoise, add_noise, noise_keys
from dflash_lit.drafter.path_head import PathHead
from dflash_lit.guard.probe import Probe, gradient_norms
from dflash_lit.objective.config import Objective
from dflash_lit.objective.head import HeadResult, fused_available, head_loss, tree_lengths
from dflash_lit.objective.metrics import Ratios, accepted_lengths
from dflash_lit.objective.path import path_lengths
from dflash_lit.optimizer import make_optimizer
from dflash_lit.target.frozen import TargetEnds

__all__ = ["DrafterModule"]

Batch = dict[str, Tensor]
_VALIDATION_EPOCH = -1  # validation anchors are always drawn as of this "epoch", so that runs and steps compare
_LATTICE_BLOCKS = 64  # whose draft trees are grown at a time


class DrafterModule(L.LightningModule):
    """Trains a drafter on token rows with features.

    Batches hold ``input_ids`` int64, ``document_ids`` and ``position_ids`` int32, ``supervised`` bool (all [R, S]),
    ``row_ids`` int64 [R] and ``features`` [R, S, n_ids * H]; for soft labels ``last_hidden`` [R, S, H], too.

    The loss is the sum of weighted nll over the sum of weights of *all* ranks and micro-batches of an optimizer step. The
    weights can depend on the drafter (D-PACE), so their sum is known only after the last micro-batch: backward runs on the
    plain sum, and the gradients are divided once, just before clipping.

    A path head has a loss of its own, the same with the right tokens before each slot known, and nothing of it reaches the drafter,
    which stays the very one it would be without. Lengths are validated as it decodes, along paths.

    Args:
        drafter: :meth:`DrafterConfig.to_dict`.
        ends: embedding and head of the target (not saved).
        objective: :meth:`Objective.to_dict`.
        anchors: blocks a row.
        seed: with epoch and row id, decides the anchors.
        optimizer: "adamw" or "muon".
        lr, betas, weight_decay: the optimizer's.
        warmup: share of the steps until the learning rate is full; then a cosine to zero.
        tree_budgets: budgets of ``val/tree_eal@...``.
        feature_noise: amount of uniform noise on the features while training (:mod:`dflash_lit.drafter.noise`); what soft labels are
            made of has none.
        dense_limit_gib: refuse dense attention over this size.
        compile_on_cpu: run the drafter through its graphs on a CPU, too (a GPU always does).
        tokenizer: digest of the target's, to be found in checkpoints; empty: unknown.

    Attributes:
        probe: is shown every step, and decides whether its update happens; None: all of them do.
    """

    def __init__(
        self,
        drafter: dict[str, Any],
        ends: TargetEnds,
        objective: dict[str, Any] | None = None,
        *,
        anchors: int = 64,
        seed: int = 0,
        optimizer: str = "adamw",
        lr: float = 6e-4,
        betas: Sequence[float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup: float = 0.04,
        tree_budgets: Sequence[int] = (16, 64, 256),
        feature_noise: float = 0.0,
        dense_limit_gib: float = 4.0,
        compile_on_cpu: bool = False,
        tokenizer: str = "",
    ) -> None:
        super().__init__()
        objective = Objective(**(objective or {})).to_dict()
        betas, tree_budgets = list(betas), list(tree_budgets)
        # Plain containers only: a checkpoint with an OmegaConf node in it does not load with weights_only=True.
        # Loggers get the whole config from the job, in which these have other names.
        self.save_hyperparameters(ignore=["ends"], logger=False)
        self.config = DrafterConfig.from_dict(drafter)
        self.objective = Objective(**objective)
        self.drafter = Drafter(self.config)
        self._compiled = CompiledDrafter(self.drafter)  # nothing is compiled before the first call
        self._compiled_noise = CompiledNoise()
        self._compile_on_cpu = compile_on_cpu
        self.register_buffer("embed", ends.embed.detach(), persistent=False)
        if ends.head is not ends.embed:
            self.register_buffer("untied_head", ends.head.detach(), persistent=False)
        self.anchors, self.seed, self.tree_budgets = anchors, seed, tree_budgets
        self.optimizer_settings = {"lr": lr, "betas": (betas[0], betas[1]), "weight_decay": weight_decay}
        self.optimizer_kind = optimizer
        self.warmup, self.dense_limit_gib, self.feature_noise = warmup, dense_limit_gib, feature_noise

        slots = self.config.block_size - 1
        self.val_means = Ratios(2 + len(tree_budgets))  # loss, chain length, tree lengths
        self.val_path_loss = Ratios(1)
        self.val_accuracy = Ratios(slots)
        self.val_survival = Ratios(slots)
        self._window: Tensor | None = None
        self._losses: list[Tensor] = []
        self._floor: Tensor | None = None
        self.probe: Probe | None = None
        self.floor_ratio: Tensor
        if self.objective.top:
            # Of the step before; part of the checkpoint, so that a resumed run goes on with the same weights.
            self.register_buffer("floor_ratio", torch.ones(()))

    @property
    def head(self) -> Tensor:
        """[V, H] the target's output weights."""
        head = getattr(self, "untied_head", self.embed)
        assert isinstance(head, Tensor)
        return head

    # -- forward

    def blocks(self, batch: Batch, epoch: int) -> Blocks:
        """Draw this epoch's anchors of the batch's rows and cut their blocks."""
        tokens = batch["input_ids"].shape[1]
        noise = row_noise(self.seed, epoch, batch["row_ids"], tokens + 1)
        anchors, valid = draw_anchors(batch["supervised"], batch["document_ids"], self.anchors, noise)
        return make_blocks(
            batch["input_ids"],
            batch["document_ids"],
            batch["position_ids"],
            batch["supervised"],
            anchors,
            valid,
            block_size=self.config.block_size,
            mask_token_id=self.config.mask_token_id,
        )

    def forward(self, batch: Batch, blocks: Blocks) -> Tensor:
        """Hidden states of slots 1..B-1: [R * A, B - 1, H]."""
        layout = BlockLayout(
            blocks.anchors, blocks.valid, batch["document_ids"], self.config.block_size, causal=self.config.causal
        )
        # Under autocast the residual stream starts in its dtype: in fp32 it would take twice the memory and bandwidth.
        kind = self.device.type
        mixed = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else self.drafter.fc.weight.dtype
        features = batch["features"].detach().to(dtype).contiguous()  # whatever the placement made them from
        if self.training and self.feature_noise:
            keys = noise_keys(self.seed, self.current_epoch, batch["row_ids"], features.shape[1])
            features = (self._compiled_noise if self.compiles else add_noise)(features, keys, self.feature_noise)
        noise = F.embedding(blocks.noise_ids, self.embed).to(dtype)  # type: ignore[arg-type]
        positions = batch["position_ids"]
        if kind != "cuda":
            rows, tokens = batch["input_ids"].shape
            refuse_large(rows, self.config.num_attention_heads, layout.queries, tokens, self.dense_limit_gib)
        if self.compiles:
            mask = self._each_layer(block_mask if kind == "cuda" else dense_block_mask, layout)
            return self._compiled(features, noise, positions, blocks.positions, mask)
        context = self.drafter.context(features, positions)
        hidden = self.drafter.draft(noise, blocks.positions, context, self._each_layer(block_attention, layout))
        return hidden.view(layout.rows * self.anchors, self.config.block_size, -1)[:, 1:]

    def _each_layer(self, make: Callable[[BlockLayout], Any], layout: BlockLayout) -> Any:
        """``make(layout)`` for all layers; a list of one for each where some slide."""
        full = make(layout)
        if not self.config.slides:
            return full
        return self.config.each_layer(full, make(replace(layout, window=self.config.sliding_window)))

    def tell(self, hidden: Tensor, blocks: Blocks) -> Tensor:
        """The ``hidden`` of :meth:`forward`, detached, with the right tokens before each slot known to the path head."""
        head = self.drafter.path_head
        assert head is not None
        before = torch.cat([self._anchor_tokens(blocks)[:, None], blocks.labels.flatten(0, 1)[:, :-1]], dim=1)
        previous = F.embedding(before, self.embed).to(hidden.dtype)  # type: ignore[arg-type]
        hidden = hidden.detach()
        return self._compiled.condition(hidden, previous) if self.compiles else head(hidden, previous)

    def _anchor_tokens(self, blocks: Blocks) -> Tensor:
        """int64 [R * A]"""
        return blocks.noise_ids.view(-1, self.config.block_size)[:, 0]

    @property
    def compiles(self) -> bool:
        """Whether the drafter runs through its graphs: always on a GPU, where attention exists only compiled."""
        return self._compile_on_cpu or self.device.type == "cuda"

    def loss(self, batch: Batch, blocks: Blocks, hidden: Tensor, *, top: int = 0) -> HeadResult:
        """The objective's sums for :meth:`forward`'s ``hidden``, through the target's head.

        Args:
            top: log-probabilities to keep of each slot, for the lengths of draft trees.
        """
        objective = self.objective
        options: dict[str, Any] = {"top": max(top, objective.top), "chunk_slots": objective.chunk_slots}
        if objective.needs_teacher:
            options |= {"teacher": self._teacher(batch["last_hidden"], blocks), "temperature": objective.temperature}
        weigh = partial(objective.weigh, floor_ratio=self.floor_ratio) if objective.top else objective.weigh
        arguments = (hidden, self.head, blocks.labels.flatten(0, 1), blocks.label_ok.flatten(0, 1), weigh)
        if fused_available(hidden.device):
            # Imported where it is needed: a machine without Triton trains too.
            from dflash_lit.objective.fused_head import fused_head_loss

            # What is measured is measured on all slots.
            capacity = self._capacity(hidden) if hidden.requires_grad else None
            return fused_head_loss(*arguments, capacity=capacity, **options)
        return head_loss(*arguments, use_reentrant=objective.use_reentrant, **options)

    def _measured(self, batch: Batch, blocks: Blocks) -> tuple[HeadResult, HeadResult | None, Tensor, Tensor]:
        """The validation pass, through the graphs of training: without grad mode it would need more of its own.

        Returns:
            the loss's sums, without and with a path head; accepted lengths int64 [R * A] of the chain and
            [R * A, len(tree_budgets)] of trees.
        """
        head = self.drafter.path_head
        with torch.set_grad_enabled(self.compiles and not torch.is_inference_mode_enabled()):
            hidden = self(batch, blocks)
            told = None if head is None else self.tell(hidden, blocks).detach()
        hidden = hidden.detach()  # and what was kept for a backward pass is freed
        result = self.loss(batch, blocks, hidden, top=max(self.tree_budgets) if head is None else 0)
        if head is None or told is None:
            return result, None, accepted_lengths(result.hit), tree_lengths(result, self.tree_budgets)
        # A few blocks at a time: each has some hundred prefixes with all their continuations.
        parts = zip(*(x.split(_LATTICE_BLOCKS) for x in self._of_blocks(hidden, blocks)), strict=True)
        lengths = [self._path_lengths(head, *part) for part in parts]
        chains, trees = zip(*lengths, strict=True)
        return result, self.loss(batch, blocks, told), torch.cat(chains), torch.cat(trees)

    def _of_blocks(self, hidden: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return hidden, self._anchor_tokens(blocks), blocks.labels.flatten(0, 1), blocks.label_ok.flatten(0, 1)

    @torch.no_grad()
    def _path_lengths(
        self, head: PathHead, hidden: Tensor, anchors: Tensor, labels: Tensor, label_ok: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.embed, Tensor)
        ends = TargetEnds(self.embed, self.head)
        lattice = make_lattice(head, ends, anchors, hidden, head_logits(ends, hidden), self.config.path_candidates)
        return path_lengths(lattice, labels, label_ok, self.tree_budgets)

    def _teacher(self, last_hidden: Tensor, blocks: Blocks) -> Tensor:
        """[R * A, B - 1, H] what the target's head saw when it predicted the tokens of slots 1..B-1."""
        before = slot_tokens(blocks.anchors, self.config.block_size)[..., :-1].clamp(max=last_hidden.shape[1] - 1)
        rows = torch.arange(before.shape[0], device=before.device)[:, None, None]
        return last_hidden[rows, before].flatten(0, 1)

    def _capacity(self, hidden: Tensor) -> int | None:
        share = self.objective.capacity
        return None if share == 1 else max(round(share * hidden.shape[0] * hidden.shape[1]), 1)

    # -- compilation

    def warm_up_parts(self, trainer: L.Trainer) -> dict[str, Callable[[], object]]:
        """What a fit of ``trainer`` runs compiled, by name: functions over a representative batch that leave no trace.

        Empty where nothing is compiled. The batch has the shapes of every batch of the run: rows are packed to one length, and
        incomplete batches are filled up or left out.
        """
        if not self.compiles:
            return {}
        strategy, precision = trainer.strategy, trainer.precision_plugin
        rows = strategy.batch_to_device(trainer.datamodule.example_batch(), self.device)  # type: ignore[attr-defined]
        batch: Batch = {}

        def features() -> None:
            # The target's graphs, where it is in this process; made first, as the others need its result.
            batch.update(strategy.with_features(rows))  # type: ignore[attr-defined]

        def train() -> None:
            with self._mode(True), precision.train_step_context():
                blocks = self.blocks(batch, 0)
                outputs = [self(batch, blocks)]
                if self.drafter.path_head is not None:
                    outputs.append(self.tell(outputs[0], blocks))
                leaves = [output.detach().requires_grad_() for output in outputs]
                numerators = [self.loss(batch, blocks, leaf).numerator for leaf in leaves]
            (torch.stack(numerators).sum() * self._unit(batch)).backward()  # ends at the leaves
            # Not backward(): that would fill .grad and wake up what waits for gradients, a data-parallel reducer for one.
            torch.autograd.grad(outputs, list(self.drafter.parameters()), [leaf.grad for leaf in leaves])

        def validate() -> None:
            # The Trainer is told not to use inference mode, in which tensors are of another kind and need other graphs.
            with torch.no_grad(), self._mode(False), precision.val_step_context():
                blocks = self.blocks(batch, _VALIDATION_EPOCH)
                self._measured(batch, blocks)

        return {"features": features, "train": train, "validation": validate}

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """Training or evaluation mode inside the block."""
        before = self.training
        self.train(training)
        try:
            yield
        finally:
            self.train(before)

    # -- training

    def results(self, batch: Batch) -> tuple[Blocks, HeadResult, HeadResult | None]:
        """The forward pass of a training step: blocks, the loss's sums, and those of a path head if there is one."""
        blocks = self.blocks(batch, self.current_epoch)
        hidden = self(batch, blocks)
        result = self.loss(batch, blocks, hidden)
        # A path head learns from the same blocks; without one there is nothing to add.
        return blocks, result, None if self.drafter.path_head is None else self.loss(batch, blocks, self.tell(hidden, blocks))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        blocks, result, path = self.results(batch)
        if self.probe is not None:
            self.probe.rows(batch, result.nll if path is None else result.nll + path.nll)
        # Blocks with a label in every slot; one that was left out (objective.capacity) is none.
        complete = (blocks.label_ok.flatten(0, 1) & (result.rank < self.head.shape[0])).all(dim=-1)
        length = ((accepted_lengths(result.hit) + 1) * complete).sum()
        counts = [length.float(), complete.sum().float(), result.dropped.float()]
        losses = [x for r in (result, path) if r is not None for x in (r.numerator.detach(), r.denominator)]
        sums = torch.stack([*counts, *losses, *self._weight_sums(result, blocks)])
        self._window = sums if self._window is None else self._window + sums
        # Lightning divides by the accumulation; this sum must not be. The unit keeps gradients of a usual size until
        # on_before_optimizer_step puts the true denominator in.
        numerator = result.numerator if path is None else result.numerator + path.numerator
        return numerator * (self.trainer.accumulate_grad_batches * self._unit(batch))

    def _weight_sums(self, result: HeadResult, blocks: Blocks) -> list[Tensor]:
        """Those of tree survival's weights and of its floor's; none for weights that are not mixed."""
        if not self.objective.top:
            return []
        counted = blocks.label_ok.flatten(0, 1) & (result.rank < self.head.shape[0])
        return [weights.sum() for weights in self.objective.parts(torch.exp(-result.nll), counted, result.top)]

    def _unit(self, batch: Batch) -> float:
        return 1.0 / (batch["input_ids"].shape[0] * self.anchors)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._gradient_unit = self._unit(batch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turn summed gradients into those of the global mean, and log it."""
        assert self._window is not None, "an optimizer step without a training step"
        # The mean over ranks times their number is the sum; the gradients were averaged over ranks, too.
        window = self._window if self.probe is None else torch.cat([self._window, self.probe.bad_rows()])
        total = self.trainer.strategy.reduce(window, reduce_op="sum")
        assert isinstance(total, Tensor)
        self._window = None
        self._losses = []
        if self.probe is not None:
            total, self._bad_rows = total[:-1], total[-1:]
        parts = self._parts()
        losses = total[3 : 3 + 2 * len(parts)].unflatten(0, (-1, 2))
        for name, parameters, (numerator, denominator) in zip(("train/loss", "train/path_loss"), parts, losses, strict=False):
            # No weight at all: numerator and gradients are zero, and stay so.
            denominator = torch.where(denominator == 0, 1.0, denominator)  # and NaN stays
            factor = self.trainer.world_size / (denominator * self._gradient_unit)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            self._losses.append(numerator / denominator)
            self.log(name, self._losses[-1])
        if self.objective.top:
            tree, floor = total[-2:]
            self._floor = self.objective.floor_ratio(tree, floor)
        self.log("train/chain_eal", total[0] / total[1].clamp(min=1))
        if self.objective.capacity < 1:
            self.log("train/dropped_labels", total[2])

    def _parts(self) -> list[list[Parameter]]:
        """Parameters of the drafter and, if there is one, of its path head: each part has a loss of its own."""
        head = self.drafter.path_head
        own = [] if head is None else list(head.parameters())
        known = {id(parameter) for parameter in own}
        rest = [parameter for parameter in self.drafter.parameters() if id(parameter) not in known]
        return [rest, own] if own else [rest]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm over all gradients of a part, without a wait for the device; logs the norm before.

        The probe then says whether the step is one: the optimizer reads that from ``found_inf``, as it would of a gradient scaler.

        Lightning's own refuses a fused optimizer under mixed precision, because a fused step could undo the loss scale of
        fp16 itself. There is no scale in bf16.
        """
        every, totals = [], []
        for name, parameters in zip(("train/gradient_norm", "train/path_gradient_norm"), self._parts(), strict=False):
            norms = gradient_norms([p.grad for p in parameters if p.grad is not None])
            total = torch.linalg.vector_norm(norms)
            if gradient_clip_val is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, total)
            self.log(name, total)
            every.append(norms)
            totals.append(total)
        floor = self._floor
        if self.probe is not None:
            skip = self.probe.decide(self.trainer.global_step + 1, self._bad_rows, self._losses, totals, torch.cat(every))
            optimizer.found_inf = skip  # type: ignore[attr-defined]
            floor = None if floor is None else torch.where(skip.bool(), self.floor_ratio, floor)
        if floor is not None:
            self.floor_ratio.copy_(floor)

    def probed(self) -> tuple[tuple[str, ...], dict[str, Parameter]]:
        """Names of the losses, and the parameters by name in the order in which :class:`Probe` gets their gradients."""
        parts = self._parts()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return ("train/loss", "train/path_loss")[: len(parts)], {names[id(p)]: p for part in parts for p in part}

    def make_optimizer(self) -> Optimizer:
        """Over the drafter's parameters, with the settings given."""
        return make_optimizer(self.drafter, self.optimizer_kind, **self.optimizer_settings)  # type: ignore[arg-type]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = self.make_optimizer()
        schedule = get_cosine_schedule_with_warmup(optimizer, round(self.warmup * steps), steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "train/learning_rate"},
        }

    # -- validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        blocks = self.blocks(batch, _VALIDATION_EPOCH)
        result, path, chain, trees = self._measured(batch, blocks)
        # Lengths are measured on blocks with every label, so that a document's end does not look like a rejection. The
        # others are kept in the arrays (static shapes) and counted as zero.
        complete = blocks.label_ok.flatten(0, 1).all(dim=-1)
        count = complete.sum()
        lengths = ((torch.cat([chain[:, None], trees], dim=1) + 1) * complete[:, None]).sum(dim=0)
        self.val_means.update(
            torch.cat([result.numerator[None], lengths]), torch.cat([result.denominator[None], count.expand_as(lengths)])
        )
        if path is not None:
            self.val_path_loss.update(path.numerator[None], path.denominator[None])
            result = path
        self.val_accuracy.update((result.hit & complete[:, None]).sum(dim=0), count)
        self.val_survival.update((result.hit.long().cumprod(dim=1) * complete[:, None]).sum(dim=0), count)

    def on_validation_epoch_end(self) -> None:
        means = self.val_means.compute()
        self.log("val/loss", means[0])
        if self.drafter.path_head is not None:
            self.log("val/path_loss", self.val_path_loss.compute().reshape(()))
            self.val_path_loss.reset()
        self.log("val/chain_eal", means[1])
        for budget, value in zip(self.tree_budgets, means[2:], strict=True):
            self.log(f"val/tree_eal@{budget}", value)
        for name, metric in (("accuracy", self.val_accuracy), ("acceptance", self.val_survival)):
            for slot, value in enumerate(metric.compute().reshape(-1), start=1):
                self.log(f"val/{name}_slot_{slot}", value)
        for metric in (self.val_means, self.val_accuracy, self.val_survival):
            metric.reset()

    # -- checkpoint

    def contract(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint of this one must have in common with it."""
        try:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
        except RuntimeError:  # not attached to a Trainer
            data = None
        return {**settings(self.hparams), **(data.contract() if isinstance(data, RowDataModule) else {})}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONTRACT] = self.contract()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume a checkpoint of another drafter, target, objective or optimizer, or of other data.

        Raises:
            UserError: naming every field that differs, and both values; or the entry that cannot be one of such a run.
        """
        compare(checkpoint, self.contract())
        try:
            loop = self.trainer.fit_loop
        except RuntimeError:  # not attached to a Trainer, which takes up the rest
            return
        # Whether they are finite was seen when the run was planned.
        check_tensors(checkpoint.get("state_dict"), self.state_dict(), "state_dict", finite=False)
        check_loops(checkpoint, loop.state_dict())
        check_schedules(checkpoint.get("lr_schedulers"), len(self.make_optimizer().param_groups))
