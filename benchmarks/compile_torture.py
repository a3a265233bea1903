"""Cold starts in a row, the compile cache deleted between them and during them: a line of JSON, and exit code 1 if one failed.

    python benchmarks/compile_torture.py --starts 50 --at-once 4 --shape tiny --delete during

Each start is a process of its own that fits a drafter on random features through the Trainer, with the warm-up callback: it
compiles cold, trains and validates with the seal closed, and saves a checkpoint. So many at once compile at the same time, into
one cache. On a CPU (``--shape tiny``) the drafter's graphs have a dense mask.

With ``--starts 2 --at-once 1 --delete never`` the first start is cold and the second warm. ``--starts 1 --steps 500`` is a long
run in which nothing may compile.

    python benchmarks/compile_torture.py --starts 20 --at-once 4 --train placement.drafters=2 drafter.compile=true

``--train`` starts a short ``train.py`` with these overrides instead, of as many ranks as they say: it has to end by itself, with
all its ranks, and to have compiled nothing after its warm-up.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHORT = (
    "debug=fast",
    "logger=csv",
    "callbacks.acceptance=null",
    "+callbacks.progress.lines=100000",
    "evaluation.prompts=1",
    "evaluation.temperatures=[]",
)


class Start:
    """A start that is under way."""

    def __init__(self, args: argparse.Namespace, number: int, folder: Path, fork: Any) -> None:
        self.path = folder / f"start{number}"
        arguments = (str(self.path), args.shape, args.steps, args.layers)
        if fork is not None:
            self.process = fork.Process(target=torture_start_told, args=arguments)
            self.process.start()
        else:
            command = [sys.executable, str(HERE / "torture_start.py"), *(str(a or 0) for a in arguments)]
            self.process = subprocess.Popen(command)

    def code(self) -> int | None:
        """None while it runs."""
        return self.process.exitcode if hasattr(self.process, "exitcode") else self.process.poll()

    def facts(self) -> dict[str, Any] | None:
        return json.loads(self.path.read_text()) if self.code() == 0 and self.path.exists() else None

    def log(self) -> str:
        path = Path(f"{self.path}.log")
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


class WholeRun(Start):
    """A short ``train.py``; its figures are those of its log and its CSV file."""

    def __init__(self, args: argparse.Namespace, number: int, folder: Path) -> None:
        self.path, self.folder, self.ranks = folder / f"start{number}", folder / f"run{number}", 0
        command = [sys.executable, str(HERE.parent / "train.py"), *SHORT, f"hydra.run.dir={self.folder}", *args.train]
        with Path(f"{self.path}.log").open("w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=HERE.parent)

    def facts(self) -> dict[str, Any] | None:
        """None unless it has ended well and said of every rank what that has compiled."""
        if self.code() != 0:
            return None
        said = Path(f"{self.path}.log").read_text(errors="replace")
        made = re.findall(
            r"^compile, rank (\d+) .*: \w+: ([\d.]+) s, (\d+) graphs, cache: (\d+) hits, (\d+) misses", said, re.M
        )
        ranks = {rank for rank, *_ in made}
        with (self.folder / "csv" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        recompiles = [float(row["compile/recompiles"]) for row in rows if row.get("compile/recompiles")]
        losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
        if not (ranks and recompiles and losses):
            return None
        return {
            "ranks": len(ranks),
            "warmup_s": round(sum(float(seconds) for _, seconds, *_ in made), 2),
            "graphs": sum(int(graphs) for *_, graphs, _, _ in made),
            "hits": sum(int(hits) for *_, hits, _ in made),
            "misses": sum(int(misses) for *_, misses in made),
            "recompiles": int(sum(recompiles)),
            "loss": losses[-1],
        }

    def log(self) -> str:
        # Megabytes of exports and checkpoints a run, of which none is needed any more.
        shutil.rmtree(self.folder, ignore_errors=True)
        return super().log()


def torture_start_told(*arguments: Any) -> None:
    import torture_start

    torture_start.told(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("S", "M", "L", "P", "tiny"), default="tiny")
    parser.add_argument("--starts", type=int, default=50, help="processes in all (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="processes that start together (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the drafter: all have one graph, fewer need less memory (default: 5)")
    parser.add_argument("--delete", choices=("never", "between", "during"), default="during")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of deletion")
    parser.add_argument(
        "--fork", action="store_true", help="fork starts from a process with all imports made, which are not what is tested"
    )
    parser.add_argument("--train", nargs="+", metavar="OVERRIDE", help="start train.py with these, not one drafter alone")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torture_"))
    cache = folder / "cache"
    moments = random.Random(args.seed)
    done = threading.Event()
    deletions = 0

    def deleting() -> None:
        nonlocal deletions
        while not done.wait(moments.uniform(0.5, 6.0)):
            shutil.rmtree(cache, ignore_errors=True)
            deletions += 1

    if args.delete == "during":
        threading.Thread(target=deleting, daemon=True).start()
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    began = time.monotonic()
    os.environ["DFLASH_LIT_COMPILE_CACHE"] = str(cache)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(HERE.parent))  # where callbacks/ is
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    fork = None
    if args.fork:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the process forked from must not wake the GPU's driver
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(["torture_start"])
    running: list[Start] = []
    for number in range(args.starts + 1):
        while len(running) >= args.at_once or (number == args.starts and running):
            time.sleep(0.05)
            for ended in [start for start in running if start.code() is not None]:
                running.remove(ended)
                if (facts := ended.facts()) is not None:
                    results.append(facts)
                else:
                    failures.append(ended.log())
                    print(f"a start failed with code {ended.code()}:\n{failures[-1]}", file=sys.stderr, flush=True)
                print(f"{len(results)} of {args.starts} survived, {len(failures)} failed", file=sys.stderr, flush=True)
        if number < args.starts:
            if args.delete != "never":
                shutil.rmtree(cache, ignore_errors=True)
            running.append(WholeRun(args, number, folder) if args.train else Start(args, number, folder, fork))
    done.set()
    shutil.rmtree(folder, ignore_errors=True)
    seconds = [result["warmup_s"] for result in results]
    losses = [result["loss"] for result in results]
    line = {
        "starts": args.starts,
        "failures": len(failures),
        "deletions": deletions,
        "at_once": args.at_once,
        "shape": None if args.train else args.shape,
        "train": args.train,
        "layers": args.layers,
        "steps": args.steps,
        "recompiles": sum(result["recompiles"] for result in results),
        "warmup_s": {"first": seconds[0], "median": statistics.median(seconds), "most": max(seconds)} if seconds else None,
        "loss_spread": max(losses) / min(losses) - 1 if losses else None,
        "graphs": sorted({result["graphs"] for result in results}),
        "last": results[-1] if results else None,
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(line))
    return 0 if survived(line, args.delete) else 1


def survived(line: dict[str, Any], delete: str) -> bool:
    """What was not tested must not pass: no deletion, or losses that a compile changed, if only in their last bit."""
    fine = not line["failures"] and not line["recompiles"] and line["loss_spread"] == 0
    return fine and (delete != "during" or line["deletions"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
