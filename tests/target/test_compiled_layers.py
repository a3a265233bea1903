"""Packed rows through compiled layers: the same features, one graph, and nothing else changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

from dflash_lit.decode.chain import decode_chain, decode_plain
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import Batch, drafter_for, lively_drafter, tiny_target, token_batch

LAYERS = (0, 2, 4)
ROWS = [[(100, 0), (130, 0), (20, 0)], [(40, 0), (3, 0)]]
OTHER_ROWS = [[(7, 0), (90, 0), (128, 0)], [(256, 0)]]
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pair(embedded: FrozenTarget, backend: str = "aot_eager", **changes: Any) -> tuple[FrozenTarget, FrozenTarget]:
    """The same target, rows by dense attention and through compiled layers."""
    dense = tiny_target(embedded.info, **{**SIZES, **changes})
    # A model of its own: Transformers leaves hooks in one that was asked for hidden states, and they cannot be compiled.
    return dense, FrozenTarget(dense.info, copy.deepcopy(dense.model), compile=True, backend=backend)


def batch_of(rows: list[list[tuple[int, int]]], seed: int = 0) -> Batch:
    return token_batch(rows, 256, vocab=60, seed=seed)


def features(target: FrozenTarget, batch: Batch) -> Tensor:
    return target.features(batch["input_ids"], batch["document_ids"], batch["position_ids"], LAYERS)


def last_hidden(target: FrozenTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    return target.features_and_last_hidden(batch["input_ids"], batch["document_ids"], batch["position_ids"], LAYERS)


def untouched(target: FrozenTarget) -> bool:
    return target.model.config._attn_implementation == "sdpa" and not any("forward" in vars(x) for x in target._layers)


def test_features_are_those_of_dense_attention_and_of_each_document_alone(embedded: FrozenTarget) -> None:
    """By the real compiler, whose kernels skip tiles; full and sliding layers."""
    dense, compiled = pair(embedded, "inductor", **SLIDING)
    batch = batch_of(ROWS)
    found, hidden = last_hidden(compiled, batch)
    assert found.isfinite().all()
    assert hidden.isfinite().all()
    expected = last_hidden(dense, batch)
    torch.testing.assert_close((found, hidden), expected, rtol=1e-4, atol=1e-3)
    for row, pieces in enumerate(ROWS):
        start = 0
        for length, _ in pieces:
            place = (slice(row, row + 1), slice(start, start + length))
            with torch.no_grad():
                alone = dense.model(batch["input_ids"][place], output_hidden_states=True).hidden_states
            torch.testing.assert_close(found[place], torch.cat([alone[i + 1] for i in LAYERS], -1), rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(hidden[place], alone[-1], rtol=1e-4, atol=1e-3)
            start += length
    assert counters["stats"]["unique_graphs"] == 1


def test_a_layer_that_cannot_be_a_graph_compiles_its_attention(embedded: FrozenTarget) -> None:
    dense = tiny_target(embedded.info, **SIZES)
    model = copy.deepcopy(dense.model)
    model._can_compile_fullgraph = False
    compiled = FrozenTarget(dense.info, model, compile=True)
    assert compiled._graph is None
    torch.testing.assert_close(features(compiled, batch_of(ROWS)), features(dense, batch_of(ROWS)), rtol=1e-4, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert untouched(compiled)


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_all_layers_and_all_batches_share_one_graph(embedded: FrozenTarget, changes: dict[str, Any]) -> None:
    dense, compiled = pair(embedded, **changes)
    for seed, rows in enumerate((ROWS, OTHER_ROWS, ROWS)):
        batch = batch_of(rows, seed)
        torch.testing.assert_close(features(compiled, batch), features(dense, batch), rtol=1e-4, atol=1e-3)
    with torch.inference_mode():  # as Lightning validates, the batch made inside
        batch = batch_of(OTHER_ROWS)
        found, hidden = last_hidden(compiled, batch)
    assert not found.is_inference()
    assert not found.requires_grad
    assert not hidden.requires_grad
    torch.testing.assert_close(found, features(dense, batch), rtol=1e-4, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_every_target_has_its_own_graphs(embedded: FrozenTarget) -> None:
    """A sweep makes more of them than Dynamo allows variants of one function."""
    for number in range(torch._dynamo.config.recompile_limit + 1):
        _, compiled = pair(embedded, hidden_size=8 * (number + 1), num_hidden_layers=5)
        features(compiled, token_batch([[(30, 0)]], 128, vocab=60))


def test_generating_and_decoding_stay_as_they_are(embedded: FrozenTarget) -> None:
    dense, compiled = pair(embedded)
    features(compiled, batch_of(ROWS))
    assert untouched(compiled)
    graphs = dict(counters["stats"])
    drafter = lively_drafter(drafter_for(compiled))
    prompt = [5, 9, 3]
    plain = decode_plain(compiled, prompt, 12)
    assert plain.ids == decode_plain(dense, prompt, 12).ids
    assert decode_chain(compiled, drafter, prompt, 12).ids == plain.ids
    ids = torch.tensor([prompt])
    generated = compiled.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert generated[0, 3:].tolist() == plain.ids
    assert dict(counters["stats"]) == graphs
    assert isinstance(compiled.model(ids, use_cache=True).past_key_values, DynamicCache)


def test_an_error_on_the_way_leaves_nothing_behind(embedded: FrozenTarget) -> None:
    _, compiled = pair(embedded)

    def trip(*_: Any) -> None:
        raise ValueError("on the way")

    handle = compiled._layers[1].register_forward_hook(trip)
    with pytest.raises(ValueError, match="on the way"):
        features(compiled, batch_of(ROWS))
    handle.remove()
    assert untouched(compiled)


def test_without_compilation_it_refuses(embedded: FrozenTarget) -> None:
    _, compiled = pair(embedded)
    message = r"2 x 4 heads x 256 queries x 256 keys takes .* TORCH_COMPILE_DISABLE"
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match=message):
        features(compiled, batch_of(ROWS))
    assert untouched(compiled)


def test_a_layer_that_does_not_compile_is_an_error_in_one_line(embedded: FrozenTarget) -> None:
    _, compiled = pair(embedded)
    mlp = compiled._layers[0].mlp
    mlp.forward = lambda x: torch._dynamo.graph_break() or type(mlp).forward(mlp, x)
    with pytest.raises(
        UserError, match=r"target\.path='tiny': its layers could not be compiled .* target\.compile=false"
    ) as error:
        features(compiled, batch_of(ROWS))
    assert "\n" not in str(error.value)


def test_one_variant_too_many_is_an_error(embedded: FrozenTarget) -> None:
    _, compiled = pair(embedded)
    with torch._dynamo.config.patch(recompile_limit=1):
        features(compiled, batch_of(ROWS))
        with pytest.raises(UserError, match="could not be compiled"):
            features(compiled, token_batch([[(30, 0)]], 128, vocab=60))


def test_what_cannot_be_compiled_says_so(embedded: FrozenTarget) -> None:
    target = tiny_target(embedded.info)
    assert not target.compiled  # on a CPU only if asked for
    target.model._supports_attention_backend = False
    with pytest.raises(UserError, match="cannot be compiled for packed rows"):
        FrozenTarget(target.info, target.model, compile=True)


def test_rows_too_long_for_dense_attention_run(embedded: FrozenTarget) -> None:
    dense, _ = pair(embedded)
    limited = FrozenTarget(dense.info, copy.deepcopy(dense.model), dense_limit_gib=1e-6, compile=True, backend="aot_eager")
    assert features(limited, batch_of(ROWS)).isfinite().all()
