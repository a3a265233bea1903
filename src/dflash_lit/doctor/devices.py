"""Driver and GPUs: whether torch can use them, their memory, and what lies between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dflash_lit.doctor.finding import GIB, Finding, gib
from dflash_lit.doctor.machine import Machine

__all__ = ["driver", "gpus", "peers", "shared_memory"]

_FIRST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The first driver that runs programs of a CUDA major, by NVIDIA's release notes."""

_LEAST_CAPABILITY = (8, 0)


def _torch_for(cuda: tuple[int, int] | None) -> str:
    """The command that installs a torch which a driver of this CUDA can run."""
    name = "cu130" if cuda is None or cuda >= (13, 0) else "cu128" if cuda >= (12, 8) else "cu126"
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{name}"


def driver(machine: Machine) -> Iterator[Finding]:
    supports, built = machine.driver_cuda, machine.cuda_major
    found = f"NVIDIA {machine.driver or 'of unknown version'}"
    if supports:
        found += f", runs CUDA {supports[0]}.{supports[1]} and older"
    if machine.smi_problem:
        yield Finding(
            "error" if machine.on_gpu and not machine.gpus else "warning",
            "driver",
            f"nvidia-smi fails: {machine.smi_problem}",
            "restart the machine (or container) if the driver was updated; if that does not help, install the driver again",
        )
    elif machine.driver is None and not machine.devices:
        yield Finding("ok", "driver", "no NVIDIA driver and no GPU: runs use the CPU")
    elif not machine.devices:
        yield Finding(
            "warning",
            "driver",
            f"{found}, but no GPU is visible: runs use the CPU",
            "start a container with its GPUs (docker run --gpus all); leave it if the CPU is meant",
        )
    elif built is None and machine.torch is not None:
        yield Finding(
            "warning",
            "driver",
            f"{found}, {machine.devices} GPU(s), but torch is a build without CUDA: runs use the CPU",
            _torch_for(supports),
        )
    elif built and supports and supports[0] < built:
        first = _FIRST_DRIVER.get(built)
        yield Finding(
            "error",
            "driver",
            f"{found}; torch was built for CUDA {machine.torch_cuda}",
            f"install a driver for CUDA {built}{f' ({first} or newer)' if first else ''}, or {_torch_for(supports)}",
        )
    elif machine.gpus or machine.torch_broken or machine.torch is None:
        yield Finding("ok", "driver", found)
    elif machine.hidden:
        value = machine.environment["CUDA_VISIBLE_DEVICES"]
        yield Finding(
            "warning",
            "driver",
            f"{found}; CUDA_VISIBLE_DEVICES={value!r} hides every GPU: runs use the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding(
            "error",
            "driver",
            f"{found}; torch can use none of {machine.devices} GPU(s): {machine.torch_blind or 'it does not say why'}",
            "see whether CUDA_VISIBLE_DEVICES names GPUs that exist, whether the nvidia_uvm kernel module is loaded and, on machines "
            "with NVSwitch, whether nvidia-fabricmanager runs",
        )


def _has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for one of ``architectures`` runs: binaries within their major, PTX ("compute") on anything newer."""
    for architecture in architectures:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)", architecture):
            built = int(match[2]), int(match[3])
            if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
                return True
    return not architectures


def gpus(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        name = f"GPU {gpu.index}"
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        found = f"{gpu.name}, compute capability {capability}, {gib(gpu.free)} of {gib(gpu.total)} free"
        used = gpu.total - gpu.free
        other = "choose another GPU with CUDA_VISIBLE_DEVICES"
        if gpu.problem:
            yield Finding("error", name, f"{gpu.name}: {gpu.problem}", f"see in nvidia-smi who uses it, or {other}")
        elif gpu.capability < _LEAST_CAPABILITY:
            least = "8.0 (A100, RTX 30 and newer)"
            yield Finding("error", name, f"{found}; training takes {least}", f"{other}, or set trainer.accelerator=cpu")
        elif not _has_kernels(machine.architectures, gpu.capability):
            theirs = " ".join(machine.architectures)
            yield Finding("error", name, f"{found}; this torch has kernels for {theirs} only", _torch_for(machine.driver_cuda))
        # What the driver keeps, and the context of this very process, stay below.
        elif used > max(2 * GIB, gpu.total // 20):
            yield Finding("warning", name, f"{found}: others hold {gib(used)}", f"see in nvidia-smi whose it is, or {other}")
        else:
            yield Finding("ok", name, found)


def peers(machine: Machine) -> Iterator[Finding]:
    """Peer access: GPUs read each other's memory without a detour; one line for all pairs."""
    count = len(machine.gpus)
    if machine.strangers:
        named = ", ".join(f"{a}-{b}" for a, b in machine.strangers[:6]) + (", ..." if len(machine.strangers) > 6 else "")
        yield Finding(
            "warning",
            "peer access",
            f"not between GPUs {named}: what they exchange goes through main memory",
            "see nvidia-smi topo -p2p r; use GPUs that are linked, or switch PCIe ACS off in the firmware",
        )
    elif count > 1:
        yield Finding("ok", "peer access", f"between all {count} GPUs")


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Processes of one machine exchange data there, NCCL's too; containers get 64 MiB unless told otherwise."""
    if len(machine.gpus) < 2 or machine.shared_memory is None:
        return
    found = f"{gib(machine.shared_memory)} for the processes of {len(machine.gpus)} GPUs"
    if machine.shared_memory < GIB:
        advice = "start a container with --shm-size=8g or --ipc=host; elsewhere, mount -o remount,size=8G /dev/shm"
        yield Finding("warning", "/dev/shm", found, advice)
    else:
        yield Finding("ok", "/dev/shm", found)
