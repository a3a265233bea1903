"""What runs leave for later ones and for their other processes: tokenised documents, stored features, rows. Read whole, or refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_lit.data.chat import ChatSettings
from dflash_lit.data.offline import StoredFeatures, write_features
from dflash_lit.data.packing import PackedRows
from dflash_lit.data.prompts import Prompt
from dflash_lit.data.respond import _read, _Stored, _write
from dflash_lit.data.row_plan import plan_rows
from dflash_lit.data.store import DocumentStore, StoreSettings, build_store
from dflash_lit.data.stored_rows import StoredRows, load_rows
from fuzzing.case import Case, Wrong
from fuzzing.damage import dumped, entry_damaged, file_damaged, json_damaged
from fuzzing.data import tokenizer_with_template

__all__ = ["Fuzzed"]

_RECORDS = [{"prompt": f"say {n}", "response": f"{n} and {n + 1}, said {n} times " * (1 + n % 3)} for n in range(12)]
_ROWS, _TOKENS = 3, 128


class Fuzzed:
    """Opens damaged caches and reads everything in them."""

    name = "store"

    def __init__(self, scratch: Path) -> None:
        self.source = scratch / "a.jsonl"
        self.source.write_bytes(b"".join(dumped(record) + b"\n" for record in _RECORDS))
        self.tokenizer = tokenizer_with_template()
        self.settings = StoreSettings(chat=ChatSettings(vocab_size=512))
        self.cache = scratch / "cache"
        store, _ = self._open(self.cache)
        self.key = store.folder.name
        self.documents = _content(store)
        self.partial = scratch / "partial"
        shutil.copytree(store.folder, self.partial / f"{self.key}.partial")
        for left in ("meta.json", "index"):
            path = self.partial / f"{self.key}.partial" / left
            path.unlink() if path.is_file() else shutil.rmtree(path)
        self.rows = StoredRows(store, plan_rows(store.supervision, _TOKENS, seed=0), np.arange(len(store)))
        self.saved = scratch / "rows"
        self.rows.save(self.saved / "stored")
        whole = self.rows.take(range(len(self.rows)))
        whole.save(self.saved / "packed")
        self.whole = whole
        self.features = scratch / "features"
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(len(whole), _TOKENS, 6, generator=generator)
        write_features(
            whole,
            self.features,
            lambda batch: {**batch, "features": self.values[batch["row_ids"].clamp(min=0)]},
            rows_per_batch=2,
        )

    def _open(self, cache: Path) -> tuple[DocumentStore, bool]:
        return build_store(str(self.source), self.tokenizer, self.settings, cache, workers=1, progress=False)

    def case(self, rng: random.Random, folder: Path) -> Case:
        made = rng.choice((self._documents, self._documents, self._unfinished, self._features, self._rows, self._responses))
        return made(rng, folder)

    def _damage(self, place: Path, rng: random.Random) -> str:
        file = rng.choice(sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size))
        if rng.random() < 0.1:
            return entry_damaged(file, rng)
        if file.suffix == ".json" and rng.random() < 0.6:
            value, about = json_damaged(json.loads(file.read_text()), rng)
            file.write_bytes(dumped(value))
        else:
            data, about = file_damaged(file.read_bytes(), rng, text=file.suffix in ("", ".json"), gentle=rng.random() < 0.5)
            file.write_bytes(data)
        return f"{file.relative_to(place)}: {about}"

    def _documents(self, rng: random.Random, folder: Path) -> Case:
        shutil.copytree(self.cache, folder / "cache")
        about = self._damage(folder / "cache" / self.key, rng)
        return Case(
            f"documents: {about}",
            lambda: _content(self._open(folder / "cache")[0]),
            [self.key],
            self._same,
            may_write=["cache"],
        )

    def _unfinished(self, rng: random.Random, folder: Path) -> Case:
        """A store whose making was broken off goes on with the parts that are there."""
        shutil.copytree(self.partial, folder / "cache")
        about = self._damage(folder / "cache" / f"{self.key}.partial", rng)
        return Case(
            f"unfinished: {about}",
            lambda: _content(self._open(folder / "cache")[0]),
            [self.key, "data."],
            self._same,
            may_write=["cache"],
        )

    def _responses(self, rng: random.Random, folder: Path) -> Case:
        """Kept ones are read as they were written, or made anew with a warning."""
        prompts = [Prompt(f"p{n}", [5, 6, 7 + n]) for n in range(4)]
        texts = [np.arange(3 + n, dtype=np.int32) for n in range(4)]
        path = folder / "kept" / "a.safetensors"
        _write(path, "key", prompts, _Stored(texts, 2.0), {"seed": 0})
        about = self._damage(path.parent, rng)

        def check(found: Any) -> None:
            if found is not None and not all(np.array_equal(a, b) for a, b in zip(found.texts, texts, strict=True)):
                raise Wrong("other responses than were written")

        return Case(f"responses: {about}", lambda: _read(path, "key", prompts), ["a.safetensors"], check)

    def _same(self, found: Any) -> None:
        if found != self.documents:
            raise Wrong("other documents than were written")

    def _features(self, rng: random.Random, folder: Path) -> Case:
        shutil.copytree(self.features, folder / "features")
        about = self._damage(folder / "features", rng)

        def check(found: Any) -> None:
            if list(found) != ["features"] or not torch.equal(found["features"], self.values):
                raise Wrong("other features than were written")

        def act() -> Any:
            return StoredFeatures.open(folder / "features").take(range(len(self.whole)))

        return Case(f"features: {about}", act, ["features"], check)

    def _rows(self, rng: random.Random, folder: Path) -> Case:
        kind = rng.choice(["stored", "packed"])
        shutil.copytree(self.saved / kind, folder / "rows")
        about = self._damage(folder / "rows", rng)

        def act() -> PackedRows:
            return load_rows(folder / "rows").take(range(len(self.whole)))

        def check(found: PackedRows) -> None:
            for name in ("input_ids", "document_ids", "position_ids", "supervised"):
                if not np.array_equal(getattr(found, name), getattr(self.whole, name)):
                    raise Wrong(f"other {name} than were written")

        return Case(f"{kind} rows: {about}", act, ["rows", "data.cache_dir"], check)


def _content(store: DocumentStore) -> list[Any]:
    return [(store.input_ids(n).tolist(), store.spans_of(n).tolist(), float(store.points[n])) for n in range(len(store))]
