"""Against the server of Transformers itself, with the embedded target in it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.cli import main
from dflash_lit.responses.record_file import dropped_path

Served = tuple[str, Path]


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    entries: list[dict[str, Any]] = [{"prompt": f"import os\n\ndef f{n}(a, b):\n", "id": f"text {n}"} for n in range(4)]
    talk = [
        {"role": "user", "content": "say hello"},
        {"role": "assistant", "content": "print('hello')"},
        {"role": "user", "content": "again"},
    ]
    entries += [{"messages": talk[:1], "id": "chat"}, {"messages": talk, "id": "talk"}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    paths = [path for path in (out, dropped_path(out)) if path.exists()]
    return {record["id"]: record for path in paths for record in map(json.loads, path.read_text().splitlines())}


def said(record: dict[str, Any]) -> str:
    return record["response"] if "response" in record else record["messages"][-1]["content"]


@pytest.fixture(scope="module")
def greedy(served_target: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Greedy responses of the server, and the same asked for here."""
    url, target = served_target
    folder = tmp_path_factory.mktemp("greedy")
    options = ["respond", str(write_prompts(folder)), "--temperature", "0", "--max-tokens", "24", "--all-turns"]
    remote, local = folder / "remote.jsonl", folder / "local.jsonl"
    assert main([*options, "--server", url, "--out", str(remote), "--in-flight", "3"]) == 0
    assert main([*options, "--target", str(target), "--out", str(local), "--batch-size", "4"]) == 0
    return remote, local


def test_the_server_says_what_the_target_says_here(greedy: tuple[Path, Path], served_target: Served):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served_target[1])
    remote, local = map(records_of, greedy)
    assert remote.keys() == local.keys()
    assert len(remote) == 6
    for name, record in remote.items():
        # This server gives no ids, and refuses the field that asks for them.
        assert "input_ids" not in record
        here = local[name]
        spans, ids = here["loss_mask"], here["input_ids"]
        start = max(i for i in range(1, len(ids)) if spans[i] and not spans[i - 1])
        assert said(record) == tokenizer.decode(ids[start:], skip_special_tokens=True)
        assert record["finish_reason"] == here["finish_reason"]
        assert record["tokens"] == here["tokens"] > 0


def test_turns_follow_from_each_other(greedy: tuple[Path, Path]):
    record = records_of(greedy[0])["talk"]
    single = records_of(greedy[0])["chat"]
    first, last = record["messages"][1], record["messages"][3]
    assert first["content"] == said(single) != "print('hello')"
    # The target wrote it, but a turn that was cut off has no end to learn.
    assert ("weight" in first) == (single["finish_reason"] == "length")
    assert last["role"] == "assistant"


def test_greedy_text_is_on_policy(greedy: tuple[Path, Path], served_target: Served, capsys: pytest.CaptureFixture[str]):
    assert main(["on-policy", *map(str, greedy), "--target", str(served_target[1]), "--json"]) == 0
    remote, local = json.loads(capsys.readouterr().out).values()
    # Ids are those that were drawn; text is cut into tokens anew, here and there otherwise.
    assert local["argmax"] == 1.0
    assert remote["argmax"] > 0.9
    assert remote["temperature"] == local["temperature"] == 0


def test_template_variables_reach_the_server(served_target: Served, tmp_path: Path):
    url, _ = served_target
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    options = ["respond", str(prompts), "--server", url, "--temperature", "0", "--max-tokens", "32"]
    assert main([*options, "--out", str(tmp_path / "plain.jsonl")]) == 0
    shout = '{"chat_template_kwargs": {"shout": true}}'
    assert main([*options, "--out", str(tmp_path / "loud.jsonl"), "--extra-body", shout]) == 0
    plain, loud = (next(iter(records_of(tmp_path / name).values())) for name in ("plain.jsonl", "loud.jsonl"))
    assert said(plain) != said(loud)


def test_another_model_than_the_servers(served_target: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url, _ = served_target
    arguments = [
        "respond",
        str(write_prompts(tmp_path)),
        "--server",
        url,
        "--out",
        str(tmp_path / "o.jsonl"),
        "--model",
        "else",
    ]
    assert main(arguments) == 1
    assert "Server is pinned" in capsys.readouterr().err


def test_a_killed_run_goes_on(served_target: Served, tmp_path: Path):
    url, _ = served_target
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"class C{n}:\n    "}) + "\n" for n in range(30)))
    options = ["respond", str(prompts), "--server", url, "--out", str(out), "--max-tokens", "16", "--temperature", "0"]
    process = subprocess.Popen([sys.executable, "-m", "dflash_lit.cli", *options])
    until = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = records_of(out)
    assert 5 <= len(before) < 30
    assert main(options) == 0
    after = records_of(out)
    assert len(after) == 30
    assert sum(path.read_bytes().count(b"\n") for path in (out, dropped_path(out))) == 30
    assert all(after[name] == record for name, record in before.items())
