"""``python train.py data=chat``: on conversations as they are, in one process and in two."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from dflash_lit.cli import main
from dflash_lit.target.embedded.corpus import stdlib_files
from tests.test_train import summary_of, train

SIZES = [
    *"data.row_tokens=256 data.response_tokens=80 data.prompt_tokens=100 data.val_prompts=8 data.held_out_share=0.1".split(),
    *"evaluation.prompts=1 evaluation.temperatures=[0.0]".split(),
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    texts = [file.text[:3000] for file in islice(stdlib_files(), 90) if len(file.text) > 3000]
    lines = [{"prompt": text[:80], "response": text[80 : 200 + 40 * number]} for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return folder


def chat(folder: Path, *overrides: str) -> Path:
    changed = ("data.skip_limit=0.1", "data.temperature=0.7")
    return train("data=chat", f"data.path={folder}/a.jsonl", *changed, *SIZES, *overrides, folder=folder)


def test_training_goes_on_in_the_middle_of_an_epoch(chats: Path) -> None:
    every = (
        "+callbacks.checkpoint.every_n_train_steps=1",
        "callbacks.checkpoint.save_top_k=-1",
        "callbacks.checkpoint.monitor=null",
    )
    whole = chat(chats, *every)
    resumed = chat(chats, f"ckpt_path='{whole}/checkpoints/step=2.ckpt'")
    weights = [torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for folder in (whole, resumed)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    first, second = summary_of(whole), summary_of(resumed)
    assert first["documents"] == first["records"] - 1 > 20
    assert first["records_skipped"] == {"broken JSON": 1}
    assert first["packing_efficiency"] > 0.9
    assert 0 < first["anchor_coverage"] < 1
    assert first["lossless"] is True
    assert (first["documents_from_cache"], second["documents_from_cache"]) == (False, True)
    # People's sources, and not what the target says at this temperature.
    assert first["off_policy"] is True
    assert first["policy_nll"] > first["policy_entropy"] + 0.3


def test_with_features_written_once_it_trains_the_same(chats: Path) -> None:
    online = chat(chats, "data.policy_documents=0")
    first, again = (chat(chats, "data.policy_documents=0", "data.offline=true") for _ in range(2))
    found = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (online, first, again)]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[2][name], found[1][name])  # read, not computed
    kept = list((chats / "cache").rglob("features/*/meta.json"))
    assert len(kept) == 2
    two = chat(chats, "data.offline=true", "data.policy_documents=0", "placement.drafters=2", "data.rows_per_batch=2")
    assert summary_of(two)["steps"] == 4


def test_what_the_target_has_said_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From prompts through ``dflash-lit respond`` to a drafter."""
    texts = [file.text[:100] for file in islice(stdlib_files(), 30) if len(file.text) > 300]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = [
        "--target",
        "embedded",
        "--out",
        str(tmp_path / "said" / "a.jsonl"),
        "--max-tokens",
        "80",
    ]
    (tmp_path / "said").mkdir()
    assert main(["respond", str(tmp_path / "prompts.jsonl"), *options]) == 0
    run = train("data=chat", f"data.path={tmp_path}/said", *SIZES, "data.held_out_share=0.4", folder=tmp_path)
    summary = summary_of(run)
    assert summary["documents"] > 15
    assert summary["off_policy"] is False  # the defaults of both commands fit together


def test_two_drafters_read_the_rows_of_one_plan(chats: Path) -> None:
    run = chat(chats, "placement.drafters=2", "data.rows_per_batch=2")
    summary = summary_of(run)
    assert summary["steps"] == 4
    assert summary["documents"] > 20
    assert not (run / ".rows").exists()
