"""The output: a line a prompt, appended whole, found again after whatever ended the last run.

A response is either in the file as a complete line or not there at all. What is not to be trained on goes to a second file,
so that the first can be used as it is; both say which prompts are done.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file
from dflash_lit.responses.raw_prompts import RawPrompt
from dflash_lit.responses.reply import DROPPED, Reply, document_of, flags_of

__all__ = ["RecordFile", "dropped_path", "settings_path"]


def dropped_path(path: Path) -> Path:
    """Where the responses go that are not to be trained on."""
    return path.with_name(f"{path.stem}.dropped{path.suffix}")


def settings_path(path: Path) -> Path:
    """Where the settings of all responses of a file are."""
    return path.with_name(f"{path.stem}.settings.json")


class RecordFile:
    """Responses on the disk; a context manager, that one process holds at a time.

    Args:
        path: a ``.jsonl`` file; made, with its folder, if missing.
        settings: all that decides what a response is. Responses made with others do not get into the same file.

    Attributes:
        done: id and content key of every prompt that has a response.
        flags: how many responses have each flag.
        responses: how many there are, dropped ones included.
        dropped: how many of them are in the second file.
        tokens: generated, as far as known.
        with_ids: how many responses are there as token ids.
        torn: bytes of an incomplete line that were removed at the beginning.

    Raises:
        UserError: if the file is in use, was made otherwise, cannot be written, or is damaged other than at its end.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.settings = settings
        self.done: dict[str, str] = {}
        self.flags: Counter[str] = Counter()
        self.responses = self.dropped = self.tokens = self.with_ids = self.torn = 0
        self._files: list[int] = []
        if self.path.suffix != ".jsonl":
            raise UserError(f"--out {path}: must end with .jsonl")

    def __enter__(self) -> RecordFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.path, dropped_path(self.path)):
                if path.exists() or path.is_symlink():
                    refuse_no_file(path, "choose another --out")
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
            try:
                fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{self.path}: another run is writing to it; wait for it or choose another --out") from error
            # First: a file that is not ours is left as it is.
            self._compare_settings()
            self._read(self._files[0], self.path, kept=True)
            self._read(self._files[1], dropped_path(self.path), kept=False)
        except OSError as error:
            self._close()
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error}); choose another --out") from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.sync()
        finally:
            self._close()

    def pending(self, prompts: Iterable[RawPrompt]) -> Iterator[RawPrompt]:
        """Yield the prompts that have no response yet.

        Raises:
            UserError: if an id has a response, but to another prompt.
        """
        for prompt in prompts:
            if (key := self.done.get(prompt.id)) is None:
                yield prompt
            elif key != prompt.key:
                raise UserError(
                    f"{prompt.place}: {self.path} has a response to another prompt of id {prompt.id!r}; choose another --out"
                )

    def add(self, prompt: RawPrompt, replies: Sequence[tuple[int, Reply]]) -> list[str]:
        """Append a response; returns its flags. On the disk for good after the next :meth:`sync`.

        Args:
            prompt, replies: as in :func:`~dflash_lit.responses.reply.document_of`.
        """
        flags = list(dict.fromkeys(flag for _, reply in replies for flag in flags_of(reply)))
        known = [reply.tokens for _, reply in replies if reply.tokens is not None]
        record = {
            "id": prompt.id,
            "key": prompt.key,
            **document_of(prompt, replies),
            "finish_reason": replies[-1][1].finish_reason,
            "flags": flags,
            "tokens": sum(known) if known else None,
        }
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        handle = self._files[1 if DROPPED & set(flags) else 0]
        try:
            if os.write(handle, line) != len(line):
                raise OSError(None, "the disk is full")
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror or error}); what is there is complete, the same command goes on"
            ) from error
        self._count(record, kept=not DROPPED & set(flags))
        return flags

    def sync(self) -> None:
        """Wait until all that was added would survive a power cut. May be called from another thread.

        Raises:
            UserError: if the disk fails.
        """
        try:
            for handle in self._files:
                os.fsync(handle)
        except OSError as error:
            raise UserError(
                f"{self.path}: could not be brought to the disk ({error.strerror or error}); look at the disk"
            ) from error

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _count(self, record: dict[str, Any], *, kept: bool) -> None:
        self.done[record["id"]] = record["key"]
        self.flags.update(record["flags"])
        self.responses += 1
        self.dropped += not kept
        self.tokens += record["tokens"] or 0
        self.with_ids += "input_ids" in record

    def _read(self, handle: int, path: Path, *, kept: bool) -> None:
        """Count what is there; cut off what is not a complete line."""
        end = size = 0
        broken: int | None = None
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                size += len(line)
                record = _record(line)
                if record is None:
                    broken = broken or number
                    continue
                if broken is not None:
                    raise UserError(f"{path}:{broken}: is not a line of a response file; choose another --out, or mend it")
                end = size
                if record["id"] not in self.done:
                    self._count(record, kept=kept)
        if size > end:
            self.torn += size - end
            os.ftruncate(handle, end)

    def _compare_settings(self) -> None:
        place = settings_path(self.path)
        wanted = json.loads(json.dumps(self.settings))
        if place.exists() or place.is_symlink():
            refuse_no_file(place, "choose another --out")
            try:
                found = json.loads(place.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: is damaged; choose another --out") from error
            if not isinstance(found, dict):
                raise UserError(f"{place}: is damaged; choose another --out")
            for name in sorted(wanted.keys() | found.keys()):
                if (before := found.get(name)) != (now := wanted.get(name)):
                    raise UserError(
                        f"{self.path}: its responses were made with {name} {before!r}, not {now!r}; choose another --out"
                    )
            return
        if any(os.fstat(handle).st_size for handle in self._files):
            raise UserError(f"{self.path}: was not written by this command ({place.name} is missing); choose another --out")
        # Whole or not at all, and before the first response.
        temporary = place.with_suffix(".part")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(wanted, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)


def _record(line: bytes) -> dict[str, Any] | None:
    """A complete line of the file, or None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in ("id", "key")):
        return None
    flags = record.get("flags")
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        return None
    if not isinstance(record.get("tokens", ""), int | None):
        return None
    return record
