from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.cli import main
from dflash_lit.data.respond import PromptBatch, generate_batch
from dflash_lit.errors import UserError
from dflash_lit.responses.ask_target import ask_target
from dflash_lit.responses.raw_prompts import RawPrompt, read_raw_prompts
from dflash_lit.responses.record_file import RecordFile, dropped_path
from dflash_lit.responses.server import Sampling
from dflash_lit.target.frozen import FrozenTarget, TargetInfo

SAMPLING = Sampling(temperature=1.0, max_tokens=10, seed=3)


def texts(folder: Path, count: int) -> list[RawPrompt]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def f{n}(" + "a, " * n, "id": str(n)}) + "\n" for n in range(count)))
    return read_raw_prompts(file).prompts


def ask(
    target: FrozenTarget, prompts: Sequence[RawPrompt], out: Path, sampling: Sampling = SAMPLING, **settings: Any
) -> list[str]:
    with RecordFile(out, {}) as records:
        return ask_target(target, prompts, records, sampling, **{"batch_size": 3, **settings})


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    return {r["id"]: r for path in (out, dropped_path(out)) for r in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def chat(embedded: FrozenTarget, chat_target: Path) -> FrozenTarget:
    return FrozenTarget(TargetInfo.load(str(chat_target)), embedded.model)


def test_responses_are_those_of_the_batches(embedded: FrozenTarget, tmp_path: Path):
    prompts = texts(tmp_path, 4)
    assert not ask(embedded, prompts, tmp_path / "o.jsonl")
    records = records_of(tmp_path / "o.jsonl")
    ids = {prompt.id: embedded.tokenizer(prompt.text)["input_ids"] for prompt in prompts}
    # The longest first, three at a time.
    expected: dict[str, list[int]] = {}
    for number, chosen in enumerate((("3", "2", "1"), ("0",))):
        batch = PromptBatch(tuple(tuple(ids[i]) for i in chosen), number * 4096, 10, 1.0, embedded.eos_ids, 1, 3)
        expected |= {i: said.tolist() for i, said in zip(chosen, generate_batch(embedded, batch), strict=True)}
    for i, record in records.items():
        assert record["input_ids"] == [*ids[i], *expected[i]]
        assert record["loss_mask"] == [0] * len(ids[i]) + [1] * len(expected[i])
        assert record["finish_reason"] == ("stop" if expected[i][-1] in embedded.eos_ids else "length")
        assert record["tokens"] == len(expected[i])


def test_a_broken_run_ends_as_an_unbroken_one(embedded: FrozenTarget, tmp_path: Path):
    prompts = texts(tmp_path, 8)
    ask(embedded, prompts, tmp_path / "whole.jsonl")
    whole = records_of(tmp_path / "whole.jsonl")

    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    out = tmp_path / "broken.jsonl"
    with pytest.raises(StopError):
        ask(embedded, prompts, out, report=stop)
    assert len(records_of(out)) == 3
    out.write_bytes(out.read_bytes()[:-1])  # the last line of the batch is torn
    ask(embedded, prompts, out)
    assert records_of(out) == whole
    assert sum(path.read_bytes().count(b"\n") for path in (out, dropped_path(out))) == 8
    # Nothing is left: no batch runs.
    with RecordFile(out, {}) as records:
        ask_target(embedded, prompts, records, SAMPLING, batch_size=3, report=stop)


def test_every_turn_reads_the_targets_own_turns(chat: FrozenTarget, tmp_path: Path):
    file = tmp_path / "p.jsonl"
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not mine"},
        {"role": "user", "content": "b"},
    ]
    file.write_text(
        json.dumps({"messages": talk, "id": "long"}) + "\n" + json.dumps({"messages": talk[:1], "id": "short"}) + "\n"
    )
    prompts = read_raw_prompts(file).prompts
    greedy = Sampling(temperature=0.0, max_tokens=6)
    ask(chat, prompts, tmp_path / "all.jsonl", greedy, all_turns=True)
    ask(chat, prompts, tmp_path / "last.jsonl", greedy)
    every, last = records_of(tmp_path / "all.jsonl"), records_of(tmp_path / "last.jsonl")
    assert every["short"] == last["short"]
    said = chat.tokenizer.decode(every["short"]["input_ids"][-6:], skip_special_tokens=True)
    for record, before in ((every["long"], said), (last["long"], "not mine")):
        messages = [talk[0], {"role": "assistant", "content": before}, talk[2]]
        text = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert chat.tokenizer.decode(record["input_ids"]).startswith(text)
    # Both turns count where the target wrote both, and one where it wrote one.
    assert sum(every["long"]["loss_mask"]) == 12
    assert sum(last["long"]["loss_mask"]) == 6
    assert every["long"]["tokens"] == 12


def test_template_variables(chat: FrozenTarget, tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    sampling = Sampling(0.0, 1.0, 4, None, {"chat_template_kwargs": {"shout": True}})
    ask(chat, read_raw_prompts(file).prompts, tmp_path / "o.jsonl", sampling)
    (record,) = records_of(tmp_path / "o.jsonl").values()
    assert "return [1, 2, 3]" in chat.tokenizer.decode(record["input_ids"])


def test_what_does_not_fit_the_target_fails_for_itself(embedded: FrozenTarget, tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "x = 1\n" * 600}) + "\n" + json.dumps({"prompt": "x"}) + "\n")
    (failure,) = ask(embedded, read_raw_prompts(file).prompts, tmp_path / "o.jsonl")
    assert "p.jsonl:1: " in failure
    assert "more than the 2048 positions" in failure
    assert len(records_of(tmp_path / "o.jsonl")) == 1


def test_settings_that_mean_nothing_here(embedded: FrozenTarget, tmp_path: Path):
    prompts = texts(tmp_path, 1)
    with pytest.raises(UserError, match=r"--top-p 0\.9"):
        ask(embedded, prompts, tmp_path / "a.jsonl", Sampling(top_p=0.9))
    with pytest.raises(UserError, match="'top_k' is for servers"):
        ask(embedded, prompts, tmp_path / "a.jsonl", Sampling(extra_body={"top_k": 3}))
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(UserError, match=r"chat.jsonl:1: .*no chat template"):
        ask(embedded, read_raw_prompts(file).prompts, tmp_path / "b.jsonl")


def test_the_command_resumes_and_knows_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    texts(tmp_path, 3)
    out = tmp_path / "o.jsonl"
    options = ["respond", str(tmp_path / "prompts.jsonl"), "--target", "embedded", "--out", str(out), "--max-tokens", "5"]
    assert main([*options, "--count", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["responses"] == 2
    assert main([*options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["responses"], summary["from_earlier_runs"], summary["with_token_ids"]) == (3, 2, 3)
    assert main([*options, "--batch-size", "2"]) == 2
    assert "made with batch_size 8, not 2" in capsys.readouterr().err
    assert main([*options, "--model", "m"]) == 2
