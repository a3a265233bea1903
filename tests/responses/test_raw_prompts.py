from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.errors import UserError
from dflash_lit.responses.raw_prompts import read_raw_prompts

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


def test_texts_and_conversations(tmp_path: Path):
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "a"},
        "",
        {"messages": [USER, SAID], "id": 7},
        {"messages": [USER, {**SAID, "weight": 1}, USER], "tools": [{"type": "function"}]},
    )
    first, second, third = read_raw_prompts(file).prompts
    assert (first.text, first.messages, first.id) == ("a", None, first.key)
    # What the assistant said last is left out: the target says that.
    assert (second.messages, second.id) == ((USER,), "7")
    assert (third.messages, third.tools, third.place) == ((USER, SAID, USER), [{"type": "function"}], f"{file}:4")


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two\xe2\x80\xa8lines\n")
    assert [prompt.text for prompt in read_raw_prompts(tmp_path / "p.txt").prompts] == ["one", " two\u2028lines"]


def test_repeated_prompts_are_asked_once_unless_they_have_ids_of_their_own(tmp_path: Path):
    entries = [
        {"prompt": "a"},
        {"prompt": "a"},
        {"prompt": "a", "id": "x"},
        {"prompt": "a", "id": "y"},
        {"prompt": "a", "id": "x"},
    ]
    read = read_raw_prompts(write(tmp_path / "p.jsonl", *entries))
    assert [prompt.id for prompt in read.prompts[1:]] == ["x", "y"]
    assert (len(read.prompts), read.repeated) == (3, 2)


def test_ids_do_not_depend_on_the_place_or_the_order_of_keys(tmp_path: Path):
    one = read_raw_prompts(write(tmp_path / "a.jsonl", {"messages": [USER]}, {"prompt": "b"})).prompts
    swapped = {"messages": [{"content": "hi", "role": "user"}]}
    two = read_raw_prompts(write(tmp_path / "b.jsonl", {"prompt": "b"}, swapped)).prompts
    assert [prompt.id for prompt in one] == [prompt.id for prompt in reversed(two)]


def test_endpoint_makes_a_text_a_message(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", {"prompt": "hi"})
    (prompt,) = read_raw_prompts(file, endpoint="chat").prompts
    assert (prompt.text, prompt.messages) == (None, (USER,))
    with pytest.raises(UserError, match=r"p.jsonl:1: .*completions"):
        read_raw_prompts(write(file, {"messages": [USER]}), endpoint="completions")


def test_turns_at_which_the_target_speaks(tmp_path: Path):
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answered = {"role": "tool", "content": "42"}
    talk = [USER, SAID, USER, called, answered, SAID, SAID, USER]
    (prompt,) = read_raw_prompts(write(tmp_path / "p.jsonl", {"messages": talk})).prompts
    assert prompt.turns(all_turns=False) == [8]
    # Not the call, whose answer is there already, and not a second message in a row.
    assert prompt.turns(all_turns=True) == [1, 5, 8]
    (text,) = read_raw_prompts(write(tmp_path / "t.jsonl", {"prompt": "a"})).prompts
    assert text.turns(all_turns=True) == [0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "p.jsonl:1: is not JSON"),
        (["[" * 100_000], "p.jsonl:1: is not JSON"),
        (['{"prompt": "a", "x": ' + "9" * 5000 + "}"], "p.jsonl:1: is not JSON .a number"),
        (["3"], "needs an object"),
        ([{"prompt": "a", "messages": [USER]}], "needs an object"),
        ([{"prompt": ""}], "must be a text"),
        ([{"prompt": 3}], "must be a text"),
        ([{"prompt": "a", "id": ""}], '"id" must be'),
        ([{"prompt": "a", "id": True}], '"id" must be'),
        ([{"prompt": "a", "tools": {}}], '"tools" must be'),
        ([{"messages": "hi"}], "must be a list"),
        ([{"messages": [{"role": "user"}]}], "must be a list"),
        ([{"messages": [{"role": "user", "content": 3}]}], "must be a list"),
        ([{"messages": []}], "nothing to respond to"),
        ([{"messages": [SAID]}], "nothing to respond to"),
        ([{"messages": [{"role": "system", "content": "x"}]}], "nothing to respond to"),
        (
            [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}],
            "p.jsonl:2: id 'x' is also that of another prompt, .*p.jsonl:1",
        ),
        (['{"prompt": "\\ud800"}'], "cannot be sent"),
        (['{"prompt": "a", "tools": [NaN]}'], "cannot be sent"),
        (["", " "], "holds no prompt"),
    ],
)
def test_what_cannot_be_asked_is_named_by_its_line(tmp_path: Path, lines: list[Any], message: str):
    with pytest.raises(UserError, match=message):
        read_raw_prompts(write(tmp_path / "p.jsonl", *lines))


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(UserError, match=r"unknown kind of file"):
        read_raw_prompts(tmp_path / "p.csv")
    with pytest.raises(UserError, match=r"cannot be read"):
        read_raw_prompts(tmp_path / "p.txt")
    (tmp_path / "p.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(UserError, match=r"p.txt:2: is not UTF-8"):
        read_raw_prompts(tmp_path / "p.txt")
