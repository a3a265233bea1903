"""Reads the facts of this machine. Nothing is installed, changed or left behind, and what cannot be read is left open."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from dflash_lit.doctor.machine import Distribution, Folder, Gpu, Machine, Tool
from dflash_lit.doctor.memory import PUBLISHED, SMALL, Recipe, run_bytes
from dflash_lit.errors import UserError

__all__ = ["folder_facts", "free_memory", "installed", "look", "mount_of", "try_compiler"]

_PATIENCE_S = 60  # for a program that hangs: nvidia-smi does when a GPU has fallen off its bus


def look(target: str = "embedded", *, trust_remote_code: bool = False) -> Machine:
    """The facts of this machine, and what a run of ``target`` would take.

    Args:
        target: Hugging Face folder or name, or "embedded"; only its config and tokenizer are read.
        trust_remote_code: let the target's repository run its own code.
    """
    version, cuda = _torch_build()
    said = _ask_torch() if version else {}
    facts = {**said, **_ask_driver()}
    if version and "torch_broken" not in said:
        recipe = SMALL if target == "embedded" else PUBLISHED
        facts |= {"cache": _cache(), "target": target, "recipe": recipe}
        facts |= _needs(target, recipe, gpu="gpus" in said, trust_remote_code=trust_remote_code)
    include = Path(sysconfig.get_paths()["include"])
    shared = Path("/dev/shm")
    return Machine(
        python=".".join(platform.python_version_tuple()),
        distributions=installed(),
        environment=dict(os.environ),
        torch=version,
        torch_cuda=cuda,
        c=try_compiler("CC", ("gcc", "clang"), ".c"),
        cxx=try_compiler("CXX", ("clang++" if sys.platform == "darwin" else "g++",), ".cpp"),
        python_h=(include / "Python.h").is_file(),
        include=str(include),
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        free_memory=free_memory(),
        **facts,
    )


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), type(text).__name__)


# -- packages


def installed(path: Sequence[str] | None = None) -> tuple[Distribution, ...]:
    """The distributions of ``path`` (default: ``sys.path``); damaged ones without name or version are left out."""
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    result: dict[Distribution, None] = {}
    for distribution in found:
        facts: Any = distribution.metadata
        name, version = facts["Name"], facts["Version"]
        if name and version:
            folder = str(Path(str(distribution.locate_file(""))).resolve())
            requires = tuple(facts.get_all("Requires-Dist") or ())
            result[Distribution(canonicalize_name(name), version, requires, facts["Requires-Python"] or "", folder)] = None
    return tuple(result)


def _torch_build() -> tuple[str | None, str | None]:
    """Version and CUDA of the installed torch, without importing it."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with suppress(OSError, KeyError):
            facts = runpy.run_path(str(Path(folder) / "version.py"))
            return facts["__version__"], facts["cuda"]
    return None, None


# -- GPUs


