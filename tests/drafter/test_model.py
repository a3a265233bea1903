from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dflash_lit.attention.attend import Attend
from dflash_lit.attention.dense import block_attention, full_attention
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.decode.cache import ContextCache
from dflash_lit.decode.chain import one_block_attention
from dflash_lit.drafter.model import Drafter
from tests.helpers import drafter_config, lively_drafter, random


def test_names_and_shapes_are_those_of_the_served_format() -> None:
    config = drafter_config(num_hidden_layers=5, target_layer_ids=(0, 1, 2, 3, 4), num_target_layers=8)
    hidden, inner, heads, kv_heads, dim = 32, 48, 4 * 8, 2 * 8, 8
    expected = {"fc.weight": (hidden, 5 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(5):
        expected |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (heads, hidden),
                "self_attn.k_proj": (kv_heads, hidden),
                "self_attn.v_proj": (kv_heads, hidden),
                "self_attn.o_proj": (hidden, heads),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    drafter = Drafter(config)
    assert {name: tuple(value.shape) for name, value in drafter.state_dict().items()} == expected
    assert len(expected) == 58
    assert len(list(drafter.parameters())) == 58


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", [block_attention, full_attention])
@pytest.mark.parametrize("window", [None, 20])
def test_training_equals_cached_decoding(causal: bool, attention: Callable[..., Attend], window: int | None) -> None:
    """Two packed documents in one pass against each document decoded by itself, block by block, with a growing cache."""
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": window} if window else {}
    config = drafter_config(causal=causal, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **sliding)
    drafter = lively_drafter(config)
    lengths, size = (190, 60), config.block_size
    documents = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor(lengths))[None].int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    features, noise_table = random(1, sum(lengths), config.feature_size), random(sum(lengths), size, 32, seed=1)
    anchors = [0, 1, 7, 130, 189, 190, 191, 230]

    layout = BlockLayout(torch.tensor([anchors]), torch.ones(1, len(anchors)).bool(), documents, size, causal)
    noise = noise_table[anchors].view(1, -1, 32)
    where = (positions[0, anchors][:, None] + torch.arange(size)).view(1, -1)
    with torch.no_grad():
        each = config.each_layer(attention(layout), attention(replace(layout, window=window)))
        trained = drafter.draft(noise, where, drafter.context(features, positions), each)
        trained = trained.view(len(anchors), size, 32)
        for document, start in ((0, 0), (1, 190)):
            cache, known = ContextCache(), start
            for number, anchor in enumerate(anchors):
                if documents[0, anchor] != document or anchor == start:
                    continue  # (without any context there is nothing to decode from)
                part = slice(known, anchor)
                cache.append(drafter.context(features[:, part], positions[:, part]))
                known = anchor
                assert cache.length == anchor - start
                slots = torch.arange(anchor - start, anchor - start + size)[None]
                near = one_block_attention(causal, places=slots[:, 0], window=window)
                each = config.each_layer(one_block_attention(causal), near)
                decoded = drafter.draft(noise_table[anchor][None], slots, cache.views(), each)
                torch.testing.assert_close(decoded[0], trained[number], rtol=1e-4, atol=1e-5)
