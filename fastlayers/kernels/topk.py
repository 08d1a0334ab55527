"""The k largest scores of each row of a chunk of logits, in one pass.

Program = one row, which it walks along. A score and its column are packed into one int64, the score in the upper half
as an integer of the same order. No two are equal, and the larger is the larger score, or of equal ones the first. A
tile none of whose scores exceeds the least of the best k so far, as are most, costs one maximum. Of another the largest
replace the least one by one, until none exceeds it. At the end each of the best goes where as many are larger.
fastlayers/ops/linear_topk.py has the formulas.
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

#: Elements that a program holds: 8 a thread, one load of 16 bits each. With 16 some kernels spilled.
BLOCK, WARPS = 2048, 8

#: Keys: of what is no score, which is below that of minus infinity, and of NaN.
NO_KEY, HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
#: Packed: of what is no score, the first above all with NO_KEY, which is below any score's, and one above any score's.
NONE, START, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr((1 - 2**31) * 2**32), tl.constexpr(2**63 - 1)


@triton.jit
def _key(x):
    """An int32 of the order that torch gives float32: both zeros are equal, and NaN is the largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, HIGHEST_KEY, bits ^ ((bits >> 31) & HIGHEST_KEY))


@triton.jit
def _topk(
    values_ptr, indices_ptr, x_ptr, softcap: tl.float64, columns, stride, k,
    CAPPED: tl.constexpr, LOG_PROB: tl.constexpr, INDEX: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(INDEX)
    x_ptr += row * stride
    lane = tl.arange(0, K)
    # Lanes past k hold what nothing replaces; the others begin below every score, each with a number of its own.
    best = tl.where(lane < k, lane.to(tl.int64) + START, HIGHEST)
    least = tl.min(best, 0)
    m, s = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        x = capped(tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED, tl.float32)
        if LOG_PROB:
            scores = tl.where(inside, x, float("-inf"))
            largest = tl.maximum(m, tl.max(scores, 0))
            base = tl.where(largest == float("-inf"), 0.0, largest)
            s = tl.exp(m - base) * s + tl.sum(tl.exp(scores - base), 0)
            m = largest
        key = tl.where(inside, _key(x), NO_KEY)
        if tl.max(key, 0) > (least >> 32).to(tl.int32):
            packed = (key.to(tl.int64) << 32) | (column ^ HIGHEST_KEY).to(tl.int64)
            candidate = tl.max(packed, 0)
            while candidate > least:
                best = tl.where(best == least, candidate, best)
                least = tl.min(best, 0)
                packed = tl.where(packed == candidate, NONE, packed)
                candidate = tl.max(packed, 0)
    place = tl.sum((best[None, :] > best[:, None]).to(tl.int32), 1) - (K - k)
    bits = (best >> 32).to(tl.int32)
    value = (bits ^ ((bits >> 31) & HIGHEST_KEY)).to(tl.float32, bitcast=True)
    if LOG_PROB:
        value = (value - m) - tl.log(s)
    place += row * k
    tl.store(values_ptr + place, value.to(values_ptr.dtype.element_ty), mask=lane < k)
    tl.store(indices_ptr + place, (best & HIGHEST_KEY) ^ HIGHEST_KEY, mask=lane < k)


@lru_cache(KEPT)
def _launch(rows: int, columns: int, stride: int, k: int, softcap: float, log_prob: bool, dtype: torch.dtype) -> Launch:
    constants = (softcap != 0, log_prob, index_type(rows * stride), max(2, triton.next_power_of_2(k)), BLOCK)
    return Launch(_topk, rows, (softcap, columns, stride, k), constants, WARPS)


def topk_chunk(logits: Tensor, k: int, softcap: float, log_prob: bool, columns: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row, in logits' dtype, or float32 of their log-probabilities; and their columns.

    Args:
        logits: (rows, padded), contiguous, of at most 32 bits; the first ``columns`` are classes, at least k.
        softcap: 0 for none.
    """
    rows, stride = logits.shape
    values = torch.empty((rows, k), dtype=torch.float32 if log_prob else logits.dtype, device=logits.device)
    indices = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    _launch(rows, columns, stride, k, softcap, log_prob, logits.dtype)(values, indices, logits)
    return values, indices
