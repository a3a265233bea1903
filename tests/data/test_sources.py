from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dflash_lit.data.sources as sources_module
from dflash_lit.data.chat import ChatSettings, ChatTokenizer
from dflash_lit.data.records import Columns, Record, check_record
from dflash_lit.data.skips import Skip, SkipRecord, Skips
from dflash_lit.data.sources import find_sources, read_shard, shards
from dflash_lit.errors import UserError
from tests.data.templates import QWEN3, with_template

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def read(*paths: str | Path, columns: Columns | None = None, split: str = "train") -> Iterator[tuple[str, Record | Skip]]:
    columns = columns or Columns()
    for shard in shards(find_sources([str(path) for path in paths], split=split)):
        for where, value in read_shard(shard, columns):
            try:
                if isinstance(value, Skip):
                    raise value
                yield where, check_record(value, columns, where)
            except Skip as skip:
                yield where, skip


def reasons(path: Path) -> list[tuple[int, str]]:
    """(line, reason) of each record; an empty reason for one that is taken."""
    return [(int(where.rpartition(":")[2]), record.reason if isinstance(record, Skip) else "") for where, record in read(path)]


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


DIRTY: list[tuple[bytes, str]] = [
    (line(GOOD), ""),
    (b'{"messages": [', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b"[]", "not an object"),
    (b"null", "not an object"),
    (b"{}", "none of the columns"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "a\0b"}', "NUL character"),
    (line({"text": "a\0b"}), "NUL character"),
    (line({"text": "a\ud800b"}), "half a character"),
    (line({"text": "  "}), "empty text"),
    (line({"text": 5}), "wrong type"),
    (line({"prompt": {"a": 1}}), "wrong type"),
    (line({"prompt": "a", "response": 5}), "wrong type"),
    (line({"prompt": "a", "response": ""}), "empty text"),
    (line({"messages": "hello"}), "broken JSON"),
    (line({"messages": 3}), "wrong type"),
    (line({"messages": []}), "empty conversation"),
    (line({"messages": ["a"]}), "wrong type"),
    (line({"messages": [{"content": "a"}]}), "wrong type"),
    (line({"messages": [{"role": "user", "content": 5}]}), "wrong type"),
    (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "no text"),
    (line({"messages": [{"role": "user", "content": ""}]}), "empty turn"),
    (line({"messages": [{"role": "assistant", "content": None}]}), "empty turn"),
    (line({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]}), "wrong type"),
    (line({"messages": [{"role": "assistant", "tool_calls": 1}]}), "wrong type"),
    (line({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}), "wrong type"),
    (line({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}), "broken JSON"),
    (line({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]}), "wrong type"),
    (line({"messages": [calling('{"a": "\\ud800"}')]}), "half a character"),
    (line({"messages": [calling('{"a": "\\u0000"}')]}), "NUL character"),
    (line({"messages": [calling('{"a": ' + "[" * 99 + "]" * 99 + "}")]}), "wrong type"),
    (line({**GOOD, "tools": '[{"name": "\\ud800"}]'}), "half a character"),
    (line({"id": "\ud800", "input_ids": [1, 2], "loss_mask": [0, 1]}), "half a character"),
    (line({**GOOD, "tools": 5}), "wrong type"),
    (line({**GOOD, "id": [1]}), "wrong type"),
    (line({**GOOD, "finish_reason": 1}), "wrong type"),
    (line({"input_ids": [1, 2]}), "tokens without loss mask"),
    (line({"input_ids": [1, 2], "loss_mask": [1]}), "wrong type"),
    (line({"input_ids": [1, 2.5], "loss_mask": [1, 1]}), "wrong type"),
    (line({"input_ids": [1, True], "loss_mask": [1, 1]}), "wrong type"),
    (line({"input_ids": [1, 2], "loss_mask": [1, 2]}), "wrong type"),
    (line({"input_ids": [1, 2**70], "loss_mask": [1, 1]}), "token id out of range"),
    (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON"),
    (b'{"text": "' + b"a" * 10_000_000 + b'"}', "too long"),
    (line({"text": "last"}), ""),
]


