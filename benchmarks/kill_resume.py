"""Kill a run again and again, resume it each time, and compare it with one that nobody killed.

    python benchmarks/kill_resume.py --kills 100 --placement 0+1 0+2 1+1 1+1,2+1

A placement is target ranks + drafter ranks; of several with commas between, each start takes the next, so a run goes on with another
number of target ranks. Every start but the last is ended by SIGKILL of its process groups at a random moment; some are aimed at what is
short: the start, the data phase, warm-up, validation, the writing of a checkpoint, decoding at the end. It is resumed from
``last.ckpt`` in the same folder (with ``--folder new``, in a new one each time, which keeps a best checkpoint of its own). When it is
over, these must be the reference's, to the last bit on a CPU: batches, anchors, features, states of the random generators, losses,
weights and optimizer after every step, validations, ``metrics.csv``, the steps in W&B, the last checkpoint, the exported drafter, the
summary. Prints a line of JSON a placement and one in all; exit code 1 if anything differs or is lost. What is lost in W&B is only
counted with ``--outside``.

``--rtol`` bounds floats relative to the reference's: 0 on a CPU, by default 0.02 on a GPU, which is that of the losses of two runs whose sums are
of another order over some dozen steps. What is no float must be equal there, too.

Each start is forked from this process, which has imported everything, as torchrun would start it; ``--fresh`` starts new interpreters.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import gc
import json
import math
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for GPUs must not begin to use one: this process forks

import torch  # noqa: E402
from kill_record import START  # noqa: E402

from benchmarks.layouts import layout, layout_overrides, named  # noqa: E402
from dflash_lit.checkpoints.file import load  # noqa: E402
from dflash_lit.placement.layout import Layout  # noqa: E402
from dflash_lit.trained import SUMMARY, has_ended  # noqa: E402

AIMS = {"start": 2, "data": 2, "warm-up": 2, "training": 6, "validation": 3, "checkpoint": 4, "after training": 2}
"""What a kill is aimed at, and how often; what it has met with is looked up afterwards."""
OVERRIDES = [
    "debug=fast",
    "trainer.threads=1",
    "trainer.max_steps={steps}",
    "trainer.val_every=4",
    "trainer.accumulate_grad_batches=2",
    # A dozen rows: an epoch is some six steps of one drafter, three of two.
    "data.train_prompts=22",
    "data.val_prompts=4",
    "data.prompt_tokens=32",
    "data.response_tokens=40",
    "data.rows_per_batch=1",
    "data.row_tokens=128",
    "drafter.anchors=8",
    "evaluation.tree_budgets=[16]",
    "data.responses_per_batch=32",
    "evaluation.prompts=1",
    "evaluation.temperatures=[]",
    "evaluation.max_new_tokens=8",
    "callbacks.acceptance.prompts=1",
    "callbacks.acceptance.max_new_tokens=6",
    "callbacks.acceptance.budgets=[4]",
    "callbacks.wandb_run.code=false",
    "callbacks.wandb_run.pictures=false",
    "+callbacks.record._target_=kill_record.Record",
    "+callbacks.record.folder={folder}/seen",
    # Beside the checkpoint after each validation one inside an epoch, by the same name.
    "+callbacks.often._target_=callbacks.checkpoint.SafeCheckpoint",
    "+callbacks.often.dirpath={folder}/checkpoints",
    "+callbacks.often.filename=last",
    "+callbacks.often.enable_version_counter=false",
    "+callbacks.often.every_n_train_steps=3",
]
WANTED = ("train/", "val/", "acceptance/", "lr-")
"""Metrics that have to be the same; the others are times and memory."""
TIMES = ("wall_s", "phases", "peak_rss", "tokens_per_s", "export_dir", "report", "responses_from_cache")


def in_turn(text: str) -> list[Layout]:
    """Layouts with commas between, of which the starts of a run take one after the other."""
    found = [layout(one) for one in text.split(",")]
    if len({one.drafters for one in found}) > 1 or len({bool(one.targets) for one in found}) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a run goes on with as many drafters as it had, and stays split or not")
    return found


class Running:
    """One start of a run: its processes, and what is seen of them from outside.

    Args:
        folder: of the run.
        number: which start it is.
        fresh: new interpreters, as by hand, instead of forked processes.
    """

    def __init__(self, folder: Path, number: int, placement: Layout, overrides: list[str], *, cache: Path, fresh: bool) -> None:
        self.folder, self.number = folder, number
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"log.{number}"
        variables = {
            **{k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "WANDB_MODE")},
            "XDG_CACHE_HOME": str(cache),
            "HOME": str(cache),  # no key in a ~/.netrc
            "WANDB_SILENT": "true",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "benchmarks"))),
            START: str(number),
        }
        arguments = ["train.py", *overrides, *layout_overrides(placement), f"hydra.run.dir={folder}"]
        world = placement.targets + placement.drafters
        self.pids: list[int] = []
        self._lines: list[str] = []
        self._ended: dict[int, int] = {}
        if fresh:
            with open(self.log, "ab") as log:
                started = subprocess.Popen(
                    [sys.executable, *arguments], cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
                )
            started.returncode = 0  # it is waited for here
            self.pids = [started.pid]
            return
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        for rank in range(world):
            told = {}
            if world > 1:
                told = {"TORCHELASTIC_RUN_ID": "kill_resume", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                told |= {"GROUP_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
                told |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            self.pids.append(_fork(arguments, {**variables, **told}, self.log, rank))

    def running(self) -> bool:
        """Whether any of its ranks is."""
        for pid in self.pids:
            if pid not in self._ended:
                with contextlib.suppress(ChildProcessError):
                    got, status = os.waitpid(pid, os.WNOHANG)
                    if got:
                        self._ended[pid] = os.waitstatus_to_exitcode(status)
        return len(self._ended) < len(self.pids)

    @property
    def code(self) -> int:
        """Of rank 0, which speaks for the run."""
        return self._ended[self.pids[0]]

    def kill(self, *, outside: bool) -> None:
        """All processes of its ranks' groups; ``outside``: and those that have left them, which is W&B's."""
        everyone = [pid for first in self.pids for pid in _descendants(first)] if outside else []
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.running():
            time.sleep(0.002)

    def wait(self, until: Callable[[], bool], limit_s: float = 900.0, every_s: float = 0.01) -> bool:
        """Whether it came to that before it ended."""
        deadline = time.monotonic() + limit_s
        while self.running():
            if until():
                return True
            if time.monotonic() > deadline:
                self.kill(outside=True)
                raise TimeoutError(f"{self.log}: nothing for {limit_s:.0f} s")
            time.sleep(every_s)
        return False

    def said(self, phase: str) -> bool:
        """Whether rank 0 has begun a phase of the job."""
        return (
            re.search(rf"^{phase}$", self.log.read_text(errors="replace"), re.MULTILINE) is not None
            if self.log.exists()
            else False
        )

    def count(self, kind: str) -> int:
        """Lines of a kind that rank 0 has recorded in this start."""
        path = self.folder / "seen" / f"0.{self.number}.jsonl"
        return path.read_bytes().count(f'{{"kind": "{kind}"'.encode()) if path.exists() else 0

    def partials(self) -> set[str]:
        """Checkpoints being written."""
        with contextlib.suppress(FileNotFoundError):
            return {entry.name for entry in os.scandir(self.folder / "checkpoints") if entry.name.endswith(".partial")}
        return set()

    def phase(self) -> str:
        """Where the kill has met it."""
        if self.partials():
            return "checkpoint"
        path = self.folder / "seen" / f"0.{self.number}.jsonl"
        kinds = [line["kind"] for line in _whole(path)]
        last = next((kind for kind in reversed(kinds) if kind != "save"), "")
        if last in ("", "setup"):
            return "warm-up" if self.said("train") else "data" if self.said("data") else "start"
        if self.said("decode"):
            return "after training"
        return "after training" if last == "end" else "validation" if last.startswith("val") and last != "val" else "training"


def _fork(arguments: list[str], variables: dict[str, str], log: Path, rank: int) -> int:
    """A process that does what an interpreter would with these arguments, but import."""
    if pid := os.fork():
        with contextlib.suppress(OSError):  # it may have done so
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(ROOT)
        from lightning.pytorch.utilities import rank_zero_only

        rank_zero_only.rank = rank  # read from the environment while importing
        random.seed()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # temporary folders are those of the process that has imported
            if (alive := finalizer.peek()) is not None and isinstance(alive[0], tempfile.TemporaryDirectory):
                atexit.unregister(alive[0].cleanup)
        sys.argv = arguments
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _descendants(pid: int) -> Iterator[int]:
    """A process and all that it and its children have started, those first that start others."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _descendants(int(child))


