"""The target's decoder layers as one compiled graph, for as long as a packed row runs through them.

Layers, not the model: a graph of one layer compiles once for all of them (one more for sliding layers), and the hooks that
take features and end the pass stay outside, where they are ordinary Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from dflash_lit.attention.compiled import compiled

__all__ = ["packed_layers", "shared_layer_graph"]


def _layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # By its class: `layer.forward` is what leads here.
    return type(layer).forward(layer, *args, **kwargs)


def shared_layer_graph(backend: str = "inductor") -> Callable[..., Any]:
    """A compiled ``(layer, *args, **kwargs) -> outputs`` for all layers of one target.

    Nothing in it names the layer, so layers of equal sizes share a graph: weights are inputs.
    """
    return compiled(_layer, backend=backend)


@contextmanager
def packed_layers(layers: nn.ModuleList, attention: str, graph: Callable[..., Any] | None) -> Iterator[None]:
    """Inside the block ``layers`` use ``attention``, and run through ``graph`` unless that is None.

    Both are taken back afterwards: generating and decoding go through the same layers with caches and lengths that change
    with every token, and would compile anew for each.
    """
    # Private: the public setter is a model's, and here there are only its layers; tests/target/test_compiled_layers.py fails if
    # it is no longer where they look. Of a target with several modalities that is the language model's config, copied or shared.
    found = {id(c): c for m in layers.modules() if isinstance(c := getattr(m, "config", None), PretrainedConfig)}
    before = [(config, config._attn_implementation) for config in found.values()]
    forwards = [vars(layer).get("forward") for layer in layers]  # as other libraries may have set it
    try:
        for config, _ in before:
            config._attn_implementation = attention
        if graph is not None:
            for layer in layers:
                layer.forward = partial(graph, layer)
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
        for config, name in before:
            config._attn_implementation = name
