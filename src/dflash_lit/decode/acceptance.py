"""How much a drafter helps: real decoding of held-out prompts, with and without it, in one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.progress import Progress
from transformers import GenerationConfig

from dflash_lit.decode.chain import Decoded, DecodingTarget, decode_chain, decode_plain
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import FrozenTarget, generation_settings

__all__ = ["Acceptance", "Sample", "decoding", "measure", "round_samples"]


@dataclass(frozen=True)
class Acceptance:
    """What decoding some prompts at one temperature gave.

    Attributes:
        temperature: 0 is greedy.
        tau: mean tokens a verify pass over all rounds of all prompts, bonus included.
        tau_error: its standard error, over prompts (a prompt's rounds are not independent).
        tokens_per_s_plain, tokens_per_s_drafted: new tokens a second without and with the drafter, batch 1.
        accepted_by_slot: share of rounds whose slots 1..k were all accepted, k = 1..B-1.
        identical: prompts whose drafted output equals the target's own, token for token (greedy; None when sampled).
        near_ties: prompts where it differs first at a place at which the target's two best tokens are equal within its dtype.
        prompts: how many were decoded.
        drafted: the responses.
    """

    temperature: float
    tau: float
    tau_error: float
    tokens_per_s_plain: float
    tokens_per_s_drafted: float
    accepted_by_slot: list[float]
    identical: int | None
    near_ties: int
    prompts: int
    drafted: list[Decoded] = field(default_factory=list, repr=False)

    @property
    def lossless(self) -> bool | None:
        """Whether every greedy output was the target's own, rounding aside; None when sampled."""
        return None if self.identical is None else self.identical + self.near_ties == self.prompts


@contextmanager
def decoding(drafter: Drafter) -> Iterator[None]:
    """Evaluation mode inside, the previous mode after."""
    was = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(was)


def _ratio_error(drafted: Sequence[Decoded], tau: float) -> float:
    """Standard error of the ratio tokens / rounds, with prompts as clusters."""
    used = [d for d in drafted if d.rounds]
    if len(used) < 2:
        return math.nan
    mean_rounds = sum(len(d.rounds) for d in used) / len(used)
    squares = sum((sum(d.rounds) - tau * len(d.rounds)) ** 2 for d in used)
    return math.sqrt(squares / (len(used) - 1) / len(used)) / mean_rounds


def measure(
    target: DecodingTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = True,
    progress: Progress | None = None,
) -> Acceptance:
    """Decode ``prompts`` one at a time with the drafter and, if ``plain``, by the target alone.

    At temperature 0 the drafted output is also compared with Hugging Face's own ``generate``. Without ``plain`` there is
    neither a comparison nor a plain rate (NaN).

    Args:
        target: with ``plain`` a :class:`FrozenTarget`, since ``generate`` takes the model itself.

    Raises:
        TypeError: with ``plain``, if it is another kind of target.
    """
    if plain and not isinstance(target, FrozenTarget):
        raise TypeError(
            f"plain=True compares with the model's own generate: needs a FrozenTarget, not a {type(target).__name__}"
        )
    task = progress.add_task(f"decode T={temperature:g}", total=len(prompts)) if progress else None
    drafted: list[Decoded] = []
    own: list[Decoded] = []
    with decoding(drafter):
        if plain and prompts:  # the first passes of a process pay for set-up that is nobody's speed
            decode_chain(target, drafter, list(prompts[0]), 4)
            decode_plain(target, list(prompts[0]), 4)
        for number, prompt in enumerate(prompts):
            ids = list(prompt)

            def generator(stream: int, number: int = number) -> torch.Generator | None:
                return (
                    torch.Generator(target.device).manual_seed(seed * 1_000_003 + 2 * number + stream) if temperature else None
                )

            arguments = {"temperature": temperature}
            drafted.append(decode_chain(target, drafter, ids, max_new_tokens, generator=generator(0), **arguments))
            if plain:
                own.append(decode_plain(target, ids, max_new_tokens, generator=generator(1), **arguments))
            if progress and task is not None:
                progress.advance(task)
    verdicts: list[str] = []
    if plain and temperature == 0:
        assert isinstance(target, FrozenTarget)
        references = _generate(target, prompts, max_new_tokens)
        for prompt, response, reference in zip(prompts, drafted, references, strict=True):
            verdicts.append(_compare(target, list(prompt), response.ids, reference))
    rounds = [r for d in drafted for r in d.rounds]
    tau = sum(rounds) / len(rounds) if rounds else math.nan
    slots = drafter.config.block_size - 1
    return Acceptance(
        temperature=temperature,
        tau=tau,
        tau_error=_ratio_error(drafted, tau),
        tokens_per_s_plain=_rate(own),
        tokens_per_s_drafted=_rate(drafted),
        accepted_by_slot=[sum(r > k for r in rounds) / max(len(rounds), 1) for k in range(1, slots + 1)],
        identical=verdicts.count("identical") if plain and temperature == 0 else None,
        near_ties=verdicts.count("near tie"),
        prompts=len(prompts),
        drafted=drafted,
    )


def _rate(decoded: Sequence[Decoded]) -> float:
    seconds = sum(d.seconds for d in decoded)
    return sum(len(d.ids) for d in decoded) / seconds if seconds else math.nan


def _generate(target: FrozenTarget, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The reference: the target's own greedy outputs by Hugging Face's loop, prompts of equal length at a time (no padding)."""
    pad = target.info.pad_id
    plain = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(target.eos_ids) or None, pad_token_id=pad
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[number]) for number in chosen], device=target.device)
        with generation_settings(target.model, plain):
            out = target.model.generate(ids, attention_mask=torch.ones_like(ids))
        for number, row in zip(chosen, out[:, length:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in target.eos_ids), len(row))
            outputs[number] = row[:end]  # what follows an end is padding
    return outputs


def _compare(target: FrozenTarget, prompt: list[int], drafted: list[int], own: list[int]) -> str:
    """How a drafted greedy output relates to the target's own: "identical", "near tie" or "different".

    A pass over several tokens and a pass over one round differently, so where the target's two best tokens are as close as its
    dtype resolves, either is its own choice; from there on the texts differ rightly.
    """
    if drafted == own:
        return "identical"
    common = next((i for i, (a, b) in enumerate(zip(drafted, own, strict=False)) if a != b), None)
    if common is None:
        return "different"  # one ends where the other goes on
    ids = torch.tensor([[*prompt, *own[:common]]], device=target.device)
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    best = float(logits.max())
    # The spacing of the dtype at the size of the logits, and a few roundings in the layers below.
    room = 8 * torch.finfo(target.dtype).eps * max(abs(best), 1.0)
    return "near tie" if min(float(logits[drafted[common]]), float(logits[own[common]])) >= best - room else "different"


@dataclass(frozen=True)
class Sample:
    """A decoded prompt for people to look at: what each round accepted, and its bonus token."""

    prompt: str
    rounds: list[tuple[str, str]]


def round_samples(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], drafted: Sequence[Decoded], count: int
) -> list[Sample]:
    """Texts of the first ``count`` responses, cut at their rounds."""
    samples = []
    for prompt, response in list(zip(prompts, drafted, strict=True))[:count]:
        decode = target.tokenizer.decode
        rounds = [("", decode(response.ids[:1]))]
        start = 1
        for length in response.rounds:
            tokens = response.ids[start : start + length]
            start += length
            if tokens:
                rounds.append(
                    (
                        decode(tokens[:-1]) if len(tokens) == length else decode(tokens),
                        decode(tokens[-1:]) if len(tokens) == length else "",
                    )
                )
        samples.append(Sample(decode(list(prompt)), rounds))
    return samples
