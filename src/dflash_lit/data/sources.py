"""Where records come from: JSONL and Parquet files, folders and globs of them, Hugging Face data sets on disk or by name.

JSONL is read here, line by line: the JSON reader of ``datasets`` (and Arrow's) ends at the first broken line, without saying which,
and wants one schema for all. Parquet goes through Arrow, so that nothing is copied first; data sets go through ``datasets``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from dflash_lit.data.records import LONGEST, Columns, without_nulls
from dflash_lit.data.skips import Skip
from dflash_lit.errors import UserError

__all__ = ["Shard", "Source", "find_sources", "is_replaced", "read_shard", "shards"]

_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz")
_PARQUET = (".parquet",)
# Where ``dflash-lit respond`` puts what is not to be trained on.
_DROPPED = ".dropped.jsonl"
_SHARD_BYTES = 8 * 2**20
_SHARD_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Source:
    """One file or data set.

    Attributes:
        kind: ``lines``, ``parquet`` or ``dataset``.
        path: of the file, or of the data set for messages.
        version: changes whenever the content does.
        data: the ``datasets.Dataset``, else None. It is memory-mapped, and travels to other processes as its path.
    """

    kind: str
    path: str
    version: str
    data: Any = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a source that is read at a time.

    Attributes:
        first, stop: bytes of a file of lines, rows of anything else.
        line: number of the first line or row, from 1.
        group: row group of a Parquet file.
    """

    source: Source
    first: int
    stop: int
    line: int = 1
    group: int = 0


def find_sources(paths: str | Sequence[str], *, split: str = "train") -> list[Source]:
    """All files and data sets that ``paths`` name, sorted within each.

    Args:
        paths: files, folders (with all that is below them, but hidden files, ``.json`` and ``.dropped.jsonl``), globs (without
            ``.dropped.jsonl``, unless they end so), folders
            written by ``Dataset.save_to_disk``, or names of data sets on a Hugging Face hub (``owner/name``, or
            ``owner/name:subset``).
        split: of data sets.

    Raises:
        UserError: for a path that names nothing readable.
    """
    if not isinstance(paths, str) and (not isinstance(paths, Iterable) or isinstance(paths, Mapping)):
        raise UserError(f"data.path={paths!r}: is no path; give a file, a folder, a glob or the name of a data set")
    found: list[Source] = []
    for path in [paths] if isinstance(paths, str) else paths:
        if not isinstance(path, str) or not path or "\0" in path:
            raise UserError(f"data.path={path!r}: is no path; give a file, a folder, a glob or the name of a data set")
        found += _find(path, split)
    if not found:
        raise UserError("data.path: names no file; give a file, a folder, a glob or the name of a data set")
    return found


def _find(path: str, split: str) -> list[Source]:
    try:
        place = Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"data.path={path!r}: that user has no home folder") from error
    try:
        if place.is_file():
            return [_file(place, path)]
        if place.is_dir():
            if any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
                return [_dataset(path, split, on_disk=True)]
            inside = sorted(p for p in place.rglob("*") if _meant(p.relative_to(place)) and p.is_file())
            if not inside:
                raise UserError(f"data.path={path!r}: holds no file of {', '.join([*_LINES, *_PARQUET])}")
            return [_file(p, str(p)) for p in inside]
        if has_magic(path):
            matching = sorted(Path(p) for p in glob(str(place), recursive=True))
            if not path.endswith(_DROPPED):
                matching = [p for p in matching if not p.name.endswith(_DROPPED)]
            if not matching:
                raise UserError(f"data.path={path!r}: matches no file")
            return [_file(p, str(p)) for p in matching if p.is_file()]
    except OSError as error:
        raise UserError(f"data.path={path!r}: cannot be read ({error.strerror or error})") from error
    # What looks like a file is one that is missing.
    if _kind(place) or place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"data.path={path!r}: no such file or folder")
    return [_dataset(path, split, on_disk=False)]


