"""The page of a W&B project, as code: sections and panels, plain enough to print and to test without W&B."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from dflash_lit.errors import UserError
from dflash_lit.watching.metric_groups import STEP

if TYPE_CHECKING:
    import wandb_workspaces.workspaces as ws

__all__ = ["SECTIONS", "Panel", "Section", "described", "make_workspace"]


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: its heading.
        kind: ``line`` over optimizer steps, ``media`` for images and tables, ``runs`` compares settings with the best length.
        metrics: keys; of a line panel with ``regex`` an example of what that matches.
        regex: lines are all metrics that match.
        log: whether the y axis is logarithmic.
    """

    title: str
    kind: Literal["line", "media", "runs"]
    metrics: tuple[str, ...]
    regex: str | None = None
    log: bool = False


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    name: str
    panels: tuple[Panel, ...]


SECTIONS = (
    Section(
        "Acceptance",
        (
            Panel("decoded tau", "line", ("acceptance/tau_greedy", "val/tau@64")),
            Panel("expected accepted length", "line", ("val/chain_eal", "val/tree_eal@64")),
            Panel("tree EAL by budget", "line", ("val/tree_eal@64",), regex=r"val/tree_eal@\d+"),
            Panel("accepted by slot", "line", ("val/acceptance_slot_1",), regex=r"val/acceptance_slot_\d+"),
            Panel("sample decodings", "media", ("acceptance/samples",)),
        ),
    ),
    Section(
        "Validation",
        (
            Panel("loss", "line", ("val/loss", "val/path_loss")),
            Panel("accuracy of each slot", "line", ("val/accuracy_slot_1",), regex=r"val/accuracy_slot_\d+"),
        ),
    ),
    Section(
        "Training",
        (
            Panel("loss", "line", ("train/loss", "train/path_loss")),
            Panel("chain EAL", "line", ("train/chain_eal",)),
            Panel("gradient norm", "line", ("train/gradient_norm", "train/path_gradient_norm"), log=True),
            Panel("learning rate", "line", ("train/learning_rate",), regex=r"train/learning_rate.*"),
            Panel("steps that went wrong", "line", ("train/skipped_steps", "train/spikes", "train/rollbacks")),
        ),
    ),
    Section(
        "Pipeline",
        (
            Panel("thousand tokens a second", "line", ("pipeline/ktok_s", "pipeline/supply_ktok_s", "pipeline/demand_ktok_s")),
            Panel("share of time waited", "line", ("pipeline/wait_share", "pipeline/target_wait_share")),
            Panel("batches that lay ready", "line", ("pipeline/queue_depth",)),
        ),
    ),
    Section(
        "Compilation and memory",
        (
            Panel("graphs made after the first step (none)", "line", ("compile/recompiles",)),
            Panel("peak memory (GiB)", "line", ("system/peak_memory_gib", "system/peak_gpu_memory_gib")),
        ),
    ),
    Section("Mask and packing", (Panel("pictures", "media", ("pictures/mask", "pictures/packing")),)),
    Section("Runs", (Panel("settings and length", "runs", ("val/tree_eal@64",)),)),
)

_SETTINGS = (
    "objective.weights",
    "objective.labels",
    "optimizer.kind",
    "optimizer.lr",
    "drafter.block_size",
    "drafter.layers",
    "seed",
)
"""Axes of the panel that compares runs, as keys of the config."""


def described() -> dict[str, Any]:
    """The layout as JSON has it."""
    return {"x": STEP, "sections": [asdict(section) for section in SECTIONS], "settings": list(_SETTINGS)}


def make_workspace(entity: str, project: str, name: str = "DFlash drafters") -> ws.Workspace:
    """The workspace as the ``wandb-workspaces`` library takes it; its ``save()`` applies it.

    Raises:
        UserError: if that library is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ModuleNotFoundError as error:
        raise UserError(
            "wandb-workspaces is not installed; pip install wandb-workspaces, or print the layout with --json"
        ) from error

    def made(panel: Panel) -> Any:
        if panel.kind == "media":
            return wr.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))
        if panel.kind == "runs":
            columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.Config(key)) for key in _SETTINGS]
            columns += [wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(f"{key}.max")) for key in panel.metrics]
            return wr.ParallelCoordinatesPlot(title=panel.title, columns=columns)
        ys: list[Any] = [] if panel.regex else list(panel.metrics)
        return wr.LinePlot(title=panel.title, x=STEP, y=ys, metric_regex=panel.regex, log_y=panel.log or None)

    sections = [ws.Section(name=one.name, panels=[made(panel) for panel in one.panels], is_open=True) for one in SECTIONS]
    # What has no panel here (the machine's own figures, curves by slot and budget) gets one of W&B's.
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, auto_generate_panels=True)