def test_dirty_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "dirty.jsonl"
    file.write_bytes(b"\n".join([b"", *(text for text, _ in DIRTY)]))  # an empty line first: skipped, and counted as a line
    assert reasons(file) == [(number, reason) for number, (_, reason) in enumerate(DIRTY, start=2)]


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_lines_are_numbered_alike_however_a_file_is_cut(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_SHARD_BYTES", size)
    file = tmp_path / "a.jsonl"
    texts = [json.dumps({"text": f"text {i} " + "x" * (i % 13)}) for i in range(40)]
    file.write_text("\ufeff" + "\n\n".join(texts) + ("\n" if size == 7 else ""), encoding="utf-8")
    got = list(read(file))
    assert [where for where, _ in got] == [f"{file}:{2 * i + 1}" for i in range(40)]
    assert [record.text for _, record in got if isinstance(record, Record)] == [json.loads(t)["text"] for t in texts]


def test_every_kind_of_source_gives_the_same_records(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    values = [
        {"id": "1", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]},
        {"id": "2", "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
    ]
    text = "".join(json.dumps(value) + "\n" for value in values)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(text)
    # Arrow gives every message the fields of all, as nulls.
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet", row_group_size=1)
    data = datasets.Dataset.from_list(values)
    data.save_to_disk(str(tmp_path / "set"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "sets"))

    def messages(*paths: Path, split: str = "train") -> list[Any]:
        return [(r.id, r.messages) for _, r in read(*paths, split=split) if isinstance(r, Record)]

    for name in ("a.dropped.jsonl", "a.settings.json", ".a.jsonl"):  # stand beside the data, and are none
        (tmp_path / "lines" / name).write_text(text)
    expected = messages(tmp_path / "lines" / "a.jsonl")
    assert expected[0][1][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for name in ("lines", "a.jsonl.gz", "a.parquet", "set", "sets", "lin*/*.jsonl"):
        assert messages(tmp_path / name) == expected, name
    assert messages(tmp_path / "lines" / "*.dropped.jsonl") == expected  # who asks for them gets them
    assert messages(tmp_path / "sets", split="test") == expected[1:]
    assert messages(tmp_path / "set", tmp_path / "a.parquet") == 2 * expected
    assert [where for where, _ in read(tmp_path / "a.parquet")] == [f"{tmp_path}/a.parquet[{i}]" for i in (1, 2)]
    assert [where for where, _ in read(tmp_path / "set")] == [f"{tmp_path}/set[{i}]" for i in (1, 2)]


def test_nulls_in_the_arguments_of_a_call_are_what_was_said(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"unit": None, "b": 1}}, "id": None}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "a.jsonl").write_bytes(line({"messages": messages}))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"messages": [json.dumps(messages)]}), tmp_path / "b.parquet")
    # In Arrow's own structures nobody can tell them from the fields of other calls.
    for name, arguments in (
        ("a.jsonl", {"unit": None, "b": 1}),
        ("b.parquet", {"unit": None, "b": 1}),
        ("a.parquet", {"b": 1}),
    ):
        [(_, record)] = read(tmp_path / name)
        assert isinstance(record, Record)
        assert record.messages is not None
        assert record.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": arguments}}]


def test_columns_have_names(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"talk": GOOD["messages"], "messages": 5, "uid": 7}))
    [(_, record)] = read(file, columns=Columns.named({"messages": "talk", "id": "uid"}))
    assert isinstance(record, Record)
    assert (record.messages, record.id) == (GOOD["messages"], "7")
    with pytest.raises(UserError, match=r"data\.columns: there is no column 'message'"):
        Columns.named({"message": "talk"})
    with pytest.raises(UserError, match=r"data\.columns\.messages=''"):
        Columns.named({"messages": ""})


def test_a_damaged_parquet_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 12}), path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"text", b"\x80ext"))
    with pytest.raises(UserError, match="is no readable Parquet file"):
        list(read(path))
    # The rows of all parts, and those of the only one, are written as twice the number.
    said = []
    for place in (place for place, byte in enumerate(whole) if byte == 2 * 12):
        path.write_bytes(whole[:place] + bytes([2 * 5]) + whole[place + 1 :])
        try:
            list(read(path))
        except UserError as error:
            said.append(str(error).removeprefix(f"{path}: "))
    damaged = "is a damaged Parquet file: it says that it has {} rows, and that its parts have {}"
    assert {damaged.format(5, 12), damaged.format(12, 5)} < set(said)


