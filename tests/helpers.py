"""Builders of small things: drafters, targets and packed rows."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lit.data.packing import PackedRows
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import FrozenTarget, TargetEnds, TargetInfo

Batch = dict[str, Tensor]
Piece = tuple[int, int]
"""(tokens of a document, how many of them are an unsupervised prompt)"""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drafter_config(**changes: Any) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "block_size": 4,
        "mask_token_id": 63,
        "target_layer_ids": (1, 2),
        "num_target_layers": 6,
    }
    return DrafterConfig(**{**sizes, **changes})


def embedded_config(**changes: Any) -> DrafterConfig:
    """A drafter small enough for a test, for the embedded target."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "head_dim": 16,
        "vocab_size": 512,
        "mask_token_id": 2,
        "target_layer_ids": (1, 2, 3),
    }
    return drafter_config(**{**sizes, **changes})


def lively_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """Every weight random, the norms too, and large enough that everything matters."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    return drafter.eval()


def random_ends(config: DrafterConfig, seed: int = 1) -> TargetEnds:
    return TargetEnds(
        random(config.vocab_size, config.hidden_size, seed=seed), random(config.vocab_size, config.hidden_size, seed=seed + 1)
    )


def tiny_target(info: TargetInfo, *, seed: int = 0, eos: int = 10**6, **changes: Any) -> FrozenTarget:
    """A random Qwen3 with strong opinions; ``info`` lends the tokenizer, and ``eos`` is by default never made."""
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    config = Qwen3Config(**{**sizes, **changes})
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = eos
    return FrozenTarget(TargetInfo("tiny", config, info.tokenizer), model)


def drafter_for(target: FrozenTarget, **changes: Any) -> DrafterConfig:
    text = target.info.text
    sizes: dict[str, Any] = {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "mask_token_id": text.vocab_size - 1,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": (0, 1),
    }
    return drafter_config(**{**sizes, **changes})


def packed_rows(rows: Sequence[Sequence[Piece]], row_tokens: int = 128, *, vocab: int = 500, seed: int = 0) -> PackedRows:
    """Rows of the given pieces, of random tokens from 4 up, the rest of each row padding."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), row_tokens)
    ids, positions = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    documents, supervised = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.bool_)
    for row, pieces in enumerate(rows):
        start = 0
        for number, (length, prompt) in enumerate(pieces):
            place = (row, slice(start, start + length))
            ids[place] = rng.integers(4, vocab, length)
            positions[place], documents[place] = np.arange(length), number
            supervised[place] = np.arange(length) >= prompt
            start += length
    return PackedRows(ids, documents, positions, supervised)


def token_batch(rows: Sequence[Sequence[Piece]], row_tokens: int = 128, *, vocab: int = 500, seed: int = 0) -> Batch:
    """The same as a TokenRow batch."""
    packed = packed_rows(rows, row_tokens, vocab=vocab, seed=seed)
    return {
        "input_ids": torch.from_numpy(packed.input_ids).long(),
        "document_ids": torch.from_numpy(packed.document_ids),
        "position_ids": torch.from_numpy(packed.position_ids),
        "supervised": torch.from_numpy(packed.supervised),
        "row_ids": torch.arange(len(rows)),
    }


@contextmanager
def in_terminal(monkeypatch: pytest.MonkeyPatch, *, ci: bool = False) -> Iterator[list[str]]:
    """Standard error is a terminal of 80 columns inside the block; after it the list holds all that was written there.

    Args:
        ci: with ``CI`` set, as where others read it.
    """
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    shown: list[str] = []
    with open(terminal, "w") as stream, monkeypatch.context() as context:
        context.setenv("TERM", "xterm")
        context.setenv("COLUMNS", "80")
        context.delenv("CI", raising=False)
        if ci:
            context.setenv("CI", "true")
        context.setattr(sys, "stderr", stream)
        yield shown
    text = b""
    with suppress(OSError):  # how Linux says that the other end was closed
        while part := os.read(main, 65536):
            text += part
    os.close(main)
    shown.append(text.decode(errors="replace"))
