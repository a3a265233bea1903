from __future__ import annotations

from typing import Any

import pytest

from dflash_lit.drafter.config import DrafterConfig, feature_layers
from dflash_lit.errors import UserError
from tests.helpers import drafter_config


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (2, 1, (1,)),
        (6, 3, (1, 2, 3)),
        (28, 5, (1, 7, 13, 19, 25)),
    ],
)
def test_feature_layers(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert feature_layers(layers, count) == ids


@pytest.mark.parametrize(("layers", "count"), [(36, 0), (6, 4), (3, 2)])
def test_too_many_features_for_a_target(layers: int, count: int) -> None:
    with pytest.raises(UserError, match=f"drafter.features={count}"):
        feature_layers(layers, count)


@pytest.mark.parametrize("layers", range(1, 40))
def test_the_advised_number_of_features_works(layers: int) -> None:
    with pytest.raises(UserError, match="at most") as caught:
        feature_layers(layers, 50)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert len(set(feature_layers(layers, most))) == most


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 1}, "drafter.block_size=1"),
    ({"mask_token_id": 64}, "drafter.mask_token_id=64"),
    ({"mask_token_id": -1}, "drafter.mask_token_id=-1"),
    ({"target_layer_ids": (1, 5)}, "layer 5 is out of range"),
    ({"target_layer_ids": (-1,)}, "layer -1 is out of range"),
    ({"target_layer_ids": ()}, "drafter.target_layer_ids is empty"),
    ({"num_key_value_heads": 3}, "drafter.num_attention_heads=4 is not a multiple"),
    ({"num_key_value_heads": 0}, "drafter.num_key_value_heads=0"),
    ({"num_attention_heads": 0}, "drafter.num_attention_heads=0"),
    ({"hidden_size": 0}, "drafter.hidden_size=0"),
    ({"intermediate_size": -8}, "drafter.intermediate_size=-8"),
    ({"num_hidden_layers": 0}, "drafter.num_hidden_layers=0"),
    ({"head_dim": 0}, "drafter.head_dim=0"),
    ({"head_dim": 7}, "drafter.head_dim=7"),
    ({"path_width": -1}, "drafter.path_width=-1"),
    ({"initializer_range": 1e30}, "drafter.initializer_range=1e\\+30: must be at most 1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, r"rope_theta=0\.5 is no number in 1\.\.1e30"),
    ({"intermediate_size": True}, "drafter.intermediate_size=True: must be a whole number"),
    ({"vocab_size": 64.0}, "drafter.vocab_size=64.0: must be a whole number"),
    ({"layer_types": ("full_attention",)}, "1 kinds for 2 layers"),
    ({"layer_types": ("full_attention", "linear_attention")}, "drafter.layer_types: 'linear_attention'"),
    ({"layer_types": ("full_attention", "sliding_attention")}, "drafter.sliding_window=None"),
    ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 3}, "drafter.sliding_window=3: .* at least a block, 4"),
    ({"sliding_window": 8}, "drafter.sliding_window=8: no layer slides"),
    ({"path_candidates": 0}, "drafter.path_candidates=0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_sizes_name_their_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        drafter_config(**change)


def test_layers_that_are_all_full_are_said_in_one_way() -> None:
    """Configs are compared when a run goes on from a drafter or a checkpoint."""
    assert drafter_config(layer_types=("full_attention",) * 2) == drafter_config()


def test_dict_and_back() -> None:
    kinds = ("sliding_attention", "full_attention")
    config = drafter_config(
        causal=True,
        path_width=8,
        layer_types=kinds,
        sliding_window=8,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    )
    assert DrafterConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="unknown field 'colour'"):
        DrafterConfig.from_dict({**config.to_dict(), "colour": "blue"})
