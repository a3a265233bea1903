from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_lit.cli import main
from dflash_lit.data.documents import Document
from dflash_lit.data.prompts import Prompt, stdlib_prompts
from dflash_lit.data.respond import respond
from dflash_lit.errors import UserError
from dflash_lit.responses.on_policy import PolicyCheck, check_policy, token_surprise
from dflash_lit.responses.read_records import sample_documents
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import in_terminal, tiny_target

COUNT, PROMPT, TOKENS = 24, 24, 72


@pytest.fixture(scope="module")
def prompts(embedded: FrozenTarget) -> list[Prompt]:
    return stdlib_prompts(embedded.tokenizer, count=COUNT, prompt_tokens=PROMPT, held_out=True, seed=1)


@pytest.fixture(scope="module")
def own(embedded: FrozenTarget, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[float, list[Document]]:
    """The target's own text, by temperature."""
    cache = tmp_path_factory.mktemp("cache")
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "batch_size": COUNT, "seed": 3, "cache_dir": cache, "progress": False}
    return {heat: respond(embedded, prompts, temperature=heat, **settings).documents for heat in (1.0, 0.7, 0.0)}


def human(embedded: FrozenTarget) -> list[Document]:
    """Library sources: what this target was trained on, but did not say."""
    drawn = stdlib_prompts(embedded.tokenizer, count=COUNT, prompt_tokens=PROMPT + TOKENS, held_out=True, seed=1)
    return [Document(np.asarray(p.input_ids), np.arange(PROMPT + TOKENS) >= PROMPT, p.name) for p in drawn]


def test_surprise_is_what_its_definition_says():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.tensor([0, 6, 2, 2, 5])
    for heat in (1.0, 0.5):
        nll, entropy, variance = token_surprise(logits, tokens, heat)
        for row in range(5):
            p = [float(v) for v in torch.softmax(logits[row].double() / heat, 0)]
            surprise = [-np.log(v) for v in p]
            mean = sum(v * s for v, s in zip(p, surprise, strict=True))
            assert nll[row] == pytest.approx(surprise[tokens[row]], rel=1e-5)
            assert entropy[row] == pytest.approx(mean, rel=1e-5)
            assert variance[row] == pytest.approx(sum(v * (s - mean) ** 2 for v, s in zip(p, surprise, strict=True)), rel=1e-4)
    nll, least, variance = token_surprise(logits, logits.argmax(dim=1), 0.0)
    assert torch.equal(nll, least)
    assert not variance.any()


def test_impossible_tokens_do_not_make_it_nan():
    logits = torch.tensor([[0.0, float("-inf"), -1e30]])
    _, entropy, variance = token_surprise(logits, torch.tensor([0]), 1.0)
    assert (entropy.item(), variance.item()) == (0.0, 0.0)


def test_figures_are_those_of_whole_documents_read_one_by_one(embedded: FrozenTarget, own: dict[float, list[Document]]):
    documents = own[1.0][:4]
    check = check_policy(embedded, documents, row_tokens=80)
    nll: list[float] = []
    entropy: list[float] = []
    for document in documents:
        ids = torch.from_numpy(document.input_ids[:80]).long()
        with torch.no_grad():
            log_p = embedded.model(ids[None]).logits[0].log_softmax(dim=-1)
        for place in range(PROMPT, len(ids)):
            nll.append(-float(log_p[place - 1, ids[place]]))
            entropy.append(-float((log_p[place - 1].exp() * log_p[place - 1]).sum()))
    assert check.tokens == len(nll)
    assert check.nll == pytest.approx(np.mean(nll), rel=1e-4)
    assert check.entropy == pytest.approx(np.mean(entropy), rel=1e-4)


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_own_text_has_the_entropy_that_it_was_drawn_with(embedded: FrozenTarget, own: dict[float, list[Document]], heat: float):
    check = check_policy(embedded, own[heat], temperature=heat)
    assert abs(check.gap) < 3 * check.error
    assert 0 < check.error < 0.05
    assert not check.off_policy


def test_own_greedy_text_is_the_argmax(embedded: FrozenTarget, own: dict[float, list[Document]]):
    check = check_policy(embedded, own[0.0], temperature=0.0)
    assert check.argmax == 1.0
    assert check.gap == 0.0
    assert not check.off_policy
    # Sampled text is not what a greedy target would have said.
    assert check_policy(embedded, own[0.7], temperature=0.0).off_policy


def test_other_text_is_off_policy(embedded: FrozenTarget, own: dict[float, list[Document]]):
    rng = np.random.default_rng(0)
    shuffled = [
        Document(np.concatenate([d.input_ids[:PROMPT], rng.permutation(d.input_ids[PROMPT:])]), d.supervised, d.name)
        for d in own[1.0]
    ]
    check = check_policy(embedded, shuffled)
    assert check.off_policy
    assert check.gap > 1
    assert check.off_documents == len(shuffled)
    other = tiny_target(embedded.info, seed=1, vocab_size=512)
    assert check_policy(other, own[1.0]).off_policy
    # Drawn hotter than the target will be served.
    assert check_policy(embedded, own[1.0], temperature=0.7).off_policy


def test_a_base_model_cannot_be_told_from_its_training_text_at_temperature_1(embedded: FrozenTarget):
    """What the docstring warns of: such a target is calibrated on that text. At another temperature it is not."""
    assert not check_policy(embedded, human(embedded)).off_policy
    assert check_policy(embedded, human(embedded), temperature=0.7).off_policy


def test_a_few_foreign_documents_are_counted(embedded: FrozenTarget, own: dict[float, list[Document]]):
    check = check_policy(embedded, [*own[0.7], *human(embedded)[:4]], temperature=0.7)
    assert 2 <= check.off_documents <= 4


