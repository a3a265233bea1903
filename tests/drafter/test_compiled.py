"""The compiled training forward against the plain model. Gradients through flex_attention need a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

# Private, to look into a compile; the option itself is one of torch.compile.
from torch._inductor.graph import GraphLowering

from dflash_lit.attention.block_mask import block_mask
from dflash_lit.attention.compiled import compiled
from dflash_lit.attention.dense import dense_block_mask, full_attention
from dflash_lit.attention.flex import flex_attend, kernel_options
from dflash_lit.attention.mask import BlockLayout
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.errors import UserError
from tests.helpers import drafter_config, lively_drafter, random

ROWS, TOKENS, ANCHORS, SIZE = 2, 128, 6, 8


def case(
    layers: int = 3, *, causal: bool = False, backend: str = "inductor"
) -> tuple[CompiledDrafter, dict[str, Tensor], BlockLayout]:
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
    return CompiledDrafter(drafter, backend=backend), inputs, BlockLayout(anchors, valid, documents, SIZE, causal)


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
    shifted = BlockLayout((layout.anchors - 1).clamp(min=0), layout.valid, layout.document_ids.flip(0), SIZE)
    for parameter in compiled.drafter.parameters():
        parameter.mul_(1.1)
    hidden = compiled(**inputs, mask=block_mask(shifted))
    torch.testing.assert_close(hidden, plain(compiled, inputs, shifted), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 3


@torch.no_grad()
def test_layers_of_both_kinds_are_one_graph() -> None:
    torch._dynamo.reset()
    compiled, inputs, layout = case()
    masks = [block_mask(layout), block_mask(replace(layout, window=9)), block_mask(layout)]
    counters.clear()
    hidden = compiled(**inputs, mask=masks)
    drafter = compiled.drafter
    context = drafter.context(inputs["features"], inputs["context_positions"])
    each = [full_attention(layout), full_attention(replace(layout, window=9)), full_attention(layout)]
    expected = drafter.draft(inputs["noise"], inputs["positions"], context, each).view(-1, SIZE, 32)[:, 1:]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert (hidden - plain(compiled, inputs, layout)).abs().max() > 1e-2
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


def test_the_graphs_of_a_cpu_train_like_the_plain_model() -> None:
    """With the dense mask of CPUs, gradients and all: one graph serves every layer and every step."""
    compiled, inputs, layout = case(backend="aot_eager")
    direction = random(ROWS * ANCHORS, SIZE - 1, 32, seed=9)

    def gradients(hidden: Tensor) -> dict[str, Tensor]:
        compiled.drafter.zero_grad()
        (hidden * direction).sum().backward()
        return {name: p.grad.clone() for name, p in compiled.drafter.named_parameters() if p.grad is not None}

    counters.clear()
    for _ in range(2):
        ours = gradients(compiled(**inputs, mask=dense_block_mask(layout)))
        expected = gradients(plain(compiled, inputs, layout))
        assert ours.keys() == expected.keys() == dict(compiled.drafter.named_parameters()).keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
    assert counters["stats"]["unique_graphs"] == 3


def test_the_graph_of_a_path_head() -> None:
    compiled = CompiledDrafter(lively_drafter(drafter_config(path_width=8)), backend="aot_eager")
    head, previous = compiled.drafter.path_head, random(6, 3, 32, seed=1)
    assert head is not None
    counters.clear()
    found = []
    for call in (compiled.condition, head):
        head.zero_grad()
        hidden = random(6, 3, 32).requires_grad_()
        told = call(hidden, previous)
        (told * random(6, 3, 32, seed=2)).sum().backward()
        found.append([told, hidden.grad, *(p.grad for p in head.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_second_drafter_has_graphs_of_its_own() -> None:
    """Eight variants of one code object are Dynamo's limit; drafters of a sweep must not share it."""
    for hidden in range(10):
        compiled = CompiledDrafter(
            lively_drafter(drafter_config(num_hidden_layers=1, intermediate_size=8 + hidden)), backend="eager"
        )
        inputs, layout = {**case()[1]}, case()[2]
        layout = BlockLayout(layout.anchors, layout.valid, layout.document_ids, SIZE)
        config = compiled.drafter.config
        assert config.block_size == 4
        inputs["noise"], inputs["positions"] = inputs["noise"][:, : ANCHORS * 4], inputs["positions"][:, : ANCHORS * 4]
        mask = dense_block_mask(BlockLayout(layout.anchors, layout.valid, layout.document_ids, 4))
        assert compiled(**inputs, mask=mask).isfinite().all()


@torch.no_grad()
def test_kernel_options_are_constants_of_the_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a new dict each time, and no new graph."""
    wanted = {"fwd_BLOCK_M": 64, "fwd_USE_TMA": True}
    monkeypatch.setattr("dflash_lit.drafter.compiled.kernel_options", lambda *_: dict(wanted))
    found = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        found.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph.forward

    compiled, inputs, layout = case(backend=look)  # type: ignore[arg-type]
    for _ in range(2):
        compiled(**inputs, mask=block_mask(layout))
    assert len(found) == 1
    assert found[0].items() >= wanted.items()


def test_kernel_options_are_torchs_own_where_none_were_measured() -> None:
    assert kernel_options(torch.bfloat16, 128, torch.device("cpu")) == {"BACKEND": "TRITON"}


def _cubes(x: Tensor) -> Tensor:
    return (x**3).sum(dim=-1)


def test_tiles_of_sums_are_decided_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions. On a CPU nothing is timed; tests/gpu/test_equal_gpu.py compares what is computed."""
    seen = []
    run = GraphLowering.run

    def noted(self: GraphLowering, *args: Any) -> Any:
        seen.append(torch._inductor.config.deterministic)
        return run(self, *args)

    monkeypatch.setattr(GraphLowering, "run", noted)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(_cubes)(random(5, 7).requires_grad_()).sum().backward()
    assert len(seen) >= 2
    assert all(seen)
    assert not torch._inductor.config.deterministic  # of others
