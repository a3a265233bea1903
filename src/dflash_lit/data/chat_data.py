"""Conversations as they are, from their sources to rows to train on, rows to validate on, and prompts to decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lit.config import DataSection
from dflash_lit.data.chat import ChatSettings
from dflash_lit.data.documents import Document
from dflash_lit.data.records import Columns
from dflash_lit.data.row_plan import LONG, plan_rows, shorten
from dflash_lit.data.store import DocumentStore, StoreSettings, build_store
from dflash_lit.data.stored_rows import StoredRows
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import TargetInfo

__all__ = ["ChatData", "chat_data", "split_points", "store_settings"]


def store_settings(data: DataSection, *, vocab_size: int | None = None, mask_token_id: int | None = None) -> StoreSettings:
    """The section's settings of a store, checked.

    Raises:
        UserError: for the first that cannot be.
    """
    if data.long not in LONG:
        raise UserError(f"data.long={data.long!r}: choose {', '.join(LONG)}")
    if data.workers is not None and data.workers < 1:
        raise UserError(f"data.workers={data.workers}: must be at least 1")
    # YAML takes on and off for true and false where they are not quoted.
    thinking = {"True": "on", "False": "off"}.get(str(data.thinking), data.thinking)
    chat = ChatSettings(
        thinking=thinking,
        thinking_argument=data.thinking_argument,
        template_arguments=dict(data.template_arguments),
        vocab_size=vocab_size,
        mask_token_id=mask_token_id,
    )
    return StoreSettings(Columns.named(data.columns), chat, data.skip_limit, data.split)


def split_points(points: np.ndarray, share: float) -> np.ndarray:
    """Which documents are held out: bool [D], true where ``points`` float [D] lie below ``share``.

    Equal points, hence all documents of one conversation, are on one side, and stay there when others come or go. One exception
    keeps small data usable: if a side would be empty, it gets the point nearest to it.

    Raises:
        UserError: if there are fewer than two different points.
    """
    ranked = np.unique(points)
    if len(ranked) < 2:
        raise UserError(
            f"data.path: {len(ranked)} conversation(s) cannot be split into training and held-out ones; give at least 2"
        )
    held: np.ndarray = points <= min(max(share, ranked[0]), ranked[-2])
    return held


@dataclass(frozen=True, eq=False)
class ChatData:
    """What the sources came to.

    Attributes:
        from_cache: whether they had been tokenised before.
        prompts: token ids of held-out prompts, to decode.
        long: what became of training documents that are longer than a row, see :func:`~dflash_lit.data.row_plan.shorten`.
    """

    store: DocumentStore
    from_cache: bool
    train: StoredRows
    val: StoredRows
    prompts: list[list[int]]
    long: dict[str, int]

    def val_documents(self, count: int) -> list[Document]:
        """The first ``count`` of the held-out documents that are validated on and have a supervised token in their first row."""
        chosen = self.val.documents[self.store.spans[self.store.offsets[self.val.documents], 0] < self.val.row_tokens]
        made = []
        for number in chosen[:count].tolist():
            ids = self.store.input_ids(number)
            supervised = np.zeros(len(ids), dtype=np.bool_)
            for low, high in self.store.spans_of(number).tolist():
                supervised[low:high] = True
            made.append(Document(ids, supervised, f"document {number}"))
        return made

    def figures(self, anchors: int) -> dict[str, Any]:
        """Numbers for a summary, by name; ``anchors`` is how many a row gets."""
        store, plan = self.store, self.train.plan
        spans = store.supervision.take(self.train.documents)
        learnt = plan.learnt(spans)
        supervised = int((store.supervision.spans[:, 1] - store.supervision.spans[:, 0]).sum(dtype=np.int64))
        tokens = int(store.lengths.sum(dtype=np.int64))
        return {
            "documents": len(store),
            "documents_from_cache": self.from_cache,
            "document_tokens": tokens,
            "supervised_share": supervised / tokens,
            "records": store.skips.seen,
            "records_skipped": dict(store.skips.broken),
            "records_left_out": dict(store.skips.left_out),
            "rows": len(plan),
            "rows_filled": plan.filled,
            "packing_efficiency": plan.packed,
            "window_context": plan.window_context,
            # Of the supervised tokens of an epoch, those at which a block starts.
            "anchor_coverage": float(np.minimum(plan.eligible(spans), anchors).sum() / learnt.sum()),
            **{f"long_{name}": count for name, count in self.long.items()},
        }

    def lines(self, figures: dict[str, Any]) -> Iterator[str]:
        """The same for people."""
        yield (
            f"{figures['documents']:,} documents of {figures['document_tokens']:,} tokens, "
            f"{100 * figures['supervised_share']:.1f} % supervised{' (from the cache)' if self.from_cache else ''}"
        )
        skips = self.store.skips
        for what, counts in (("skipped", skips.broken), ("left out", skips.left_out)):
            for reason, count in counts.most_common():
                yield f"{what}: {count:,} of {skips.seen:,} records: {reason}, such as {skips.examples[reason][0].where}"
        if longer := [f"{count:,} {name.replace('_', ' ')}" for name, count in self.long.items() if count]:
            yield f"documents longer than a row: {', '.join(longer)}"
        yield (
            f"{len(self.train):,} + {len(self.val):,} rows of {self.train.row_tokens} tokens, "
            f"{100 * figures['packing_efficiency']:.1f} % packing efficiency, {100 * figures['window_context']:.1f} % context of "
            f"split documents; {100 * figures['anchor_coverage']:.1f} % of the supervised tokens get an anchor each epoch"
        )


def chat_data(
    data: DataSection,
    info: TargetInfo,
    *,
    mask_token_id: int | None,
    seed: int,
    cache_dir: str | Path,
    decoded: int,
    progress: bool = True,
) -> ChatData:
    """Tokenise the sources, or open them, split them and plan the rows.

    Args:
        data: the section of the config, of kind ``chat``.
        info: the target.
        mask_token_id: the drafter's, None while there is none.
        seed: of the rows.
        cache_dir: of all caches.
        decoded: how many prompts to decode, at most.
        progress: show a bar while tokenising.

    Raises:
        UserError: if the sources cannot be used.
    """
    settings = store_settings(data, vocab_size=int(info.text.vocab_size), mask_token_id=mask_token_id)
    store, known = build_store(
        data.path, info.tokenizer, settings, Path(cache_dir) / "documents", workers=data.workers, progress=progress
    )
    # By their points: any so many of them are a random choice, and the same one when others come.
    order = np.argsort(store.points, kind="stable")
    held = split_points(store.points, data.held_out_share)[order]
    train, others = order[~held][: data.train_prompts], order[held]
    cut = min(data.val_prompts, max(len(others) // 2, 1))
    val, rest = others[:cut], others[cut:]
    if data.validate_on_train:
        val = rest = train
    prompts = _prompts(store, rest, decoded, data.prompt_tokens)
    if decoded and not prompts:
        raise UserError(
            f"data.prompt_tokens={data.prompt_tokens}: none of {len(rest)} held-out documents has a prompt as short as that to "
            "decode; raise it, or data.held_out_share"
        )
    train_rows, long = _rows(store, train, data, info, seed)
    return ChatData(store, known, train_rows, _rows(store, val, data, info, seed)[0], prompts, long)


def _rows(
    store: DocumentStore, documents: np.ndarray, data: DataSection, info: TargetInfo, seed: int
) -> tuple[StoredRows, dict[str, int]]:
    """Rows of some documents, and what became of long ones."""
    documents = np.sort(documents)  # no order but that of the store: the plan shuffles them itself
    spans = store.supervision.take(documents)
    lengths, long = shorten(spans, data.row_tokens, data.long)
    if not lengths.any():
        raise UserError(
            f"data.long={data.long}: none of {len(documents)} documents fits rows of data.row_tokens={data.row_tokens}; raise it, "
            "or data.val_prompts and data.held_out_share if there are few"
        )
    plan = plan_rows(spans, data.row_tokens, seed=seed, one_per_row=not info.packs, lengths=lengths)
    return StoredRows(store, plan, documents, info.pad_id), long


def _prompts(store: DocumentStore, documents: np.ndarray, count: int, longest: int) -> list[list[int]]:
    """What stands before the first supervised token, of documents with different prompts, no longer than ``longest``."""
    prompts: list[list[int]] = []
    last = -1.0
    for document in documents.tolist():  # by their points: equal prompts follow each other
        start = int(store.spans_of(document)[0, 0])
        if len(prompts) == count:
            break
        if start <= longest and store.points[document] != last:
            prompts.append(store.input_ids(document)[:start].tolist())
            last = float(store.points[document])
    return prompts
