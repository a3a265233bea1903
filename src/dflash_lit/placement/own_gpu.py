"""A rank sees its own GPU alone, as ``cuda:0``: one that this package starts is told so, one that others start sees to it itself.

So the graphs of all ranks are of one device and the keys of the compile cache equal: the rank that compiles first compiles for all.
(The process that starts them computes on the first GPU, which is ``cuda:0`` to it, too.) NCCL reaches GPUs that a process does not see
(CUDA 10.1 and later).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch

__all__ = ["VARIABLE", "device_seen", "gpus_of_host", "see_own", "variables"]

VARIABLE = "DFLASH_LIT_GPUS"
"""How many GPUs the process that started this one can see."""

_STARTED = "DFLASH_LIT_LOCAL_RANK"
"""Beside it: a process that inherited the other one alone has not been started by a run."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_before: int | None = None
"""GPUs that this process saw before :func:`see_own`. No variable: a run that is started from within this process must not find it."""


def _told(environment: Mapping[str, str]) -> int | None:
    """How many GPUs the host has, if this process sees only one of them."""
    told = environment.get(VARIABLE, "")
    return int(told) if _STARTED in environment and told.isascii() and told.isdecimal() and int(told) else _before


def gpus_of_host(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that the ranks of this host share out."""
    return _told(environment) or torch.cuda.device_count()


def variables(local_rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What lets a process that is started see the GPU of its local rank alone; nothing where there are none."""
    count = gpus_of_host(environment)
    if not count:
        return {}
    # The driver stops at a name that is none.
    names = [name.strip() for name in environment.get(_VISIBLE, "").split(",") if name.strip()][:count]
    own = names[local_rank % len(names)] if names else str(local_rank % count)
    return {_VISIBLE: own, VARIABLE: str(count)}


def see_own(local_rank: int) -> None:
    """Let this process, which sees all GPUs of its host, see that of its local rank alone from here on.

    Nothing changes where it sees one or none, and where it is too late: the driver reads the environment once, when CUDA is initialised.
    """
    global _before
    count = torch.cuda.device_count()
    if count < 2:
        return
    visible = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = variables(local_rank)[_VISIBLE]
    if _driver_sees() == 1:
        _before = count
    elif visible is None:
        del os.environ[_VISIBLE]
    else:
        os.environ[_VISIBLE] = visible


def _driver_sees() -> int:
    """GPUs that CUDA itself has for this process. Torch counts by the environment as it is now, whatever the driver has read."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def device_seen(device: torch.device, environment: Mapping[str, str] = os.environ) -> torch.device:
    """``device``, numbered among the host's GPUs, as this process numbers it."""
    return torch.device("cuda", 0) if device.type == "cuda" and _told(environment) else device
