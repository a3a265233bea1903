"""The command: look, examine, print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from dflash_lit.doctor.examine import examine
from dflash_lit.doctor.finding import Finding
from dflash_lit.doctor.look import look

__all__ = ["add_options", "print_findings", "run"]

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="embedded", help="whose run is compared with the free memory (default: %(default)s)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def print_findings(findings: Sequence[Finding]) -> None:
    """One line each; the level in its colour where stdout is a terminal."""
    for finding in findings:
        mark = f"{finding.level:7}"
        rest = f"  {finding.name:13}  {finding.found}" + (f" -> {finding.advice}" if finding.advice else "")
        rest = rest.replace("\n", " ")
        if sys.stdout.isatty() and find_spec("rich"):
            from rich.console import Console
            from rich.text import Text

            Console().print(Text.assemble((mark, _COLOURS[finding.level]), rest), soft_wrap=True, highlight=False)
        else:
            print(mark + rest)


def run(args: argparse.Namespace) -> int:
    """1 if there is an error, else 0."""
    findings = examine(look(args.target, trust_remote_code=args.trust_remote_code))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_findings(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0