def test_verdict_needs_both_size_and_certainty():
    def check(nll: float, error: float) -> bool:
        return PolicyCheck(1, 1, 1.0, nll, 1.0, error, 0.1, 1.0, 0).off_policy

    assert check(1.5, 0.05)
    assert not check(1.5, 0.2)  # may be chance
    assert not check(1.09, 0.001)  # sure, and of no weight
    assert not check(0.2, 0.001)  # colder text than the temperature says is not foreign


def test_documents_without_anything_to_compare(embedded: FrozenTarget, own: dict[float, list[Document]]):
    silent = Document(np.arange(5), np.zeros(5, dtype=np.bool_), "silent")
    with pytest.raises(UserError, match="no supervised token"):
        check_policy(embedded, [silent])
    assert check_policy(embedded, [silent, own[1.0][0]]).documents == 1
    foreign = Document(np.array([3, 600]), np.array([False, True]), "foreign")
    with pytest.raises(UserError, match="foreign: token id 600 is not among the target's 512"):
        check_policy(embedded, [foreign])


def write(path: Path, documents: list[Document]) -> Path:
    entries = ({"input_ids": d.input_ids.tolist(), "loss_mask": d.supervised.astype(int).tolist()} for d in documents)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_the_command_says_which_file_is_foreign(
    own: dict[float, list[Document]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    good = write(tmp_path / "good.jsonl", own[0.7])
    assert main(["on-policy", str(good), "--target", "embedded", "--temperature", "0.7"]) == 0
    assert capsys.readouterr().out.startswith(f"on-policy  {good}: NLL ")
    bad = write(tmp_path / "bad.jsonl", own[1.0])
    # The temperature is known from what respond wrote beside the file.
    for file in (good, bad):
        (tmp_path / f"{file.stem}.settings.json").write_text('{"temperature": 0.7}')
    assert main(["on-policy", str(good), str(bad), "--target", "embedded", "--json", "--count", "20"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert {Path(name).stem: (fact["verdict"], fact["documents"]) for name, fact in facts.items()} == {
        "good": ("on-policy", 20),
        "bad": ("off-policy", 20),
    }
    for wrong in ("{", "[1]", '{"temperature": "warm"}', '{"extra_body": 5}'):  # not taken for 1.0
        (tmp_path / "bad.settings.json").write_text(wrong)
        assert main(["on-policy", str(bad), "--target", "embedded"]) == 2
        assert "bad.settings.json: " in (said := capsys.readouterr().err)
        assert said.endswith("delete it, and give --temperature\n")
    (tmp_path / "bad.settings.json").write_text('{"temperature": 0.7}')
    for ci in (False, True):  # a bar only where somebody looks at it
        with in_terminal(monkeypatch, ci=ci) as shown:
            assert main(["on-policy", str(bad), "--target", "embedded", "--threshold", "5"]) == 0
        assert ("bad.jsonl" in shown[0]) != ci
    assert main(["on-policy", str(bad), "--target", "embedded", "--threshold", "0"]) == 2
    assert main(["on-policy", str(tmp_path / "none.jsonl"), "--target", "embedded"]) == 2


def test_a_sample_is_drawn_evenly_and_in_order(embedded: FrozenTarget, tmp_path: Path):
    file = write(tmp_path / "f.jsonl", [Document(np.array([0, n]), np.array([False, True]), "") for n in range(20)])
    hits = np.zeros(20)
    for seed in range(200):
        drawn = [int(d.input_ids[1]) for d in sample_documents(file, embedded.tokenizer, count=5, seed=seed)]
        assert drawn == sorted(set(drawn))
        hits[drawn] += 1
    assert hits.sum() == 1000
    assert 25 <= hits.min() <= hits.max() <= 75
    assert len(sample_documents(file, embedded.tokenizer, count=50)) == 20


def test_texts_become_the_tokens_that_the_template_would_write(embedded: FrozenTarget, chat_target: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "import os"}
    file = tmp_path / "f.jsonl"
    entries = [
        {"messages": [user, {**said, "weight": 0}, user, said], "finish_reason": "stop"},
        {"messages": [user, said], "finish_reason": "length"},
        {"prompt": "import", "response": " os"},
        {"messages": [user], "response": "import os"},
    ]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    documents = sample_documents(file, tokenizer, count=9, end_ids=embedded.eos_ids)
    assert [tokenizer.decode(d.input_ids[d.supervised]) for d in documents] == [
        *("import os<|endoftext|>", "import os", " os"),
        "import os<|endoftext|>",  # as if it stood among the messages
    ]
    assert tokenizer.decode(documents[0].input_ids) == (
        "<|im_start|>user\nhi\n<|im_start|>assistant\nimport os<|endoftext|>\n<|im_start|>user\nhi\n<|im_start|>assistant\n"
        "import os<|endoftext|>"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f.jsonl:1: is not JSON"),
        ("[" * 100_000, "f.jsonl:1: is not JSON"),
        ('{"prompt": "a", "response": "\\ud800"}', "f.jsonl:1: has half a character"),
        ("[]", "is no object"),
        ('{"input_ids": [1, 2]}', "input_ids and loss_mask"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "need as many"),
        ('{"prompt": "a"}', "has neither"),
        ('{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}', "has neither"),
        ("", "holds no response"),
    ],
)
def test_lines_that_are_no_responses(embedded: FrozenTarget, tmp_path: Path, line: str, message: str):
    (tmp_path / "f.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        sample_documents(tmp_path / "f.jsonl", embedded.tokenizer, count=1)
