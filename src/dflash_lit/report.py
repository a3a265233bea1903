"""What a training run came to: one self-contained `report.html`, and the closing table of the terminal.

    python -m dflash_lit.report RUN_FOLDER     # builds report.html again from summary.json and metrics.csv
    python -m dflash_lit.report SWEEP_FOLDER   # of all jobs of a sweep: report.html, results.csv and best.yaml

Nothing is made up: a value that the run did not measure is shown as "not measured", a picture without data is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file, write_whole
from dflash_lit.report_page import (
    Metrics,
    decimal,
    duration_text,
    lossless_text,
    number,
    page,
    sampled_at,
    speed_text,
    tree_tau_text,
    tree_text,
)
from dflash_lit.sweep_report import sweep_report
from dflash_lit.sweep_results import is_sweep
from dflash_lit.trained import SUMMARY

__all__ = ["closing_table", "load_metrics", "main", "write_report"]


def load_metrics(path: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Read a CSVLogger file: column name -> [(optimizer step, value)], steps ascending.

    Empty cells and cells that hold no number are no values. A resumed run may log a step twice: the later row wins.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; it is the metrics.csv that Lightning's CSVLogger writes")
    series: dict[str, dict[int, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            table = csv.DictReader(file)
            if table.fieldnames and "step" not in table.fieldnames:
                raise UserError(
                    f"{path}: has no column 'step', so it is no metrics.csv of Lightning's CSVLogger; name it by --metrics"
                )
            for row in table:
                step = _parsed(row.get("step"))
                if step is None or not math.isfinite(step):
                    continue
                for name, cell in row.items():
                    value = _parsed(cell)
                    if name and name != "step" and value is not None:
                        series.setdefault(name, {})[int(step)] = value
    except (OSError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}); name another by --metrics") from error
    return {name: sorted(values.items()) for name, values in series.items()}


def write_report(path: str | Path, summary: Mapping[str, Any], metrics: Metrics, config_yaml: str | None = None) -> Path:
    """Write the report of one run as a single HTML file that loads nothing else; replaces an older one in one step.

    `summary` is what summary.json holds, `metrics` what :func:`load_metrics` returns, `config_yaml` the composed configuration.
    """
    # A decoded sample may hold half a character, which write_whole takes: no reason for no report at the end of a run.
    return write_whole(path, page(summary, metrics, config_yaml))


def closing_table(summary: Mapping[str, Any], report: str | Path | None = None) -> Table:
    """The run in a dozen lines of at most 80 columns; `report` is where the HTML lies (else the summary's `report`)."""
    table = Table(title="DFlash drafter: results", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold", max_width=46)
    rows = [
        ("tau greedy (incl. bonus)", decimal(summary, "tau_greedy")),
        *((f"tau T={t} (incl. bonus)", decimal(summary, f"tau_t{t}")) for t in sampled_at(summary)),
        ("tree tau (incl. bonus)", tree_tau_text(summary)),
        ("tau untrained (incl. bonus)", decimal(summary, "tau_untrained")),
        ("lossless", lossless_text(summary)),
        ("tokens/s greedy", speed_text(summary, "")),
        *((f"tokens/s T={t}", speed_text(summary, f"_t{t}")) for t in sampled_at(summary)),
        ("chain EAL (incl. bonus)", decimal(summary, "val/chain_eal")),
        ("tree EAL (incl. bonus)", tree_text(summary)),
        ("wall time", duration_text(number(summary, "wall_s"))),
        ("peak memory", decimal(summary, "peak_rss_gib", " GiB")),
        ("export", str(summary.get("export_dir") or "not written")),
        ("report", str(report or summary.get("report") or "not written")),
    ]
    for name, value in rows:
        # Text, not str: a path with [brackets] is no markup.
        table.add_row(name, Text(value, style="dim" if value.startswith("not ") else ""))
    return table


def _parsed(cell: object) -> float | None:
    try:
        return float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Build report.html of a finished run or of a sweep again; 0, or 2 and one line on stderr if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m dflash_lit.report", description="Build report.html of a run or a sweep.")
    parser.add_argument("run_folder", type=Path, help=f"a run's ({SUMMARY}, csv/metrics.csv) or a sweep's")
    parser.add_argument("--metrics", type=Path, help="the metrics.csv to use, if it lies elsewhere")
    options = parser.parse_args(arguments)
    try:
        folder = options.run_folder
        print(sweep_report(folder) if is_sweep(folder) else _rebuild(folder, options.metrics))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _rebuild(run: Path, metrics: Path | None) -> Path:
    source = run / SUMMARY
    refuse_no_file(source, "give the folder of a run that finished")
    try:
        summary = json.loads(source.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{source}: cannot be read; give the folder of a run that finished") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON ({error}); run the training or the evaluation again") from None
    if not isinstance(summary, dict):
        raise UserError(f"{source}: holds a {type(summary).__name__}, not an object of results")
    places = [metrics] if metrics else [run / "metrics.csv", run / "csv" / "metrics.csv"]
    found = next((place for place in places if place.is_file()), places[0])
    config = next((path for path in (run / "config.yaml", run / ".hydra" / "config.yaml") if path.is_file()), None)
    text = config.read_text(encoding="utf-8", errors="replace") if config else None
    return write_report(run / "report.html", summary, load_metrics(found), text)


if __name__ == "__main__":
    sys.exit(main())
