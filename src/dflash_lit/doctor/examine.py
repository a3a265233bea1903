"""From facts to findings."""

from __future__ import annotations

from dflash_lit.doctor.compiling import cache, compilers, headers, switches
from dflash_lit.doctor.devices import driver, gpus, peers, shared_memory
from dflash_lit.doctor.finding import Finding
from dflash_lit.doctor.machine import Machine
from dflash_lit.doctor.memory import memory
from dflash_lit.doctor.packages import duplicates, packages, python, torch, triton
from dflash_lit.doctor.wheels import wheels

__all__ = ["CHECKS", "examine"]

CHECKS = (
    python,
    torch,
    triton,
    driver,
    wheels,
    packages,
    duplicates,
    switches,
    compilers,
    headers,
    cache,
    gpus,
    peers,
    shared_memory,
    memory,
)
"""In the order in which they are printed: what is broken first is what breaks the rest."""


def examine(machine: Machine) -> list[Finding]:
    """One finding or more of each kind; what does not apply to the machine is left out."""
    return [finding for check in CHECKS for finding in check(machine)]
