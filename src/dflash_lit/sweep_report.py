"""What a sweep came to: a table of its jobs, a picture, and the config of the best one as a file that trains it again.

python -m dflash_lit.report SWEEP_FOLDER
python train.py --config-dir SWEEP_FOLDER --config-name best
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.table import Table
from rich.text import Text

from dflash_lit.config import TrainConfig
from dflash_lit.errors import UserError
from dflash_lit.files import write_whole
from dflash_lit.sweep_page import page
from dflash_lit.sweep_results import Sweep, SweepJob, load_config, read_sweep, scalars

__all__ = ["ranking", "sweep_report"]


def sweep_report(folder: str | Path) -> Path:
    """Write ``report.html``, ``results.csv`` and, if any job has a result, ``best.yaml`` into a sweep's folder.

    Args:
        folder: ``hydra.sweep.dir``; each job is a folder below it with ``.hydra/`` and, if it got to its end, ``summary.json``.

    Returns:
        the report.

    Raises:
        UserError: if there are no jobs.
    """
    sweep = read_sweep(folder)
    write_whole(sweep.folder / "results.csv", _table(sweep))
    best = sweep.folder / "best.yaml"
    if sweep.best is None:
        best.unlink(missing_ok=True)  # of a report that was made before, of other jobs
    else:
        write_whole(best, _best_config(sweep, sweep.best))
    return write_whole(sweep.folder / "report.html", page(sweep))


def ranking(sweep: Sweep, most: int = 10) -> Table | None:
    """For the terminal: the best jobs by what was varied; None if no job has the metric."""
    if not sweep.ranked:
        return None
    title = f"Sweep: {min(most, len(sweep.ranked))} of {len(sweep.jobs)} jobs, best first"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("job", *sweep.varied, sweep.metric):
        table.add_column(Text(name), overflow="fold")
    for job in sweep.ranked[:most]:
        given = (job.overrides.get(key, "") for key in sweep.varied)
        # Text, not str: a value with [brackets] is no markup.
        table.add_row(*(Text(cell) for cell in (job.name, *given, f"{job.value(sweep.metric):.3f}")))
    return table


def _table(sweep: Sweep) -> str:
    keys = scalars(sweep.jobs)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job", "status", *sweep.varied, *keys])
    for job in sweep.jobs:
        values = [job.value(key) for key in keys]
        given = [job.overrides.get(key, "") for key in sweep.varied]
        writer.writerow([job.name, job.status, *given, *("" if value is None else repr(value) for value in values)])
    return file.getvalue()


def _best_config(sweep: Sweep, job: SweepJob) -> str:
    """A primary config for ``train.py``: all that the job was composed of, and where Hydra puts a run."""
    path = job.folder / ".hydra" / "config.yaml"
    composed = load_config(path)
    try:
        OmegaConf.merge(OmegaConf.structured(TrainConfig), composed)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: is no config of a run ({str(error).splitlines()[0][:200]}); best.yaml needs it") from None
    hydra = OmegaConf.select(load_config(job.folder / ".hydra" / "hydra.yaml"), "hydra", default=OmegaConf.create())
    kept = OmegaConf.masked_copy(hydra, [key for key in ("run", "sweep") if key in hydra])
    if "job" in hydra and "chdir" in hydra.job:
        kept.job = {"chdir": hydra.job.chdir}
    # "schema" first: names and types are checked as those of conf/train.yaml are.
    whole = OmegaConf.merge(OmegaConf.create({"defaults": ["schema", "_self_"]}), composed, OmegaConf.create({"hydra": kept}))
    given = " ".join(f"{key}={value}" for key, value in job.overrides.items())
    return (
        f"# Job {job.name} of {len(sweep.jobs)}: {sweep.metric} = {job.value(sweep.metric)}\n"
        f"# {given}\n"
        "# Train it again: python train.py --config-dir FOLDER_OF_THIS_FILE --config-name best\n"
        f"{OmegaConf.to_yaml(whole)}"
    )
