from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.cli import main
from dflash_lit.responses.command import API_KEY
from dflash_lit.responses.record_file import dropped_path
from tests.helpers import in_terminal
from tests.responses.wayward_server import Body, Handler, WaywardServer, answer_to, slow

COUNT = 400


def write_prompts(folder: Path, count: int) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(count)))
    return file


def lines(path: Path) -> list[Body]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(server: WaywardServer, prompts: Path, out: Path, *more: str) -> list[str]:
    return ["respond", str(prompts), "--server", server.url, "--out", str(out), "--backoff", "0.01", *more]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_lit.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def test_summary_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def answer(handler: Handler, body: Body, before: int) -> bool:
        if body["prompt"] == "prompt 0":
            return handler.send({"error": "too long"}, 400)
        if body["prompt"] == "prompt 1":
            return handler.send(answer_to(body, text=""))
        return handler.send(answer_to(body, ids="vllm"))

    prompts, out = write_prompts(tmp_path, 10), tmp_path / "out.jsonl"
    with WaywardServer(answer) as server:
        assert main(command(server, prompts, out, "--json", "--count", "9")) == 1
        said = capsys.readouterr()
        assert "no response: " in said.err
        assert "prompts.jsonl:1: HTTP 400" in said.err
        summary = json.loads(said.out)
        assert summary.pop("seconds") > 0
        assert summary.pop("tokens_per_second") > 0
        assert summary == {
            "prompts": 9,
            "repeated_prompts": 0,
            "from_earlier_runs": 0,
            "responses": 8,
            "failed": 1,
            "not_asked": 0,
            "kept": 7,
            "dropped": 1,
            "empty": 1,
            "repetitive": 0,
            "filtered": 0,
            "refusal": 0,
            "truncated": 0,
            "with_token_ids": 7,
            "tokens": 7 * len("<prompt 1>!.") + 1,
            "repeated_requests": 0,
            "torn_bytes_removed": 0,
        }
        server.misdeed = lambda handler, body, before: False
        assert main(command(server, prompts, out)) == 0
        text = capsys.readouterr().out
        assert "10 responses to 10 prompts (8 from earlier runs, 0 without an answer" in text
        assert "1 empty, 0 repetitive" in text
        # Nothing is left to do: no server is needed for that but one to name the model.
        server.asked.clear()
        assert main(command(server, prompts, out, "--model", "m")) == 0
        assert not server.asked
    assert len(lines(out)) == 9


@pytest.mark.parametrize("ci", [False, True])
def test_a_bar_is_drawn_in_a_terminal_that_somebody_looks_at(ci: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with WaywardServer(lambda handler, body, before: False) as server, in_terminal(monkeypatch, ci=ci) as shown:
        assert main(command(server, write_prompts(tmp_path, 3), tmp_path / "out.jsonl")) == 0
    assert ("3/3" in shown[0]) != ci
    assert ("\x1b" in shown[0]) != ci


def test_too_many_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with WaywardServer(lambda handler, body, before: handler.send({}, 400)) as server:
        assert (
            main(command(server, write_prompts(tmp_path, 50), tmp_path / "o.jsonl", "--max-failures", "2", "--in-flight", "1"))
            == 1
        )
    said = capsys.readouterr().out
    assert "3 without an answer, 47 not asked" in said
    assert "--max-failures" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0.5"], "made with temperature 1.0, not 0.5"),
        (["--max-tokens", "7"], "made with max_tokens"),
        (["--model", "other"], "made with model 'm', not 'other'"),
        (["--extra-body", '{"top_k": 3}'], "made with extra_body"),
        (["--all-turns"], "made with all_turns"),
    ],
)
def test_responses_of_other_settings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    prompts, out = write_prompts(tmp_path, 3), tmp_path / "out.jsonl"
    with WaywardServer() as server:
        assert main(command(server, prompts, out)) == 0
        assert main(command(server, prompts, out, *options)) == 2
    assert message in capsys.readouterr().err
    assert len(lines(out)) == 3


@pytest.mark.parametrize(
    "options",
    [
        ["--extra-body", "[1]"],
        ["--extra-body", '{"a": NaN}'],
        ["--timeout", "0"],
        ["--retries", "-1"],
        ["--in-flight", "0"],
        ["--target", "embedded"],
    ],
)
def test_options_without_sense(tmp_path: Path, options: list[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["respond", "p.jsonl", "--server", "http://127.0.0.1:1/v1", "--out", str(tmp_path / "o.jsonl"), *options])


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY, "secret")
    with WaywardServer() as server:
        assert main(command(server, write_prompts(tmp_path, 1), tmp_path / "o.jsonl", "--model", "m")) == 0
        assert server.keys == ["Bearer secret"]


def test_killed_runs_go_on_without_loss_or_repeats(tmp_path: Path):
    rng = random.Random(0)

    def moody(handler: Handler, body: Body, before: int) -> bool:
        with handler.server.lock:
            chance = rng.random()
        time.sleep(0.02)
        if chance < 0.1:
            return handler.send({}, 503)
        if chance < 0.15:
            return handler.cut()
        return handler.send(answer_to(body, ids="vllm", **({"text": ""} if body["prompt"].endswith("7") else {})))

    prompts, out = write_prompts(tmp_path, COUNT), tmp_path / "out.jsonl"
    with WaywardServer(moody) as server:
        options = command(server, prompts, out, "--in-flight", "8", "--max-tokens", "9")
        for so_far in (40, 150):
            process = start(options)
            wait_for_lines(out, so_far, process)
            process.kill()
            process.wait()
            done = {record["id"] for path in (out, dropped_path(out)) for record in lines(path)}
            assert so_far <= len(done) < COUNT
            answered = sum(server.asked.values())
        # As if the machine had gone down in the middle of a line.
        whole = out.read_bytes()
        out.write_bytes(whole[:-20])
        lost = json.loads(whole.splitlines()[-1])["id"]
        with server.lock:
            asked_before = dict(server.asked)
        assert main(options) == 0
        again = {name for name, times in server.asked.items() if times > asked_before.get(name, 0)}
    assert answered
    kept, dropped = lines(out), lines(dropped_path(out))
    assert len({record["id"] for record in kept + dropped}) == len(kept) + len(dropped) == COUNT
    assert len(dropped) == COUNT // 10
    said = sorted("".join(map(chr, record["input_ids"][:-1])) for record in kept)
    assert said == sorted(f"prompt {n}<prompt {n}>!" for n in range(COUNT) if n % 10 != 7)
    # What was there was not asked again.
    names = {record["id"]: "".join(chr(i) for i in record["input_ids"] if i != 3).split("<")[0] for record in kept}
    assert not again & {names[name] for name in done - {lost} if name in names}
    assert names[lost] in again


def test_interrupted_runs_say_how_to_go_on(tmp_path: Path):
    prompts, out = write_prompts(tmp_path, COUNT), tmp_path / "out.jsonl"
    with WaywardServer(slow(0.2)) as server:
        process = start(command(server, prompts, out, "--in-flight", "4"))
        wait_for_lines(out, 5, process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert 5 <= len(lines(out)) < COUNT


def test_no_lines_of_progress_get_into_the_output(tmp_path: Path):
    with WaywardServer() as server:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "dflash_lit.cli",
                *command(server, write_prompts(tmp_path, 5), tmp_path / "o.jsonl", "--json"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "40"},
        )
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, summary["responses"], done.stderr) == (0, 5, "")


def test_a_server_is_asked_without_torch():
    code = (
        "import sys, dflash_lit.responses.command; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
