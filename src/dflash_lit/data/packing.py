"""Documents into rows of one fixed length, with no padding but at the very end.

Static shapes want full rows, and a padded token costs as much as a real one. So a gap that no waiting document fits is filled
with the beginning of one; that document then comes again, whole, and its already placed beginning is context there. Every
supervised token is thus learnt exactly once, and always with everything that stands before it in its window.

Targets that carry a state from one document to the next get one document a row instead, and padding after it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from dflash_lit.data.documents import Document
from dflash_lit.errors import UserError

__all__ = ["PackedRows", "pack"]

# Attention tiles have 128 tokens; a row is a whole number of them.
_TILE = 128
# Documents that wait at one time. More fit better but draw rows less at random; at 256 a gap is a few tokens.
_WAITING = 256
# How many waiting documents are compared when one must be cut.
_CUT_CANDIDATES = 16


_COLUMNS = ("input_ids", "document_ids", "position_ids", "supervised")


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

    def save(self, folder: Path) -> None:
        """Write the columns, for :meth:`load` in another process; ``folder`` is made and must be empty."""
        folder.mkdir(parents=True)
        for name in _COLUMNS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "pad_id").write_text(str(self.pad_id))

    @classmethod
    def load(cls, folder: Path) -> PackedRows:
        """Read them as memory maps: the processes of a host share one copy."""
        # "c": copied where written to, which nobody does; torch warns of arrays that cannot be written to.
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in _COLUMNS}
        return cls(**columns, pad_id=int((folder / "pad_id").read_text()))


class _Window:
    """A piece of a document that fits a row: tokens ``[start, stop)``, of which the first ``context`` are not to be learnt."""

    __slots__ = ("context", "document", "learnt_before", "start", "stop")

    def __init__(self, document: int, start: int, stop: int, context: int, learnt_before: np.ndarray) -> None:
        self.document = document
        self.start = start
        self.stop = stop
        self.context = context
        self.learnt_before = learnt_before  # int32 [n + 1] of the document: supervised tokens before each position

    def __len__(self) -> int:
        return self.stop - self.start

    def fresh(self, tokens: int) -> int:
        """How many tokens the first ``tokens`` of the window still have to teach."""
        if tokens <= self.context:
            return 0
        return int(self.learnt_before[self.start + tokens] - self.learnt_before[self.start + self.context])


def _windows(index: int, document: Document, row_tokens: int) -> Iterator[_Window]:
    """Cut one document into windows of at most a row, each half context, leaving out those that teach nothing."""
    learnt_before = np.zeros(len(document) + 1, dtype=np.int32)
    np.cumsum(document.supervised, out=learnt_before[1:])
    start = context = 0
    while True:
        stop = min(start + row_tokens, len(document))
        window = _Window(index, start, stop, context, learnt_before)
        if window.fresh(len(window)):
            yield window
        if stop == len(document):
            return
        context = row_tokens // 2
        start = stop - context


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
    if row_tokens < _TILE or row_tokens % _TILE:
        raise UserError(f"data.row_tokens: {row_tokens} is not a positive multiple of {_TILE}; take one, such as 2048")
    if pad_id < 0:
        raise UserError(f"pad_id: {pad_id} is no token id; give the tokenizer's padding id, or any id >= 0")

    order = np.random.default_rng(seed).permutation(len(documents)).tolist()
    coming = (window for index in order for window in _windows(index, documents[index], row_tokens))
    if one_per_row:
        return _assemble(documents, [(w.document, w.start, w.stop, w.context, 0) for w in coming], row_tokens, pad_id)

    # Sorted by (length, serial number): the serial decides between equals, so windows are never compared.
    waiting: list[tuple[int, int, _Window]] = []
    # The same in order of arrival, and some that are placed already.
    arrivals: deque[tuple[int, int, _Window]] = deque()
    serial = 0

    def refill() -> None:
        nonlocal serial
        for window in islice(coming, _WAITING - len(waiting)):
            entry = (len(window), serial, window)
            insort(waiting, entry)
            arrivals.append(entry)
            serial += 1

    def oldest() -> int:
        """Where in ``waiting`` the one is that came first."""
        while True:
            place = bisect_left(waiting, arrivals[0])
            if place < len(waiting) and waiting[place] is arrivals[0]:
                return place
            arrivals.popleft()

    # One entry for each placed piece: (document, first token, end, context tokens at its beginning, number within its row).
    pieces: list[tuple[int, int, int, int, int]] = []
    refill()
    while waiting:
        gap, number = row_tokens, 0
        while gap and waiting:
            # A serial number larger than any in use: how many have at most the gap's length.
            if fitting := bisect_left(waiting, (gap, serial)):
                # A row begins with the oldest, so none waits for ever and the seed decides; then the largest that fits.
                _, _, window = waiting.pop(fitting - 1 if number else oldest())
                length = len(window)
                pieces.append((window.document, window.start, window.stop, window.context, number))
                refill()
            else:
                # All that wait are longer than the gap. Cut the one whose beginning teaches most; equals: the shortest.
                length = gap
                candidate = max(range(min(len(waiting), _CUT_CANDIDATES)), key=lambda i: waiting[i][2].fresh(gap))
                window = waiting[candidate][2]
                pieces.append((window.document, window.start, window.start + length, window.context, number))
                # Its length, hence its place among the waiting, stays: it comes again whole, or not if all is learnt.
                window.context = max(window.context, length)
                if not window.fresh(len(window)):
                    waiting.pop(candidate)
                    refill()
            gap -= length
            number += 1
    return _assemble(documents, pieces, row_tokens, pad_id)


def _assemble(
    documents: Sequence[Document], pieces: list[tuple[int, int, int, int, int]], row_tokens: int, pad_id: int
) -> PackedRows:
    """Write the ``pieces`` into rows: one that is numbered 0 begins a row, others follow without a gap."""
    if not pieces:
        raise UserError("no document has a supervised token, so there is nothing to learn; check the data's responses")
    table = np.array(pieces, dtype=np.int64)
    lengths = table[:, 2] - table[:, 1]
    before = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(before, lengths)
    row = np.cumsum(table[:, 4] == 0) - 1
    rows = int(row[-1]) + 1
    # Where a piece begins: its row's beginning, and what stands before it there.
    begin = row * row_tokens + before - before[table[:, 4] == 0][row]
    places = np.repeat(begin, lengths) + positions

    def flat(dtype: type, fill: int, values: np.ndarray) -> np.ndarray:
        out: np.ndarray = np.full(rows * row_tokens, fill, dtype=dtype)
        out[places] = values
        return out.reshape(rows, row_tokens)

    supervised = np.concatenate([documents[index].supervised[start:stop] for index, start, stop, _, _ in pieces])
    return PackedRows(
        input_ids=flat(np.int32, pad_id, np.concatenate([documents[i].input_ids[a:b] for i, a, b, _, _ in pieces])),
        document_ids=flat(np.int32, -1, np.repeat(table[:, 4], lengths)),
        position_ids=flat(np.int32, 0, positions),
        supervised=flat(np.bool_, False, supervised & (positions >= np.repeat(table[:, 3], lengths))),
        pad_id=pad_id,
    )
