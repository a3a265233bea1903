"""Compute a saved step again, outside of any run, and look at every module on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_lit.attention.dense import refuse_large
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.errors import UserError
from dflash_lit.guard.probe import gradient_norms
from dflash_lit.guard.saved_step import FACTS, SavedStep
from dflash_lit.module import DrafterModule
from dflash_lit.target.ends import read_ends
from dflash_lit.target.frozen import FrozenTarget, TargetInfo

__all__ = ["Replayed", "replay"]

Batch = dict[str, Tensor]


@dataclass
class Replayed:
    """What came of it.

    Attributes:
        losses, norms: by metric's name, of all saved batches together.
        found: what is not finite, in the order in which it came to be: first what was given, then what was computed.
        rows: row ids whose loss or features are not finite.
        texts: how these rows begin.
    """

    losses: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


class _Plain(DrafterModule):
    """The training step without graphs, of which hooks see the inside, in the epoch that it was of."""

    epoch = 0

    @property
    def compiles(self) -> bool:
        return False

    @property
    def current_epoch(self) -> int:
        return self.epoch


def _describe(value: Tensor) -> str:
    nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
    return f"{nan} NaN and {infinite} infinite of {value.numel()} values"


class _Watch:
    """Notes inputs, outputs and gradients of modules that are not finite, in the order of computation."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def look(self, name: str, value: Any) -> None:
        values = value if isinstance(value, list | tuple) else [value]
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                self.found.setdefault(name, _describe(tensor))

    @contextmanager
    def over(self, module: nn.Module, prefix: str) -> Iterator[None]:
        handles = []
        for name, part in module.named_modules():
            whole = f"{prefix}.{name}" if name else prefix

            def before(_: nn.Module, inputs: Any, whole: str = whole) -> None:
                self.look(f"input of {whole}", inputs)

            def after(_: nn.Module, inputs: Any, output: Any, whole: str = whole) -> None:
                self.look(f"output of {whole}", output)
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda gradient: self.look(f"gradient at the output of {whole}", gradient))

            handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def replay(saved: SavedStep, info: TargetInfo, device: torch.device) -> Replayed:
    """Forward and backward pass of the saved batches with the saved weights.

    Args:
        info: of the target, whose embedding and head are read; all of it where the step was saved without features.

    Raises:
        UserError: if the weights do not fit, the target is another, or attention would take too much memory.
    """
    facts = saved.facts
    dtype = getattr(torch, str(facts["target"].get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{saved.folder}: step.json has target dtype {facts['target'].get('dtype')!r}, which is none")
    batches = [{name: x.to(device) for name, x in batch.items()} for each in saved.batches for batch in each]
    settings = {name: value for name, value in facts["module"].items() if name != "compile_on_cpu"}
    try:
        layers = list(DrafterConfig.from_dict(dict(settings["drafter"])).target_layer_ids)
    except UserError as error:
        raise UserError(f"{saved.folder / FACTS}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{saved.folder / FACTS}: its drafter is none ({type(error).__name__}: {error}); copy the step again"
        ) from error
    for name, least in (("seed", 0), ("anchors", 1)):
        if type(value := settings.get(name)) is not int or not least <= value < 2**32:
            raise UserError(f"{saved.folder / FACTS}: {name} cannot be {str(value)[:60]!r}; copy the step again")
    if saved.has_features:
        ends = read_ends(info, device=device, dtype=dtype)
    else:
        target = FrozenTarget.load(info, device=device, dtype=dtype)
        if target.fingerprint != settings["drafter"].get("target_fingerprint"):
            raise UserError(f"target.path={info.path!r}: is another target than that of the step; give its own by --target")
        ends = target.ends()
        for batch in batches:
            rows = (batch["input_ids"], batch["document_ids"], batch["position_ids"])
            batch["features"], batch["last_hidden"] = target.features_and_last_hidden(*rows, layers)
    try:
        module = _Plain(ends=ends, **settings)
        module.load_state_dict(saved.weights)
    except UserError as error:
        raise UserError(f"{saved.folder / FACTS}: {error}") from error
    except Exception as error:  # whatever a wrong setting leads to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{saved.folder}: its weights do not fit its settings ({reason}); copy the step again") from error
    module.to(device).train()
    module.epoch = int(facts["epoch"])
    config = module.config
    for batch in batches:
        queries = module.anchors * config.block_size
        refuse_large(
            batch["input_ids"].shape[0],
            config.num_attention_heads,
            queries,
            batch["input_ids"].shape[1],
            module.dense_limit_gib,
        )

    mixed = facts.get("precision") == "bf16-mixed"
    watch, made = _Watch(), Replayed()
    for name, parameter in module.drafter.named_parameters():
        watch.look(f"weight drafter.{name}", parameter.detach())
    watch.look("embedding of the target", ends.embed)
    watch.look("head of the target", ends.head)
    bad_rows: set[int] = set()
    sums: list[list[Tensor]] = []
    with watch.over(module.drafter, "drafter"):
        for batch in batches:
            bad_rows |= _look_at_features(watch, batch, layers)
            with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
                _, result, path = module.results(batch)
            parts = [part for part in (result, path) if part is not None]
            count = len(batch["row_ids"])
            for part in parts:
                watch.look("loss of the slots", part.nll)
                wrong = ~part.nll.view(count, -1).isfinite().all(dim=1)
                bad_rows |= set(batch["row_ids"][wrong].tolist())
            sums.append([x for part in parts for x in (part.numerator.detach(), part.denominator)])
            total = parts[0].numerator if len(parts) == 1 else parts[0].numerator + parts[1].numerator
            watch.look("loss", total.detach())
            total.backward()
    totals = [sum(column, torch.zeros((), device=device)) for column in zip(*sums, strict=True)]
    for name, parameters, numerator, denominator in zip(
        ("train/loss", "train/path_loss"), module._parts(), totals[0::2], totals[1::2], strict=False
    ):
        denominator = torch.where(denominator == 0, 1.0, denominator)
        made.losses[name] = float(numerator / denominator)
        gradients = [parameter.grad / denominator for parameter in parameters if parameter.grad is not None]
        made.norms[name.replace("loss", "gradient_norm")] = float(gradient_norms(gradients).norm())
    for name, parameter in module.named_parameters():
        watch.look(f"gradient of {name}", parameter.grad)
    made.found = [f"{name}: {what}" for name, what in watch.found.items()]
    made.rows = sorted(bad_rows)
    made.texts = _texts(info, batches, bad_rows)
    return made


def _look_at_features(watch: _Watch, batch: Batch, layers: list[int]) -> set[int]:
    """As the guard does, padding left out; the rows that are not finite."""
    bad: set[int] = set()
    real = (batch["document_ids"] >= 0)[..., None]
    parts = {f"features of target layer {n}": x for n, x in zip(layers, batch["features"].chunk(len(layers), -1), strict=True)}
    if "last_hidden" in batch:
        parts["last hidden states of the target"] = batch["last_hidden"]
    for name, states in parts.items():
        states = torch.where(real, states, 0.0)
        watch.look(name, states)
        bad |= set(batch["row_ids"][~states.flatten(1).isfinite().all(dim=1)].tolist())
    return bad


def _texts(info: TargetInfo, batches: list[Batch], rows: set[int]) -> dict[int, str]:
    found = {}
    for batch in batches:
        for row, ids in zip(batch["row_ids"].tolist(), batch["input_ids"], strict=True):
            if row in rows:
                found[row] = str(info.tokenizer.decode(ids[:24].tolist()))
    return found
