"""What is compared, and at which sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["DRAFTERS", "OBJECTIVES", "PRESETS", "Job", "Settings", "jobs"]

RESPONSE_TEMPERATURE = 0.7


def _tree(labels: str, temperature: float, floor: str) -> dict[str, Any]:
    return {
        "labels": labels,
        "weights": "tree_survival",
        "tree_budget": 64,
        "tree_temperature": temperature,
        "floor": 0.3,
        "floor_weights": floor,
    }


OBJECTIVES: dict[str, dict[str, Any]] = {
    "ce-decay": {"labels": "hard", "weights": "decay"},
    "ce-dpace": {"labels": "hard", "weights": "dpace"},
    "soft-dpace": {"labels": "soft", "weights": "dpace"},
    "ce-tree-T2": _tree("hard", 2.0, "decay"),
    "soft-tree-T2": _tree("soft", 2.0, "decay"),
    "soft-mix-T2": _tree("soft", 2.0, "dpace"),
    "soft-decay": {"labels": "soft", "weights": "decay"},
    "soft-tree-T4": _tree("soft", 4.0, "decay"),
    "soft-mix-T4": _tree("soft", 4.0, "dpace"),
    "soft-dpace-path": {"labels": "soft", "weights": "dpace"},
    "soft-dpace-causal": {"labels": "soft", "weights": "dpace"},
}
"""Settings of :class:`dflash_lit.objective.config.Objective` by name; soft labels at the temperature of the responses."""

DRAFTERS: dict[str, dict[str, Any]] = {"soft-dpace-path": {"path_width": 256}, "soft-dpace-causal": {"causal": True}}
"""What those of the names that are not about the objective alone change in the drafter's config."""

MAIN = ("ce-decay", "ce-dpace", "soft-dpace", "soft-dpace-path", "ce-tree-T2", "soft-tree-T2", "soft-mix-T2")
CONTINUED = ("soft-dpace", "soft-tree-T2", "soft-mix-T2", "soft-mix-T4", "soft-tree-T4")
MORE = ("soft-dpace-causal", "soft-decay", "soft-mix-T4", "soft-tree-T4")


@dataclass(frozen=True)
class Settings:
    """Sizes of an experiment; the presets are :data:`PRESETS`.

    Attributes:
        target: a Hugging Face folder or ``embedded``; None: one is built.
        recipe: options of ``dflash_lit.target.embedded.build`` for a target that is built.
        roots: folders whose ``*.py`` files are its corpus; empty: all of the interpreter's.
        prompt_tokens, response_tokens: of each text; together a multiple of 128, which is a row.
        train_prompts, held_prompts: how many texts are trained on, and measured on.
        decode_prompts, new_tokens: how many of the held-out prompts are decoded, and how far.
        responses_per_batch, decode_batch: prompts at a time.
        block, layers, features, intermediate: of the drafter; intermediate None: the target's.
        rows, anchors: texts a step, and blocks a text.
        steps: of a run from scratch.
        warm_steps, continued_steps: of the long-block regime: of the start that all share, and of each run from it. 0: left out.
        optimizer, lr, warmup: the same for all objectives.
        objectives: names of :data:`OBJECTIVES` trained from scratch first; ``more`` last.
        continued: those of the long-block regime.
        seeds: 0, 1, ... decide first weights, order of the texts, and anchors.
    """

    target: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    roots: tuple[str, ...] = ()
    prompt_tokens: int = 64
    response_tokens: int = 192
    train_prompts: int = 57_344
    held_prompts: int = 1024
    decode_prompts: int = 512
    new_tokens: int = 128
    responses_per_batch: int = 3648
    decode_batch: int = 512
    block: int = 16
    layers: int = 3
    features: int = 4
    intermediate: int | None = None
    rows: int = 64
    anchors: int = 16
    steps: int = 3000
    warm_steps: int = 9000
    continued_steps: int = 3000
    optimizer: str = "muon"
    lr: float = 5e-3
    warmup: float = 0.04
    temperatures: tuple[float, ...] = (0.0, 0.7)
    budgets: tuple[int, ...] = (16, 64, 256)
    objectives: tuple[str, ...] = MAIN
    continued: tuple[str, ...] = CONTINUED
    more: tuple[str, ...] = MORE
    seeds: int = 3

    def __post_init__(self) -> None:
        if (self.prompt_tokens + self.response_tokens) % 128:
            raise ValueError("prompt_tokens + response_tokens must be a multiple of 128, the tile of attention")
        for name in (*self.objectives, *self.continued, *self.more):
            if name not in OBJECTIVES:
                raise ValueError(f"no objective {name!r}: choose from {', '.join(OBJECTIVES)}")

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Settings:
        values = json.loads((folder / "settings.json").read_text())
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


