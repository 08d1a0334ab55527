"""What a rank finds of its own classes for the cross-entropy of a sharded vocabulary, and the gradient of its logits.

Program of `_shard` = one row, which it walks along with a running maximum m and the sum of exp(z - m). The gradient is
elementwise. fastlayers/ops/vocab_parallel.py has the formulas.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.cross_entropy import capped
from fastlayers.kernels.indexing import extent, index_type
from fastlayers.kernels.launch import KEPT, Launch
from fastlayers.kernels.reductions import accumulator

#: Elements that a program holds: 16 a thread, of float64 4.
BLOCK, BLOCK_FLOAT64, WARPS = 4096, 1024, 8


@triton.jit
def _shard(
    lse_ptr, own_ptr, sum_ptr, x_ptr, target_ptr, softcap: tl.float64, first, columns, stride,
    CAPPED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(INDEX)
    x_ptr += row * stride
    m = tl.full((), float("-inf"), ACC)
    s, total = tl.full((), 0.0, ACC), tl.full((), 0.0, ACC)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        x = capped(tl.load(x_ptr + column, mask=inside, other=0.0).to(ACC), softcap, CAPPED, ACC)
        if sum_ptr is not None:
            total += tl.sum(tl.where(inside, x, 0.0), 0)
        x = tl.where(inside, x, float("-inf"))
        largest = tl.maximum(m, tl.max(x, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        s = tl.exp(m - base) * s + tl.sum(tl.exp(x - base), 0)
        m = largest
    # Plus infinity is the sum then, as torch.logsumexp has it.
    lse = tl.where(m == float("inf"), m, m + tl.log(s))
    tl.store(lse_ptr + row, lse)
    target = tl.load(target_ptr + row) - first
    mine = (target >= 0) & (target < columns)
    own = capped(tl.load(x_ptr + target, mask=mine, other=0.0).to(ACC), softcap, CAPPED, ACC)
    tl.store(own_ptr + row, own)
    if sum_ptr is not None:
        tl.store(sum_ptr + row, total)


@triton.jit
def _gradient(
    d_ptr, x_ptr, target_ptr, lse_ptr, dy_ptr, share_ptr,
    softcap: tl.float64, smoothing: tl.float64, z_loss: tl.float64, first, ignore_index, columns, stride, dy_stride,
    blocks,
    CAPPED: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(INDEX)
    row = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    score = capped(tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(ACC), softcap, CAPPED, ACC)
    d = tl.exp(score - lse) * (1.0 + 2.0 * tl.full((), z_loss, ACC) * lse)
    d += tl.where(column == target - first, tl.full((), smoothing, ACC) - 1.0, 0.0)
    if share_ptr is not None:
        d -= tl.load(share_ptr + row)
    if CAPPED:
        slope = score / tl.full((), softcap, ACC)
        d *= 1.0 - slope * slope
    # Not 0·inf, where all rows are ignored.
    d = tl.where(target == ignore_index, 0.0, d * tl.load(dy_ptr + row * dy_stride))
    tl.store(d_ptr + row * columns + column, d.to(d_ptr.dtype.element_ty), mask=inside)


@lru_cache(KEPT)
def _constants(rows: int, columns: int, stride: int, softcap: float, dtype: torch.dtype) -> tuple[object, ...]:
    block = BLOCK_FLOAT64 if dtype is torch.float64 else BLOCK
    reach = max(extent((rows, columns), (stride, 1)), rows * columns, columns + block)
    return softcap != 0, accumulator(dtype)[0], index_type(reach), block


@lru_cache(KEPT)
def _shard_launch(rows: int, columns: int, stride: int, softcap: float, first: int, dtype: torch.dtype) -> Launch:
    constants = _constants(rows, columns, stride, softcap, dtype)
    return Launch(_shard, rows, (softcap, first, columns, stride), constants, WARPS)


@lru_cache(KEPT)
def _gradient_launch(
    rows: int, columns: int, stride: int, dy_stride: int, softcap: float, smoothing: float, z_loss: float, first: int,
    ignore_index: int, dtype: torch.dtype,
) -> Launch:  # fmt: skip
    constants = _constants(rows, columns, stride, softcap, dtype)
    blocks = triton.cdiv(columns, constants[-1])  # type: ignore[call-overload]
    scalars = (softcap, smoothing, z_loss, first, ignore_index, columns, stride, dy_stride, blocks)
    return Launch(_gradient, rows * blocks, scalars, constants, WARPS)


def shard(
    logits: Tensor, target: Tensor, softcap: float, first: int, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row the log-sum-exp of the scores, that of its class, 0 where another rank has it, and if wanted the sum.

    Args:
        logits: (rows, columns) of neighbouring elements; the classes from ``first`` on.
        target: (rows,) of int64.
        softcap: 0 for none.
    """
    (rows, columns), dtype = logits.shape, accumulator(logits.dtype)[1]
    lse, own = (torch.empty((rows,), dtype=dtype, device=logits.device) for _ in range(2))
    total = torch.empty((rows,), dtype=dtype, device=logits.device) if sums else None
    launch = _shard_launch(rows, columns, logits.stride(0), softcap, first, logits.dtype)
    launch(lse, own, total, logits, target)
    return lse, own, total


def shard_backward(
    dy: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor | None, softcap: float, smoothing: float,
    z_loss: float, first: int, ignore_index: int,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, contiguous.

    Args:
        dy: (rows,), of any stride.
        lse: of all classes, in float32 or float64.
        share: of each class in label smoothing, None without.
    """
    rows, columns = logits.shape
    d = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    options = (softcap, smoothing, z_loss, first, ignore_index)
    launch = _gradient_launch(rows, columns, logits.stride(0), dy.stride(0), *options, logits.dtype)
    launch(d, logits, target, lse, dy, share)
    return d
