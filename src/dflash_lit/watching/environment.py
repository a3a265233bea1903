"""What a run was made with: versions, devices, and the commit of its code."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dflash_lit.doctor.machine import OURS

__all__ = ["environment", "git_state", "versions"]

_ALWAYS = ("hydra-core", "lightning", "numpy", "omegaconf", "safetensors", "tokenizers", "torch", "transformers", "triton")
"""Known without our own metadata, as in a checkout that was never installed."""


def versions() -> dict[str, str]:
    """Installed version of everything that the project asks for, by its metadata, and of what its results hang on."""
    from dflash_lit.doctor.look import installed
    from dflash_lit.doctor.packages import requirements

    found = {one.name: one for one in reversed(installed())}  # the first of a name is the one that is imported
    wanted = {OURS, *_ALWAYS, *(requirement.name for requirement in requirements(found.get(OURS)))}
    return {name: found[name].version for name in sorted(wanted & found.keys())}


def git_state(folder: str | Path) -> dict[str, Any]:
    """``commit`` and whether tracked files differ from it (``changed``); empty outside a repository or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    return {}


def environment(code: str | Path) -> dict[str, Any]:
    """Plain values; ``code`` is the folder whose commit counts."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": versions(),
        "git": git_state(code),
    }
