"""Documents from a sample of a response file's lines, for a look at them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lit.data.documents import Document
from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file
from dflash_lit.responses.ask_target import prompt_ids
from dflash_lit.responses.raw_prompts import RawPrompt

__all__ = ["sample_documents"]


def sample_documents(
    path: str | Path,
    tokenizer: Any,
    *,
    count: int,
    seed: int = 0,
    end_ids: tuple[int, ...] = (),
    template: dict[str, Any] | None = None,
) -> list[Document]:
    """Take documents of a ``.jsonl`` file by chance, in the order of the file; the file is read once and not held.

    Token ids are taken as they are. Where a line has ``messages`` or ``prompt`` and ``response``, the last response is
    tokenized, which may cut it into other tokens than those that were drawn.

    Args:
        path: lines as ``dflash-lit respond`` writes them.
        tokenizer: the target's.
        count: how many, at most.
        seed: of the choice.
        end_ids: a response ends with the first of them.
        template: further variables of the chat template.

    Raises:
        UserError: with file and line, if a chosen line cannot be understood.
    """
    refuse_no_file(path, "check the path")
    rng = random.Random(seed)
    chosen: list[tuple[int, bytes]] = []
    try:
        with Path(path).open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for seen, entry in enumerate(lines):  # reservoir sampling: each line with the same probability
                if seen < count:
                    chosen.append(entry)
                elif (place := rng.randrange(seen + 1)) < count:
                    chosen[place] = entry
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    if not chosen:
        raise UserError(f"{path}: holds no response")
    return [_document(line, f"{path}:{number}", tokenizer, end_ids, template or {}) for number, line in sorted(chosen)]


def _document(line: bytes, place: str, tokenizer: Any, end_ids: tuple[int, ...], template: dict[str, Any]) -> Document:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # half a character has no tokens
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: has half a character (a lone surrogate); leave the line out") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is not JSON; is the file complete?") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: is no object")
    if "input_ids" in record:
        try:
            ids = np.asarray(record["input_ids"])
            mask = np.asarray(record["loss_mask"]).astype(np.bool_)
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{place}: input_ids and loss_mask must be lists of whole numbers") from error
        return Document(ids, mask, place)
    messages, text, response = record.get("messages"), record.get("prompt"), record.get("response")
    talk = messages if isinstance(messages, list) and all(isinstance(message, dict) for message in messages) else []
    if talk and isinstance(response, str) and talk[-1].get("role") != "assistant":
        talk = [*talk, {"role": "assistant", "content": response}]
    if len(talk) > 1 and talk[-1].get("role") == "assistant":
        # A weight is for training, not for the template.
        history = [{key: value for key, value in message.items() if key != "weight"} for message in talk]
        prompt = RawPrompt(place, "", None, tuple(history[:-1]), record.get("tools"), place)
        before = prompt_ids(tokenizer, prompt, history[:-1], template)
        said = _last_turn(tokenizer, history, before, record.get("tools"), template)
        ended = next((index for index, token in enumerate(said) if token in end_ids), len(said))
        # A cut response has no end of its own; the template has written one.
        said = said[: ended + (record.get("finish_reason") != "length")]
    elif isinstance(text, str) and isinstance(response, str):
        before = prompt_ids(tokenizer, RawPrompt(place, "", text, None, None, place), (), template)
        said = tokenizer(response, add_special_tokens=False)["input_ids"]
    else:
        raise UserError(f'{place}: has neither input_ids, nor messages that end with a response, nor "prompt" and "response"')
    ids = np.asarray([*before, *said], dtype=np.int64)
    return Document(ids, np.arange(len(ids)) >= len(before), place)


def _last_turn(tokenizer: Any, messages: list[Any], before: list[int], tools: Any, template: dict[str, Any]) -> list[int]:
    """Tokens of the last message as the template writes it after what stands before it."""
    try:
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **template)
        start = tokenizer.apply_chat_template(
            messages[:-1], tools=tools, add_generation_prompt=True, tokenize=False, **template
        )
    except Exception:  # whatever the template's own code raises: then the bare text
        whole, start = "", "-"
    rest = whole[len(start) :] if whole.startswith(start) else str(messages[-1].get("content") or "")
    return [int(i) for i in tokenizer(rest, add_special_tokens=False)["input_ids"]]
