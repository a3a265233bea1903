"""How much a drafter helps: real decoding of held-out prompts, with and without it, in one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from rich.progress import Progress
from transformers import GenerationConfig

from dflash_lit.decode.chain import Decoded, decode_chain, decode_plain
from dflash_lit.decode.interval import ratio_error, student_t
from dflash_lit.decode.proposer import ProposingDrafter
from dflash_lit.decode.stages import Stages, Timing, untimed
from dflash_lit.decode.tree import TreeTarget, decode_tree, decode_tree_batch
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget, generation_settings

__all__ = ["Acceptance", "MeasuredTarget", "Sample", "decoding", "measure", "measure_together", "round_samples", "sweep"]


_ROUNDINGS = 8
"""Spacings of the target's dtype by which a right output's logits may be below the best: layers round, too, not only the head."""


class MeasuredTarget(TreeTarget, Protocol):
    """A target to decode with, whole or in parts elsewhere."""

    @property
    def no_trees(self) -> str | None:
        """Why it cannot verify draft trees; None if it can."""


@dataclass(frozen=True)
class Acceptance:
    """What decoding some prompts at one temperature and budget gave.

    Attributes:
        temperature: 0 is greedy.
        budget: nodes of the draft trees; 0 is a chain.
        nodes: drafts that the target verifies a pass, the anchor not counted.
        tau: mean tokens a verify pass over all rounds of all prompts, bonus included.
        tau_error: its standard error, over prompts (a prompt's rounds are not independent).
        tau_interval: 95 % interval, by Student's t with prompts - 1 degrees of freedom.
        tokens_per_s_plain, tokens_per_s_drafted: new tokens a second without and with the drafter, batch 1.
        accepted_by_depth: share of rounds that accepted a draft at depth k (hence at all before), k = 1..B-1.
        identical: prompts whose drafted output equals the target's own, token for token (greedy; None when sampled).
        near_ties: prompts where it differs, but first at a place where the target finds both tokens equal within the rounding of its
            dtype, and each of its tokens is, behind those before it, the target's best within that rounding.
        prompts: how many were decoded.
        stage_ms: milliseconds a round of each stage, from a pass of its own that waits at their borders; empty if not asked for.
        plain_ms: milliseconds a pass of the target alone, from that pass; NaN if not asked for.
        drafted: the responses.
    """

    temperature: float
    tau: float
    tau_error: float
    tokens_per_s_plain: float
    tokens_per_s_drafted: float
    accepted_by_depth: list[float]
    identical: int | None
    near_ties: int
    prompts: int
    budget: int = 0
    nodes: int = 0
    stage_ms: dict[str, float] = field(default_factory=dict)
    plain_ms: float = math.nan
    drafted: list[Decoded] = field(default_factory=list, repr=False)

    @property
    def lossless(self) -> bool | None:
        """Whether every greedy output was the target's own, rounding aside; None when sampled."""
        return None if self.identical is None else self.identical + self.near_ties == self.prompts

    @property
    def tau_interval(self) -> tuple[float, float]:
        """NaN for fewer than two prompts that had a round."""
        used = sum(bool(d.rounds) for d in self.drafted)
        room = student_t(used - 1) * self.tau_error if used > 1 else math.nan
        return self.tau - room, self.tau + room

    @property
    def speedup(self) -> float:
        """Tokens a second with the drafter over those without."""
        return self.tokens_per_s_drafted / self.tokens_per_s_plain if self.tokens_per_s_plain else math.nan


@contextmanager
def decoding(drafter: Drafter | ProposingDrafter) -> Iterator[None]:
    """Evaluation mode inside, the previous mode after."""
    module = drafter if isinstance(drafter, Drafter) else drafter.drafter
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)


