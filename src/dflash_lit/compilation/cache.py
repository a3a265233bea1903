"""Where compiled graphs are kept between runs, and what happens when they are deleted while a run compiles.

One folder for each combination that compiles anew anyway. Inductor and Triton find their entries in it by content, so a folder
that is too old, half empty or gone costs time, not results; the folders are apart so that the old ones can be found and deleted.
"""

from __future__ import annotations

import ast
import atexit
import errno
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException

from dflash_lit.errors import UserError

__all__ = [
    "Usage",
    "all_caches",
    "cache_dir",
    "cache_key",
    "cache_root",
    "chosen_by_user",
    "clear",
    "surviving_deletion",
    "usage",
    "use_cache",
]

Result = TypeVar("Result")
Usage = tuple[int, int]
"""(files, bytes)"""

log = logging.getLogger(__name__)

# What Inductor and Triton read, each time they need it.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# How long a deletion may take that has begun when a compile fails by it.
DELETING_S = 2.0
# The modules whose code becomes part of a graph.
GRAPHS = ("attention/*.py", "drafter/*.py", "objective/*.py", "target/compiled_layers.py", "target/packed_attention.py")
# No other folder is ever deleted: somebody may have chosen a root that holds more.
_KEY = re.compile(r"torch[^-]+-.*py\d+-[0-9a-f]{8}")
_LEFT = re.compile(rf"\.{_KEY.pattern}\.\d+\.\d+\.(deleted|loading)")


# -- the folder


def cache_root() -> Path:
    """``DFLASH_LIT_COMPILE_CACHE``, else ``compile`` in this package's folder of the user's caches."""
    chosen = os.environ.get("DFLASH_LIT_COMPILE_CACHE")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen or caches / "dflash_lit" / "compile").expanduser().absolute()


