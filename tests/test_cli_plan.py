"""``dflash-lit plan``, in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_lit.cli import main
from dflash_lit.doctor.finding import GIB
from dflash_lit.placement.forecast import ATTENTION


def said(capsys: pytest.CaptureFixture[str], options: str) -> str:
    assert main(["plan", *options.split()]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    return json.loads(said(capsys, f"{options} --json"))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_the_published_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a hub, a GPU or an option."""
    out = said(capsys, "")
    assert "7     0     7      target   -             cuda:7" in out
    assert out.splitlines()[-2:] == [
        "verdict   drafter-bound: 5 targets supply 212 Ktok/s, 3 drafters take 72.4 Ktok/s; "
        "3 targets + 5 drafters would reach 121 Ktok/s",
        "colocated 8 drafters with a target each would reach 123 Ktok/s, if a GPU holds 54.7 GiB: "
        "placement=colocated placement.drafters=8",
    ]


def test_the_plans_in_the_docs_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "targets.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n\$ dflash-lit plan (.*?)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 4
    for options, printed in shown:
        assert said(capsys, options) == printed, options


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "--target embedded --targets 2 --drafters 1 --hosts 2 --target-rate 3000 --drafter-rate 2000")
    assert [(p["rank"], p["host"], p["role"], p["trainer_rank"], p["device"]) for p in facts["processes"]] == [
        (0, 0, "drafter", 0, "cuda:0"),
        (1, 0, "target", None, "cuda:1"),
        (2, 0, "target", None, "cuda:2"),
        (3, 1, "drafter", 1, "cuda:0"),
        (4, 1, "target", None, "cuda:1"),
        (5, 1, "target", None, "cuda:2"),
    ]
    for parts in facts["memory"].values():
        total = parts.pop("total")
        assert total == sum(parts.values())
    assert facts["tokens_per_s_of_a_rank"] == {"target": 3000, "drafter": 2000}
    assert facts["rows_per_step"] == 8
    assert facts["wire"]["features"] == 4000 * 3 * 256 * 2
    assert facts["wire"]["out_of_target"] == facts["wire"]["features"] / 4
    assert facts["wire"]["into_drafter"] == facts["wire"]["features"] / 2
    verdict = facts["verdict"]
    assert (verdict["bound"], verdict["supply"], verdict["demand"], verdict["rate"]) == ("drafter", 12_000, 4000, 4000)
    assert verdict["best"] == {"targets": 1, "drafters": 2, "hosts": 2}
    assert verdict["text"].startswith("drafter-bound: 4 targets supply 12 Ktok/s")


def test_every_size_counts(capsys: pytest.CaptureFixture[str]) -> None:
    base = "--target embedded --targets 1 --drafters 1"
    plain = answer(capsys, base)
    twice = answer(capsys, f"{base} --rows 8")
    assert twice["memory"]["drafter"]["feature queue"] == 2 * plain["memory"]["drafter"]["feature queue"]
    assert twice["flop_per_token"] == plain["flop_per_token"]
    for option in ("--anchors 64", "--block-size 16", "--layers 3", "--features 2"):
        changed = answer(capsys, f"{base} {option}")
        assert changed["flop_per_token"]["drafter"] != plain["flop_per_token"]["drafter"], option
    longer, short = (facts["flop_per_token"]["target"] for facts in (answer(capsys, f"{base} --row-tokens 512"), plain))
    assert longer["products"] == short["products"]
    assert longer["total"] - longer["products"] == longer["attention"] > short["attention"]
    deeper = answer(capsys, f"{base} --prefetch 5")["memory"]["drafter"]["feature queue"]
    assert deeper == 2 * plain["memory"]["drafter"]["feature queue"]  # 6 batches and 3
    assert answer(capsys, f"{base} --prefetch 5")["in_flight"]["most"] == 2 * plain["in_flight"]["most"]
    for role in ("target", "drafter"):
        slow = answer(capsys, f"{base} --tflops-{role} 1")
        flop = plain["flop_per_token"][role]
        assert slow["tokens_per_s_of_a_rank"][role] == pytest.approx(1e12 / (flop["products"] + flop["attention"] / ATTENTION))


def test_requests_in_flight_and_shared_gpus_are_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--target embedded --targets 3 --drafters 1"
    assert answer(capsys, layout)["in_flight"]["prefetch"] == 4
    assert answer(capsys, f"{layout} --prefetch 1")["in_flight"]["prefetch"] == 1
    assert main(["plan", *layout.split(), "--gpus", "2"]) == 2
    assert "placement.share=true" in capsys.readouterr().err
    assert "verdict" in said(capsys, f"{layout} --gpus 2 --share")


def test_small_models_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    base = "--target embedded --targets 1 --drafters 1 --target-rate 500"
    assert "\nnote      " in said(capsys, base)
    assert "note" not in said(capsys, f"{base} --drafter-rate 500")


def test_the_gpus_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=(40 + 60 * index) * GIB)
    )
    assert main(["plan"]) == 2
    assert "need 8 GPUs a host, 2 are visible" in capsys.readouterr().err
    last = said(capsys, "--targets 1 --drafters 1").splitlines()[-1]
    assert last == "memory    a drafter takes about 42.7 GiB, the GPUs here have 40.0 GiB: lower --rows"
    assert (
        said(capsys, "--targets 1 --drafters 1 --rows 1").splitlines()[-1]
        == "memory    fits the GPUs here, which have 40.0 GiB"
    )
    assert said(capsys, "--gpus 8").splitlines()[-1].startswith("colocated")  # another machine's


def test_of_a_hub_only_the_config_is_fetched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoTokenizer, Qwen3Config

    asked: list[str] = []

    def config(name: str, **kwargs: Any) -> Qwen3Config:
        asked.append(name)
        return Qwen3Config(num_hidden_layers=8, hidden_size=64, vocab_size=100)

    def tokenizer(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not needed")

    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    assert answer(capsys, "--target somebody/something")["target"] == "somebody/something"
    assert asked == ["somebody/something"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--targets 0", "--targets 0: must be at least 1"),
        ("--hosts -1", "placement.hosts=-1: must be at least 1"),
        ("--gpus 7", "placement.targets=5 + placement.drafters=3 need 8 GPUs a host, 7 are visible"),
        ("--rows 0", "--rows 0: must be at least 1"),
        ("--row-tokens 100", "--row-tokens 100: must be a multiple of 128"),
        ("--prefetch -1", "--prefetch -1: must be at least 0"),
        ("--target-rate 0", "--target-rate 0: must be positive"),
        ("--tflops-drafter nan", "--tflops-drafter nan: must be positive"),
        ("--block-size 1", "drafter.block_size=1: a block needs the anchor"),
        ("--target embedded --features 5", "drafter.features=5: a target of 6 layers offers at most 3"),
        ("--target /nowhere", "--target /nowhere: no usable config there"),
    ],
)
def test_wrong_input_is_one_line(options: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options.split()]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith(f"error: {says}")
    assert caught.err.count("\n") == 1


def test_a_rate_is_given_or_derived(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--target-rate", "1", "--tflops-target", "1"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
