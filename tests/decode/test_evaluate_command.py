"""``dflash-lit evaluate``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash_lit.cli import main
from dflash_lit.decode.acceptance import Acceptance
from dflash_lit.decode.stages import STAGES
from dflash_lit.decode.tables import depths_table, stages_table, tau_table
from dflash_lit.export import save_drafter
from tests.helpers import embedded_config, lively_drafter

QUICK = ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_drafter(lively_drafter(embedded_config(num_target_layers=6)), tmp_path_factory.mktemp("drafter") / "it"))


def test_json_has_every_temperature_and_budget(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "it.png"
    code = main(
        ["evaluate", drafter, *QUICK, "--budgets", "0,8", "--temperature", "0", "0.7", "--json", "--draw", str(picture)]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert [(line["temperature"], line["budget"]) for line in found] == [(0, 0), (0, 8), (0.7, 0), (0.7, 8)]
    for line in found:
        assert line["lossless"] is (True if line["temperature"] == 0 else None)
        assert line["tau_interval"][0] <= line["tau"] <= line["tau_interval"][1]
        assert set(line["stage_ms"]) == {"draft", "build", "verify", "commit"}
        assert line["nodes"] == (line["budget"] or 3)
        assert len(line["accepted_by_depth"]) == 3
        assert line["speedup"] == pytest.approx(line["tokens_per_s_drafted"] / line["tokens_per_s_plain"])
        assert line["plain_ms"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", drafter, *QUICK, "--budgets", "0,8"]) == 0
    out = capsys.readouterr().out
    for text in ("tree 8", "chain", "2/2", "95 %", "draft", "build", "verify", "commit", "plain", "at each depth"):
        assert text in out
    assert main(["evaluate", drafter, *QUICK, "--budgets", "0", "--stage-prompts", "0"]) == 0
    assert "commit" not in capsys.readouterr().out


def test_tables_of_long_blocks_are_whole_in_80_columns() -> None:
    results = [
        Acceptance(
            temperature=temperature,
            tau=12.34,
            tau_error=0.56,
            tokens_per_s_plain=123.4,
            tokens_per_s_drafted=1234.5,
            accepted_by_depth=[0.5] * 31,
            identical=14 if temperature == 0 else None,
            near_ties=2,
            prompts=16,
            budget=budget,
            stage_ms=dict.fromkeys(STAGES, 123.45),
            plain_ms=123.45,
        )
        for temperature in (0.0, 0.7, 0.95)
        for budget in (0, 16, 64, 256)
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    for table in (tau_table(results), depths_table(results), stages_table(results)):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["31"] + ["0.50"] * 8 in lines
    assert ["31"] + ["0.50"] * 4 in lines  # of the others, below
    assert ["0.7", "tree", "256", *["123.45"] * 4, "493.80", "123.45"] in lines
    assert ["0.7", "tree", "64", "12.34", "±", "0.56", "nan..nan", "123.4", "1234.5", "10.00x", "sampled"] in lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budgets", "0,-4"], "'-4' is no whole number from 0"),
        (["--budgets", "16,many"], "'many' is no whole number"),
        (["--budgets", "1.5"], "'1.5' is no whole number"),
        (["--budgets", "16,,64"], "'' is no whole number"),
        (["--budgets", "16,64,16"], "16 is there twice"),
        (["--draw", "it.gif"], "--draw it.gif: the name has to end in"),
        (["--draw", "/no/such/folder/it.png"], "cannot write the picture"),
    ],
)
def test_wrong_input(drafter: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [] if "--budgets" in arguments else ["--budgets", "0", "--stage-prompts", "0"]
    assert main(["evaluate", drafter, *QUICK, *quick, *arguments]) == 2
    assert says in capsys.readouterr().err
