"""Which loss: the choices of ``conf/objective`` made into weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_lit.errors import UserError
from dflash_lit.objective.weights import decay_weights, default_gamma, dpace_weights, tree_survival_weights

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective:
    """What a slot's loss is, and one of the weightings of :mod:`.weights`.

    Attributes:
        labels: "hard", cross-entropy to the target's own text, or "soft", the forward KL to the target's distribution.
        temperature: of the target's distribution (soft labels): that of the responses.
        capacity: share of the slots whose loss is computed on a GPU. Below 1, memory and time of the head shrink with it, and
            labels beyond it (the last slots of the blocks first) are left out and counted in ``train/dropped_labels``.
        weights: "decay" (the DFlash paper's), "dpace" or "tree_survival".
        gamma: decay length in slots; None: what suits the block size.
        alpha: D-PACE's floor.
        tree_budget, tree_temperature: of tree survival.
        floor: share of the whole weight that ``floor_weights`` have, "decay" or "dpace"; tree survival has the rest. Alone it leaves
            blocks that are far from the tree's edge without any.
        chunk_slots: slots whose logits exist at a time.
        use_reentrant: form of gradient checkpointing.
    """

    labels: str = "hard"
    temperature: float = 1.0
    capacity: float = 1.0
    weights: str = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    tree_budget: int = 64
    tree_temperature: float = 2.0
    floor: float = 0.3
    floor_weights: str = "decay"
    chunk_slots: int = 4096
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.weights not in ("decay", "dpace", "tree_survival"):
            raise UserError(f"objective.weights={self.weights!r}: choose decay, dpace or tree_survival")
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
        if self.tree_budget < 1:
            raise UserError(f"objective.tree_budget={self.tree_budget}: a tree has at least one node")
        if not 1e-2 <= self.tree_temperature < math.inf:
            raise UserError(f"objective.tree_temperature={self.tree_temperature:g}: must be at least 0.01 nats")
        if not 0 < self.floor <= 1:
            raise UserError(
                f"objective.floor={self.floor:g}: is a share, 0 < share <= 1; without one most slots would be trained by nothing"
            )
        if self.floor_weights not in ("decay", "dpace"):
            raise UserError(f"objective.floor_weights={self.floor_weights!r}: choose decay or dpace")
        if self.chunk_slots < 1:
            raise UserError(f"objective.chunk_slots={self.chunk_slots}: must be positive")

    @property
    def top(self) -> int:
        """How many of each slot's largest log-probabilities the weights depend on."""
        return self.tree_budget if self.weights == "tree_survival" else 0

    def weigh(
        self, label_probability: Tensor, label_ok: Tensor, top: Tensor | None = None, *, floor_ratio: Tensor | float = 1.0
    ) -> Tensor:
        """Weights fp32 [M, B - 1] of the slots; see :data:`dflash_lit.objective.head.Weigh`.

        Args:
            top: with at least :attr:`top` log-probabilities of each slot.
            floor_ratio: sum of the floor's weights over that of tree survival's, which gives ``floor`` its meaning. The sums are
                those of all blocks, so they are known after the step: a run takes those of its step before.
        """
        if self.weights != "tree_survival":
            return self._plain(self.weights, label_probability, label_ok)
        tree, floor = self.parts(label_probability, label_ok, top)
        return (1 - self.floor) * floor_ratio * tree + self.floor * floor

    @staticmethod
    def floor_ratio(tree: Tensor, floor: Tensor) -> Tensor:
        """What :meth:`weigh` takes, of the sums of both weights. Without any block near its tree's edge the floor is all there is,
        whatever the factor; and where one is barely there, the next step's weights must not overflow.
        """
        return torch.where(tree > 0, (floor / tree).clamp(max=1e6), 1.0)

    def parts(self, label_probability: Tensor, label_ok: Tensor, top: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tree survival's weights and its floor's, each fp32 [M, B - 1], not yet mixed."""
        if top is None:
            raise ValueError("tree survival needs the largest log-probabilities: call the head loss with top=objective.top")
        tree = tree_survival_weights(
            label_probability, label_ok, top, budget=self.tree_budget, temperature=self.tree_temperature
        )
        return tree, self._plain(self.floor_weights, label_probability, label_ok)

    def _plain(self, weights: str, label_probability: Tensor, label_ok: Tensor) -> Tensor:
        if weights == "dpace":
            return dpace_weights(label_probability, label_ok, self.alpha)
        block_size = label_ok.shape[-1] + 1
        gamma = self.gamma if self.gamma is not None else default_gamma(block_size)
        return decay_weights(block_size, gamma, device=label_ok.device) * label_ok

    @property
    def needs_teacher(self) -> bool:
        """Whether labels are the target's distributions: its last hidden state is needed beside the features."""
        return self.labels == "soft"

    def __str__(self) -> str:
        """Short, for tables: "dpace", or "soft dpace, T=0.7"."""
        weights = self.weights
        if weights == "tree_survival":
            weights += f"@{self.tree_budget} T={self.tree_temperature:g} over {self.floor:g} {self.floor_weights}"
        return weights if self.labels == "hard" else f"soft {weights}, T={self.temperature:g}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
