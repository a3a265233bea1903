"""Wrong in many ways: configs, data files, caches, exports, checkpoints, environments, signals; each at random.

    python benchmarks/fuzz.py --cases 2600 --seed 0

Every outcome has to be a clear error (one line that names the field, row or file) or a right result (proven against what the undamaged
input gives, or against what the damaged one says). Anything else is unexplained, and printed with what repeats it: a traceback, a hang, a
result accepted that is not right, something written elsewhere. The last line is JSON: how many of each, by area. Exit code 1 if any is
unexplained.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from fuzzing.case import Area, Case, Result, judge

__all__ = ["AREAS", "fuzz", "main"]

AREAS = {
    "config": 4,
    "data": 20,
    "store": 16,
    "export": 16,
    "target": 4,
    "run": 8,
    "checkpoint": 12,
    "environment": 4,
    "signals": 1,
}
"""Each is a module of :mod:`fuzzing`; its share of the cases."""

_MEMORY = 6 * 2**30
_AFTER_S = 10.0
"""After the limit of a case, until it is taken for one that no signal ends."""


def _areas(names: Sequence[str], scratch: Path) -> list[Area]:
    made: list[Area] = []
    for name in names:
        folder = scratch / name
        folder.mkdir(parents=True)
        made.append(import_module(f"fuzzing.{name}").Fuzzed(folder))
    return made


def _counts(names: Sequence[str], cases: int) -> dict[str, int]:
    """How many cases each area gets."""
    shares = sum(AREAS[name] for name in names)
    counts = {name: cases * AREAS[name] // shares for name in names}
    counts[names[-1]] += cases - sum(counts.values())
    return counts


def fuzz(
    names: Sequence[str], cases: int, seed: int, *, only: int | None = None, show: bool = False
) -> dict[str, Counter[str]]:
    """Try them, print what is unexplained, count.

    Args:
        only: number of the one case of each area that is tried.
        show: print every outcome.

    Returns:
        area -> kind of outcome -> how many.
    """
    counted: dict[str, Counter[str]] = {}
    scratch = Path(tempfile.mkdtemp(prefix="fuzz_"))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    # Whoever reads a device without an end, or makes what a damaged number asks for, gets a MemoryError, not the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, limits[1]))
    watch = _Watch(scratch)
    try:
        for area in _areas(names, scratch / "areas"):
            began, tally = time.monotonic(), counted.setdefault(area.name, Counter())
            for number in range(_counts(names, cases)[area.name]) if only is None else [only]:
                folder = scratch / "now"
                begins = partial(_begins, watch, f"(--area {area.name} --seed {seed} --only {number})")
                result = judge(area, f"{area.name}:{seed}:{number}", folder, begins)
                _remove(folder)
                tally[result.kind] += 1
                if show or result.kind == "unexplained":
                    print(_line(area.name, seed, number, result), flush=True)
            print(f"# {area.name}: {dict(tally)} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        watch.end()
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        shutil.rmtree(scratch, ignore_errors=True)
    return counted


class _Watch:
    """A process beside this one that names a case which hangs where no signal ends it, and then kills this one.

    A library may begin to wait anew after each signal, and hold Python's lock meanwhile: no thread would run.
    """

    def __init__(self, scratch: Path) -> None:
        read, self._told = os.pipe()
        self._watcher = os.fork()
        if not self._watcher:
            os.close(self._told)
            _look(read, os.getppid(), scratch)
            os._exit(0)
        os.close(read)

    def begins(self, line: str, limit_s: float) -> None:
        """What is done now, and how long that may take."""
        os.write(self._told, f"{limit_s + _AFTER_S:g} {line}\n".encode("utf-8", "replace"))

    def end(self) -> None:
        os.close(self._told)
        os.waitpid(self._watcher, 0)


def _look(read: int, parent: int, scratch: Path) -> None:
    limit_s, line = 600.0, "before the first case"
    while True:
        if not select.select([read], [], [], limit_s)[0]:
            os.write(1, f"unexplained {line}: no signal ends it\n".encode())
            os.kill(parent, signal.SIGKILL)
            shutil.rmtree(scratch, ignore_errors=True)
            return
        if not (told := os.read(read, 2**16)):
            return
        limit, line = told.decode().splitlines()[-1].split(" ", 1)
        limit_s = float(limit)


def _begins(watch: _Watch, number: str, case: Case) -> None:
    watch.begins(" ".join(f"{number} {case.about}"[:2000].split()), case.limit_s)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _line(area: str, seed: int, number: int, result: Result) -> str:
    text = f"{result.kind} (--area {area} --seed {seed} --only {number}) {result.about}: {result.said}"
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if anything is unexplained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2600, help="of all areas together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides every case (default: %(default)s)")
    parser.add_argument("--area", default=",".join(AREAS), help="some of them, with commas between (default: all)")
    parser.add_argument("--only", type=int, help="repeat the case of this number")
    parser.add_argument("--show", action="store_true", help="print every outcome")
    options = parser.parse_args(arguments)
    names = options.area.split(",")
    for name in names:
        if name not in AREAS:
            parser.error(f"--area {name}: choose among {', '.join(AREAS)}")
    counted = fuzz(names, options.cases, options.seed, only=options.only, show=options.show)
    total = sum(counted.values(), Counter())
    print(
        json.dumps({"tried": total.total(), **_told(total), "areas": {name: _told(tally) for name, tally in counted.items()}})
    )
    return 1 if total["unexplained"] else 0


def _told(tally: Counter[str]) -> dict[str, int]:
    return {"clear_errors": tally["error"], "right": tally["right"], "unexplained": tally["unexplained"]}


if __name__ == "__main__":
    raise SystemExit(main())
