"""A server that speaks the OpenAI protocol, as a client sees it: one request, repeated until there is an answer.

``httpx2`` and not the ``openai`` package, which is built on it: token ids are outside that package's types, it does not repeat a
request whose answer is no JSON or lacks its choices, and huggingface_hub 2 brings httpx2 anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from dflash_lit.errors import UserError
from dflash_lit.responses.raw_prompts import Message, RawPrompt
from dflash_lit.responses.reply import Reply

__all__ = ["TOKEN_ID_FIELDS", "NoAnswerError", "Sampling", "Server"]

Result = TypeVar("Result")

TOKEN_ID_FIELDS: dict[str, dict[str, bool]] = {
    # vLLM from 0.10.2; SGLang for completions, and of late for chat too.
    "auto": {"return_token_ids": True},
    # SGLang from 0.5.13 has them among the log-probabilities.
    "sglang": {"return_prompt_token_ids": True, "return_meta_info": True, "logprobs": True},
    "off": {},
}
"""What asks a server for token ids, by the value of ``--token-ids``."""

_OWN_FIELDS = ("model", "messages", "prompt", "tools", "n", "stream", "seed", "temperature", "top_p", "max_tokens")
# Of 4xx these say "not now"; the others say "not like that".
_REPEATED = (408, 409, 425, 429)
# What asking again does not change, for whichever prompt.
_HOPELESS = {
    301: "has moved",
    302: "has moved",
    307: "has moved",
    308: "has moved",
    401: "wants another API key",
    403: "refuses access",
    404: "has no such page or model",
    405: "has no such page",
}
_POOL = 32
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 600.0


class NoAnswerError(Exception):
    """There is no answer to this prompt; the message says why. Others may go well."""


class _AgainError(Exception):
    """No answer, but one may come."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: mass of the nucleus, 1 for all.
        max_tokens: of each turn.
        seed: each prompt's own seed is made of it and the prompt's id; None leaves it to the server.
        extra_body: further fields of the request.

    Raises:
        UserError: if a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    seed: int | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p}: must lie in (0, 1]")
        for name in _OWN_FIELDS:
            if name in self.extra_body:
                raise UserError(f"--extra-body: {name!r} is set by this command itself; take it out")

    def seed_of(self, prompt: RawPrompt) -> int | None:
        """A prompt's seed, in [0, 2^31): the same in whichever order prompts are asked."""
        if self.seed is None:
            return None
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{prompt.id}".encode()).digest()[:4], "big") >> 1


