"""Documents, tokenised once: memory-mapped Arrow files under a key of everything they depend on.

A store is written part by part, by several processes; each part appears whole or not at all, and a store that was interrupted goes on
with the parts that are missing. What a run holds is the index: lengths and spans, some tens of bytes a document.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from dflash_lit.cores import cores
from dflash_lit.data.chat import ChatSettings, ChatTokenizer, Tokens
from dflash_lit.data.held import held, remove_left, sign
from dflash_lit.data.records import Columns, Record, check_record
from dflash_lit.data.row_plan import Spans
from dflash_lit.data.skips import Skip, SkipRecord, Skips
from dflash_lit.data.sources import Shard, Source, find_sources, is_replaced, read_shard, shards
from dflash_lit.errors import UserError
from dflash_lit.files import file_digest, map_array, read_json, read_sealed, refuse_no_file, sealed, write_whole
from dflash_lit.placement.children import ignore_stops
from dflash_lit.watching.counted import Counted

__all__ = ["SCHEMA", "DocumentStore", "StoreSettings", "build_store", "fingerprint", "write_index"]

# Part of the key: raise it whenever the meaning of a stored file changes.
_FORMAT = 4
# Tokens of a record batch: Arrow's offsets have 32 bits.
_BATCH_TOKENS = 2**22
# Fewer parts than this are not worth starting processes for, which import everything anew.
_FEW_PARTS = 4
# What an unfinished store is made of; gone when it is finished, as all hidden files.
_SOURCES = ".sources"
# Tokens that decide on which side a document without a prompt is.
_POINT_TOKENS = 32

SCHEMA = pyarrow.schema(
    {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "spans": pyarrow.list_(pyarrow.int32()),
        "name": pyarrow.string(),
        "record": pyarrow.int32(),
        "key": pyarrow.int64(),
        "named": pyarrow.bool_(),
        "point": pyarrow.float64(),
        "sum": pyarrow.uint32(),
    }
)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How records are read.

    Attributes:
        columns: their names.
        chat: how they become tokens.
        skip_limit: share of the records that may be broken, in [0, 1].
        split: of data sets.

    Raises:
        UserError: if the limit is out of range.
    """

    columns: Columns = field(default_factory=Columns)
    chat: ChatSettings = field(default_factory=ChatSettings)
    skip_limit: float = 0.01
    split: str = "train"

    def __post_init__(self) -> None:
        if not 0 <= self.skip_limit <= 1:
            raise UserError(f"data.skip_limit={self.skip_limit:g}: is a share of the records, 0 to 1")


