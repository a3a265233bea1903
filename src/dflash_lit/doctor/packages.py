"""Whether the versions of Python, torch, Triton and what this project asks for fit together, by their own metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from dflash_lit.doctor.finding import Finding, Level
from dflash_lit.doctor.machine import OURS, Distribution, Machine

__all__ = ["duplicates", "fits", "packages", "python", "requirements", "torch", "triton"]


def requirements(distribution: Distribution | None, extras: set[str] | None = None) -> Iterator[Requirement]:
    """What a distribution asks for on this platform, with ``extras``."""
    for text in distribution.requires if distribution else ():
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            requirement.name = canonicalize_name(requirement.name)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
                yield requirement


def fits(requirement: Requirement, version: str) -> bool:
    """Whether a version is in range; one that is none by PEP 440 is not judged."""
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True


def plain(requirement: Requirement) -> str:
    """Name and range, without extras and markers."""
    return f"{requirement.name}{requirement.specifier}"


def python(machine: Machine) -> Iterator[Finding]:
    ours = machine.get(OURS)
    wanted = Requirement(f"python{ours.python}") if ours and ours.python else None
    if wanted and not fits(wanted, machine.python):
        yield Finding("error", "Python", machine.python, f"make a virtual environment with Python {wanted.specifier}")
    else:
        yield Finding("ok", "Python", machine.python)


def torch(machine: Machine) -> Iterator[Finding]:
    wanted = next((r for r in requirements(machine.get(OURS)) if r.name == "torch"), Requirement("torch"))
    if machine.torch is None:
        yield Finding("error", "torch", "not installed", f"pip install '{plain(wanted)}'")
        return
    found = f"{machine.torch}, {f'for CUDA {machine.torch_cuda}' if machine.torch_cuda else 'a build without CUDA'}"
    if not fits(wanted, machine.torch):
        yield Finding("error", "torch", f"{found}; {OURS} wants {plain(wanted)}", f"pip install '{plain(wanted)}'")
    elif machine.torch_broken:
        yield Finding(
            "error",
            "torch",
            f"{found}; cannot be imported: {machine.torch_broken}",
            f"follow the errors below; if there are none, pip install --force-reinstall torch=={machine.torch.split('+')[0]}",
        )
    else:
        yield Finding("ok", "torch", found)


def triton(machine: Machine) -> Iterator[Finding]:
    """Each torch is made for one Triton, which its metadata names."""
    wanted = next((r for r in requirements(machine.get("torch")) if r.name in ("triton", "pytorch-triton")), None)
    found = machine.get(wanted.name if wanted else "triton")
    said = found.version if found else "not installed"
    advice = f"pip install '{plain(wanted) if wanted else 'triton'}'"
    if wanted and not (found and fits(wanted, found.version)):
        level: Level = "error" if machine.on_gpu else "warning"
        yield Finding(level, "Triton", f"{said}; torch {machine.torch} wants {plain(wanted)}", advice)
    elif found is None and machine.on_gpu:
        yield Finding("error", "Triton", "not installed; on a GPU nothing runs without it", advice)
    else:
        yield Finding("ok", "Triton", f"{said}, as torch wants it" if wanted else f"{said}; this torch asks for none")


def packages(machine: Machine) -> Iterator[Finding]:
    """Everything that we ask for, but torch, which has a line of its own."""
    ours = machine.get(OURS)
    if ours is None:
        yield Finding("warning", "packages", f"{OURS} itself is not installed: what it asks for is unknown", "pip install -e .")
        return
    wanted = [r for r in requirements(ours) if r.name != "torch"]
    misfits = [r for r in wanted if not ((found := machine.get(r.name)) and fits(r, found.version))]
    for requirement in misfits:
        found = machine.get(requirement.name)
        said = f"{found.name} {found.version}" if found else f"{requirement.name} is not installed"
        yield Finding("error", "packages", f"{said}; {OURS} wants {plain(requirement)}", f"pip install '{plain(requirement)}'")
    if not misfits:
        yield Finding("ok", "packages", f"all {len(wanted)} that {OURS} asks for are in range")


def duplicates(machine: Machine) -> Iterator[Finding]:
    """What broken-off installations leave behind, and the two names under which Lightning is published; silent if all is well."""
    watched = {r.name: plain(r) for r in requirements(machine.get(OURS))} | {"triton": "triton"}
    copies: dict[tuple[str, str], list[str]] = defaultdict(list)
    for distribution in machine.distributions:
        if distribution.name in watched and distribution.version not in copies[distribution.folder, distribution.name]:
            copies[distribution.folder, distribution.name].append(distribution.version)
    for (folder, name), versions in copies.items():
        # In another folder it would be shadowed as a whole, which is harmless.
        if len(versions) > 1:
            yield Finding(
                "error",
                "packages",
                f"{name} is there as {' and as '.join(sorted(versions))} in {folder}: its files are a mixture",
                f"pip uninstall -y {name} until it finds none, then pip install '{watched[name]}'",
            )
    ours, other = machine.get("lightning"), machine.get("pytorch-lightning")
    if ours and other and ours.version != other.version:
        yield Finding(
            "warning",
            "packages",
            f"lightning {ours.version} beside pytorch-lightning {other.version}: callbacks and loggers of one are none to the other",
            f"pip install pytorch-lightning=={ours.version}",
        )
