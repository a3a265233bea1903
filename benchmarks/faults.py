"""Ranks of a running training are killed or stopped: how long until all of its processes are gone, and what was said?

    python benchmarks/faults.py --placement 1+1 5+3

trains a small drafter for a small target of random weights, as ``python train.py`` does, on the GPUs if there are some (shared where
there are too few). After a few steps the first rank, the last drafter and a target get SIGKILL or SIGSTOP, each in a run of its own: a
line of JSON. ``seconds`` are from the signal until the last process is gone, those that compile included; of a stopped rank
``placement.timeout_s`` (``--timeout``) is part of them. Exit code 1 if a process was left after ``--limit`` seconds, or nothing said which
rank it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.layouts import layout, layout_overrides, named  # noqa: E402
from benchmarks.soak import Run, prepare, settings  # noqa: E402
from benchmarks.waiting import until  # noqa: E402
from dflash_lit.placement.layout import Layout  # noqa: E402

__all__ = ["fault", "ranks_to_hit"]

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def ranks_to_hit(placement: Layout) -> list[int]:
    """Local ranks: the first, the last drafter, the last target."""
    return sorted({0, placement.drafters - 1, placement.drafters + placement.targets - 1})


def several(text: str) -> Layout:
    if (found := layout(text)).world < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: write two or more ranks, as 1+1: the others are to notice")
    return found


def fault(
    folder: Path, placement: Layout, rank: int, how: str, *overrides: str, timeout_s: float = 15.0, limit_s: float = 120.0
) -> dict[str, Any]:
    """One run and its end.

    Args:
        folder: that :func:`benchmarks.soak.prepare` has filled.
        rank: local.
        how: a name of ``SIGNALS``.

    Raises:
        SystemExit: the run did not come to its third step.
    """
    run = Run(
        folder,
        *layout_overrides(placement),
        f"placement.timeout_s={timeout_s:g}",
        *settings(folder, 100_000),
        "trainer.val_every=100000",
        "trainer.log_every_n_steps=1",
        "++callbacks.progress.lines=100000",
        f"hydra.run.dir={folder / 'run'}",
        *overrides,
        script="train.py",
    )
    try:
        if not until(lambda: run.step() >= 3 or run.first.poll() is not None, 300) or run.first.poll() is not None:
            raise SystemExit(f"{placement}: no third step:\n{run.said()[-3000:]}")
        (pid,) = (pid for pid, who in run.processes().items() if who == f"rank {rank}")
        began = time.monotonic()
        os.kill(pid, SIGNALS[how])
        gone = until(lambda: run.first.poll() is not None and not run.marked(), limit_s)
        seconds = time.monotonic() - began
        said = re.findall(r"(?m)^error: .*$", run.said())
        return {
            "placement": named(placement),
            "rank": rank,
            "signal": SIGNALS[how].name,
            "seconds": round(seconds, 1),
            "left": 0 if gone else len(run.marked()),
            "code": run.first.poll(),
            "said": said,
        }
    finally:
        for pid in run.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--placement",
        nargs="+",
        type=several,
        default=[Layout(1, 1)],
        metavar="N+M",
        help="targets + drafters (default: 1+1)",
    )
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--timeout", type=float, default=15.0, help="placement.timeout_s (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for the end (default: %(default)s)")
    args = parser.parse_args()
    overrides = ["trainer.threads=null", "placement.share=true"] if torch.cuda.is_available() else []
    good = True
    for placement in args.placement:
        for rank in ranks_to_hit(placement):
            for how in args.signals:
                with tempfile.TemporaryDirectory(prefix="faults_") as folder:
                    prepare(Path(folder), rows=40, tokens=100)
                    found = fault(Path(folder), placement, rank, how, *overrides, timeout_s=args.timeout, limit_s=args.limit)
                print(json.dumps(found), flush=True)
                good &= not found["left"] and any(f"rank {rank} " in line for line in found["said"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
