"""Prompts: from the standard library's sources, which every machine has, or from a file of the user."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash_lit.data.prompt_line import parse_prompt
from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file
from dflash_lit.target.embedded.corpus import SourceFile, is_held_out, stdlib_files

__all__ = ["Prompt", "file_prompts", "split_held_out", "stdlib_prompts"]

# More characters than most tokens have: a slice of this many per wanted token is nearly always long enough at once.
_CHARACTERS_PER_TOKEN = 8
_TEXT_LINE = re.compile(r"^[^\n]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target continues: ``name`` says where it comes from, ``input_ids`` are its tokens (at least one)."""

    name: str
    input_ids: list[int]


def stdlib_prompts(
    tokenizer: PreTrainedTokenizerBase, *, count: int, prompt_tokens: int, held_out: bool, seed: int
) -> list[Prompt]:
    """Take ``count`` distinct prompts of exactly ``prompt_tokens`` tokens from the standard library's sources.

    A prompt begins at a random line of a file. The files take turns, in random order, so that all give as nearly as possible
    the same number.

    Args:
        tokenizer: the target's.
        count: how many prompts, >= 1.
        prompt_tokens: tokens of each, >= 1.
        held_out: from the held-out files, or from the others.
        seed: of the places.

    Raises:
        UserError: if the library does not hold that many.
    """
    for field, value in (("count", count), ("prompt_tokens", prompt_tokens)):
        if value < 1:
            raise UserError(f"{field}: {value} is too small; at least 1")
    rng = np.random.default_rng([seed, int(held_out)])
    files = [file for file in stdlib_files() if is_held_out(file.name) == held_out]
    turns = deque(_Places(files[index], rng) for index in rng.permutation(len(files)))
    prompts: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    while len(prompts) < count and turns:
        drawn: list[tuple[_Places, int]] = []
        for _ in range(min(count - len(prompts), len(turns))):
            places = turns.popleft()
            if (start := places.draw()) is not None:
                drawn.append((places, start))
                turns.append(places)
        encoded = _encode_from(tokenizer, [(places.file.text, start) for places, start in drawn], prompt_tokens)
        for (places, start), ids in zip(drawn, encoded, strict=True):
            if len(ids) < prompt_tokens:
                places.end = min(places.end, start)
            elif (key := tuple(ids)) not in seen:
                seen.add(key)
                prompts.append(Prompt(f"{places.file.name}:{places.file.text.count(chr(10), 0, start) + 1}", ids))
    if len(prompts) < count:
        side = "held-out" if held_out else "training"
        raise UserError(
            f"the standard library's {side} files hold {len(prompts)} distinct prompts of {prompt_tokens} tokens, "
            f"not {count}; ask for fewer or shorter prompts, or give a file of prompts"
        )
    return prompts


class _Places:
    """Where prompts may begin in a file: at lines that are not empty, each once, in random order, before ``end``."""

    def __init__(self, file: SourceFile, rng: np.random.Generator) -> None:
        self.file = file
        self.end = len(file.text)  # lowered when a prompt did not fit before the file's end: later ones will not either
        self._seed = int(rng.integers(2**63))
        self._starts: Iterator[int] | None = None

    def draw(self) -> int | None:
        """Give the next place, or None when there are no more."""
        if self._starts is None:  # only now: a run of few prompts looks into few files
            starts = np.array([match.start() for match in _TEXT_LINE.finditer(self.file.text)], dtype=np.int64)
            self._starts = iter(np.random.default_rng(self._seed).permutation(starts).tolist())
        return next((start for start in self._starts if start < self.end), None)


