"""What a layout will need and reach: memory a GPU, bytes on the wire, and which side the other one waits for.

Rates are tokens of packed rows a second. They leave out what both sides do besides: the exchange of gradients, and waiting for one
another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from dflash_lit.doctor.finding import GIB, gib
from dflash_lit.doctor.memory import Recipe, run_bytes
from dflash_lit.placement.flops import Flop, block_pairs, causal_pairs, drafter_flop, target_flop
from dflash_lit.placement.layout import Device, Layout, Role, device_name, table, transport
from dflash_lit.placement.target_worker import SENDS

if TYPE_CHECKING:
    from dflash_lit.placement.sizes import Sizes

__all__ = [
    "ATTENTION",
    "MEASURED",
    "Colocated",
    "Forecast",
    "Rates",
    "Verdict",
    "Wire",
    "expected_rates",
    "flop_per_token",
    "forecast",
    "rank_bytes",
]

MEASURED = {Role.TARGET: 610e12, Role.DRAFTER: 580e12}
"""Useful FLOP a second in products with weights, on an H200 with Qwen3-8B's sizes."""

ATTENTION = 0.66
"""What attention reaches of that. With these three both sides' rates at rows of 3,072 and of 40,064 tokens (docs/performance.md, each
measured alone, with optimizer and clipping) are met within 2.5 %."""

_BALANCED = 0.05
"""Sides closer than this share are called balanced: the rates are not known better."""

_WIDTH = 2
"""Bytes of a feature and of a target's weight: bf16."""

_REQUEST = 3 * 4
"""Bytes a token that a drafter sends: its id, document and position, int32."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one target rank and of one drafter rank."""

    target: float
    drafter: float

    @property
    def colocated(self) -> float:
        """Of one rank that is both, in turn."""
        return 1 / (1 / self.target + 1 / self.drafter)


@dataclass(frozen=True)
class Verdict:
    """Which side sets the pace.

    Attributes:
        bound: the slower side, or "balanced".
        supply, demand: tokens a second of all targets, of all drafters.
        rate: tokens a second of the run.
        best: the split of as many ranks with the highest rate; this one if none is better.
        best_rate: its rate, tokens a second.
    """

    layout: Layout
    bound: Literal["target", "drafter", "balanced"]
    supply: float
    demand: float
    rate: float
    best: Layout
    best_rate: float

    @classmethod
    def of(cls, layout: Layout, rates: Rates) -> Verdict:
        """Judge a layout by rates that are expected, or that were measured."""

        def sides(split: Layout) -> tuple[float, float]:
            return split.hosts * split.targets * rates.target, split.drafter_world * rates.drafter

        ranks = layout.ranks_per_host
        splits = [Layout(targets, ranks - targets, layout.hosts) for targets in range(1, ranks)]
        best = max(splits, key=lambda split: (min(sides(split)), split == layout))  # of equals the split that there is
        supply, demand = sides(layout)
        rate = min(supply, demand)
        bound: Literal["target", "drafter", "balanced"] = "target" if supply < demand else "drafter"
        if rate >= (1 - _BALANCED) * max(supply, demand):
            bound = "balanced"
        return cls(layout, bound, supply, demand, rate, best, min(sides(best)))

    def __str__(self) -> str:
        """One line for people."""
        targets, drafters = self.layout.hosts * self.layout.targets, self.layout.drafter_world
        line = (
            f"{self.bound if self.bound == 'balanced' else f'{self.bound}-bound'}: "
            f"{_many(targets, 'target')} {'supplies' if targets == 1 else 'supply'} {_rate(self.supply)}, "
            f"{_many(drafters, 'drafter')} {'takes' if drafters == 1 else 'take'} {_rate(self.demand)}; "
        )
        each = " a host" if self.layout.hosts > 1 else ""
        if self.best == self.layout:
            return f"{line}no other split of {self.layout.ranks_per_host} ranks{each} is faster"
        best = f"{_many(self.best.targets, 'target')} + {_many(self.best.drafters, 'drafter')}{each}"
        return f"{line}{best} would reach {_rate(self.best_rate)}"


