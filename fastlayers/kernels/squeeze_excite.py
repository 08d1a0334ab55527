"""What squeeze-and-excite reads of an image beside the product with its gates, each in one pass.

The sum of each channel over space, of x or of a product, and x·scale + factor·shift, the gradient that the product and
the mean of x send back together. Images are [outer, repeat, columns] in memory: the channels are the columns of
channels_last images; of contiguous ones they are outside, and columns is 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import TILE, WARPS
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator
from fastlayers.kernels.spatial import Sizes, partial_sums

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _scale_shift(
    out_ptr, x_ptr, scale_ptr, shift_ptr, n, block, columns, factor: tl.float64,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = x * scale + factor * shift, for a scale and a shift of each column of a block."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    channel = element // block * columns + element % columns
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    scale = tl.load(scale_ptr + channel, mask=inside, other=0.0).to(ACC)
    shift = tl.load(shift_ptr + channel, mask=inside, other=0.0).to(ACC)
    out = x * scale + tl.full((), factor, ACC) * shift
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


def _in_memory(x: Tensor) -> Sizes:
    """(outer, repeat, columns)"""
    n, channels, height, width = x.shape
    return (n * channels, height * width, 1) if x.is_contiguous() else (n, height * width, channels)


def spatial_sum(x: Tensor, y: Tensor | None, factor: float) -> Tensor:
    """The sums over space, (N, C, 1, 1), of x·factor or of x·y, for a y that lies as x does."""
    (partial,) = partial_sums(x, y, _in_memory(x), factor)
    return (partial.sum(1) if partial.shape[1] > 1 else partial).to(x.dtype).view(*x.shape[:2], 1, 1)


@lru_cache(KEPT)
def _scale_launch(sizes: Sizes, factor: float, dtype: torch.dtype) -> Launch:
    outer, repeat, columns = sizes
    n = outer * repeat * columns
    constants = (accumulator(dtype)[0], index_type(n), TILE)
    return Launch(_scale_shift, cdiv(n, TILE), (n, repeat * columns, columns, float(factor)), constants, WARPS)


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor, factor: float) -> Tensor:
    """x·scale + factor·shift, for scale and shift of shape (N, C, 1, 1)."""
    out = torch.empty_like(x)
    _scale_launch(_in_memory(x), factor, x.dtype)(out, x, scale.contiguous(), shift.contiguous())
    return out
