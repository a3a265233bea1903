"""No block may know what comes at or after its anchor, nor what another document says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_lit.blocks import make_blocks
from dflash_lit.module import DrafterModule
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import Batch, drafter_config, embedded_config, lively_drafter, random, random_ends, token_batch

ANCHORS = [3, 10, 24, 25, 40, 55]  # documents: 0..24, 25..59, padding
DOCUMENT = [0, 0, 0, 1, 1, 1]
START = [0, 25]


def module(causal: bool = False) -> DrafterModule:
    config = drafter_config(causal=causal)
    made = DrafterModule(config.to_dict(), random_ends(config), anchors=len(ANCHORS))
    made.drafter = lively_drafter(config)
    return made.eval()


def batch() -> Batch:
    made = token_batch([[(25, 0), (35, 0)]], 64, vocab=60)
    return {**made, "features": random(1, 64, 64)}


def outputs(module: DrafterModule, batch: Batch) -> Tensor:
    """[A, B - 1, H]"""
    anchors = torch.tensor([ANCHORS], dtype=torch.int32)
    fields = (batch[name] for name in ("input_ids", "document_ids", "position_ids", "supervised"))
    config = module.config
    valid = torch.ones_like(anchors).bool()
    blocks = make_blocks(*fields, anchors, valid, block_size=config.block_size, mask_token_id=config.mask_token_id)
    with torch.no_grad():
        return module(batch, blocks)


def replaced(batch: Batch, name: str, places: list[int]) -> Batch:
    """Other content at some places of the row."""
    value = batch[name].clone()
    if name == "input_ids":
        value[:, places] = (value[:, places] + 17) % 56 + 4
    else:
        value[:, places] = 50 * random(1, len(places), value.shape[2], seed=9).to(value.dtype)
    return {**batch, name: value}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_features_matter_before_the_anchor_only(block: int, causal: bool) -> None:
    net, row = module(causal), batch()
    before = outputs(net, row)[block]
    anchor, start = ANCHORS[block], START[DOCUMENT[block]]
    hidden = [*range(start), *range(anchor, 64)]
    torch.testing.assert_close(outputs(net, replaced(row, "features", hidden))[block], before, rtol=0, atol=0)
    for place in {start, anchor - 1} & set(range(start, anchor)):
        assert not torch.allclose(outputs(net, replaced(row, "features", [place]))[block], before)


@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_of_tokens_only_the_anchor_is_seen(block: int) -> None:
    net, row = module(), batch()
    before = outputs(net, row)[block]
    others = [place for place in range(64) if place != ANCHORS[block]]
    assert torch.equal(outputs(net, replaced(row, "input_ids", others))[block], before)
    assert not torch.allclose(outputs(net, replaced(row, "input_ids", [ANCHORS[block]]))[block], before)


def test_no_slot_sees_another_block() -> None:
    """The noise of other blocks, and whether they exist, change nothing."""
    net, row = module(), batch()
    before = outputs(net, row)
    changed = outputs(net, replaced(row, "input_ids", ANCHORS[1:]))
    assert torch.equal(changed[0], before[0])


@pytest.mark.parametrize("block", [1, 4])
def test_from_tokens_through_the_real_target(embedded: FrozenTarget, block: int) -> None:
    """Tokens -> features -> drafter: later tokens of the document and all tokens of others stay unseen, earlier ones count."""
    config = embedded_config()
    net = DrafterModule(config.to_dict(), embedded.ends(), anchors=len(ANCHORS))
    net.drafter = lively_drafter(config)
    tokens = token_batch([[(25, 0), (35, 0)]], 64, vocab=60)

    def through(row: Batch) -> Tensor:
        fields = (row["input_ids"], row["document_ids"], row["position_ids"])
        return outputs(net, {**row, "features": embedded.features(*fields, config.target_layer_ids)})[block]

    anchor, start = ANCHORS[block], START[DOCUMENT[block]]
    before = through(tokens)
    unseen = [*range(start), *range(anchor + 1, 64)]
    torch.testing.assert_close(through(replaced(tokens, "input_ids", unseen)), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(through(replaced(tokens, "input_ids", [start])), before, rtol=1e-2, atol=1e-2)


def test_sliding_layers_forget_what_is_behind_their_window() -> None:
    kinds = ("sliding_attention",) * 2
    config = drafter_config(layer_types=kinds, sliding_window=6)
    net = DrafterModule(config.to_dict(), random_ends(config), anchors=len(ANCHORS))
    net.drafter = lively_drafter(config)
    net, row = net.eval(), batch()
    before = outputs(net, row)
    for block, anchor in enumerate(ANCHORS):
        start = START[DOCUMENT[block]]
        # Slot 0 sees the context from anchor - 5 on, later slots less; what it saw, all know a layer later.
        near = [place for place in range(start, anchor) if anchor - place < 6]
        far = [place for place in range(64) if place not in near]
        torch.testing.assert_close(outputs(net, replaced(row, "features", far))[block, 0], before[block, 0], rtol=0, atol=0)
        if near:  # else the anchor is the first of its document
            assert (outputs(net, replaced(row, "features", near[:1]))[block, 0] != before[block, 0]).any()