def _encode_from(tokenizer: PreTrainedTokenizerBase, drawn: Sequence[tuple[str, int]], prompt_tokens: int) -> list[list[int]]:
    """Give the first ``prompt_tokens`` tokens of each (text, start), or fewer where the text ends before."""
    result: list[list[int]] = [[] for _ in drawn]
    missing = list(range(len(drawn)))
    characters = prompt_tokens * _CHARACTERS_PER_TOKEN
    while missing:
        slices, whole = [], []
        for index in missing:
            text, start = drawn[index]
            # To the end of a line, where hardly any tokenizer merges across.
            end = text.find("\n", start + characters)
            slices.append(text[start:] if end < 0 else text[start:end])
            whole.append(end < 0)
        short = []
        encoded = tokenizer(slices, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for index, ids, is_whole in zip(missing, encoded["input_ids"], whole, strict=True):
            # Spare tokens: the last one before the cut could have merged with what follows.
            if is_whole or len(ids) >= prompt_tokens + 2:
                result[index] = list(ids[:prompt_tokens])
            else:
                short.append(index)
        missing, characters = short, 2 * characters
    return result


def file_prompts(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> list[Prompt]:
    """Read prompts from a file: ``.jsonl`` or ``.txt``, one prompt a line; empty lines are skipped, repeated prompts dropped.

    A line of ``.jsonl`` is an object with ``prompt``, a text, or ``messages``, a list of ``{"role", "content"}`` objects. The
    tokenizer's chat template turns messages into a prompt; an assistant's message at their end is left out, since the target
    writes that one itself. Prompts longer than ``max_prompt_tokens`` lose their beginning.

    Raises:
        UserError: with file and line, if something cannot be read.
    """
    path = Path(path)
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens: {max_prompt_tokens} is too small; at least 1")
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"{path}: unknown kind of file; give .jsonl (an object a line) or .txt (a prompt a line)")
    refuse_no_file(path, "check the path")
    try:
        # Not splitlines: it also splits at characters that may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}); convert it") from error

    names: list[str] = []
    texts: list[str] = []
    templated: list[bool] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"{path}:{number}"
        text, is_chat = (line.rstrip("\r"), False) if path.suffix == ".txt" else _parse(line, name, tokenizer)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{name}: has half a character (a lone surrogate), which has no tokens; correct it")
        names.append(name)
        texts.append(text)
        templated.append(is_chat)
    if not texts:
        raise UserError(f"{path}: holds no prompt; write one a line")

    prompts: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    for name, ids in zip(names, _encode_texts(tokenizer, texts, templated), strict=True):
        if not ids:
            raise UserError(f"{name}: the prompt has no tokens; write a text or delete the line")
        ids = ids[-max_prompt_tokens:]
        if (key := tuple(ids)) not in seen:
            seen.add(key)
            prompts.append(Prompt(name, ids))
    return prompts


def _parse(line: str, name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Read one line of ``.jsonl``: the prompt's text, and whether a chat template made it."""
    entry = parse_prompt(line, name)
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise UserError(f'{name}: "prompt" must be a text')
        return entry["prompt"], False
    messages: Any = entry["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in messages
    ):
        raise UserError(f'{name}: "messages" must be a list of objects with "role" and "content"')
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError(f'{name}: "messages" has nothing to respond to; give at least one message of the user')
    if not tokenizer.chat_template:
        raise UserError(f'{name}: the target\'s tokenizer has no chat template for "messages"; write "prompt" texts instead')
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever the template's own code raises
        raise UserError(f"{name}: the chat template refuses the messages ({error}); correct them") from error
    return str(text), True


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], templated: list[bool]) -> list[list[int]]:
    """Tokenize ``texts``, in batches. A template has written its special tokens itself, so none are added there."""
    result: list[list[int]] = [[] for _ in texts]
    for with_template in (False, True):
        chosen = [index for index, is_chat in enumerate(templated) if is_chat == with_template]
        if not chosen:
            continue
        batch = [texts[index] for index in chosen]
        encoded = tokenizer(batch, add_special_tokens=not with_template, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        for index, ids in zip(chosen, encoded, strict=True):
            result[index] = list(ids)
    return result


def split_held_out(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (training, held out), by a hash of each prompt's tokens and ``seed``.

    A prompt's side depends on nothing else, so it stays when others come or go. One exception keeps small files usable: if
    a side would be empty, it gets the prompt nearest to it.

    Args:
        prompts: at least two, distinct.
        share: of the held-out side, in (0, 1).
        seed: of the hash.

    Raises:
        UserError: if ``share`` is out of range or there are fewer than two prompts.
    """
    if not 0.0 < share < 1.0:
        raise UserError(f"held-out share: {share} must lie between 0 and 1, such as 0.05")
    if len(prompts) < 2:
        raise UserError(f"{len(prompts)} prompt(s) cannot be split into training and held-out ones; give at least 2")
    points = [_hash_point(prompt, seed) for prompt in prompts]
    ranked = sorted(points)
    # Between the smallest and the largest, so that each side has one.
    threshold = min(max(share, ranked[0]), ranked[-2])
    training = [prompt for prompt, point in zip(prompts, points, strict=True) if point > threshold]
    held_out = [prompt for prompt, point in zip(prompts, points, strict=True) if point <= threshold]
    return training, held_out


def _hash_point(prompt: Prompt, seed: int) -> float:
    """Map a prompt's tokens to a point in [0, 1)."""
    digest = hashlib.sha256(f"{seed}:".encode() + np.asarray(prompt.input_ids, dtype="<i4").tobytes()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
