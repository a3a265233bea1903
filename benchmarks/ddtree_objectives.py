"""Which objective makes the longest draft trees: the same drafter trained with each, from one start, on the same texts.

    python benchmarks/ddtree_objectives.py run --preset embedded --work WORK --out OUT      # on a CPU
    python benchmarks/ddtree_objectives.py run --preset built --work WORK --out OUT         # trains a target, on GPUs
    python benchmarks/ddtree_objectives.py table OUT/records.jsonl

``run`` goes on where an earlier one with the same WORK ended, and stops in time for ``--minutes``. Its stages are commands of their
own: build-target, prompts, respond, pack, work. OUT holds the raw records, the table and the logs; WORK target, texts and drafters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from objectives.settings import PRESETS, Job, Settings, jobs

Record = dict[str, Any]
SCRIPT = Path(__file__).resolve()


# -- records


def append(path: Path, record: Record) -> None:
    """One line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def all_records(folder: Path) -> list[Record]:
    from objectives.statistics import read_records

    return read_records(sorted((folder / "records").glob("*.jsonl")))


# -- a worker


def claim(folder: Path, job: Job) -> bool:
    """Whether this process is the first to ask for the job."""
    place = folder / "jobs" / job.name
    place.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(place / "claim", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def work(folder: Path, worker: int, deadline: float) -> int:
    """Take jobs until there is none, or the time is over; 1 if one failed, 3 if the device did."""
    import torch
    from objectives.training import Late, Workbench

    settings = Settings.load(folder)
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        from dflash_lit.compilation.cache import use_cache

        use_cache()
    began = time.time()
    bench = Workbench.load(settings, folder, deadline)
    print(f"worker {worker}: {bench.device}, ready after {time.time() - began:.1f} s", flush=True)
    records = folder / "records" / f"worker-{worker}.jsonl"
    keys = ("regime", "objective", "seed", "temperature", "budget")
    failed = 0
    while True:
        if time.time() > deadline:
            break
        # Asked anew each time: a job may have become possible.
        waiting = False
        for job in jobs(settings):
            place = folder / "jobs" / job.name
            if (place / "claim").exists():
                continue
            if job.after is not None and not (folder / "jobs" / job.after / "drafter").is_dir():
                waiting = waiting or not (folder / "jobs" / job.after / "failed").exists()
                continue
            if claim(folder, job):
                break
        else:
            if not waiting:
                break
            time.sleep(1)
            continue
        done = {tuple(r[key] for key in keys) for r in all_records(folder) if r["kind"] == "decoded"}
        began = time.time()
        seconds: Record = {}

        def write(record: Record, seconds: Record = seconds) -> None:
            append(records, record)
            for name in ("train_seconds", "decode_seconds"):
                seconds[name] = seconds.get(name, 0.0) + record.get(name, 0.0)

        try:
            bench.run(job, write, done)
        except Late:
            print(f"{job.name}: no time left", flush=True)
            break
        except Exception as error:
            failed += 1
            traceback.print_exc()
            (place / "failed").write_text(traceback.format_exc())
            append(records, {"kind": "failed", "job": job.name, "why": f"{type(error).__name__}: {error}"})
            if bench.device.type == "cuda" and "CUDA" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                return 3  # nothing works in this process from here on
            continue
        print(f"{job.name}: {time.time() - began:.1f} s, {seconds}", flush=True)
    return 1 if failed else 0


# -- the driver


class Run:
    """Starts the stages in processes of their own, each with a log, and gathers what they record."""

    def __init__(self, settings: Settings, folder: Path, out: Path, deadline: float, gpus: int, workers: int) -> None:
        self.settings, self.folder, self.out, self.deadline = settings, folder, out, deadline
        self.gpus, self.workers = gpus, workers
        self.began = time.time()
        self.shown = 0
        for place in (folder, out / "logs"):
            place.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def start(
        self, name: str, arguments: Sequence[str], gpu: int | None = None, threads: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command of this script; its output goes to ``OUT/logs/NAME.log``."""
        environment = dict(os.environ)
        if gpu is not None and self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        environment.setdefault("DFLASH_LIT_COMPILE_CACHE", str((self.folder / "compile").resolve()))
        environment.setdefault("TOKENIZERS_PARALLELISM", "true")
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)  # a pool a process, and there are several
        with (self.out / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments, "--work", str(self.folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        """Until all have ended.

        Raises:
            SystemExit: if one failed, or the time is over.
        """
        try:
            while any(process.poll() is None for process in running.values()):
                if time.time() > self.deadline:
                    raise SystemExit(f"no time left for {', '.join(running)}")
                time.sleep(0.2)
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.kill()
        for name, process in running.items():
            if process.returncode:
                raise SystemExit(f"{name} failed with {process.returncode}; the end of its log:\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """The end of a log."""
        return "\n".join((self.out / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-25:])

    def texts(self) -> None:
        """The target and the texts, as far as they are not there yet."""
        folder, gpus = self.folder, max(self.gpus, 1)
        if not (folder / "prompts.done").exists():
            command = "prompts" if self.settings.target else "build-target"
            self.say(command)
            running = {command: self.start(command, [command], 0)}
            if self.gpus > 1 and not self.settings.target:  # meanwhile another GPU fills the compile cache
                warm = self.start("warm-up", ["warm-up"], 1, threads=4)
            else:
                warm = None
            self.wait(running)
            (folder / "prompts.done").touch()
            if warm is not None:
                state = warm.poll()
                self.say(
                    {None: "warm-up: not ready", 0: "warm-up: done"}.get(state, f"warm-up: FAILED\n{self.tail('warm-up')}")
                )
                if state is None:
                    warm.kill()
            if (folder / "target.json").exists():
                self.say((folder / "target.json").read_text().replace("\n", " "))
        if not (folder / "rows.done").exists():
            self.say("responses")
            for old in folder.glob("responses-*.npz"):
                old.unlink()
            shutil.rmtree(folder / "rows", ignore_errors=True)
            batches = -(-(self.settings.train_prompts + self.settings.held_prompts) // self.settings.responses_per_batch)
            parts = min(2 * gpus if self.gpus else 1, batches)
            self.wait(
                {
                    f"respond-{part}": self.start(
                        f"respond-{part}",
                        ["respond", "--part", f"{part}/{parts}"],
                        part % gpus,
                        threads=4 if self.gpus else None,
                    )
                    for part in range(parts)
                }
            )
            self.say("rows")
            self.wait({"pack": self.start("pack", ["pack"], 0)})
            (folder / "rows.done").touch()
            self.say((folder / "texts.json").read_text().strip())

    def gather(self) -> list[Record]:
        """All records so far into ``OUT/records.jsonl``; a line for each new drafter or decoding."""
        records = all_records(self.folder)
        if len(records) == self.shown:
            return records
        for record in records[self.shown :]:
            # Files of several workers: what is new is not always at the end, so this is only roughly a progress.
            if record["kind"] == "failed":
                self.say(f"FAILED {record['job']}: {record['why'][:200]}")
        self.shown = len(records)
        trained = sum(r["kind"] == "trained" for r in records)
        decoded = sum(r["kind"] == "decoded" for r in records)
        self.say(f"{trained} drafters trained, {decoded} decodings, of {len(jobs(self.settings))} drafters")
        temporary = self.out / "records.jsonl.tmp"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        os.replace(temporary, self.out / "records.jsonl")
        return records

    def setup(self) -> None:
        """The first record: what was compared, and on what."""
        import torch

        from dflash_lit.target.frozen import FrozenTarget, TargetInfo

        path = self.settings.target or str(self.folder / "target")
        target = FrozenTarget.load(TargetInfo.load(path), device="cpu")
        record: Record = {
            "kind": "setup",
            "name": self.settings.target or "built",
            "target": target.fingerprint,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "settings": json.loads((self.folder / "settings.json").read_text()),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if self.gpus else "cpu",
        }
        for name in ("target.json", "texts.json"):
            if (self.folder / name).exists():
                record |= json.loads((self.folder / name).read_text())
        append(self.folder / "records" / "0-setup.jsonl", record)

    def drafters(self) -> None:
        """All jobs, by several workers a GPU."""
        for place in (self.folder / "jobs").glob("*"):
            if not (place / "done").exists():
                for name in ("claim", "failed"):
                    (place / name).unlink(missing_ok=True)
        count = max(self.gpus, 1) * self.workers
        starts = [0] * count

        def begin(worker: int) -> subprocess.Popen[bytes]:
            starts[worker] += 1
            # Earlier than the end of all: whoever stops has to save what it is at.
            arguments = ["work", "--worker", str(worker), "--deadline", repr(self.deadline - 6)]
            return self.start(f"worker-{worker}", arguments, worker % max(self.gpus, 1), threads=4 if self.gpus else None)

        running = [begin(worker) for worker in range(count)]
        last = time.time()
        try:
            while any(process.poll() is None for process in running):
                if time.time() > self.deadline + 3:
                    self.say("the time is over")
                    break
                for worker, process in enumerate(running):
                    # A failed job is recorded and not tried again; for a process that died another one takes up the others.
                    if process.poll() not in (None, 0, 1) and starts[worker] < 3 and time.time() + 60 < self.deadline:
                        self.say(f"worker {worker} ended with {process.returncode}: started again")
                        running[worker] = begin(worker)
                if time.time() - last > 10:
                    self.gather()
                    last = time.time()
                time.sleep(0.5)
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
            for process in running:
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    process.kill()

    def finish(self) -> int:
        """The table; 1 if a job failed."""
        from objectives.statistics import markdown

        records = self.gather()
        for name in ("settings.json", "target.json", "texts.json"):
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, self.out / name)
        (self.out / "table.md").write_text(markdown(records), encoding="utf-8")
        left = [job.name for job in jobs(self.settings) if not (self.folder / "jobs" / job.name / "done").exists()]
        self.say(f"{len(left)} drafters left" + (f": {', '.join(left[:5])}" if left else ""))
        return int(any((self.folder / "jobs" / job.name / "failed").exists() for job in jobs(self.settings)))


def _stop(*_: object) -> None:
    raise SystemExit("stopped")  # and so the processes that were started end, too


def run(args: argparse.Namespace) -> int:
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    import torch

    deadline = time.time() + args.minutes * 60
    folder, out = Path(args.work), Path(args.out)
    if (folder / "settings.json").exists():
        settings = Settings.load(folder)
    else:
        settings = PRESETS[args.preset]
        changes: Record = {}
        sizes = (
            "steps",
            "warm_steps",
            "continued_steps",
            "seeds",
            "optimizer",
            "lr",
            "train_prompts",
            "held_prompts",
            "decode_prompts",
        )
        for name in sizes:
            if getattr(args, name) is not None:
                changes[name] = getattr(args, name)
        for name in ("objectives", "continued", "more", "roots"):
            if getattr(args, name) is not None:
                changes[name] = tuple(getattr(args, name))
        if args.target_minutes is not None:
            changes["recipe"] = {**settings.recipe, "minutes": args.target_minutes}
        settings = replace(settings, **changes)
        settings.save(folder)
    gpus = torch.cuda.device_count()
    one = Run(settings, folder, out, deadline, gpus, args.workers or (4 if gpus else 1))
    one.texts()
    if not (folder / "records" / "0-setup.jsonl").exists():
        one.setup()
    one.say(f"{len(jobs(settings))} drafters, {one.workers} workers on each of {max(gpus, 1)} devices")
    one.drafters()
    return one.finish()


# -- commands


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    everything = commands.add_parser("run", help="all stages")
    everything.add_argument("--preset", choices=PRESETS, default="built")
    everything.add_argument("--out", required=True, help="folder of records, table and logs")
    everything.add_argument("--minutes", type=float, default=10_000.0, help="when to stop")
    everything.add_argument("--workers", type=int, help="processes a GPU (default: 4; on a CPU 1 in all)")
    everything.add_argument("--target-minutes", type=float, help="training time of a target that is built")
    for name, kind in (("steps", int), ("warm-steps", int), ("continued-steps", int), ("seeds", int), ("optimizer", str)):
        everything.add_argument(f"--{name}", type=kind)
    for name, kind in (("lr", float), ("train-prompts", int), ("held-prompts", int), ("decode-prompts", int)):
        everything.add_argument(f"--{name}", type=kind)
    for name in ("objectives", "continued", "more", "roots"):
        everything.add_argument(f"--{name}", nargs="*")

    for name in ("build-target", "prompts", "pack", "warm-up"):
        commands.add_parser(name, help="a stage of run")
    part = commands.add_parser("respond", help="a stage of run")
    part.add_argument("--part", default="0/1", help="which batches, such as 0/2")
    worker = commands.add_parser("work", help="a stage of run: train and decode")
    worker.add_argument("--worker", type=int, default=0)
    worker.add_argument("--deadline", type=float, default=float("inf"), help="seconds since 1970")
    for command in commands.choices.values():
        command.add_argument("--work", required=True, help="folder of target, texts and drafters")

    table = commands.add_parser("table", help="the table from raw records")
    table.add_argument("records", nargs="+", type=Path)
    table.add_argument("--without-loops", action="store_true", help="leave out prompts whose response got stuck in a cycle")

    args = parser.parse_args(argv)
    if args.command == "table":
        from objectives.statistics import markdown, read_records

        print(markdown(read_records(args.records), loops=not args.without_loops))
        return 0
    if args.command == "run":
        return run(args)
    folder = Path(args.work)
    if args.command == "work":
        return work(folder, args.worker, args.deadline)

    from objectives import texts

    settings = Settings.load(folder)
    if args.command == "build-target":
        texts.build_target(settings, folder)
    elif args.command == "prompts":
        texts.choose_prompts(settings, folder)
    elif args.command == "pack":
        print(texts.pack_texts(settings, folder))
    elif args.command == "respond":
        part_number, parts = args.part.split("/")
        texts.respond(settings, folder, int(part_number), int(parts))
    else:
        from objectives.warm import warm_up

        warm_up(settings, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
