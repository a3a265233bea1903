"""One record of a source, checked: whatever stands in a file comes out as a conversation, a text, tokens, or a reason why not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_lit.data.skips import Skip
from dflash_lit.errors import UserError

__all__ = ["LONGEST", "Columns", "Record", "check_record", "without_nulls"]

LONGEST = 8 * 2**20
"""Bytes of a line, characters of a record: what is longer is a broken file rather than a document."""

_NULLS_SPEAK = ("arguments", "parameters")

_DEEPEST = 64
"""Nesting of lists and objects that anything reads here."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns (keys of a JSON object) that are read; the others are not looked at.

    Attributes:
        messages: a conversation in OpenAI's format. One that does not end with the assistant is a prompt, as below.
        tools: the functions it may call, a list of JSON schemas; optional.
        prompt: a text, or messages; ``response`` is what was said to it.
        text: a plain text, learnt as a whole.
        input_ids, loss_mask: tokens, and 1 for each that is to be learnt.
        id: unique names of records; optional.
        finish_reason: why the response ended, as a server says it: ``length`` if it was cut off, so that no end token was
            generated; ``stop`` if one was; optional.
    """

    messages: str = "messages"
    tools: str = "tools"
    prompt: str = "prompt"
    response: str = "response"
    text: str = "text"
    input_ids: str = "input_ids"
    loss_mask: str = "loss_mask"
    id: str = "id"
    finish_reason: str = "finish_reason"

    @classmethod
    def named(cls, names: Mapping[str, str]) -> Columns:
        """With other names for some of them.

        Raises:
            UserError: for a column that does not exist, or one without a name.
        """
        known = set(cls.__slots__)
        for key, name in names.items():
            if key not in known:
                raise UserError(f"data.columns: there is no column {key!r}; the columns are {', '.join(sorted(known))}")
            if not isinstance(name, str) or not name:
                raise UserError(f"data.columns.{key}={name!r}: give the name of a column")
        return cls(**names)

    def names(self) -> list[str]:
        return list(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Record:
    """What one record holds: exactly one of ``messages``, ``text``, ``input_ids``, or ``prompt`` with ``response``.

    Attributes:
        where: file and line, or data set and row.
        id: its name in the data, None without one.
        messages: texts as ``content``, arguments of tool calls as objects, reasoning as ``reasoning_content``; a turn with
            ``weight`` 0 is not to be learnt.
        finish_reason: ``length``, ``stop`` or whatever else; None where nothing is said.
        input_ids: int64 [n]; loss_mask: bool [n].
    """

    where: str
    id: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    response: str | None = None
    text: str | None = None
    input_ids: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    finish_reason: str | None = None


def check_record(value: Any, columns: Columns, where: str) -> Record:
    """Make a :class:`Record` of whatever was read.

    Raises:
        Skip: with the reason, if that cannot be done.
    """
    if not isinstance(value, dict):
        raise Skip("not an object", type(value).__name__)
    value = {name: value[name] for name in columns.names() if value.get(name) is not None}
    name = value.get(columns.id)
    if name is not None and not isinstance(name, str | int):
        raise Skip("wrong type", f"{columns.id} is {_kind(name)}, not a text or a number")
    name = None if name is None else str(name)
    _check_texts(name)
    if columns.input_ids in value:
        ids, mask = _tokens(value, columns)
        return Record(where, name, input_ids=ids, loss_mask=mask)
    value = without_nulls(value)
    _check_texts(value)
    tools = value.get(columns.tools)
    if isinstance(tools, str):  # a column of JSON, where schemas differ from row to row
        tools = _json(tools, columns.tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Skip("wrong type", f"{columns.tools} is {_kind(tools)}, not a list of objects")
    response = value.get(columns.response)
    if response is not None and not isinstance(response, str):
        raise Skip("wrong type", f"{columns.response} is {_kind(response)}, not a text")
    finish = value.get(columns.finish_reason)
    if finish is not None and not isinstance(finish, str):
        raise Skip("wrong type", f"{columns.finish_reason} is {_kind(finish)}, not a text")
    if columns.messages in value:
        messages = _answered(_messages(value[columns.messages], columns.messages), response, columns)
        return Record(where, name, messages=messages, tools=tools or None, finish_reason=finish)
    if columns.prompt in value:
        prompt = value[columns.prompt]
        if isinstance(prompt, list):
            said = [] if response is None else [{"role": "assistant", "content": response}]
            return Record(
                where, name, messages=_messages([*prompt, *said], columns.prompt), tools=tools or None, finish_reason=finish
            )
        _check_text(prompt, columns.prompt)
        if response is not None:
            _check_text(response, columns.response)
        return Record(where, name, prompt=prompt, response=response, finish_reason=finish)
    if columns.text in value:
        _check_text(value[columns.text], columns.text)
        return Record(where, name, text=value[columns.text])
    raise Skip("none of the columns", f"needs {columns.messages}, {columns.prompt}, {columns.text} or {columns.input_ids}")


def _kind(value: Any) -> str:
    return type(value).__name__


def _json(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Skip("broken JSON", f"in {place}: {str(error)[:80]}") from error
    # Escapes hide from the look at the record what they stand for.
    without_nulls(value)
    _check_texts(value)
    return value


def _tokens(value: dict[str, Any], columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = value[columns.input_ids], value.get(columns.loss_mask)
    # bool is an int to Python, but True is no token.
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Skip("wrong type", f"{columns.input_ids} is not a list of whole numbers")
    if mask is None:
        raise Skip("tokens without loss mask", f"needs {columns.loss_mask}")
    if not isinstance(mask, list) or not all(isinstance(m, int | float) and m in (0, 1) for m in mask):
        raise Skip("wrong type", f"{columns.loss_mask} is not a list of 0 and 1")
    if len(ids) != len(mask):
        raise Skip("wrong type", f"{len(ids)} {columns.input_ids} and {len(mask)} values of {columns.loss_mask}")
    if len(ids) > LONGEST:
        raise Skip("too long", f"{len(ids)} tokens")
    try:
        return np.array(ids, dtype=np.int64), np.array(mask, dtype=np.bool_)
    except OverflowError as error:
        raise Skip("token id out of range", "beyond 64 bits") from error


def without_nulls(value: Any, *, everywhere: bool = False, depth: int = 0) -> Any:
    """Objects without their null fields, which say nothing; but those of a tool call's arguments and parameters do.

    Args:
        everywhere: there, too: Arrow gives every object the fields of all others.

    Raises:
        Skip: for too deep a nesting.
    """
    if depth > _DEEPEST:
        raise Skip("wrong type", f"nested deeper than {_DEEPEST}")
    if isinstance(value, dict):
        result = {}
        for key, item in value.items():
            if item is not None:
                cleaned = without_nulls(item, everywhere=everywhere, depth=depth + 1)
                result[str(key)] = item if key in _NULLS_SPEAK and not everywhere else cleaned
        return result
    if isinstance(value, list | tuple):
        # Token ids are many, and have no fields.
        return [
            without_nulls(item, everywhere=everywhere, depth=depth + 1) if isinstance(item, dict | list | tuple) else item
            for item in value
        ]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _check_texts(value: Any) -> None:
    """Every text in the record can be tokenised."""
    characters = 0
    for text in _texts(value):
        characters += len(text)
        if "\0" in text:
            raise Skip("NUL character")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise Skip("half a character", f"a lone surrogate at {error.start}") from error
    if characters > LONGEST:
        raise Skip("too long", f"{characters} characters")


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise Skip("wrong type", f"{name} is {_kind(text)}, not a text")
    if not text.strip():
        raise Skip("empty text", name)


def _messages(messages: Any, column: str) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        messages = without_nulls(_json(messages, column))
    if not isinstance(messages, list):
        raise Skip("wrong type", f"{column} is {_kind(messages)}, not a list")
    if not messages:
        raise Skip("empty conversation")
    return [_message(message, f"{column}[{number}]") for number, message in enumerate(messages)]


def _answered(messages: list[dict[str, Any]], response: str | None, columns: Columns) -> list[dict[str, Any]]:
    """With the response as the last turn, which it has to equal where there is one: nobody knows which of two was generated."""
    if response is None:
        return messages
    if messages[-1]["role"] != "assistant":
        return [*messages, _message({"role": "assistant", "content": response}, columns.response)]
    if response.strip() not in ("", messages[-1]["content"].strip()):
        raise Skip(
            "two responses",
            f"{columns.messages} ends with another than {columns.response}; +data.columns.response=unused takes the first",
        )
    return messages


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Skip("wrong type", f"{place} is {_kind(message)}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Skip("wrong type", f"{place} has no role")
    result = {**message, "content": _content(message.get("content", ""), place)}
    reasoning = result.pop("reasoning", None) if "reasoning_content" not in result else result["reasoning_content"]
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Skip("wrong type", f"{place}.reasoning_content is {_kind(reasoning)}, not a text")
        result["reasoning_content"] = reasoning
    weight = result.get("weight")
    if weight is not None and not (isinstance(weight, int | float) and weight in (0, 1)):
        raise Skip("wrong type", f"{place}.weight is neither 0 nor 1")
    calls = result.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Skip("wrong type", f"{place}.tool_calls is {_kind(calls)}, not a list")
        result["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
        if not calls:
            del result["tool_calls"]
    # A tool may well have nothing to say, and a system prompt be left open.
    said = (result["content"].strip(), (reasoning or "").strip(), calls)
    if role == "assistant" and not any(said):
        raise Skip("empty turn", f"{place} of the assistant")
    if role == "user" and not said[0]:
        raise Skip("empty turn", f"{place} of the user")
    return result


def _content(content: Any, place: str) -> str:
    """Text as it is; a list of text parts, put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Skip("wrong type", f"{place}.content is {_kind(content)}, not a text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            what = part.get("type") if isinstance(part, dict) else _kind(part)
            raise Skip("no text", f"{place}.content has a part of type {str(what)[:40]}")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    """With its arguments as an object: servers read OpenAI's text of JSON before the template sees it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Skip("wrong type", f"{place} has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{place}.arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Skip("wrong type", f"{place}.arguments is {_kind(arguments)}, not an object")
    return {**call, "function": {**function, "arguments": arguments}}