@dataclass(frozen=True)
class Wire:
    """Traffic while the run goes at its expected rate.

    Attributes:
        transport: of the features.
        bytes_per_token: of features.
        features: bytes a second from all targets to all drafters.
        out_of_target, into_drafter: bytes a second of one rank.
        requests: bytes a second from all drafters to all targets.
        gradients_per_step: bytes that each drafter sends in an optimizer step to average gradients (a ring).
    """

    transport: str
    bytes_per_token: int
    features: float
    out_of_target: float
    into_drafter: float
    requests: float
    gradients_per_step: float


@dataclass(frozen=True)
class InFlight:
    """What the requests that drafters keep in flight allow.

    From asking to the next question a request's place is taken for a pass of a target and for a step of the drafter, so that
    ``prefetch + 1`` places of each drafter bound the rate, whatever the sides could do.

    Attributes:
        prefetch: requests in flight while a drafter trains on a batch.
        most: tokens a second that they allow.
        enough: the prefetch with which the slower side never waits; one more than if all passes and steps took equally long.
    """

    prefetch: int
    most: float
    enough: int

    @classmethod
    def of(cls, layout: Layout, rates: Rates, rate: float, prefetch: int) -> InFlight:
        """Args: ``rate``: tokens a second of the run, if nobody waits."""
        taken = 1 / rates.target + 1 / rates.drafter  # seconds a token
        places = rate / layout.drafter_world * taken
        return cls(prefetch, layout.drafter_world * (prefetch + 1) / taken, math.ceil(round(places, 6)))

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{_many(self.prefetch, 'request')} in flight of each drafter {'allows' if self.prefetch == 1 else 'allow'} "
            f"{_rate(self.most)}; placement.prefetch={self.enough} is enough, for uneven steps too"
        )


@dataclass(frozen=True)
class Colocated:
    """The same GPUs, each with a drafter that has a target of its own in its process.

    No split is faster where one GPU holds both: a token costs a GPU the time of a target and that of a drafter, and whoever
    splits N + M leaves the sides to wait for one another, but where N / M is just the ratio of those times.

    Attributes:
        drafters: of all hosts.
        rate: tokens a second of all of them.
        memory: bytes of one, by part.
    """

    drafters: int
    rate: float
    memory: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, rates: Rates, sizes: Sizes, recipe: Recipe) -> Colocated:
        """On as many GPUs as ``layout`` takes."""
        memory = run_bytes(sizes.target_parameters, sizes.drafter_parameters, sizes.drafter, recipe, gpu=True)
        return cls(layout.world, layout.world * rates.colocated, memory)

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{_many(self.drafters, 'drafter')} with a target each would reach {_rate(self.rate)}, if a GPU holds "
            f"{gib(sum(self.memory.values()))}: placement=colocated placement.drafters={self.drafters}"
        )


