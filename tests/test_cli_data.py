"""``dflash-lit data``: what one sees of data before training on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_lit.cli import main
from dflash_lit.config import DataSection
from dflash_lit.data.chat import ChatSettings, ChatTokenizer
from dflash_lit.data.chat_data import chat_data
from dflash_lit.data.command import documents_text
from dflash_lit.data.records import Columns, check_record
from dflash_lit.target.frozen import EMBEDDED, TargetInfo, resolve_path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": f"def f{i}(x):", "response": f"\n    return x + {i}" * (1 + i % 7)}) for i in range(40)]
    path.write_text("\n".join([*lines, "{broken", json.dumps({"prompt": "only"})]))
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["data", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_preview_marks_what_is_supervised(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "preview", str(source), "--first", "2", "--records", "2")
    assert out.count("document 1 of 1") == 2
    assert f"{source}:2, document 1 of 1:" in out
    assert "def f1(x):⟦\n    return x + 1\n    return x + 1⟧" in out
    assert "f3" not in out
    out = shown(capsys, "preview", str(source), "--first", "41", "--records", "9")
    assert f"skipped: {source}:41: broken JSON" in out
    assert f"left out: {source}:42: prompt without a response" in out


def test_on_a_terminal_it_is_a_colour() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_path(EMBEDDED))
    documents = ChatTokenizer(tokenizer, ChatSettings()).documents(
        check_record({"prompt": "a = ", "response": "b + c"}, Columns(), "x:1")
    )
    text = documents_text("x:1", documents, tokenizer, colours=True)
    coloured = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert coloured == ["b + c"]
    assert "⟦" not in text.plain


def test_inspect_sums_up_what_training_will_see(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    picture = tmp_path / "plot.svg"
    options = "--row-tokens 128 --rows-per-batch 2 --drafters 2 --anchors 9 --rate 128 --workers 1".split()
    out = shown(capsys, "inspect", str(source), *options, "--cache-dir", str(tmp_path), "--draw", str(picture))
    section = DataSection(kind="chat", prompts=None, path=str(source), row_tokens=128, train_prompts=99, skip_limit=1.0)
    section.held_out_share = 0.01
    made = chat_data(section, TargetInfo.load(EMBEDDED), mask_token_id=2, seed=0, cache_dir=tmp_path, decoded=0)
    assert made.from_cache  # training finds what was tokenised here
    rows = len(made.train)
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.splitlines() if line.count("│") == 3}
    assert "40 documents of 42 records" in out
    assert lines["tokens"].startswith(f"{made.store.lengths.sum():,}, ")
    assert lines["skipped"].startswith(f"1 x {source}:41: broken JSON")
    assert lines["left out"].startswith(f"1 x {source}:42: prompt without a response")
    assert lines["rows to train on"].startswith(f"{rows}, and")
    assert lines["steps an epoch"] == f"{rows // 4} of 4 rows"
    assert lines["an epoch takes"] == f"{rows / 3600:.2f} h at 128 tokens/s"
    assert lines["packing efficiency"].startswith(f"{100 * made.train.plan.packed:.2f} %")
    assert lines["9 anchors a row"].startswith(f"{100 * made.figures(9)['anchor_coverage']:.1f} %")
    assert "a row (128)" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("preview missing.jsonl", "data.path='missing.jsonl': no such file"),
        ("preview {source} --first 99", "--first 99: there are 42 records"),
        ("preview {source} --column messages", "--column messages: write NAME=COLUMN"),
        ("preview {source} --column talk=x", "data.columns: there is no column 'talk'"),
        ("inspect {source} --row-tokens 100", "data.row_tokens: 100 is not a positive multiple"),
        ("inspect {source} --skip-limit 0.001", "data.skip_limit=0.001: 1 of 42 records"),
        ("inspect {source} --rate 0", "--rate 0: must be positive"),
        ("inspect {source} --draw plot.xyz", "--draw plot.xyz: the name has to end in"),
        ("inspect {source} --draw /no/such/plot.svg", "--draw /no/such/plot.svg: cannot write the picture"),
    ],
)
def test_wrong_input_is_one_line(
    source: Path, tmp_path: Path, options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = options.format(source=source).split()
    if arguments[0] == "inspect":
        arguments += ["--cache-dir", str(tmp_path), "--workers", "1"]
    error = shown(capsys, *arguments, code=2)
    assert error.splitlines()[-1].startswith(f"error: {says}")