@dataclass(frozen=True)
class _Runs:
    """Decoding of numbered prompts by one temperature, one by one."""

    target: MeasuredTarget
    drafter: Drafter | ProposingDrafter
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    temperature: float
    seed: int

    def _generator(self, number: int, stream: int) -> torch.Generator | None:
        if not self.temperature:
            return None
        return torch.Generator(self.target.device).manual_seed(self.seed * 1_000_003 + 2 * number + stream)

    def plain(self, number: int, stages: Timing = untimed, tokens: int | None = None) -> Decoded:
        return decode_plain(
            self.target,
            list(self.prompts[number]),
            tokens or self.max_new_tokens,
            temperature=self.temperature,
            generator=self._generator(number, 1),
            stages=stages,
        )

    def drafted(self, number: int, budget: int, stages: Timing = untimed, tokens: int | None = None) -> Decoded:
        prompt, count = list(self.prompts[number]), tokens or self.max_new_tokens
        generator = self._generator(number, 0)
        if budget:
            return decode_tree(
                self.target,
                self.drafter,
                prompt,
                count,
                budget,
                temperature=self.temperature,
                generator=generator,
                stages=stages,
            )
        return decode_chain(
            self.target, self.drafter, prompt, count, temperature=self.temperature, generator=generator, stages=stages
        )


def measure(
    target: MeasuredTarget,
    drafter: Drafter | ProposingDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    budget: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = True,
    progress: Progress | None = None,
) -> Acceptance:
    """:func:`sweep` of one budget; 0 is the chain."""
    return sweep(
        target,
        drafter,
        prompts,
        [budget],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        reference=whole_target(target) if plain else None,
        progress=progress,
    )[0]


def whole_target(target: object) -> FrozenTarget:
    """The target that ``generate`` is asked of.

    Raises:
        TypeError: if it is not in this process.
    """
    whole = getattr(target, "whole", target)
    if not isinstance(whole, FrozenTarget):
        raise TypeError(
            f"plain=True compares with the model's own generate: needs a FrozenTarget, not a {type(target).__name__}"
        )
    return whole


def sweep(
    target: MeasuredTarget,
    drafter: Drafter | ProposingDrafter,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    reference: FrozenTarget | None = None,
    timed: int = 0,
    progress: Progress | None = None,
) -> list[Acceptance]:
    """Decode ``prompts`` one at a time at each budget and, with a ``reference``, by the target alone.

    At temperature 0 the drafted outputs are also compared with Hugging Face's own ``generate``. Without ``reference`` there is
    neither a comparison nor a plain rate (NaN).

    Args:
        budgets: nodes of the draft trees; 0 is a chain.
        reference: the target whose ``generate`` is compared with.
        timed: prompts that are decoded once more with a wait at the border of each stage, for ``stage_ms`` and ``plain_ms``.

    Raises:
        UserError: before anything is decoded, if there is a tree to verify and the target cannot.
    """
    if any(budgets) and (reason := target.no_trees):
        raise UserError(f"{reason} (budget 0)")
    runs = _Runs(target, drafter, prompts, max_new_tokens, temperature, seed)
    steps = len(prompts) * (len(budgets) + (reference is not None))
    task = progress.add_task(f"decode T={temperature:g}", total=steps) if progress else None
    numbers = range(len(prompts))

    def advance() -> None:
        if progress and task is not None:
            progress.advance(task)

    own: list[Decoded] = []
    by_budget: list[list[Decoded]] = [[] for _ in budgets]
    stages: list[dict[str, float]] = []
    plain_ms = math.nan
    with decoding(drafter):
        if reference is not None and prompts:
            # The first passes of a process pay for set-up that is nobody's speed.
            runs.plain(0, tokens=4)
            for budget in budgets:
                runs.drafted(0, budget, tokens=4)
        # All kinds for one prompt after another: a machine that grows slower does so for all of them.
        for number in numbers:
            if reference is not None:
                own.append(runs.plain(number))
                advance()
            for drafted, budget in zip(by_budget, budgets, strict=True):
                drafted.append(runs.drafted(number, budget))
                advance()
        if timed and prompts:
            clock = Stages(target.device)
            for number in numbers[:timed]:
                runs.plain(number, clock)
            plain_ms = clock.milliseconds().get("verify", math.nan)
        for budget in budgets:
            clock = Stages(target.device)
            if timed and prompts:
                runs.drafted(0, budget, Stages(target.device), tokens=4)
            for number in numbers[:timed]:
                runs.drafted(number, budget, clock)
            stages.append(clock.milliseconds())
    references = _generate(reference, prompts, max_new_tokens) if reference is not None and temperature == 0 else None
    results = []
    for budget, drafted, stage_ms in zip(budgets, by_budget, stages, strict=True):
        verdicts: list[str] | None = None
        if reference is not None and references is not None:
            verdicts = [
                _compare(reference, list(prompt), made.ids, theirs)
                for prompt, made, theirs in zip(prompts, drafted, references, strict=True)
            ]
        results.append(_acceptance(drafter, drafted, temperature, budget, verdicts, own, stage_ms, plain_ms))
    return results


