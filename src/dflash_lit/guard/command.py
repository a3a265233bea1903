"""``dflash-lit replay``: compute a step again that a run has saved, and say what is not finite first."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from dflash_lit.errors import UserError
from dflash_lit.guard.replay import replay
from dflash_lit.guard.saved_step import read_step
from dflash_lit.options import natural
from dflash_lit.target.frozen import TargetInfo

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="of a saved step: RUN/bad_steps/step=N")
    parser.add_argument("--target", help="folder or name of the target, if it is no longer where it was")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--device", default="cpu", help="where it is computed: cpu (default) or cuda")
    parser.add_argument("--lines", type=natural, default=12, help="tensors to list at most (default: %(default)s)")


def _number(value: Any) -> str:
    return f"{float(value):.6g}"


def run(args: argparse.Namespace) -> int:
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise UserError(f"--device {args.device}: is none; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device {args.device}: torch has none here; use cpu")
    saved = read_step(args.folder)
    facts = saved.facts
    path = args.target or str(facts["target"].get("path") or "")
    if not path:
        raise UserError("--target: the step does not say which target it was of; give its folder or name")
    made = replay(saved, TargetInfo.load(path, trust_remote_code=args.trust_remote_code), device)

    batches = sum(len(each) for each in saved.batches)
    print(
        f"step {facts['step']}, epoch {facts['epoch']}: {batches} batches of {facts['drafters']} drafters, {facts.get('precision', '')}"
    )
    print(f"the run found: {'; '.join(facts.get('found', []))}")
    if facts["weights_step"] != facts["step"] - 1:
        print(
            f"its weights are those after step {facts['weights_step']}, not those before step {facts['step']}: figures may differ"
        )
    if not saved.has_features:
        print("saved without features: the target made them again")
    recorded = {**facts.get("losses", {}), **facts.get("gradient_norms", {})}
    for name, value in {**made.losses, **made.norms}.items():
        print(f"{name:<24} {_number(value):>12}   then {_number(recorded.get(name, 'nan')):>12}")
    if not made.found:
        print("nothing non-finite here")
        return 0
    print(f"not finite first: {made.found[0]}")
    for line in made.found[1 : args.lines]:
        print(f"  then {line}")
    if len(made.found) > args.lines:
        print(f"  and {len(made.found) - args.lines} more")
    for row in made.rows:
        print(f"row {row} begins {made.texts.get(row, '')!r}")
    return 0
