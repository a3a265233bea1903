"""Conversations into tokens, as the target will be served: what was generated, and what stood before it.

The target's own chat template decides everything. For each turn of the assistant it is asked twice: for the prompt that the server
would have made of what came before, and for the conversation up to this turn. The second begins with the first, and the rest is
what the target generated.

Templates may rewrite earlier turns (Qwen3 drops their reasoning), so a turn is found as it was generated only in the conversation
that ends with it. Turns that stay as they are share one document; where the template rewrites, a new one begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_lit.data.records import LONGEST, Record
from dflash_lit.data.skips import Skip
from dflash_lit.errors import UserError

__all__ = ["ChatSettings", "ChatTokenizer", "Tokens", "has_reasoning"]

THINKING = ("on", "off", "mixed")
# Arguments of a template, or of what renders it, that are not for the settings to say.
_TAKEN = (
    *("messages", "tools", "add_generation_prompt", "conversations", "documents", "chat_template"),
    *("return_assistant_tokens_mask", "continue_final_message"),
)

# Words that no conversation contains, unless it was rendered by a chat template already.
_MARKUP = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|eot_id|> <|begin_of_text|> <start_of_turn> <end_of_turn> <|endoftext|> [INST] "
    "[/INST] <|assistant|> <|user|> <|channel|> <\uff5cAssistant\uff5c> <\uff5cUser\uff5c> <|START_OF_TURN_TOKEN|>"
).split()
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How conversations become tokens.

    Attributes:
        thinking: ``on`` or ``off``: as the target will be served; turns of the other kind are left out. ``mixed``: each as it was
            recorded. None: the template is not told, as for targets that do not think.
        thinking_argument: what the template calls it.
        template_arguments: further arguments of the template.
        vocab_size: ids are below it; None: the tokenizer's own.
        mask_token_id: the drafter's; a record that contains it is not taken. None: there is none yet.

    Raises:
        UserError: if ``thinking`` is none of these.
    """

    thinking: str | None = "mixed"
    thinking_argument: str = "enable_thinking"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.thinking not in (None, *THINKING):
            raise UserError(f"data.thinking={self.thinking!r}: choose {', '.join(THINKING)} or null")
        if not self.thinking_argument.isidentifier():
            raise UserError(f"data.thinking_argument={self.thinking_argument!r}: is no name of a template's argument")
        for field_, names in (("thinking_argument", [self.thinking_argument]), ("template_arguments", self.template_arguments)):
            if taken := sorted(set(names) & set(_TAKEN)):
                raise UserError(f"data.{field_}: {taken[0]!r} is what each conversation gives the template; take it out")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One document.

    Attributes:
        input_ids: int32 [n], n >= 2.
        spans: int32 [k, 2], k >= 1: tokens [start, stop) were generated; ascending, apart, start >= 1.
    """

    input_ids: np.ndarray
    spans: np.ndarray


def has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether a turn begins with thoughts: in a field of their own, or in the text before ``</think>``."""
    if message.get("reasoning_content", "").strip():
        return True
    before, found, _ = message.get("content", "").partition("</think>")
    return bool(found and before.replace("<think>", "").strip())


