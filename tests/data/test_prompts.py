from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dflash_lit.data.prompts import Prompt, file_prompts, split_held_out, stdlib_prompts
from dflash_lit.errors import UserError
from dflash_lit.target.embedded.corpus import is_held_out, stdlib_files

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    copy = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    copy.chat_template = TEMPLATE
    return copy


@pytest.mark.parametrize("held_out", [False, True])
def test_stdlib_prompts(tokenizer: Any, held_out: bool):
    began = time.perf_counter()
    prompts = stdlib_prompts(tokenizer, count=600, prompt_tokens=48, held_out=held_out, seed=0)
    assert time.perf_counter() - began < 15  # about one second
    assert len(prompts) == len({tuple(prompt.input_ids) for prompt in prompts}) == 600
    assert {len(prompt.input_ids) for prompt in prompts} == {48}

    texts = {file.name: file.text for file in stdlib_files()}
    per_file: Counter[str] = Counter()
    for prompt in prompts:
        name, line = prompt.name.rsplit(":", 1)
        assert is_held_out(name) == held_out
        per_file[name] += 1
        rest = texts[name].split("\n", int(line) - 1)[-1]
        assert rest.startswith(tokenizer.decode(prompt.input_ids).rstrip("\ufffd"))
    # Files take turns: none gives twice what another gives, unless that one is too short.
    files = sum(is_held_out(name) == held_out for name in texts)
    assert max(per_file.values()) <= 2 * -(-600 // files) + 1


def test_stdlib_prompts_follow_the_seed(tokenizer: Any):
    def draw(seed: int) -> list[Prompt]:
        return stdlib_prompts(tokenizer, count=20, prompt_tokens=16, held_out=True, seed=seed)

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_stdlib_prompts_are_the_tokens_of_the_text(tokenizer: Any):
    # Cutting the text before tokenizing must not show: compare with the whole rest of the file.
    texts = {file.name: file.text for file in stdlib_files()}
    for prompt in stdlib_prompts(tokenizer, count=10, prompt_tokens=40, held_out=True, seed=5):
        name, line = prompt.name.rsplit(":", 1)
        rest = texts[name].split("\n", int(line) - 1)[-1]
        assert prompt.input_ids == tokenizer(rest)["input_ids"][:40]


def test_stdlib_that_is_too_small(tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    # A library of a few small files, one of which repeats another.
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.py").write_text("".join(f"line_{i} = {'d' if name == 'c' else name}\n" for i in range(100)))
    monkeypatch.setattr("dflash_lit.data.prompts.stdlib_files", lambda: stdlib_files(tmp_path))
    monkeypatch.setattr("dflash_lit.data.prompts.is_held_out", lambda name: False)
    with pytest.raises(UserError, match=r"training files hold \d+ distinct prompts of 100 tokens, not 400") as error:
        stdlib_prompts(tokenizer, count=400, prompt_tokens=100, held_out=False, seed=0)
    held = int(str(error.value).split(" hold ")[1].split()[0])
    assert 200 < held < 300
    assert len(stdlib_prompts(tokenizer, count=held, prompt_tokens=100, held_out=False, seed=0)) == held
    with pytest.raises(UserError, match="held-out files hold 0 "):
        stdlib_prompts(tokenizer, count=1, prompt_tokens=100, held_out=True, seed=0)
    with pytest.raises(UserError, match="prompt_tokens"):
        stdlib_prompts(tokenizer, count=5, prompt_tokens=0, held_out=True, seed=0)


def test_text_file(tokenizer: Any, tmp_path: Any):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffdef f(x):\r\n\n  \nimport os\ndef f(x):\n".encode())
    prompts = file_prompts(path, tokenizer, max_prompt_tokens=100)
    assert [tokenizer.decode(prompt.input_ids) for prompt in prompts] == ["def f(x):", "import os"]
    assert [prompt.name for prompt in prompts] == [f"{path}:1", f"{path}:4"]


def test_long_prompts_lose_their_beginning(tokenizer: Any, tmp_path: Any):
    path = tmp_path / "prompts.txt"
    path.write_text("one two three four five six seven")
    whole = tokenizer("one two three four five six seven")["input_ids"]
    assert file_prompts(path, tokenizer, max_prompt_tokens=3)[0].input_ids == whole[-3:]


def test_json_lines(chat_tokenizer: Any, tmp_path: Any):
    path = tmp_path / "prompts.jsonl"
    user = {"role": "user", "content": "hi\u2028there"}
    lines = [
        {"prompt": "x = 1"},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": "the target says this itself"}]},
        {"messages": [user, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]},
    ]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    prompts = file_prompts(path, chat_tokenizer, max_prompt_tokens=500)
    assert [chat_tokenizer.decode(prompt.input_ids) for prompt in prompts] == [
        "x = 1",
        "<user>hi\u2028there\n<assistant>",
        "<user>hi\u2028there\n<assistant>yes\n<user>go on\n<assistant>",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ('"x"', "either"),
        ('{"text": "x"}', "either"),
        ('{"prompt": "x", "messages": []}', "either"),
        ("[" * 100_000, "is not JSON .nested"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "is not JSON .a number"),
        ('{"prompt": "\\ud800"}', "half a character"),
        ('{"prompt": 3}', "must be a text"),
        ('{"prompt": ""}', "no tokens"),
        ('{"messages": "x"}', "list of objects"),
        ('{"messages": [{"role": "user"}]}', "list of objects"),
        ('{"messages": []}', "nothing to respond to"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to respond to"),
    ],
)
def test_wrong_lines_are_named(chat_tokenizer: Any, tmp_path: Any, line: str, says: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(UserError, match=says) as error:
        file_prompts(path, chat_tokenizer, max_prompt_tokens=10)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


def test_a_refusing_template_is_reported(chat_tokenizer: Any, tmp_path: Any):
    chat_tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "x"}]}')
    with pytest.raises(UserError, match=r":1: .*no system role"):
        file_prompts(path, chat_tokenizer, max_prompt_tokens=10)


