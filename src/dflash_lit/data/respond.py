"""The target writes the responses that the drafter learns: what it will be asked to predict is what the target says.

Sampling is plain: softmax at a temperature, nothing cut off and nothing penalised, since that is the distribution which
speculative decoding verifies. The responses are kept in one file per content key, so a second run reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import GenerationConfig

from dflash_lit.data.documents import Document
from dflash_lit.data.prompts import Prompt
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.errors import UserError
from dflash_lit.files import refuse_no_file
from dflash_lit.target.frozen import FrozenTarget, TargetInfo, generation_settings
from dflash_lit.watching.counted import Counted

__all__ = ["PromptBatch", "RespondingTarget", "Responses", "generate_batch", "respond"]

# Part of the key: raise it whenever the meaning of a stored file, or how responses are drawn, changes.
_FORMAT = 1


Item = TypeVar("Item")
Result = TypeVar("Result")


class RespondingTarget(Protocol):
    """What :func:`respond` needs of a target. It may run elsewhere: the model is not asked for."""

    @property
    def info(self) -> TargetInfo:
        """Its config."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights and tokenizers only."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response; may be none."""

    def each(self, function: Callable[[FrozenTarget, Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """``function(target, item)`` for each item, in order, wherever it is computed."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that are responded to together, and how: all that decides the responses, beside the target.

    Attributes:
        prompts: token ids of each, at least one prompt of at least one token.
        number: of the batch; with ``seed`` it decides what is drawn.
        max_new_tokens, temperature, seed: as in :func:`respond`.
        end_ids: ids that end a response; may be none.
        pad_id: fills shorter prompts from the left, and responses after their end.
    """

    prompts: tuple[tuple[int, ...], ...]
    number: int
    max_new_tokens: int
    temperature: float
    end_ids: tuple[int, ...]
    pad_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Responses:
    """The documents made from prompts, and what became of the others.

    Attributes:
        documents: prompt (context) and response (supervised), in the order of the prompts.
        prompts: how many prompts there were; ``len(documents) + empty + repetitive``.
        empty: prompts dropped because the target said nothing.
        repetitive: prompts dropped because the response got stuck in a short cycle.
        ended: documents whose response the target ended itself, with its end token as the last supervised one.
        tokens: response tokens that the target generated, dropped ones included.
        tokens_per_second: of the run that generated them.
        from_cache: whether they were read instead of generated.
    """

    documents: list[Document]
    prompts: int
    empty: int
    repetitive: int
    ended: int
    tokens: int
    tokens_per_second: float
    from_cache: bool


def respond(
    target: RespondingTarget,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    cache_dir: str | Path,
    progress: bool = True,
) -> Responses:
    """Let ``target`` respond to ``prompts``, or read what it said the last time.

    The responses are a function of the target, the prompts and the settings; the caller's random state is left alone.

    Args:
        target: who responds.
        prompts: what to, each of at least one token.
        max_new_tokens: of each response, >= 1, its end token included.
        temperature: 0 is greedy; 1 is the target's own distribution.
        batch_size: prompts at a time, >= 1.
        seed: of the sampling; each batch is seeded by itself.
        cache_dir: folder of the stored responses; made if missing.
        progress: show tokens per second and the time left.

    Raises:
        UserError: if a setting is out of range, a prompt is empty, or prompt and response are longer than the target reads.
    """
    _check(target, prompts, max_new_tokens, temperature, batch_size)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        # It decides which prompts share a batch, and thereby what is drawn.
        "batch_size": batch_size,
        "seed": seed,
    }
    end_ids = target.eos_ids
    key = _key(target.fingerprint, prompts, {**settings, "end_ids": end_ids})
    path = Path(cache_dir) / f"responses-{key[:32]}.safetensors"

    stored = _read(path, key, prompts)
    from_cache = stored is not None
    if stored is None:
        began = time.perf_counter()
        texts = _generate(target, prompts, end_ids=end_ids, progress=progress, **settings)
        stored = _Stored(texts, time.perf_counter() - began)
        _write(path, key, prompts, stored, settings)
    return _responses(prompts, stored, end_ids, from_cache)


def _check(
    target: RespondingTarget, prompts: Sequence[Prompt], max_new_tokens: int, temperature: float, batch_size: int
) -> None:
    for field, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{field}: {value} is too small; at least 1")
    if not 0.0 <= temperature < float("inf"):
        raise UserError(f"temperature: {temperature} must be 0 (greedy) or larger")
    if not prompts:
        raise UserError("there is no prompt to respond to; give at least one")
    for prompt in prompts:
        if not prompt.input_ids:
            raise UserError(f"prompt {prompt.name!r}: has no tokens; leave it out")
    longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
    limit = getattr(target.info.text, "max_position_embeddings", None)
    if limit is not None and len(longest.input_ids) + max_new_tokens > limit:
        raise UserError(
            f"prompt {longest.name!r}: {len(longest.input_ids)} tokens and a response of {max_new_tokens} are more than "
            f"the {limit} positions of the target; shorten the prompts or max_new_tokens"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Responses in the order of the prompts, cut after the end token, and the seconds they took."""

    texts: list[np.ndarray]  # int32 [>= 1] each
    seconds: float