@dataclass(frozen=True)
class Forecast:
    """All of it.

    Attributes:
        devices: of each local rank.
        memory: bytes of one rank of each role, by part.
        flop_per_token: useful FLOP of each role.
        rates: tokens a second of one rank.
    """

    layout: Layout
    devices: tuple[Device, ...]
    sizes: Sizes
    recipe: Recipe
    memory: dict[Role, dict[str, int]]
    flop_per_token: dict[Role, Flop]
    rates: Rates
    wire: Wire
    in_flight: InFlight
    verdict: Verdict
    colocated: Colocated

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; bytes, FLOP, seconds."""
        layout = self.layout
        return {
            "target": self.sizes.target,
            "parameters": {"target": self.sizes.target_parameters, "drafter": self.sizes.drafter_parameters},
            "layout": asdict(layout),
            "processes": [
                {
                    "rank": rank,
                    "host": layout.host(rank),
                    "local_rank": layout.local_rank(rank),
                    "role": str(layout.role(rank)),
                    "trainer_rank": layout.drafter_rank(rank) if layout.role(rank) is Role.DRAFTER else None,
                    "device": device_name(self.devices[layout.local_rank(rank)]),
                }
                for rank in range(layout.world)
            ],
            "rows_per_step": layout.global_rows(self.recipe.rows),
            "memory": {str(role): {**parts, "total": sum(parts.values())} for role, parts in self.memory.items()},
            "flop_per_token": {
                str(role): {**flop._asdict(), "total": flop.total} for role, flop in self.flop_per_token.items()
            },
            "tokens_per_s_of_a_rank": asdict(self.rates),
            "wire": asdict(self.wire),
            "in_flight": asdict(self.in_flight),
            "verdict": {**asdict(self.verdict), "text": str(self.verdict)},
            "colocated": {**asdict(self.colocated), "text": str(self.colocated)},
        }

    def __str__(self) -> str:
        """For people, several lines."""
        sizes, recipe, layout, wire = self.sizes, self.recipe, self.layout, self.wire
        c = sizes.drafter
        layers = ", ".join(str(i) for i in c.target_layer_ids)
        lines = [
            f"target    {sizes.target}: {_count(sizes.target_parameters)} parameters, features of layers {layers}",
            f"drafter   {_count(sizes.drafter_parameters)} parameters in {c.num_hidden_layers} layers",
            f"batch     {recipe.rows} rows x {recipe.row_tokens} tokens, {recipe.anchors} anchors x {c.block_size} slots a row; "
            f"{layout.global_rows(recipe.rows)} rows a step over {_many(layout.drafter_world, 'drafter')}, times accumulation",
            "",
            table(layout, self.devices),
            "",
            *_memory_lines(self.memory),
            "",
            f"rates     a target {_speed(self.rates.target, self.flop_per_token[Role.TARGET].total)}, "
            f"a drafter {_speed(self.rates.drafter, self.flop_per_token[Role.DRAFTER].total)}",
            f"wire      {wire.bytes_per_token / 1024:.1f} KiB of features a token over {wire.transport}: {_bytes(wire.features)}/s, "
            f"{_bytes(wire.into_drafter)}/s into a drafter, {_bytes(wire.out_of_target)}/s out of a target; "
            f"requests {_bytes(wire.requests)}/s",
        ]
        if layout.drafter_world > 1:
            lines.append(f"          gradients: each drafter sends {_bytes(wire.gradients_per_step)} an optimizer step")
        if self.in_flight.prefetch < self.in_flight.enough:
            lines.append(f"prefetch  {self.in_flight}")
        return "\n".join([*lines, f"verdict   {self.verdict}", f"colocated {self.colocated}"])


def flop_per_token(sizes: Sizes, recipe: Recipe) -> dict[Role, Flop]:
    """Useful FLOP a token of packed rows; a row is taken for one document that may have an anchor anywhere."""
    rows, tokens = recipe.rows, recipe.row_tokens
    target = target_flop(
        sizes.used_weights,
        tokens=rows * tokens,
        pairs=rows * sum(causal_pairs(tokens, window) for window in sizes.windows),
        width=sizes.target_width,
    )
    pairs = rows * block_pairs(recipe.anchors, sizes.drafter.block_size, tokens)
    parts = drafter_flop(sizes.drafter, rows=rows, tokens=tokens, anchors=recipe.anchors, pairs=pairs)
    attention = parts.pop("attention")
    drafter = Flop(sum(parts.values()), attention)
    return {role: Flop(*(x / (rows * tokens) for x in flop)) for role, flop in ((Role.TARGET, target), (Role.DRAFTER, drafter))}


def expected_rates(flop: dict[Role, Flop], flop_per_s: dict[Role, float]) -> Rates:
    """Rates of ranks that do so many useful FLOP a second in products, and :data:`ATTENTION` of that in attention."""

    def rate(role: Role) -> float:
        return flop_per_s[role] / (flop[role].products + flop[role].attention / ATTENTION)

    return Rates(rate(Role.TARGET), rate(Role.DRAFTER))


def rank_bytes(sizes: Sizes, recipe: Recipe, prefetch: int) -> dict[Role, dict[str, int]]:
    """About how many bytes of a GPU one rank of each role takes, by part.

    A drafter takes what :func:`run_bytes` says of a run whose target is embedding and head only, and ``prefetch`` feature
    batches more: that function's activations hold one, the one it learns from, which here is counted with the queue.

    A target has all its weights in bf16, feature batches (the one it makes, and :data:`SENDS` on their way), and of a forward
    pass the outputs of the feature layers and the widest place of one layer: three tensors of the MLP's width (gate, up,
    product), three of the model's.
    """
    drafter, parameters = sizes.drafter, sizes.drafter_parameters
    tokens = recipe.rows * recipe.row_tokens
    batch = _WIDTH * tokens * drafter.feature_size
    run = run_bytes(sizes.ends_parameters, parameters, drafter, recipe, gpu=True)
    masters = 4 * parameters
    return {
        Role.DRAFTER: {
            "weights": masters,
            "embedding, head": run["target"],
            "gradients": masters,
            "optimizer": run["drafter with gradients and AdamW"] - 2 * masters,
            "activations": run["activations"] - batch,
            "feature queue": (prefetch + 1) * batch,
            "libraries": run["libraries"],
        },
        Role.TARGET: {
            "weights": _WIDTH * sizes.target_parameters,
            "activations": batch + _WIDTH * tokens * 3 * (sizes.target_intermediate + drafter.hidden_size),
            "feature queue": (SENDS + 1) * batch,
            "libraries": GIB,
        },
    }


def forecast(
    layout: Layout, devices: Sequence[Device], sizes: Sizes, recipe: Recipe, *, prefetch: int, rates: Rates | None = None
) -> Forecast:
    """Put it together.

    Args:
        devices: of each local rank.
        prefetch: requests that a drafter keeps in flight.
        rates: default: those of :data:`MEASURED`.
    """
    flop = flop_per_token(sizes, recipe)
    rates = rates or expected_rates(flop, MEASURED)
    verdict = Verdict.of(layout, rates)
    per_token = _WIDTH * sizes.drafter.feature_size
    features, drafters = per_token * verdict.rate, layout.drafter_world
    wire = Wire(
        transport=transport(devices),
        bytes_per_token=per_token,
        features=features,
        out_of_target=features / (layout.hosts * layout.targets),
        into_drafter=features / drafters,
        requests=_REQUEST * verdict.rate,
        gradients_per_step=2 * (drafters - 1) / drafters * 4 * sizes.drafter_parameters,
    )
    in_flight = InFlight.of(layout, rates, verdict.rate, prefetch)
    memory = rank_bytes(sizes, recipe, prefetch)
    colocated = Colocated.of(layout, rates, sizes, recipe)
    return Forecast(layout, tuple(devices), sizes, recipe, memory, flop, rates, wire, in_flight, verdict, colocated)


def _memory_lines(memory: dict[Role, dict[str, int]]) -> list[str]:
    roles = (Role.DRAFTER, Role.TARGET)
    parts = list(dict.fromkeys(part for role in roles for part in memory[role]))
    rows = [(part, *(gib(memory[role][part]) if part in memory[role] else "-" for role in roles)) for part in parts]
    rows.append(("total", *(gib(sum(memory[role].values())) for role in roles)))
    return [
        f"{name:<16}  {drafter:>11}  {target:>11}"
        for name, drafter, target in [("memory, about", "a drafter", "a target"), *rows]
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _rate(tokens_per_s: float) -> str:
    thousands = tokens_per_s / 1000
    return f"{thousands:,.0f} Ktok/s" if thousands >= 100 else f"{thousands:.3g} Ktok/s"


def _scaled(value: float, units: str) -> str:
    """With a decimal prefix; ``units`` are those of 10^6, 10^9 and 10^12."""
    exponent = 2 if value >= 1e12 else 1 if value >= 1e9 else 0
    return f"{value / 10 ** (6 + 3 * exponent):.3g} {units.split()[exponent]}"


def _count(parameters: int) -> str:
    return _scaled(parameters, "M B T")


def _speed(tokens_per_s: float, flop: float) -> str:
    return f"{_rate(tokens_per_s)} ({_scaled(flop, 'MFLOP GFLOP TFLOP')} a token, {tokens_per_s * flop / 1e12:.3g} TFLOP/s)"


def _bytes(count: float) -> str:
    return _scaled(count, "MB GB TB")
