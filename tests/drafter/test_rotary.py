from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_lit.drafter.model import Drafter
from dflash_lit.drafter.rotary import Rotary, rotate
from dflash_lit.errors import UserError
from tests.helpers import drafter_config, random

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_angles_are_those_of_transformers(rope: dict[str, Any], family: str) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 131072}
    config = (Qwen3Config if family == "qwen3" else LlamaConfig)(**sizes, rope_parameters=dict(rope))
    theirs = (Qwen3RotaryEmbedding if family == "qwen3" else LlamaRotaryEmbedding)(config)
    positions = torch.tensor([[0, 1, 17, 4095, 30000, 131071]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = Rotary(drafter_config(rope_parameters=rope, max_position_embeddings=131072))(positions)
    torch.testing.assert_close(ours, (cos, sin), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard-of"])
def test_length_dependent_kinds_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"rope_type '{kind}'"):
        Rotary(drafter_config(rope_parameters={"rope_type": kind, "rope_theta": 1e4}))


def test_frequencies_survive_a_cast() -> None:
    drafter = Drafter(drafter_config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    cast = drafter.to(torch.bfloat16)
    assert cast.fc.weight.dtype == torch.bfloat16
    assert cast.rotary.inv_freq.dtype == torch.float32
    positions = torch.tensor([29_983, 30_000])
    cos, sin = cast.rotary(positions)
    assert cos.dtype == torch.float32
    steps = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    angles = (positions[:, None].double() / 1e6**steps).repeat(1, 2)
    # fp32 angles of 30,000 radians are right to some thousandths; in bf16 they would be off by whole turns.
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=4e-3)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=4e-3)


def test_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(drafter_config())
    query, key = random(1, 1, 4, 8), random(1, 1, 4, 8, seed=1)

    def score(a: int, b: int) -> torch.Tensor:
        turned = rotate(query, *rotary(torch.tensor([[a]]))), rotate(key, *rotary(torch.tensor([[b]])))
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(score(7, 3), score(3, 7))
