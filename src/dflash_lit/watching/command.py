"""``dflash-lit wandb-workspace``: apply the layout of this project's panels to a W&B project."""

from __future__ import annotations

import argparse
import json

from dflash_lit.errors import UserError
from dflash_lit.watching.workspace import described, make_workspace

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("project", nargs="?", metavar="ENTITY/PROJECT", help="whose workspace to make")
    parser.add_argument("--name", default="DFlash drafters", help="of the saved view (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the layout instead; needs neither network nor key")


def run(args: argparse.Namespace) -> int:
    """Print the address of the view.

    Raises:
        UserError: for a project that is none, without the library, or if W&B refuses.
    """
    if args.json:
        print(json.dumps(described(), indent=2))
        return 0
    entity, _, project = (args.project or "").partition("/")
    if not entity or not project or "/" in project:
        raise UserError(f"{args.project or 'no project'}: give ENTITY/PROJECT, as in the project's address on W&B, or --json")
    workspace = make_workspace(entity, project, args.name)
    try:
        workspace.save()
    except Exception as error:  # of the network, of W&B, of its library: each has kinds of its own
        # What it said is appended, as that of any error behind this one.
        raise UserError(f"{entity}/{project}: W&B did not take the workspace; is there a key (wandb login)?") from error
    print(workspace.url)
    return 0
