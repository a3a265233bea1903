"""A step's health in a few numbers, made and acted upon on the device: nothing here waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "Probe", "Seen", "gradient_norms", "row_sums"]

Batch = dict[str, Tensor]


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each, fp32 [n]; the norm of these is to the last bit that of ``torch.nn.utils.get_total_norm``."""
    return torch.stack(torch._foreach_norm(list(gradients)))


def row_sums(batch: Batch, nll: Tensor, layers: int) -> Tensor:
    """fp32 [R, layers + 2]: a row's features of each target layer summed, its last hidden states, and its nll.

    A sum is finite if and only if all it is made of is, short of an overflow near 1e38. Padding does not count.

    Args:
        nll: fp32 [R * A, B - 1].
    """
    rows, tokens = batch["input_ids"].shape
    real = (batch["document_ids"] >= 0)[..., None]

    def of(states: Tensor, parts: int) -> Tensor:
        each = states.view(rows, tokens, parts, -1).sum(dim=-1, dtype=torch.float32)
        return torch.where(real, each, 0.0).sum(dim=1)

    features = of(batch["features"].detach(), layers)
    last = batch.get("last_hidden")
    hidden = torch.zeros_like(features[:, :1]) if last is None else of(last.detach(), 1)
    return torch.cat([features, hidden, nll.detach().view(rows, -1).sum(dim=1, dtype=torch.float32)[:, None]], dim=1)


@dataclass(frozen=True)
class Layout:
    """Where in a step's numbers what is; the same at every step but for weights and the number of batches.

    Attributes:
        losses: names of the losses; as many norms follow them.
        parameters: names, in the order of their gradients' norms.
        layers: ids of the target's feature layers.
    """

    losses: tuple[str, ...]
    parameters: tuple[str, ...]
    layers: tuple[int, ...]

    def read(self, step: int, epoch: int, numbers: Sequence[float], *, weights: bool, rows: int) -> Seen:
        """The numbers of one step by name.

        Args:
            weights: whether norms of the weights are among them.
            rows: how many rows this rank's batches of the step had.
        """
        rest = list(numbers)

        def take(count: int) -> list[float]:
            taken, rest[:] = rest[:count], rest[count:]
            return taken

        (skipped,), (bad_rows,) = take(1), take(1)
        count = len(self.losses)
        losses = dict(zip(self.losses, take(count), strict=True))
        norms = dict(zip((name.replace("loss", "gradient_norm") for name in self.losses), take(count), strict=True))
        gradients = dict(zip(self.parameters, take(len(self.parameters)), strict=True))
        weight_norms = dict(zip(self.parameters, take(len(self.parameters)), strict=True)) if weights else {}
        sums = [take(len(self.layers) + 2) for _ in range(rows)]
        assert not rest
        return Seen(step, epoch, bool(skipped), bad_rows, losses, norms, gradients, weight_norms, sums)


@dataclass(frozen=True)
class Seen:
    """What became of an optimizer step. All but ``rows`` is the same on all drafters.

    Attributes:
        step: its number, from 1 up; epoch: the data's.
        skipped: whether its update was left out.
        bad_rows: rows of all drafters whose features are not finite.
        losses, norms: by metric's name.
        gradients, weights: norms by parameter; weights only at some steps.
        rows: of this drafter's rows in the order of its batches: see :func:`row_sums`.
    """

    step: int
    epoch: int
    skipped: bool
    bad_rows: float
    losses: dict[str, float]
    norms: dict[str, float]
    gradients: dict[str, float]
    weights: dict[str, float]
    rows: list[list[float]]

    @property
    def finite(self) -> bool:
        values = (*self.losses.values(), *self.norms.values(), *self.gradients.values(), *self.weights.values())
        return self.bad_rows == 0 and all(map(math.isfinite, values))

    def bad_features(self, layers: Sequence[int]) -> dict[str, list[int]]:
        """What the target gave that is not finite: by name, the places of the rows in this drafter's step."""
        names = [*(f"features of target layer {layer}" for layer in layers), "last hidden states of the target"]
        found = {name: [r for r, sums in enumerate(self.rows) if not math.isfinite(sums[i])] for i, name in enumerate(names)}
        return {name: rows for name, rows in found.items() if rows}

    def bad_losses(self) -> list[int]:
        """Places of the rows whose own loss is not finite."""
        return [place for place, sums in enumerate(self.rows) if not math.isfinite(sums[-1])]


class Probe:
    """Collects the numbers of a step, and decides on the device whether its update happens.

    It is asked by :class:`dflash_lit.module.DrafterModule`. What it decides by is the same on all drafters: losses and the count of
    bad rows are reduced with the sums that the module reduces anyway, and gradients are reduced ones.

    Args:
        layout: names of everything.
        parameters: in the layout's order.
        holds: whether from the first bad step on no update happens any more, until :meth:`release`.
        weights_every: steps between looks at the weights.

    Attributes:
        skips: fp32 scalar on the device, updates left out so far.
    """

    def __init__(self, layout: Layout, parameters: Sequence[Tensor], *, holds: bool, weights_every: int) -> None:
        self.layout, self.parameters = layout, list(parameters)
        self.holds, self.weights_every = holds, weights_every
        device = self.parameters[0].device
        self.skips = torch.zeros((), device=device)
        self._held = torch.zeros((), device=device)
        self._rows: list[Tensor] = []
        self.numbers: Tensor | None = None
        self.facts: dict[str, int | bool] = {}

    def rows(self, batch: Batch, nll: Tensor) -> None:
        """Take note of a batch; a step may have several."""
        self._rows.append(row_sums(batch, nll, len(self.layout.layers)))

    def bad_rows(self) -> Tensor:
        """fp32 [1]: how many rows of this step have features that are not finite; to be summed over drafters."""
        sums = torch.cat(self._rows)[:, :-1]
        return (~sums.isfinite()).any(dim=1).sum(dtype=torch.float32)[None]

    def decide(self, step: int, bad_rows: Tensor, losses: Sequence[Tensor], totals: Sequence[Tensor], norms: Tensor) -> Tensor:
        """fp32 scalar on the device: 1 if the update is to be left out, else 0.

        Args:
            step: that is about to be done, from 1 up.
            bad_rows: [1] of all drafters.
            losses: of the layout's names; totals: norms of their gradients.
            norms: fp32 [n] of each gradient.
        """
        looks = step % self.weights_every == 0
        weights = [torch.stack(torch._foreach_norm(self.parameters))] if looks else []
        measured = torch.cat([torch.stack([*losses, *totals]), norms, *weights])
        bad = (bad_rows[0] > 0) | ~measured.isfinite().all()
        skip = bad.to(torch.float32)
        if self.holds:
            skip = self._held = torch.maximum(self._held, skip)
        self.skips = self.skips + skip
        rows = torch.cat(self._rows)
        self.numbers = torch.cat([skip[None], bad_rows, measured, rows.flatten()])
        self.facts = {"weights": looks, "rows": rows.shape[0]}
        self._rows = []
        return skip

    def release(self) -> None:
        """Let updates happen again."""
        self._held = torch.zeros_like(self._held)
