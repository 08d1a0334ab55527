"""Divergences between distributions: kl_div of log-probabilities, and those between logits, row by row.

Stock PyTorch runs a divergence between logits as two log-softmaxes, an exponential, a difference, a product and a sum:
about ten passes over the vocabulary. Here the forward reads both rows and writes a loss and six numbers a row, and the
backward reads both rows and writes the gradients.

A program of the forward takes LINES rows, BLOCK columns of them at a time, and keeps a running maximum and sums *a
lane*; they meet at the end. The Kullback-Leibler divergence needs no more: sum e^(t - y)·((t - y) - (s - x)) for the
running maxima x of the student's logits s and y of the teacher's t is carried along, and corrected when they rise. The
Jensen-Shannon divergence reads the rows again, with the normalised probabilities. csrc/kl_div.cu has the formulas.
kl_div of log-probabilities is walked flat, in memory order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import PROGRAMS_PER_MULTIPROCESSOR, TILE, WARPS, Sizes
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import accumulator

NUMBERS = tl.constexpr(6)  # kept of a row

# Elements of a tile: rows times columns. The forward keeps five numbers a lane: 8 lanes a thread of 256, of float64 4.
FORWARD_TILE, FORWARD_WARPS = 2048, 8
BACKWARD_TILE, BACKWARD_WARPS = 2048, 8

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _load(ptr, line, position, rows, n, temperature, TEMPERED: tl.constexpr, ACC: tl.constexpr):
    """Logits by the temperature; outside of the rows minus infinity, as if there was no probability."""
    inside = (line < rows)[:, None] & (position < n)[None, :]
    offset = line[:, None] * n + position[None, :]
    logits = tl.load(ptr + offset, mask=inside, other=float("-inf")).to(ACC)
    if TEMPERED:
        if tl.float32 == ptr.dtype.element_ty:  # rounded once, as torch does; 16-bit logits hide the second rounding
            logits = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
        else:
            logits = logits / temperature
    return logits


@triton.jit
def _counts(labels_ptr, ignore_index, line, rows):
    """Whether rows exist, and have a label that counts."""
    counts = line < rows
    if labels_ptr is not None:
        counts = counts & (tl.load(labels_ptr + line, mask=counts, other=ignore_index) != ignore_index)
    return counts


@triton.jit
def where_positive(p, difference):
    """The difference of logarithms that p multiplies: 0 where p is."""
    return tl.where(p > 0, difference, 0.0)


@triton.jit
def over_mixture(log_q, log_p, beta):
    """log q - log m and log p - log m for m = beta * p + (1 - beta) * q.

    Of the larger probability h and the smaller l = h·e these are -log(m / h), which is near 0 and keeps its digits, and
    that less log h - log l. The latter ends at a number: its product with l vanishes where l does. m / h is written
    with beta alone: beta and 1 - beta, each rounded, do not add up to 1.
    """
    difference = log_q - log_p
    apart = tl.where(tl.abs(difference) < 1000.0, tl.abs(difference), 1000.0)  # also where both vanish: NaN
    e = tl.exp(-apart)
    over_high = -tl.log(tl.where(difference >= 0, 1.0 - beta * (1.0 - e), e + beta * (1.0 - e)))
    over_low = over_high - apart
    return tl.where(difference >= 0, over_high, over_low), tl.where(difference >= 0, over_low, over_high)


@triton.jit
def _mixture_sums(
    student_ptr, teacher_ptr, line, top_x, top_y, log_x, log_y, rows, n, temperature, beta,
    TEMPERED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of both divergences from the mixture, by a second reading."""
    of_x = tl.full((LINES, BLOCK), 0.0, ACC)
    of_y = tl.full((LINES, BLOCK), 0.0, ACC)
    for done in range(0, n, BLOCK):  # backwards, so as to meet the cache where the first reading left it
        position = (n - 1 - done) // BLOCK * BLOCK + tl.arange(0, BLOCK).to(INDEX)
        s = _load(student_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
        t = _load(teacher_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
        log_q, log_p = s - top_x[:, None] - log_x[:, None], t - top_y[:, None] - log_y[:, None]
        over_q, over_p = over_mixture(log_q, log_p, beta)
        of_x += tl.exp(log_q) * over_q
        of_y += tl.exp(log_p) * over_p
    return tl.sum(of_x, 1), tl.sum(of_y, 1)


@triton.jit
def _divergence_forward(
    losses_ptr, stats_ptr, student_ptr, teacher_ptr, labels_ptr, rows, n, ignore_index,
    temperature: tl.float64, beta: tl.float64, MIXED: tl.constexpr, TEMPERED: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses of rows, and of each what the backward wants: maxima, a number of the sums below them, two sums.

    That number is the logarithm where MIXED, else one over the sum: a large probability keeps a digit by it.
    """
    LOWEST: tl.constexpr = -1.7976931348623157e308 if tl.float64 == ACC else -3.4028234663852886e38
    line = tl.program_id(0).to(INDEX) * LINES + tl.arange(0, LINES)
    counts = _counts(labels_ptr, ignore_index, line, rows)
    temperature = tl.full((), temperature, ACC)
    beta = tl.full((), beta, ACC)
    max_x = tl.full((LINES, BLOCK), LOWEST, ACC)
    max_y = tl.full((LINES, BLOCK), LOWEST, ACC)
    x = tl.full((LINES, BLOCK), 0.0, ACC)
    y = tl.full((LINES, BLOCK), 0.0, ACC)
    w = tl.full((LINES, BLOCK), 0.0, ACC)
    for first in range(0, n, BLOCK):
        position = first + tl.arange(0, BLOCK).to(INDEX)
        s = _load(student_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
        t = _load(teacher_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
        rise_x, rise_y = s - max_x, t - max_y
        smaller_x, smaller_y = tl.exp(-tl.abs(rise_x)), tl.exp(-tl.abs(rise_y))
        x = tl.where(rise_x > 0, x * smaller_x + 1.0, x + smaller_x)
        if not MIXED:
            new_x = tl.where(rise_x > 0, s, max_x)
            new_y = tl.where(rise_y > 0, t, max_y)
            shift = (max_y - new_y) - (max_x - new_x)
            kept = tl.where(rise_y > 0, smaller_y, 1.0)
            e = tl.where(rise_y > 0, 1.0, smaller_y)
            w = kept * (w + tl.where(y > 0, y * shift, 0.0)) + e * where_positive(e, (t - new_y) - (s - new_x))
        y = tl.where(rise_y > 0, y * smaller_y + 1.0, y + smaller_y)
        max_x = tl.where(rise_x > 0, s, max_x)
        max_y = tl.where(rise_y > 0, t, max_y)
    top_x, top_y = tl.max(max_x, 1), tl.max(max_y, 1)
    below_x, below_y = max_x - top_x[:, None], max_y - top_y[:, None]
    if not MIXED:
        w = tl.sum(tl.exp(below_y) * (w + tl.where(y > 0, y * (below_y - below_x), 0.0)), 1)
    # A row with plus infinity is NaN, as its plain computation is.
    x = tl.where(top_x == float("inf"), float("nan"), tl.sum(x * tl.exp(below_x), 1))
    y = tl.where(top_y == float("inf"), float("nan"), tl.sum(y * tl.exp(below_y), 1))
    log_x, log_y = tl.log(x), tl.log(y)
    if MIXED:
        kept_x, kept_y = log_x, log_y
        cross_x, cross_y = _mixture_sums(
            student_ptr, teacher_ptr, line, top_x, top_y, log_x, log_y, rows, n, temperature, beta,
            TEMPERED, ACC, INDEX, LINES, BLOCK,
        )  # fmt: skip
        loss = beta * cross_y + (1.0 - beta) * cross_x
    else:
        kept_x, kept_y = 1.0 / x, 1.0 / y
        cross_x = tl.zeros_like(x)
        cross_y = w / y
        loss = cross_y + (log_x - log_y)
    tl.store(losses_ptr + line, tl.where(counts, loss, 0.0), mask=line < rows)
    at = stats_ptr + line * NUMBERS
    tl.store(at, top_x, mask=counts)
    tl.store(at + 1, kept_x, mask=counts)
    tl.store(at + 2, top_y, mask=counts)
    tl.store(at + 3, kept_y, mask=counts)
    tl.store(at + 4, cross_x, mask=counts)
    tl.store(at + 5, cross_y, mask=counts)


@triton.jit
def _number(stats_ptr, line, counts, WHICH: tl.constexpr):
    return tl.load(stats_ptr + line * NUMBERS + WHICH, mask=counts, other=0.0)[:, None]


@triton.jit
def _divergence_backward(
    dlosses_ptr, dstudent_ptr, dteacher_ptr, student_ptr, teacher_ptr, labels_ptr, stats_ptr,
    rows, n, tiles, dlosses_stride, ignore_index, temperature: tl.float64, beta: tl.float64,
    MIXED: tl.constexpr, TEMPERED: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of LINES rows; of rows that do not count, 0."""
    line = (tl.program_id(0) // tiles).to(INDEX) * LINES + tl.arange(0, LINES)
    position = (tl.program_id(0) % tiles).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    counts = _counts(labels_ptr, ignore_index, line, rows)
    temperature = tl.full((), temperature, ACC)
    beta = tl.full((), beta, ACC)
    g = tl.load(dlosses_ptr + line * dlosses_stride, mask=counts, other=0.0)[:, None] / temperature
    below_x = _load(student_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
    below_x = below_x - _number(stats_ptr, line, counts, 0)
    below_y = _load(teacher_ptr, line, position, rows, n, temperature, TEMPERED, ACC)
    below_y = below_y - _number(stats_ptr, line, counts, 2)
    kept_x, kept_y = _number(stats_ptr, line, counts, 1), _number(stats_ptr, line, counts, 3)
    cross_y = _number(stats_ptr, line, counts, 5)
    if MIXED:
        log_q, log_p = below_x - kept_x, below_y - kept_y
        q, p = tl.exp(log_q), tl.exp(log_p)
        over_q, over_p = over_mixture(log_q, log_p, beta)
        dstudent = (1.0 - beta) * g * (q * (over_q - _number(stats_ptr, line, counts, 4)))
        dteacher = beta * g * (p * (over_p - cross_y))
    else:
        q, p = tl.exp(below_x) * kept_x, tl.exp(below_y) * kept_y
        dstudent = g * (q - p)
        dteacher = g * (p * where_positive(p, below_y - below_x - cross_y))
    inside = (line < rows)[:, None] & (position < n)[None, :]
    offset = line[:, None] * n + position[None, :]
    if dstudent_ptr is not None:
        dstudent = tl.where(counts[:, None], dstudent, 0.0)
        tl.store(dstudent_ptr + offset, dstudent.to(dstudent_ptr.dtype.element_ty), mask=inside)
    if dteacher_ptr is not None:
        dteacher = tl.where(counts[:, None], dteacher, 0.0)
        tl.store(dteacher_ptr + offset, dteacher.to(dteacher_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pointwise(x, t, LOG: tl.constexpr):
    if LOG:
        return tl.exp(t) * (t - x)
    return tl.where(t == 0, 0.0, t * tl.log(t)) - t * x


@triton.jit
def _kl_div_sum(
    partial_ptr, input_ptr, target_ptr, n, share, LOG: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of each program's share of the elements."""
    start = tl.program_id(0).to(INDEX) * share
    stop = tl.minimum(start + share, n)
    total = tl.full((TILE,), 0.0, ACC)
    for first in range(start, stop, TILE):
        element = first + tl.arange(0, TILE).to(INDEX)
        x = tl.load(input_ptr + element, mask=element < stop, other=0.0).to(ACC)
        t = tl.load(target_ptr + element, mask=element < stop, other=0.0).to(ACC)
        total += _pointwise(x, t, LOG)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _kl_div_elements(
    out_ptr, input_ptr, target_ptr, n, LOG: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr
):
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    x = tl.load(input_ptr + element, mask=inside, other=0.0).to(ACC)
    t = tl.load(target_ptr + element, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + element, _pointwise(x, t, LOG).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _kl_div_backward(
    dy_ptr, dinput_ptr, dtarget_ptr, input_ptr, target_ptr, n, LOG: tl.constexpr, ONE: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients; ONE: dy is that of the sum. The input is absent where dtarget is."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    t = tl.load(target_ptr + element, mask=inside, other=0.0).to(ACC)
    if ONE:
        g = tl.zeros_like(t) + tl.load(dy_ptr).to(ACC)
    else:
        g = tl.load(dy_ptr + element, mask=inside, other=0.0).to(ACC)
    p = tl.exp(t) if LOG else t
    if dinput_ptr is not None:
        tl.store(dinput_ptr + element, (-(g * p)).to(dinput_ptr.dtype.element_ty), mask=inside)
    if dtarget_ptr is not None:
        x = tl.load(input_ptr + element, mask=inside, other=0.0).to(ACC)
        if LOG:
            d = g * p * (t - x + 1.0)
        else:  # as torch differentiates xlogy(t, t): its second term is g·t/t
            d = tl.where((g == 0) & (t == t), 0.0, g * tl.log(t)) + g - g * x
            d = tl.where((t == 0) | (t - t != 0), float("nan"), d)
        tl.store(dtarget_ptr + element, d.to(dtarget_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


def _tile(n: int, most: int, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    most //= 2 if dtype == torch.float64 else 1
    block = min(triton.next_power_of_2(n), most)
    return max(1, most // 2 // block), block


@lru_cache(KEPT)
def _rows_launch(
    rows: int,
    n: int,
    dlosses_stride: int | None,
    ignore_index: int,
    temperature: float,
    beta: float,
    dtype: torch.dtype,
) -> Launch:
    """Forward, or the backward with a gradient of that stride."""
    lines, block = _tile(n, FORWARD_TILE if dlosses_stride is None else BACKWARD_TILE, dtype)
    constants = (beta > 0.0, temperature != 1.0, accumulator(dtype)[0], index_type(rows * n, 6 * rows), lines, block)
    groups = cdiv(rows, lines)
    if dlosses_stride is None:
        scalars = (rows, n, ignore_index, temperature, beta)
        return Launch(_divergence_forward, groups, scalars, constants, FORWARD_WARPS)
    tiles = cdiv(n, block)
    backward = (rows, n, tiles, dlosses_stride, ignore_index, temperature, beta)
    return Launch(_divergence_backward, groups * tiles, backward, constants, BACKWARD_WARPS)


def divergence_forward(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Of each row KL(teacher || student), or with beta > 0 the Jensen-Shannon divergence; and six numbers of it."""
    rows, n = student.shape
    wide = accumulator(student.dtype)[1]
    losses = torch.empty((rows,), dtype=wide, device=student.device)
    stats = torch.empty((rows, NUMBERS.value), dtype=wide, device=student.device)
    launch = _rows_launch(rows, n, None, ignore_index, float(temperature), float(beta), student.dtype)
    launch(losses, stats, student.contiguous(), teacher.contiguous(), labels)
    return losses, stats


def divergence_backward(
    dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float,
    temperature: float, stats: Tensor, dstudent: bool, dteacher: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of student and teacher, of those that are wanted; an empty tensor for one that is not."""
    rows, n = student.shape
    to = [
        torch.empty((rows, n), dtype=student.dtype, device=student.device) if w else None for w in (dstudent, dteacher)
    ]
    launch = _rows_launch(rows, n, dlosses.stride(0), ignore_index, float(temperature), float(beta), student.dtype)
    launch(dlosses, *to, student.contiguous(), teacher.contiguous(), labels, stats)
    return tuple(student.new_empty((0,)) if grad is None else grad for grad in to)  # type: ignore[return-value]


@lru_cache(KEPT)
def _strides(shape: Sizes, input: Sizes, target: Sizes) -> Sizes:
    """The layout of kl_div's elements. Asked of torch itself, on tensors without memory."""
    x, t = (torch.empty_strided(shape, strides, device="meta") for strides in (input, target))
    return torch.kl_div(x, t, reduction=0).stride()


def _laid(t: Tensor, strides: Sizes) -> Tensor:
    """t in a dense layout, copied where it has another."""
    return t if t.stride() == strides else _empty(t, strides, t.dtype).copy_(t)


def _empty(like: Tensor, strides: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(like.shape, strides, dtype=dtype, device=like.device)


@lru_cache(KEPT)
def _sum_launch(n: int, dtype: torch.dtype, log_target: bool, device: torch.device) -> Launch:
    share = cdiv(cdiv(n, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)), TILE) * TILE
    constants = (log_target, accumulator(dtype)[0], index_type(n), TILE)
    return Launch(_kl_div_sum, cdiv(n, share), (n, share), constants, WARPS)


@lru_cache(KEPT)
def _flat_launch(n: int, dtype: torch.dtype, other: torch.dtype, *constants: bool) -> Launch:
    """Of the elements, for log_target; of the gradients, for that and one. ``other``: dtype of the result, of dy."""
    function = _kl_div_elements if len(constants) == 1 else _kl_div_backward
    return Launch(function, cdiv(n, TILE), (n,), (*constants, accumulator(dtype)[0], index_type(n), TILE), WARPS)


def kl_div_sum(input: Tensor, target: Tensor, log_target: bool) -> Tensor:
    """The sum over all elements, in the type of the computation."""
    strides = _strides(input.shape, input.stride(), target.stride())
    launch = _sum_launch(input.numel(), input.dtype, log_target, input.device)
    partial = torch.empty((launch.programs,), dtype=accumulator(input.dtype)[1], device=input.device)
    launch(partial, _laid(input, strides), _laid(target, strides))
    return partial.sum()


def kl_div_elements(input: Tensor, target: Tensor, log_target: bool, dtype: torch.dtype) -> Tensor:
    strides = _strides(input.shape, input.stride(), target.stride())
    out = _empty(input, strides, dtype)
    launch = _flat_launch(input.numel(), input.dtype, dtype, log_target)
    launch(out, _laid(input, strides), _laid(target, strides))
    return out


def kl_div_backward(
    dy: Tensor, input: Tensor | None, target: Tensor, log_target: bool, dinput: bool, dtarget: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and target, of those that are wanted; dy is one number where the result was the sum."""
    strides = _strides(target.shape, (target if input is None else input).stride(), target.stride())
    to = [_empty(target, strides, target.dtype) if wanted else None for wanted in (dinput, dtarget)]
    one = dy.dim() == 0
    read = None if input is None or not dtarget else _laid(input, strides)
    launch = _flat_launch(target.numel(), target.dtype, dy.dtype, log_target, one)
    launch(dy if one else _laid(dy, strides), *to, read, _laid(target, strides))
    return tuple(target.new_empty((0,)) if grad is None else grad for grad in to)  # type: ignore[return-value]