@functools.cache
def cache_key() -> str:
    """The name of this machine's folder, such as ``torch2.11.0-triton3.6.0-cu130-sm90-py312-0f3a9c21``.

    The last part stands for what has no short name: torch's exact build, the kind of processor, and this package's code, without
    its comments and layout. With a GPU this initialises CUDA, after which a process must not fork workers that use it: to be
    called where the compiling is done, not in a launcher.
    """
    parts = [f"torch{torch.__version__.split('+')[0]}"]
    with suppress(importlib.metadata.PackageNotFoundError):
        # By its metadata: importing Triton settles whether its interpreter is used.
        parts.append(f"triton{importlib.metadata.version('triton').split('+')[0]}")
    build = [torch.__version__, str(torch.version.git_version), platform.machine()]
    if torch.cuda.is_available():
        toolkit = f"cu{torch.version.cuda}" if torch.version.cuda else f"rocm{torch.version.hip}"
        parts += [toolkit.replace(".", ""), "sm{}{}".format(*torch.cuda.get_device_capability())]
    else:
        parts += ["cpu", torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")]
        build.append(_instructions())
    digest = hashlib.sha256("\n".join([*build, *_sources()]).encode()).hexdigest()
    return "-".join([*parts, f"py{sys.version_info.major}{sys.version_info.minor}", digest[:8]])


def _instructions() -> str:
    """What ``-march=native`` means here: Inductor compiles C++ for exactly this processor, and names its files by the option."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _sources() -> Iterator[str]:
    package = Path(__file__).parents[1]
    for path in sorted(found for pattern in GRAPHS for found in package.glob(pattern)):
        yield path.relative_to(package).as_posix()
        yield ast.dump(ast.parse(path.read_text(encoding="utf-8")))


def cache_dir() -> Path:
    """This machine's folder, which need not exist."""
    return cache_root() / cache_key()


def use_cache() -> Path:
    """Make this machine's folder and point Inductor and Triton at it; the folder that Inductor will use.

    To be called before the first compile of the process, in the process that compiles (see :func:`cache_key`). Where the user
    has set ``TORCHINDUCTOR_CACHE_DIR`` or ``TRITON_CACHE_DIR``, that stays.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = chosen_by_user() or cache_dir()
    os.environ[INDUCTOR] = str(folder)
    _made(Path(os.environ.setdefault(TRITON, str(folder / "triton"))))
    return _made(folder)


def chosen_by_user() -> Path | None:
    """``TORCHINDUCTOR_CACHE_DIR``, unless it is torch's default: ``torch.compile()`` itself sets the variable to that."""
    value = os.environ.get(INDUCTOR)
    if not value or (Path(value).parent == Path(tempfile.gettempdir()) and Path(value).name.startswith("torchinductor_")):
        return None
    return Path(value).absolute()


def _made(folder: Path) -> Path:
    for left in reversed(range(20)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            break
        except OSError as error:
            # Somebody deleted its parent in the meantime.
            if isinstance(error, FileNotFoundError) and left:
                continue
            raise UserError(
                f"the compile cache {folder} cannot be made ({error.strerror}): set DFLASH_LIT_COMPILE_CACHE to a folder that can"
            ) from error
    return folder


def usage(folder: Path) -> Usage:
    """Files of ``folder`` and their bytes; what vanishes meanwhile is not counted."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(parent, name)).st_size
                files += 1
    return files, size


def all_caches() -> dict[str, Usage]:
    """Key and usage of every folder beneath :func:`cache_root` that this package made."""
    try:
        found = sorted(path for path in cache_root().iterdir() if _KEY.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return {}
    return {path.name: usage(path) for path in found}


def clear(*, everything: bool = False) -> list[str]:
    """Delete this machine's folder, or every key's; the keys that were deleted.

    A folder is first renamed, so that it goes at one moment: no run sees half of it, and one that compiles makes it anew.
    """
    root, cleared = cache_root(), []
    for key in all_caches() if everything else [cache_key()]:
        try:
            os.rename(root / key, root / f".{key}.{os.getpid()}.{time.monotonic_ns()}.deleted")
        except FileNotFoundError:
            continue
        cleared.append(key)
    # Also what an interrupted clear, or load, has left behind.
    for path in root.glob(".torch*"):
        left = _LEFT.fullmatch(path.name)
        if left and (everything or left[1] == "deleted"):
            shutil.rmtree(path, ignore_errors=True)
    return cleared


# -- deletion while a run compiles


def surviving_deletion(function: Callable[[], Result], attempts: int = 5) -> Result:
    """``function()``, which compiles; again, if the cache or a part of it was deleted under it.

    The last attempt compiles into a folder of its own: a cache that something deletes all the time costs time as well, no more. So
    does an entry that a deletion left behind in part: any error is tried once more in a folder of its own, and if that works the
    cache was at fault and is cleared. Only what no cache can be the reason of is raised at once.

    Args:
        function: what it did before it failed must be harmless when repeated; a training step, say, leaves gradients behind.
        attempts: how often it is run at most.

    Raises:
        Exception: what ``function`` raised: at once if it is a UserError (but one about a compile that failed) or says that memory is
            short, else that of its last attempt.
    """
    attempt, suspected = 1, ""
    while True:
        with _own_folder() if 1 < attempt == attempts else _shared_folder() as folders, _Watch(folders) as watch:
            try:
                made = function()
                break
            except Exception as error:
                if attempt >= attempts or _no_cache_is_at_fault(error):
                    raise
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if _names_missing_file(error, folders) or watch.deleted_within(DELETING_S):
                    attempt += 1
                    log.warning("the compile cache %s was deleted during a compile: attempt %d", folders[0], attempt)
                else:
                    attempt, suspected = attempts, said
                    log.warning("a compile failed (%s): once more without the compile cache", said)
        _forget_files()
    if suspected:
        clear()
        log.warning("the compile cache held a broken entry (%s), and was cleared", suspected)
    return made


Folders = tuple[Path, Path]
"""Inductor's and Triton's."""


@contextmanager
def _shared_folder() -> Iterator[Folders]:
    folder = use_cache()
    yield folder, Path(os.environ[TRITON])


@contextmanager
def _own_folder() -> Iterator[Folders]:
    folder = Path(tempfile.mkdtemp(prefix="dflash_lit_compile_"))
    # Not earlier: what was compiled may read its files once more.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    before = {name: os.environ[name] for name in (INDUCTOR, TRITON)}
    os.environ.update({INDUCTOR: str(folder), TRITON: str(folder / "triton")})
    try:
        yield folder, _made(folder / "triton")
    finally:
        os.environ.update(before)


class _Watch:
    """Whether folders were deleted, or renamed and made anew, inside of the block: a file in each would be gone."""

    def __init__(self, folders: Folders) -> None:
        self._files = [folder / f"in_use_{os.getpid()}_{time.monotonic_ns()}" for folder in folders]
        self._deleted = False

    def __enter__(self) -> _Watch:
        for file in self._files:
            try:
                file.touch()
            except FileNotFoundError:
                self._deleted = True
        return self

    def __exit__(self, *_: object) -> None:
        # Inductor believes a failed probe for vector instructions, and goes on without them: no error, but slow code from now on.
        if self.deleted():
            _forget_files()
        for file in self._files:
            file.unlink(missing_ok=True)

    def deleted_within(self, seconds: float) -> bool:
        """Waits for it: a folder is deleted file by file, and the file that was needed may have gone before those of this watch."""
        end = time.monotonic() + seconds
        while not self.deleted() and time.monotonic() < end:
            time.sleep(0.05)
        return self.deleted()

    def deleted(self) -> bool:
        self._deleted = self._deleted or not all(file.exists() for file in self._files)
        return self._deleted


def _no_cache_is_at_fault(error: Exception) -> bool:
    """What a user has to mend, unless it is said of a compile that failed; and short memory."""
    if isinstance(error, UserError):
        return not isinstance(error.__cause__, TorchDynamoException)
    return isinstance(error, torch.OutOfMemoryError)


def _names_missing_file(error: BaseException, folders: Folders) -> bool:
    """Whether ``error``, or one that led to it, says that a file in the folders is not there.

    By its text: from compilers and from Triton's worker processes nothing else is left of an error.
    """
    gone = "|".join(re.escape(os.strerror(code)) for code in (errno.ENOENT, errno.ESTALE))
    inside = "|".join(re.escape(f"{folder}{os.sep}") for folder in folders)
    # As Python says it, and as g++, ld and dlopen do. "CACHE/x.cpp:1:10: fatal error: omp.h: No such file" is another matter.
    # And as Triton says it of a kernel whose source cannot be read: ours are in files, so it is one that Inductor wrote.
    says = re.compile(
        rf"(?:{gone}): '(?:{inside})|(?:{inside})[^\s:]*: (?:cannot open shared object file: )?(?:{gone})"
        r"|@jit functions should be defined in a Python file"
    )
    return any(says.search(str(link)) for link in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        link = queue.pop()
        if link is not None and link not in found:
            found.append(link)
            # Inductor wraps errors, and cuts what Python remembers of them.
            queue += [link.__cause__, link.__context__, getattr(link, "inner_exception", None)]
    return found


def _forget_files() -> None:
    """Make Inductor forget what it remembers of files in its cache, in private places (tests/compilation/test_cache.py).

    A failed C++ compile is kept and raised again for ever; so is the finding that the processor has no vector instructions, which
    is the outcome of a small compile too. The graphs that exist are Dynamo's, and stay.
    """
    from torch._inductor import cpu_vec_isa
    from torch._inductor.utils import clear_caches

    clear_caches()
    for owner in (cpu_vec_isa, *filter(inspect.isclass, vars(cpu_vec_isa).values())):
        for kept in vars(owner).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()
