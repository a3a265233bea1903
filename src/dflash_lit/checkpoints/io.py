"""Lightning's way to checkpoint files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

from dflash_lit.checkpoints.file import DiskFullError, load, save

__all__ = ["VerifiedCheckpointIO"]


class VerifiedCheckpointIO(CheckpointIO):
    """Checkpoints as :mod:`dflash_lit.checkpoints.file` writes and reads them; a plugin of the Trainer.

    Attributes:
        full: why the last checkpoint could not be saved, inside :meth:`tolerant`; None if it was.
    """

    def __init__(self) -> None:
        self.full: DiskFullError | None = None
        self._tolerant = False

    @contextmanager
    def tolerant(self) -> Iterator[None]:
        """Inside the block a full disk is kept in ``full`` instead of being raised, and nothing is removed after it."""
        self.full, self._tolerant = None, True
        try:
            yield
        finally:
            self._tolerant = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """See :func:`dflash_lit.checkpoints.file.save`. There are no ``storage_options``."""
        if storage_options is not None:
            raise TypeError("storage_options: checkpoints are files on a disk, which take none")
        self.full = None
        try:
            save(checkpoint, path)
        except DiskFullError as error:
            if not self._tolerant:
                raise
            self.full = error

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See :func:`dflash_lit.checkpoints.file.load`: onto the CPU, without running code, whatever is asked for."""
        return load(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file; not if it was to make place for one that could not be saved."""
        if not (self._tolerant and self.full):
            Path(path).unlink(missing_ok=True)