class DocumentStore:
    """Opened documents; token ids are read from the memory map when they are asked for.

    Attributes:
        folder: where it is.
        lengths: int32 [D]; offsets: int64 [D + 1] and spans: int32 [K, 2], see :class:`~dflash_lit.data.row_plan.Spans`.
        points: float64 [D] in [0, 1), a hash of the tokens before the first supervised one (of the first 32 tokens, if there is
            at most one); documents of one conversation have the same.
        skips: what was not taken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            meta = read_sealed(folder / "meta.json")
            self.skips = Skips.from_dict(meta["skips"])
            self._files: list[str] = meta["files"]
            # The index decides what a run learns, and is small. Documents have sums of their own, which are looked at with them.
            for name, digest in meta["index"].items():
                refuse_no_file(folder / "index" / name, "look at the disk")
                if file_digest(folder / "index" / name) != digest:
                    raise ValueError(f"index/{name} has changed")
            index = {Path(name).stem: map_array(folder / "index" / name) for name in meta["index"]}
            self.lengths, self.offsets, self.spans = index["lengths"], index["offsets"], index["spans"]
            self.points = index["points"]
            self._file, self._batch, self._row = index["file"], index["batch"], index["row"]
            self._sums = index["sums"]
        except (OSError, ValueError, UserError) as error:
            raise self._damaged(error) from error
        self._tables: dict[int, list[tuple[np.ndarray, np.ndarray, Any]]] = {}
        self._seen = np.zeros(len(self.lengths), dtype=np.bool_)

    def _damaged(self, error: object) -> UserError:
        return UserError(f"data.cache_dir: {self.folder} is damaged ({error}); delete it, and the data are tokenised again")

    def __len__(self) -> int:
        """D, the number of documents."""
        return len(self.lengths)

    @cached_property
    def supervision(self) -> Spans:
        """Lengths and spans of all documents, in memory."""
        return Spans(np.asarray(self.lengths), np.asarray(self.offsets), np.asarray(self.spans))

    def _of(self, document: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """Offsets, values and names of the record batch that a document is in."""
        number = int(self._file[document])
        if number not in self._tables:
            try:
                # Arrow would wait for a pipe's other end, and not even a signal would end that.
                refuse_no_file(self.folder / self._files[number], "look at the disk")
                # The map is closed when nothing refers to it any more.
                with pyarrow.ipc.open_stream(pyarrow.memory_map(str(self.folder / self._files[number]))) as stream:
                    self._tables[number] = [
                        (
                            batch.column("input_ids").offsets.to_numpy(),
                            batch.column("input_ids").values.to_numpy(),
                            batch.column("name"),
                        )
                        for batch in stream
                    ]
            except UserError as error:
                raise self._damaged(error) from error
            except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
                raise self._damaged(f"{self._files[number]}: {' '.join(str(error).split())[:120]}") from error
        batches = self._tables[number]
        if int(self._batch[document]) >= len(batches):
            raise self._damaged(f"{self._files[number]} is cut short")
        return batches[int(self._batch[document])]

    def input_ids(self, document: int) -> np.ndarray:
        """The tokens of one document: a view of the map, int32 [n], not to be written to.

        Raises:
            UserError: if they are not those that were written; looked at when a document is asked for first.
        """
        offsets, values, _ = self._of(document)
        row = int(self._row[document])
        if self._seen[document]:
            return values[offsets[row] : offsets[row + 1]]
        start, stop = (int(offsets[place]) if place < len(offsets) else -1 for place in (row, row + 1))
        ids = values[start:stop] if 0 <= start <= stop <= len(values) else values[:0]
        if len(ids) != self.lengths[document] or zlib.crc32(ids.tobytes()) != self._sums[document]:
            raise self._damaged(f"the tokens of document {document} in {self._files[int(self._file[document])]} have changed")
        self._seen[document] = True
        return ids

    def spans_of(self, document: int) -> np.ndarray:
        """The supervised stretches of one document: int32 [k, 2]."""
        return self.spans[self.offsets[document] : self.offsets[document + 1]]

    def name(self, document: int) -> str:
        """Where it comes from."""
        return str(self._of(document)[2][int(self._row[document])])


def build_store(
    paths: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    settings: StoreSettings,
    cache_dir: str | Path,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> tuple[DocumentStore, bool]:
    """Tokenise what ``paths`` name, or open what was tokenised before.

    Args:
        paths: see :func:`~dflash_lit.data.sources.find_sources`.
        tokenizer: the target's.
        cache_dir: folder of the stores; made if missing. Several hosts see the same one.
        workers: processes; None: one a core, none beside this one for little data.
        progress: show a bar with the time left.

    Returns:
        The store, and whether it was there already.

    Raises:
        UserError: for sources that cannot be read, more broken records than the limit, or no document at all.
    """
    if workers is not None and workers < 1:
        raise UserError(f"data.workers={workers}: must be at least 1")
    sources = find_sources(paths, split=settings.split)
    folder = Path(cache_dir) / f"documents-{fingerprint(sources, tokenizer, settings)[:32]}"
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        while not (folder / "meta.json").is_file():
            with held(partial) as ours:
                if not ours:  # another process has finished it, or failed
                    continue
                if (folder / "meta.json").is_file():  # made anew after the other had finished
                    partial.rmdir()
                    break
                sign(partial)
                write_whole(partial / _SOURCES, json.dumps([source.version for source in sources]))
                _remove_superseded(partial)
                skips = _tokenise(list(shards(sources)), tokenizer, settings, partial, workers, progress)
                write_index(partial, skips, settings.skip_limit)
                partial.rename(folder)
                return DocumentStore(folder), False
    except OSError as error:
        raise UserError(f"data.cache_dir={str(cache_dir)!r}: cannot be written ({error.strerror or error})") from error
    store = DocumentStore(folder)
    store.skips.check(settings.skip_limit)  # the limit is no part of the key
    return store, True


def _remove_superseded(partial: Path) -> None:
    """Remove unfinished stores beside this one that no run can go on with: one of their files has other content now.

    Others may be gone on with, and stay.
    """
    for other in partial.parent.glob("documents-*.partial"):
        try:
            versions = read_json(other / _SOURCES, "")
        except UserError:  # not known what of, or gone meanwhile
            continue
        if other != partial and isinstance(versions, list) and any(is_replaced(str(version)) for version in versions):
            remove_left(other)


def fingerprint(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, settings: StoreSettings) -> str:
    """The key of a store: equal for equal documents only."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = {
        "format": _FORMAT,
        "sources": [source.version for source in sources],
        "tokenizer": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
        "columns": asdict(settings.columns),
        "chat": asdict(settings.chat),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- tokenising


