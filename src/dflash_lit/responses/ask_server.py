"""Many prompts to a server, many of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from dflash_lit.responses.raw_prompts import RawPrompt
from dflash_lit.responses.record_file import RecordFile
from dflash_lit.responses.server import NoAnswerError, Server

__all__ = ["ask_server"]

_SYNC_SECONDS = 1.0


async def ask_server(
    server: Server,
    prompts: Iterable[RawPrompt],
    records: RecordFile,
    *,
    in_flight: int,
    max_failures: int,
    all_turns: bool = False,
    report: Callable[[], None] = lambda: None,
) -> list[str]:
    """Let a server respond to prompts; responses are appended as they come. A killed process loses those in flight only.

    Args:
        server: entered.
        prompts: read as they are needed.
        records: entered.
        in_flight: requests at a time; the server's own number, or less.
        max_failures: prompts without an answer after which no more are asked.
        all_turns: see :meth:`~dflash_lit.responses.raw_prompts.RawPrompt.turns`.
        report: called twice a second, and at the end.

    Returns:
        a line for each prompt without an answer; they have no record, and are asked again by the next run.

    Raises:
        UserError: if there would be no answer to any prompt, or the file cannot be written.
    """
    waiting = iter(prompts)
    failures: list[str] = []

    async def work(lane: int) -> None:
        while len(failures) <= max_failures and (prompt := next(waiting, None)) is not None:
            try:
                records.add(prompt, await server.respond(prompt, all_turns=all_turns, lane=lane))
            except NoAnswerError as error:
                failures.append(f"{prompt.place}: {error}")

    async def every(seconds: float, act: Callable[[], Any], *, in_thread: bool = False) -> None:
        while True:
            await asyncio.sleep(seconds)
            if in_thread:
                await asyncio.to_thread(act)
            else:
                act()

    async def work_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for lane in range(in_flight):
                    group.create_task(work(lane))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first; the others ended because of it, or in the same way

    await server.model_name()
    tasks = [
        asyncio.create_task(work_all()),
        asyncio.create_task(every(0.5, report)),
        asyncio.create_task(every(_SYNC_SECONDS, records.sync, in_thread=True)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # whatever ended it: a disk that fails is no reason to go on
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        report()
    return failures
