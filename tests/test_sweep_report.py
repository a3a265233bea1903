"""A sweep's report, from folders as Hydra and the jobs leave them."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.console import Console

from dflash_lit import pictures
from dflash_lit.config import TrainConfig, register
from dflash_lit.errors import Interrupted, UserError
from dflash_lit.report import main
from dflash_lit.sweep_report import ranking, sweep_report
from dflash_lit.sweep_results import read_sweep, settings
from dflash_lit.sweeps.end import SweepEnd
from dflash_lit.sweeps.outcome import Outcome, run_job
from tests.test_report import Page

CONF = Path(__file__).parent.parent / "conf"
register()


def job(sweep: Path, number: int, overrides: list[str], summary: dict[str, Any] | None) -> None:
    """What Hydra writes of a job, by Hydra, and the job's own summary."""
    folder = sweep / str(number) / ".hydra"
    folder.mkdir(parents=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=overrides, return_hydra_config=True)
    OmegaConf.save(OmegaConf.create({"hydra": composed.hydra}), folder / "hydra.yaml")
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    OmegaConf.save(composed, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / "overrides.yaml")
    if summary is not None:
        (folder.parent / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    lengths = {(4, 1): 2.1, (4, 2): 2.3, (7, 1): 2.6, (7, 2): 2.4, (14, 1): 2.7}
    for number, (gamma, seed) in enumerate((g, s) for g in (4, 7, 14) for s in (1, 2)):
        eal = lengths.get((gamma, seed))
        summary = eal and {"val/tree_eal@64": eal, "val/chain_eal": eal - 0.4, "wall_s": 61.0, "lossless": True, "target": "x"}
        overrides = ["objective=dflash", f"objective.gamma={gamma}", f"seed={seed}", "optimized_metric=val/tree_eal@64"]
        job(tmp_path, number, overrides, summary or None)
    return tmp_path


def test_what_was_varied_who_failed_and_who_is_best(sweep: Path) -> None:
    read = read_sweep(sweep)
    assert read.varied == ("objective.gamma", "seed")
    assert (read.metric, read.asked) == ("val/tree_eal@64", True)
    assert [one.name for one in read.failed] == ["5"]
    assert [one.name for one in read.ranked] == ["4", "2", "3", "1", "0"]


def test_seeds_of_a_setting_are_put_together(sweep: Path) -> None:
    found = {one.overrides["objective.gamma"]: one for one in settings(read_sweep(sweep))}
    assert list(found) == ["14", "7", "4"]
    assert found["7"].mean == pytest.approx(2.5)
    assert found["7"].deviation == pytest.approx(0.2 / math.sqrt(2))
    assert (found["14"].jobs, found["14"].values, math.isnan(found["14"].deviation)) == (2, (2.7,), True)


def test_the_best_config_composes_to_the_very_config_of_the_job(sweep: Path) -> None:
    sweep_report(sweep)
    with initialize_config_dir(str(sweep), version_base="1.3"):
        again = compose("best", return_hydra_config=True)
        changed = compose("best", overrides=["seed=9"])
    config = OmegaConf.load(sweep / "4" / ".hydra" / "config.yaml")
    assert again.hydra.run.dir.startswith("outputs/")
    assert not again.hydra.job.chdir
    OmegaConf.set_struct(again, False)
    del again["hydra"]
    assert OmegaConf.to_container(again) == OmegaConf.to_container(config)
    changed.paths.output_dir = "/nowhere"
    assert isinstance(made := OmegaConf.to_object(changed), TrainConfig)
    assert (made.objective.gamma, made.seed) == (14, 9)
    assert "# Job 4 of 6: val/tree_eal@64 = 2.7" in (sweep / "best.yaml").read_text()


def test_the_page_and_the_table(sweep: Path) -> None:
    assert main([str(sweep)]) == 0
    html = (sweep / "report.html").read_text()
    page = Page(html)
    assert [load for load in page.loads if not load.startswith(("#", "data:,"))] == []
    for text in ("best val/tree_eal@64", "2.700", "Over seeds", "1 without a result", "objective.gamma=14 seed=2"):
        assert text in " ".join(page.text.split())
    assert html.count("<svg") == 1
    with (sweep / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 5 + ["failed"]
    assert rows[4] == {
        "job": "4",
        "status": "done",
        "objective.gamma": "14",
        "seed": "1",
        "val/tree_eal@64": "2.7",
        "val/chain_eal": repr(2.7 - 0.4),
        "wall_s": "61.0",
    }


def test_the_ranking_fits_a_terminal(sweep: Path, tmp_path: Path) -> None:
    table = ranking(read_sweep(sweep), most=2)
    assert table is not None
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert " ".join(lines[0]) == "Sweep: 2 of 6 jobs, best first"
    assert lines[1] == ["job", "objective.gamma", "seed", "val/tree_eal@64"]
    assert lines[-2:] == [["4", "14", "1", "2.700"], ["2", "7", "1", "2.600"]]
    job(tmp_path / "failed", 0, ["seed=1"], None)
    assert ranking(read_sweep(tmp_path / "failed")) is None


def test_the_line_that_runs_the_best_again_is_a_line_of_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a sweep"
    job(folder, 0, ["seed=1", "optimized_metric=val/chain_eal"], {"val/chain_eal": 1.0})
    SweepEnd().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}}))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the best again: "))
    assert shlex.split(line.removeprefix("the best again: "))[2:] == ["--config-dir", str(folder), "--config-name", "best"]


