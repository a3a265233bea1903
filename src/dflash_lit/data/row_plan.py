"""Which piece of which document stands where in which row, from lengths and spans alone: no token is looked at.

The rule is that of :mod:`dflash_lit.data.packing`. A million documents take some seconds and some hundred megabytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dflash_lit.errors import UserError
from dflash_lit.files import map_array

__all__ = ["LONG", "RowPlan", "Spans", "plan_rows", "shorten"]

# Attention tiles have 128 tokens; a row is a whole number of them.
_TILE = 128
# Documents that wait at one time. More fit better but draw rows less at random; at 256 a gap is a few tokens.
_WAITING = 256
# How many waiting documents are compared when one must be cut.
_CUT_CANDIDATES = 16

LONG = ("split", "truncate", "reject")
"""What may become of a document longer than a row."""


class Spans:
    """The supervised stretches of D documents.

    Args:
        lengths: integers [D], tokens of each document.
        offsets: integers [D + 1]; document d has the spans ``offsets[d]`` to ``offsets[d + 1]``.
        spans: integers [K, 2], each (start, stop) within its document, ascending and apart.
    """

    def __init__(self, lengths: np.ndarray, offsets: np.ndarray, spans: np.ndarray) -> None:
        self.lengths, self.offsets, self.spans = lengths, offsets, spans

    @classmethod
    def of_masks(cls, masks: Sequence[np.ndarray]) -> Spans:
        """From one bool [n] a document."""
        spans, counts = [np.zeros((0, 2), dtype=np.int64)], [0]
        for mask in masks:
            edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
            spans.append(edges.reshape(-1, 2))
            counts.append(len(edges) // 2)
        return cls(np.array([len(mask) for mask in masks], dtype=np.int64), np.cumsum(counts), np.concatenate(spans))

    def __len__(self) -> int:
        """D, the number of documents."""
        return len(self.lengths)

    def take(self, documents: np.ndarray) -> Spans:
        """Those of some documents, integers [d], in that order."""
        counts = np.diff(self.offsets)[documents]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        chosen = np.repeat(self.offsets[:-1][documents] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Spans(self.lengths[documents], offsets, self.spans[chosen])

    @cached_property
    def _begin(self) -> np.ndarray:
        """Where each document begins if all stand in a line."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each span begins in that line."""
        return np.repeat(self._begin[:-1], np.diff(self.offsets)) + self.spans[:, 0]

    @cached_property
    def _before(self) -> np.ndarray:
        """Supervised tokens of all spans before each, and of all."""
        return np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0], dtype=np.int64)])

    def count(self, documents: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Supervised tokens in [start, stop) of each of ``documents``; int64, 0 where the stretch is empty."""
        return np.where(stop > start, self._until(documents, stop) - self._until(documents, start), 0)

    def _until(self, documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Supervised tokens of everything in the line before a position."""
        if not len(self.spans):
            return np.zeros(len(documents), dtype=np.int64)
        place = self._begin[documents] + positions
        last = np.searchsorted(self._starts, place, side="right") - 1
        inside = np.minimum(place - self._starts[last], self.spans[last, 1] - self.spans[last, 0])
        return np.where(last < 0, 0, self._before[last] + inside)

    def stretches(self, documents: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """How many separate supervised stretches there are in [start, stop) of each of ``documents``; int64."""
        ends = np.repeat(self._begin[:-1], np.diff(self.offsets)) + self.spans[:, 1]
        first = np.searchsorted(ends, self._begin[documents] + start, side="right")
        after = np.searchsorted(self._starts, self._begin[documents] + stop, side="left")
        return np.where(stop > start, np.maximum(after - first, 0), 0)


def shorten(spans: Spans, row_tokens: int, long: str) -> tuple[np.ndarray, dict[str, int]]:
    """Lengths of the documents after ``long`` has been applied (0: left out), and what it did.

    Args:
        long: ``split`` into windows that overlap by half a row, the overlap as context; ``truncate`` after a row; ``reject``.

    Returns:
        int64 [D], and counts: ``split``, ``truncated`` or ``rejected`` documents; ``truncated_to_nothing`` of them, in which
        no block could start any more, so that they are left out; ``supervised_tokens_lost``.

    Raises:
        UserError: for any other ``long``.
    """
    if long not in LONG:
        raise UserError(f"data.long={long!r}: choose {', '.join(LONG)}")
    lengths = spans.lengths.astype(np.int64)
    longer = np.flatnonzero(lengths > row_tokens)
    if long == "split":
        return lengths, {"split": len(longer)}
    kept = np.zeros(len(longer), dtype=np.int64) if long == "reject" else np.full(len(longer), row_tokens)
    # A block needs two supervised tokens in a row.
    zero = np.zeros_like(kept)
    nothing = spans.count(longer, zero, kept) <= spans.stretches(longer, zero, kept)
    lost = spans.count(longer, np.where(nothing, 0, kept), lengths[longer]).sum()
    if long == "reject":
        lengths[longer] = 0
        return lengths, {"rejected": len(longer), "supervised_tokens_lost": int(lost)}
    lengths[longer] = np.where(nothing, 0, kept)
    counts = {"truncated": len(longer), "truncated_to_nothing": int(nothing.sum()), "supervised_tokens_lost": int(lost)}
    return lengths, counts


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """P pieces of documents in N rows.

    Attributes:
        documents: int32 [P].
        start: int32 [P], the first token of each piece within its document; stop: int32 [P], the end.
        context: int32 [P], how many tokens at the beginning of each piece are context, whether supervised or not: they are
            learnt elsewhere.
        first: int64 [N + 1]; row n has the pieces ``first[n]`` to ``first[n + 1]``.
        row_tokens: S.
    """

    documents: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    context: np.ndarray
    first: np.ndarray
    row_tokens: int

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.first) - 1

    @property
    def filled(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return self._share(self.stop - self.start)

    @property
    def packed(self) -> float:
        """The efficiency of packing: share of the rows' tokens that are neither padding nor a beginning that only fills a gap."""
        return self.filled - self._share(self.context[self.start == 0])

    @property
    def window_context(self) -> float:
        """Share of the rows' tokens that are the context of windows, which documents longer than a row are split into."""
        return self._share(self.context[self.start > 0])

    def _share(self, tokens: np.ndarray) -> float:
        return float(tokens.sum(dtype=np.int64)) / max(len(self) * self.row_tokens, 1)

    def per_row(self, of_pieces: np.ndarray) -> np.ndarray:
        """Sums over the pieces of each row; [N]."""
        return np.add.reduceat(of_pieces, self.first[:-1])

    def learnt(self, spans: Spans) -> np.ndarray:
        """Supervised tokens of each row; int64 [N]."""
        return self.per_row(spans.count(self.documents, self.start + self.context, self.stop))

    def eligible(self, spans: Spans) -> np.ndarray:
        """Tokens of each row at which a block may start: supervised ones with a supervised one after them; int64 [N]."""
        stretches = spans.stretches(self.documents, self.start + self.context, self.stop)
        return self.learnt(spans) - self.per_row(stretches)

    def save(self, folder: Path) -> None:
        """Write it for :meth:`load`; ``folder`` is made and must not exist."""
        folder.mkdir(parents=True)
        for name in ("documents", "start", "stop", "context", "first"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "row_tokens").write_text(str(self.row_tokens))

    @classmethod
    def load(cls, folder: Path) -> RowPlan:
        """Read it as memory maps."""
        columns = {name: map_array(folder / f"{name}.npy") for name in ("documents", "start", "stop", "context", "first")}
        return cls(**columns, row_tokens=int((folder / "row_tokens").read_text()))


def plan_rows(
    spans: Spans, row_tokens: int, *, seed: int, one_per_row: bool = False, lengths: np.ndarray | None = None
) -> RowPlan:
    """Plan the rows: a function of lengths and spans, in their order, and ``seed``. See :func:`dflash_lit.data.packing.pack`.

    Args:
        spans: of the documents.
        row_tokens: S, a positive multiple of 128.
        seed: of the shuffle.
        one_per_row: one document, or window of a long one, a row.
        lengths: of the documents where they are not to be used whole, see :func:`shorten`; int64 [D].

    Raises:
        UserError: if ``row_tokens`` is wrong, or no document has a supervised token.
    """
    if row_tokens < _TILE or row_tokens % _TILE:
        raise UserError(f"data.row_tokens: {row_tokens} is not a positive multiple of {_TILE}; take one, such as 2048")
    document, start, stop, context = _windows(spans, spans.lengths if lengths is None else lengths, row_tokens, seed)
    if not len(document):
        raise UserError("no document has a supervised token, so there is nothing to learn; check the data's responses")
    if one_per_row:
        windows, length, before, first = np.arange(len(document)), stop - start, context, np.arange(len(document) + 1)
    else:
        windows, length, before, first = _fill(spans, document, start, stop, context, row_tokens)
    begin = start[windows]
    return RowPlan(
        documents=document[windows].astype(np.int32),
        start=begin.astype(np.int32),
        stop=(begin + length).astype(np.int32),
        context=before.astype(np.int32),
        first=first.astype(np.int64),
        row_tokens=row_tokens,
    )


def _windows(
    spans: Spans, lengths: np.ndarray, row_tokens: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the documents, shuffled, into windows of at most a row: document, start, stop and context tokens of each.

    Windows of one document overlap by half a row. Those that teach nothing are left out.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    half = row_tokens // 2
    size = lengths[order].astype(np.int64)
    counts = np.where(size > row_tokens, -((row_tokens - size) // half) + 1, 1)
    document = np.repeat(order, counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * half
    stop = np.minimum(start + row_tokens, np.repeat(size, counts))
    context = np.where(number > 0, half, 0)
    teaches = spans.count(document, start + context, stop) > 0
    return document[teaches], start[teaches], stop[teaches], context[teaches]


def _fill(
    spans: Spans, document: np.ndarray, start: np.ndarray, stop: np.ndarray, context: np.ndarray, row_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Best fit: window, length and context of every placed piece, and the first piece of every row.

    Python's own lists and whole numbers: the loop below looks at a few elements at a time, where numpy is slow.
    """
    total = len(document)
    # Sorted by length, then by arrival, in one number.
    keys = (((stop - start) << 32) | np.arange(total)).tolist()
    known = context.tolist()
    offset = start.tolist()
    first_span, last_span = spans.offsets[document].tolist(), spans.offsets[document + 1].tolist()
    span_start, span_stop = spans.spans[:, 0].tolist(), spans.spans[:, 1].tolist()
    placed = bytearray(total)
    waiting: list[int] = sorted(keys[:_WAITING])
    coming, oldest = len(waiting), 0

    def fresh(key: int, tokens: int) -> int:
        """How many tokens the first ``tokens`` of a window still have to teach."""
        window = key & 0xFFFFFFFF
        begin, end, taught = offset[window] + known[window], offset[window] + tokens, 0
        for span in range(first_span[window], last_span[window]):
            low, high = span_start[span], span_stop[span]
            if low >= end:
                break
            if high > begin:
                taught += (high if high < end else end) - (low if low > begin else begin)
        return taught if end > begin else 0

    windows, lengths, before, firsts = array("q"), array("q"), array("q"), array("q")
    while waiting:
        firsts.append(len(windows))
        gap = row_tokens
        while gap and waiting:
            if fitting := bisect_left(waiting, (gap + 1) << 32):
                if gap == row_tokens:
                    # A row begins with the one that waits longest, so that none waits for ever and the seed decides.
                    while placed[oldest]:
                        oldest += 1
                    fitting = bisect_left(waiting, keys[oldest]) + 1
                key = waiting.pop(fitting - 1)  # the largest that fits
                window, length = key & 0xFFFFFFFF, key >> 32
                windows.append(window)
                lengths.append(length)
                before.append(known[window])
                done = True
            else:
                # All that wait are longer than the gap. Cut the one whose beginning teaches most; equals: the shortest.
                taught = [fresh(key, gap) for key in waiting[:_CUT_CANDIDATES]]
                candidate = taught.index(max(taught))
                window, length = waiting[candidate] & 0xFFFFFFFF, gap
                windows.append(window)
                lengths.append(length)
                before.append(min(known[window], length))
                # Its length, hence its place among the waiting, stays: it comes again whole, or not if all is learnt.
                known[window] = max(known[window], length)
                done = not fresh(waiting[candidate], waiting[candidate] >> 32)
                if done:
                    waiting.pop(candidate)
            if done:
                placed[window] = 1
                if coming < total:
                    insort(waiting, keys[coming])
                    coming += 1
            gap -= length
    firsts.append(len(windows))
    return np.array(windows), np.array(lengths), np.array(before), np.array(firsts)