def _tokenise(
    parts: Sequence[Shard],
    tokenizer: PreTrainedTokenizerBase,
    settings: StoreSettings,
    folder: Path,
    workers: int | None,
    progress: bool,
) -> Skips:
    """Write every part that is not there yet; what was skipped in all of them, in their order."""
    skips = Skips()
    missing = [(number, part) for number, part in enumerate(parts) if not _is_done(folder, number)]
    processes = min(workers or (cores() if len(missing) >= _FEW_PARTS else 1), max(len(missing), 1))
    before = len(parts) - len(missing)
    with (
        Counted("tokenised parts", len(parts), done=before, show=progress and bool(missing)) as counted,
        closing(_done(missing, tokenizer, settings, folder, processes)) as done,  # an error ends the processes at once
    ):
        for number in done:
            _count(skips, folder, number)
            skips.check(settings.skip_limit, final=False)
            counted.advance()
    everything = Skips()
    for number in range(len(parts)):
        _count(everything, folder, number)
    return everything


def _done(
    missing: Sequence[tuple[int, Shard]],
    tokenizer: PreTrainedTokenizerBase,
    settings: StoreSettings,
    folder: Path,
    processes: int,
) -> Generator[int, None, None]:
    """Numbers of the parts as they are finished."""
    if processes == 1:
        chat = ChatTokenizer(tokenizer, settings.chat)
        for number, part in missing:
            _write_part(chat, settings.columns, folder, number, part)
            yield number
        return
    # Not forked: this process has threads, of torch and of tokenizers.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin_worker, (tokenizer, settings, folder))
    try:
        for future in as_completed([pool.submit(_work, number, part) for number, part in missing]):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"data.workers={processes}: one of the tokenising processes was ended from outside, by lack of memory most likely; "
            "take fewer (what is done is kept)"
        ) from error
    finally:
        # Whatever has ended this: parts appear whole or not at all, so nobody is waited for. (Of a pool that broke while it was
        # still starting processes, Python would wait for one that it has not told.)
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        pool.shutdown()


_worker: tuple[ChatTokenizer, StoreSettings, Path] | None = None


def _begin_worker(tokenizer: PreTrainedTokenizerBase, settings: StoreSettings, folder: Path) -> None:
    global _worker
    ignore_stops()  # a launcher signals all processes; the one that started these ends them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    _worker = ChatTokenizer(tokenizer, settings.chat), settings, folder