def test_hostile_values_are_text(tmp_path: Path) -> None:
    for number, prompts in enumerate(("<script>alert(1)</script>$x_1$.txt", "b.txt")):
        job(tmp_path, number, ["data=file", f"data.prompts='{prompts}'"], {"val/chain_eal": 1.0 + number})
    html = sweep_report(tmp_path).read_text()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "no optimized_metric was set" in html


def test_a_sweep_in_which_all_failed_has_a_report_and_no_best(tmp_path: Path) -> None:
    for number in range(2):
        job(tmp_path, number, [f"seed={number}"], None)
    (tmp_path / "best.yaml").write_text("of an older report")
    (tmp_path / "1" / "summary.json").write_text('{"val/chain')  # killed while writing
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("- seed=1\n- '")
    text = " ".join(Page(sweep_report(tmp_path).read_text()).text.split())
    assert "No job has a val/tree_eal@64" in text
    assert "2 without a result" in text
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.parametrize(
    ("checkpoint", "why"),
    [("a/last.ckpt", "; ckpt_path=a/last.ckpt goes on from here"), (None, " before there was anything to save")],
)
def test_a_job_that_its_time_limit_has_stopped_is_told_of_and_the_sweep_goes_on(
    checkpoint: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(signum: int) -> float | None:
        raise Interrupted(signum, checkpoint)

    for number in range(2):
        job(tmp_path, number, [f"seed={number}"], None)
        hydra = OmegaConf.load(tmp_path / str(number) / ".hydra" / "hydra.yaml")
        OmegaConf.update(hydra, "hydra.runtime.output_dir", str(tmp_path / str(number)))
        monkeypatch.setattr(HydraConfig.instance(), "cfg", hydra)
        if number == 0:
            assert run_job(lambda: told(signal.SIGALRM)) is None
        else:
            with pytest.raises(Interrupted):
                run_job(lambda: told(signal.SIGTERM))
    assert capsys.readouterr().err == f"job 0: stopped by trainer.max_time{why}\n"
    found = [(one.status, one.reason) for one in read_sweep(tmp_path).jobs]
    assert found == [("stopped", f"stopped by trainer.max_time{why}"), ("stopped", f"stopped by SIGTERM{why}")]
    assert f"stopped by trainer.max_time{why}" in sweep_report(tmp_path).read_text()


def test_a_job_that_failed_with_a_summary_in_its_folder_is_listed_and_not_the_best(sweep: Path) -> None:
    Outcome("4", "failed", ("objective.gamma=14", "seed=1"), error="OSError: no space left").write(sweep / "4")
    read = read_sweep(sweep)
    assert [one.name for one in read.failed] == ["4", "5"]
    assert read.best is not None
    assert read.best.name == "2"
    assert "no space left" in sweep_report(sweep).read_text()
    assert "# Job 2 of 6" in (sweep / "best.yaml").read_text()


def test_damaged_files_of_jobs_are_told_of(sweep: Path) -> None:
    best = read_sweep(sweep).best
    assert best is not None
    (best.folder / "job.json").write_text("{")  # it may have failed after its summary
    read = read_sweep(sweep)
    assert best.name in [one.name for one in read.failed]
    assert "its job.json cannot be read" in sweep_report(sweep).read_text()
    second = read.best
    assert second is not None
    (second.folder / "summary.json").write_text("[" * 99_999)
    third = read_sweep(sweep).best
    assert third is not None
    (third.folder / ".hydra" / "config.yaml").write_text("<!DOCTYPE html>\n")
    with pytest.raises(UserError, match=r"config\.yaml: is no config of a run \(Key '<!DOCTYPE html>' not in 'TrainConfig'"):
        sweep_report(sweep)
    (third.folder / ".hydra" / "config.yaml").write_text("a: [\nb: }\n")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read \(while parsing") as caught:
        sweep_report(sweep)
    assert "\n" not in str(caught.value)


def test_jobs_that_were_never_measured_rank_nowhere(tmp_path: Path) -> None:
    for number, eal in enumerate((None, math.nan, 1.5)):
        job(tmp_path, number, [f"seed={number}", "optimized_metric=tau_greedy"], {"tau_greedy": eal, "val/loss": 3.0})
    read = read_sweep(tmp_path)
    assert [one.name for one in read.ranked] == ["2"]
    assert read.failed == []
    assert "Jobs, best first" in sweep_report(tmp_path).read_text()


def test_a_folder_without_jobs_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no jobs of a sweep"):
        sweep_report(tmp_path)


def test_parallel_coordinates_need_something_to_compare() -> None:
    assert pictures.parallel_coordinates({}, "tau", [1.0, 2.0]) is None
    assert pictures.parallel_coordinates({"seed": ["1"]}, "tau", [1.0]) is None


def test_axes_have_the_scale_of_their_values() -> None:
    svg = pictures.parallel_coordinates(
        {"optimizer.lr": ["1e-4", "1e-3", "1e-2"], "objective": ["soft", "dpace", "soft"], "drafter.layers": ["1", "2", "5"]},
        "val/tree_eal@64",
        [2.0, 3.0, 2.5],
    )
    assert svg is not None
    page = Page(svg)
    for text in ("optimizer.lr", "0.0001", "0.01", "soft", "dpace", "val/tree_eal@64", "2.5"):
        assert text in page.text
    place = pictures._axis(["1e-4", "1e-3", "1e-2"])[0]
    assert place == pytest.approx([0, 0.5, 1])  # a factor of 100: logarithmic
    assert pictures._axis(["1", "2", "5"])[0] == pytest.approx([0, 0.25, 1])
    assert pictures._axis(["3", None]) == ([0.0, 1.0], {0.0: "3", 1.0: "(default)"})
