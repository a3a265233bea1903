"""``dflash-lit respond``: the target's own responses to prompts, from a server or from here."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_lit.errors import UserError
from dflash_lit.options import device_of, natural, temperature, whole
from dflash_lit.responses.ask_server import ask_server
from dflash_lit.responses.raw_prompts import RawPrompt, read_raw_prompts
from dflash_lit.responses.record_file import RecordFile, dropped_path
from dflash_lit.responses.reply import DROPPED, FLAGS
from dflash_lit.responses.server import TOKEN_ID_FIELDS, Sampling, Server
from dflash_lit.watching.terminal import live_console

__all__ = ["API_KEY", "add_options", "run"]

API_KEY = "DFLASH_LIT_API_KEY"
"""The environment variable with the server's API key: on a command line every user of the host could read it."""

_LINE_SECONDS = 60.0
_SHOWN_FAILURES = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", help="a .jsonl (prompt or messages, maybe id and tools) or .txt file")
    parser.add_argument("--out", required=True, help=".jsonl file; what is there already is not asked again")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--server", help=f"OpenAI-compatible, such as http://127.0.0.1:8000/v1; its key, if any, in ${API_KEY}")
    who.add_argument("--target", help="Hugging Face folder or name of a model to load here")
    parser.add_argument("--model", help="its name on the server (default: the only one there)")
    parser.add_argument(
        "--endpoint",
        choices=("auto", "chat", "completions"),
        default="auto",
        help="auto: messages are chats, texts are continued; chat: a text is a message of the user (default: %(default)s)",
    )
    parser.add_argument("--all-turns", action="store_true", help="rewrite every turn of the assistant, not only the last")
    parser.add_argument("--count", type=natural, help="only the first so many prompts")
    sampling = parser.add_argument_group("sampling, as the drafter's target will be served")
    sampling.add_argument("--temperature", type=temperature, default=1.0, help="0 is greedy (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    sampling.add_argument("--max-tokens", type=natural, default=4096, help="of each response (default: %(default)s)")
    sampling.add_argument(
        "--seed", type=int, help="each prompt's seed comes from it and the prompt's id (default: none; here 0)"
    )
    sampling.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        help="""JSON with further fields, such as '{"top_k": 20, "chat_template_kwargs": {"enable_thinking": false}}'""",
    )
    server = parser.add_argument_group("with --server")
    server.add_argument("--in-flight", type=natural, default=64, help="requests at a time (default: %(default)s)")
    server.add_argument("--timeout", type=_positive, default=1800.0, help="seconds for one answer (default: %(default)s)")
    server.add_argument("--retries", type=whole, default=12, help="repetitions of a request (default: %(default)s)")
    server.add_argument(
        "--backoff", type=_positive, default=0.5, help="seconds before the first; doubles (default: %(default)s)"
    )
    server.add_argument(
        "--max-failures",
        type=whole,
        default=100,
        help="prompts without an answer before it ends (default: %(default)s)",
    )
    server.add_argument(
        "--token-ids",
        choices=tuple(TOKEN_ID_FIELDS),
        default="auto",
        help="how to ask for them: as vLLM and new SGLang want it, as SGLang from 0.5.13, not at all (default: %(default)s)",
    )
    here = parser.add_argument_group("with --target")
    here.add_argument("--batch-size", type=natural, default=8, help="prompts at a time (default: %(default)s)")
    here.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    here.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as it is sent
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def run(args: argparse.Namespace) -> int:
    """0 if every prompt has a response, 1 if some got none, 130 if interrupted."""
    sampling = Sampling(args.temperature, args.top_p, args.max_tokens, args.seed, args.extra_body)
    read = read_raw_prompts(args.prompts, endpoint=args.endpoint)
    prompts = read.prompts[: args.count]
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "extra_body": sampling.extra_body,
        "endpoint": args.endpoint,
        "all_turns": args.all_turns,
    }
    ask: Callable[[RecordFile, _Watch], list[str]]
    if args.server is not None:
        server = Server(
            args.server,
            args.model,
            sampling,
            in_flight=args.in_flight,
            retries=args.retries,
            backoff=args.backoff,
            timeout=args.timeout,
            api_key=os.environ.get(API_KEY, "").strip(),
            token_ids=args.token_ids,
        )
        settings["model"] = asyncio.run(_model_name(args)) if args.model is None else args.model
        server.model = settings["model"]

        def ask(records: RecordFile, watch: _Watch) -> list[str]:
            return asyncio.run(_ask(server, list(records.pending(prompts)), records, args, watch))
    else:
        if args.model is not None:
            raise UserError("--model: is for --server; a local target is named by --target")
        # Only here: a server is asked without them, from machines that may not have them, and seconds earlier.
        from dflash_lit.responses.ask_target import ask_target
        from dflash_lit.target.frozen import FrozenTarget, TargetInfo

        device = device_of(args.device)
        target = FrozenTarget.load(TargetInfo.load(args.target, trust_remote_code=args.trust_remote_code), device=device)
        settings |= {"target": target.fingerprint, "batch_size": args.batch_size}

        def ask(records: RecordFile, watch: _Watch) -> list[str]:
            return ask_target(
                target,
                prompts,
                records,
                sampling,
                batch_size=args.batch_size,
                all_turns=args.all_turns,
                report=watch.show,
            )

    with RecordFile(args.out, settings) as records:
        before = records.responses
        watch = _Watch(records, prompts)
        try:
            with watch.shown(quiet=args.json):
                failures = ask(records, watch)
        except KeyboardInterrupt:
            print(f"interrupted after {records.responses - before} responses; the same command goes on", file=sys.stderr)
            return 130
        summary = {
            "prompts": len(prompts),
            "repeated_prompts": read.repeated,
            "from_earlier_runs": watch.earlier,
            "responses": records.responses,
            "failed": len(failures),
            "not_asked": len(prompts) - watch.done - len(failures),
            "kept": records.responses - records.dropped,
            "dropped": records.dropped,
            **{flag: records.flags[flag] for flag in FLAGS},
            "with_token_ids": records.with_ids,
            "tokens": records.tokens,
            "seconds": round(watch.seconds, 3),
            "tokens_per_second": round(watch.rate, 1),
            "repeated_requests": server.repeated if args.server is not None else 0,
            "torn_bytes_removed": records.torn,
        }
    for failure in failures[:_SHOWN_FAILURES]:
        print(f"no response: {failure}", file=sys.stderr)
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print(_text(summary, Path(args.out)))
    return 1 if summary["failed"] or summary["not_asked"] else 0


