"""What compilation needs: not to be switched off, a compiler, Python's header, and a place for its cache."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_lit.doctor.finding import GIB, Finding, Level, gib
from dflash_lit.doctor.machine import Machine

__all__ = ["cache", "compilers", "headers", "switches"]

_SWITCHES = {
    "TORCH_COMPILE_DISABLE": lambda value: value == "1",
    "TORCHDYNAMO_DISABLE": lambda value: value == "1",
    "TORCHDYNAMO_SUPPRESS_ERRORS": lambda value: value != "",
    "TRITON_INTERPRET": lambda value: value.lower() in ("1", "true", "yes", "on", "y"),
}
"""What switches compilation off, each read as torch or Triton reads it."""

_NETWORK = (
    "afs beegfs ceph cifs fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.s3fs fuse.sshfs glusterfs gpfs lustre nfs nfs4 "
    "orangefs panfs smb3 smbfs wekafs"
).split()


def switches(machine: Machine) -> Iterator[Finding]:
    off = [name for name, means in _SWITCHES.items() if means(machine.environment.get(name, ""))]
    said = ", ".join(f"{name}={machine.environment[name]}" for name in off)
    if not off:
        yield Finding("ok", "compilation", "not switched off by the environment")
    elif machine.on_gpu:
        yield Finding(
            "error", "compilation", f"switched off by {said}; on a GPU nothing runs without", f"unset {' '.join(off)}"
        )
    else:
        yield Finding("ok", "compilation", f"switched off by {said}; a CPU does without")


def compilers(machine: Machine) -> Iterator[Finding]:
    """Triton builds its launcher in C, Inductor its kernels for the CPU in C++."""
    if machine.on_gpu:
        level: Level = "error"
        name, tool, variable, package, why = "C compiler", machine.c, "CC", "gcc", "Triton starts no kernel without one"
    else:
        level = "warning"
        name, tool, variable, package, why = "C++ compiler", machine.cxx, "CXX", "g++", "torch.compile needs one on a CPU"
    install = f"apt install {package} libc6-dev, or set {variable} to the path of one that works"
    if not tool.command:
        yield Finding(level, name, f"none found; {why}", install)
    elif tool.problem:
        yield Finding(level, name, f"{tool.command} fails on a program of two lines ({tool.problem}); {why}", install)
    else:
        yield Finding("ok", name, tool.command)


def headers(machine: Machine) -> Iterator[Finding]:
    if machine.python_h:
        yield Finding("ok", "Python.h", f"in {machine.include}")
    elif machine.on_gpu:
        package = f"python{'.'.join(machine.python.split('.')[:2])}-dev"
        yield Finding(
            "error",
            "Python.h",
            f"not in {machine.include}; Triton starts no kernel without it",
            f"apt install {package}, or use an interpreter that brings its headers (uv's and conda's do)",
        )
    else:
        yield Finding("ok", "Python.h", f"not in {machine.include}; only GPUs need it")


def cache(machine: Machine) -> Iterator[Finding]:
    folder, name = machine.cache, "compile cache"
    if folder is None:
        return
    # Where the user has set torch's own variable, it wins over ours.
    variable = "TORCHINDUCTOR_CACHE_DIR" if "TORCHINDUCTOR_CACHE_DIR" in machine.environment else "DFLASH_LIT_COMPILE_CACHE"
    move = f"set {variable} to a folder on a local disk"
    used = "not made yet" if folder.size is None else f"{gib(folder.size)} used"
    found = f"{folder.path}: {used}, {gib(folder.free)} free"
    if folder.problem:
        yield Finding("error", name, f"{folder.path}: {folder.problem}", f"{move} where you may write")
    elif "noexec" in folder.options:
        yield Finding("error", name, f"{found}; mounted noexec, so that compiled code cannot be loaded from it", move)
    elif folder.mount in _NETWORK:
        yield Finding("warning", name, f"{found}; on a network filesystem ({folder.mount}), slow and with unsure locks", move)
    elif folder.free < 2 * GIB:
        yield Finding("warning", name, f"{found}; compiling can take 2 GiB", f"free some space, or {move}")
    else:
        yield Finding("ok", name, found)
