"""Features written once and read in every epoch, and in every run with the same rows: for small data and a large target.

What a target makes of a row is large: five layers of Qwen3-8B are 40 KiB a token. So the size is said first, and has a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dflash_lit.data.datamodule import EMPTY_ROW, RowDataset
from dflash_lit.data.held import WRITER, held, remove_left, sign
from dflash_lit.data.packing import Rows
from dflash_lit.errors import UserError
from dflash_lit.files import map_array, read_sealed, refuse_no_file, sealed
from dflash_lit.target.frozen import FrozenTarget
from dflash_lit.watching.counted import Counted

__all__ = ["LocalSource", "StoredFeatures", "ensure_features", "offline_bytes", "offline_key", "write_features"]

_META = "meta.json"
# Part of the key: raise it whenever the meaning of a stored file changes.
_FORMAT = 2
# NumPy has no bfloat16: its bits are kept.
_BITS: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.bfloat16: (torch.int16, "int16"),
    torch.float16: (torch.int16, "int16"),
    torch.float32: (torch.int32, "int32"),
}
_ROWS_HASHED = 64


@dataclass(frozen=True)
class StoredFeatures:
    """Tensors of N rows in memory-mapped files, by the name that they have in a batch.

    Attributes:
        arrays: integers of the tensors' bits, [N, S, ...].
        dtype: what they are bits of.
        sums: CRC-32 of each row, by the same names; rows are compared with them when they are read first.
        folder: where they are, for messages.
    """

    arrays: dict[str, np.ndarray]
    dtype: torch.dtype
    sums: dict[str, list[int]]
    folder: Path
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def take(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Tensors [R, S, ...] of the rows; zeros of ``EMPTY_ROW``."""
        taken = {}
        for name, array in self.arrays.items():
            bits = np.zeros((len(rows), *array.shape[1:]), dtype=array.dtype)
            for place, row in enumerate(rows):
                if row != EMPTY_ROW:
                    bits[place] = array[row]
                    self._check(name, row, bits[place])
            taken[name] = torch.from_numpy(bits).view(self.dtype)
        return taken

    def _check(self, name: str, row: int, bits: np.ndarray) -> None:
        if (name, row) in self._seen:
            return
        if zlib.crc32(bits.tobytes()) != self.sums[name][row]:
            raise _damaged(self.folder, f"row {row} of {name}.npy has changed")
        self._seen.add((name, row))

    @classmethod
    def open(cls, folder: Path) -> StoredFeatures:
        """Those that :func:`write_features` has written.

        Raises:
            UserError: if they cannot be seen from here, or are damaged.
        """
        refuse_no_file(folder / _META, "data.cache_dir: all hosts must see it")
        try:
            meta = read_sealed(folder / _META)
            dtype, sums = {str(dtype): dtype for dtype in _BITS}[f"torch.{meta['dtype']}"], dict(meta["sums"])
            arrays = {name: map_array(folder / f"{name}.npy") for name in sorted(sums)}
            for name, array in arrays.items():
                if array.dtype != _BITS[dtype][1] or len(array) != len(sums[name]):
                    raise ValueError(f"{name}.npy holds {len(array)} rows of {array.dtype}")
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise _damaged(folder, error) from error
        return cls(arrays, dtype, sums, folder)


def _damaged(folder: Path, error: object) -> UserError:
    return UserError(f"data.cache_dir: {folder} is damaged ({error}); delete it, and the features are written again")


def offline_bytes(rows: int, row_tokens: int, widths: Sequence[int], dtype: torch.dtype) -> int:
    """What tensors of these widths take for so many rows."""
    return rows * row_tokens * sum(widths) * dtype.itemsize


def offline_key(rows: Rows, target: str, layer_ids: Sequence[int], teacher: bool, dtype: torch.dtype) -> str:
    """Names the features: a digest of everything that they depend on.

    Args:
        target: its fingerprint.
        teacher: whether the last hidden states are among them.
    """
    digest = hashlib.sha256(
        json.dumps([_FORMAT, target, list(layer_ids), teacher, str(dtype), len(rows), rows.row_tokens]).encode()
    )
    for start in range(0, len(rows), _ROWS_HASHED):
        part = rows.take(range(start, min(start + _ROWS_HASHED, len(rows))))
        for column in (part.input_ids, part.document_ids, part.position_ids):
            digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:24]


