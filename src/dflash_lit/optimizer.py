"""The optimizer: AdamW as in the papers, or Muon for the matrices.

Muon (Jordan et al. 2024; scaled to AdamW's update size as in arXiv 2502.16982) needs far fewer steps for a small drafter,
which is what a laptop has. ``torch.optim.Muon`` is the same rule, but orthogonalises in bfloat16 everywhere, which on a CPU
takes ten times as long as the rest of the step; here it is fp32 there. A test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dflash_lit.errors import UserError

__all__ = ["MuonWithAdamW", "make_optimizer", "orthogonal"]

_KINDS = ("adamw", "muon")


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """About the nearest semi-orthogonal matrix: the quintic Newton-Schulz iteration of Muon, [n, m].

    In fp32 on a CPU; on a GPU in bf16 as in the original, where fp32 products would be ten times slower than the rest.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    if flip := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if flip else x


class MuonWithAdamW(Optimizer):
    """Muon for the matrices (two dimensions), AdamW for the other parameters.

    As torch's fused optimizers it goes by an attribute ``found_inf``, if that is set: a scalar on the device of the parameters. If
    it is 1, a step leaves parameters and state as they are to the last bit, whatever the gradients. The host does not wait to know.

    Args:
        parameters: of the model.
        lr: of both; Muon's update is scaled to the size of AdamW's.
        betas: AdamW's.
        weight_decay: of both, decoupled.
        momentum: Muon's, Nesterov.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        every = list(parameters)
        groups = [
            {"params": [p for p in every if p.ndim == 2], "kind": "muon"},
            {"params": [p for p in every if p.ndim != 2], "kind": "adamw"},
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "momentum": momentum, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both rules, after one call of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        skip = None if found is None else found.bool()
        for group in self.param_groups:
            update = self._muon if group["kind"] == "muon" else self._adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, group, skip)
        return loss

    def _muon(self, parameter: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        grad = parameter.grad
        assert grad is not None
        average = _unless(skip, state["momentum"], state["momentum"].lerp(grad, 1 - group["momentum"]))
        ahead = grad.lerp(average, group["momentum"])
        scale = 0.2 * math.sqrt(max(parameter.shape))
        decayed = parameter * (1 - group["lr"] * group["weight_decay"])
        _unless(skip, parameter, decayed.add_(orthogonal(ahead).to(parameter.dtype), alpha=-group["lr"] * scale))

    def _adamw(self, parameter: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
        state = self.state[parameter]
        if not state:
            state.update(mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        # On the device, since only it knows how many steps were done. In older checkpoints it is a number.
        step = torch.as_tensor(state.get("step", 0), dtype=torch.float64, device=parameter.device)
        if "step" not in state or step is not state["step"]:
            state["step"] = step.clone()
        first, second = group["betas"]
        grad = parameter.grad
        assert grad is not None
        step = _unless(skip, state["step"], state["step"] + 1)
        mean = _unless(skip, state["mean"], state["mean"].lerp(grad, 1 - first))
        square = _unless(skip, state["square"], state["square"].lerp(grad.square(), 1 - second))
        root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        decayed = parameter * (1 - group["lr"] * group["weight_decay"])
        _unless(skip, parameter, decayed - mean / root * (group["lr"] / (1 - first**step)))


def _unless(skip: Tensor | None, before: Tensor, after: Tensor) -> Tensor:
    """Make ``before`` what is ``after``, in place, unless ``skip`` is true."""
    return before.copy_(after) if skip is None else torch.where(skip, before, after, out=before)


def make_optimizer(module: nn.Module, kind: str, *, lr: float, betas: tuple[float, float], weight_decay: float) -> Optimizer:
    """The optimizer over all parameters of ``module``; fused where torch has it.

    Raises:
        UserError: for an unknown ``kind``.
    """
    if kind == "muon":
        return MuonWithAdamW(module.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
    if kind == "adamw":
        return AdamW(module.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    raise UserError(f"optimizer.kind={kind!r}: choose {' or '.join(_KINDS)}")
