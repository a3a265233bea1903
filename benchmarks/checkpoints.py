"""How long training waits for a checkpoint, and a resumed run for its check: a line of JSON.

    python benchmarks/checkpoints.py --gib 6 --folder /fast/disk

A checkpoint of random tensors (on the GPU if there is one) is saved and checked as a run does it, and, in turn with that, as one would
without threads: ``torch.save``, one SHA-256 of all, ``fsync``. Medians, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_lit.checkpoints.digest import pieces_digest
from dflash_lit.checkpoints.file import save
from dflash_lit.cores import cores
from dflash_lit.files import file_digest

MATRIX = 2**27
"""Bytes of each tensor."""


def save_plainly(checkpoint: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(checkpoint, partial)
    file_digest(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)


def check(path: Path) -> None:
    with open(path, "rb") as file:
        pieces_digest(file.fileno(), path.stat().st_size)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of tensors (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's for temporary files)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = max(round(args.gib * 2**30 / MATRIX), 1)
    checkpoint = {"state_dict": {str(i): torch.randn(MATRIX // 4, device=device) for i in range(tensors)}}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoints_") as folder:
        path = Path(folder) / "it.ckpt"
        kinds: dict[str, Callable[[], object]] = {
            "save": lambda: save(checkpoint, path),
            "check": lambda: check(path),
            "save_plainly": lambda: save_plainly(checkpoint, path),
            "check_plainly": lambda: file_digest(path),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, work in kinds.items():
                times[kind].append(seconds(work))
    line = {"gib": round(tensors * MATRIX / 2**30, 2), "device": device, "cores": cores()}
    line |= {f"{kind}_s": round(statistics.median(taken), 2) for kind, taken in times.items()}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