def _generate(
    target: RespondingTarget,
    prompts: Sequence[Prompt],
    *,
    end_ids: tuple[int, ...],
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    progress: bool,
) -> list[np.ndarray]:
    """Generate one response a prompt; returns int32 arrays in the order of ``prompts``."""
    pad_id = next((i for i in (target.tokenizer.pad_token_id, *end_ids) if i is not None), 0)
    # Prompts of like length together: little padding. Longest first, so that running out of memory happens at once.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].input_ids))
    groups = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    batches = [
        PromptBatch(
            tuple(tuple(prompts[index].input_ids) for index in chosen),
            number,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            end_ids=end_ids,
            pad_id=pad_id,
            seed=seed,
        )
        for number, chosen in enumerate(groups)
    ]
    texts: list[np.ndarray] = [np.zeros(0, dtype=np.int32)] * len(prompts)
    tokens, began = 0, time.perf_counter()
    with Counted("responses", len(prompts), show=progress) as counted:
        for chosen, responses in zip(groups, target.each(generate_batch, batches), strict=True):
            for index, response in zip(chosen, responses, strict=True):
                texts[index] = response
                tokens += len(response)
            counted.advance(len(chosen), f"{tokens / (time.perf_counter() - began):,.0f} tokens/s")
    return texts


def generate_batch(target: FrozenTarget, batch: PromptBatch) -> list[np.ndarray]:
    """Let the model respond to a batch: int32 [>= 1] a prompt, in their order, cut after the end token.

    A function of model and batch alone: in whichever process, and after whatever else, a batch is computed, it draws the same.
    """
    sampling = {"do_sample": True, "temperature": batch.temperature, "top_k": 0, "top_p": 1.0} if batch.temperature > 0 else {}
    plain = GenerationConfig(
        max_new_tokens=batch.max_new_tokens,
        eos_token_id=list(batch.end_ids) or None,
        pad_token_id=batch.pad_id,
        use_cache=True,
        **sampling,
    )
    width = max(len(prompt) for prompt in batch.prompts)
    ids = torch.full((len(batch.prompts), width), batch.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with generation_settings(target.model, plain), _seeded(target.device, batch.seed, batch.number):
        out = target.model.generate(ids.to(target.device), attention_mask=mask.to(target.device))
    texts: list[np.ndarray] = []
    for response in out[:, width:].to("cpu", torch.int32).numpy():
        ends = np.flatnonzero(np.isin(response, batch.end_ids))
        texts.append(response[: ends[0] + 1].copy() if len(ends) else response.copy())
    return texts


@contextmanager
def _seeded(device: torch.device, seed: int, number: int) -> Iterator[None]:
    """Seed the generators of the CPU and of ``device`` for batch ``number``; restore them afterwards."""
    device = torch.device(device)
    batch_seed = int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8], "big") >> 1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.random.fork_rng(devices=[index]), torch.cuda.device(index):
            # Not torch.manual_seed: it would seed the other GPUs too, which are not restored.
            torch.default_generator.manual_seed(batch_seed)
            torch.cuda.manual_seed(batch_seed)
            yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(batch_seed)
            yield