class Server:
    """An asynchronous context manager; many may ask at the same time.

    Args:
        url: up to and including ``/v1``.
        model: its name there; None for the only one that the server has.
        sampling: of all responses.
        in_flight: connections, at most.
        retries: how often a request is repeated.
        backoff: seconds before the first repetition; each next one doubles, up to a minute, less up to half by chance.
        timeout: seconds for one answer.
        api_key: sent as a bearer token; None for none.
        token_ids: a key of :data:`TOKEN_ID_FIELDS`.

    Attributes:
        repeated: how many requests were repeated so far.
        gives_ids: whether the server is still asked for token ids.

    Raises:
        UserError: for a URL or a key that is none.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        sampling: Sampling,
        *,
        in_flight: int = 64,
        retries: int = 12,
        backoff: float = 0.5,
        timeout: float = 1800.0,
        api_key: str | None = None,
        token_ids: str = "auto",
    ) -> None:
        parts = urlsplit(url)
        try:
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number, or too large a one
            sound = False
        if not sound:
            raise UserError(f"--server {url}: is no address; write it like http://127.0.0.1:8000/v1")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UserError("the API key has characters that no header may have; copy it again")
        self.url = url.rstrip("/")
        self.model = model
        self.sampling = sampling
        self.retries, self.backoff, self.timeout = retries, backoff, timeout
        self.repeated = 0
        self._id_fields = TOKEN_ID_FIELDS[token_ids]
        secure = ssl.create_default_context()
        # A pool looks through all of its connections for each request: 1,024 requests at a time go through small ones twice as fast.
        self._clients = [
            httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                limits=httpx2.Limits(max_connections=_POOL, max_keepalive_connections=_POOL),
                # The whole request has a limit of its own: pauses while the target writes say nothing.
                timeout=httpx2.Timeout(None, connect=min(30.0, timeout)),
                # A proxy for the world outside does not know this host's own ports.
                trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
                verify=secure,
            )
            for _ in range(-(-in_flight // _POOL))
        ]

    @property
    def gives_ids(self) -> bool:
        return bool(self._id_fields)

    async def __aenter__(self) -> Server:
        for client in self._clients:
            await client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._clients:
            await client.__aexit__(kind, error, traceback)

    async def model_name(self) -> str:
        """The name of the model: the given one, else that of the only one there is.

        Raises:
            UserError: if none was given and the server has not exactly one, or does not answer.
        """
        if self.model is None:
            try:
                names = await self._repeat("GET", "models", None, _model_names, 0)
            except NoAnswerError as error:
                raise UserError(f"--server {self.url}: its models could not be listed ({error}); give --model") from error
            if len(names) != 1:
                raise UserError(f"--server {self.url}: has {len(names)} models ({', '.join(names[:5])}); give --model")
            self.model = names[0]
        return self.model

    async def respond(self, prompt: RawPrompt, *, all_turns: bool = False, lane: int = 0) -> list[tuple[int, Reply]]:
        """Let the target speak at each of :meth:`RawPrompt.turns`.

        Args:
            lane: in [0, in_flight); those who ask at the same time have different ones.

        Raises:
            NoAnswerError: if there is no answer.
            UserError: if there would be none to any prompt.
        """
        replies: list[tuple[int, Reply]] = []
        messages: list[Message] = list(prompt.messages or ())
        for index in prompt.turns(all_turns=all_turns):
            reply = await self._ask(prompt, messages[:index], lane)
            replies.append((index, reply))
            if index < len(messages):
                messages[index] = reply.message()
        return replies

    async def _ask(self, prompt: RawPrompt, messages: Sequence[Message], lane: int) -> Reply:
        chat = prompt.messages is not None
        page = "chat/completions" if chat else "completions"
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            **({"messages": list(messages)} if chat else {"prompt": prompt.text}),
            **({"tools": prompt.tools} if prompt.tools else {}),
            **sampling.extra_body,
        }
        if (seed := sampling.seed_of(prompt)) is not None:
            body["seed"] = seed
        while True:
            asked: dict[str, Any] = dict(self._id_fields)
            if not chat and "logprobs" in asked:
                asked["logprobs"] = 1  # here the protocol counts them
            try:
                return await self._repeat("POST", page, {**body, **asked}, lambda answer: _reply(answer, chat), lane)
            except _RefusedError as error:
                # Many servers refuse what they do not know, and say what that is.
                if not any(name in str(error) for name in asked):
                    raise
                self._id_fields = {}

    async def _repeat(
        self, method: str, page: str, body: dict[str, Any] | None, read: Callable[[Any], Result], lane: int
    ) -> Result:
        """Send a request until there is an answer that ``read``, by raising no ValueError, can make something of."""
        for attempt in range(self.retries + 1):
            try:
                return await self._once(method, page, body, read, lane)
            except _AgainError as error:
                if attempt == self.retries:
                    raise NoAnswerError(f"{error}, {attempt + 1} times") from error
                self.repeated += 1
                pause = min(_LONGEST_WAIT, self.backoff * 2.0**attempt) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(pause, error.wait))
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, page: str, body: dict[str, Any] | None, read: Callable[[Any], Result], lane: int
    ) -> Result:
        try:
            async with asyncio.timeout(self.timeout):
                answer = await self._clients[lane // _POOL].request(method, f"{self.url}/{page}", json=body)
        except TimeoutError as error:
            raise _AgainError(f"no answer within {self.timeout:g} s") from error
        except ValueError as error:
            # Half a character in an earlier turn of the target.
            raise NoAnswerError(f"the request cannot be written ({error})") from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise _AgainError(f"{type(error).__name__} ({error})" if str(error) else type(error).__name__) from error
        status = answer.status_code
        if status >= 500 or status in _REPEATED:
            raise _AgainError(f"HTTP {status} ({_said(answer)})", _retry_after(answer.headers.get("retry-after")))
        if status in _HOPELESS:
            where = answer.headers.get("location")
            raise UserError(f"--server {self.url}: {_HOPELESS[status]} ({where or _said(answer)}), HTTP {status}")
        if status in (400, 422):
            raise _RefusedError(f"HTTP {status} ({_said(answer)})")
        if status != 200:
            raise NoAnswerError(f"HTTP {status} ({_said(answer)})")
        try:
            return read(answer.json())
        except (ValueError, RecursionError) as error:
            raise _AgainError(f"an answer that cannot be read ({error})") from error


class _RefusedError(NoAnswerError):
    """The server does not take the request as it is; perhaps only a field of it."""


def _said(answer: httpx2.Response) -> str:
    """The beginning of what a server says, on one line."""
    return " ".join(answer.text.split())[:200] or answer.reason_phrase or "no reason given"


def _retry_after(text: str | None) -> float:
    """Seconds to wait by the ``Retry-After`` header, which gives seconds or a date; 0 if there is none that can be read."""
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER) if math.isfinite(seconds) else 0.0


def _model_names(answer: Any) -> list[str]:
    """Read the list of models; ValueError if it is none."""
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
        raise ValueError("it is no list of models")
    return [str(model["id"]) for model in models]


def _reply(answer: Any, chat: bool) -> Reply:
    """Read an answer to a chat or completion request.

    Raises:
        ValueError: if it is not one, or says that generation was broken off.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("it has no choices")
    choice = choices[0]
    message = choice.get("message") if chat else choice
    if not isinstance(message, dict):
        raise ValueError("it has no message")
    text = message.get("content" if chat else "text")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls, refusal = message.get("tool_calls"), message.get("refusal")
    if not isinstance(text, str | None) or not isinstance(reasoning, str | None) or not isinstance(calls, list | None):
        raise ValueError("its text is no text")
    if text is None and not (reasoning or calls or refusal) and ("content" if chat else "text") not in message:
        raise ValueError("it has no text")
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise ValueError("its finish_reason is no text")
    if reason in ("abort", "error"):
        raise ValueError(f"its finish_reason is {reason!r}")
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    tokens = tokens if type(tokens) is int and 0 <= tokens < 2**31 else None
    prompt_ids = _ids(choice.get("prompt_token_ids") or answer.get("prompt_token_ids"))
    output_ids = _output_ids(choice)
    # One without the other is of no use, and some of them would be a response that nobody gave.
    if not prompt_ids or not output_ids or tokens not in (None, len(output_ids)):
        prompt_ids = output_ids = None
    return Reply(
        text=text or (refusal if isinstance(refusal, str) else ""),
        finish_reason=reason,
        reasoning=reasoning or None,
        tool_calls=calls or None,
        refused=bool(refusal),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        tokens=len(output_ids) if output_ids is not None else tokens,
    )


def _output_ids(choice: dict[str, Any]) -> list[int] | None:
    """What vLLM calls ``token_ids``; SGLang keeps them among the log-probabilities, as [log-probability, id, text]."""
    if (ids := _ids(choice.get("token_ids"))) is not None:
        return ids
    meta = choice.get("meta_info")
    if not isinstance(meta, dict):
        return None
    if (ids := _ids(meta.get("output_token_ids"))) is not None:
        return ids
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        return None
    return _ids([entry[1] for entry in entries])


def _ids(value: Any) -> list[int] | None:
    """A list of token ids, None if it is anything else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value):
        return value
    return None
