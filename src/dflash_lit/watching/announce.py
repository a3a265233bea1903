"""What a run is about to do, as lines for people: model, data, placement, memory, steps, time."""

from __future__ import annotations

from dflash_lit.config import TrainConfig
from dflash_lit.doctor.finding import gib
from dflash_lit.doctor.memory import Recipe, run_bytes
from dflash_lit.errors import UserError
from dflash_lit.placement.forecast import rank_bytes
from dflash_lit.placement.layout import Role
from dflash_lit.placement.sizes import Sizes, measure_sizes
from dflash_lit.plan import Plan
from dflash_lit.watching.pace import Pace, expected_time

__all__ = ["announcement", "expected_memory"]


def announcement(
    cfg: TrainConfig, plan: Plan, free: int | None, *, pace: Pace | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Name -> text, in the order in which they are read. Weights are not looked at.

    Args:
        free: bytes free on the device of rank 0; None if unknown.
        pace: of the last run like this one on this machine; None if there was none.
        gpu: name of the GPU of rank 0; None on a CPU.
    """
    data, trainer, drafter = cfg.data, cfg.trainer, plan.drafter
    recipe = _recipe(cfg)
    try:
        sizes: Sizes | None = measure_sizes(plan.info.path, recipe, trust_remote_code=cfg.target.trust_remote_code)
        memory = _memory(expected_memory(sizes, recipe, plan, cfg.placement.prefetch), free)  # type: ignore[arg-type]
    except UserError as error:  # models build themselves in many ways; loading it will say what is wrong
        sizes, memory = None, f"not known before the weights are read ({error})"
    target = f"{_count(sizes.target_parameters)} parameters, " if sizes else ""
    ours = f"{_count(sizes.drafter_parameters)} parameters, " if sizes else ""
    rows = data.rows_per_batch * plan.layout.drafter_world * trainer.accumulate_grad_batches
    tokens = rows * data.row_tokens
    layout = plan.layout
    place = f"{layout.hosts} hosts, " if layout.hosts > 1 else ""
    sides = f"{layout.world - layout.drafter_world} target and " if layout.targets else ""
    return {
        "target": f"{plan.info.path}: {target}{str(plan.dtype).removeprefix('torch.')}",
        "drafter": f"{ours}{drafter.num_hidden_layers} layers, {cfg.drafter.anchors} blocks of {drafter.block_size} a row, "
        f"features of layers {', '.join(map(str, drafter.target_layer_ids))}",
        "data": f"{_source(cfg)}; rows of {data.row_tokens:,} tokens"
        + ("; features written once, and read" if data.offline else ""),
        "placement": f"{cfg.placement.kind}: {place}{sides}{layout.drafter_world} drafter process"
        f"{'' if layout.drafter_world == 1 else 'es'} on {plan.device.type} ({plan.precision})",
        "memory": memory,
        "steps": f"{trainer.max_steps:,} of {rows:,} rows, {tokens:,} tokens ({_count(tokens * trainer.max_steps)} in all); "
        f"validation every {plan.val_every:,}",
        "learning": f"{plan.objective}, {cfg.optimizer.kind} at {cfg.optimizer.lr:g}",
        "time": expected_time(cfg, plan, sizes, recipe, pace, gpu),
    }


def expected_memory(sizes: Sizes, recipe: Recipe, plan: Plan, prefetch: int | None) -> dict[str, dict[str, int]]:
    """About how many bytes a process takes while it trains, by process and part (see :func:`run_bytes`, :func:`rank_bytes`)."""
    gpu = plan.device.type == "cuda"
    if not plan.layout.targets:
        return {"": run_bytes(sizes.target_parameters, sizes.drafter_parameters, sizes.drafter, recipe, gpu=gpu)}
    of_role = rank_bytes(sizes, recipe, plan.layout.prefetch if prefetch is None else prefetch)
    if not gpu:  # which is what those figures are for: in fp32 features, weights and activations take twice the room
        of_role[Role.TARGET] = {k: v if k == "libraries" else 2 * v for k, v in of_role[Role.TARGET].items()}
        queue = 2 * of_role[Role.DRAFTER]["feature queue"]
        alone = run_bytes(sizes.ends_parameters, sizes.drafter_parameters, sizes.drafter, recipe, gpu=False)
        of_role[Role.DRAFTER] = {**alone, "feature queue": queue}
    return {"a drafter": of_role[Role.DRAFTER], "a target": of_role[Role.TARGET]}


def _memory(expected: dict[str, dict[str, int]], free: int | None) -> str:
    totals = {who: sum(parts.values()) for who, parts in expected.items()}
    said = ", ".join(f"{who} about {gib(total)}".strip() for who, total in totals.items())
    if free is None:
        return said
    # The estimate is rough: nine tenths, as of the doctor.
    short = "; TOO LITTLE, lower data.rows_per_batch or drafter.anchors" if max(totals.values()) > 0.9 * free else ""
    return f"{said} while training, of {gib(free)} free{short}"


def _source(cfg: TrainConfig) -> str:
    data = cfg.data
    if data.kind == "chat":
        return f"conversations of {data.path if isinstance(data.path, str) else ', '.join(map(str, data.path or ()))}"
    source = "the standard library" if data.prompts is None else data.prompts
    return f"at most {data.train_prompts:,} prompts of {source}, responses of {data.response_tokens:,} tokens at T={data.temperature:g}"


def _recipe(cfg: TrainConfig) -> Recipe:
    return Recipe(
        "",
        layers=cfg.drafter.layers,
        features=len(cfg.drafter.target_layer_ids or ()) or cfg.drafter.features,
        block_size=cfg.drafter.block_size,
        anchors=cfg.drafter.anchors,
        rows=cfg.data.rows_per_batch,
        row_tokens=cfg.data.row_tokens,
        intermediate_size=cfg.drafter.intermediate_size,
        chunk_slots=cfg.objective.chunk_slots,
    )


def _count(number: float) -> str:
    """About: ``512``, ``4.9 M``, ``8.2 B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
