"""Whether a target would have said what a file has it say.

Where a text was drawn from the target, the negative log-likelihood of each token is, in the mean, the entropy of the distribution
that it was drawn from: E[-log p(x)] = H(p). The difference of the two, summed over tokens, is then a martingale whose variance
the distributions give, too: sum of Var[-log p(x)]. So the mean difference has a known error without any text to compare with.
Text of another origin has unlikely tokens where the target is sure of others, and lies above.

A target that predicts a text as well as it predicts its own (a base model and the text that it was trained on) cannot be told
from the author of that text in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lit.data.documents import Document
from dflash_lit.errors import UserError
from dflash_lit.target.frozen import FrozenTarget

__all__ = ["PolicyCheck", "PolicyQuestion", "answer_policy", "check_policy", "token_surprise"]

# Logits are made of so many positions at a time: at 150,000 entries 0.3 GiB in fp32, a few times.
_POSITIONS = 512
_TILE = 128
# Errors of the mean by which a text has to lie above: the differences have heavier tails than a normal distribution.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """The figures, in nats a token.

    Attributes:
        documents: how many were read.
        tokens: supervised tokens that were compared.
        temperature: at which they were.
        nll: mean negative log-likelihood.
        entropy: mean entropy of what the target would have drawn from; for greedy text the least NLL that a token could have.
        error: standard error of ``nll - entropy`` if the text is the target's own.
        threshold: what ``nll - entropy`` may be.
        argmax: share of tokens that are the target's most likely ones.
        off_documents: how many documents are clearly off-policy for themselves.
    """

    documents: int
    tokens: int
    temperature: float
    nll: float
    entropy: float
    error: float
    threshold: float
    argmax: float
    off_documents: int

    @property
    def gap(self) -> float:
        """``nll - entropy``; about 0 for the target's own text."""
        return self.nll - self.entropy

    @property
    def off_policy(self) -> bool:
        """Whether the text is clearly not the target's."""
        return _clearly_above(self.gap, self.error, self.threshold)


def _clearly_above(gap: float, error: float, threshold: float) -> bool:
    return gap > threshold and gap > _SURE * error


def token_surprise(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """NLL, its expectation under the target, and its variance, for each token.

    Args:
        logits: [N, V], those that the tokens were drawn from.
        tokens: integer [N].
        temperature: of the draw. At 0 the expectation is the NLL of the most likely token, at temperature 1, and the variance 0.

    Returns:
        float32 [N] each, in nats.
    """
    log_p = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    nll = -log_p.gather(1, tokens.long()[:, None])[:, 0]
    if temperature == 0:
        return nll, -log_p.amax(dim=-1), torch.zeros_like(nll)
    p = log_p.exp()
    # Where p is 0, log p is -inf in the limit only, but it may be so large that the product is no number.
    surprise = torch.where(p > 0, -log_p, torch.zeros_like(p))
    entropy = (p * surprise).sum(dim=-1)
    return nll, entropy, (p * (surprise - entropy[:, None]) ** 2).sum(dim=-1)


def check_policy(
    target: FrozenTarget,
    documents: Sequence[Document],
    *,
    temperature: float = 1.0,
    threshold: float = 0.1,
    row_tokens: int = 4096,
    rows: int = 1,
    report: Callable[[], None] = lambda: None,
) -> PolicyCheck:
    """Compare the likelihood of supervised tokens with what it would be if the target had drawn them.

    Args:
        target: whose text it should be.
        documents: of its token ids.
        temperature: at which the text was drawn; 0 for greedy.
        threshold: difference in nats a token up to which a text counts as the target's. Servers that compute in fewer bits are
            a few hundredths away from it; other models' text is by some tenths or more.
        row_tokens: a document's tokens after this many are left out.
        rows: of a pass of compiled layers, so that those of a training that follows are the same; all but one are empty.
        report: called after each document.

    Raises:
        UserError: if there is no supervised token, or an id that the target does not have.
    """
    vocabulary = int(target.info.text.vocab_size)
    head = target.ends().head
    total = np.zeros(4)  # tokens, NLL, expected NLL, variance
    likeliest = off = compared = 0
    for document in documents:
        ids, supervised = document.input_ids[:row_tokens], document.supervised[:row_tokens]
        if int(ids.max()) >= vocabulary:
            raise UserError(
                f"{document.name}: token id {int(ids.max())} is not among the target's {vocabulary}; it is another target's text"
            )
        places = np.flatnonzero(supervised[1:]) + 1  # nothing predicts the first token
        if not len(places):
            report()
            continue
        hidden = _last_hidden(target, ids, row_tokens, rows)[torch.from_numpy(places - 1).to(target.device)]
        tokens = torch.from_numpy(ids[places]).to(target.device)
        sums = np.zeros(4)
        for start in range(0, len(places), _POSITIONS):
            chosen = tokens[start : start + _POSITIONS]
            logits = torch.nn.functional.linear(hidden[start : start + _POSITIONS], head)
            parts = token_surprise(logits, chosen, temperature)
            sums += [len(chosen), *(float(part.double().sum()) for part in parts)]
            likeliest += int((logits.argmax(dim=-1) == chosen).sum())
        total += sums
        compared += 1
        off += _clearly_above((sums[1] - sums[2]) / sums[0], math.sqrt(sums[3]) / sums[0], threshold)
        report()
    if not compared:
        raise UserError("there is no supervised token to compare; give documents with responses")
    count = total[0]
    return PolicyCheck(
        documents=compared,
        tokens=int(count),
        temperature=temperature,
        nll=float(total[1] / count),
        entropy=float(total[2] / count),
        error=float(math.sqrt(total[3]) / count),
        threshold=threshold,
        argmax=float(likeliest / count),
        off_documents=int(off),
    )


@dataclass(frozen=True)
class PolicyQuestion:
    """What :func:`answer_policy` is asked; see :func:`check_policy`."""

    documents: Sequence[Document]
    temperature: float
    row_tokens: int
    rows: int


def answer_policy(target: FrozenTarget, question: PolicyQuestion) -> PolicyCheck:
    """:func:`check_policy`, as a target in another process can be asked for it."""
    return check_policy(
        target,
        question.documents,
        temperature=question.temperature,
        row_tokens=question.row_tokens,
        rows=question.rows,
    )


def _last_hidden(target: FrozenTarget, ids: np.ndarray, row_tokens: int, rows: int) -> Tensor:
    """What the head reads, [S, H] with S at least the length of ``ids``."""
    # Compiled layers want one shape.
    length = -(-row_tokens // _TILE) * _TILE if target.compiled else len(ids)
    row = torch.zeros(3, rows if target.compiled else 1, length, dtype=torch.long)
    row[1] = -1
    row[0, 0, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    row[1, 0, : len(ids)] = 0
    row[2, 0, : len(ids)] = torch.arange(len(ids))
    _, hidden = target.features_and_last_hidden(row[0], row[1], row[2], [0])
    return hidden[0]
