"""NVIDIA's libraries as wheels: one of each, and of torch's CUDA.

Up to CUDA 12 their names end in the major (nvidia-cublas-cu12). Of CUDA 13 most have none (nvidia-cublas) and some do
(nvidia-cudnn-cu13). To pip these are different packages, so it installs two side by side. Torch then ends with an undefined
symbol, or runs with kernels of another version.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement

from dflash_lit.doctor.finding import Finding, Level
from dflash_lit.doctor.machine import Distribution, Machine
from dflash_lit.doctor.packages import fits, plain, requirements

__all__ = ["wheels"]

_NAME = re.compile(r"(nvidia-.+?)(?:-cu(\d\d))?")
_FIRST_WITHOUT_SUFFIX = 13


def _split(name: str) -> tuple[str, int | None]:
    """Library and CUDA major of a name: ("nvidia-cublas", 12) or ("nvidia-cublas", None)."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2]) if match[2] else None) if match else (name, None)


def _asked(machine: Machine) -> dict[str, Requirement]:
    """By library: what torch asks for, itself or through ``cuda-toolkit[cublas,...]``."""
    asked: dict[str, Requirement] = {}
    for requirement in requirements(machine.get("torch")):
        through = requirement.name == "cuda-toolkit"
        for one in requirements(machine.get("cuda-toolkit"), requirement.extras) if through else (requirement,):
            if one.name.startswith("nvidia-"):
                asked[_split(one.name)[0]] = one
    return asked


def _right(names: Sequence[str], asked: Requirement | None, major: int | None) -> str | None:
    """The name of a library's wheel that torch loads, as far as that can be told."""
    if asked is not None:
        return asked.name
    by_major = {_split(name)[1]: name for name in names}
    if major is not None and major in by_major:
        return by_major[major]
    return by_major.get(None) if major is not None and major >= _FIRST_WITHOUT_SUFFIX else None


def _is_foreign(name: str, asked: Requirement | None, major: int | None) -> bool:
    """Whether the only wheel of a library is of another CUDA than torch's."""
    if major is None:  # torch was built without CUDA and loads none
        return False
    named = _split(name)[1]
    if named is not None:
        return named != major
    # Without a major only what torch knows under another name; other names say nothing about CUDA (nvidia-ml-py).
    return asked is not None and asked.name != name


def _askers(machine: Machine, wrong: Sequence[Distribution]) -> str:
    names = {distribution.name for distribution in wrong}
    askers = {d.name for d in machine.distributions if any(r.name in names for r in requirements(d))} - names
    return f" (asked for by {', '.join(sorted(askers))}: give it an environment of its own)" if askers else ""


def wheels(machine: Machine) -> Iterator[Finding]:
    major, asked = machine.cuda_major, _asked(machine)
    libraries: dict[str, dict[str, Distribution]] = defaultdict(dict)
    for distribution in machine.distributions:
        if distribution.name.startswith("nvidia-"):
            libraries[_split(distribution.name)[0]].setdefault(distribution.name, distribution)

    doubled, foreign, wrong, again = [], [], [], []
    for library, found in sorted(libraries.items()):
        right = _right(list(found), asked.get(library), major)
        said = [f"{d.name} {d.version}" for d in found.values()]
        if len(found) > 1:
            doubled.append(" beside ".join(said))
        elif _is_foreign(next(iter(found)), asked.get(library), major):
            foreign += said
        else:
            continue
        wrong += [d for d in found.values() if d.name != right]
        if right is not None:
            again.append(f"'{plain(asked[library])}'" if library in asked else f"{right}=={found[right].version}")
    if wrong:
        parts = [f"two wheels of one library: {', '.join(doubled)}"] if doubled else []
        parts += [f"for another CUDA than torch's {machine.torch_cuda}: {', '.join(foreign)}"] if foreign else []
        advice = f"pip uninstall -y {' '.join(d.name for d in wrong)}"
        if again:
            # Both write to the same files in places: what goes with one wheel is missing in the other.
            advice += f" && pip install --force-reinstall --no-deps {' '.join(again)}"
        level: Level = "error" if major else "warning"
        yield Finding(level, "CUDA wheels", "; ".join(parts) + _askers(machine, wrong), advice)
    misfits = list(_misfits(machine, asked, set(libraries)))
    if misfits:
        yield Finding(
            "error" if machine.torch_broken else "warning",
            "CUDA wheels",
            f"not what torch {machine.torch} asks for: {', '.join(said for said, _ in misfits)}",
            f"pip install {' '.join(wanted for _, wanted in misfits)}",
        )
    if not wrong and not misfits and libraries:
        count = sum(len(found) for found in libraries.values())
        yield Finding("ok", "CUDA wheels", f"{count} of NVIDIA's" + (f", none of another CUDA than {major}" if major else ""))


def _misfits(machine: Machine, asked: dict[str, Requirement], libraries: set[str]) -> Iterator[tuple[str, str]]:
    """Of what torch asks for: (what is there instead, what to install)."""
    for library, requirement in asked.items():
        found = machine.get(requirement.name)
        if found is not None and not fits(requirement, found.version):
            yield f"{found.name} {found.version}", f"'{plain(requirement)}'"
        # A torch that is imported has found the library elsewhere: some are built against the system's CUDA.
        elif found is None and machine.torch_broken and library not in libraries:
            yield f"{requirement.name} missing", f"'{plain(requirement)}'"
