"""``data=chat``: from a file to what a job trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_lit.config import DataSection
from dflash_lit.data.chat_data import ChatData, chat_data, split_points, store_settings
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import EMBEDDED, TargetInfo
from tests.data.templates import QWEN3, with_template


@pytest.fixture(scope="module")
def info() -> TargetInfo:
    """With a vocabulary that has room for the template's words."""
    plain = TargetInfo.load(EMBEDDED)
    plain.config.vocab_size = 600
    return TargetInfo("embedded", plain.config, with_template(plain.tokenizer, QWEN3))


def talk(number: int) -> dict[str, Any]:
    """Two turns, both with thoughts: two documents."""
    answer = f"{number} " * (3 + number % 50)
    said = {"role": "assistant", "content": answer, "reasoning_content": f"what is {number}"}
    asked = {"role": "user", "content": f"say {number}, and say it once more, and then do it again"}
    return {"messages": [asked, said, {"role": "user", "content": "again"}, said]}


def write(folder: Path, count: int = 60, broken: int = 0) -> str:
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(talk(i)) + "\n" for i in range(count)) + "{\n" * broken)
    return str(path)


def made(path: str, info: TargetInfo, cache: Path, *, decoded: int = 3, mask: int | None = 2, **changes: Any) -> ChatData:
    defaults: dict[str, Any] = {
        "kind": "chat",
        "prompts": None,
        "path": path,
        "row_tokens": 256,
        "train_prompts": 10**9,
        "val_prompts": 4,
        "held_out_share": 0.2,
        "prompt_tokens": 200,
        "workers": 1,
    }
    data = DataSection(**{**defaults, **changes})
    return chat_data(data, info, mask_token_id=mask, seed=0, cache_dir=cache, decoded=decoded, progress=False)


def test_sides_share_no_conversation_and_nothing_is_lost(tmp_path: Path, info: TargetInfo) -> None:
    result = made(write(tmp_path), info, tmp_path)
    store = result.store
    assert len(store) == 120
    sides = [{store.name(i) for i in rows.documents.tolist()} for rows in (result.train, result.val)]
    assert not sides[0] & sides[1]
    assert len(result.val.documents) == 4
    # All supervised tokens of the training side are learnt exactly once.
    spans = store.supervision.take(result.train.documents)
    learnt = sum(result.train.take([row]).supervised.sum() for row in range(len(result.train)))
    assert learnt == (spans.spans[:, 1] - spans.spans[:, 0]).sum()
    assert len(result.prompts) == 3
    for ids in result.prompts:
        assert info.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    # A second run has the same sides and rows, without tokenising.
    again = made(write_nothing(tmp_path), info, tmp_path)
    assert again.from_cache
    assert again.prompts == result.prompts
    assert np.array_equal(again.train.take([0, 1]).input_ids, result.train.take([0, 1]).input_ids)


def write_nothing(folder: Path) -> str:
    return str(folder / "talks.jsonl")


def test_figures_are_those_of_the_rows(tmp_path: Path, info: TargetInfo) -> None:
    result = made(write(tmp_path, broken=2), info, tmp_path, skip_limit=0.1)
    figures = result.figures(anchors=5)
    assert figures["documents"] == 120
    assert figures["records"] == 62
    assert figures["records_skipped"] == {"broken JSON": 2}
    assert figures["document_tokens"] == result.store.lengths.sum()
    rows = result.train.take(range(len(result.train)))
    assert figures["rows_filled"] == pytest.approx((rows.document_ids >= 0).mean())
    assert figures["anchor_coverage"] == pytest.approx(5 * len(rows) / rows.supervised.sum())
    assert result.figures(anchors=10**6)["anchor_coverage"] > 0.9  # all but each turn's last token
    lines = "\n".join(result.lines(figures))
    assert "120 documents of" in lines
    assert "skipped: 2 of 62 records: broken JSON, such as" in lines
    assert json.dumps(figures)


def test_documents_for_the_policy_check_have_something_to_compare(tmp_path: Path, info: TargetInfo) -> None:
    path = tmp_path / "long.jsonl"
    records = [{"input_ids": [i + 10] * size, "loss_mask": [0] * (size - 9) + [1] * 9} for i in range(12) for size in (90, 700)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = made(str(path), info, tmp_path, row_tokens=128, val_prompts=10, held_out_share=0.5, decoded=0)
    checked = result.val_documents(10)
    assert 0 < len(checked) < len(result.val.documents)
    assert all(document.supervised[:128].any() for document in checked)
    assert len(result.val_documents(2)) == 2


def test_options_reach_the_rows(tmp_path: Path, info: TargetInfo) -> None:
    path = write(tmp_path)
    few = made(path, info, tmp_path, train_prompts=7)
    assert len(few.train.documents) == 7
    assert set(few.train.documents.tolist()) < set(made(path, info, tmp_path).train.documents.tolist())
    over = made(path, info, tmp_path, validate_on_train=True, train_prompts=7)
    assert over.val.documents.tolist() == over.train.documents.tolist() == few.train.documents.tolist()
    split = made(path, info, tmp_path, row_tokens=128)
    assert split.long["split"] > 0
    rejected = made(path, info, tmp_path, row_tokens=128, long="reject", val_prompts=20)
    assert rejected.long["rejected"] == split.long["split"]
    assert "documents longer than a row:" in "\n".join(rejected.lines(rejected.figures(4)))
    with pytest.raises(UserError, match=r"data\.long=reject: none of 1 documents fits"):
        made(path, info, tmp_path, row_tokens=128, long="reject", val_prompts=1)
    truncated = made(path, info, tmp_path, row_tokens=128, long="truncate")
    assert truncated.long["truncated"] == split.long["split"]
    with pytest.raises(UserError, match=r"data\.prompt_tokens=3: none of"):
        made(path, info, tmp_path, prompt_tokens=3)


def test_the_drafters_mask_token_is_never_text(tmp_path: Path, info: TargetInfo) -> None:
    digit = info.tokenizer("7", add_special_tokens=False)["input_ids"][0]
    with pytest.raises(UserError, match="the drafter's mask token within the text"):
        made(write(tmp_path), info, tmp_path, mask=digit)


def test_points_decide_the_sides() -> None:
    points = np.array([0.05, 0.05, 0.5, 0.9, 0.2])
    assert split_points(points, 0.1).tolist() == [True, True, False, False, False]
    assert split_points(points, 0.3).tolist() == [True, True, False, False, True]
    # Neither side is empty.
    assert split_points(points, 0.01).tolist() == [True, True, False, False, False]
    assert split_points(points, 0.99).tolist() == [True, True, True, False, True]
    with pytest.raises(UserError, match=r"1 conversation\(s\) cannot be split"):
        split_points(np.array([0.3, 0.3]), 0.5)


def test_unquoted_yaml_is_understood() -> None:
    for written, meant in (("True", "on"), ("False", "off"), ("mixed", "mixed"), (None, None)):
        assert store_settings(DataSection(prompts=None, thinking=written)).chat.thinking == meant
