"""Divergences of rows of a chunk of a student's logits from a teacher's, and their gradient in the place of the former.

Program = one row, which it walks along three times. The first walk keeps a running maximum and sums *a lane*, as
:mod:`fastlayers.kernels.kl_div` does; the second one, for the divergences that need normalised probabilities in a sum,
goes backwards, so as to meet the cache where the first left it; the third writes the gradient.
fastlayers/ops/linear_divergence.py has the formulas.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.cross_entropy import capped
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.kl_div import over_mixture, where_positive
from fastlayers.kernels.launch import KEPT, Launch
from fastlayers.kernels.reductions import accumulator

#: Elements that a program holds at a time. The first walk keeps five numbers a lane: 8 lanes a thread, of float64 4.
BLOCK, BLOCK_FLOAT64, WARPS = 2048, 1024, 8

KL, REVERSE_KL, JS, TV, COSINE = (tl.constexpr(i) for i in range(5))
CODES = {"kl": KL, "reverse_kl": REVERSE_KL, "js": JS, "tv": TV, "cosine": COSINE}
#: What torch.nn.functional.cosine_similarity takes for the norm of a shorter vector.
LEAST_NORM = tl.constexpr(1e-8)


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _score(ptr, position, last, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, ACC: tl.constexpr):
    """softcap·tanh(scale·logits / softcap); 0 from ``last`` on."""
    x = tl.load(ptr + position, mask=position < last, other=0.0).to(ACC)
    if SCALED:
        x *= tl.full((), scale, ACC)
    return capped(x, softcap, CAPPED, ACC)


@triton.jit
def _level(score, position, last, temperature, TEMPERED: tl.constexpr, ACC: tl.constexpr):
    """A score by the temperature; minus infinity from ``last`` on, as if there was no probability."""
    if TEMPERED:
        by = tl.zeros_like(score) + tl.full((), temperature, ACC)
        if tl.float32 == ACC:
            score = tl.div_rn(score, by)
        else:
            score = score / by
    return tl.where(position < last, score, float("-inf"))


@triton.jit
def _sign(x):
    """Of a number; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def _carry(w, a, rise_a, smaller_a, shift, difference):
    """The sum of exp(a)·difference below a maximum of a that may rise, and below another that moves by ``shift``."""
    kept = tl.where(rise_a > 0, smaller_a, 1.0)
    e = tl.where(rise_a > 0, 1.0, smaller_a)
    return kept * (w + tl.where(a > 0, a * shift, 0.0)) + e * where_positive(e, difference)