def _meant(path: Path) -> bool:
    """Whether a file of a folder is data: neither hidden, nor settings, nor what ``dflash-lit respond`` has dropped."""
    if any(part.startswith((".", "_")) for part in path.parts) or path.name.endswith((".json", _DROPPED)):
        return False
    return _kind(path) is not None


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return "lines" if name.endswith(_LINES) else "parquet" if name.endswith(_PARQUET) else None


def _file(path: Path, named: str) -> Source:
    kind = _kind(path)
    if kind is None:
        raise UserError(f"data.path={named!r}: unknown kind of file; give one of {', '.join([*_LINES, *_PARQUET])}")
    return Source(kind, str(path), _version(path))


def _version(path: Path) -> str:
    about = path.stat()
    return f"{path.resolve()}:{about.st_size}:{about.st_mtime_ns}"


def is_replaced(version: str) -> bool:
    """Whether a file is there still, but with other content than the source that had this ``version``; false of data sets."""
    path = Path(version.rsplit(":", 2)[0])
    try:
        return path.is_absolute() and path.is_file() and _version(path) != version
    except (OSError, ValueError):
        return False


def _dataset(path: str, split: str, *, on_disk: bool) -> Source:
    import datasets  # seconds to import, and only needed here

    try:
        if on_disk:
            data = datasets.load_from_disk(str(Path(path).expanduser()))
        else:
            name, _, subset = path.partition(":")
            data = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # whatever the library, its readers and the network raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        what = "is no data set" if on_disk else "is neither a file nor a data set that can be loaded"
        raise UserError(f"data.path={path!r}, data.split={split!r}: {what} ({reason})") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"data.split={split!r}: {path} has {', '.join(map(str, data))}")
        data = data[split]
    return Source("dataset", path, f"{path}:{split}:{data._fingerprint}", data)


def shards(sources: Sequence[Source]) -> Iterator[Shard]:
    """Cut the sources into parts of some megabytes, always in the same way.

    Raises:
        UserError: for a file that cannot be read at all.
    """
    for source in sources:
        if source.kind == "lines":
            yield from _line_shards(source)
        elif source.kind == "parquet":
            yield from _parquet_shards(source)
        else:
            rows = len(source.data)
            for first in range(0, rows, _SHARD_ROWS):
                yield Shard(source, first, min(first + _SHARD_ROWS, rows), first + 1)


def _line_shards(source: Source) -> Iterator[Shard]:
    """Parts that end with a line. The lines before each are counted, so that it can name its own."""
    try:
        if source.path.lower().endswith(".gz"):  # cannot be read from its middle
            yield Shard(source, 0, -1)
            return
        with open(source.path, "rb") as file:
            first, line = 0, 1
            while block := file.read(_SHARD_BYTES):
                lines, last = block.count(b"\n"), block[-1:]
                size = len(block)
                # The rest of the line, which may be of any length, in pieces.
                while last != b"\n" and (piece := file.readline(2**20)):
                    size, last = size + len(piece), piece[-1:]
                    lines += last == b"\n"
                yield Shard(source, first, first + size, line)
                first, line = first + size, line + lines
    except OSError as error:
        raise UserError(f"{source.path}: cannot be read ({error.strerror or error}); check the path") from error


def _parquet_shards(source: Source) -> Iterator[Shard]:
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            rows = file.metadata.num_rows
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:  # names of columns are text
        raise UserError(f"{source.path}: is no readable Parquet file ({' '.join(str(error).split())[:200]})") from error
    if rows != sum(sizes):
        raise UserError(
            f"{source.path}: is a damaged Parquet file: it says that it has {rows} rows, and that its parts have {sum(sizes)}"
        )
    line = 1
    for group, rows in enumerate(sizes):
        yield Shard(source, 0, rows, line, group)
        line += rows


