"""What decoding with the exported drafter has shown, as it stands in a run's summary."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from dflash_lit.config import TrainConfig
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.decode.acceptance import MeasuredTarget, measure, measure_together, round_samples
from dflash_lit.decode.proposer import ProposingDrafter
from dflash_lit.decode.static_drafter import can_be_static, static_pair
from dflash_lit.drafter.model import Drafter
from dflash_lit.plan import Plan
from dflash_lit.target.frozen import FrozenTarget
from dflash_lit.watching.terminal import live_console

__all__ = ["decoded", "sides_of_speed"]

Prompts = list[list[int]]


def decoded(cfg: TrainConfig, plan: Plan, target: FrozenTarget, drafter: Drafter, prompts: Prompts) -> dict[str, Any]:
    """Decode all prompts at each temperature, as a chain and in draft trees.

    Args:
        drafter: of the dtype and on the device of ``target``.

    Returns:
        taus with their errors, tokens/s, what is lossless, samples; ``not_decoded`` says why there is nothing.
    """
    settings = cfg.evaluation
    summary: dict[str, Any] = {}
    if not target.info.packs:
        summary["not_decoded"] = f"rejected drafts cannot be taken back from layers of kind {target.info.not_packed!r}"
    sides = sides_of_speed(cfg, plan, target, drafter, prompts)
    for temperature in settings.temperatures if target.info.packs else ():
        with Progress(console=Console(stderr=True), transient=True, disable=live_console() is None) as progress:
            got = measure(
                *sides,
                prompts,
                max_new_tokens=plan.max_new_tokens,
                temperature=temperature,
                seed=cfg.seed,
                progress=progress,
            )
        tau = "tau_greedy" if temperature == 0 else f"tau_t{temperature:g}"
        tag = "" if temperature == 0 else f"_t{temperature:g}"
        summary |= {
            tau: got.tau,
            f"{tau}_error": got.tau_error,
            f"tokens_per_s_plain{tag}": got.tokens_per_s_plain,
            f"tokens_per_s_drafted{tag}": got.tokens_per_s_drafted,
            f"accepted_by_slot{tag}": got.accepted_by_depth,
        }
        for budget in settings.budgets if target.no_trees is None else ():
            trees = measure_together(
                target,
                drafter,
                prompts,
                budget,
                max_new_tokens=plan.max_new_tokens,
                temperature=temperature,
                seed=cfg.seed,
            )
            summary |= {f"{tau}@{budget}": trees.tau, f"{tau}@{budget}_error": trees.tau_error}
        if got.lossless is not None:
            summary["lossless"] = got.lossless
            summary["lossless_prompts"] = f"{got.identical}/{got.prompts}"
            summary["lossless_near_ties"] = got.near_ties
            summary["greedy_repetitive"] = sum(is_repetitive(np.array(d.ids)) for d in got.drafted)
            samples = round_samples(target, prompts, got.drafted, 3)
            summary["samples"] = [
                {"prompt": s.prompt, "rounds": [{"text_accepted": a, "text_bonus": b} for a, b in s.rounds]} for s in samples
            ]
    return summary | {"tau_untrained": _untrained(plan, target, prompts)}


def sides_of_speed(
    cfg: TrainConfig, plan: Plan, target: FrozenTarget, drafter: Drafter, prompts: Prompts
) -> tuple[MeasuredTarget, Drafter | ProposingDrafter]:
    """What is decoded one by one, for its speed: plain and drafted passes alike compiled, or alike not."""
    compiles = cfg.evaluation.compile
    if compiles is None:
        compiles = plan.device.type == "cuda"
    if not compiles or not prompts or not can_be_static(target):
        return target, drafter
    longest = max(map(len, prompts))
    return static_pair(target, drafter, longest_prompt=longest, max_new_tokens=plan.max_new_tokens, budgets=[0])


def _untrained(plan: Plan, target: FrozenTarget, prompts: Prompts) -> float:
    """Tau of a drafter with fresh random weights on a few of the same prompts: the floor; NaN if none is decoded."""
    drafter = Drafter(plan.drafter).to(plan.device)
    few = prompts[:4]
    return measure(target, drafter, few, max_new_tokens=min(plan.max_new_tokens, 48), plain=False).tau
