"""Packed rows through compiled layers on a GPU, in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dflash_lit.decode.chain import decode_chain, decode_plain
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from tests.helpers import Batch, drafter_for, lively_drafter, tiny_target, token_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LAYERS = (0, 2, 4)
ROWS = [[(700, 0), (1100, 0), (200, 0)], [(2048, 0)], [(300, 0), (3, 0)]]
OTHER_ROWS = [[(2000, 0)], [(128, 0)] * 16, [(1, 0)] * 40]
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 2}
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pair(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[FrozenTarget, FrozenTarget]:
    """The same target on the GPU: rows by dense attention, and through compiled layers, which is the default there."""
    made = tiny_target(TargetInfo.load(EMBEDDED), **{**SIZES, **changes})
    model = made.model.to("cuda", dtype)
    return FrozenTarget(made.info, model, compile=False), FrozenTarget(made.info, copy.deepcopy(model))


def batch_of(rows: list[list[tuple[int, int]]], seed: int = 0) -> Batch:
    return {name: x.pin_memory() for name, x in token_batch(rows, 2048, vocab=500, seed=seed).items()}


def run(target: FrozenTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    return target.features_and_last_hidden(batch["input_ids"], batch["document_ids"], batch["position_ids"], LAYERS)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within the dtype's rounding, over six layers; by the size of the whole: single values may cancel."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < (3e-2 if dtype == torch.bfloat16 else 2e-3), float(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {"num_attention_heads": 10, "head_dim": 64}], ids=["full", "sliding", "groups of 5"]
)
def test_features_are_those_of_dense_attention_and_of_each_document_alone(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    dense, compiled = pair(dtype, **changes)
    assert compiled.compiled
    for seed, rows in enumerate((ROWS, OTHER_ROWS)):
        batch = batch_of(rows, seed)
        found, hidden = run(compiled, batch)
        assert found.dtype == hidden.dtype == dtype
        assert found.isfinite().all()
        assert hidden.isfinite().all()
        expected, last = run(dense, batch)
        near(found, expected, dtype)
        near(hidden, last, dtype)
        for row, start, stop in ((0, 0, rows[0][0][0]), (1, 0, rows[1][0][0])):
            with torch.no_grad():
                ids = batch["input_ids"][row : row + 1, start:stop].cuda()
                alone = dense.model(ids, output_hidden_states=True).hidden_states
            near(found[row, start:stop], torch.cat([alone[i + 1] for i in LAYERS], -1)[0], dtype)
            near(hidden[row, start:stop], alone[-1][0], dtype)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_a_steady_call_waits_for_nothing(changes: dict[str, Any]) -> None:
    _, compiled = pair(**changes)
    run(compiled, batch_of(ROWS))
    graphs = dict(counters["stats"])
    batch = batch_of(OTHER_ROWS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], LAYERS)
        with torch.inference_mode():
            run(compiled, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert dict(counters["stats"]) == graphs


def test_memory_is_linear_in_the_row() -> None:
    """Dense scores of this row would take 8 GiB a layer, its mask 256 MiB."""
    _, compiled = pair(max_position_embeddings=16384)
    row = token_batch([[(16384, 0)]], 16384, vocab=500)
    run(compiled, row)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(compiled, row)
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20


def test_without_compilation_it_refuses() -> None:
    _, compiled = pair()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match=r"takes .* GB .* TORCH_COMPILE_DISABLE"):
        run(compiled, batch_of(ROWS))
    assert torch.cuda.max_memory_allocated() - before < 3 * 8 * 2048 * 2048 * 2  # not even half of one layer's scores


def test_a_layer_that_cannot_be_a_graph_compiles_its_attention() -> None:
    dense, compiled = pair()
    compiled.model._can_compile_fullgraph = False
    attention_only = FrozenTarget(compiled.info, compiled.model)
    assert attention_only.compiled
    assert attention_only._graph is None
    near(run(attention_only, batch_of(ROWS))[0], run(dense, batch_of(ROWS))[0], torch.bfloat16)


def test_decoding_stays_as_it_is() -> None:
    dense, compiled = pair(torch.float32)
    run(compiled, batch_of(ROWS))
    graphs = dict(counters["stats"])
    drafter = lively_drafter(drafter_for(compiled)).to("cuda")
    plain = decode_plain(compiled, [5, 9, 3], 12)
    assert plain.ids == decode_plain(dense, [5, 9, 3], 12).ids
    assert decode_chain(compiled, drafter, [5, 9, 3], 12).ids == plain.ids
    assert dict(counters["stats"]) == graphs
