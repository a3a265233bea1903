"""Whether everything that a run is going to write has room for its name: seen at its start, not after hours of training."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger

from dflash_lit.errors import UserError
from dflash_lit.export import refuse_other
from dflash_lit.trained import SUMMARY

__all__ = ["refuse_blocked"]

_CURE = "move it, or name another folder with hydra.run.dir"


def refuse_blocked(folder: Path, callbacks: Iterable[Callback], loggers: Iterable[Logger]) -> None:
    """Refuse files where folders are going to be, folders where files are, and an export's folder that holds something else.

    Args:
        folder: of the run.
        callbacks: those of them that write say where: checkpoints as Lightning's do, an export by its ``folder``.

    Raises:
        UserError: naming what is in the way.
    """
    folders = [folder / ".rows"]
    files = [folder / SUMMARY, folder / "report.html"]
    exports: list[Path] = []
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            folders.append(Path(callback.dirpath))
            files += sorted(Path(callback.dirpath).glob(f"*{callback.FILE_EXTENSION}"))
        if hasattr(callback, "exported_to") and isinstance(place := getattr(callback, "folder", None), Path):
            exports.append(place)
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            folders.append(Path(logger.log_dir))
            files += [Path(logger.log_dir) / name for name in ("metrics.csv", "hparams.yaml")]
    for path in folders:
        if (kind := _kind(path)) is not None and not stat.S_ISDIR(kind):
            raise UserError(f"{path}: is no folder, and this run is going to make one there; {_CURE}")
    for path in files:
        if (kind := _kind(path)) is not None and stat.S_ISDIR(kind):
            raise UserError(f"{path}: is a folder, and this run is going to write a file there; {_CURE}")
    for path in exports or [folder / "drafter"]:
        refuse_other(path)


def _kind(path: Path) -> int | None:
    """None if there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return path.lstat().st_mode if path.is_symlink() else None
    except OSError:  # a file among its parents, or a link to itself: to be named as what it is
        return stat.S_IFLNK
