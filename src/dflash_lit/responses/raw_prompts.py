"""Prompts as they are written, before any tokenizer: what a server is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lit.data.prompt_line import parse_prompt
from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file

__all__ = ["Message", "RawPrompt", "RawPrompts", "read_raw_prompts"]

_ASKING = ("user", "tool", "function")

Message = dict[str, Any]
"""A message of the OpenAI format: ``role``, ``content``, and what else belongs to it."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A text to be continued, or a conversation to be responded to.

    Attributes:
        id: unique within a file; the given one, else made from the content.
        key: hash of the content.
        text: the text; None for a conversation.
        messages: the conversation, the last one not the assistant's; None for a text.
        tools: that the conversation's model may call; None if it has none.
        place: file and line.
    """

    id: str
    key: str
    text: str | None
    messages: tuple[Message, ...] | None
    tools: list[Any] | None
    place: str

    def turns(self, *, all_turns: bool) -> list[int]:
        """Indices among ``messages`` at which the target speaks; the last one is their number (0 for a text).

        Args:
            all_turns: also where the file has a turn of the assistant, unless tools were called there: what they answered
                belongs to the calls that were made.
        """
        messages = self.messages or ()
        earlier = [
            index
            for index, message in enumerate(messages)
            if all_turns
            and message["role"] == "assistant"
            and not message.get("tool_calls")
            and index > 0
            and messages[index - 1]["role"] in _ASKING
        ]
        return [*earlier, len(messages)]


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """The prompts of a file, and how many lines only repeated another."""

    prompts: list[RawPrompt]
    repeated: int


def read_raw_prompts(path: str | Path, *, endpoint: str = "auto") -> RawPrompts:
    """Read ``.jsonl`` (objects with ``prompt`` or ``messages``, and maybe ``id`` and ``tools``) or ``.txt`` (a prompt a line).

    An assistant's message at the end of a conversation is left out, since that is the one that the target writes. A line whose
    id and content both came before is counted and left out. Without an ``id`` the content makes it, so a prompt that stands
    there twice is asked once.

    Args:
        path: the file.
        endpoint: ``chat`` makes a text the only message of a conversation, ``completions`` refuses conversations, ``auto``
            leaves both as they are.

    Raises:
        UserError: with file and line, if something cannot be read or an id stands for two different prompts.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"{path}: unknown kind of file; give .jsonl (an object a line) or .txt (a prompt a line)")
    refuse_no_file(path, "give a file of prompts")
    prompts: list[RawPrompt] = []
    seen: dict[str, RawPrompt] = {}
    repeated = 0
    for number, line in _lines(path):
        place = f"{path}:{number}"
        prompt = _parse(line, place, endpoint) if path.suffix == ".jsonl" else _prompt(None, line, None, None, place, endpoint)
        first = seen.setdefault(prompt.id, prompt)
        if first is prompt:
            prompts.append(prompt)
        elif first.key == prompt.key:
            repeated += 1
        else:
            raise UserError(
                f"{place}: id {prompt.id!r} is also that of another prompt, {first.place}; give it one of its own or none"
            )
    if not prompts:
        raise UserError(f"{path}: holds no prompt; write one a line")
    return RawPrompts(prompts, repeated)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UserError(f"{path}:{number}: is not UTF-8 (byte {error.start}); convert it") from error
                if text.strip():
                    yield number, text
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def _parse(line: str, place: str, endpoint: str) -> RawPrompt:
    entry = parse_prompt(line, place)
    given = entry.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int) or given == ""):
        raise UserError(f'{place}: "id" must be a text or a whole number')
    tools = entry.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f'{place}: "tools" must be a list')
    name = None if given is None else str(given)
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise UserError(f'{place}: "prompt" must be a text, and not empty')
        return _prompt(name, entry["prompt"], None, tools, place, endpoint)
    return _prompt(name, None, _messages(entry["messages"], place), tools, place, endpoint)


def _messages(messages: Any, place: str) -> list[Message]:
    """Check a conversation as far as a server would not say it better."""
    if not isinstance(messages, list) or not all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list | None)
        and (message.get("content") is not None or message.get("tool_calls"))
        for message in messages
    ):
        raise UserError(f'{place}: "messages" must be a list of objects with "role" and "content"')
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in _ASKING:
        raise UserError(f"{place}: \"messages\" has nothing to respond to; the last one must be the user's or a tool's")
    # A weight is for training; the output has its own, and servers do not know it.
    return [{name: value for name, value in message.items() if name != "weight"} for message in messages]


def _prompt(
    name: str | None, text: str | None, messages: list[Message] | None, tools: list[Any] | None, place: str, endpoint: str
) -> RawPrompt:
    if messages is not None and endpoint == "completions":
        raise UserError(f'{place}: "messages" cannot go to the completions endpoint; write "prompt" texts, or choose chat')
    if text is not None and endpoint == "chat":
        text, messages = None, [{"role": "user", "content": text}]
    try:
        content = json.dumps([text, messages, tools], sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # half a character, or NaN: Python reads them, a server would not
        raise UserError(f"{place}: cannot be sent ({error}); correct it") from error
    key = hashlib.sha256(content).hexdigest()[:16]
    return RawPrompt(name or key, key, text, None if messages is None else tuple(messages), tools, place)
