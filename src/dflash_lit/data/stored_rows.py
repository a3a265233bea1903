"""Rows that are put together when they are asked for, from a plan and a store of documents. Nothing is held but the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_lit.data.packing import PackedRows, Rows, named
from dflash_lit.data.row_plan import RowPlan
from dflash_lit.data.store import DocumentStore
from dflash_lit.errors import UserError
from dflash_lit.files import map_array, refuse_no_file

__all__ = ["StoredRows", "load_rows"]


@dataclass(frozen=True, eq=False)
class StoredRows:
    """N rows of S tokens; the twin of :class:`~dflash_lit.data.packing.PackedRows`, which holds them.

    Attributes:
        store: where the tokens are.
        plan: of the rows; its documents are numbers within ``documents``.
        documents: int64 [d], which documents of the store there are rows of.
        pad_id: what stands in ``input_ids`` where there is no token.
    """

    store: DocumentStore
    plan: RowPlan
    documents: np.ndarray
    pad_id: int = 0

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.plan)

    @property
    def row_tokens(self) -> int:
        """S, the tokens of a row."""
        return self.plan.row_tokens

    @property
    def efficiency(self) -> float:
        """Share of tokens that are not padding, in (0, 1]."""
        return self.plan.filled

    def take(self, rows: Sequence[int]) -> PackedRows:
        """Put some rows together."""
        shape = (len(rows), self.row_tokens)
        input_ids, document_ids = np.full(shape, self.pad_id, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
        position_ids, supervised = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.bool_)
        count = np.arange(self.row_tokens, dtype=np.int32)
        plan = self.plan
        for place, row in enumerate(rows):
            begin = 0
            for number, piece in enumerate(range(int(plan.first[row]), int(plan.first[row + 1]))):
                document = int(self.documents[plan.documents[piece]])
                start, stop = int(plan.start[piece]), int(plan.stop[piece])
                end = begin + stop - start
                input_ids[place, begin:end] = self.store.input_ids(document)[start:stop]
                document_ids[place, begin:end] = number
                position_ids[place, begin:end] = count[: stop - start]
                learnt = start + int(plan.context[piece])
                for low, high in self.store.spans_of(document).tolist():
                    supervised[place, begin + max(low, learnt) - start : begin + max(min(high, stop) - start, 0)] = True
                begin = end
        return PackedRows(input_ids, document_ids, position_ids, supervised, self.pad_id)

    def digest(self) -> str:
        """Names the content: the plan, and lengths, spans and prompts of the documents. No token is read for it."""
        digest, spans = hashlib.blake2b(digest_size=12), self.store.supervision.take(np.asarray(self.documents))
        plan = (self.plan.documents, self.plan.start, self.plan.stop, self.plan.context, self.plan.first)
        for column in (*plan, spans.lengths, spans.offsets, spans.spans, self.store.points[self.documents]):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the plan and where the store is, for :meth:`load` in another process; ``folder`` must not exist."""
        self.plan.save(folder)
        np.save(folder / "of_store.npy", self.documents)
        (folder / "store").write_text(str(self.store.folder.resolve()), encoding="utf-8")
        (folder / "pad_id").write_text(str(self.pad_id))
        (folder / "digest").write_text(named(self), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> StoredRows:
        """Read what :meth:`save` has written.

        Raises:
            UserError: if the store cannot be seen from here.
        """
        place = Path((folder / "store").read_text(encoding="utf-8"))
        if not (place / "meta.json").is_file():
            raise UserError(f"data.cache_dir: {place} is not there; put it on a file system that all hosts see")
        documents = map_array(folder / "of_store.npy")
        return cls(DocumentStore(place), RowPlan.load(folder), documents, int((folder / "pad_id").read_text()))


def load_rows(folder: Path) -> Rows:
    """Read what either kind of rows has saved, in another process.

    Raises:
        UserError: if a store cannot be seen from here, or the files are damaged or those of other rows.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        refuse_no_file(path, "run again, and let nothing else write there")
    try:
        rows: Rows = StoredRows.load(folder) if (folder / "store").is_file() else PackedRows.load(folder)
        same = named(rows) == (folder / "digest").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError, KeyError, IndexError, EOFError) as error:
        raise UserError(
            f"paths.output_dir: {folder} cannot be read ({error}); run again, and let nothing else write there"
        ) from error
    if not same:
        raise UserError(
            f"paths.output_dir: {folder} is damaged (not the rows that were written); run again, and let nothing else write there"
        )
    return rows