def _responses(prompts: Sequence[Prompt], stored: _Stored, end_ids: tuple[int, ...], from_cache: bool) -> Responses:
    documents: list[Document] = []
    empty = repetitive = ended = tokens = 0
    for prompt, text in zip(prompts, stored.texts, strict=True):
        tokens += len(text)
        has_end = int(text[-1]) in end_ids
        said = text[:-1] if has_end else text
        if not len(said):
            empty += 1
        elif is_repetitive(said):
            repetitive += 1
        else:
            ended += has_end
            ids = np.concatenate([np.asarray(prompt.input_ids, dtype=np.int32), text])
            documents.append(Document(ids, np.arange(len(ids)) >= len(prompt.input_ids), prompt.name))
    rate = tokens / stored.seconds if stored.seconds > 0 else 0.0
    return Responses(documents, len(prompts), empty, repetitive, ended, tokens, rate, from_cache)


# ---------------------------------------------------------------------------------------------------------------------- cache


def _key(fingerprint: str, prompts: Sequence[Prompt], settings: dict[str, Any]) -> str:
    """Hash everything that decides the responses. Names do not: they are not stored."""
    digest = hashlib.sha256(json.dumps([_FORMAT, fingerprint, settings], sort_keys=True).encode())
    for prompt in prompts:
        digest.update(len(prompt.input_ids).to_bytes(8, "little"))
        digest.update(np.asarray(prompt.input_ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def _payload(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _write(path: Path, key: str, prompts: Sequence[Prompt], stored: _Stored, settings: dict[str, Any]) -> None:
    """Store prompts and responses as one flat list of tokens; under the final name only when complete."""
    sequences = [
        np.concatenate([np.asarray(prompt.input_ids, dtype=np.int32), text])
        for prompt, text in zip(prompts, stored.texts, strict=True)
    ]
    tensors: dict[str, np.ndarray] = {
        "tokens": np.concatenate(sequences).astype(np.int32),
        "offsets": np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype=np.int64),
        "prompt_lengths": np.array([len(prompt.input_ids) for prompt in prompts], dtype=np.int32),
    }
    facts = {
        "format": str(_FORMAT),
        "key": key,
        "payload": _payload(tensors),
        "seconds": repr(stored.seconds),
        "settings": json.dumps(settings),
    }
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two runs that make the same file do not meet before the rename, and either result is right.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        os.close(handle)
        save_file(tensors, temporary, metadata=facts)
        os.replace(temporary, path)
    except OSError as error:
        # The responses may have taken hours: go on without the file.
        warnings.warn(f"{path}: the responses could not be stored ({error}); the next run makes them again", stacklevel=3)
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _read(path: Path, key: str, prompts: Sequence[Prompt]) -> _Stored | None:
    """Read stored responses; None if there are none, or, with a warning, if the file is damaged."""
    if not path.exists():
        return None
    try:
        refuse_no_file(path, "it is not waited for")
        with safe_open(path, framework="numpy") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("offsets", "prompt_lengths", "tokens")}
        return _unpack(facts, tensors, key, prompts)
    except (SafetensorError, OSError, KeyError, ValueError, UserError) as error:
        warnings.warn(f"{path}: stored responses are damaged ({error}); they are made anew", stacklevel=3)
        return None


def _unpack(facts: dict[str, str], tensors: dict[str, np.ndarray], key: str, prompts: Sequence[Prompt]) -> _Stored:
    """Check a file's content against its own facts and the prompts; ValueError or KeyError if anything differs."""
    tokens, offsets, prompt_lengths = tensors["tokens"], tensors["offsets"], tensors["prompt_lengths"]
    expected = np.array([len(prompt.input_ids) for prompt in prompts])
    if facts["key"] != key or facts["format"] != str(_FORMAT):
        raise ValueError("written for other prompts or settings")
    if facts["payload"] != _payload(tensors):
        raise ValueError("content differs from what was written")
    if tokens.ndim != 1 or offsets.shape != (len(prompts) + 1,) or prompt_lengths.shape != (len(prompts),):
        raise ValueError("wrong shapes")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (prompt_lengths != expected).any():
        raise ValueError("wrong counts")
    if (np.diff(offsets) <= expected).any():
        raise ValueError("a response is missing")
    starts = offsets[:-1] + expected
    texts = [tokens[start:stop].copy() for start, stop in zip(starts, offsets[1:], strict=True)]
    return _Stored(texts, float(facts["seconds"]))
