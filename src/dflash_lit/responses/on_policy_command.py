"""``dflash-lit on-policy``: would the target have said what a file has it say?"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_lit.errors import UserError
from dflash_lit.files import read_json
from dflash_lit.options import device_of, natural, temperature
from dflash_lit.responses.on_policy import PolicyCheck, check_policy
from dflash_lit.responses.read_records import sample_documents
from dflash_lit.responses.record_file import settings_path
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from dflash_lit.watching.terminal import bars

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help=".jsonl files, as dflash-lit respond writes them")
    parser.add_argument(
        "--target", required=True, help="Hugging Face folder or name of the model that should have written them"
    )
    parser.add_argument(
        "--temperature", type=temperature, help="at which they were drawn (default: as the file's settings say, or 1)"
    )
    parser.add_argument(
        "--count", type=natural, default=256, help="documents of each file, taken by chance (default: %(default)s)"
    )
    parser.add_argument(
        "--row-tokens", type=natural, default=4096, help="tokens of a document that are read (default: %(default)s)"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.1, help="nats a token above the entropy that are let pass (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of documents")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """1 if a file is clearly off-policy, else 0."""
    if not args.threshold > 0:
        raise UserError(f"--threshold {args.threshold}: must be above 0")
    device = device_of(args.device)
    target = FrozenTarget.load(TargetInfo.load(args.target, trust_remote_code=args.trust_remote_code), device=device)
    positions = int(getattr(target.info.text, "max_position_embeddings", 0) or args.row_tokens)
    checks: dict[str, PolicyCheck] = {}
    with bars(show=not args.json) as progress:
        for file in args.files:
            settings = _settings(Path(file))
            template = (settings.get("extra_body") or {}).get("chat_template_kwargs") or {}
            documents = sample_documents(
                file, target.tokenizer, count=args.count, seed=args.seed, end_ids=target.eos_ids, template=template
            )
            heat = args.temperature if args.temperature is not None else float(settings.get("temperature", 1.0))
            task = progress.add_task(Path(file).name, total=len(documents))
            checks[file] = check_policy(
                target,
                documents,
                temperature=heat,
                threshold=args.threshold,
                row_tokens=min(args.row_tokens, positions),
                report=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
    if args.json:
        print(json.dumps({file: _facts(check) for file, check in checks.items()}, indent=2))
    else:
        for file, check in checks.items():
            print(_line(file, check))
    return 1 if any(check.off_policy for check in checks.values()) else 0


def _settings(file: Path) -> dict[str, Any]:
    """What the responses were made with, as far as that was written down."""
    place = settings_path(file)
    if not os.path.lexists(place):
        return {}
    cure = "delete it, and give --temperature"
    found = read_json(place, cure)
    heat: Any = found.get("temperature", 1.0) if isinstance(found, dict) else None
    if type(heat) not in (int, float) or not 0 <= heat < math.inf:
        raise UserError(f"{place}: field 'temperature' cannot be {str(heat)[:60]!r}; {cure}")
    body = found.get("extra_body") or {}
    if not isinstance(body, dict) or not isinstance(body.get("chat_template_kwargs") or {}, dict):
        raise UserError(f"{place}: field 'extra_body' cannot be {str(body)[:60]!r}; {cure}")
    return dict(found)


def _facts(check: PolicyCheck) -> dict[str, object]:
    return {**asdict(check), "gap": check.gap, "verdict": _verdict(check)}


def _verdict(check: PolicyCheck) -> str:
    return "off-policy" if check.off_policy else "on-policy"


def _line(file: str, check: PolicyCheck) -> str:
    expected = "least NLL" if check.temperature == 0 else "entropy"
    return (
        f"{_verdict(check)}  {file}: NLL {check.nll:.3f}, {expected} {check.entropy:.3f} nats/token at temperature "
        f"{check.temperature:g}; difference {check.gap:+.3f} ± {check.error:.3f} (up to {check.threshold:g} is let pass); "
        f"{check.argmax:.1%} of {check.tokens:,} tokens are the target's most likely ones; "
        f"{check.off_documents} of {check.documents} documents are off-policy for themselves"
    )