def write_features(
    rows: Rows,
    folder: Path,
    with_features: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    *,
    rows_per_batch: int,
    report: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write what ``with_features`` adds to batches of all rows; complete or not at all.

    Args:
        rows: whose features.
        folder: to be made; its name is :func:`offline_key`.
        with_features: of a placement whose target is in this process.
        rows_per_batch: of the run, so that nothing has other shapes than in training.
        report: told how many rows were written, after each batch.

    Raises:
        UserError: if the disk is full, or the folder cannot be made.
    """
    made = folder.with_name(f".{folder.name}.partial")
    try:
        while not (folder / _META).is_file():
            with held(made) as ours:
                if not ours:  # another run has written them, or failed
                    continue
                try:
                    if (folder / _META).is_file():
                        break
                    for left in made.iterdir():  # of a run that was killed
                        left.unlink()
                    sign(made)
                    _write(rows, made, with_features, rows_per_batch, report)
                    (made / WRITER).unlink()
                    os.replace(made, folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(f"data.offline: features cannot be written to {folder} ({error.strerror}); free some space") from error


def _write(
    rows: Rows,
    made: Path,
    with_features: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    rows_per_batch: int,
    report: Callable[[int], None],
) -> None:
    data = RowDataset(rows)
    arrays: dict[str, np.ndarray] = {}
    sums: dict[str, list[int]] = {}
    dtype = torch.float32
    for start in range(0, len(rows), rows_per_batch):
        chosen = range(start, min(start + rows_per_batch, len(rows)))
        batch = data.batch(chosen, rows_per_batch)
        full = with_features(batch)
        for name in full.keys() - batch.keys():
            value = full[name][: len(chosen)].cpu()
            dtype = value.dtype
            integer, bits = _BITS[dtype]
            if name not in arrays:
                shape = (len(rows), *value.shape[1:])
                arrays[name] = np.lib.format.open_memmap(made / f"{name}.npy", mode="w+", dtype=bits, shape=shape)
                _reserve(made / f"{name}.npy")
            written = value.contiguous().view(integer).numpy()
            arrays[name][start : start + len(chosen)] = written
            sums.setdefault(name, []).extend(zlib.crc32(row) for row in written)
        report(len(chosen))
    while arrays:  # flushed to the disk when they are let go
        arrays.popitem()[1].flush()  # type: ignore[attr-defined]
    meta = {"sums": sums, "dtype": str(dtype).removeprefix("torch.")}
    (made / _META).write_text(sealed(meta), encoding="utf-8")


def _reserve(path: Path) -> None:
    """Take the file's space now: writing to a map of a disk that has become full would end the process without a word."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


class LocalSource(Protocol):
    """A target in this process; see :class:`dflash_lit.placement.strategy.LocalTarget`."""

    target: FrozenTarget
    layer_ids: tuple[int, ...]
    teacher: bool

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with its features."""


def ensure_features(
    sides: Sequence[Rows],
    source: LocalSource,
    place: Path,
    *,
    widths: Sequence[int],
    limit_gib: float,
    rows_per_batch: int,
    console: Console,
) -> list[Path]:
    """A folder with the features of each side's rows, written now unless it is there.

    Args:
        sides: training and validation rows.
        source: of the features.
        place: where the folders are.
        widths: of the tensors, in numbers a token.
        limit_gib: how much may be written.
        rows_per_batch: of the run.
        console: told the size, then the progress.

    Raises:
        UserError: if they would be too large for the limit or the disk; nothing was written then.
    """
    target = source.target
    folders = [place / offline_key(rows, target.fingerprint, source.layer_ids, source.teacher, target.dtype) for rows in sides]
    missing = {folder: rows for folder, rows in zip(folders, sides, strict=True) if not (folder / _META).is_file()}
    if not missing:
        console.print(f"  offline features are in {place}", highlight=False)
        return folders
    for left in place.glob(".*.partial"):  # of runs that were killed: nobody goes on with those
        remove_left(left)
    size = sum(offline_bytes(len(rows), rows.row_tokens, widths, target.dtype) for rows in missing.values())
    free = shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.exists())).free
    if size > min(free, limit_gib * 2**30):
        raise UserError(
            f"data.offline: features of {sum(map(len, missing.values()))} rows take {size / 2**30:.2f} GiB, over "
            f"data.offline_limit_gib={limit_gib:g} or the {free / 2**30:.1f} GiB that are free in {place}; use less data, or let the "
            "target run in every epoch (data.offline=false)"
        )
    console.print(f"  offline features: {size / 2**30:.2f} GiB go to {place}", highlight=False)
    with Counted("features of rows", sum(map(len, missing.values())), show=not console.quiet) as counted:
        for folder, rows in missing.items():
            write_features(
                rows,
                folder,
                source.with_features,
                rows_per_batch=rows_per_batch,
                report=counted.advance,
            )
    return folders
