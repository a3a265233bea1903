from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from dflash_lit.data.prompts import Prompt, stdlib_prompts
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.data.respond import RespondingTarget, Responses, respond
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget, TargetInfo


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    """Ten prompts of different lengths."""
    drawn = stdlib_prompts(tokenizer, count=10, prompt_tokens=40, held_out=True, seed=1)
    return [Prompt(prompt.name, prompt.input_ids[: 20 + 2 * i]) for i, prompt in enumerate(drawn)]


def run(target: RespondingTarget, prompts: list[Prompt], cache: Path, **changes: Any) -> Responses:
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 0.0,
        "batch_size": 4,
        "seed": 0,
        "cache_dir": cache,
        "progress": False,
    }
    return respond(target, prompts, **{**settings, **changes})


def text_of(responses: Responses) -> dict[str, list[int]]:
    return {document.name: document.input_ids[document.supervised].tolist() for document in responses.documents}


def greedy(model: Any, ids: list[int], count: int, end: int) -> list[int]:
    """The readable twin: one token at a time, no batch, no padding, no cache."""
    said: list[int] = []
    while len(said) < count and (not said or said[-1] != end):
        with torch.no_grad():
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return said


def test_greedy_responses_are_the_targets_own(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    responses = run(embedded, prompts, tmp_path)
    assert not responses.from_cache
    assert responses.prompts == len(prompts) == len(responses.documents) + responses.empty + responses.repetitive
    assert [d.name for d in responses.documents] == [p.name for p in prompts if p.name in text_of(responses)]
    by_name = {prompt.name: prompt for prompt in prompts}
    assert responses.documents
    for document in responses.documents:
        prompt = by_name[document.name].input_ids
        assert document.input_ids[: len(prompt)].tolist() == prompt
        assert document.supervised.tolist() == [False] * len(prompt) + [True] * (len(document) - len(prompt))
        assert text_of(responses)[document.name] == greedy(embedded.model, prompt, 12, embedded.tokenizer.eos_token_id)
    assert responses.tokens_per_second > 0


def test_sampling_is_seeded_batch_by_batch(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    before = torch.random.get_rng_state()
    first = text_of(run(embedded, prompts, tmp_path / "a", temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(7)
    assert text_of(run(embedded, prompts, tmp_path / "b", temperature=1.0)) == first
    assert text_of(run(embedded, prompts, tmp_path / "c", temperature=1.0, seed=1)) != first

    # Other prompts in the first batch (the longest four) change nothing in the others.
    ranked = sorted(prompts, key=lambda prompt: -len(prompt.input_ids))
    other = [dataclasses.replace(prompt, input_ids=prompt.input_ids[::-1]) for prompt in ranked[:4]] + ranked[4:]
    again = text_of(run(embedded, other, tmp_path / "d", temperature=1.0))
    for prompt in ranked[4:]:
        assert again.get(prompt.name) == first.get(prompt.name)


# Another process: reads a function and items, writes what the embedded target made of them, computed last item first.
PROCESS = """
import pickle, sys
import torch
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
torch.set_num_threads(1)
function, items = pickle.load(sys.stdin.buffer)
target = FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.float32)
pickle.dump([function(target, item) for item in items[::-1]][::-1], sys.stdout.buffer)
"""


class Elsewhere:
    """The embedded target in another process: nothing but what :class:`RespondingTarget` names is here."""

    def __init__(self, target: FrozenTarget) -> None:
        self.info: TargetInfo = target.info
        self.tokenizer, self.fingerprint, self.eos_ids = target.tokenizer, target.fingerprint, target.eos_ids
        self.items = 0

    def each(self, function: Callable[[FrozenTarget, Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        self.items += len(items)
        order = pickle.dumps((function, items))
        done = subprocess.run([sys.executable, "-c", PROCESS], input=order, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        yield from pickle.loads(done.stdout)


def test_batches_can_be_computed_elsewhere_and_in_any_order(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    here = run(embedded, prompts, tmp_path / "a", temperature=1.0)
    elsewhere = Elsewhere(embedded)
    there = run(elsewhere, prompts, tmp_path / "b", temperature=1.0)
    assert elsewhere.items == 3
    assert text_of(there) == text_of(here)
    for field in ("prompts", "empty", "repetitive", "ended", "tokens", "from_cache"):
        assert getattr(there, field) == getattr(here, field)
    # The same key, too: either reads what the other stored.
    assert run(elsewhere, prompts, tmp_path / "a", temperature=1.0).from_cache
    assert elsewhere.items == 3


def test_each_is_in_order(embedded: FrozenTarget):
    assert list(embedded.each(lambda target, item: (target, 2 * item), [3, 1, 2])) == [(embedded, n) for n in (6, 2, 4)]


def test_the_models_own_generation_settings_do_not_matter(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    plain = text_of(run(embedded, prompts, tmp_path / "a", temperature=1.0))
    before = embedded.model.generation_config
    own = GenerationConfig(
        do_sample=True,
        top_k=1,
        top_p=0.1,
        min_p=0.5,
        repetition_penalty=5.0,
        suppress_tokens=list(range(3, 500)),
        eos_token_id=0,
    )
    try:
        embedded.model.generation_config = own
        assert text_of(run(embedded, prompts, tmp_path / "b", temperature=1.0)) == plain
        assert embedded.model.generation_config is own
    finally:
        embedded.model.generation_config = before


def test_responses_end_with_the_end_token(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    # Take as end a token that greedy decoding says: responses stop there, and one that says it at once is empty.
    said = {prompt.name: greedy(embedded.model, prompt.input_ids, 12, -1) for prompt in prompts}
    end = said[prompts[0].name][0]
    later = sum(end in text[1:] and text[0] != end for text in said.values())
    before = embedded.model.generation_config
    try:
        embedded.model.generation_config = GenerationConfig(eos_token_id=[end, 0])
        responses = run(embedded, prompts, tmp_path)
    finally:
        embedded.model.generation_config = before
    assert responses.empty == sum(text[0] == end for text in said.values()) >= 1
    assert responses.ended == later
    for name, text in text_of(responses).items():
        assert text == said[name][: said[name].index(end) + 1 if end in said[name] else None]


def test_repetitive_responses_are_dropped(embedded: FrozenTarget, tmp_path: Path):
    ids = embedded.tokenizer("0, " * 30)["input_ids"]
    responses = run(embedded, [Prompt("zeros", ids)], tmp_path, max_new_tokens=40)
    assert (responses.repetitive, responses.documents) == (1, [])
    assert responses.tokens == 40


def test_second_run_reads_the_first(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    first = run(embedded, prompts, tmp_path)
    second = run(embedded, prompts, tmp_path)
    assert second.from_cache
    assert text_of(second) == text_of(first)
    for field in ("prompts", "empty", "repetitive", "ended", "tokens", "tokens_per_second"):
        assert getattr(second, field) == getattr(first, field)
    # Names are not part of the content.
    renamed = run(embedded, [dataclasses.replace(prompt, name=f"new {prompt.name}") for prompt in prompts], tmp_path)
    assert renamed.from_cache
    assert all(document.name.startswith("new ") for document in renamed.documents)
    assert len(list(tmp_path.iterdir())) == 1


def test_everything_that_matters_is_in_the_key(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    few = prompts[:2]
    run(embedded, few, tmp_path, max_new_tokens=2)
    changes: list[dict[str, Any]] = [{"max_new_tokens": 3}, {"temperature": 1.0}, {"batch_size": 1}, {"seed": 1}]
    for change in changes:
        assert not run(embedded, few, tmp_path, **{"max_new_tokens": 2, **change}).from_cache, change
    assert not run(embedded, few[:1], tmp_path, max_new_tokens=2).from_cache
    assert not run(embedded, few[::-1], tmp_path, max_new_tokens=2).from_cache
    other = copy.copy(embedded)
    other.fingerprint = "other"
    assert not run(other, few, tmp_path, max_new_tokens=2).from_cache


def damage(how: str, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    if how == "empty":
        raw = bytearray()
    elif how == "truncated":
        raw = raw[: len(raw) // 2]
    elif how == "one bit":
        raw[-1] ^= 1
    elif how == "header":
        raw[:8] = b"\xff" * 8
    elif how == "other content":
        raw[:] = raw.replace(b'"payload"', b'"payloaf"')
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["empty", "truncated", "one bit", "header", "other content"])
def test_damaged_files_are_made_anew(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path, how: str):
    first = run(embedded, prompts[:2], tmp_path, max_new_tokens=3)
    (path,) = tmp_path.iterdir()
    damage(how, path)
    with pytest.warns(UserWarning, match="damaged"):
        again = run(embedded, prompts[:2], tmp_path, max_new_tokens=3)
    assert not again.from_cache
    assert text_of(again) == text_of(first)
    assert run(embedded, prompts[:2], tmp_path, max_new_tokens=3).from_cache


def test_a_pipe_in_a_files_place_is_not_waited_for(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    first = run(embedded, prompts[:2], tmp_path, max_new_tokens=3)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    other_end = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # where it is waited for, the test fails rather than hangs
    try:
        with pytest.warns(UserWarning, match="it is a device or a pipe"):
            again = run(embedded, prompts[:2], tmp_path, max_new_tokens=3)
    finally:
        os.close(other_end)
    assert text_of(again) == text_of(first)


def test_a_file_of_another_key_is_not_taken(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    run(embedded, prompts[:2], tmp_path / "a", max_new_tokens=3)
    run(embedded, prompts[2:4], tmp_path / "b", max_new_tokens=3)
    (a,), (b,) = (tmp_path / "a").iterdir(), (tmp_path / "b").iterdir()
    a.write_bytes(b.read_bytes())
    with pytest.warns(UserWarning, match="other prompts"):
        assert not run(embedded, prompts[:2], tmp_path / "a", max_new_tokens=3).from_cache


def test_a_folder_that_cannot_be_written_costs_only_the_cache(embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="could not be stored"):
        responses = run(embedded, prompts[:2], tmp_path / "file", max_new_tokens=3)
    assert responses.tokens == 6


def test_progress_shows_speed(
    embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(embedded, prompts[:2], tmp_path / "a", max_new_tokens=3)
    assert capsys.readouterr().err == ""
    run(embedded, prompts[:2], tmp_path / "b", max_new_tokens=3, progress=True)
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 5000}, "2048 positions"),
    ],
)
def test_wrong_settings_are_named(
    embedded: FrozenTarget, prompts: list[Prompt], tmp_path: Path, changes: dict[str, Any], says: str
):
    with pytest.raises(UserError, match=says):
        run(embedded, prompts, tmp_path, **changes)


def test_wrong_prompts_are_named(embedded: FrozenTarget, tmp_path: Path):
    with pytest.raises(UserError, match="at least one"):
        run(embedded, [], tmp_path)
    with pytest.raises(UserError, match="'void'"):
        run(embedded, [Prompt("void", [])], tmp_path)


@pytest.mark.parametrize(
    ("ids", "repetitive"),
    [
        ([], False),
        ([7], False),
        ([7] * 15, False),  # too short to call it a loop
        ([7] * 16, True),
        (list(range(20)) + [1, 2, 3] * 7, True),  # 21 of 41
        (list(range(30)) + [1, 2, 3] * 7, False),  # 21 of 51
        (list(range(16)) * 3, True),
        (list(range(16)) * 2, False),  # only twice
        (list(range(17)) * 6, False),  # a longer cycle than looked for
        ([1, 2, 3] * 20 + [9], False),  # it got out
        (list(range(100)), False),
    ],
)
def test_is_repetitive(ids: list[int], repetitive: bool):
    assert is_repetitive(np.array(ids, dtype=np.int32)) is repetitive


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_is_repetitive_agrees_with_its_definition(ids: list[int], max_period: int):
    def run_of(period: int) -> int:
        run = period
        while run < len(ids) and ids[-run - 1] == ids[-run - 1 + period]:
            run += 1
        return run

    expected = any(
        period < len(ids) and run_of(period) >= max(len(ids) / 2, 2 * period, 4) for period in range(1, max_period + 1)
    )
    assert is_repetitive(np.array(ids, dtype=np.int32), max_period=max_period, repeats=2, min_run=4) == expected
