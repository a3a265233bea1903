"""The compiled training forward against the plain model. Gradients through flex_attention need a GPU: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dflash_lit.attention.block_mask import block_mask
from dflash_lit.attention.dense import full_attention
from dflash_lit.attention.flex import flex_attend
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.errors import UserError
from tests.helpers import drafter_config, lively_drafter, random

ROWS, TOKENS, ANCHORS, SIZE = 2, 128, 6, 8


def case(layers: int = 3, *, causal: bool = False) -> tuple[CompiledDrafter, dict[str, Tensor], BlockLayout]:
    config = drafter_config(
        num_hidden_layers=layers, head_dim=16, block_size=SIZE, causal=causal, target_layer_ids=(1, 2), num_target_layers=6
    )
    drafter = lively_drafter(config)
    documents = torch.zeros(ROWS, TOKENS, dtype=torch.int32)
    documents[0, 70:] = 1
    documents[1, 100:] = -1
    anchors = torch.tensor([[0, 5, 69, 70, 100, 127], [3, 40, 41, 99, 127, 127]], dtype=torch.int32)
    valid = torch.ones(ROWS, ANCHORS, dtype=torch.bool)
    valid[1, 4:] = False
    inputs = {
        "features": random(ROWS, TOKENS, 64),
        "noise": random(ROWS, ANCHORS * SIZE, 32, seed=1),
        "context_positions": torch.arange(TOKENS).repeat(ROWS, 1),
        "positions": (anchors[..., None] + torch.arange(SIZE)).flatten(1),
    }
    return CompiledDrafter(drafter), inputs, BlockLayout(anchors, valid, documents, SIZE, causal)


def plain(compiled: CompiledDrafter, inputs: dict[str, Tensor], layout: BlockLayout) -> Tensor:
    drafter = compiled.drafter
    context = drafter.context(inputs["features"], inputs["context_positions"])
    hidden = drafter.draft(inputs["noise"], inputs["positions"], context, full_attention(layout))
    return hidden.view(-1, SIZE, 32)[:, 1:]


@torch.no_grad()
def test_graphs_give_the_plain_models_hidden_states() -> None:
    """With real kernels: those of the CPU, which honour the block indices and have no backward pass."""
    torch._dynamo.reset()
    compiled, inputs, layout = case()
    counters.clear()
    hidden = compiled(**inputs, mask=block_mask(layout))
    torch.testing.assert_close(hidden, plain(compiled, inputs, layout), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 3  # context, one for all three layers, end

    # Other anchors, documents and weights are other content of the same shapes.
    other, inputs, layout = case()
    shifted = BlockLayout((layout.anchors - 1).clamp(min=0), layout.valid, layout.document_ids.flip(0), SIZE)
    with torch.no_grad():
        for parameter in other.drafter.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(other(**inputs, mask=block_mask(shifted)), plain(other, inputs, shifted), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 3


@torch.no_grad()
def test_without_compilation_it_refuses_before_allocating() -> None:
    compiled, inputs, layout = case(layers=1)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UserError, match=r"the drafter's attention .* without compilation"),
    ):
        compiled(**inputs, mask=block_mask(layout))


def test_the_refusal_names_the_bytes() -> None:
    """The pipeline's case: 32 heads, 32,768 queries, 72,768 keys. `meta` tensors have sizes and no memory."""
    attend = flex_attend(None)  # type: ignore[arg-type]
    queries = torch.empty(1, 32, 32_768, 128, device="meta")
    context, block = (torch.empty(1, 8, count, 128, device="meta") for count in (40_000, 32_768))
    with pytest.raises(UserError, match=r"32 heads x 32768 queries x 72768 keys takes 305\.2 GB \(284\.2 GiB\)"):
        attend(queries, (context, context), (block, block))
