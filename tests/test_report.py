"""The report of a run: complete on its own, safe for any text, honest about what is missing."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from dflash_lit import pictures
from dflash_lit.errors import UserError
from dflash_lit.pictures import save_picture
from dflash_lit.report import closing_table, load_metrics, main, write_report
from dflash_lit.report_page import decoded_taus

SLOTS = range(1, 8)

SUMMARY = {
    "target": "embedded",
    "objective": "d-pace",
    "block_size": 8,
    "steps": 400,
    "train_tokens": 1_638_400,
    "drafter_parameters": 1_203_456,
    "target_parameters": 3_145_728,
    "tau_greedy": 3.418,
    "tau_greedy_error": 0.11,
    "tau_greedy@16": 4.052,
    "tau_greedy@16_error": 0.14,
    "tau_greedy@64": 4.623,
    "tau_t0.7": 2.871,
    "tau_t0.7@16": 3.304,
    "tau_t0.7@16_error": 0.1,
    "tau_untrained": 1.012,
    "lossless": True,
    "lossless_prompts": "32/32",
    "val/chain_eal": 3.31,
    "val/tree_eal@16": 3.82,
    "val/tree_eal@64": 4.27,
    "val/tree_eal@256": 4.66,
    "tokens_per_s_plain": 212.4,
    "tokens_per_s_drafted": 318.6,
    "tokens_per_s_plain_t0.7": 205.0,
    "tokens_per_s_drafted_t0.7": 184.5,
    "wall_s": 214.0,
    "peak_rss_gib": 2.34,
    "export_dir": "outputs/2025-01-01_12-00-00/export",
    "phases": {"data": 8.2, "compile": 31.0, "training": 140.5, "decoding": 25.0},
    "samples": [
        {
            "prompt": "def add(a, b):\n",
            "rounds": [
                {"text_accepted": "    return a", "text_bonus": " +"},
                {"text_accepted": " b", "text_bonus": "\n"},
                {"text_accepted": "", "text_bonus": "<script>alert(1)</script>"},
            ],
        }
    ],
}


def metrics_csv(columns: set[str] | None = None) -> str:
    """A CSVLogger file of 400 steps: training rows and validation rows apart, cells of the other kind empty."""
    names = ["epoch", "step", "train/loss", "lr-AdamW", "val/loss", "val/chain_eal", "val/tree_eal@64", "acceptance/tau_greedy"]
    names += [f"val/acceptance_slot_{k}" for k in SLOTS] + [f"val/accuracy_slot_{k}" for k in SLOTS]
    rows: list[dict[str, float]] = []
    for step in range(9, 400, 10):
        rows.append({"epoch": 0, "step": step, "train/loss": 1.5 + 4 * 0.99**step + 0.1 * (step % 3), "lr-AdamW": 6e-4})
        if step % 100 == 99:
            share = 0.5 + step / 1500
            rows.append({"step": step, "val/loss": 1.6 + 4 * 0.99**step, "val/chain_eal": 1 + step / 170})
            rows[-1] |= {"val/tree_eal@64": 1.4 + step / 140, "acceptance/tau_greedy": 1 + step / 166}
            rows[-1] |= {f"val/acceptance_slot_{k}": share**k for k in SLOTS}
            rows[-1] |= {f"val/accuracy_slot_{k}": share ** (0.7 + 0.3 * k) for k in SLOTS}
    names = [name for name in names if columns is None or name in columns | {"epoch", "step"}]
    return "\n".join([",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows), ""])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_text(metrics_csv())
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "config.yaml").write_text("objective:\n  name: d-pace  # <b>\n")
    return tmp_path


@pytest.fixture
def html(run_folder: Path) -> str:
    assert main([str(run_folder)]) == 0
    return (run_folder / "report.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Attributes, tags and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "link", "use"}:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "data", "srcset"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"meta", "link", "use"}:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_nothing(html: str) -> None:
    page = Page(html)
    assert all(load.startswith(("#", "data:")) for load in page.loads)
    assert not {"script", "iframe", "img", "object"} & set(page.tags)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?://|@import|url\((?!#)", without_namespaces)


def test_the_page_is_well_formed(html: str) -> None:
    page = Page(html)
    assert page.open == []
    # Two figures may share a marker or clip path only if it is the same one: ids are hashes of the content.
    definitions = re.findall(r'<(?:path|clipPath) id="([^"]*)"(.*?)(?:/>|</clipPath>)', html, flags=re.DOTALL)
    assert len(set(definitions)) == len(dict(definitions))
    assert page.tags.count("svg") == 5


def test_headline_numbers_come_first(html: str) -> None:
    text = Page(html).text
    assert "Each target pass yields 3.42 tokens instead of 1" in text
    assert (
        text.index("3.42") < text.index("T=0.7") < text.index("Pictures") < text.index("Samples") < text.index("Time by phase")
    )
    assert "212.4 -> 318.6 (1.50x, faster)" in text
    assert "205.0 -> 184.5 (0.90x, slower)" in text
    assert "32/32" in text


def test_time_that_no_phase_covers_is_shown(html: str) -> None:
    assert re.search(r"\(not in a phase\)</th><td>9\.3 s", html)


def test_text_of_the_run_is_escaped_and_kept(html: str) -> None:
    assert "<script>" not in html
    assert "<b>" not in html
    text = Page(html).text
    assert "def add(a, b):\n    return a + b\n<script>alert(1)</script>" in text
    assert "name: d-pace  # <b>" in text


def test_every_string_of_the_summary_is_escaped(tmp_path: Path) -> None:
    evil = "<img src=x>"
    summary = {key: evil for key, value in SUMMARY.items() if isinstance(value, str)} | {
        "lossless": True,
        "phases": {evil: 1.0},
    }
    summary["samples"] = [{"prompt": evil, "rounds": [{"text_accepted": evil, "text_bonus": evil}]}]
    html = write_report(tmp_path / "report.html", summary, {}, evil).read_text()
    assert evil not in html
    assert Page(html).text.count(evil) >= 8


def test_half_a_character_in_a_sample_does_not_lose_the_report(tmp_path: Path) -> None:
    summary = {"samples": [{"prompt": "\ud83d", "rounds": []}]}
    assert "0 rounds" in write_report(tmp_path / "report.html", summary, {}).read_text(encoding="utf-8")


def test_the_same_run_gives_the_same_bytes(run_folder: Path, html: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert main([str(run_folder)]) == 0
    assert (run_folder / "report.html").read_text(encoding="utf-8") == html
    assert not list(run_folder.glob(".report*"))  # the temporary file went away


def test_pictures_do_not_ask_the_environment_for_a_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    for name in ("a.svg", "a.png"):
        save_picture(Figure(), tmp_path / name, dpi=50)
        assert (tmp_path / name).stat().st_size > 0
    with pytest.raises(UserError, match=r"--draw .*a\.doc: cannot write the picture .*name another \.png"):
        save_picture(Figure(), tmp_path / "a.doc", dpi=50, option="--draw ")


def test_a_users_matplotlib_settings_do_not_matter(run_folder: Path, html: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9, "figure.dpi": 50, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        assert main([str(run_folder)]) == 0
        assert dict(matplotlib.rcParams) == before
    assert (run_folder / "report.html").read_text(encoding="utf-8") == html


def test_a_run_without_measurements_gives_a_short_page_and_no_numbers(tmp_path: Path) -> None:
    html = write_report(tmp_path / "new" / "report.html", {}, {}).read_text()
    page = Page(html)
    assert "svg" not in page.tags
    assert "Samples" not in page.text
    assert page.text.count("not measured") >= 7
    body = page.text[page.text.index("tau, greedy") :]
    assert not re.search(r"\d\.\d", body.replace("T=0.7", "").replace("temperature 0.7", ""))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 10**400, "3.4", True])
def test_what_is_no_finite_number_is_not_measured(tmp_path: Path, value: object) -> None:
    summary = dict.fromkeys(SUMMARY, value) | {"samples": None, "phases": None}
    text = Page(write_report(tmp_path / "report.html", summary, {}).read_text()).text
    assert "tau, greedy (incl. bonus)not measured" in text
    assert "tree EAL by budget (incl. bonus)not measured" in text


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (set(), 0),
        ({"train/loss"}, 1),
        ({"val/loss", "acceptance/tau_greedy"}, 2),
        ({"val/accuracy_slot_3"}, 1),
        ({"val/tree_eal@64"}, 2),  # over steps, and by budget from the last validation
    ],
)
def test_missing_columns_leave_out_only_their_pictures(tmp_path: Path, columns: set[str], figures: int) -> None:
    (tmp_path / "metrics.csv").write_text(metrics_csv(columns))
    html = write_report(tmp_path / "report.html", {}, load_metrics(tmp_path / "metrics.csv")).read_text()
    assert html.count("<svg") == figures


def test_metrics_are_read_by_step_without_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(
        "epoch,step,train/loss,val/loss,note\n0,10,2.5,,warm\n0,20,1.5,,\n0,10,,3.0,\n0,20,1.25,,\n,,9,9,\n0,30,nan,"
    )
    metrics = load_metrics(path)
    assert metrics["train/loss"][:2] == [(10, 2.5), (20, 1.25)]  # a resumed run logged step 20 again
    assert metrics["val/loss"] == [(10, 3.0)]
    assert "note" not in metrics
    assert "step" not in metrics


def test_acceptance_shows_the_first_and_the_last_validation(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(metrics_csv())
    svg = pictures.acceptance_by_slot(load_metrics(tmp_path / "metrics.csv"))
    assert svg is not None
    assert [f"step {step}<" in svg for step in (99, 199, 299, 399)] == [True, False, False, True]
    single = pictures.acceptance_by_slot({"val/acceptance_slot_1": [(50, 0.5)], "val/acceptance_slot_2": [(50, 0.2)]})
    assert single is not None
    assert single.count("step 50<") == 1


def test_decoded_tau_by_budget_needs_decoded_trees() -> None:
    taus = decoded_taus(SUMMARY)
    assert taus["greedy"][0] == (3.418, 0.11)
    assert sorted(taus["greedy"]) == [0, 16, 64]
    assert math.isnan(taus["greedy"][64][1])
    assert sorted(taus["T=0.7"]) == [0, 16]
    svg = pictures.tau_by_budget(taus)
    assert svg is not None
    for text in ("decoded, greedy", "decoded, T=0.7", ">chain<", ">64<"):
        assert text in svg
    assert pictures.tau_by_budget({"greedy": {0: (3.4, 0.1)}}) is None
    assert pictures.tau_by_budget({}) is None


@pytest.mark.parametrize("width", [80, 100])
def test_closing_table_fits_the_terminal(width: int) -> None:
    deep = "/".join(["a-folder-with-a-long-name"] * 8) + "/[bold]export"
    buffer = io.StringIO()
    big = {"tokens_per_s_plain": 123_456.7, "tokens_per_s_drafted": 234_567.8}
    Console(file=buffer, width=width).print(closing_table(SUMMARY | big | {"export_dir": deep}, report="runs/1/report.html"))
    lines = buffer.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = buffer.getvalue()
    assert text.count("incl. bonus") == 6
    for part in (
        "3.42",
        "2.87",
        "1.01",
        "yes, 32/32",
        "@16: 4.05, @64: 4.62",
        "@16: 3.82, @64: 4.27, @256: 4.66",
        "3 min 34 s",
        "2.34 GiB",
    ):
        assert part in text
    assert "123,456.7 -> 234,567.8 (1.90x, faster)" in text
    assert "(0.90x, slower)" in text
    assert "runs/1/report.html" in text
    assert deep in "".join(line.removeprefix("  export").strip() for line in lines)  # folded, nothing cut, no markup


def test_closing_table_of_an_unfinished_run_says_not_measured() -> None:
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(closing_table({"lossless": False, "lossless_prompts": "30/32"}))
    assert buffer.getvalue().count("not measured") == 10
    assert "NO, 30/32 prompts identical" in buffer.getvalue()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run / "summary.json").unlink(), "summary.json: cannot be read"),
        (lambda run: (run / "summary.json").write_text("{"), "summary.json: not JSON"),
        (lambda run: (run / "summary.json").write_text("[1]"), "summary.json: holds a list"),
        (lambda run: (run / "summary.json").write_text("[" * 100_000), "summary.json: not JSON"),
        (lambda run: (run / "csv" / "metrics.csv").write_text("oid sha256:0\nsize 9\n"), "metrics.csv: has no column 'step'"),
        (lambda run: (run / "csv" / "metrics.csv").write_text('step,"' + "x" * 200_000), "metrics.csv: cannot be read"),
        (lambda run: (run / "csv" / "metrics.csv").unlink(), "metrics.csv: no such file"),
    ],
)
def test_command_names_what_the_folder_lacks(
    run_folder: Path, capsys: pytest.CaptureFixture[str], break_it, message: str
) -> None:
    break_it(run_folder)
    assert main([str(run_folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (run_folder / "report.html").exists()


def test_metrics_can_lie_elsewhere(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = run_folder / "csv" / "metrics.csv"
    elsewhere = elsewhere.rename(run_folder / "other.csv")
    assert main([str(run_folder), "--metrics", str(elsewhere)]) == 0
    assert capsys.readouterr().out.strip() == str(run_folder / "report.html")
    with pytest.raises(UserError, match="nowhere"):
        load_metrics(run_folder / "nowhere.csv")


def test_budgets_over_time_need_more_than_one() -> None:
    one = {"val/tree_eal@64": [(1, 2.0), (2, 3.0)], "val/tau@64": [(1, 1.5)]}
    assert pictures.budget_curves(one) is None  # the lengths' picture has it
    svg = pictures.budget_curves({**one, "val/tree_eal@16": [(1, 1.8)], "val/tree_eal@256": [(1, math.nan)]})
    assert svg is not None
    assert [text in svg for text in ("tree EAL@64", "tree EAL@16", "decoded tau@64", "tree EAL@256")] == [
        True,
        True,
        True,
        False,
    ]


def test_speed_over_time_and_which_side_sets_it() -> None:
    assert pictures.pipeline_curves({"train/loss": [(1, 2.0)]}) is None
    svg = pictures.pipeline_curves({"pipeline/ktok_s": [(5, 2.0)], "pipeline/supply_ktok_s": [(5, 2.5)]})
    assert svg is not None
    assert "targets could supply" in svg
    assert "drafters could take" not in svg
