"""The parts of watching that need no run: curves, pictures, colours, the workspace."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_lit.cli import main
from dflash_lit.watching.decodings import decoding_rows
from dflash_lit.watching.environment import environment, git_state
from dflash_lit.watching.history import by_budget, by_slot, spread
from dflash_lit.watching.metric_groups import GROUPS
from dflash_lit.watching.packing_picture import draw_packing, packing_pixels
from dflash_lit.watching.workspace import SECTIONS, described, make_workspace
from tests.helpers import packed_rows


def test_curves_over_time() -> None:
    history = {
        100 * n: {
            "val/acceptance_slot_1": 0.1 * n,
            "val/acceptance_slot_2": math.nan,
            "val/tree_eal@64": 1.0 + n,
            "val/chain_eal": 1.0,
            "val/loss": 2.0,
        }
        for n in range(1, 10)
    }
    history[900] |= {"val/tau@16": 1.5, "acceptance/tau_greedy": 1.2}
    slots = by_slot(history, most=3)
    assert list(slots) == ["step 100", "step 500", "step 900"]
    assert slots["step 500"] == [(1, 0.5)]  # what is not a number is no point
    budgets = by_budget(history, most=2)
    assert budgets["tree EAL, step 900"] == [(0, 1.0), (64, 10.0)]
    assert budgets["decoded tau, step 900"] == [(0, 1.2), (16, 1.5)]
    assert by_slot({}) == by_budget({5: {"val/loss": 1.0}}) == {}


def test_a_few_of_many_steps() -> None:
    assert spread([1, 2, 3], 3) == [1, 2, 3]
    assert spread(list(range(101)), 5) == [0, 25, 50, 75, 100]


def test_a_row_shows_documents_prompts_and_padding(tmp_path: Path) -> None:
    rows = packed_rows([[(100, 20), (60, 30)], [(128, 0)]], row_tokens=256)
    pixels = packing_pixels(rows)
    padded, prompt, learnt = pixels[0, 160], pixels[0, 0], pixels[0, 50]
    assert pixels.shape == (*rows.input_ids.shape, 3)
    assert prompt.sum() > learnt.sum()  # paler
    assert not np.allclose(learnt, pixels[0, 140])  # another document
    assert padded.min() > 0.9
    draw_packing(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_decodings_are_text_whatever_they_hold() -> None:
    rounds = [{"text_accepted": "<b>", "text_bonus": "x"}, {"text_accepted": "", "text_bonus": "</style>"}]
    ((prompt, count, share, cell),) = decoding_rows([{"prompt": "<script>", "rounds": rounds}])
    assert (prompt, count, share) == ("<script>", 2, 0.5)
    assert "<span class='ok'>&lt;b&gt;</span>" in cell
    assert cell.count("</style>") == 1
    assert "<script>" not in cell
    assert decoding_rows([{}])[0][1:3] == (0, 0.0)


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**clean, "changed": True}
    assert json.loads(json.dumps(environment(tmp_path)))["git"] == {**clean, "changed": True}


def test_each_group_begins_with_what_all_its_metrics_share() -> None:
    for group in GROUPS:
        assert group.metrics[0].name == f"{group.name}/*"
        assert all(metric.name.startswith(f"{group.name}/") for metric in group.metrics)


def test_the_workspace_shows_every_group() -> None:
    shown = {name.split("/")[0] for section in SECTIONS for panel in section.panels for name in panel.metrics}
    assert {group.name for group in GROUPS} <= shown | {"system"}


def test_the_layout_as_json_needs_neither_network_nor_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb-workspace", "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(described()))
    assert [section["name"] for section in printed["sections"]][:2] == ["Acceptance", "Validation"]


@pytest.mark.parametrize("where", ["nowhere", "a/b/c", "/b", "a/"])
def test_a_project_has_an_entity_and_a_name(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb-workspace", where]) == 2
    assert "error: " in (said := capsys.readouterr().err)
    assert "ENTITY/PROJECT" in said


def test_the_library_takes_the_layout() -> None:
    pytest.importorskip("wandb_workspaces")
    workspace = make_workspace("somebody", "something")
    assert [section.name for section in workspace.sections] == [section.name for section in SECTIONS]
    panels = [panel for section in workspace.sections for panel in section.panels]
    assert len(panels) == sum(len(section.panels) for section in SECTIONS)
    lines = {panel.title: panel for panel in panels if type(panel).__name__ == "LinePlot"}
    assert lines["accepted by slot"].metric_regex == r"val/acceptance_slot_\d+"


def test_a_workspace_that_wandb_does_not_take_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb_workspaces")
    for name, value in (("HOME", str(tmp_path)), ("NETRC", str(tmp_path / "none")), ("WANDB_CONFIG_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    assert main(["wandb-workspace", "some/thing"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert said.startswith("error: some/thing: W&B did not take the workspace; is there a key (wandb login)?; ")
