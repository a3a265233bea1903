"""What runs leave besides checkpoints and exports, for reports, later runs and other hosts. Read as it is, or refused; never made up."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_lit.cli import main as command
from dflash_lit.compilation import archive
from dflash_lit.compilation.cache import cache_dir, cache_key
from dflash_lit.config import register
from dflash_lit.errors import UserError
from dflash_lit.guard.saved_step import finish, save_batches, save_weights
from dflash_lit.module import DrafterModule
from dflash_lit.report import main as report
from dflash_lit.requeue import _note, run_folder
from dflash_lit.sweeps.outcome import Outcome
from dflash_lit.target.ends import read_ends
from dflash_lit.watching.metrics_file import MetricsLogger
from dflash_lit.watching.pace import Pace, read_pace, write_pace
from fuzzing.case import Case, Wrong, logged
from fuzzing.damage import bytes_damaged, dumped, entry_damaged, json_damaged, text_edited, torn
from fuzzing.process import SCRIPT as START
from fuzzing.process import cleaned, forked, outcome
from fuzzing.tiny_run import TINY, planned

__all__ = ["Fuzzed"]

_JOBS = 3


class Fuzzed:
    """Reports on damaged runs and sweeps, goes on with their files, and computes their saved steps again."""

    name = "run"

    def __init__(self, scratch: Path) -> None:
        register()
        self.scratch = scratch
        work = scratch / "work"
        work.mkdir()
        variables = {**cleaned(), "HOME": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache"), "FUZZ_WHOLE": "1"}
        self.run = scratch / "run"
        self.python = forked()
        ended = outcome([self.python, str(START), *_EXPORTS, f"hydra.run.dir={self.run}"], work, variables, limit_s=90)
        if ended.code:
            raise RuntimeError(ended.said)
        self.summary = json.loads((self.run / "summary.json").read_text())
        self.rows = _rows(self.run / "csv" / "metrics.csv")
        self.sweep = scratch / "sweep"
        for number in range(_JOBS):
            job = self.sweep / str(number)
            shutil.copytree(self.run / ".hydra", job / ".hydra")
            given = (f"optimizer.lr={0.001 * (number + 1)}", "seed=1")
            (job / ".hydra" / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(list(given))))
            (job / "summary.json").write_text(json.dumps({"val/chain_eal": 1.5 + number, "tau_greedy": 2.0}))
            Outcome(str(number), "done", given, 1.5 + number, seconds=3.0).write(job)
        self.step = self._saved_step(scratch)
        os.environ["DFLASH_LIT_COMPILE_CACHE"] = str(scratch / "compile")
        kept = cache_dir()
        (kept / "fx" / "ab").mkdir(parents=True)
        for number in range(3):
            (kept / "fx" / "ab" / f"entry{number}").write_bytes(random.Random(number).randbytes(700))
        archive.save(scratch / "cache.tar.gz")

    def _saved_step(self, scratch: Path) -> Path:
        cfg, plan = planned([*TINY, f"paths.output_dir={scratch}/none", f"data.cache_dir={scratch}/cache"])
        settings = plan.module_settings(cfg, "0" * 16)
        ends = read_ends(plan.info, device="cpu", dtype=torch.float32)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = DrafterModule(ends=ends, **settings)
            rows, tokens = cfg.data.rows_per_batch, cfg.data.row_tokens
            batch = {
                "input_ids": torch.randint(4, 500, (rows, tokens)),
                "document_ids": torch.zeros(rows, tokens, dtype=torch.int32),
                "position_ids": torch.arange(tokens, dtype=torch.int32).expand(rows, tokens),
                "supervised": torch.ones(rows, tokens, dtype=torch.bool),
                "row_ids": torch.arange(rows),
                "features": torch.randn(rows, tokens, plan.drafter.feature_size),
                "last_hidden": torch.randn(rows, tokens, plan.drafter.hidden_size),
            }
        place = scratch / "bad_steps" / "step=3"
        save_batches(place, 0, [batch])
        save_weights(place, {name: x for name, x in module.state_dict().items() if name.startswith("drafter.")})
        facts = {
            "step": 3,
            "epoch": 0,
            "found": ["train/loss is not finite"],
            "skipped": True,
            "weights_step": 2,
            "drafters": 1,
        }
        more = {"losses": {"train/loss": math.nan}, "gradient_norms": {"train/gradient_norm": 1.0}, "precision": "32-true"}
        finish(place, {**facts, **more, "module": settings, "target": {"path": "embedded", "dtype": "float32"}, "torch": "2"})
        return place

    def case(self, rng: random.Random, folder: Path) -> Case:
        made = (self._report, self._sweep, self._metrics, self._step, self._archive, self._pace, self._note, self._places)
        return rng.choices(made, (8, 8, 6, 8, 6, 4, 2, 1))[0](rng, folder)

    def _damage(self, files: list[Path], rng: random.Random) -> str:
        """One of them, by its bytes, as text, as JSON, or as an entry of its folder."""
        path = rng.choice(files)
        if rng.random() < 0.12:
            return f"{path.parent.name}/{entry_damaged(path, rng)}"
        data = path.read_bytes()
        kind = rng.choice(("bytes", "torn", "text", "json", "json"))
        if kind == "json" and path.suffix == ".json":
            value, about = json_damaged(json.loads(data), rng)
            data = dumped(value)
        elif kind in ("text", "json") and path.suffix != ".safetensors":
            data, about = text_edited(data, rng)
        elif kind == "torn":
            data, about = torn(data, rng)
        else:
            data, about = bytes_damaged(data, rng, gentle=rng.random() < 0.4)
        path.write_bytes(data)
        return f"{path.parent.name}/{path.name}: {about}"

    # -- reports

    def _report(self, rng: random.Random, folder: Path) -> Case:
        run = folder / "run"
        shutil.copytree(self.run, run, ignore=shutil.ignore_patterns("checkpoints", "report.html", "drafter"))
        files = [run / "summary.json", run / "summary.json", run / "csv" / "metrics.csv", run / ".hydra" / "config.yaml"]
        about = self._damage(files, rng)

        def check(_: Any) -> None:
            page = (run / "report.html").read_text(encoding="utf-8")
            if not page.rstrip().endswith("</html>"):
                raise Wrong("half a report")
            said = json.loads((run / "summary.json").read_bytes())
            tau = said.get("tau_greedy")
            if isinstance(tau, float) and math.isfinite(tau) and f"{tau:.2f}" not in page:
                raise Wrong(f"the report does not say tau_greedy={tau}")

        names = ["summary.json", "metrics.csv", "config.yaml"]
        return Case(f"report: {about}", lambda: _ended(report([str(run)])), names, check, may_write=["run", *_AWAY])

    def _sweep(self, rng: random.Random, folder: Path) -> Case:
        sweep = folder / "sweep"
        shutil.copytree(self.sweep, sweep)
        about = self._damage(sorted(path for path in sweep.rglob("*") if path.is_file() and path.name != "hydra.yaml"), rng)

        def check(_: Any) -> None:
            if not (sweep / "report.html").is_file() or not (sweep / "results.csv").is_file():
                raise Wrong("no report")
            whole = {name: _number(sweep / name / "summary.json") for name in map(str, range(_JOBS))}
            best = sweep / "best.yaml"
            if not best.is_file() and "No job has a <b>None</b>" in (sweep / "report.html").read_text():
                return  # the config says "optimized_metric: None", which is a name in YAML
            if not best.is_file():
                raise Wrong(f"no best.yaml, with {whole}")
            with initialize_config_dir(str(sweep), version_base="1.3"):
                compose("best")
            known = {name: value for name, value in whole.items() if value is not None}
            # One whose job.json is not as it was written may have failed.
            sure = {
                name: value for name, value in known.items() if _same(sweep / name / "job.json", self.sweep / name / "job.json")
            }
            first = best.read_text().splitlines()[0]
            if not any(f"# Job {max(group, key=lambda name: group[name])} of" in first for group in (known, sure)):
                raise Wrong(f"{first}, but there are {whole}")

        names = ["overrides.yaml", "config.yaml", "summary.json", "job.json"]
        return Case(f"sweep: {about}", lambda: _ended(report([str(sweep)])), names, check, may_write=["sweep", *_AWAY])

    def _metrics(self, rng: random.Random, folder: Path) -> Case:
        """A run goes on with the rows of the one that it resumes."""
        run = folder / "run"
        shutil.copytree(self.run, run, ignore=shutil.ignore_patterns("report.html", "drafter"))
        about = self._damage([run / "csv" / "metrics.csv"], rng)

        def act() -> Any:
            logger = MetricsLogger(resumes=run / "checkpoints" / "last.ckpt", save_dir=folder / "again", name="csv", version="")
            with logged("dflash_lit.watching.metrics_file") as said:
                logger.log_metrics({"train/loss": 1.0}, step=99)
                logger.save()
            return _rows(folder / "again" / "csv" / "metrics.csv"), said.getvalue()

        def check(found: Any) -> None:
            rows, said = found
            if not rows or rows[-1].get("step") != "99":
                raise Wrong(f"the new row is not the last: {rows[-1:]}")
            path = run / "csv" / "metrics.csv"
            lines = max(path.read_bytes().count(b"\n") - 1, 0) if path.is_file() else 0
            # Those after the checkpoint are computed again.
            lines -= sum((row.get("step") or "").isdigit() and int(row["step"][:9]) > 4 for row in _rows(path)) if lines else 0
            if len(rows) - 1 < lines and "damaged" not in said:
                raise Wrong(f"{len(rows) - 1} of {lines} rows, and nothing said")

        return Case(f"metrics: {about}", act, ["metrics.csv"], check, may_write=["again", *_AWAY])

    # -- saved steps

    def _step(self, rng: random.Random, folder: Path) -> Case:
        place = folder / "step=3"
        shutil.copytree(self.step, place)
        about = self._damage([*place.iterdir(), place / "step.json"], rng)

        def check(said: Any) -> None:
            if "step " not in said:
                raise Wrong(f"says {said!r}")

        def act() -> str:
            said = io.StringIO()
            with redirect_stdout(said):
                _ended(command(["replay", str(place)]))
            return said.getvalue()

        names = [*(path.name for path in self.step.iterdir()), str(place), "target.path", "--target"]
        return Case(f"step: {about}", act, names, check, may_write=_AWAY)

    # -- for other hosts, and for later runs

    def _archive(self, rng: random.Random, folder: Path) -> Case:
        file = folder / "cache.tar.gz"
        shutil.copy(self.scratch / "cache.tar.gz", file)
        about = self._damage([file], rng)

        def act() -> dict[str, bytes]:
            os.environ["DFLASH_LIT_COMPILE_CACHE"] = str(folder / "compile")
            archive.load(file)
            made = folder / "compile" / cache_key()
            return {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}

        def check(found: Any) -> None:
            kept = self.scratch / "compile" / cache_key()
            if found != {path.relative_to(kept).as_posix(): path.read_bytes() for path in kept.rglob("*") if path.is_file()}:
                raise Wrong("other entries than were saved")

        return Case(f"compile cache: {about}", act, ["cache.tar.gz"], check, may_write=["compile", *_AWAY])

    def _pace(self, rng: random.Random, folder: Path) -> Case:
        file = folder / "pace" / "a.json"
        write_pace(file, Pace(1.0, 0.5, 2.0, 3.0))
        about = self._damage([file], rng)

        def check(found: Any) -> None:
            if found is None:
                return
            if not all(type(value) in (int, float) and 0 <= value < math.inf for value in asdict(found).values()):
                raise Wrong(f"{found}")
            found.total_s(100, 3)

        return Case(f"pace: {about}", lambda: read_pace(file), ["a.json"], check, may_write=_AWAY)

    def _note(self, rng: random.Random, folder: Path) -> Case:
        """Where a job of SLURM's that is started again finds its run."""
        runs = folder / "outputs"
        (runs / ".slurm").mkdir(parents=True)
        wanted = folder / "outputs" / "mine"
        told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_RESTART_COUNT": "1", "DFLASH_LIT_RUNS": str(runs)}
        before = dict(os.environ)
        os.environ.update(told)
        note = _note(sys.argv[1:])
        os.environ.clear()
        os.environ.update(before)
        note.write_text(f"{wanted}\n")
        about = self._damage([note], rng)
        whole = note.is_file() and note.read_bytes() == f"{wanted}\n".encode()

        def act() -> str:
            os.environ.update(told)
            return run_folder("new")

        def check(found: Any) -> None:
            if found == str(wanted) if whole else os.path.isabs(found) and "\0" not in found:
                return
            if not note.is_file() and found == str(runs / "new"):
                return
            raise Wrong(f"the run's folder is {found[:80]!r}")

        return Case(f"note of SLURM's: {about}", act, [note.name], check, may_write=_AWAY)

    # -- where a run is going to write

    def _places(self, rng: random.Random, folder: Path) -> Case:
        """Something is there already: seen before the first step, or no hindrance."""
        run, away = folder / "run", folder / "away"
        run.mkdir()
        place = run / rng.choice(_PLACES)
        place.parent.mkdir(exist_ok=True)
        kind = rng.choice(("file", "folder", "folder with a file", "dangling", "loop", "link to a folder", "pipe"))
        if (
            place.suffix == ".log" or place.parent.name == ".hydra"
        ) and kind == "pipe":  # Hydra itself would wait for somebody to read
            kind = "loop"
        match kind:
            case "file":
                place.write_text("mine")
            case "folder" | "folder with a file":
                place.mkdir()
                if kind != "folder":
                    (place / "notes.txt").write_text("mine")
            case "dangling" | "loop":
                place.symlink_to(place.name if kind == "loop" else folder / "nothing" / "here")
            case "pipe":
                os.mkfifo(place)
            case _:
                away.mkdir()
                place.symlink_to(away)
        work = folder / "work"
        work.mkdir()
        variables = {
            **cleaned(),
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(self.scratch / "cache"),
            "FUZZ_WHOLE": "1",
        }
        command_line = [self.python, str(START), *_EXPORTS, f"hydra.run.dir={run}"]

        def act() -> Any:
            try:
                return outcome(command_line, work, variables, limit_s=90)
            except UserError:
                if (run / "csv" / "metrics.csv").is_file() and "train/loss" in (run / "csv" / "metrics.csv").read_text():
                    raise Wrong("refused after the first step") from None
                raise

        def check(ended: Any) -> None:
            if ended.code:
                raise Wrong(f"exit {ended.code}: {ended.said[-600:]}")
            for name in ("summary.json", "report.html", "checkpoints/last.ckpt", "drafter/config.json"):
                if not (run / name).is_file():
                    raise Wrong(f"no {name}")
            weights = ("drafter", "model.safetensors")
            if run.joinpath(*weights).read_bytes() != self.run.joinpath(*weights).read_bytes():
                raise Wrong("another drafter")

        writes = ["run", "away", "work", "home", "nothing", "log"]
        return Case(f"in the way: {place.relative_to(run)}: {kind}", act, [str(place)], check, may_write=writes, limit_s=120)


