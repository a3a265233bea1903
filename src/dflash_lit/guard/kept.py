"""Earlier states of a training in the host's memory, to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["KeptStates"]


@dataclass
class _Kept:
    """Attributes:
    step: optimizer steps done.
    tensors: copies, in the order of the live ones.
    state: of the optimizer by parameter's place; tensors are copies.
    """

    step: int
    tensors: list[Tensor]
    state: dict[int, dict[str, Any]]


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)


class KeptStates:
    """The last two states of weights and optimizer. Copies are in line with the device's work; the host does not wait.

    The learning rate is none of them: it belongs to the number of the step, which goes on.

    Args:
        tensors: parameters, and buffers that training changes.
        optimizer: over the parameters.
    """

    def __init__(self, tensors: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.tensors, self.optimizer = list(tensors), optimizer
        self._kept: list[_Kept] = []

    @property
    def steps(self) -> list[int]:
        """Steps after which a state was kept."""
        return [kept.step for kept in self._kept]

    def keep(self, step: int) -> None:
        """Keep the state of now, after ``step`` steps, and of earlier ones only the newest."""
        # Buffers of the one that goes could be used again; but it may be on its way to the device.
        self._kept = self._kept[-1:]
        self._kept.append(
            _Kept(
                step,
                [_to_host(tensor) for tensor in self.tensors],
                {
                    place: {k: _to_host(v) if isinstance(v, Tensor) else v for k, v in self.optimizer.state[p].items()}
                    for place, p in enumerate(self._parameters())
                    if p in self.optimizer.state
                },
            )
        )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def go_back(self, before: int) -> int:
        """Put the newest state of at most ``before`` steps in place (else the oldest there is), and forget later ones.

        Returns:
            how many steps it had.
        """
        chosen = next((kept for kept in reversed(self._kept) if kept.step <= before), self._kept[0])
        for tensor, host in zip(self.tensors, chosen.tensors, strict=True):
            tensor.copy_(host, non_blocking=True)
        for place, parameter in enumerate(self._parameters()):
            if place not in chosen.state:  # kept before the first step, when there was none
                self.optimizer.state.pop(parameter, None)
                continue
            live = self.optimizer.state[parameter]
            for name, value in chosen.state[place].items():
                if isinstance(value, Tensor):
                    live[name].copy_(value, non_blocking=True)
                else:
                    live[name] = value
        self._kept = [kept for kept in self._kept if kept.step <= chosen.step]
        return chosen.step