def _work(number: int, part: Shard) -> int:
    assert _worker is not None
    chat, settings, folder = _worker
    _write_part(chat, settings.columns, folder, number, part)
    return number


@contextmanager
def _appears(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes ``path`` when all is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_part(chat: ChatTokenizer, columns: Columns, folder: Path, number: int, part: Shard) -> None:
    """Tokenise one part: its documents first, then the file that says it is done, with what was skipped."""
    seen, skipped = 0, []
    rows: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    tokens = 0
    with (
        _appears(folder / f"{number:06d}.arrow") as path,
        pyarrow.OSFile(str(path), "wb") as file,
        # A stream, which `datasets.Dataset.from_file` reads, too.
        pyarrow.ipc.new_stream(file, SCHEMA) as writer,
    ):
        for where, value in read_shard(part, columns):
            try:
                if isinstance(value, Skip):
                    raise value
                record = check_record(value, columns, where)
                documents = chat.documents(record)
            except Skip as skip:
                skipped.append((where, skip.reason, skip.detail, skip.choice))
            else:
                _add(rows, record, documents, seen)
                tokens += sum(len(document.input_ids) for document in documents)
            seen += 1
            if tokens >= _BATCH_TOKENS:
                writer.write_batch(pyarrow.RecordBatch.from_pydict(rows, SCHEMA))
                rows, tokens = {name: [] for name in SCHEMA.names}, 0
        if rows["name"]:
            writer.write_batch(pyarrow.RecordBatch.from_pydict(rows, SCHEMA))
    with _appears(folder / f"{number:06d}.json") as path:
        written = file_digest(folder / f"{number:06d}.arrow")
        path.write_text(sealed({"seen": seen, "skipped": skipped, "documents": written}), encoding="utf-8")


def _add(rows: dict[str, list[Any]], record: Record, documents: Sequence[Tokens], number: int) -> None:
    named = record.id is not None
    content = str(record.id).encode() if named else b"".join(document.input_ids.tobytes() for document in documents)
    first = documents[0]
    start = int(first.spans[0, 0])
    # All answers to one prompt have one point, however short it is. The first token of a text is its whole "prompt".
    prompt = first.input_ids[: start if start > 1 else _POINT_TOKENS]
    key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    point = int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=6).digest(), "little") / 2**48
    for document in documents:
        rows["input_ids"].append(document.input_ids)
        rows["spans"].append(document.spans.reshape(-1))
        rows["name"].append(record.where)
        rows["record"].append(number)
        rows["key"].append(key)
        rows["named"].append(named)
        rows["point"].append(point)
        rows["sum"].append(zlib.crc32(document.input_ids.tobytes()))


def _count(skips: Skips, folder: Path, number: int) -> None:
    about = read_sealed(folder / f"{number:06d}.json")
    skips.add(about["seen"], [SkipRecord(*record) for record in about["skipped"]])


def _is_done(folder: Path, number: int) -> bool:
    """Whether an earlier attempt has left a part, whole; what is damaged of it is made again."""
    path, about = folder / f"{number:06d}.arrow", folder / f"{number:06d}.json"
    try:
        return about.is_file() and path.is_file() and bool(read_sealed(about)["documents"] == file_digest(path))
    except (OSError, ValueError, UserError):
        return False


# ------------------------------------------------------------------------------------------------------------------- index


