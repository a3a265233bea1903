"""The loss through the target's frozen head in Triton: two matrix products with the head instead of three.

A weight is a factor of its row's gradient, whatever it depends on. So the gradient of the *unweighted* row loss is taken while
the row's logits exist, written over them and multiplied by the head at once; the weights come in afterwards, when the label
probabilities of all blocks are known. Nothing is recomputed, and one chunk of logits is all that is kept of them. The idea of
taking the gradient in the forward pass is that of Liger-Kernel (arXiv 2410.10989); its loss must not depend on other rows.

The readable twin is :func:`dflash_lit.objective.head.head_loss`. No value is read back to the host and all shapes are static.
"""

# ruff: noqa: N803
# No postponed annotations here: Triton's interpreter has to see tl.constexpr itself, not its name.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lit.objective.head import HeadResult, Weigh, check_settings

__all__ = ["fused_head_loss"]

# One program walks one row in tiles of BLOCK logits. Large tiles and many warps keep few rows in flight on each multiprocessor,
# so that the second walk over a row (151,936 x 2 bytes = 304 KB) finds at least part of it in L2.
BLOCK = 4096
WARPS = 16
# The K largest logits lie in the K groups with the largest maxima. Rows are padded to whole groups with -inf: that also keeps
# them aligned for tensor cores and for wide loads, whatever the size of the vocabulary.
GROUP = 32
SCALE_BLOCK = 2048
SCALE_WARPS = 4


