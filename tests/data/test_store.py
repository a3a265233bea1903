from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import dflash_lit.data.sources as sources_module
import dflash_lit.data.store as store_module
from dflash_lit.data.chat import ChatSettings
from dflash_lit.data.datamodule import RowDataModule, RowDataset, RowLoader
from dflash_lit.data.documents import Document
from dflash_lit.data.held import held
from dflash_lit.data.packing import pack
from dflash_lit.data.records import Columns
from dflash_lit.data.row_plan import plan_rows
from dflash_lit.data.store import DocumentStore, StoreSettings, build_store
from dflash_lit.data.stored_rows import StoredRows, load_rows
from dflash_lit.errors import UserError
from tests.data.templates import CHATML, QWEN3, with_template

ROOT = Path(__file__).parents[2]


def tokens(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of tokens, most of a prompt and a response, some of several turns."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        length = int(np.clip(rng.lognormal(4.3, 1.0), 4, 2000))
        mask = np.arange(length) >= rng.integers(1, length - 2)
        if rng.random() < 0.3:
            mask = np.repeat(rng.random(length) < 0.5, 5)[:length]
            mask[-2:] = True
        records.append({"input_ids": rng.integers(3, 500, length).tolist(), "loss_mask": mask.astype(int).tolist()})
    return records


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def build(path: str, tokenizer: Any, cache: Path, **settings: Any) -> tuple[DocumentStore, bool]:
    return build_store(path, tokenizer, StoreSettings(**settings), cache, workers=1, progress=False)


def content(store: DocumentStore) -> list[tuple[str, list[int], list[list[int]]]]:
    return [(store.name(i), store.input_ids(i).tolist(), store.spans_of(i).tolist()) for i in range(len(store))]


def test_what_is_stored_is_what_was_read(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", 5000)
    monkeypatch.setattr(store_module, "_BATCH_TOKENS", 500)
    records = tokens(60)
    path = write(tmp_path / "a.jsonl", records)
    store, known = build(path, tokenizer, tmp_path)
    assert not known
    assert len(store) == store.skips.seen == 60
    assert len(list(store.folder.glob("*.arrow"))) > 3
    for number, record in enumerate(records):
        assert store.name(number) == f"{path}:{number + 1}"
        assert store.input_ids(number).tolist() == record["input_ids"]
        mask = np.zeros(len(record["input_ids"]), dtype=int)
        for start, stop in store.spans_of(number):
            mask[start:stop] = 1
        assert mask.tolist() == [0, *record["loss_mask"][1:]]
    # Also readable by others, and a second time from the cache.
    first = datasets.Dataset.from_file(str(store.folder / "000000.arrow"))
    assert first[0]["input_ids"] == records[0]["input_ids"]
    again, known = build(path, tokenizer, tmp_path)
    assert known
    assert content(again) == content(store)


def test_the_key_covers_everything_that_matters(tmp_path: Path, tokenizer: Any) -> None:
    own = with_template(tokenizer, CHATML)
    path = write(tmp_path / "a.jsonl", tokens(5))
    settings: list[tuple[Any, dict[str, Any]]] = [
        (tokenizer, {}),
        (own, {}),
        (with_template(tokenizer, QWEN3), {}),
        (own, {"chat": ChatSettings(thinking="on")}),
        (own, {"chat": ChatSettings(template_arguments={"a": 1})}),
        (own, {"chat": ChatSettings(mask_token_id=2)}),
        (own, {"columns": Columns(text="words")}),
    ]
    folders = {build(path, used, tmp_path, **more)[0].folder for used, more in settings}
    assert len(folders) == len(settings)
    assert build(path, own, tmp_path, skip_limit=0.5)[1]  # does not change what is stored
    write(tmp_path / "a.jsonl", tokens(6))
    assert build(path, own, tmp_path)[0].folder not in folders


def test_workers_write_the_same(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", 5000)
    path = write(tmp_path / "a.jsonl", [*tokens(40), "{", *tokens(40, 1)])
    own = with_template(tokenizer, CHATML)
    alone, _ = build(path, own, tmp_path / "alone", skip_limit=0.1)
    several, known = build_store(path, own, StoreSettings(skip_limit=0.1), tmp_path / "several", workers=2, progress=False)
    assert not known
    assert content(several) == content(alone)
    assert several.skips.broken == alone.skips.broken == {"broken JSON": 1}


def test_a_worker_that_is_killed_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", tokens(3000))
    script = f"""
import os, signal, sys, threading, time
import multiprocessing as mp
from transformers import AutoTokenizer
import dflash_lit.data.sources as sources, dflash_lit.data.store as store
from dflash_lit.errors import UserError
if __name__ == "__main__":
    sources._SHARD_BYTES = 50_000
    def kill():
        while not mp.active_children(): time.sleep(0.01)
        os.kill(mp.active_children()[0].pid, signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
    tokenizer = AutoTokenizer.from_pretrained({tokenizer.name_or_path!r})
    try: store.build_store({path!r}, tokenizer, store.StoreSettings(), {str(tmp_path)!r}, workers=2, progress=False)
    except UserError as error: print(error)
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("data.workers=2: one of the tokenising processes was ended from outside")


def test_a_killed_store_goes_on_with_the_missing_parts(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is killed while it tokenises; the next one keeps its parts, and the result is that of one without a break."""
    path = write(tmp_path / "a.jsonl", tokens(3000))
    script = f"""
import sys, time
from transformers import AutoTokenizer
import dflash_lit.data.sources as sources, dflash_lit.data.store as store
sources._SHARD_BYTES = 50_000
write = store._write_part
def slow(*arguments):
    write(*arguments); print("part", flush=True); time.sleep(0.05)
store._write_part = slow
tokenizer = AutoTokenizer.from_pretrained({tokenizer.name_or_path!r})
store.build_store({path!r}, tokenizer, store.StoreSettings(), {str(tmp_path)!r}, workers=1, progress=False)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "part\n"
        os.kill(process.pid, signal.SIGKILL)
    [partial] = tmp_path.glob("documents-*.partial")
    written = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.json")}
    assert len(written) >= 3
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", 50_000)
    store, _ = build(path, tokenizer, tmp_path)
    assert {name: (store.folder / name).stat().st_mtime_ns for name in written} == written
    assert not list(tmp_path.glob("*.partial"))
    assert content(store) == content(build(path, tokenizer, tmp_path / "whole")[0])


def test_two_runs_that_tokenise_the_same_at_once(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the other, and finds its store."""
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", 5000)
    path = write(tmp_path / "a.jsonl", tokens(200))
    began = threading.Barrier(3)

    def run(_: int) -> tuple[DocumentStore, bool]:
        began.wait()
        return build(path, tokenizer, tmp_path / "cache")

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    assert sorted(known for _, known in found) == [False, True, True]
    assert [store.name for store in (tmp_path / "cache").iterdir()] == [found[0][0].folder.name]
    assert all(content(store) == content(found[0][0]) for store, _ in found)


def test_duplicates_are_left_out_and_named(tmp_path: Path, tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)

    def talk(word: str, **more: Any) -> dict[str, Any]:
        turns = [("user", word), ("assistant", f"{word} {word}"), ("user", "on"), ("assistant", word)]
        return {"messages": [{"role": role, "content": text} for role, text in turns], **more}

    records = [talk("a", id="1"), talk("b", id="1"), talk("c"), talk("c"), talk("a"), talk("d", id=2), talk("e", id="2")]
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(UserError, match=r"data\.skip_limit=0\.01: 3 of 7 records .*2 x duplicate id; 1 x duplicate of another"):
        build(path, own, tmp_path)
    store, _ = build(path, own, tmp_path, skip_limit=0.5)
    # Each conversation gives two documents here, both or none of which are kept.
    lines = [store.name(i).rpartition(":")[2] for i in range(len(store))]
    assert lines == [line for line in "1356" for _ in range(2)]
    assert [str(r) for r in store.skips.examples["duplicate id"]] == [f"{path}:{i}: duplicate id" for i in (2, 7)]
    assert store.points[0] == store.points[1] != store.points[2]
    # The limit holds for what is there already, too.
    with pytest.raises(UserError, match=r"data\.skip_limit=0\.1: 3 of 7"):
        build(path, own, tmp_path, skip_limit=0.1)


def test_all_answers_to_one_prompt_have_one_point(tmp_path: Path, tokenizer: Any) -> None:
    answers = [{"prompt": prompt, "response": f"{i} is what I say"} for prompt in ("hello", "hallo " * 40) for i in range(4)]
    texts = [{"text": f"{i} hello, this is a text of its own"} for i in range(4)]
    store, _ = build(write(tmp_path / "a.jsonl", answers + texts), tokenizer, tmp_path)
    points = store.points.tolist()
    assert len(points) == 12
    assert len(set(points[:4])) == len(set(points[4:8])) == 1
    assert len(set(points)) == 2 + 4


def test_too_many_broken_records_end_it_early(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", 5000)
    path = write(tmp_path / "a.jsonl", [record for i in range(3000) for record in (json.dumps({"text": f"word {i}"}), "{")])
    with pytest.raises(UserError, match="x broken JSON") as caught:
        build(path, tokenizer, tmp_path)
    [partial] = tmp_path.glob("*.partial")
    assert len(list(partial.glob("*.json"))) < 20
    assert f"{path}:2: broken JSON" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unfinished_stores_of_data_that_were_mended_are_removed(tmp_path: Path, tokenizer: Any) -> None:
    """Not those that a run may go on with, nor one that somebody is writing."""
    broken, good, cache = [{"text": "a word"}, "{"], [{"text": "a word"}, {"text": "and another"}], tmp_path / "cache"

    def left_of(name: str) -> Path:
        before = set(cache.glob("*"))
        with pytest.raises(UserError, match="broken JSON"):
            build(write(tmp_path / name, broken), tokenizer, cache)
        [partial] = set(cache.glob("*.partial")) - before
        return partial

    mended, stays, gone, theirs = (left_of(f"{name}.jsonl") for name in "abce")
    (theirs / ".writer").write_text("another host, whose lock need not be seen")
    write(tmp_path / "e.jsonl", good)
    (tmp_path / "c.jsonl").unlink()  # may come back, as a disk that is not mounted
    path = write(tmp_path / "a.jsonl", good)
    with held(mended):
        first, _ = build(path, tokenizer, cache)
        assert set(cache.iterdir()) == {mended, stays, gone, theirs, first.folder}
    (stays / ".sources").write_text("[")  # not known
    second, _ = build(write(tmp_path / "d.jsonl", good), tokenizer, cache)
    assert set(cache.iterdir()) == {stays, gone, theirs, first.folder, second.folder}
    assert not list(first.folder.glob(".*"))


@pytest.mark.parametrize("lines", [[], ['{"prompt": "a"}'], ["", ""]])
def test_no_document_is_an_error(tmp_path: Path, tokenizer: Any, lines: list[str]) -> None:
    with pytest.raises(UserError, match=r"data\.path: none of"):
        build(write(tmp_path / "a.jsonl", lines), tokenizer, tmp_path)


def test_settings_are_checked(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"data\.skip_limit=2"):
        StoreSettings(skip_limit=2)
    with pytest.raises(UserError, match=r"data\.workers=0"):
        build_store("x", tokenizer, StoreSettings(), tmp_path, workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        build(write(tmp_path / "a.jsonl", tokens(3)), tokenizer, tmp_path / "file")


# -------------------------------------------------------------------------------------------------------------------- rows


def stored(folder: Path, tokenizer: Any, count: int = 160, seed: int = 0, **how: Any) -> tuple[StoredRows, list[Document]]:
    """Rows of every second document of a store, and these documents."""
    store, _ = build(write(folder / f"{seed}.jsonl", tokens(count, seed)), tokenizer, folder)
    chosen = np.arange(0, len(store), 2)
    documents = []
    for number in chosen.tolist():
        mask = np.zeros(store.lengths[number], dtype=np.bool_)
        for start, stop in store.spans_of(number):
            mask[start:stop] = True
        documents.append(Document(store.input_ids(number), mask, store.name(number)))
    plan = plan_rows(store.supervision.take(chosen), 256, seed=seed, **how)
    return StoredRows(store, plan, chosen, pad_id=1), documents


@pytest.mark.parametrize("one_per_row", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_store_are_those_of_its_documents(tmp_path: Path, tokenizer: Any, seed: int, one_per_row: bool) -> None:
    """The twin: :func:`pack` with everything in memory. Prompts, windows and repeated beginnings included."""
    rows, documents = stored(tmp_path, tokenizer, seed=seed, one_per_row=one_per_row)
    assert max(map(len, documents)) > 256
    expected = pack(documents, 256, seed=seed, pad_id=1, one_per_row=one_per_row)
    assert len(rows) == len(expected)
    assert rows.efficiency == pytest.approx(expected.efficiency)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    for name in ("input_ids", "document_ids", "position_ids", "supervised"):
        assert np.array_equal(getattr(rows.take(order), name), getattr(expected, name)[order]), name
    batches = [RowDataset(source).batch([3, 0], 4) for source in (rows, expected)]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_saved_rows_are_the_same_elsewhere(tmp_path: Path, tokenizer: Any) -> None:
    rows, documents = stored(tmp_path, tokenizer)
    rows.save(tmp_path / "rows")
    again = load_rows(tmp_path / "rows")
    assert isinstance(again, StoredRows)
    assert np.array_equal(again.take([1, 2]).input_ids, rows.take([1, 2]).input_ids)
    assert np.array_equal(again.take([1, 2]).supervised, rows.take([1, 2]).supervised)
    assert again.pad_id == 1
    assert again.digest() == rows.digest()
    rows.store.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        load_rows(tmp_path / "rows")
    held = pack(documents, 256, seed=0, pad_id=1)
    held.save(tmp_path / "held")
    assert np.array_equal(load_rows(tmp_path / "held").take([1]).input_ids, held.take([1]).input_ids)
    assert load_rows(tmp_path / "held").digest() == held.digest() != held.take([1]).digest()


def test_a_pipe_in_place_of_documents_is_not_waited_for(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", tokens(3))
    part = next(build(path, tokenizer, tmp_path)[0].folder.glob("*.arrow"))
    part.unlink()
    os.mkfifo(part)
    store, _ = build(path, tokenizer, tmp_path)
    # Opened for reading and writing by this process, so that the test fails rather than hangs where it is waited for.
    other_end = os.open(part, os.O_RDWR | os.O_NONBLOCK)
    try:
        with pytest.raises(UserError, match=r"data\.cache_dir: .*\.arrow: cannot be read \(it is a device or a pipe"):
            store.input_ids(0)
    finally:
        os.close(other_end)


def test_an_epoch_goes_on_with_the_same_next_row(tmp_path: Path, tokenizer: Any) -> None:
    """In another process's place: the store opened anew, the plan made anew."""
    first = RowDataModule(stored(tmp_path, tokenizer)[0], stored(tmp_path, tokenizer)[0], 2, seed=3).train_dataloader()
    first.sampler.set_epoch(1)  # type: ignore[attr-defined]
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    second = RowDataModule(stored(tmp_path, tokenizer)[0], stored(tmp_path, tokenizer)[0], 2, seed=3).train_dataloader()
    second.load_state_dict(state)
    rest, resumed = list(batches), list(second)
    assert len(rest) == len(resumed) > 3
    for expected, got in zip(rest, resumed, strict=True):
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    other = RowDataModule(stored(tmp_path, tokenizer, 130)[0], stored(tmp_path, tokenizer)[0], 2, seed=3).train_dataloader()
    with pytest.raises(UserError, match="saved inside an epoch"):
        other.load_state_dict(state)


def test_other_data_of_as_many_rows_are_refused_and_the_same_data_elsewhere_are_not(tmp_path: Path, tokenizer: Any) -> None:
    def loader(folder: str, records: list[dict[str, Any]]) -> RowLoader:
        (tmp_path / folder).mkdir()
        store, _ = build(write(tmp_path / folder / "a.jsonl", records), tokenizer, tmp_path / folder)
        plan = plan_rows(store.supervision, 256, seed=0)
        rows = StoredRows(store, plan, np.arange(len(store)))
        return RowDataModule(rows, rows, 2, seed=3).train_dataloader()

    records = tokens(60)
    first = loader("a", records)
    next(iter(first))
    state = first.state_dict()
    loader("b", records).load_state_dict(state)
    other = [{**record, "input_ids": [499, *record["input_ids"][1:]]} for record in records]
    with pytest.raises(UserError, match=r"saved inside an epoch.* .content "):
        loader("c", other).load_state_dict(state)


def test_a_large_store_opens_at_once(tmp_path: Path, tokenizer: Any) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"input_ids": [3, 4 + i % 400, i % 7 + 3], "loss_mask": [0, 1, 1], "id": i} for i in range(20_000)],
    )
    build(path, tokenizer, tmp_path)
    began = time.perf_counter()
    store, known = build(path, tokenizer, tmp_path)
    assert known
    assert len(store) == 20_000
    assert time.perf_counter() - began < 1
