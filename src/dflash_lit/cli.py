"""``dflash-lit``: what one does besides training.

Exit codes: 0 done; 1 the greedy output was not the target's own (evaluate), some prompts got no response (respond), a text is not
the target's (on-policy), or something is broken (doctor); 2 wrong input, with one line that says what.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from dflash_lit.commands import run_command

__all__ = ["main"]

_COMMANDS = {
    "respond": ("responses.command", "let the target respond to prompts: from a server or here, resumable"),
    "on-policy": ("responses.on_policy_command", "say whether the target would have said what a file has it say"),
    "evaluate": ("decode.command", "decode prompts with and without an exported drafter"),
    "replay": ("guard.command", "compute a step again that a run has saved, and say what is not finite first"),
    "export": ("export_command", "write a Lightning checkpoint's drafter in the served format"),
    "data": ("data.command", "preview documents with their supervised tokens; inspect what a data set comes to"),
    "mask": ("attention.command", "draw who sees whom in the drafter's attention, and the tiles it computes"),
    "plan": ("placement.command", "say what a split run will need and reach: processes, memory, wire, bottleneck"),
    "cache": ("compilation.command", "the compile cache: where it is, delete it, carry it to other hosts"),
    "wandb-workspace": ("watching.command", "lay out the panels of a W&B project"),
    "doctor": ("doctor.command", "say what is installed, whether it fits together, and what to do"),
}


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; of the commands only the one that is asked for is imported.

    Most of them need torch, and ``doctor`` has to run where torch cannot be imported.
    """
    parser = argparse.ArgumentParser(prog="dflash-lit", description="Tools for DFlash drafters.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (place, purpose) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name in arguments:
            module = import_module(f"dflash_lit.{place}")
            module.add_options(command)
            if hasattr(module, "run"):
                command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "doctor" not in arguments:  # which says what is wrong with a machine
        import_module("dflash_lit.early")
    args = _parser(arguments).parse_args(arguments)
    return run_command(lambda: args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
