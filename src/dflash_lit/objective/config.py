"""Which loss: the choices of ``conf/objective`` made into weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.objective.weights import decay_weights, default_gamma, dpace_weights

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective:
    """What a slot's loss is, and one of the weightings of :mod:`.weights`.

    Attributes:
        labels: "hard", cross-entropy to the target's own text, or "soft", the forward KL to the target's distribution.
        temperature: of the target's distribution (soft labels): that of the responses.
        capacity: share of the slots whose loss is computed on a GPU. Below 1, memory and time of the head shrink with it, and
            labels beyond it (the last slots of the blocks first) are left out and counted in ``train/dropped_labels``.
        weights: "decay" (the DFlash paper's) or "dpace".
        gamma: decay length in slots; None: what suits the block size.
        alpha: D-PACE's floor.
        chunk_slots: slots whose logits exist at a time.
        use_reentrant: form of gradient checkpointing.
    """

    labels: str = "hard"
    temperature: float = 1.0
    capacity: float = 1.0
    weights: str = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    chunk_slots: int = 4096
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.weights not in ("decay", "dpace"):
            raise UserError(f"objective.weights={self.weights!r}: choose decay or dpace")
        if self.labels not in ("hard", "soft"):
            raise UserError(f"objective.labels={self.labels!r}: choose hard or soft")
        if not 1e-3 <= self.temperature < math.inf:
            raise UserError(f"objective.temperature={self.temperature:g}: must be at least 0.001")
        if not 0 < self.capacity <= 1:
            raise UserError(f"objective.capacity={self.capacity:g}: is a share of the slots, 0 < share <= 1")
        if self.gamma is not None and self.gamma <= 0:
            raise UserError(f"objective.gamma={self.gamma:g}: must be positive (or null, to suit the block size)")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"objective.alpha={self.alpha:g}: must lie in 0..1")
        if self.chunk_slots < 1:
            raise UserError(f"objective.chunk_slots={self.chunk_slots}: must be positive")

    def weigh(self, label_probability: Tensor, label_ok: Tensor) -> Tensor:
        """Weights fp32 [M, B - 1] of the slots; see :data:`dflash_lit.objective.head.Weigh`."""
        if self.weights == "dpace":
            return dpace_weights(label_probability, label_ok, self.alpha)
        block_size = label_ok.shape[-1] + 1
        gamma = self.gamma if self.gamma is not None else default_gamma(block_size)
        return decay_weights(block_size, gamma, device=label_ok.device) * label_ok

    def __str__(self) -> str:
        """Short, for tables: "dpace", or "soft dpace, T=0.7"."""
        return self.weights if self.labels == "hard" else f"soft {self.weights}, T={self.temperature:g}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