_BUILT = Settings(
    recipe={
        "minutes": 2.0,
        "vocabulary": 4096,
        "hidden": 512,
        "intermediate": 1536,
        "layers": 8,
        "heads": 8,
        "rows": 128,
        "lr": 3e-3,
    }
)
PRESETS: dict[str, Settings] = {
    "built": _BUILT,
    # As the main job has them, but for one text a row.
    "embedded": Settings(
        target="embedded",
        prompt_tokens=48,
        response_tokens=208,
        train_prompts=640,
        held_prompts=96,
        decode_prompts=32,
        new_tokens=64,
        responses_per_batch=230,
        decode_batch=64,
        block=8,
        layers=2,
        features=3,
        intermediate=384,
        rows=4,
        anchors=32,
        steps=500,
        warm_steps=0,
        continued_steps=0,
        lr=1e-2,
        more=(),
    ),
    # Every stage within seconds, for tests.
    "tiny": replace(
        _BUILT,
        recipe={
            "minutes": 0.02,
            "vocabulary": 300,
            "hidden": 32,
            "intermediate": 64,
            "layers": 5,
            "heads": 2,
            "rows": 2,
            "lr": 3e-3,
            "lookahead": 2,
        },
        prompt_tokens=16,
        response_tokens=112,
        train_prompts=12,
        held_prompts=6,
        decode_prompts=3,
        new_tokens=8,
        responses_per_batch=8,
        decode_batch=2,
        block=4,
        layers=1,
        features=2,
        rows=4,
        anchors=4,
        steps=3,
        warm_steps=2,
        continued_steps=2,
        lr=2e-3,
        budgets=(4, 16),
        objectives=("ce-decay", "soft-dpace", "soft-dpace-path"),
        continued=("soft-dpace",),
        more=(),
        seeds=2,
    ),
}


@dataclass(frozen=True)
class Job:
    """One drafter: trained, measured and decoded.

    Attributes:
        regime: "scratch"; "warm start", what the long-block regime begins from; or "continued" from that.
        after: the job whose drafter it begins with.
    """

    regime: str
    objective: str
    seed: int
    steps: int
    after: str | None = None

    @property
    def name(self) -> str:
        return f"{self.regime}_{self.objective}_{self.seed}".replace(" ", "-")


def jobs(settings: Settings) -> list[Job]:
    """All jobs, those first that matter most: whoever stops early has whole seeds of the main comparison."""
    made: list[Job] = []
    long = settings.warm_steps > 0 and settings.continued_steps > 0
    if long:  # the longest one, and others wait for it
        made.append(Job("warm start", "soft-dpace", 1000, settings.warm_steps))
    warm = made[0].name if long else None
    seeds = range(settings.seeds)
    made += [Job("scratch", objective, seed, settings.steps) for seed in seeds for objective in settings.objectives]
    if long:
        made += [
            Job("continued", objective, seed, settings.continued_steps, warm)
            for seed in seeds
            for objective in settings.continued
        ]
    made += [Job("scratch", objective, seed, settings.steps) for seed in seeds for objective in settings.more]
    return made
