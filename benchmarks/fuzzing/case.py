"""One case: something wrong is done to something good, and whatever comes of it has to be a clear error or a right result."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dflash_lit.commands import one_line
from dflash_lit.errors import Interrupted, UserError

__all__ = ["Area", "Case", "Result", "Wrong", "judge", "logged"]

_MARK = "keep"


class Wrong(Exception):  # noqa: N818 - a verdict
    """A check has found that a result is not right."""


@dataclass
class Case:
    """What is done.

    Attributes:
        about: for people, one line.
        act: does it.
        names: an error has to have one of these words (a field, a row, a file).
        check: proves the result, by raising :class:`Wrong` where it is none; None: only an error is right.
        may_write: names within the case's folder that may appear or change.
        limit_s: seconds after which it counts as hanging.
    """

    about: str
    act: Callable[[], Any]
    names: Sequence[str]
    check: Callable[[Any], None] | None = None
    may_write: Sequence[str] = ()
    limit_s: float = 20.0


class Area(Protocol):
    """A kind of things that can be wrong.

    Attributes:
        name: on the command line.
    """

    name: str

    def case(self, rng: random.Random, folder: Path) -> Case:
        """Make a case in an empty folder; a function of ``rng`` alone."""


@dataclass(frozen=True)
class Result:
    """How a case came out; ``said`` is the error's line, or why it is unexplained."""

    kind: Literal["error", "right", "unexplained"]
    about: str
    said: str = ""


class _TooLong(BaseException):
    pass


@contextmanager
def logged(name: str) -> Iterator[StringIO]:
    """What a logger says inside of the block."""
    said = StringIO()
    handler, log = logging.StreamHandler(said), logging.getLogger(name)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place) / name
            about = path.lstat()
            relative = path.relative_to(folder).as_posix()
            # The times of a folder change with what is in it, which is listed itself.
            found[relative] = (0, 0) if path.is_dir() and not path.is_symlink() else (about.st_size, about.st_mtime_ns)
    return found


def judge(area: Area, seed: str, folder: Path, begins: Callable[[Case], object] = lambda case: None) -> Result:
    """Make the case of ``seed``, do it, and say how it came out.

    Everything that the case changes in its folder or in the working folder (one beside it) without leave is found.

    Args:
        begins: told what is done next.
    """
    rng = random.Random(seed)
    inside, elsewhere = folder / "case", folder / "working"
    inside.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / _MARK).write_text("mine")
    case = area.case(rng, inside)
    before = _listing(folder)
    here, variables = Path.cwd(), dict(os.environ)
    os.chdir(elsewhere)
    try:
        begins(case)
        result = _done(case)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(variables)
    after = _listing(folder)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    allowed = [f"case/{name}" for name in case.may_write]
    stray = [name for name in changed if not any(name == one or name.startswith(f"{one}/") for one in allowed)]
    if stray and result.kind != "unexplained":
        return Result("unexplained", case.about, f"has changed {', '.join(stray[:4])} ({result.kind}: {result.said})")
    return result


def _done(case: Case) -> Result:
    said = StringIO()
    try:
        with (
            _limited(case.limit_s),
            warnings.catch_warnings(),
            redirect_stderr(said),
            redirect_stdout(StringIO()),
        ):
            warnings.simplefilter("ignore")
            value = case.act()
            if case.check is None:
                return Result("unexplained", case.about, f"no error, but {str(value)[:300]!r}")
            case.check(value)
        return Result("right", case.about)
    except Wrong as wrong:
        return Result("unexplained", case.about, f"accepted, but wrong: {wrong}")
    except _TooLong:
        return Result("unexplained", case.about, f"not over after {case.limit_s:g} s")
    except (UserError, HydraException, OmegaConfBaseException, argparse.ArgumentTypeError) as error:
        line = one_line(error)
        if not any(name in line for name in case.names):
            return Result("unexplained", case.about, f"the error has none of {list(case.names)[:6]}: {line}")
        return Result("error", case.about, line)
    except SystemExit as stop:
        *_, last = said.getvalue().splitlines() or [""]
        lines = [line for line in said.getvalue().splitlines() if "error: " in line]
        if stop.code in (1, 2) and lines == [last] and "Traceback" not in said.getvalue():
            if any(name in last for name in case.names):
                return Result("error", case.about, last)
            return Result("unexplained", case.about, f"the error has none of {list(case.names)[:6]}: {last}")
        return Result("unexplained", case.about, f"exit {stop.code}: {said.getvalue()[-600:]}")
    except (Exception, Interrupted) as error:
        last = "".join(traceback.format_exception(error)[-1:]).strip()
        where = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in where if "dflash_lit" in frame.filename or "callbacks" in frame.filename]
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        return Result("unexplained", case.about, f"traceback at {at}: {last[:300]}")
