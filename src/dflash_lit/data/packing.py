"""Documents into rows of one fixed length, with no padding but at the very end.

Static shapes want full rows, and a padded token costs as much as a real one. So a gap that no waiting document fits is filled
with the beginning of one; that document then comes again, whole, and its already placed beginning is context there. Every
supervised token is thus learnt exactly once, and always with everything that stands before it in its window.

Targets that carry a state from one document to the next get one document a row instead, and padding after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dflash_lit.data.documents import Document
from dflash_lit.data.row_plan import RowPlan, Spans, plan_rows
from dflash_lit.errors import UserError
from dflash_lit.files import map_array

__all__ = ["PackedRows", "Rows", "named", "pack"]

_COLUMNS = ("input_ids", "document_ids", "position_ids", "supervised")


class Rows(Protocol):
    """N rows of S tokens, wherever they are kept."""

    def __len__(self) -> int:
        """N, the number of rows."""

    @property
    def row_tokens(self) -> int:
        """S, the tokens of a row."""

    @property
    def efficiency(self) -> float:
        """Share of tokens that are not padding, in (0, 1]."""

    @property
    def pad_id(self) -> int:
        """What stands in ``input_ids`` where there is no token."""

    def take(self, rows: Sequence[int]) -> PackedRows:
        """Some rows by number, with arrays of their own."""

    def digest(self) -> str:
        """Names the content: equal for equal rows, whatever they were read from."""

    def save(self, folder: Path) -> None:
        """Write them for another process; ``folder`` is made."""


def named(rows: Rows) -> str:
    """What :meth:`Rows.save` writes down to tell rows that were damaged meanwhile."""
    return f"{rows.digest()} {rows.row_tokens} {rows.pad_id}"


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """N rows of S tokens. A run of equal ``document_ids`` in a row is one placed piece of a document.

    Attributes:
        input_ids: int32 [N, S]; ``pad_id`` on padding.
        document_ids: int32 [N, S]; 0, 1, ... within a row, -1 on padding.
        position_ids: int32 [N, S]; 0, 1, ... within a piece, 0 on padding.
        supervised: bool [N, S]; false on padding.
        pad_id: what stands in ``input_ids`` where there is no token.
    """

    input_ids: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    supervised: np.ndarray
    pad_id: int = 0

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.input_ids)

    @property
    def row_tokens(self) -> int:
        """S, the tokens of a row."""
        return int(self.input_ids.shape[1])

    @property
    def supervised_tokens(self) -> int:
        """How many tokens count, over all rows."""
        return int(self.supervised.sum())

    @property
    def efficiency(self) -> float:
        """Share of tokens that are not padding, in (0, 1]."""
        return float((self.document_ids >= 0).mean())

    def take(self, rows: Sequence[int]) -> PackedRows:
        """Some rows by number, copied."""
        chosen = np.asarray(rows, dtype=np.int64)
        return PackedRows(**{name: getattr(self, name)[chosen] for name in _COLUMNS}, pad_id=self.pad_id)

    def digest(self) -> str:
        """Names the content."""
        digest = hashlib.blake2b(digest_size=12)
        for name in _COLUMNS:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the columns, for :meth:`load` in another process; ``folder`` is made and must be empty."""
        folder.mkdir(parents=True)
        for name in _COLUMNS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "pad_id").write_text(str(self.pad_id))
        (folder / "digest").write_text(named(self), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PackedRows:
        """Read them as memory maps: the processes of a host share one copy."""
        # "c": copied where written to, which nobody does; torch warns of arrays that cannot be written to.
        columns = {name: map_array(folder / f"{name}.npy", "c") for name in _COLUMNS}
        return cls(**columns, pad_id=int((folder / "pad_id").read_text()))


def pack(documents: Sequence[Document], row_tokens: int, *, seed: int, pad_id: int, one_per_row: bool = False) -> PackedRows:
    """Pack ``documents`` into rows of ``row_tokens``: a function of the documents, in their order, and ``seed``.

    Documents are shuffled; a row takes the one that waits longest, then always the largest waiting one that fits. Only the
    last row may end in padding. A document longer than a row comes in windows that overlap by half a row; the overlap is
    context. Documents (and windows) without any supervised token are left out: they would teach nothing.

    Args:
        documents: what to pack.
        row_tokens: S, a positive multiple of 128.
        seed: of the shuffle.
        pad_id: the token id of padding, >= 0.
        one_per_row: one document, or window of a long one, at the beginning of each row, and padding after it.

    Raises:
        UserError: if ``row_tokens`` or ``pad_id`` is wrong, or no document has a supervised token.
    """
    if pad_id < 0:
        raise UserError(f"pad_id: {pad_id} is no token id; give the tokenizer's padding id, or any id >= 0")
    spans = Spans.of_masks([document.supervised for document in documents])
    return _assemble(documents, plan_rows(spans, row_tokens, seed=seed, one_per_row=one_per_row), pad_id)


def _assemble(documents: Sequence[Document], plan: RowPlan, pad_id: int) -> PackedRows:
    """Write the planned pieces into rows, all at once."""
    lengths = plan.stop.astype(np.int64) - plan.start
    before = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(before, lengths)
    row = np.repeat(np.arange(len(plan)), np.diff(plan.first))
    # Where a piece begins: its row's beginning, and what stands before it there.
    begin = row * plan.row_tokens + before - before[plan.first[:-1]][row]
    places = np.repeat(begin, lengths) + positions

    def flat(dtype: type, fill: int, values: np.ndarray) -> np.ndarray:
        out: np.ndarray = np.full(len(plan) * plan.row_tokens, fill, dtype=dtype)
        out[places] = values
        return out.reshape(len(plan), plan.row_tokens)

    pieces = list(zip(plan.documents.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True))
    supervised = np.concatenate([documents[index].supervised[start:stop] for index, start, stop in pieces])
    return PackedRows(
        input_ids=flat(np.int32, pad_id, np.concatenate([documents[i].input_ids[a:b] for i, a, b in pieces])),
        document_ids=flat(np.int32, -1, np.repeat(np.arange(len(pieces)) - plan.first[:-1][row], lengths)),
        position_ids=flat(np.int32, 0, positions),
        supervised=flat(np.bool_, False, supervised & (positions >= np.repeat(plan.context, lengths))),
        pad_id=pad_id,
    )
