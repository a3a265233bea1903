"""What the target said to one prompt, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_lit.data.repetition import is_repetitive, is_repetitive_text
from dflash_lit.responses.raw_prompts import Message, RawPrompt

__all__ = ["DROPPED", "FLAGS", "Reply", "document_of", "flags_of"]

FLAGS = ("empty", "repetitive", "filtered", "refusal", "truncated")
"""Everything that is counted. A ``refusal`` and a ``truncated`` response are still what the target says."""
DROPPED = frozenset({"empty", "repetitive", "filtered"})
"""What is not trained on: nothing, a loop, or a text that somebody else cut."""

# How models of the last years begin when they decline, in English; a count to look at, nothing is dropped by it.
_REFUSAL = re.compile(
    r"\W{0,3}(?:(?:i['\u2019]m|i am) (?:(?:really|very|so) )?(?:sorry|afraid|unable to|not able to)\b|sorry,|my apologies|"
    r"i (?:can['\u2019]t|can ?not|won['\u2019]t) (?:help|assist|provide|do that|comply|fulfill|create|write|generate|answer)|"
    r"i must decline|as an ai\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the target.

    Attributes:
        text: what it said.
        finish_reason: ``stop`` where it ended itself, ``length`` where it was cut; else as the server says, None if it says none.
        reasoning: what it thought before, where the server separates it; None if nothing.
        tool_calls: calls it made; None if none.
        refused: whether the server itself calls it a refusal.
        prompt_ids: token ids of all that it read, None if not known.
        output_ids: token ids that it generated, end token included; None if not known.
        tokens: how many it generated; None if not known.
    """

    text: str
    finish_reason: str | None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    refused: bool = False
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    tokens: int | None = None

    def message(self) -> Message:
        """The turn in the OpenAI format."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


def flags_of(reply: Reply) -> list[str]:
    """Those of :data:`FLAGS` that hold for a reply, in their order."""
    if reply.output_ids is not None:
        ids = reply.output_ids[:-1] if reply.finish_reason == "stop" else reply.output_ids
        empty, loops = not ids, is_repetitive(np.asarray(ids, dtype=np.int64))
    else:
        empty = not (reply.text.strip() or reply.reasoning or reply.tool_calls)
        loops = is_repetitive_text((reply.reasoning or "") + reply.text)
    found = {
        "empty": empty,
        "repetitive": loops,
        "filtered": reply.finish_reason == "content_filter",
        "refusal": reply.refused or _REFUSAL.match(reply.text) is not None,
        "truncated": reply.finish_reason == "length",
    }
    return [flag for flag in FLAGS if found[flag]]


def document_of(prompt: RawPrompt, replies: Sequence[tuple[int, Reply]]) -> dict[str, Any]:
    """What of a line of the output file says prompt and replies.

    ``input_ids`` and ``loss_mask`` where the ids of all are known and each reply read exactly what came before; else
    ``messages``, in which a ``weight`` of 0 marks turns of the assistant that the target did not write or not finish; or ``prompt`` and
    ``response``.

    Args:
        prompt: what was asked.
        replies: each with the index among ``prompt.messages`` before which it comes; at least one.
    """
    last = replies[-1][1]
    if last.prompt_ids is not None and last.output_ids is not None:
        ids = [*last.prompt_ids, *last.output_ids]
        mask = [0] * len(ids)
        for _, reply in replies:
            if reply.prompt_ids is None or reply.output_ids is None:
                break
            start, stop = len(reply.prompt_ids), len(reply.prompt_ids) + len(reply.output_ids)
            if ids[:stop] != [*reply.prompt_ids, *reply.output_ids]:
                break  # the template wrote this turn otherwise when it was history: thoughts are often left out there
            mask[start:stop] = [1] * (stop - start)
        else:
            return {"input_ids": ids, "loss_mask": mask}
    if prompt.messages is None:
        return {"prompt": prompt.text, "response": last.text}
    written = {index: reply.message() for index, reply in replies}
    for index, reply in replies[:-1]:
        if reply.finish_reason == "length":  # as history it has an end, which the target did not write
            written[index]["weight"] = 0
    messages = [
        written.get(index) or ({**message, "weight": 0} if message["role"] == "assistant" else message)
        for index, message in enumerate([*prompt.messages, {"role": "assistant"}])
    ]
    return {"messages": messages, **({"tools": prompt.tools} if prompt.tools else {})}
