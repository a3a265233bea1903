"""A process that this package starts sees its own GPU alone, as ``cuda:0``.

So the graphs of all ranks are of one device and the keys of the compile cache equal: the rank that compiles first compiles for all.
And none leaves a context on another's GPU by accident. NCCL reaches GPUs that a process does not see (CUDA 10.1 and later).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

__all__ = ["VARIABLE", "device_seen", "gpus_of_host", "variables"]

VARIABLE = "DFLASH_LIT_GPUS"
"""How many GPUs the process that started this one can see. Unset in one that sees all of them."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_host(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that the ranks of this host share out."""
    told = environment.get(VARIABLE, "")
    return int(told) if told.isdecimal() else torch.cuda.device_count()


def variables(local_rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What lets a process that is started see the GPU of its local rank alone; nothing where there are none."""
    count = gpus_of_host(environment)
    if not count:
        return {}
    names = [name.strip() for name in environment.get(_VISIBLE, "").split(",") if name.strip()]
    names = names[:count] if len(names) >= count else [str(index) for index in range(count)]
    return {_VISIBLE: names[local_rank % count], VARIABLE: str(count)}


def device_seen(device: torch.device, environment: Mapping[str, str] = os.environ) -> torch.device:
    """``device``, numbered among the host's GPUs, as this process numbers it."""
    return torch.device("cuda", 0) if device.type == "cuda" and VARIABLE in environment else device