@triton.jit
def _row_sums(
    student_ptr, teacher_ptr, last, softcap, teacher_scale, teacher_softcap, temperature,
    KIND: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The maxima of both rows, the sums of exponentials below them, and the sum of what weighs a score by the other.

    For COSINE the sums are those of squares and of products.
    """
    LOWEST: tl.constexpr = -1.7976931348623157e308 if tl.float64 == ACC else -3.4028234663852886e38
    max_x, max_y = tl.full((BLOCK,), LOWEST, ACC), tl.full((BLOCK,), LOWEST, ACC)
    x, y, w = tl.full((BLOCK,), 0.0, ACC), tl.full((BLOCK,), 0.0, ACC), tl.full((BLOCK,), 0.0, ACC)
    for first in range(0, last, BLOCK):
        position = first + tl.arange(0, BLOCK)
        s = _score(student_ptr, position, last, 1.0, softcap, False, CAPPED, ACC)
        t = _score(teacher_ptr, position, last, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED, ACC)
        if KIND == COSINE:
            x += s * s
            y += t * t
            w += s * t
        else:
            s = _level(s, position, last, temperature, TEMPERED, ACC)
            t = _level(t, position, last, temperature, TEMPERED, ACC)
            rise_x, rise_y = s - max_x, t - max_y
            smaller_x, smaller_y = tl.exp(-tl.abs(rise_x)), tl.exp(-tl.abs(rise_y))
            new_x, new_y = tl.where(rise_x > 0, s, max_x), tl.where(rise_y > 0, t, max_y)
            if KIND == KL:
                shift = (max_y - new_y) - (max_x - new_x)
                w = _carry(w, y, rise_y, smaller_y, shift, (t - new_y) - (s - new_x))
            if KIND == REVERSE_KL:
                shift = (max_x - new_x) - (max_y - new_y)
                w = _carry(w, x, rise_x, smaller_x, shift, (s - new_x) - (t - new_y))
            x = tl.where(rise_x > 0, x * smaller_x + 1.0, x + smaller_x)
            y = tl.where(rise_y > 0, y * smaller_y + 1.0, y + smaller_y)
            max_x, max_y = new_x, new_y
    top_x, top_y = tl.max(max_x, 0), tl.max(max_y, 0)
    if KIND != COSINE:
        below_x, below_y = max_x - top_x, max_y - top_y
        if KIND == KL:
            w = tl.exp(below_y) * (w + tl.where(y > 0, y * (below_y - below_x), 0.0))
        if KIND == REVERSE_KL:
            w = tl.exp(below_x) * (w + tl.where(x > 0, x * (below_x - below_y), 0.0))
        x, y = x * tl.exp(below_x), y * tl.exp(below_y)
    w = tl.sum(w, 0)
    x, y = tl.sum(x, 0), tl.sum(y, 0)
    if KIND != COSINE:  # A row with plus infinity is NaN, as its plain computation is.
        x = tl.where(top_x == float("inf"), float("nan"), x)
        y = tl.where(top_y == float("inf"), float("nan"), y)
    return top_x, top_y, x, y, w


@triton.jit
def _mixture_sums(
    student_ptr, teacher_ptr, last, top_x, top_y, log_x, log_y, softcap, teacher_scale, teacher_softcap, temperature,
    beta,
    KIND: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(cross, loss) of a divergence from the mixture, or of the total variation, by a second reading of both rows."""
    of_x, of_y = tl.full((BLOCK,), 0.0, ACC), tl.full((BLOCK,), 0.0, ACC)
    for done in range(0, last, BLOCK):
        position = (last - 1 - done) // BLOCK * BLOCK + tl.arange(0, BLOCK)
        s = _score(student_ptr, position, last, 1.0, softcap, False, CAPPED, ACC)
        t = _score(teacher_ptr, position, last, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED, ACC)
        log_q = (_level(s, position, last, temperature, TEMPERED, ACC) - top_x) - log_x
        log_p = (_level(t, position, last, temperature, TEMPERED, ACC) - top_y) - log_y
        q, p = tl.exp(log_q), tl.exp(log_p)
        if KIND == JS:
            over_q, over_p = over_mixture(log_q, log_p, beta)
            of_x += q * over_q
            of_y += p * over_p
        else:
            of_x += q * _sign(q - p)
            of_y += tl.abs(q - p)
    cross, loss = tl.sum(of_x, 0), tl.sum(of_y, 0)
    loss = beta * loss + (1.0 - beta) * cross if KIND == JS else 0.5 * loss
    return tl.where(loss == loss, cross, loss), loss  # NaN of the teacher is lost in a mixture


@triton.jit
def _slope(g, below_x, below_y, x, y, log_x, log_y, cross, beta, KIND: tl.constexpr):
    """The gradient of scores that are ``below`` the maxima of their rows, whose sums are x and y."""
    if KIND == KL:
        d = g * (tl.exp(below_x) / x - tl.exp(below_y) / y)
    elif KIND == REVERSE_KL:
        q = tl.exp(below_x) / x
        d = g * (q * where_positive(q, below_x - below_y - cross))
    elif KIND == JS:
        log_q, log_p = below_x - log_x, below_y - log_y
        over_q, _ = over_mixture(log_q, log_p, beta)
        d = (1.0 - beta) * g * (tl.exp(log_q) * (over_q - cross))
    else:
        q, p = tl.exp(below_x - log_x), tl.exp(below_y - log_y)
        d = 0.5 * g * (q * (_sign(q - p) - cross))
    return d


@triton.jit
def _divergence(
    losses_ptr, student_ptr, teacher_ptr, labels_ptr, dlosses_ptr, n, student_stride, teacher_stride, dlosses_stride,
    ignore_index, softcap: tl.float64, teacher_scale: tl.float64, teacher_softcap: tl.float64, temperature: tl.float64,
    beta: tl.float64,
    KIND: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row and, if there are ``dlosses``, the gradient over the whole stride of the student's row."""
    row = tl.program_id(0).to(INDEX)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    counts = row >= 0
    if labels_ptr is not None:
        counts = tl.load(labels_ptr + row) != ignore_index
    last = tl.where(counts, n, 0)
    beta = tl.full((), beta, ACC)
    top_x, top_y, x, y, w = _row_sums(
        student_ptr, teacher_ptr, last, softcap, teacher_scale, teacher_softcap, temperature,
        KIND, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, TEMPERED, ACC, BLOCK,
    )  # fmt: skip
    log_x, log_y = tl.log(x), tl.log(y)

    cross = tl.full((), 0.0, ACC)  # what the gradient of a row subtracts
    if KIND == KL:
        loss = w / y + (log_x - log_y)
    elif KIND == REVERSE_KL:
        cross = w / x
        loss = cross + (log_y - log_x)
    elif KIND == COSINE:
        x, y = tl.sqrt(x), tl.sqrt(y)
        x = tl.where(x < LEAST_NORM, LEAST_NORM, x)
        y = tl.where(y < LEAST_NORM, LEAST_NORM, y)
        cross = w / x / y
        loss = 1.0 - cross
    else:
        cross, loss = _mixture_sums(
            student_ptr, teacher_ptr, last, top_x, top_y, log_x, log_y, softcap, teacher_scale, teacher_softcap,
            temperature, beta, KIND, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, TEMPERED, ACC, BLOCK,
        )  # fmt: skip
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))

    if dlosses_ptr is not None:
        g = tl.load(dlosses_ptr + row * dlosses_stride)
        if TEMPERED:
            g = g / tl.full((), temperature, ACC)
        for first in range(0, student_stride, BLOCK):
            position = first + tl.arange(0, BLOCK)
            score = _score(student_ptr, position, last, 1.0, softcap, False, CAPPED, ACC)
            t = _score(teacher_ptr, position, last, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED, ACC)
            if KIND == COSINE:
                d = g * ((score * (cross / x) - t / y) / x)
            else:
                below_x = _level(score, position, last, temperature, TEMPERED, ACC) - top_x
                below_y = _level(t, position, last, temperature, TEMPERED, ACC) - top_y
                d = _slope(g, below_x, below_y, x, y, log_x, log_y, cross, beta, KIND)
            if CAPPED:
                slope = score / tl.full((), softcap, ACC)
                d *= 1.0 - slope * slope
            d = tl.where(position < last, d, 0.0)
            tl.store(student_ptr + position, d.to(student_ptr.dtype.element_ty), mask=position < student_stride)


