"""``dflash-lit data``: look at data before training on it: single documents, and what all of them come to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_lit.cache_folder import cache_folder
from dflash_lit.config import DataSection
from dflash_lit.data.chat import ChatTokenizer, Tokens
from dflash_lit.data.chat_data import ChatData, chat_data, store_settings
from dflash_lit.data.records import check_record
from dflash_lit.data.row_plan import LONG
from dflash_lit.data.skips import Skip, SkipRecord
from dflash_lit.data.sources import find_sources, read_shard, shards
from dflash_lit.errors import UserError
from dflash_lit.options import natural
from dflash_lit.target.frozen import EMBEDDED, TargetInfo

__all__ = ["add_options", "documents_text", "summary_table"]

# A step's tokens of one GPU with target and drafter of Qwen3-8B's shape; docs/performance.md.
_RATE = 15_000.0
# What a supervised stretch is enclosed in where there are no colours.
_OPEN, _CLOSE = "⟦", "⟧"


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    preview = commands.add_parser("preview", help="show documents, their supervised tokens coloured")
    _common(preview)
    preview.add_argument("--records", type=natural, default=1, help="how many to show (default: %(default)s)")
    preview.add_argument("--first", type=natural, default=1, help="number of the first one (default: %(default)s)")
    preview.set_defaults(run=run_preview)
    inspect = commands.add_parser("inspect", help="lengths, supervised share, rows, steps, hours, and what is skipped")
    _common(inspect)
    inspect.add_argument("--row-tokens", type=natural, default=3072, help="of a row, a multiple of 128 (default: %(default)s)")
    inspect.add_argument("--rows-per-batch", type=natural, default=4, help="of one drafter (default: %(default)s)")
    inspect.add_argument("--drafters", type=natural, default=1, help="that share a step (default: %(default)s)")
    inspect.add_argument("--anchors", type=natural, default=512, help="blocks a row (default: %(default)s)")
    inspect.add_argument("--long", choices=LONG, default="split", help="of documents longer than a row (default: %(default)s)")
    inspect.add_argument("--rate", type=float, default=_RATE, help="tokens/s of training, for the hours (default: %(default)g)")
    inspect.add_argument(
        "--skip-limit", type=float, default=1.0, help="share of broken records that is an error (default: none)"
    )
    inspect.add_argument("--workers", type=natural, help="processes that tokenise (default: one a core)")
    inspect.add_argument("--cache-dir", help="where documents are kept; training finds them there (default: as training)")
    inspect.add_argument("--draw", help="a .png, .svg or .pdf file for a plot")
    inspect.set_defaults(run=run_inspect)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="file, folder, glob, or data set; see docs/data.md")
    parser.add_argument("--target", default=EMBEDDED, help="whose tokenizer and chat template (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    parser.add_argument("--split", default="train", help="of a data set (default: %(default)s)")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=COLUMN", help="such as messages=conversation")
    parser.add_argument("--thinking", choices=("on", "off", "mixed", "untold"), default="mixed", help="(default: %(default)s)")


def _section(args: argparse.Namespace, **more: Any) -> DataSection:
    if wrong := [pair for pair in args.column if "=" not in pair]:
        raise UserError(f"--column {wrong[0]}: write NAME=COLUMN, such as messages=conversation")
    return DataSection(
        kind="chat",
        prompts=None,
        path=args.source,
        split=args.split,
        columns=dict(pair.split("=", 1) for pair in args.column),
        thinking=None if args.thinking == "untold" else args.thinking,
        **more,
    )


def _mask_token(info: TargetInfo) -> int | None:
    """The one that training would take; None where it would have to be named."""
    try:
        return info.default_mask_token()
    except UserError:
        return None


# ----------------------------------------------------------------------------------------------------------------- preview


def run_preview(args: argparse.Namespace) -> int:
    info = TargetInfo.load(args.target, trust_remote_code=args.trust_remote_code)
    section = _section(args)
    settings = store_settings(section, vocab_size=int(info.text.vocab_size), mask_token_id=_mask_token(info))
    chat = ChatTokenizer(info.tokenizer, settings.chat)
    console = Console(highlight=False, soft_wrap=True)
    number = 0
    for shard in shards(find_sources(args.source, split=args.split)):
        for where, value in read_shard(shard, settings.columns):
            number += 1
            if number < args.first:
                continue
            if number >= args.first + args.records:
                return 0
            try:
                if isinstance(value, Skip):
                    raise value
                documents = chat.documents(check_record(value, settings.columns, where))
            except Skip as skip:
                left = "left out" if skip.choice else "skipped"
                console.print(Text(f"{left}: {SkipRecord(where, skip.reason, skip.detail)}", style="bold red"))
            else:
                console.print(documents_text(where, documents, info.tokenizer, colours=console.is_terminal))
    if number < args.first:
        raise UserError(f"--first {args.first}: there are {number} records")
    return 0


def documents_text(where: str, documents: list[Tokens], tokenizer: Any, *, colours: bool) -> Text:
    """The documents of one record as text: supervised stretches stand out by colour, or in brackets."""
    text = Text()
    for count, document in enumerate(documents, 1):
        supervised = int((document.spans[:, 1] - document.spans[:, 0]).sum())
        text.append(
            f"{where}, document {count} of {len(documents)}: {len(document.input_ids)} tokens, {supervised} supervised in "
            f"{len(document.spans)} stretch(es)\n",
            style="bold",
        )
        place = 0
        for start, stop in document.spans.tolist():
            text.append(tokenizer.decode(document.input_ids[place:start]), style="dim")
            words = tokenizer.decode(document.input_ids[start:stop])
            text.append(words if colours else f"{_OPEN}{words}{_CLOSE}", style="black on green")
            place = stop
        text.append(tokenizer.decode(document.input_ids[place:]), style="dim")
        text.append("\n")
    return text


# ----------------------------------------------------------------------------------------------------------------- inspect


def run_inspect(args: argparse.Namespace) -> int:
    if args.draw is not None and Path(args.draw).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--draw {args.draw}: the name has to end in .png, .svg or .pdf")
    if not 0 < args.rate < float("inf"):
        raise UserError(f"--rate {args.rate:g}: must be positive")

    info = TargetInfo.load(args.target, trust_remote_code=args.trust_remote_code)
    section = _section(
        args,
        row_tokens=args.row_tokens,
        rows_per_batch=args.rows_per_batch,
        long=args.long,
        skip_limit=args.skip_limit,
        workers=args.workers,
        train_prompts=10**12,
        val_prompts=256,
        held_out_share=0.01,
    )
    made = chat_data(section, info, mask_token_id=_mask_token(info), seed=0, cache_dir=cache_folder(args.cache_dir), decoded=0)
    figures = made.figures(args.anchors)
    Console().print(summary_table(made, figures, args.rows_per_batch * args.drafters, args.anchors, args.rate))
    if args.draw is not None:
        draw(made, args.draw)
        print(args.draw)
    return 0


def summary_table(made: ChatData, figures: dict[str, Any], rows_per_step: int, anchors: int, rate: float) -> Table:
    """What the data come to, for people. ``rate`` in tokens/s."""
    store, plan = made.store, made.train.plan
    table = Table(title=f"{len(store):,} documents of {store.skips.seen:,} records", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def spread(values: np.ndarray) -> str:
        marks = np.quantile(values, [0, 0.1, 0.5, 0.9, 0.99, 1])
        return " / ".join(f"{mark:,.0f}" for mark in marks)

    table.add_row("tokens", f"{figures['document_tokens']:,}, {100 * figures['supervised_share']:.1f} % supervised")
    table.add_row("tokens a document: least, 10 %, median, 90 %, 99 %, most", spread(store.lengths))
    table.add_row("tokens before the first supervised one", spread(store.spans[store.offsets[:-1], 0]))
    for what, counts in (("skipped", store.skips.broken), ("left out", store.skips.left_out)):
        for reason, count in counts.most_common():
            table.add_row(what, f"{count:,} x {store.skips.examples[reason][0]}")
    longer = [f"{count:,} {name.replace('_', ' ')}" for name, count in made.long.items() if count]
    table.add_row(f"longer than a row of {plan.row_tokens:,}", ", ".join(longer) or "none")
    table.add_row("rows to train on", f"{len(plan):,}, and {len(made.val):,} to validate on")
    table.add_row("packing efficiency", f"{100 * plan.packed:.2f} % ({100 * (1 - plan.filled):.2f} % padding)")
    table.add_row("context of split documents", f"{100 * plan.window_context:.1f} % of the rows' tokens")
    table.add_row(
        "steps an epoch", f"{max(len(plan) // rows_per_step, 1):,} of {rows_per_step} rows"
    )  # an incomplete one, if it is the only one
    hours = len(plan) * plan.row_tokens / rate / 3600
    table.add_row("an epoch takes", f"{hours:,.2f} h at {rate:,.0f} tokens/s")
    coverage = f"{100 * figures['anchor_coverage']:.1f} % of the supervised tokens get an anchor each epoch"
    table.add_row(f"{anchors} anchors a row", coverage)
    return table


def draw(made: ChatData, path: str) -> None:
    """Histograms of the documents' lengths and of their supervised share; the suffix chooses the format."""
    import matplotlib.style
    from matplotlib.figure import Figure

    from dflash_lit.pictures import BLUE, GREEN, ORANGE, STYLE, save_picture

    lengths, spans = np.asarray(made.store.lengths), made.store.supervision
    every = np.arange(len(lengths))
    share = spans.count(every, np.zeros_like(every), lengths) / lengths
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        edges = np.geomspace(max(lengths.min(), 1), lengths.max() + 1, 50)
        left.hist(lengths, edges, weights=lengths / lengths.sum(), color=BLUE)
        left.set_xscale("log")
        left.set_axisbelow(True)
        right.set_axisbelow(True)
        left.axvline(made.train.row_tokens, color=ORANGE, linestyle="--", label=f"a row ({made.train.row_tokens:,})")
        left.set(xlabel="tokens of a document", ylabel="share of all tokens")
        left.legend()
        right.hist(share, 40, range=(0, 1), color=GREEN)
        right.set(xlabel="supervised share of a document", ylabel="documents")
        save_picture(figure, path, dpi=150, option="--draw ")
