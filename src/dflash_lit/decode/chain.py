"""Chain decoding: the drafter proposes a block, the target verifies it in one pass, the longest right prefix stays.

Lossless: a draft counts only if it is the very token the target chose itself at that place, greedily or by sampling, so the
output's distribution is the target's at any temperature and the greedy output is the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.attention.attend import Attends, ContextKV
from dflash_lit.blocks import slot_tokens
from dflash_lit.decode.lattice import Lattice, greedy_path, make_lattice
from dflash_lit.decode.proposer import Drafts, ProposingDrafter, Settled, one_block_attention, proposer_of
from dflash_lit.decode.stages import Timing, untimed
from dflash_lit.drafter.model import Drafter
from dflash_lit.target.frozen import TargetEnds

__all__ = [
    "ChainDraft",
    "Decoded",
    "DecodingTarget",
    "Reader",
    "choose",
    "decode_chain",
    "decode_plain",
    "draft_chain",
    "draft_hidden",
    "draft_lattice",
    "draft_logits",
    "head_logits",
    "one_block_attention",
    "settle_chain",
    "until_end",
]


@dataclass(frozen=True)
class Decoded:
    """One response.

    Attributes:
        ids: generated token ids, the prompt not included.
        rounds: tokens each verify pass yielded, its bonus token included; their mean is tau. The first token comes from the
            prompt's own pass and belongs to no round.
        seconds: wall time of generation, prompt pass included.
    """

    ids: list[int]
    rounds: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean tokens a verify pass, bonus included; NaN without any pass."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else float("nan")


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The target's own choice at each place: [..., V] -> int64 [...]; argmax at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    flat = torch.multinomial(probabilities.flatten(0, -2), 1, generator=generator)
    return flat.view(logits.shape[:-1])


def until_end(tokens: list[int], eos_ids: Sequence[int]) -> list[int]:
    """``tokens`` up to the first that ends a response, that one included."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in eos_ids), tokens)


def draft_hidden(
    drafter: Drafter, ends: TargetEnds, anchors: Tensor, places: Tensor, context: Sequence[ContextKV], attend: Attends
) -> Tensor:
    """What the drafter makes of the block behind the anchors: hidden states [R, B-1, H] of slots 1..B-1.

    Args:
        anchors: int64 [R] tokens; ``places``: int64 [R] where they stand, right after everything that was verified.
    """
    config = drafter.config
    block = torch.full((len(anchors), config.block_size), config.mask_token_id, device=anchors.device)
    block[:, 0] = anchors
    noise = F.embedding(block, ends.embed).to(drafter.fc.weight.dtype)
    # Slot k stands for the token k after the anchor: the drafts of slots 1.. follow it directly.
    return drafter.draft(noise, slot_tokens(places, config.block_size), context, attend)[:, 1:]


def draft_logits(
    drafter: Drafter, ends: TargetEnds, anchors: Tensor, places: Tensor, context: Sequence[ContextKV], attend: Attends
) -> Tensor:
    """Logits [R, B-1, V] of slots 1..B-1, none of which knows another's token; parameters as of :func:`draft_hidden`."""
    return head_logits(ends, draft_hidden(drafter, ends, anchors, places, context, attend))


def head_logits(ends: TargetEnds, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H]."""
    return F.linear(hidden.to(ends.head.dtype), ends.head)


def draft_lattice(
    drafter: Drafter, ends: TargetEnds, anchors: Tensor, places: Tensor, context: Sequence[ContextKV], attend: Attends
) -> Lattice:
    """The candidates of slots 1..B-1, of a drafter with a path head; parameters as of :func:`draft_hidden`."""
    assert drafter.path_head is not None
    hidden = draft_hidden(drafter, ends, anchors, places, context, attend)
    return make_lattice(drafter.path_head, ends, anchors, hidden, head_logits(ends, hidden), drafter.config.path_candidates)


def draft_chain(
    drafter: Drafter, ends: TargetEnds, anchors: Tensor, places: Tensor, context: Sequence[ContextKV], attend: Attends
) -> Tensor:
    """The drafts of slots 1..B-1, int64 [R, B-1]: each the most probable, behind those before it if the drafter has a path head.

    Parameters as of :func:`draft_hidden`.
    """
    arguments = (drafter, ends, anchors, places, context, attend)
    if drafter.path_head is not None:
        return greedy_path(draft_lattice(*arguments))
    return draft_logits(*arguments).argmax(dim=-1)


class Reader(Protocol):
    """One text that a target reads; see :class:`~dflash_lit.target.reader.TargetReader`."""

    @property
    def length(self) -> int:
        """Tokens read and not forgotten."""

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read ids [1, T]; logits [1, T or 1, V] and features [1, T, n_ids * H] (None without layers), on the target's device."""

    def forget(self, count: int) -> None:
        """Drop the last ``count`` tokens."""