def _ask_torch() -> dict[str, Any]:
    """Fields of :class:`Machine`: ``torch_broken``, ``torch_blind``, or the GPUs."""
    try:
        import torch
    except Exception as error:  # ImportError, OSError of a library, or whatever half an installation comes to
        return {"torch_broken": _first_line(error)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        return {"torch_blind": _first_line(said[-1].message) if said else ""}
    gpus = tuple(_gpu(torch, index) for index in range(torch.cuda.device_count()))
    healthy = [gpu.index for gpu in gpus if not gpu.problem]
    strangers = tuple(pair for pair in combinations(healthy, 2) if not torch.cuda.can_device_access_peer(*pair))
    return {"gpus": gpus, "strangers": strangers, "architectures": tuple(torch.cuda.get_arch_list())}


def _gpu(torch: Any, index: int) -> Gpu:
    name, capability, total = "unknown", (0, 0), 0
    try:
        facts = torch.cuda.get_device_properties(index)
        name, capability, total = facts.name, (facts.major, facts.minor), facts.total_memory
        free, total = torch.cuda.mem_get_info(index)
    except Exception as error:  # it is full, broken or reserved
        return Gpu(index, name, capability, total, 0, _first_line(error))
    return Gpu(index, name, capability, total, free)


def _ask_driver() -> dict[str, Any]:
    """Fields of :class:`Machine`: driver and GPUs by the system's own account, which needs no torch."""
    driver, problem, versions = None, "", list[str]()
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        driver = driver_version(text)
    if command := shutil.which("nvidia-smi"):
        call = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(call, capture_output=True, text=True, timeout=_PATIENCE_S)
            if answer.returncode:
                problem = _first_line(answer.stdout or answer.stderr or f"exit code {answer.returncode}")
            else:
                versions = answer.stdout.split()
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = _first_line(error)
    return {
        "driver": driver or next(iter(versions), None),
        "driver_cuda": _driver_cuda(),
        "devices": len(versions) or len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "smi_problem": problem,
    }


def driver_version(text: str) -> str | None:
    """The version in the text of /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


# -- compilers and folders


def try_compiler(variable: str, names: Sequence[str], suffix: str) -> Tool:
    """The compiler that an environment variable names, else the first of ``names`` there is, tried on two lines."""
    command = os.environ.get(variable) or next((path for name in names if (path := shutil.which(name))), "")
    if not command:
        return Tool("")
    # Triton takes CC for the name of a program; Inductor lets CXX have arguments.
    program = [command] if variable == "CC" else shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"two_lines{suffix}"
        source.write_text("#include <stdlib.h>\nint two_lines(void) { return abs(-2); }\n", encoding="utf-8")
        call = [*program, "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]
        try:
            answer = subprocess.run(call, capture_output=True, text=True, timeout=_PATIENCE_S, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Tool(command, _first_line(error))
    if not answer.returncode:
        return Tool(command)
    lines = [line for line in answer.stderr.splitlines() if "error" in line]
    return Tool(command, _first_line(lines[0] if lines else answer.stderr or f"exit code {answer.returncode}"))


def mount_of(path: Path, mounts: str) -> tuple[str, tuple[str, ...]]:
    """Filesystem and options of the mount that holds ``path``, by the text of /proc/mounts; empty where that does not say."""
    best: tuple[int, str, tuple[str, ...]] = (0, "", ())
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        # Spaces in names are written as \040.
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        if path.is_relative_to(point) and len(point.parts) >= best[0]:  # of two at one point the later lies on top
            best = (len(point.parts), fields[2], tuple(fields[3].split(",")))
    return best[1], best[2]


def folder_facts(path: Path) -> Folder:
    """Facts of a folder, which is not made here."""
    path = path.expanduser().absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    problem, mounts = "", ""
    if not there.is_dir():
        problem = f"{there} is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} is not writable"
    elif there == path:
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            problem = f"no file can be made in it ({error.strerror})"
    with suppress(OSError):
        mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    mount, options = mount_of(there.resolve(), mounts)
    size = None
    if path.is_dir():
        from dflash_lit.compilation.cache import usage

        _, size = usage(path)
    return Folder(str(path), problem, size, shutil.disk_usage(there).free, mount, options)


def _cache() -> Folder:
    from dflash_lit.compilation.cache import cache_dir

    try:
        return folder_facts(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir()))
    except (OSError, RuntimeError) as error:  # users without a home, folders that may not even be looked at
        return Folder("its place", _first_line(error))


# -- memory


def free_memory() -> int | None:
    """Main memory that this process can still get: of the machine, and of the control group that it runs in."""
    limits = []
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
        limits += [int(match[1]) * 1024] if match else []
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such group, or "max"
            limits.append(int(Path(most).read_text()) - int(Path(used).read_text()))
    if not limits:
        with suppress(OSError, ValueError):  # not Linux: all there is
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits) if limits else None


def _needs(target: str, recipe: Recipe, *, gpu: bool, trust_remote_code: bool) -> dict[str, Any]:
    """Fields of :class:`Machine`: ``needs`` by :func:`run_bytes`, or why the target cannot be used."""
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from dflash_lit.config import DrafterSection
        from dflash_lit.drafter.model import Drafter
        from dflash_lit.plan import derive_drafter
        from dflash_lit.target.frozen import TargetInfo

        info = TargetInfo.load(target, trust_remote_code=trust_remote_code)
        config = derive_drafter(DrafterSection(**recipe.drafter), info)
        with torch.device("meta"):  # sizes without memory
            model = AutoModelForCausalLM.from_config(info.config, trust_remote_code=trust_remote_code)
            drafter = Drafter(config)
        # parameters() names a tied head once.
        theirs, ours = (sum(p.numel() for p in module.parameters()) for module in (model, drafter))
        return {"needs": run_bytes(theirs, ours, config, recipe, gpu=gpu)}
    except UserError as error:
        return {"target_problem": _first_line(error)}
    except Exception as error:  # models build themselves in many ways, and the other findings do not hang on it
        return {"needs": _first_line(error)}
