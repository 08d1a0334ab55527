"""Log-probabilities of classes and entropies of a chunk of logits, and their gradient in the place of these.

Program = one row, which it walks along. The forward keeps a running maximum m and the sums of exp(z - m) and of
exp(z - m)·(z - m); both grow with the maximum, and neither loses digits to a large one. The backward is elementwise.
fastlayers/ops/linear_log_prob.py has the formulas.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.cross_entropy import capped
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch
from fastlayers.kernels.reductions import accumulator

#: Elements that a program holds: 16 a thread, of float64 4.
BLOCK, BLOCK_FLOAT64, WARPS = 4096, 1024, 8


@triton.jit
def _row(
    log_prob_ptr, entropy_ptr, level_ptr, x_ptr, target_ptr, softcap: tl.float64, columns, stride, rows,
    CAPPED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(INDEX)
    x_ptr += row * stride
    m = tl.full((), float("-inf"), ACC)
    s, linear = tl.full((), 0.0, ACC), tl.full((), 0.0, ACC)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        x = capped(tl.load(x_ptr + column, mask=inside, other=0.0).to(ACC), softcap, CAPPED, ACC)
        x = tl.where(inside, x, float("-inf"))
        largest = tl.maximum(m, tl.max(x, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        fell = tl.where(m == float("-inf"), 0.0, m - base)  # the sums are 0 there
        shrinks = tl.exp(fell)
        difference = x - base
        e = tl.exp(difference)
        linear = shrinks * (linear + fell * s) + tl.sum(tl.where(e > 0, e * difference, 0.0), 0)
        s = shrinks * s + tl.sum(e, 0)
        m = largest
    target = tl.load(target_ptr + row)
    score = capped(tl.load(x_ptr + target).to(ACC), softcap, CAPPED, ACC)
    rest = tl.log(s)
    tl.store(log_prob_ptr + row, (score - m) - rest)
    tl.store(entropy_ptr + row, rest - linear / s)
    tl.store(level_ptr + row, m)
    tl.store(level_ptr + rows + row, rest)


@triton.jit
def _gradient(
    x_ptr, target_ptr, entropy_ptr, level_ptr, dlog_prob_ptr, dentropy_ptr, dlse_ptr, softcap: tl.float64,
    columns, stride, rows, blocks,
    CAPPED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(INDEX)
    row = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x_ptr += row * stride
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(ACC)
    score = capped(x, softcap, CAPPED, ACC)
    log_p = (score - tl.load(level_ptr + row)) - tl.load(level_ptr + rows + row)
    p = tl.exp(log_p)
    d = tl.full((BLOCK,), 0.0, ACC)
    if dlog_prob_ptr is not None:
        hit = column == tl.load(target_ptr + row)
        d += tl.load(dlog_prob_ptr + row) * (tl.where(hit, 1.0, 0.0) - p)
    if dentropy_ptr is not None:
        d -= tl.load(dentropy_ptr + row) * tl.where(p > 0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
    if dlse_ptr is not None:
        d += tl.load(dlse_ptr + row) * p
    if CAPPED:
        slope = score / tl.full((), softcap, ACC)
        d *= 1.0 - slope * slope
    d = tl.where(inside, d, 0.0)
    tl.store(x_ptr + column, d.to(x_ptr.dtype.element_ty), mask=column < stride)


@lru_cache(KEPT)
def _launch(rows: int, columns: int, stride: int, softcap: float, dtype: torch.dtype, backward: bool) -> Launch:
    block = BLOCK_FLOAT64 if dtype is torch.float64 else BLOCK
    constants = (softcap != 0, accumulator(dtype)[0], index_type(rows * stride), block)
    if not backward:
        return Launch(_row, rows, (softcap, columns, stride, rows), constants, WARPS)
    blocks = triton.cdiv(stride, block)
    return Launch(_gradient, rows * blocks, (softcap, columns, stride, rows, blocks), constants, WARPS)


def log_prob_chunk(logits: Tensor, target: Tensor, softcap: float, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of the classes, the entropies, and the levels that the gradient needs.

    Args:
        logits: (rows, padded), contiguous; the first ``columns`` are classes.
        target: (rows,) of int64, each a class.
        softcap: 0 for none.
    """
    (rows, stride), dtype = logits.shape, accumulator(logits.dtype)[1]
    found = torch.empty((4, rows), dtype=dtype, device=logits.device)
    log_prob, entropy, levels = found[0], found[1], found[2:]
    _launch(rows, columns, stride, softcap, logits.dtype, False)(log_prob, entropy, levels, logits, target)
    return log_prob, entropy, levels


def log_prob_chunk_backward_(
    logits: Tensor, target: Tensor, entropy: Tensor, levels: Tensor, dlog_prob: Tensor | None, dentropy: Tensor | None,
    dlse: Tensor | None, softcap: float, columns: int,
) -> None:  # fmt: skip
    """Put the gradient in the place of the logits, 0 in the padding."""
    rows, stride = logits.shape
    launch = _launch(rows, columns, stride, softcap, logits.dtype, True)
    launch(logits, target, entropy, levels, dlog_prob, dentropy, dlse)