# -- killing


@dataclass
class Bound:
    """How far floats may be from the reference's, and how far they were.

    Attributes:
        rtol: relative to the larger of two; of tensors to the largest entry. 0: equal to the last bit.
        largest, where: the largest difference that was seen.
    """

    rtol: float
    largest: float = 0.0
    where: str = ""

    def __bool__(self) -> bool:
        return self.rtol > 0

    def keeps(self, where: str, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two are near enough, which is remembered."""
        if torch.equal(one, other):
            return True
        if not self or one.shape != other.shape or not one.is_floating_point():
            return False
        both = torch.stack([one.double(), other.double()])
        apart = float((both[0] - both[1]).abs().max() / both.abs().max())
        if not apart <= self.largest:  # nor NaN
            self.largest, self.where = apart, where
        return apart <= self.rtol


@dataclass
class Outcome:
    """What became of some runs that were killed."""

    kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    runs: int = 0
    steps_again: int = 0
    wandb_lost: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.kills += other.kills
        self.phases += other.phases
        self.resumes += other.resumes
        self.runs += other.runs
        self.steps_again += other.steps_again
        self.wandb_lost += other.wandb_lost
        self.differences += other.differences

    def line(self, **more: Any) -> str:
        facts = {"kills": self.kills, "phases": dict(self.phases), "resumes": self.resumes, "runs": self.runs}
        return json.dumps(
            {
                **more,
                **facts,
                "steps_computed_again": self.steps_again,
                "wandb_lost": self.wandb_lost,
                "differences": self.differences[:20],
            }
        )


def aim(running: Running, at: str, rng: random.Random) -> bool:
    """Wait for a random moment of a kind; whether the run has come to it."""
    if at == "start":
        until, rest = (lambda: True), rng.uniform(0, 1.5)
    elif at == "data":
        until, rest = (lambda: running.said("data")), rng.uniform(0, 0.6)
    elif at == "warm-up":
        until, rest = (lambda: running.count("setup") > 0), rng.uniform(0, 0.5)
    elif at == "training":
        batches = rng.randint(1, 14)
        until, rest = (lambda: running.count("batch") >= batches), rng.uniform(0, 0.15)
    elif at == "validation":
        times = rng.randint(1, 2)
        until, rest = (lambda: running.count("validation") >= times), rng.uniform(0, 0.4)
    elif at == "after training":
        until, rest = (lambda: running.count("end") > 0 or running.said("decode")), rng.uniform(0, 1.5)
    else:
        seen: set[str] = set()
        files = rng.randint(1, 3)

        def until() -> bool:
            nonlocal seen
            seen |= running.partials()
            return len(seen) >= files

        rest = rng.uniform(0, 0.004)
    often = 0.001 if at == "checkpoint" else 0.01
    if not running.wait(until, every_s=often):
        return False
    deadline = time.monotonic() + rest
    return running.wait(lambda: time.monotonic() >= deadline, every_s=often)


class Killer:
    """Runs of one placement, killed and compared with their reference.

    Args:
        placements: taken in turn by the starts of a run.
        work: folder for all of it.
        kills: how many in all.
        same: resume in the run's own folder.
        outside: kill W&B's service, too.
    """

    def __init__(
        self,
        placements: list[Layout],
        work: Path,
        *,
        kills: int,
        rng: random.Random,
        steps: int,
        rtol: float,
        same: bool = True,
        outside: bool = False,
        fresh: bool = False,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.placements, self.work, self.kills, self.rng, self.steps = placements, work, kills, rng, steps
        self.bound = Bound(rtol)
        self.same, self.outside, self.fresh, self.extra = same, outside, fresh, extra
        self.outcome = Outcome()

    def overrides(self, folder: Path) -> list[str]:
        return [*(text.format(steps=self.steps, folder=folder) for text in OVERRIDES), *self.extra]

    def reference(self) -> Path:
        """The folder of a run that nobody kills."""
        folder = self.work / "reference"
        running = Running(folder, 0, self.placements[0], self.overrides(folder), cache=self.work / "cache", fresh=self.fresh)
        running.wait(lambda: False)
        if running.code:
            raise RuntimeError(f"the reference failed: {running.log.read_text()[-3000:]}")
        return folder

    def run(self) -> Outcome:
        """Kill as often as asked for, in as many runs as that takes."""
        reference = self.reference()
        while self.outcome.kills < self.kills:
            before = self.outcome.kills
            name = f"run{self.outcome.runs}"
            folders, abandoned = self.one(self.work / name)
            found = []
            if folders:
                found = [f"{name}: {text}" for text in compare(reference, folders, self.bound, self.outcome, abandoned)]
            if self.outside:
                lost = [text for text in found if ": W&B: " in text and text.endswith(" is lost")]
                self.outcome.wandb_lost += len(lost)
                found = [text for text in found if text not in lost]
            self.outcome.differences += found
            self.outcome.runs += 1
            print(
                f"  {name}: {self.outcome.kills - before} kills, {len(found)} differences {found[:3] or ''}",
                file=sys.stderr,
                flush=True,
            )
        return self.outcome

    def one(self, name: Path) -> tuple[list[Path], set[str]]:
        """A run from its first start to its end.

        Returns:
            the folders of its starts, or of one, if it is resumed in the same; none if it failed; and the W&B runs of starts that came
            to no checkpoint.
        """
        folder, folders, number = name, [], 0
        abandoned: set[str] = set()
        while True:
            if not self.same:
                folder = name.with_name(f"{name.name}.{number}")
            folders += [folder] if folder not in folders else []
            again = resumable(folders)
            begins = load(again, mmap=True)["global_step"] if again else 0
            resume = [f"ckpt_path='{again}'"] if again else []
            if number:
                self.outcome.resumes += 1
            running = Running(
                folder,
                number,
                self.placements[number % len(self.placements)],
                [*self.overrides(folder), *resume],
                cache=self.work / f"cache_{name.name}",
                fresh=self.fresh,
            )
            at = self.rng.choices(list(AIMS), list(AIMS.values()))[0]
            met = aim(running, at, self.rng) if self.outcome.kills < self.kills else running.wait(lambda: False)
            if met:
                running.kill(outside=self.outside)
                self.outcome.kills += 1
                self.outcome.phases[running.phase()] += 1
            elif running.code:
                text = running.log.read_text()[-1500:]
                self.outcome.differences.append(f"{folder.name}, start {number}: exit code {running.code}: {text}")
                return [], abandoned
            began = _first(folder / "seen" / f"0.{number}.jsonl", "begin")
            if began is not None and began != begins:
                self.outcome.differences.append(
                    f"{folder.name}, start {number}: began at step {began}, its checkpoint is of {begins}"
                )
            if not met or has_ended(folder):
                return folders, abandoned
            if not resumable(folders):
                abandoned |= {path.stem.removeprefix("run-") for path in folder.glob("wandb/offline-run-*/run-*.wandb")}
            number += 1


def resumable(folders: list[Path]) -> Path | None:
    """The newest last checkpoint, if there is one."""
    found = [path for folder in reversed(folders) if (path := folder / "checkpoints" / "last.ckpt").exists()]
    return found[0] if found else None


def _first(path: Path, kind: str) -> int | None:
    return next((line["step"] for line in _whole(path) if line["kind"] == kind), None)


def _whole(path: Path) -> list[dict[str, Any]]:
    """Recorded lines; a killed process may have written a part of its last, up to a page's end."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


# -- comparing


def compare(reference: Path, folders: list[Path], bound: Bound, outcome: Outcome, abandoned: set[str]) -> list[str]:
    """What a killed run does not have in common with its reference; empty if all is the same.

    Args:
        abandoned: ids of W&B runs that were killed before their first checkpoint.
    """
    last = folders[-1]
    told = [
        *_recorded(reference, folders, bound, outcome),
        *_checkpoints(
            [reference / "checkpoints" / "last.ckpt", *filter(None, [resumable(folders)])], bound, moved=len(folders) > 1
        ),
        *_logged("metrics.csv", _csv(reference), _csv(last), bound),
        *_wandb(reference, folders, bound, abandoned),
    ]
    told += _differ("summary", *(_facts(folder / SUMMARY) for folder in (reference, last)), bound)
    exported, ours = ((folder / "drafter" / "model.safetensors").read_bytes() for folder in (reference, last))
    if not bound and exported != ours:
        told.append("the exported drafter")
    if not (last / "report.html").is_file():
        told.append("report.html is lost")
    return told


def _recorded(reference: Path, folders: list[Path], bound: Bound, outcome: Outcome) -> Iterator[str]:
    """Batches, anchors, features, generators, losses, weights and optimizer of every step, and validations, of each rank."""
    for path in sorted((reference / "seen").iterdir()):
        rank = path.name.split(".")[0]
        whole = {_key(line): line for line in _lines(path)}
        found: dict[str, dict[str, Any]] = {}
        for file in (file for folder in folders for file in (folder / "seen").glob(f"{rank}.*.jsonl")):
            for line in _lines(file):
                key = _key(line)
                if key not in whole:
                    yield f"rank {rank}, {file.name}: {key} is not in the reference"
                    continue
                outcome.steps_again += key in found and line["kind"] == "step" and rank == "0"
                found[key] = line
                yield from _differ(f"rank {rank}, {file.name}, {key}", whole[key], line, bound)
        yield from (f"rank {rank}: {key} is lost" for key in whole if key not in found)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Those that say what was computed."""
    return [line for line in _whole(path) if line["kind"] in ("batch", "loss", "step", "val_batch", "val")]


def _key(line: dict[str, Any]) -> str:
    place = f", batch {line['place']}" if "place" in line else ""
    return f"{line['kind']} of step {line['step']}{place}"


def _differ(where: str, one: Any, other: Any, bound: Bound) -> Iterator[str]:
    """Paths into nested values at which they differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            if key == "exact" and bound:
                continue
            if key not in one or key not in other:
                yield f"{where}.{key} is in one only"
            else:
                yield from _differ(f"{where}.{key}", one[key], other[key], bound)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differ(f"{where}[{place}]", *pair, bound)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not bound.keeps(where, one, other):
            yield f"{where}: tensors differ"
    elif isinstance(one, float) and isinstance(other, float):
        pair = [torch.tensor(value, dtype=torch.float64) for value in (one, other)]
        if not (one == other or (math.isnan(one) and math.isnan(other)) or bound.keeps(where, *pair)):
            yield f"{where}: {one!r} and {other!r}"
    elif one != other:
        yield f"{where}: {str(one)[:60]!r} and {str(other)[:60]!r}"


def _checkpoints(paths: list[Path], bound: Bound, *, moved: bool) -> Iterator[str]:
    """The reference's and the run's last one.

    Args:
        moved: the run went on in another folder, where it keeps a best of its own.
    """
    saved = [load(path) for path in paths]
    for checkpoint, path in zip(saved, paths, strict=True):
        checkpoint.pop("recent_metrics")  # of the last seconds, however many steps those were
        latest = checkpoint["latest_metrics"]
        checkpoint["latest_metrics"] = {name: value for name, value in latest.items() if name.startswith(WANTED)}
        # Names of folders and of the W&B run are each run's own.
        text = json.dumps(checkpoint["callbacks"], default=_plain).replace(str(path.parent.parent), "RUN")
        checkpoint["callbacks"] = states = json.loads(re.sub(r'("wandb_run_id": )"\w+"', r'\1"RUN"', text))
        for best in (
            ("best_k_models", "best_model_path", "best_model_score", "kth_best_model_path", "kth_value") if moved else ()
        ):
            for state in states.values():
                state.pop(best, None)
    yield from _differ("last.ckpt", saved[0], saved[1], bound) if len(saved) > 1 else ["last.ckpt is lost"]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)


