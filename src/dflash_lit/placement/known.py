"""Targets whose sizes are known without a hub: facts of their public configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

__all__ = ["KNOWN", "QWEN3_8B", "known_config"]

QWEN3_8B = "qwen3-8b"

_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}

KNOWN: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "qwen3-4b": (
        Qwen3Config,
        {
            **_QWEN3,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    QWEN3_8B: (
        Qwen3Config,
        {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "qwen3-32b": (
        Qwen3Config,
        {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    ),
    "llama-3.1-8b": (
        LlamaConfig,
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
        },
    ),
}
"""Lower-case name without its owner -> sizes. Instruct versions have those of their base."""

_ROPE: dict[object, dict[str, Any]] = {
    Qwen3Config: {"rope_type": "default", "rope_theta": 1_000_000.0},
    LlamaConfig: {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_OWNERS = {"qwen", "meta-llama"}


def known_config(target: str) -> PretrainedConfig | None:
    """The config of a target by its name, with or without its owner and "-Instruct"; None for another one, and for a folder."""
    owner, _, name = target.rpartition("/")
    found = KNOWN.get(name.lower().removesuffix("-instruct"))
    if found is None or (owner and owner.lower() not in _OWNERS) or Path(target).exists():
        return None
    kind, sizes = found
    return kind(**{"tie_word_embeddings": False, **sizes}, rope_parameters=dict(_ROPE[kind]))
