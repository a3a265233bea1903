"""Signals at random moments of a run. It has saved and ended, or has ended as the signal says, or goes on; what follows loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_lit.checkpoints.file import load
from dflash_lit.errors import UserError
from dflash_lit.export import load_drafter
from dflash_lit.stopping import PREEMPTS
from fuzzing.case import Case, Wrong
from fuzzing.process import SCRIPT, cleaned, end_all, forked, pids
from fuzzing.tiny_run import TINY

__all__ = ["Fuzzed"]

_SAVE = PREEMPTS
_KILL = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGABRT, signal.SIGKILL)
_NOTHING = (signal.SIGPIPE, signal.SIGWINCH, signal.SIGCHLD, signal.SIGURG, signal.SIGCONT)
_MOMENTS = ("any", "any", "data", "train", "train", "train", "partial", "partial", "decode")


@dataclass(frozen=True)
class _End:
    code: int
    said: str


class Fuzzed:
    """Sends signals to runs, and lets others go on from what is left."""

    name = "signals"

    def __init__(self, scratch: Path) -> None:
        self.python = forked()
        reference = scratch / "reference"
        reference.mkdir()
        began = time.monotonic()
        ended = self._run(reference, (), lambda leader, log: None)
        self.seconds = time.monotonic() - began
        if ended.code:
            raise RuntimeError(ended.said)
        self.weights = (reference / "run" / "drafter" / "model.safetensors").read_bytes()

    def case(self, rng: random.Random, folder: Path) -> Case:
        sent = [rng.choices((rng.choice(_SAVE), signal.SIGINT, rng.choice(_KILL), rng.choice(_NOTHING)), (5, 3, 3, 1))[0]]
        if rng.random() < 0.3:
            sent.append(rng.choice((sent[0], signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
        moment, rest, between = rng.choice(_MOMENTS), rng.random(), rng.choice((0.0, 0.01, 0.1, 0.5))
        drafters = 2 if rng.random() < 0.15 else 1
        words = (f"placement.drafters={drafters}",) if drafters > 1 else ()

        def send(leader: int, log: Path) -> None:
            self._await(moment, rest, leader, log, folder / "run" / "checkpoints")
            for place, number in enumerate(sent):
                if place:
                    time.sleep(between)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leader, number)

        def act() -> tuple[_End, list[_End]]:
            first = self._run(folder, words, send)
            _whole(folder / "run")
            following = [] if (folder / "run" / "summary.json").exists() else [self._follow(folder, words)]
            return first, following

        def check(found: tuple[_End, list[_End]]) -> None:
            first, following = found
            _as_told(first, sent, finished=not following)
            for one in following:
                if one.code and "nothing is left to train" not in one.said:
                    raise Wrong(f"the next run ended with {one.code}: {one.said[-500:]}")
            # With two drafters an epoch has other steps.
            drafter = folder / "run" / "drafter" / "model.safetensors"
            if drafters == 1 and drafter.exists() and drafter.read_bytes() != self.weights:
                raise Wrong("another drafter than without the signal")
            if left := list((folder / "run").rglob("*.partial")):
                raise Wrong(f"{left[0].name} is left")

        names = ", ".join(signal.Signals(number).name for number in sent)
        about = f"{names} {between if len(sent) > 1 else ''} at {moment} + {rest:.2f}, {drafters} drafters"
        return Case(
            about, act, ["no signal is an error"], check, may_write=["run", "cache", "work", "log", "seen"], limit_s=120
        )

    # -- runs

    def _run(self, folder: Path, words: Sequence[str], meanwhile: Callable[[int, Path], None]) -> _End:
        work, seen, log = folder / "work", folder / "seen" / "run", folder / "log"
        for made in (work, seen.parent):
            made.mkdir(exist_ok=True)
        overrides = [word for word in TINY if word != "callbacks.export=null"]
        variables = {**cleaned(), "HOME": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "cache"), "FUZZ_WHOLE": "1"}
        for path in seen.parent.iterdir():
            path.unlink()
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [self.python, str(SCRIPT), *overrides, *words, f"hydra.run.dir={folder}/run"],
                cwd=work,
                env={**variables, "FUZZ_SEEN": str(seen)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                while not (told := list(pids(seen))):
                    if process.poll() is not None:
                        raise Wrong(f"ended with {process.returncode} before it began: {log.read_text()[-400:]}")
                    time.sleep(0.01)
                meanwhile(told[0], log)
                code = process.wait(60)
            except BaseException as error:
                end_all(process.pid)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Wrong(f"has not ended: {log.read_text(errors='replace')[-500:]}") from None
                raise
        return _End(code, log.read_text(errors="replace"))

    def _follow(self, folder: Path, words: Sequence[str]) -> _End:
        """As a person would: from the last checkpoint if there is one, else from the beginning, in the same folder."""
        last = folder / "run" / "checkpoints" / "last.ckpt"
        resume = [f"ckpt_path={last}"] if last.exists() else []
        return self._run(folder, [*words, *resume], lambda leader, log: None)

    def _await(self, moment: str, rest: float, leader: int, log: Path, checkpoints: Path) -> None:
        if moment == "any":
            time.sleep(rest * self.seconds)
            return
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and Path(f"/proc/{leader}").exists():
            if moment == "partial":
                if checkpoints.exists() and any(entry.name.endswith(".partial") for entry in os.scandir(checkpoints)):
                    time.sleep(rest * 0.01)
                    return
            elif re.search(rf"^{moment}$", log.read_text(errors="replace"), re.MULTILINE):
                time.sleep(rest * 0.6)
                return
            time.sleep(0.001)


def _as_told(ended: _End, sent: Sequence[int], *, finished: bool) -> None:
    """Its exit code and its last words are those of what was sent."""
    if "Traceback (most recent call last)" in ended.said:
        raise Wrong(f"exit {ended.code} with a traceback: {_trace(ended.said)}")
    if ended.code == 0:
        if finished or "stopped by" in ended.said:
            return
        raise Wrong(f"exit 0, neither finished nor stopped: {ended.said[-500:]}")
    if ended.code == 130 and signal.SIGINT in sent and "interrupted" in ended.said:
        return
    if -ended.code in sent and -ended.code not in _NOTHING:
        if -ended.code in (*_SAVE, signal.SIGINT) and not any(number in _KILL for number in sent):
            raise Wrong(f"killed by {signal.Signals(-ended.code).name}, without a word: {ended.said[-400:]}")
        return
    raise Wrong(f"exit {ended.code}: {ended.said[-600:]}")


def _trace(said: str) -> str:
    """The last lines of code and the error of each traceback."""
    lines = [
        line.strip()
        for line in said.splitlines()
        if line.startswith("  File") or re.match(r"[\w.]+(Error|Exception|Interrupt\w*)\b", line)
    ]
    return " | ".join(lines[-12:])


def _whole(run: Path) -> None:
    """Whatever has its final name is complete."""
    for path in run.glob("checkpoints/*.ckpt"):
        try:
            load(path)
        except UserError as error:
            raise Wrong(f"left behind: {error}") from error
    for path in run.rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            raise Wrong(f"left behind: {path.name} is no JSON: {error}") from error
    if (run / "drafter").exists():
        try:
            load_drafter(run / "drafter")
        except UserError as error:
            raise Wrong(f"left behind: {error}") from error
