"""Rotary position embedding; the frequencies stay in fp32 whatever the model is cast to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.errors import UserError

__all__ = ["Rotary", "rotate"]


class Rotary(nn.Module):
    """Positions -> (cos, sin), both fp32 [..., head_dim].

    The frequencies are a plain attribute, not a buffer: ``module.to(bfloat16)`` casts buffers, and positions of a few
    thousand lose whole turns in bf16 (a peer's real bug).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        kind = config.rope_parameters.get("rope_type", "default")
        self.scaling = 1.0
        if kind == "default":
            theta = float(config.rope_parameters["rope_theta"])
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
            self.inv_freq = 1.0 / theta ** (steps / config.head_dim)
        elif isinstance(kind, str) and kind in ROPE_INIT_FUNCTIONS and kind not in ("dynamic", "longrope"):
            try:
                described = Qwen3Config(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope_parameters),
                )
                with torch.device("cpu"):  # also where the drafter is built without memory: some kinds copy numbers to the host
                    frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
                self.inv_freq = frequencies.float()
            except Exception as error:  # whatever Transformers raises for parameters that do not suit the kind
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
                raise UserError(
                    f"drafter.rope_parameters: rope_type {kind!r} does not go with the others ({reason})"
                ) from error
            # Transformers takes a factor of 0 or NaN with no more than a warning.
            reached = torch.cat([self.inv_freq * config.max_position_embeddings, torch.tensor([self.scaling], device="cpu")])
            if not bool((reached.isfinite() & (reached > 0)).all()):
                raise UserError(
                    f"drafter.rope_parameters: rope_type {kind!r} with these others gives angles that are not finite, or not positive; "
                    "give the target's"
                )
        else:
            # These depend on the length of the sequence, so training and decoding would disagree.
            raise UserError(
                f"rope_type {kind!r} of the target is not supported for a drafter; set drafter.rope_parameters by hand"
            )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [R, T, heads, D] by the angles [R, T, D]; computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)