def _with_open_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn that was cut off within ``<think>`` in its text, with these thoughts in their own field."""
    text = message.get("content", "").lstrip()
    if message.get("reasoning_content") or not text.startswith("<think>") or "</think>" in text:
        return message
    return {**message, "content": "", "reasoning_content": text.removeprefix("<think>").strip("\n")}


def _only_thoughts(message: Mapping[str, Any]) -> str:
    """The thoughts of a turn that has nothing else; else an empty text."""
    if message.get("content", "").strip() or message.get("tool_calls"):
        return ""
    return str(message.get("reasoning_content") or "").strip()


class ChatTokenizer:
    """Tokenises records with the target's tokenizer and chat template.

    Args:
        tokenizer: the target's.
        settings: see there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChatSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self._vocab_size = settings.vocab_size or len(tokenizer)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = tuple(sorted(filter(None, special), key=len, reverse=True))
        words = sorted({*_MARKUP, *self._special}, key=len, reverse=True)
        self._markup = re.compile("|".join(map(re.escape, words)))
        # Of plain texts, which may be rendered conversations, but in the target's own template.
        foreign = [word for word in _MARKUP if word not in self._special]
        self._foreign = re.compile("|".join(map(re.escape, foreign)))
        self._last_special = re.compile("|".join(map(re.escape, self._special))) if self._special else None
        self._whole = self._adds_to_beginnings()

    def documents(self, record: Record) -> list[Tokens]:
        """One or several documents of a record: several where the template rewrites earlier turns.

        Raises:
            Skip: if nothing can be learnt from it.
        """
        if record.input_ids is not None and record.loss_mask is not None:
            return [self._checked(record.input_ids, _runs(record.loss_mask))]
        if record.messages is not None:
            return [
                self._encoded(text, spans)
                for text, spans in self.conversation(record.messages, record.tools, record.finish_reason == "length")
            ]
        text = record.text if record.text is not None else record.prompt
        assert text is not None
        if found := self._foreign.search(text + (record.response or "")):
            raise Skip("text of another chat template", found.group())
        # Plain text begins as the tokenizer begins texts; a template would have written such tokens itself.
        ids = self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
        if record.text is not None:
            return [self._checked(np.array(ids, dtype=np.int64), [(1, len(ids))])]
        if record.response is None:
            raise Skip("prompt without a response", "let the target respond to it first", choice=True)
        said = self._ids(record.response)
        if record.finish_reason == "stop" and self.tokenizer.eos_token_id is not None:
            said.append(self.tokenizer.eos_token_id)  # generated, though no text
        return [self._checked(np.array([*ids, *said], dtype=np.int64), [(len(ids), len(ids) + len(said))])]

    # -- text

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, cut: bool = False
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Rendered conversations, each with the stretches of characters that were generated.

        Args:
            cut: the last turn was cut off: the end that the template gives it was not generated.

        Raises:
            Skip: if the template refuses, or no turn can be told from its prompt.
        """
        for number, message in enumerate(messages):
            self._refuse_markup(message, number)
        if cut:
            messages = [*messages[:-1], _with_open_thoughts(messages[-1])]
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight") != 0]
        if not turns:
            raise Skip("no turn of the assistant", choice=True)
        thinking = self.settings.thinking
        found: list[tuple[str, list[tuple[int, int]]]] = []
        for number in turns:
            thinks = has_reasoning(messages[number])
            if thinking in ("on", "off") and thinks != (thinking == "on"):
                continue
            text, span, before = self._turn(messages[: number + 1], tools, thinks, cut and number == len(messages) - 1)
            if found and before.startswith(found[-1][0]) and text.startswith(found[-1][0]):
                found[-1] = (text, [*found[-1][1], span])
            else:
                found.append((text, [span]))
        if not found:
            raise Skip(
                f"every turn is {'without' if thinking == 'on' else 'with'} reasoning", f"thinking={thinking}", choice=True
            )
        return found

    def _turn(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, thinks: bool, cut: bool
    ) -> tuple[str, tuple[int, int], str]:
        """The conversation up to its last turn, where that turn stands in it, and the prompt it was generated for."""
        arguments: dict[str, Any] = dict(self.settings.template_arguments)
        if self.settings.thinking is not None:
            arguments[self.settings.thinking_argument] = thinks
        prompt, _ = self._render(messages[:-1], tools, add_generation_prompt=True, **arguments)
        text, marked = self._render(messages, tools, add_generation_prompt=False, **arguments)
        if len(text) > LONGEST:
            raise Skip("too long", f"{len(text)} characters")
        follows = text.startswith(prompt)
        if marked:
            # The template says itself what is generated; but what the prompt holds already is not.
            start, stop = marked[-1]
            start = max(start, len(prompt)) if follows else start
            stop = self._end(text[:stop], start, cut)
        elif follows:
            start, stop = len(prompt), self._end(text, len(prompt), cut)
        else:
            raise Skip(
                "the template's prompt is no beginning of the turn",
                "it renders a finished turn otherwise than it asks for one",
                choice=True,
            )
        if cut and (thoughts := _only_thoughts(messages[-1])):
            # What the template puts after thoughts was not generated either.
            place = text.rfind(thoughts, start, stop)
            stop = place + len(thoughts) if place >= 0 else start
        if not text[start:stop].strip():
            raise Skip("empty turn", "the template leaves nothing of it")
        return text[:stop], (start, stop), prompt

    def _end(self, text: str, start: int, cut: bool) -> int:
        """Where the turn ends: with its last special token, if nothing but white space follows, which the template adds.

        A turn that was ``cut`` off ends before that token.
        """
        if self._last_special is None:
            return len(text)
        last = None
        for last in self._last_special.finditer(text, start):  # noqa: B007
            pass
        if last is None or text[last.end() :].strip():
            return len(text)
        return last.start() if cut else last.end()

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **arguments: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and what it marks as generated, in characters."""
        try:
            template = self.tokenizer.get_chat_template(tools=list(tools) if tools else None)
            marks = bool(_GENERATION.search(template))
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                **{**self.tokenizer.special_tokens_map, **arguments},
            )
            texts, spans = rendered
        except Exception as error:  # whatever the template's own code raises
            if not self.tokenizer.chat_template:
                raise UserError(
                    "the target's tokenizer has no chat template for messages; give prompts and responses, texts or tokens instead"
                ) from error
            raise Skip("the chat template refuses", " ".join(str(error).split())[:120]) from error
        return str(texts[0]), [(int(a), int(b)) for a, b in spans[0]] if marks else []

    def _refuse_markup(self, message: Mapping[str, Any], number: int) -> None:
        said = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
        said["tool_calls"] = json.dumps(message.get("tool_calls") or "", ensure_ascii=False, default=str)
        for name, text in said.items():
            if found := self._markup.search(text):
                raise Skip("chat markup within a turn", f"messages[{number}].{name} has {found.group()}")

    # -- tokens

    def _adds_to_beginnings(self) -> bool:
        """Whether a text's first token differs from the same text's after something else (as with SentencePiece's leading space)."""
        if not self.tokenizer.is_fast:
            return False
        alone = self._ids("word")
        after = self._ids("\nword")
        return alone != after[len(after) - len(alone) :]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        if self._whole:
            return self._encoded_whole(text, spans)
        # A server tokenises the prompt by itself, and the target goes on from there: no token reaches over the border.
        ids: list[int] = []
        runs = []
        place = 0
        for start, stop in spans:
            ids += self._ids(text[place:start])
            first = len(ids)
            ids += self._ids(text[start:stop])
            runs.append((first, len(ids)))
            place = stop
        return self._checked(np.array(ids, dtype=np.int64), runs)

    def _encoded_whole(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        """In one piece: a token belongs to the stretch that its first character is in."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        runs = [(int(a), int(b)) for a, b in np.searchsorted(starts, np.array(spans))]
        return self._checked(np.array(encoded["input_ids"], dtype=np.int64), runs)

    def _checked(self, ids: np.ndarray, spans: Sequence[tuple[int, int]]) -> Tokens:
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise Skip("token id out of range", f"{wrong} of {self._vocab_size}")
        if self.settings.mask_token_id is not None and (ids == self.settings.mask_token_id).any():
            raise Skip("the drafter's mask token within the text", f"id {self.settings.mask_token_id}")
        # The first token of all is predicted from nothing.
        joined: list[list[int]] = []
        for start, stop in ((max(start, 1), stop) for start, stop in spans):
            if stop <= start:
                continue
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(stop, joined[-1][1])
            else:
                joined.append([start, stop])
        # An anchor is a supervised token with a supervised one after it.
        if not any(stop - start >= 2 for start, stop in joined):
            raise Skip("nothing to learn", "no two generated tokens in a row")
        return Tokens(ids.astype(np.int32), np.array(joined, dtype=np.int32).reshape(-1, 2))


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of true values, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
