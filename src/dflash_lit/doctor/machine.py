"""The facts of a machine, as plain values: what the doctor judges, and what its tests plant faults in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_lit.doctor.memory import SMALL, Recipe

__all__ = ["OURS", "Distribution", "Folder", "Gpu", "Machine", "Tool"]

OURS = "dflash-lit"
"""The name of this project's distribution."""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution, by its metadata.

    Attributes:
        name: canonical (lower case, dashes).
        requires: its ``Requires-Dist`` lines.
        python: its ``Requires-Python``, or empty.
        folder: that its metadata lies in.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use; memory in bytes; ``problem`` is the error it gave instead."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int
    problem: str = ""


@dataclass(frozen=True)
class Tool:
    """A compiler: the command that will be run (empty: none found), and what went wrong with a program of two lines."""

    command: str
    problem: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder that is or could be made.

    Attributes:
        problem: why no file can be made in it, or empty.
        size: bytes of its files, None if it does not exist.
        free: bytes free beside them.
        mount, options: filesystem that holds it, and its options.
    """

    path: str
    problem: str = ""
    size: int | None = None
    free: int = 0
    mount: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """All that is judged; the defaults are those of a machine without a GPU.

    Attributes:
        python: version.
        distributions: in the order of ``sys.path``: the first of a name is the one that is imported.
        environment: the process's variables.
        torch: its version, None if there is none.
        torch_cuda: the CUDA it was built for, None for a build without.
        torch_broken: why it cannot be imported, or empty.
        torch_blind: what it said when it found no GPU, or empty.
        architectures: that its kernels were built for: "sm_90", "compute_90".
        driver: version of NVIDIA's kernel driver, None if there is none.
        driver_cuda: the newest CUDA that the driver runs.
        devices: NVIDIA GPUs of the machine, whether or not torch can use them.
        smi_problem: what nvidia-smi said when it failed, or empty.
        gpus: those that torch can use.
        strangers: pairs of them without peer access.
        c, cxx: the compilers that Triton and Inductor will run.
        python_h: whether Python's C header is there; include: the folder it belongs into.
        cache: the compile cache; None if it is not known because torch cannot be imported.
        shared_memory: bytes of /dev/shm, None if there is none.
        free_memory: bytes of main memory that a process can still get, None if unknown.
        target, recipe: of the run whose memory is compared.
        needs: its bytes by part, or why they could not be estimated; empty if nobody asked.
        target_problem: why no run of that target is possible, or empty.
    """

    python: str
    distributions: tuple[Distribution, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    torch_cuda: str | None = None
    torch_broken: str = ""
    torch_blind: str = ""
    architectures: tuple[str, ...] = ()
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    devices: int = 0
    smi_problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    strangers: tuple[tuple[int, int], ...] = ()
    c: Tool = Tool("gcc")
    cxx: Tool = Tool("g++")
    python_h: bool = True
    include: str = ""
    cache: Folder | None = None
    shared_memory: int | None = None
    free_memory: int | None = None
    target: str = "embedded"
    recipe: Recipe = SMALL
    needs: Mapping[str, int] | str = field(default_factory=dict)
    target_problem: str = ""

    def get(self, name: str) -> Distribution | None:
        """The distribution of that name which is imported."""
        return next((d for d in self.distributions if d.name == name), None)

    @property
    def cuda_major(self) -> int | None:
        """Of the CUDA that torch was built for."""
        return int(self.torch_cuda.split(".")[0]) if self.torch_cuda else None

    @property
    def hidden(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES leaves no GPU visible."""
        return self.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")

    @property
    def on_gpu(self) -> bool:
        """Whether runs are meant for a GPU: torch was built for CUDA, and one is there that nobody hid."""
        return bool(self.gpus) or (self.torch_cuda is not None and self.devices > 0 and not self.hidden)
