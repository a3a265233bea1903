"""The drafter: a few Qwen3-style layers that fill a whole block of mask tokens in one pass.

The parameter names are those of the served checkpoint (11 a layer and 3: 58 tensors for 5 layers). Embedding and head are
the target's and live elsewhere. The model knows neither masks nor ranks: it is given an ``attend`` function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_lit.attention.attend import Attend, Attends, ContextKV
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.path_head import PathHead
from dflash_lit.drafter.rotary import Rotary, rotate

__all__ = ["Drafter", "Layer", "RMSNorm"]


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """``function(*args)``; in a compiled training graph its result is made again for the backward pass rather than kept.

    For what is cheap to repeat and large to keep: bf16 copies of the weights, and the widest activation.
    """
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(result, Tensor)
        return result
    return function(*args)


def project(x: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """Each projection of ``x``; in a compiled graph all of them from one matrix product.

    There, stacking the weights is part of their cast to bf16 and costs nothing. Outside it would copy them all each time.
    """
    if not torch.compiler.is_dynamo_compiling():
        return [projection(x) for projection in projections]

    def stack(*weights: Tensor) -> Tensor:
        return torch.cat(weights).to(x.dtype)

    stacked = F.linear(x, recomputed(stack, *(projection.weight for projection in projections)))
    return list(stacked.split([projection.out_features for projection in projections], dim=-1))


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, result in the input's dtype (as Qwen3's)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Queries from the block only; keys and values of context and block through one and the same weight."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.dim = dim
        self.q_proj = nn.Linear(config.hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def keys_values(self, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        """Projected keys and values [R, T, Hkv * D] -> keys (normed, rotated) and values, each [R, Hkv, T, D]."""
        shape = (*keys.shape[:2], -1, self.dim)
        turned = rotate(self.k_norm(keys.reshape(shape)), cos, sin)
        return turned.transpose(1, 2), values.reshape(shape).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ContextKV, attend: Attend) -> Tensor:
        queries, keys, values = project(x, self.q_proj, self.k_proj, self.v_proj)
        queries = queries.reshape(*x.shape[:2], -1, self.dim)
        queries = rotate(self.q_norm(queries), cos, sin).transpose(1, 2)
        out = attend(queries, context, self.keys_values(keys, values, cos, sin))
        return project(out.transpose(1, 2).reshape(*x.shape[:2], -1), self.o_proj)[0]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Not from one product: both are large enough alone, and their gradients would have to be copied together.
        (gate,), (up,) = project(x, self.gate_proj), project(x, self.up_proj)
        return project(recomputed(_swiglu, gate, up), self.down_proj)[0]


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ContextKV, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Context features and noise embeddings -> hidden states for the target's head.

    Training and decoding share both halves: :meth:`context` (what a decoder caches) and :meth:`draft`.

    Attributes:
        path_head: conditions a slot on the draft tokens before it; None without ``path_width``. Its tensors are no part of the
            served checkpoint.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.path_head: PathHead | None = None
        self.reset_parameters()
        # Last, so that the other weights of a seed are the same with and without it.
        if config.path_width:
            self.path_head = PathHead(config.hidden_size, config.path_width, config.rms_norm_eps)

    def reset_parameters(self) -> None:
        """Qwen3's initialisation: normal with ``initializer_range``, norms at one."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.path_head is not None:
            self.path_head.reset_parameters()

    def context(self, features: Tensor, positions: Tensor) -> list[ContextKV]:
        """Keys and values of the context, layer by layer.

        Args:
            features: [R, S, n_ids * H] the target's hidden states, concatenated in the order of ``target_layer_ids``.
            positions: int [R, S] position of each token in its document.
        """
        return self.context_turned(features, *self.rotary(positions))

    def context_turned(self, features: Tensor, cos: Tensor, sin: Tensor) -> list[ContextKV]:
        """:meth:`context` with the angles of :attr:`rotary` given: the part that is one graph."""
        fused = self.hidden_norm(self.fc(features))
        attentions = [layer.self_attn for layer in self._layers]
        # The input is the same for all layers, so in a compiled graph their keys and values are one product.
        projected = project(fused, *(p for attention in attentions for p in (attention.k_proj, attention.v_proj)))
        pairs = zip(projected[0::2], projected[1::2], strict=True)
        return [a.keys_values(keys, values, cos, sin) for a, (keys, values) in zip(attentions, pairs, strict=True)]

    def draft(self, noise: Tensor, positions: Tensor, context: Sequence[ContextKV], attend: Attends) -> Tensor:
        """Hidden states [R, Q, H] (after the final norm) of the noise tokens.

        Args:
            noise: [R, Q, H] the target's embeddings of ``[anchor, MASK, ...]`` of each block.
            positions: int [R, Q]: position of the anchor plus the slot.
            context: what :meth:`context` returned, or a decoder's cache of it.
            attend: attention with the mask of the caller's layout; one a layer where some slide.
        """
        if not isinstance(attend, list):
            assert not self.config.slides, "sliding layers need an attention of their own"
            attend = [attend] * len(self.layers)
        cos, sin = self.rotary(positions)
        x = noise
        for layer, cached, own in zip(self._layers, context, attend, strict=True):
            x = layer(x, cos, sin, cached, own)
        return self.norm(x)

    @property
    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]
