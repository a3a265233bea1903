"""What a drafter is: its sizes, and the rule that derives them from the target."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from dflash_lit.errors import UserError

__all__ = ["FULL", "SLIDING", "DrafterConfig", "feature_layers"]

FULL, SLIDING = "full_attention", "sliding_attention"
Given = TypeVar("Given")


def feature_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """Ids of the decoder layers whose *outputs* are the context features.

    ``count == 1 -> [N // 2]``, else ``round(1 + i * (N - 4) / (count - 1))`` (DFlash, arXiv 2602.06036; Python's rounding).
    36 layers, 5 features -> 1, 9, 17, 25, 33. Id ``i`` is Hugging Face's ``hidden_states[i + 1]``; never the last layer, whose
    entry there is taken after the final norm.

    Raises:
        UserError: if the target has too few layers for ``count`` different ones.
    """
    if count < 1:
        raise UserError(f"drafter.features={count}: at least one feature layer is needed")
    if count > max(target_layers, 1):  # before a list of so many is made
        raise _too_many(count, target_layers)
    if count == 1:
        return (target_layers // 2,)
    ids = tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))
    if target_layers < 4 or len(set(ids)) < count:
        raise _too_many(count, target_layers)
    return ids


def _too_many(count: int, target_layers: int) -> UserError:
    most = max(target_layers - 3, 1)
    return UserError(
        f"drafter.features={count}: a target of {target_layers} layers offers at most {most} feature layers; lower it"
    )


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and conventions of one drafter; all that its checkpoint needs besides the weights.

    Attributes:
        hidden_size: width; equal to the target's, whose embedding and head the drafter uses.
        block_size: slots a block, the anchor's slot 0 included (``B``).
        mask_token_id: the reserved token in slots ``1..B-1``.
        target_layer_ids: target decoder layers whose outputs are the context features.
        num_target_layers: decoder layers of the target.
        causal: whether slot ``o`` sees only slots ``<= o`` of its block, in layers of both kinds.
        layer_types: "full_attention" or "sliding_attention" of each layer, as in Transformers; empty: all are full.
        sliding_window: a slot of a sliding layer sees the context tokens less than this before it; None without such layers.
        rope_parameters: as in Transformers 5: ``rope_type``, ``rope_theta`` and what the type needs.
        path_width: width of the head that conditions a slot on the draft tokens before it (:mod:`.path_head`); 0: there is none.
        path_candidates: tokens of each slot that draft paths are made of, with that head.
        target_fingerprint: names the target these weights were trained for (empty: unknown).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    causal: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    initializer_range: float = 0.02
    path_width: int = 0
    path_candidates: int = 64
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for counted in fields(self):
            value = getattr(self, counted.name)
            if counted.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"drafter.{counted.name}={value!r}: must be a whole number")
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", *heads):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name}={getattr(self, name)}: must be positive")
        if self.path_width < 0:
            raise UserError(f"drafter.path_width={self.path_width}: must be positive, or 0 for independent slots")
        if self.path_candidates < 1:
            raise UserError(f"drafter.path_candidates={self.path_candidates}: a path needs at least 1 token a slot")
        if self.block_size < 2:
            raise UserError(
                f"drafter.block_size={self.block_size}: a block needs the anchor and at least one mask slot; use 2 or more"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter.mask_token_id={self.mask_token_id} is outside the vocabulary 0..{self.vocab_size - 1}; "
                "choose a reserved id inside it"
            )
        for layer in self.target_layer_ids:
            if not 0 <= layer < self.num_target_layers - 1:
                raise UserError(
                    f"drafter.target_layer_ids: layer {layer} is out of range; the target has {self.num_target_layers} layers "
                    f"and its last one is not a feature layer, so use 0..{self.num_target_layers - 2}"
                )
        if not self.target_layer_ids:
            raise UserError("drafter.target_layer_ids is empty: name at least one target layer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"drafter.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"drafter.num_key_value_heads={self.num_key_value_heads}"
            )
        self._check_layer_types()
        for name in ("rms_norm_eps", "initializer_range", "max_position_embeddings"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"drafter.{name}={getattr(self, name)}: must be positive")
        if self.initializer_range > 1:  # weights so large that the first step would overflow, or learn nothing
            raise UserError(f"drafter.initializer_range={self.initializer_range:g}: must be at most 1; 0.02 is usual")
        if "rope_theta" not in self.rope_parameters:
            raise UserError("drafter.rope_parameters: rope_theta is missing; give the target's")
        theta = self.rope_parameters["rope_theta"]
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 <= theta < 1e30:
            # Less would turn faster than once a token, until its angles are beyond what a float holds.
            raise UserError(f"drafter.rope_parameters: rope_theta={theta!r} is no number in 1..1e30; give the target's")
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim={self.head_dim}: rotary embedding needs an even number")

    def _check_layer_types(self) -> None:
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"drafter.layer_types: {len(self.layer_types)} kinds for {self.num_hidden_layers} layers; name one for each"
            )
        if unknown := set(self.layer_types) - {FULL, SLIDING}:
            raise UserError(f"drafter.layer_types: {sorted(unknown)[0]!r} is no kind; choose {FULL} or {SLIDING}")
        if not self.slides:  # said in one way only: configs are compared
            object.__setattr__(self, "layer_types", ())
        if self.slides and (self.sliding_window is None or self.sliding_window < self.block_size):
            raise UserError(
                f"drafter.sliding_window={self.sliding_window}: sliding layers need one of at least a block, {self.block_size} tokens"
            )
        if not self.slides and self.sliding_window is not None:
            raise UserError(f"drafter.sliding_window={self.sliding_window}: no layer slides; name some in drafter.layer_types")

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window."""
        return SLIDING in self.layer_types

    def each_layer(self, full: Given, sliding: Given) -> list[Given]:
        """What each layer uses: ``sliding`` those with a window, ``full`` the others."""
        kinds = self.layer_types or (FULL,) * self.num_hidden_layers
        return [sliding if kind == SLIDING else full for kind in kinds]

    @property
    def feature_size(self) -> int:
        """Width of the concatenated context features, ``n_ids * H``."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Plain containers only, so that a checkpoint holding it loads with ``weights_only=True``."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids), "layer_types": list(self.layer_types)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        """Inverse of :meth:`to_dict`; unknown names are an error."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise UserError(f"drafter config: unknown field {sorted(unknown)[0]!r}")
        return cls(**values)