_EXPORTS = [word for word in TINY if word != "callbacks.export=null"]
_PLACES = (
    ".hydra", ".hydra/config.yaml", ".rows", "bad_steps", "checkpoints", "checkpoints/last.ckpt", "checkpoints/step=2.ckpt", "csv",
    "csv/metrics.csv", "csv/hparams.yaml", "drafter", "drafter/config.json", "report.html", "summary.json", "train.log", "start.log", "wandb_data",
)  # fmt: skip
_AWAY = (
    "away_summary.json", "away_metrics.csv", "away_config.yaml", "away_job.json", "away_overrides.yaml", "away_a.json", "away_cache.tar.gz",
    "away_step.json", "away_weights.safetensors", "away_batch-0.safetensors",
)  # fmt: skip
"""Where links lead to; made before anything is done."""


def _ended(code: int) -> None:
    if code:
        raise SystemExit(code)


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", errors="replace") as file:
        try:
            return list(csv.DictReader(file))
        except csv.Error:
            return []


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and path.read_bytes() == other.read_bytes()


def _number(path: Path) -> float | None:
    """The metric of a job that can be read."""
    if not path.is_file() or ((job := path.parent / "job.json").exists() and not job.is_file()):
        return None
    try:
        found = json.loads(path.read_text())["val/chain_eal"]
        outcome = json.loads((path.parent / "job.json").read_text()) if (path.parent / "job.json").is_file() else {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    good = type(found) in (int, float) and math.isfinite(found) and outcome.get("state", "done") == "done"
    return float(found) if good else None