# ------------------------------------------------------------------------------------------------------------- wrappers


@lru_cache(KEPT)
def _launch(
    rows: int, n: int, strides: tuple[int, int, int], ignore_index: int, numbers: tuple[float, ...], divergence: str,
    dtype: torch.dtype, teacher: torch.dtype, has_gradient: bool,
) -> Launch:  # fmt: skip
    """For tensors of these dtypes; ``numbers`` are softcap, scale and softcap of the teacher, temperature and beta."""
    softcap, teacher_scale, teacher_softcap, temperature, _ = numbers
    block = min(triton.next_power_of_2(n), BLOCK_FLOAT64 if dtype is torch.float64 else BLOCK)
    constants = (
        CODES[divergence].value, softcap != 0.0, teacher_scale != 1.0, teacher_softcap != 0.0,
        temperature != 1.0 and divergence != "cosine", accumulator(dtype)[0],
        index_type(rows * max(strides)), block,
    )  # fmt: skip
    return Launch(_divergence, rows, (n, *strides, ignore_index, *numbers), constants, WARPS)


def divergence_chunk_(
    student: Tensor, teacher: Tensor, labels: Tensor | None, dlosses: Tensor | None, columns: int, ignore_index: int,
    divergence: str, softcap: float, teacher_scale: float, teacher_softcap: float, temperature: float, beta: float,
) -> Tensor:  # fmt: skip
    """The losses of the rows and, in the place of the student's logits, the gradient of ``sum(losses * dlosses)``.

    Args:
        student: (rows, padded), contiguous; the first ``columns`` are classes. Their padding gets a gradient of 0.
        teacher: (rows, at least columns), of any floating dtype, whose last dimension is contiguous.
        labels: (rows,) of int64, or None. A row whose label is ``ignore_index`` has a loss and a gradient of 0.
        dlosses: (rows,) in the accumulation dtype, or None where no gradient is wanted.
        softcap, teacher_softcap: 0 for none.
    """
    rows = student.shape[0]
    losses = torch.empty((rows,), dtype=accumulator(student.dtype)[1], device=student.device)
    strides = (student.stride(0), teacher.stride(0), 0 if dlosses is None else dlosses.stride(0))
    numbers = (softcap, teacher_scale, teacher_softcap, temperature, beta)
    of = (divergence, student.dtype, teacher.dtype, dlosses is not None)
    _launch(rows, columns, strides, ignore_index, numbers, *of)(losses, student, teacher, labels, dlosses)
    return losses