def measure_together(
    target: MeasuredTarget,
    drafter: Drafter | ProposingDrafter,
    prompts: Sequence[Sequence[int]],
    budget: int,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Acceptance:
    """The lengths alone, of trees for all prompts in one batch: cheaper than one by one, and no speed of batch 1 (NaN).

    Raises:
        UserError: if the target cannot verify trees.
    """
    if reason := target.no_trees:
        raise UserError(reason)
    generator = torch.Generator(target.device).manual_seed(seed) if temperature else None
    texts = [list(prompt) for prompt in prompts]
    with decoding(drafter):
        drafted = (
            decode_tree_batch(target, drafter, texts, max_new_tokens, budget, temperature=temperature, generator=generator)
            if texts
            else []
        )
    return _acceptance(drafter, drafted, temperature, budget, None, [], {}, math.nan, speed=False)


def _acceptance(
    drafter: Drafter | ProposingDrafter,
    drafted: list[Decoded],
    temperature: float,
    budget: int,
    verdicts: list[str] | None,
    own: Sequence[Decoded],
    stage_ms: dict[str, float],
    plain_ms: float,
    *,
    speed: bool = True,
) -> Acceptance:
    rounds = [r for d in drafted for r in d.rounds]
    tau = sum(rounds) / len(rounds) if rounds else math.nan
    config = drafter.config
    slots = config.block_size - 1
    tokens = min(config.vocab_size, config.path_candidates) if config.path_width else config.vocab_size
    return Acceptance(
        temperature=temperature,
        tau=tau,
        tau_error=ratio_error([d.rounds for d in drafted], tau),
        tokens_per_s_plain=_rate(own),
        tokens_per_s_drafted=_rate(drafted) if speed else math.nan,
        accepted_by_depth=[sum(r > k for r in rounds) / max(len(rounds), 1) for k in range(1, slots + 1)],
        identical=None if verdicts is None else verdicts.count("identical"),
        near_ties=0 if verdicts is None else verdicts.count("near tie"),
        prompts=len(drafted),
        budget=budget,
        # A block of few slots over a small vocabulary, or few candidates, has fewer prefixes than the budget.
        nodes=min(budget, sum(tokens**depth for depth in range(1, slots + 1))) if budget else slots,
        stage_ms=stage_ms,
        plain_ms=plain_ms,
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
    dtype resolves, either is its own choice. From there on the texts differ rightly, and the drafted one is judged by itself:
    every token has to be the target's best behind those before it, as close as that.
    """
    if drafted == own:
        return "identical"
    common = next((i for i, (a, b) in enumerate(zip(drafted, own, strict=False)) if a != b), None)
    eos_ids = target.eos_ids
    ends = [token in eos_ids for token in drafted]
    if common is None or any(ends[:-1]) or (len(drafted) < len(own) and not ends[-1]):
        return "different"  # one ends where the other goes on, or ends or goes on where no text does
    ids = torch.tensor([[*prompt, *drafted]], device=target.device)
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values.float()
        made = logits.gather(1, ids[0, len(prompt) :, None])[:, 0].float()
        made[common] = torch.minimum(made[common], logits[common, own[common]].float())
    # The spacing of the dtype at the size of the logits.
    step = torch.finfo(target.dtype).eps * torch.exp2(best.abs().clamp(min=1).frexp().exponent - 1.0)
    return "near tie" if bool((made >= best - _ROUNDINGS * step).all()) else "different"


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