def write_index(folder: Path, skips: Skips, limit: float) -> None:
    """Leave duplicates out, check the limit, and write what :class:`DocumentStore` reads."""
    files = sorted(path.name for path in folder.glob("*.arrow"))
    found: dict[str, list[np.ndarray]] = {name: [np.zeros(0, dtype=np.int64)] for name in ("file", "batch", "row", "record")}
    found |= {"lengths": [np.zeros(0, dtype=np.int32)], "counts": [np.zeros(0, dtype=np.int64)]}
    found |= {"sum": [np.zeros(0, dtype=np.uint32)]}
    found |= {"key": [np.zeros(0, dtype=np.int64)], "named": [np.zeros(0, dtype=np.bool_)], "point": [np.zeros(0)]}
    spans = [np.zeros((0, 2), dtype=np.int32)]
    for number, name in enumerate(files):
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / name))) as stream:
            for count, batch in enumerate(stream):
                rows = len(batch)
                found["file"].append(np.full(rows, number))
                found["batch"].append(np.full(rows, count))
                found["row"].append(np.arange(rows))
                found["record"].append(number << 32 | batch.column("record").to_numpy().astype(np.int64))
                found["lengths"].append(np.diff(batch.column("input_ids").offsets.to_numpy()))
                found["counts"].append(np.diff(batch.column("spans").offsets.to_numpy()) // 2)
                found["key"].append(batch.column("key").to_numpy())
                found["named"].append(batch.column("named").to_numpy(zero_copy_only=False))
                found["point"].append(batch.column("point").to_numpy())
                found["sum"].append(batch.column("sum").to_numpy())
                spans.append(batch.column("spans").values.to_numpy().reshape(-1, 2))
    index = {name: np.concatenate(columns) for name, columns in found.items()}
    # The first record of a key is the one that stays; a key is that of ids, or that of contents.
    _, first, inverse = np.unique(
        np.stack([index["key"], index["named"]], axis=1), axis=0, return_index=True, return_inverse=True
    )
    again = index["record"] != index["record"][first][inverse.reshape(-1)]
    everything = Spans(index["lengths"], np.concatenate([[0], np.cumsum(index["counts"])]), np.concatenate(spans))
    skips.add(0, _duplicates(folder, files, index, again))
    skips.check(limit)
    kept = np.flatnonzero(~again)
    if not len(kept):
        most = (skips.broken + skips.left_out).most_common(3)
        why = "; ".join(f"{count} x {reason}, such as {skips.examples[reason][0]}" for reason, count in most)
        raise UserError(f"data.path: none of {skips.seen} records can be learnt from ({why or 'there are none'})")
    taken = everything.take(kept)
    # Of attempts that were killed.
    shutil.rmtree(folder / "index", ignore_errors=True)
    for path in folder.glob(".*"):
        path.unlink(missing_ok=True)
    (folder / "index").mkdir()
    for name, dtype in (("file", np.int32), ("batch", np.int32), ("row", np.int32), ("lengths", np.int32)):
        np.save(folder / "index" / f"{name}.npy", index[name][kept].astype(dtype))
    np.save(folder / "index" / "points.npy", index["point"][kept])
    np.save(folder / "index" / "sums.npy", index["sum"][kept].astype(np.uint32))
    np.save(folder / "index" / "offsets.npy", taken.offsets.astype(np.int64))
    np.save(folder / "index" / "spans.npy", taken.spans.astype(np.int32))
    with _appears(folder / "meta.json") as path:
        sums = {found.name: file_digest(found) for found in sorted((folder / "index").glob("*.npy"))}
        path.write_text(sealed({"files": files, "skips": skips.to_dict(), "index": sums}), encoding="utf-8")


def _duplicates(folder: Path, files: Sequence[str], index: dict[str, np.ndarray], again: np.ndarray) -> Iterator[SkipRecord]:
    """Each record that is there again, once."""
    documents = np.flatnonzero(again)
    _, first = np.unique(index["record"][documents], return_index=True)
    last, names = -1, None
    for document in documents[first].tolist():
        if (file := int(index["file"][document])) != last:
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / files[file]))) as stream:
                last, names = file, [batch.column("name") for batch in stream]
        assert names is not None
        where = str(names[int(index["batch"][document])][int(index["row"][document])])
        yield SkipRecord(where, "duplicate id" if index["named"][document] else "duplicate of another record")
