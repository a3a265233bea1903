"""Which loss: the choices of ``conf/objective`` made into weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.objective.weights import decay_weights, default_gamma, dpace_weights

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective:
    """Cross-entropy to the target's own text with one of the weightings of :mod:`.weights`.

    Attributes:
        weights: "decay" (the DFlash paper's) or "dpace".
        gamma: decay length in slots; None: what suits the block size.
        alpha: D-PACE's floor.
        chunk_slots: slots whose logits exist at a time.
        use_reentrant: form of gradient checkpointing.
    """

    weights: str = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    chunk_slots: int = 4096
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.weights not in ("decay", "dpace"):
            raise UserError(f"objective.weights={self.weights!r}: choose decay or dpace")
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
