"""``metrics.csv`` of a run that may be killed and go on: no row that a checkpoint counts is lost, none is there twice."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger

from dflash_lit.checkpoints.file import load
from dflash_lit.errors import UserError
from dflash_lit.files import write_whole
from dflash_lit.trained import folder_of

__all__ = ["MetricsLogger"]

_log = logging.getLogger(__name__)

_NAME = "metrics.csv"
_AFTER = ("pipeline/", "system/", "compile/")
Row = dict[str, Any]


class MetricsLogger(CSVLogger):
    """Lightning's ``CSVLogger`` that goes on with the file of the run it resumes.

    Lightning's own removes a file that is there. This one begins with the rows of the resumed run up to its checkpoint: those after it
    are computed again. The file is replaced as a whole where it is not only appended to.

    Args:
        resumes: checkpoint that the run goes on from, in a folder beside the ``csv`` one of its run; None for a new run.
        settings: ``CSVLogger``'s.
    """

    def __init__(self, *, resumes: str | Path | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._resumes = resumes

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            folder = Path(self.log_dir)
            self._experiment = _MetricsFile(folder, self._kept(folder))  # type: ignore[assignment]
        return self._experiment

    def _kept(self, folder: Path) -> list[Row]:
        if self._resumes is None:
            return []
        checkpoint = Path(self._resumes)
        earlier = folder_of(checkpoint) / folder.relative_to(self.save_dir) / _NAME
        try:
            step = int(load(checkpoint, mmap=True)["global_step"])
        except (UserError, KeyError, TypeError, ValueError, OverflowError):  # Lightning will say so
            return []
        # Lightning counts optimizer steps from 0 here: those of a checkpoint of step N are 0 to N - 1.
        return [row for row in _read(earlier) if int(row["step"]) < step + _after_a_step(row)]


def _after_a_step(row: Row) -> bool:
    """Whether it was logged with the number of steps done, not of the step."""
    return all(name in ("step", "epoch") or name.startswith(_AFTER) for name in row)


class _MetricsFile:
    """What ``CSVLogger`` calls its experiment: rows in a file, new ones in memory until :meth:`save`."""

    def __init__(self, folder: Path, kept: list[Row]) -> None:
        self.folder, self.path = folder, folder / _NAME
        self.metrics: list[Row] = []
        self._hparams: dict[str, Any] = {}
        self._names: list[str] = []
        self._known = {(int(row["step"]), name) for row in kept for name in row if name != "step"}
        if kept:
            self._write_all(kept)
        else:
            self.path.unlink(missing_ok=True)  # of another run in this folder

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """A row; what the resumed run has already written of it is left out."""
        step = len(self.metrics) if step is None else step
        row = {name: value for name, value in metrics_dict.items() if (step, name) not in self._known}
        if row.keys() - {"epoch"}:
            self.metrics.append({**row, "step": step})

    def log_hparams(self, params: dict[str, Any]) -> None:
        self._hparams.update(params)

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(self.folder / "hparams.yaml", self._hparams)
        rows, self.metrics = self.metrics, []
        if not rows:
            return
        if not {name for row in rows for name in row} <= set(self._names) or not self.path.exists():
            self._write_all([*_read(self.path), *rows])
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._text(rows))  # a few rows, in one piece

    def _write_all(self, rows: list[Row]) -> None:
        self._names = sorted({name for row in rows for name in row})
        write_whole(self.path, ",".join(self._names) + "\n" + self._text(rows))

    def _text(self, rows: list[Row]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._names, lineterminator="\n").writerows(rows)
        return text.getvalue()


def _read(path: Path) -> list[Row]:
    """Whole rows, without their empty cells. Others are left out, and that is said."""
    if not path.is_file():
        return []
    # A killed process may have written a part of its last row.
    text, _, _ = path.read_text(encoding="utf-8-sig", errors="replace").rpartition("\n")
    try:
        found = list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error:  # a cell without an end
        found = [{}]
    rows = [{name: cell for name, cell in row.items() if cell} for row in found if _is_whole(row)]
    if left := len(found) - len(rows):
        _log.warning("%s: %d of %d rows are damaged, and are left out of this run's metrics", path, left, len(found))
    return rows


def _is_whole(row: dict[str, Any]) -> bool:
    """As many cells as columns, all of them numbers or empty."""
    if None in row or None in row.values() or not re.fullmatch("[0-9]{1,18}", row.get("step", "")):
        return False
    try:
        return all(not cell or float(cell) is not None for cell in row.values())
    except ValueError:
        return False