async def _model_name(args: argparse.Namespace) -> str:
    """Ask for it before the file is opened: it is among the settings of all responses."""
    server = Server(
        args.server,
        None,
        Sampling(),
        retries=args.retries,
        backoff=args.backoff,
        timeout=args.timeout,
        api_key=os.environ.get(API_KEY, "").strip(),
    )
    async with server:
        return await server.model_name()


async def _ask(
    server: Server, pending: list[RawPrompt], records: RecordFile, args: argparse.Namespace, watch: _Watch
) -> list[str]:
    async with server:
        return await ask_server(
            server,
            pending,
            records,
            in_flight=min(args.in_flight, max(len(pending), 1)),
            max_failures=args.max_failures,
            all_turns=args.all_turns,
            report=watch.show,
        )


def _text(summary: dict[str, Any], out: Path) -> str:
    lines = [
        f"{summary['responses']:,} responses to {summary['prompts']:,} prompts"
        f" ({summary['from_earlier_runs']:,} from earlier runs, {summary['failed']:,} without an answer,"
        f" {summary['not_asked']:,} not asked, {summary['repeated_prompts']:,} repeated lines left out)",
        f"{summary['kept']:,} in {out}, {summary['with_token_ids']:,} responses as token ids; "
        f"{summary['dropped']:,} in {dropped_path(out).name}",
        ", ".join(f"{summary[flag]:,} {flag}" for flag in FLAGS) + f" (dropped: {', '.join(f for f in FLAGS if f in DROPPED)})",
        f"{summary['tokens']:,} tokens in all; {summary['tokens_per_second']:,.0f} tokens/s over {summary['seconds']:,.0f} s;"
        f" {summary['repeated_requests']:,} requests repeated",
    ]
    if summary["not_asked"]:
        lines.append("ended because too many prompts got no answer (--max-failures)")
    if summary["failed"] or summary["not_asked"]:
        lines.append("the same command asks again for what is missing")
    return "\n".join(lines)


class _Watch:
    """Progress of a run: a bar on a terminal, else a line a minute."""

    def __init__(self, records: RecordFile, prompts: list[RawPrompt]) -> None:
        self._records = records
        self._all = len(prompts)
        self._others = records.responses - sum(prompt.id in records.done for prompt in prompts)
        self.earlier = self.done
        self._tokens = records.tokens
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None

    @property
    def done(self) -> int:
        """Prompts of this run that have a response."""
        return self._records.responses - self._others

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> float:
        """Tokens per second of this run."""
        return (self._records.tokens - self._tokens) / max(self.seconds, 1e-9)

    @contextmanager
    def shown(self, *, quiet: bool) -> Iterator[None]:
        """Show it on stderr inside the block; ``quiet``: not at all."""
        self._began = self._said = time.monotonic()
        console = None if quiet else live_console()
        if console is None:
            self._said = float("inf") if quiet else self._said
            yield
            return
        columns = (TextColumn("responses"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as self._bar:
            self._task = self._bar.add_task("", total=self._all, completed=self.done, rate="")
            yield
        self._bar = None

    def show(self) -> None:
        said = f"{self.rate:,.0f} tokens/s, {self._records.dropped:,} dropped"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=said)
        elif time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            left = (self._all - self.done) * self.seconds / max(self.done - self.earlier, 1)
            print(f"{self.done:,}/{self._all:,} responses, {said}, {left / 60:,.0f} min left", file=sys.stderr, flush=True)
