"""About how much memory a run takes, from sizes alone, against what is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_lit.doctor.finding import GIB, Finding, gib

if TYPE_CHECKING:
    from dflash_lit.doctor.machine import Machine
    from dflash_lit.drafter.config import DrafterConfig

__all__ = ["PUBLISHED", "SMALL", "Recipe", "memory", "run_bytes"]


@dataclass(frozen=True)
class Recipe:
    """What a run's memory hangs on besides the target: sizes of the drafter and of a batch, as in ``conf/``."""

    overrides: str
    layers: int
    features: int
    block_size: int
    anchors: int
    rows: int
    row_tokens: int
    intermediate_size: int | None = None
    chunk_slots: int = 4096

    @property
    def drafter(self) -> dict[str, Any]:
        """Keys of ``conf/drafter``."""
        return {name: getattr(self, name) for name in ("layers", "features", "block_size", "intermediate_size")}


SMALL = Recipe("drafter=small data=stdlib", 2, 3, 8, 32, 4, 256, intermediate_size=384)
"""The main job's. The embedded target has too few layers for the published drafter."""

PUBLISHED = Recipe("drafter=dflash data=file", 5, 5, 16, 512, 4, 3072)


def run_bytes(
    target_parameters: int, drafter_parameters: int, drafter: DrafterConfig, recipe: Recipe, *, gpu: bool
) -> dict[str, int]:
    """About how many bytes a run takes at its peak, by part.

    Weights of the target are bf16 on a GPU, fp32 on a CPU. The drafter has fp32 masters, gradients and two AdamW moments:
    16 bytes a parameter. Activations, with ``b`` = 2 bytes on a GPU (autocast) and 4 on a CPU:

    - ``b * layers * slots * (2 I + 5 (H + heads * D) + 2 kv * D)``, what backward needs of ``rows * anchors * B`` slots;
    - ``b * tokens * (features * H + H + 4 * layers * kv * D)``, context features, and their keys and values;
    - ``b * chunk_slots * V``, the logits that exist at a time;
    - on a CPU ``2 * 4 * layers * heads * slots * (S + B)``, dense scores.

    The factor 5 is fitted to the peaks in docs/performance.md; with it they are met within 5 %. Gradients and all activations
    exist together only where gradients are accumulated: otherwise the peak lies lower, at most by the size of the gradients.

    Args:
        target_parameters, drafter_parameters: numbers of parameters.
        drafter: its sizes.
        recipe: the batch's.
        gpu: whether it runs on one.
    """
    width = 2 if gpu else 4
    queries, keys = drafter.num_attention_heads * drafter.head_dim, drafter.num_key_value_heads * drafter.head_dim
    hidden, layers = drafter.hidden_size, drafter.num_hidden_layers
    slots, tokens = recipe.rows * recipe.anchors * recipe.block_size, recipe.rows * recipe.row_tokens
    kept = layers * slots * (2 * drafter.intermediate_size + 5 * (hidden + queries) + 2 * keys)
    kept += tokens * (drafter.feature_size + hidden + 4 * layers * keys)
    kept += min(recipe.chunk_slots, slots) * drafter.vocab_size
    scores = layers * drafter.num_attention_heads * slots * (recipe.row_tokens + recipe.block_size)
    return {
        "target": width * target_parameters,
        "drafter with gradients and AdamW": 16 * drafter_parameters,
        "activations": width * kept + (0 if gpu else 2 * 4 * scores),
        # Python and what it imports; on a GPU workspaces, and what the allocator cannot use.
        "libraries": GIB,
    }


def memory(machine: Machine) -> Iterator[Finding]:
    """A run that needs more than nine tenths of what is free is a warning: the estimate is rough."""
    if machine.target_problem:
        yield Finding("error", "memory", machine.target_problem, "give --target a model that a drafter can be trained for")
        return
    if isinstance(machine.needs, str):
        yield Finding(
            "warning",
            "memory",
            f"could not be estimated for {machine.target}: {machine.needs}",
            "compare the size of its weight files with the free memory",
        )
        return
    if not machine.needs or (machine.on_gpu and not machine.gpus):  # first the GPUs have to work
        return
    gpu = machine.gpus[0] if machine.gpus else None
    free, place = (gpu.free, f"on GPU {gpu.index}") if gpu else (machine.free_memory, "in main memory")
    total, activations = sum(machine.needs.values()), machine.needs.get("activations", 0)
    parts = ", ".join(f"{part} {gib(count)}" for part, count in machine.needs.items())
    found = f"{machine.target} with {machine.recipe.overrides} takes about {gib(total)} ({parts})"
    if free is None:
        yield Finding("ok", "memory", found)
    elif total <= 0.9 * free:
        yield Finding("ok", "memory", f"{found} of {gib(free)} free {place}")
    elif total - activations > 0.8 * free:
        advice = "weights and optimizer alone fill it: take a smaller target, or a device with more memory"
        yield Finding("warning", "memory", f"{found}, but {gib(free)} are free {place}", advice)
    else:
        advice = (
            "lower data.rows_per_batch (trainer.accumulate_grad_batches makes up for it), then drafter.anchors; "
            "objective.chunk_slots=2048 helps a little"
        )
        yield Finding("warning", "memory", f"{found}, but {gib(free)} are free {place}", advice)