class DecodingTarget(Protocol):
    """What decoding needs of a target. It may run elsewhere: neither the model nor its cache is asked for."""

    @property
    def device(self) -> torch.device:
        """Where ids are given and logits, features and ends are found."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response; may be none."""

    def ends(self) -> TargetEnds:
        """Embedding and head."""

    def reader(self, layer_ids: Sequence[int]) -> Reader:
        """Begin a text whose features are the outputs of ``layer_ids``, one after the other in that order."""


@torch.inference_mode()
def decode_plain(
    target: DecodingTarget,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stages: Timing = untimed,
) -> Decoded:
    """The target alone, a token a pass: what a drafter has to beat."""
    started = time.perf_counter()
    state = target.reader(())
    logits, _ = state.read(torch.tensor([prompt], device=target.device), last_only=True)
    current = choose(logits[:, -1:], temperature, generator)
    ids = [int(current)]
    while len(ids) < max_new_tokens and ids[-1] not in target.eos_ids:
        with stages("verify"):
            logits, _ = state.read(current, last_only=True)
            current = choose(logits[:, -1:], temperature, generator)
            ids.append(int(current))
    return Decoded(ids, [1] * (len(ids) - 1), time.perf_counter() - started)


@dataclass(frozen=True)
class ChainDraft:
    """:func:`draft_chain`, whatever the temperature: with one draft a place the most probable is what a sample most likely hits."""

    def __call__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        anchors: Tensor,
        places: Tensor,
        context: Sequence[ContextKV],
        attend: Attends,
        stages: Timing,
    ) -> Drafts:
        with stages("draft"):
            drafts = draft_chain(drafter, ends, anchors, places, context, attend)
        with stages("build"):
            tokens = torch.cat([anchors[:, None], drafts], dim=1)
            depths = torch.arange(tokens.shape[1], device=tokens.device)
            sees = (depths[:, None] >= depths).expand(len(tokens), -1, -1)
            return Drafts(tokens, depths.expand_as(tokens), sees)


def settle_chain(drafts: Drafts, chosen: Tensor) -> Settled:
    """The longest prefix of drafts that are the target's own choices, and its bonus token. P = Q: a chain stays where it is."""
    accepted = (drafts.tokens[:, 1:] == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
    return Settled(drafts.depths, chosen.gather(1, accepted)[:, 0], torch.cat([chosen, accepted + 1], dim=1))


@torch.inference_mode()
def decode_chain(
    target: DecodingTarget,
    drafter: Drafter | ProposingDrafter,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stages: Timing = untimed,
) -> Decoded:
    """Decode one prompt with the drafter.

    Args:
        prompt: at least one token id.
        max_new_tokens: the response is cut there (or ends with an end token).
        stages: told of the stages of each round.
    """
    started = time.perf_counter()
    config = drafter.config
    state, proposer = target.reader(config.target_layer_ids), proposer_of(drafter, target.ends(), 1)
    draft = ChainDraft()

    logits, features = state.read(torch.tensor([prompt], device=target.device), last_only=True)
    assert features is not None
    proposer.remember(features, [len(prompt)])
    anchor = choose(logits[:, -1], temperature, generator)  # [1]
    ids, rounds = [int(anchor)], []
    while len(ids) < max_new_tokens and ids[-1] not in target.eos_ids:
        drafts = proposer.propose(draft, anchor, stages)
        with stages("verify"):
            logits, features = state.read(drafts.tokens)
            assert features is not None
            chosen = choose(logits, temperature, generator)
        with stages("commit"):
            settled = proposer.settle(settle_chain, drafts, chosen)
            anchor = settled.anchors
            *tokens, kept = settled.packed[0].tolist()
            state.forget(config.block_size - kept)
            proposer.remember(features, [kept])
            # Accepted drafts are what the target chose itself.
            new = until_end(tokens[:kept], target.eos_ids)
            ids += new
            rounds.append(len(new))
    return Decoded(ids[:max_new_tokens], rounds, time.perf_counter() - started)