Rows = list[tuple[int, str, float]]
"""(step, metric, value) in the order in which they were logged"""


def _csv(folder: Path) -> Rows:
    path = folder / "csv" / "metrics.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    return [(int(row["step"]), name, float(row[name])) for row in rows for name in row if row[name] and name.startswith(WANTED)]


def _logged(where: str, one: Rows, other: Rows, bound: Bound, *, again: bool = False) -> Iterator[str]:
    """Every value of every step as often as in the reference; ``again``: equal values may come again."""
    whole = {row[:2]: row[2] for row in one}
    for step, name, value in other:
        if (step, name) not in whole:
            yield f"{where}: {name} of step {step} is not in the reference"
        else:
            yield from _differ(f"{where}, {name} of step {step}", whole[step, name], value, bound)
    wanted, found = (Counter(row[:2] for row in rows) for rows in (one, other))
    yield from (f"{where}: {name} of step {step} is lost" for step, name in wanted if not found[step, name])
    if not again:
        yield from (
            f"{where}: {name} of step {step} is doubled" for step, name in wanted if found[step, name] > wanted[step, name]
        )


def _wandb(reference: Path, folders: list[Path], bound: Bound, abandoned: set[str]) -> Iterator[str]:
    """All parts of one run together; none doubled within a part. Nothing with ``--set logger=csv``."""
    if not (reference / "wandb").exists():
        return
    parts = [part for folder in folders for part in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
    (whole,) = reference.glob("wandb/offline-run-*/run-*.wandb")
    # A start without a checkpoint to go on from is a run of its own; it goes no further than that.
    read = [history for part in parts if (history := _history(part))[0] not in abandoned]
    ids = {run for run, _ in read if run}  # a part may be killed before anything of it is written
    if len(ids) > 1:
        yield f"W&B: {len(ids)} runs, not one: {sorted(ids)}"
    wanted = _history(whole)[1]
    for _, rows in read:
        yield from (text for text in _logged("W&B, one part", wanted, rows, bound) if text.endswith("doubled"))
    yield from _logged("W&B", wanted, [row for _, rows in read for row in rows], bound, again=True)


def _history(part: Path) -> tuple[str, Rows]:
    """Run id and metrics of one part; of a killed one as far as it was written."""
    done = subprocess.run(
        ["wandb", "leet", "inspect", "--json", str(part)], capture_output=True, text=True, timeout=120, check=False
    )
    rows: Rows = []
    run = ""
    for text in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(text)
            run = record["run"]["run_id"] if record["type"] == "run" else run
            item = record["history"]["item"] if record["type"] == "history" else {}
            rows += [
                (item["trainer/global_step"], name, float(value))
                for name, value in item.items()
                if name.startswith(WANTED) and isinstance(value, int | float)
            ]
    return run, rows


def _facts(path: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith(TIMES)}


# -- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="in all, shared by the placements")
    parser.add_argument("--placement", nargs="+", type=in_turn, default=[in_turn("0+1")], metavar="N+M[,N+M]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps of a run")
    parser.add_argument("--rtol", type=float, help="of floats; 0 on a CPU, 0.02 on a GPU")
    parser.add_argument("--folder", choices=["same", "new"], default="same", help="in which it is resumed")
    parser.add_argument(
        "--outside", action="store_true", help="kill W&B's service, too, which may take up to 15 s of its own file along"
    )
    parser.add_argument("--fresh", action="store_true", help="new interpreters")
    parser.add_argument("--work", type=Path, help="keep everything here")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="more of train.py's, such as logger=csv: then W&B is not compared",
    )
    options = parser.parse_args()
    rtol = (0.02 if torch.cuda.is_available() else 0.0) if options.rtol is None else options.rtol
    if not options.fresh:
        import_all()
    everything = Outcome()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for place, placements in enumerate(options.placement):
            count = options.kills // len(options.placement) + (place < options.kills % len(options.placement))
            name = ",".join(map(named, placements))
            killer = Killer(
                placements,
                (work / name.replace(",", "_")).absolute(),  # a comma is a list to Hydra
                kills=count,
                rng=random.Random(f"{options.seed} {name}"),
                steps=options.steps,
                rtol=rtol,
                same=options.folder == "same",
                outside=options.outside,
                fresh=options.fresh,
                extra=tuple(options.set),
            )
            began = time.monotonic()
            outcome = killer.run()
            seen = {"largest_difference": killer.bound.largest, "of": killer.bound.where} if rtol else {}
            print(outcome.line(placement=name, seconds=round(time.monotonic() - began), **seen), flush=True)
            everything.add(outcome)
    print(everything.line(placement="all", rtol=rtol))
    return 1 if everything.differences else 0


def import_all() -> None:
    """What a run imports; nothing that starts threads or looks at devices."""
    import importlib

    for name in (
        "callbacks.acceptance callbacks.checkpoint callbacks.compile_warmup callbacks.export callbacks.finite_guard "
        "callbacks.interrupt callbacks.memory callbacks.progress callbacks.throughput callbacks.wandb_run dflash_lit.ranks "
        "hydra._internal.utils hydra.core.global_hydra lightning.pytorch.loggers transformers.generation.utils "
        "transformers.models.qwen3.modeling_qwen3 torch._dynamo"
    ).split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # freeing all that was imported takes seconds