def read_shard(shard: Shard, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Every record as (where it stands, value): what was read, or a :class:`Skip` in its place.

    Raises:
        UserError: if the file itself cannot be read.
    """
    source = shard.source
    try:
        if source.kind == "lines":
            yield from _read_lines(shard)
        elif source.kind == "parquet":
            yield from _read_parquet(shard, columns)
        else:
            kept = [name for name in columns.names() if name in source.data.column_names]
            if not kept:
                for row in range(shard.first + 1, shard.stop + 1):
                    yield f"{_named(source)}[{row}]", {}
                return
            rows = source.data.select_columns(kept)
            for first in range(shard.first, shard.stop, 256):
                part = rows.select(range(first, min(first + 256, shard.stop)))
                for row, value in enumerate(_values(len(part), partial(_of_dataset, part)), first + 1):
                    yield f"{_named(source)}[{row}]", value
    # A pyarrow.ArrowInvalid is a ValueError, too; nothing else here raises one.
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise UserError(f"{source.path}: cannot be read ({' '.join(str(error).split())[:200]})") from error


def _named(source: Source) -> str:
    """The path as text: names of files are bytes, and need not be UTF-8."""
    return source.path.encode("utf-8", "backslashreplace").decode()


def _values(count: int, read: Callable[[int, int], list[Any]]) -> Iterator[Any]:
    """Rows as Python's values; a :class:`Skip` for each that has none, such as a date beyond Python's or broken UTF-8.

    Args:
        read: so many rows from a first one on.
    """
    try:
        values = read(0, count)
    except (ValueError, OverflowError, pyarrow.ArrowException):
        values = None
    for row in range(count):
        try:
            (value,) = read(row, 1) if values is None else (values[row],)
            value = without_nulls(value, everywhere=True)
        except Skip as skip:
            value = skip
        except UnicodeDecodeError as error:
            value = Skip("not UTF-8", f"byte {error.start + 1}")
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            value = Skip("wrong type", " ".join(str(error).split())[:80])
        yield value


def _of_dataset(rows: Any, first: int, count: int) -> list[Any]:
    values: list[Any] = rows.select(range(first, first + count)).to_list()
    return values


def _of_batch(batch: pyarrow.RecordBatch, first: int, count: int) -> list[Any]:
    values: list[Any] = batch.slice(first, count).to_pylist()
    return values


def _read_lines(shard: Shard) -> Iterator[tuple[str, Any]]:
    path, named = shard.source.path, _named(shard.source)
    opened = gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # noqa: SIM115
    with cast(BinaryIO, opened) as file:
        if shard.first:
            file.seek(shard.first)
        place, number = shard.first, shard.line
        # One byte more than may be: a longer line is then seen as such, and never held.
        while (shard.stop < 0 or place < shard.stop) and (line := file.readline(LONGEST + 1)):
            size, tail = len(line), line[-1:]
            while tail != b"\n" and (piece := file.readline(2**20)):
                size, tail = size + len(piece), piece[-1:]
            if size > LONGEST:
                yield f"{named}:{number}", Skip("too long", f"a line of {size / 1e6:.1f} MB")
            elif line.strip():
                yield f"{named}:{number}", _parsed(line, first=number == 1)
            place, number = place + size, number + 1


def _parsed(line: bytes, *, first: bool) -> Any:
    if b"\0" in line:
        return Skip("NUL character")
    try:
        return json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return Skip("not UTF-8", f"byte {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return Skip("broken JSON", str(error)[:80])


def _read_parquet(shard: Shard, columns: Columns) -> Iterator[tuple[str, Any]]:
    with pyarrow.parquet.ParquetFile(shard.source.path) as file:
        names = set(file.schema_arrow.names)
        kept = [name for name in columns.names() if name in names]
        row = shard.line
        if not kept:
            for row in range(shard.line, shard.line + shard.stop):
                yield f"{_named(shard.source)}[{row}]", {}
            return
        for batch in file.iter_batches(256, row_groups=[shard.group], columns=kept):
            for number, value in enumerate(_values(batch.num_rows, partial(_of_batch, batch)), row):
                yield f"{_named(shard.source)}[{number}]", value
            row += batch.num_rows
