"""The groups of what a run logs: what belongs together on a page, and what of it a table of runs should show."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPS", "STEP", "Metric", "MetricGroup"]

STEP = "trainer/global_step"
"""The axis of everything: optimizer steps, as Lightning's ``WandbLogger`` names them."""


@dataclass(frozen=True)
class Metric:
    """Metrics of one name or one pattern.

    Attributes:
        name: whole, or ending in ``*``.
        summary: what a table of runs shows of them, for W&B's ``define_metric``.
    """

    name: str
    summary: str = "last"


@dataclass(frozen=True)
class MetricGroup:
    """Metrics with the same prefix; ``metrics`` lists the pattern of all before the exceptions from it."""

    name: str
    meaning: str
    metrics: tuple[Metric, ...]


_SMALLER, _LARGER, _PACE = "min,last", "max,last", "mean,last"

GROUPS = (
    MetricGroup(
        "train",
        "of the optimizer steps",
        (
            Metric("train/*"),
            Metric("train/loss", _SMALLER),
            Metric("train/path_loss", _SMALLER),
            Metric("train/chain_eal", _LARGER),
        ),
    ),
    MetricGroup(
        "val",
        "of the teacher-forced validation pass; tau@ is decoded",
        (Metric("val/*", _LARGER), Metric("val/loss", _SMALLER), Metric("val/path_loss", _SMALLER)),
    ),
    MetricGroup("acceptance", "of real decoding, and by slot and budget", (Metric("acceptance/*", _LARGER),)),
    MetricGroup(
        "pipeline",
        "tokens a second, and which side waits for which",
        (Metric("pipeline/*", _PACE), Metric("pipeline/ktok_s", "mean,max,last")),
    ),
    MetricGroup("compile", "graphs made before the first step, and after it (none)", (Metric("compile/*"),)),
    MetricGroup("system", "memory of the process; W&B adds those of the machine", (Metric("system/*", _LARGER),)),
)