def test_messages_need_a_chat_template(tokenizer: Any, tmp_path: Any):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(UserError, match=r":1: .*no chat template"):
        file_prompts(path, tokenizer, max_prompt_tokens=10)


def test_wrong_files_are_named(tokenizer: Any, tmp_path: Any):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, says in (
        ("none.txt", "cannot be read"),
        ("x.csv", "unknown kind"),
        ("empty.txt", "no prompt"),
        ("latin.txt", "UTF-8"),
    ):
        with pytest.raises(UserError, match=says) as error:
            file_prompts(tmp_path / name, tokenizer, max_prompt_tokens=10)
        assert name in str(error.value)
    with pytest.raises(UserError, match="max_prompt_tokens"):
        file_prompts(tmp_path / "empty.txt", tokenizer, max_prompt_tokens=0)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 1000), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 1000))
def test_split_is_a_partition_with_two_sides(ids: set[int], share: float, seed: int):
    prompts = [Prompt(str(i), [i, i]) for i in sorted(ids)]
    training, held_out = split_held_out(prompts, share, seed)
    assert sorted(map(str, training + held_out)) == sorted(map(str, prompts))
    assert training
    assert held_out
    assert (training, held_out) == split_held_out(prompts, share, seed)


def test_split_is_stable_and_about_the_share():
    prompts = [Prompt(str(i), [i]) for i in range(4000)]
    training, held_out = split_held_out(prompts, 0.1, 7)
    assert 300 < len(held_out) < 500
    # Half of the prompts: each stays on its side, whatever it is called.
    fewer = [Prompt("other name", prompt.input_ids) for prompt in prompts[::2]]
    kept = {tuple(prompt.input_ids) for prompt in split_held_out(fewer, 0.1, 7)[1]}
    assert kept == {tuple(prompt.input_ids) for prompt in held_out if prompt.input_ids[0] % 2 == 0}
    assert {prompt.name for prompt in split_held_out(prompts, 0.1, 8)[1]} != {prompt.name for prompt in held_out}
    assert [prompt.input_ids[0] for prompt in training] == sorted(prompt.input_ids[0] for prompt in training)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_split_share_is_checked(share: float):
    with pytest.raises(UserError, match="share"):
        split_held_out([Prompt("a", [1]), Prompt("b", [2])], share, 0)


def test_one_prompt_cannot_be_split():
    with pytest.raises(UserError, match="at least 2"):
        split_held_out([Prompt("a", [1])], 0.5, 0)