def test_paths_that_name_nothing_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_text("PAR1 it is not")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(str(tmp_path / "sets"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "state.json").write_text("{")
    for path, says in {
        "missing.jsonl": "no such file",
        "empty": "holds no file",
        "a.csv": "unknown kind of file",
        "*.nothing": "matches no file",
        "broken.parquet": "no readable Parquet",
        "half": "is no data set",
    }.items():
        with pytest.raises(UserError, match=says):
            list(read(tmp_path / path))
    with pytest.raises(UserError, match="has train"):
        find_sources(str(tmp_path / "sets"), split="test")
    with pytest.raises(UserError, match="neither a file nor a data set"):
        find_sources("no-such-owner/no-such-data")
    for nothing in ("", "a\0b", [], 5, True, None, "~no-such-user/a.jsonl"):
        with pytest.raises(UserError, match=r"data\.path"):
            find_sources(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (pyarrow.timestamp("us"), 2**62, "wrong type"),
        (pyarrow.date32(), 2**30, "wrong type"),
        (pyarrow.duration("s"), 2**62, "wrong type"),
        (pyarrow.string(), b"\xff", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("of", ["parquet", "dataset"])
def test_a_value_that_python_does_not_have_costs_its_row_only(
    tmp_path: Path, kind: pyarrow.DataType, value: Any, reason: str, of: str
) -> None:
    values = [None, value, None]
    column = pyarrow.array(values, pyarrow.binary()).view(kind) if isinstance(value, bytes) else pyarrow.array(values, kind)
    table = pyarrow.table({"text": ["first", "second", "third"], "id": column})
    if of == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    else:
        datasets.Dataset(table).save_to_disk(str(tmp_path / "a.parquet"))
    found = [record.reason if isinstance(record, Skip) else record.text for _, record in read(tmp_path / "a.parquet")]
    assert found == ["first", reason, "third"]


def test_records_of_no_known_column_are_counted(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"x": [1, 2, 3]}).save_to_disk(str(tmp_path / "set"))
    assert [record.reason for _, record in read(tmp_path / "set") if isinstance(record, Skip)] == ["none of the columns"] * 3


def test_names_of_files_may_be_any_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    path.write_bytes(line(GOOD))
    [(where, _)] = read(path)
    assert where.encode().endswith(b"/\\udcff.jsonl:1")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
        list(read(file))


# ------------------------------------------------------------------------------------------------------------------- limit


def test_skips_are_counted_under_a_limit() -> None:
    skips = Skips()
    skips.add(100, [SkipRecord("a:3", "broken JSON", "at column 4"), SkipRecord("a:9", "too short", choice=True)])
    skips.check(0.01)  # the chosen one does not count
    with pytest.raises(
        UserError, match=r"data\.skip_limit=0\.001: 1 of 100 .*1 x broken JSON.* a:3: broken JSON \(at column 4\)"
    ):
        skips.check(0.001)
    skips.check(0.001, final=False)  # too early to tell
    skips.add(2000, [SkipRecord(f"b:{i}", "broken JSON") for i in range(500)])
    with pytest.raises(UserError, match="501 of 2100"):
        skips.check(0.01, final=False)
    assert len(skips.examples["broken JSON"]) == 3
    assert Skips.from_dict(json.loads(json.dumps(skips.to_dict()))) == skips


# -------------------------------------------------------------------------------------------------------------------- fuzz

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "assistant", "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | anything,
        "content": st.text() | anything,
        "reasoning_content": st.text() | anything,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {}, optional={"function": st.fixed_dictionaries({}, optional={"name": st.text(), "arguments": anything})}
            )
        )
        | anything,
    },
)
record = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(message, max_size=5) | anything,
        "tools": anything,
        "prompt": st.text() | anything,
        "response": st.text() | anything,
        "text": st.text() | anything,
        "input_ids": st.lists(st.integers(-2, 600)) | anything,
        "loss_mask": st.lists(st.integers(0, 1)) | anything,
        "id": anything,
    },
)
lines = st.lists(
    st.binary(max_size=60)
    | record.map(lambda value: json.dumps(value).encode())
    | st.tuples(record, st.integers(0, 80)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    max_size=6,
)


@pytest.fixture(scope="module")
def qwen3(tokenizer: Any) -> ChatTokenizer:
    return ChatTokenizer(with_template(tokenizer, QWEN3), ChatSettings())


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines)
def test_no_input_crashes(tmp_path_factory: pytest.TempPathFactory, qwen3: ChatTokenizer, content: list[bytes]) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    file.write_bytes(b"\n".join(content))
    for _, taken in read(file):
        if isinstance(taken, Record):
            try:
                documents = qwen3.documents(taken)
            except Skip:
                continue
            for document in documents:
                length = len(document.input_ids)
                flat = document.spans.reshape(-1)
                assert 1 <= flat[0] < flat[-1] <= length
                assert (flat[1:] > flat[:-1]).all()
                assert 0 <= document.input_ids.min() <= document.input_ids.max() < len(qwen3.tokenizer)


# Arrow knows values that JSON does not.
typed = st.binary(max_size=4) | st.datetimes() | st.decimals() | st.floats()
typed_call = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(), "arguments": st.dictionaries(st.text(), typed)})}
)
typed_record = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant"]), "content": st.text() | typed | st.lists(typed, max_size=2)},
                optional={"tool_calls": st.lists(typed_call, max_size=2), "weight": typed, "name": typed},
            ),
            max_size=4,
        ),
        "tools": st.lists(st.dictionaries(st.text(), typed, max_size=2), max_size=2),
        "input_ids": st.lists(typed, max_size=3),
        "loss_mask": st.lists(typed, max_size=3),
        "id": typed,
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(anything | record | typed_record)
def test_no_record_crashes(qwen3: ChatTokenizer, value: Any) -> None:
    """Also of what no JSON can hold."""
    with contextlib.suppress(Skip):
        taken = check_record(value, Columns(), "here")
        assert any(v is not None for v in (taken.messages, taken.text, taken.prompt, taken.input_ids))
        assert qwen3.documents(taken)
