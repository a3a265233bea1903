"""A light head that conditions each slot of a block on the draft tokens before it.

The slots of a block are predicted side by side, so a path through them is only as good as independent choices can be. Here a
small recurrent state reads the tokens of a path one by one and shifts the hidden state of the next slot:

    s_d = f_d * s_{d-1} + (1 - f_d) * u_d,   f_d = sigmoid(F x_d), u_d = U x_d    (minGRU, arXiv 2410.01201)
    h'_d = h_d + W_out silu(W_h h_d + s_d)

``x_d`` is the normed embedding of the token before slot d, the anchor first. Logits are those of the target's frozen head on
h'. ``W_out`` starts at zero: the drafter then is what it is without this head. Others condition by a GRU (Domino,
arXiv 2605.29707), or by the previous token alone (DSpark; DFlash 2).

The logit of token v is ``head_v . h_d + (W_out^T head_v) . silu(...)``: with the second factor at hand for the few candidates of
a slot, a path costs ``width`` numbers a candidate and no pass of the target's head; see :mod:`dflash_lit.decode.lattice`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PathHead"]


class PathHead(nn.Module):
    """Hidden states of a block's slots and the tokens before them -> hidden states that know those tokens.

    Args:
        hidden_size: H, of drafter and embedding.
        width: r, of the state.
        eps: of the norm of embeddings.
    """

    def __init__(self, hidden_size: int, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.token_proj = nn.Linear(hidden_size, width, bias=False)
        self.forget_proj = nn.Linear(hidden_size, width, bias=False)
        self.hidden_proj = nn.Linear(hidden_size, width, bias=False)
        self.out_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Inputs of unit scale, and nothing comes out."""
        for projection in (self.token_proj, self.forget_proj, self.hidden_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        nn.init.zeros_(self.out_proj.weight)

    def read(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens do to a state, from their embeddings [..., H]: share of it that stays, and what is added; [..., r] each."""
        x = F.rms_norm(embeddings.to(self.token_proj.weight.dtype), (embeddings.shape[-1],), eps=self.eps)
        keep = torch.sigmoid(self.forget_proj(x))
        return keep, (1 - keep) * self.token_proj(x)

    def activate(self, asked: Tensor, state: Tensor) -> Tensor:
        """What goes into ``out_proj``, from ``hidden_proj`` of a slot and a state; [..., r]."""
        return F.silu(asked + state)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Conditioned hidden states [M, D, H].

        Args:
            hidden: [M, D, H] the drafter's, of slots 1..D.
            previous: [M, D, H] embeddings of the token before each slot: the anchor, then the path.
        """
        keep, added = self.read(previous)
        states = [added[:, 0]]
        for depth in range(1, added.shape[1]):
            states.append(keep[:, depth] * states[-1] + added[:, depth])
        return hidden + self.out_proj(self.activate(self.hidden_proj(hidden), torch.stack(states, dim=1)))