@triton.jit
def _fold(largest, total, x):  # type: ignore[no-untyped-def]
    """Take a tile [BLOCK / 8, 8] into the running maximum and the running sums [BLOCK / 8] of exp(x - maximum).

    Eight neighbours are one wide load of one thread: summing them at once saves registers and asks no other thread.
    """
    new = tl.maximum(largest, tl.max(tl.max(x, axis=1), axis=0))
    shift = tl.where(new == -float("inf"), 0.0, new)  # nothing but -inf so far
    return new, total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), axis=1)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits,  # [chunk, width], overwritten with the gradient of each row's loss
    teacher_logits,  # [chunk, width] or None
    places,  # int64 [chunk], where each row's slot is in the arrays over all slots
    labels,  # int64 [all slots], -1: none
    nll,  # fp32 [all slots]
    loss,  # fp32 [all slots], written with a teacher
    rank,  # int32 [all slots]
    scales,  # fp32 [chunk, 4]: largest logit and log of the sum of exp(logit - largest), of the drafter and of the teacher
    groups,  # [chunk, width / GROUP], largest logit of each group, or None
    width,
    sharpness,  # 1 / temperature
    FIRST: tl.constexpr,  # walk for the statistics
    SECOND: tl.constexpr,  # walk for the divergence and the gradient
    SOFT: tl.constexpr,
    GRADIENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row x width can pass 2^31
    logits += row * width
    scales += row * 4
    if SOFT:
        teacher_logits += row * width
    place = tl.load(places + row)
    label = tl.load(labels + place)
    lanes = tl.arange(0, BLOCK)

    if label < 0:
        if SECOND and GRADIENT:
            for start in range(0, width, BLOCK):
                tl.store(logits + start + lanes, tl.zeros([BLOCK], logits.dtype.element_ty), mask=start + lanes < width)
        return

    if FIRST:
        label_logit = tl.load(logits + label).to(tl.float32)
        largest = tl.full((), -float("inf"), tl.float32)
        teacher_largest = tl.full((), -float("inf"), tl.float32)
        total = tl.zeros([BLOCK // 8], tl.float32)
        teacher_total = tl.zeros([BLOCK // 8], tl.float32)
        before = tl.zeros([BLOCK // 8], tl.int32)
        for start in range(0, width, BLOCK):
            columns = start + lanes
            x = tl.load(logits + columns, mask=columns < width, other=-float("inf"), eviction_policy="evict_last")
            if groups is not None:
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                maxima = tl.max(tl.reshape(x.to(tl.float32), (BLOCK // GROUP, GROUP)), axis=1)
                at = groups + row * (width // GROUP) + group
                tl.store(at, maxima.to(groups.dtype.element_ty), mask=group < width // GROUP)
            x = x.to(tl.float32)
            largest, total = _fold(largest, total, tl.reshape(x, (BLOCK // 8, 8)))
            comes_before = (x > label_logit) | ((x == label_logit) & (columns < label))
            before += tl.sum(tl.reshape(comes_before.to(tl.int32), (BLOCK // 8, 8)), axis=1)
            if SOFT:
                t = tl.load(teacher_logits + columns, mask=columns < width, other=-float("inf"), eviction_policy="evict_last")
                t = tl.reshape(t.to(tl.float32) * sharpness, (BLOCK // 8, 8))
                teacher_largest, teacher_total = _fold(teacher_largest, teacher_total, t)
        log_total = tl.log(tl.sum(total, axis=0))
        if SOFT:
            teacher_log_total = tl.log(tl.sum(teacher_total, axis=0))
        # (x - largest) - log_total rather than x - (largest + log_total), which loses digits of large logits. The same formula
        # gives `top`: a label's entry there has to be equal to the last bit.
        tl.store(nll + place, log_total - (label_logit - largest))
        # Next to NaN nothing compares: that must not read as the first place.
        tl.store(rank + place, tl.sum(before, axis=0), mask=log_total == log_total)
        if groups is not None:
            tl.store(scales, largest)
            tl.store(scales + 1, log_total)
            if SOFT:
                tl.store(scales + 2, teacher_largest)
                tl.store(scales + 3, teacher_log_total)
    else:
        largest = tl.load(scales)
        log_total = tl.load(scales + 1)
        if SOFT:
            teacher_largest = tl.load(scales + 2)
            teacher_log_total = tl.load(scales + 3)

    if SECOND:
        divergence = tl.zeros([BLOCK // 8], tl.float32)
        end = tl.cdiv(width, BLOCK) * BLOCK
        for done in range(0, width, BLOCK):
            # Backwards: what the first walk read last is the most likely to be still in L2.
            columns = end - BLOCK - done + lanes
            inside = columns < width
            x = tl.load(logits + columns, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
            log_q = (x - largest) - log_total
            if SOFT:
                t = tl.load(teacher_logits + columns, mask=inside, other=-float("inf"), eviction_policy="evict_first")
                log_p = (t.to(tl.float32) * sharpness - teacher_largest) - teacher_log_total
                p = tl.exp(log_p)
                terms = tl.where(p == 0, 0.0, p * (log_p - log_q))  # NaN is not 0
                divergence += tl.sum(tl.reshape(terms, (BLOCK // 8, 8)), axis=1)
            else:
                p = (columns == label).to(tl.float32)
            if GRADIENT:
                gradient = tl.exp(log_q) - p
                tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
        if SOFT:
            tl.store(loss + place, tl.sum(divergence, axis=0))


@triton.jit
def _scale_rows(rows, places, weights, factor, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``out[places[r]] = rows[r] * weights[places[r]] * factor``, the product in fp32; 0 where there is no weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    place = tl.load(places + row)
    weight = tl.load(weights + place)
    values = tl.load(rows + row * size + columns, mask=inside, other=0.0).to(tl.float32) * (weight * tl.load(factor))
    values = tl.where(weight == 0, 0.0, values)
    tl.store(out + place * size + columns, values.to(out.dtype.element_ty), mask=inside)


_INTERPRETED = not isinstance(_rows, triton.JITFunction)


class _WithGradient(torch.autograd.Function):
    """The numerator, whose gradient for ``hidden`` is ready but for the weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, numerator: Tensor, gradient: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, places, weights)
        ctx.shape = hidden.shape
        return numerator.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, places, weights = ctx.saved_tensors
        rows, size = gradient.shape
        everywhere = rows == weights.numel()
        out = gradient.new_empty(ctx.shape) if everywhere else gradient.new_zeros(ctx.shape)
        if rows:
            block = min(SCALE_BLOCK, triton.next_power_of_2(size))
            with torch.cuda.device_of(gradient):
                _scale_rows[(rows, triton.cdiv(size, block))](
                    gradient, places, weights, upstream, out, size, BLOCK=block, num_warps=SCALE_WARPS
                )
        return out, None, None, None, None


def _keep(label_ok: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Flat indices of the slots to compute, and ``label_ok`` of what is kept.

    Over the capacity late slots go first, in all blocks alike: they weigh least.
    """
    blocks, slots = label_ok.shape
    if capacity is None or capacity >= label_ok.numel():
        return torch.arange(label_ok.numel(), device=label_ok.device), label_ok
    order = torch.argsort(label_ok.T.flatten().to(torch.uint8), descending=True, stable=True)[:capacity]
    places = order % blocks * slots + order // blocks
    kept = torch.zeros(label_ok.numel(), dtype=torch.bool, device=label_ok.device).scatter_(0, places, True)
    return places, kept.view_as(label_ok) & label_ok


def _largest(logits: Tensor, groups: Tensor, scales: Tensor, count: int) -> Tensor:
    """The ``count`` largest log-probabilities of each row, descending, from the groups that must hold them."""
    rows = logits.shape[0]
    if count < groups.shape[1]:
        index = groups.topk(count, dim=1, sorted=False).indices
        logits = logits.view(rows, -1, GROUP).gather(1, index[..., None].expand(-1, -1, GROUP)).flatten(1)
    return (logits.topk(count, dim=1).values.float() - scales[:, :1]) - scales[:, 1:2]


def _walk(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    places: Tensor,
    teacher: Tensor | None,
    sharpness: float,
    top: int,
    chunk_slots: int,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """nll, row loss and rank over all slots [M * (B-1)], top [M * (B-1), K], and the gradient of each kept row [kept, H]."""
    slots, total, kept, vocab = labels.shape[1], labels.numel(), places.numel(), head.shape[0]
    labels = labels.flatten()
    nll = torch.zeros(total, dtype=torch.float32, device=hidden.device)
    loss = nll if teacher is None else torch.zeros_like(nll)
    rank = torch.full((total,), vocab, dtype=torch.int32, device=hidden.device)
    best = nll.new_full((total, top), -torch.inf) if top else None
    gradient = hidden.new_empty(kept, hidden.shape[-1]) if with_gradient else None

    size = max(triton.cdiv(kept, max(triton.cdiv(kept, chunk_slots), 1)), 1)
    width = triton.cdiv(vocab, GROUP) * GROUP
    buffer = hidden.new_empty(size, width)
    teacher_buffer = None if teacher is None else torch.empty_like(buffer)
    scales = nll.new_empty(size, 4)
    groups = buffer.new_empty(size, width // GROUP) if top else None
    block = min(BLOCK, triton.next_power_of_2(width))
    settings: dict[str, Any] = {
        "SOFT": teacher is not None,
        "GRADIENT": with_gradient,
        "GROUP": GROUP,
        "BLOCK": block,
        # Every thread has its own elements: if two warps shared one, the slower could read what the faster has overwritten.
        "num_warps": max(min(WARPS, block // 256), 1),
    }
    second = teacher is not None or with_gradient
    for start in range(0, kept, size):
        at = places[start : start + size]
        rows = at.numel()
        for source, target in ((hidden, buffer), (teacher, teacher_buffer)):
            if source is not None and target is not None:
                torch.mm(source[at // slots, at % slots].to(head.dtype), head.T, out=target[:rows, :vocab])
                target[:rows, vocab:] = -torch.inf  # the gradients of the chunk before were written here, too
        arguments = (buffer, teacher_buffer, at, labels, nll, loss, rank, scales, groups, width, sharpness)
        if best is None or groups is None:
            _rows[(rows,)](*arguments, FIRST=True, SECOND=second, **settings)
        else:
            # The largest logits are taken between the two walks: the second overwrites them.
            _rows[(rows,)](*arguments, FIRST=True, SECOND=False, **settings)
            values = _largest(buffer[:rows], groups[:rows], scales[:rows], top)
            best[at] = torch.where(labels[at, None] >= 0, values, -torch.inf)
            if second:
                _rows[(rows,)](*arguments, FIRST=False, SECOND=True, **settings)
        if gradient is not None:
            torch.mm(buffer[:rows, :vocab], head, out=gradient[start : start + rows])
    return nll, loss, rank, best, gradient


def fused_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_ok: Tensor,
    weigh: Weigh,
    *,
    teacher: Tensor | None = None,
    temperature: float = 1.0,
    top: int = 0,
    chunk_slots: int = 4096,
    capacity: int | None = None,
) -> HeadResult:
    """What :func:`dflash_lit.objective.head.head_loss` computes, faster; its arguments mean the same.

    Args:
        hidden: bf16 or fp32 [M, B-1, H], on CUDA (or on a CPU with ``TRITON_INTERPRET=1`` set before this module is imported).
        head: [V, H], frozen; converted to hidden's dtype if it differs.
        labels: int64 [M, B-1]; anything where ``label_ok`` is False.
        label_ok: bool [M, B-1].
        weigh: called once, with all blocks.
        teacher: [M, B-1, H]; costs one more matrix product and one more chunk of logits.
        temperature: of the teacher's softmax.
        top: how many of each slot's largest log-probabilities to return (at most V); 0: none.
        chunk_slots: upper limit of slots whose logits exist at a time; blocks may be cut.
        capacity: how many slots to compute at all; None: every one. Slots with a label come first, slots 1 of all blocks before
            slots 2 and so on, and a label that is left over counts as none (and in ``HeadResult.dropped``).

    Raises:
        ValueError: for a setting out of its range, or on a CPU without the interpreter.
    """
    check_settings(temperature, top, chunk_slots)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity} must be positive")
    if not (hidden.is_cuda or _INTERPRETED):
        raise ValueError(f"the fused head needs CUDA, not {hidden.device}; use head_loss")
    with_gradient = torch.is_grad_enabled() and hidden.requires_grad
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
        head, top = head.to(hidden.dtype), min(top, head.shape[0])
        places, kept = _keep(label_ok, capacity)
        nll, loss, rank, best, gradient = _walk(
            hidden, head, torch.where(kept, labels, -1), places, teacher, 1 / temperature, top, chunk_slots, with_gradient
        )
        nll = nll.view_as(labels)
        top_values = None if best is None else best.view(*labels.shape, top)
        weights = weigh(torch.exp(-nll), kept, top_values).contiguous()
        numerator = torch.where(weights == 0, 0.0, weights * loss.view_as(labels)).sum()
        dropped = label_ok.sum() - kept.sum()
    if gradient is not None:
        numerator = _WithGradient.apply(hidden, numerator, gradient, places, weights)
    return HeadResult(numerator, weights.sum(), nll, rank.view_as(labels), top_values, dropped)
