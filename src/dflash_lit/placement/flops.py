"""Useful FLOP of a batch: what its results need at least, nothing computed twice.

Pairs are (query, key) pairs that attention has to look at; a multiplication and an addition are two FLOP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dflash_lit.drafter.config import DrafterConfig

__all__ = ["Flop", "block_pairs", "causal_pairs", "drafter_flop", "layer_weights", "target_flop"]


class Flop(NamedTuple):
    """In products with weights, and in attention, which does fewer a second."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def layer_weights(config: DrafterConfig) -> int:
    """Entries of the matrices of one decoder layer: queries, keys, values, output, and the three of the MLP."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)


def causal_pairs(tokens: int, window: int | None = None) -> float:
    """Pairs of one document: a token sees itself and all before it, or the last ``window`` tokens, itself included."""
    seen = min(window or tokens, tokens)
    return seen * (seen + 1) / 2 + (tokens - seen) * seen


def block_pairs(anchors: int, block_size: int, tokens: int) -> float:
    """Pairs of the blocks of one document, on average over anchors drawn uniformly.

    An anchor is any token but the last. A slot sees the tokens before its anchor, and its block.
    """
    drawn = min(anchors, tokens - 1)
    return block_size * (drawn * (tokens - 2) / 2 + anchors * block_size)


def target_flop(weights: float, *, tokens: int, pairs: float, width: int) -> Flop:
    """Forward pass through layers, no logits.

    Args:
        weights: entries of the layers' matrices that a token goes through.
        tokens: of the batch.
        pairs: summed over those layers.
        width: heads times head size.
    """
    return Flop(2.0 * tokens * weights, 4.0 * pairs * width)


def drafter_flop(config: DrafterConfig, *, rows: int, tokens: int, anchors: int, pairs: float) -> dict[str, float]:
    """Forward and backward pass with the loss, by part; head and embedding are frozen.

    Args:
        tokens, anchors: a row.
        pairs: of all rows, of one layer.
    """
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers
    return {
        "layers": 6.0 * rows * anchors * config.block_size * layer_weights(config) * layers,
        # Two products forward, five backward (scores again, and four gradients).
        "attention": 3.5 * 4 * pairs * queries * layers,
        # The logits of the slots that predict, and the gradient of their hidden states.
        "head": 4.0 * rows * anchors * (config.block_size - 1) * config.hidden_size * config.vocab_size,
        # The features need no gradient: their product has two passes, those of the context's keys and values three.
        "context": rows * tokens * config.hidden_size * (4.0 * config.feature_size + 12.0 * keys * layers),
    }
