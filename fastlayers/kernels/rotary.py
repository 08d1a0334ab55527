"""Rotary embedding, x·cos + rotate(x)·sin, and its gradient: each tensor is read once and written once.

Stock PyTorch makes five passes over each of q and k. The tables have a row for each position, the same for all heads:
a program has a tile of (rows, HEADS, pairs), so that its threads share what they read of the tables. A row is a
position and a group of heads g, g + groups, ...; rows are walked in the order in which they lie in memory.

The gradient turns back: the same computation with the sines of a pair exchanged and negated, for any tables.
One-dimensional grid; q and k are a launch each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import extent, index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv

#: Pairs of a program: 16 a thread, four 16-byte words of 16-bit elements. Of a row up to BLOCK at a time.
TILE, BLOCK, WARPS = 2048, 512, 4
#: Heads that share what is read of the tables.
HEADS = 4

Sizes = tuple[int, ...]


@triton.jit
def _load_pairs(
    ptr, offset, start, inner, inside, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Both sides of pairs start, ..., start + BLOCK - 1 of the rows at ``offset``, of shape (rows, heads, 1)."""
    if INTERLEAVED:
        element = (2 * start + tl.arange(0, 2 * BLOCK))[None, None, :]
        both = tl.load(ptr + (offset + element * inner), mask=inside & (element < 2 * PAIRS), other=0.0).to(ACC)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        pair = (start + tl.arange(0, BLOCK))[None, None, :]
        first = tl.load(ptr + (offset + pair * inner), mask=inside & (pair < PAIRS), other=0.0).to(ACC)
        second = tl.load(ptr + (offset + (pair + PAIRS) * inner), mask=inside & (pair < PAIRS), other=0.0).to(ACC)
    return first, second


@triton.jit
def _load_table(
    ptr, offset, start, inner, inside, PAIRS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the tables have for the sides of these pairs: of HALF tables one column for both."""
    if HALF:
        pair = (start + tl.arange(0, BLOCK))[None, None, :]
        first = tl.load(ptr + (offset + pair * inner), mask=inside & (pair < PAIRS), other=0.0).to(ACC)
        second = first
    else:
        first, second = _load_pairs(ptr, offset, start, inner, inside, PAIRS, INTERLEAVED, ACC, BLOCK)
    return first, second


@triton.jit
def _rotate(
    out_ptr, x_ptr, cos_ptr, sin_ptr, rows, middle, fastest, heads, groups, x0, x1, x2, x_step, x_inner, out0, out1,
    out2, out_step, cos0, cos1, cos2, cos_inner, sin0, sin1, sin2, sin_inner, GROUP_FASTEST: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """The first 2·PAIRS elements of DIM rotate, the others pass through. Program: ROWS rows of HEADS heads each."""
    row = (tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS))[:, None, None]
    above = row // fastest
    c0, c1, c2 = above // middle, above % middle, row % fastest
    i = tl.arange(0, HEADS)[None, :, None]
    group = c2 if GROUP_FASTEST else c1
    inside = (row < rows) & (group + i * groups < heads)
    x = c0 * x0 + c1 * x1 + c2 * x2 + i * x_step
    out = c0 * out0 + c1 * out1 + c2 * out2 + i * out_step
    cos = c0 * cos0 + c1 * cos1 + c2 * cos2
    sin = c0 * sin0 + c1 * sin1 + c2 * sin2
    for start in range(0, PAIRS, BLOCK):
        a, b = _load_pairs(x_ptr, x, start, x_inner, inside, PAIRS, INTERLEAVED, ACC, BLOCK)
        cos_a, cos_b = _load_table(cos_ptr, cos, start, cos_inner, row < rows, PAIRS, HALF, INTERLEAVED, ACC, BLOCK)
        sin_a, sin_b = _load_table(sin_ptr, sin, start, sin_inner, row < rows, PAIRS, HALF, INTERLEAVED, ACC, BLOCK)
        if BACKWARD:
            turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        else:
            turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        if INTERLEAVED:
            element = (2 * start + tl.arange(0, 2 * BLOCK))[None, None, :]
            both = tl.reshape(tl.join(turned_a, turned_b), (ROWS, HEADS, 2 * BLOCK))
            tl.store(out_ptr + (out + element), both.to(out_ptr.dtype.element_ty), mask=inside & (element < 2 * PAIRS))
        else:
            pair = (start + tl.arange(0, BLOCK))[None, None, :]
            there = inside & (pair < PAIRS)
            tl.store(out_ptr + (out + pair), turned_a.to(out_ptr.dtype.element_ty), mask=there)
            tl.store(out_ptr + (out + pair + PAIRS), turned_b.to(out_ptr.dtype.element_ty), mask=there)
    if 2 * PAIRS < DIM:
        for start in range(2 * PAIRS, DIM, REST):
            element = (start + tl.arange(0, REST))[None, None, :]
            there = inside & (element < DIM)
            passing = tl.load(x_ptr + (x + element * x_inner), mask=there, other=0.0).to(ACC)
            tl.store(out_ptr + (out + element), passing.to(out_ptr.dtype.element_ty), mask=there)


def _steps(shape: Sizes, strides: Sizes, dims: int) -> Sizes:
    """Strides over ``dims`` dimensions that end with those of a table before its last: 0 where it repeats."""
    own = [0 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    return (0,) * (dims - len(own)) + tuple(own)


@lru_cache(KEPT)
def _launch(
    shape: Sizes, strides: Sizes, out_strides: Sizes, cos_shape: Sizes, cos_strides: Sizes, sin_shape: Sizes,
    sin_strides: Sizes, dtypes: tuple[torch.dtype, ...], rotary_dim: int, interleaved: bool, backward: bool, head: int,
) -> Launch:  # fmt: skip
    """``dtypes`` also tells launches apart: those of x, of the tables and of the result."""
    dims, dim, pairs = len(shape) - 1, shape[-1], rotary_dim // 2
    steps = (
        strides[:-1],
        out_strides[:-1],
        _steps(cos_shape, cos_strides, dims),
        _steps(sin_shape, sin_strides, dims),
    )
    heads = 1 if head < 0 else shape[head]
    held = min(HEADS, triton.next_power_of_2(heads))
    groups = cdiv(heads, held)
    # Slowest first, as the result lies in memory: positions, and the groups of heads after the first of them.
    axes = [(shape[d], *(s[d] for s in steps)) for d in range(dims) if d != head and shape[d] > 1]
    axes = [(1, 0, 0, 0, 0)] * (2 - len(axes)) + sorted(axes, key=lambda axis: -axis[2])
    of_heads = (1, 0, 0, 0, 0) if head < 0 else (groups, *(s[head] for s in steps))
    group_fastest = axes[1][0] == 1 or of_heads[2] < axes[1][2]
    axes.insert(2 if group_fastest else 1, of_heads)
    sizes, x, out, cos, sin = zip(*axes, strict=True)

    block = min(BLOCK, triton.next_power_of_2(pairs))
    tile_rows = max(1, TILE // (held * block))
    # What passes through, as many elements at a time as the pairs have.
    rest = min(2 * TILE // (held * tile_rows), triton.next_power_of_2(dim - rotary_dim)) if dim > rotary_dim else 1
    rows = sizes[0] * sizes[1] * sizes[2]
    scalars = (
        rows, sizes[1], sizes[2], heads, groups, *x, of_heads[1] * groups, strides[-1], *out, of_heads[2] * groups,
        *cos, cos_strides[-1], *sin, sin_strides[-1],
    )  # fmt: skip
    extents = [
        extent(*pair)
        for pair in ((shape, strides), (shape, out_strides), (cos_shape, cos_strides), (sin_shape, sin_strides))
    ]
    index = index_type(rows + tile_rows, *extents)
    acc = tl.float64 if torch.float64 in dtypes else tl.float32
    constants = (
        group_fastest, dim, pairs, cos_shape[-1] != rotary_dim, interleaved, backward, acc, index, tile_rows, held,
        block, rest,
    )  # fmt: skip
    return Launch(_rotate, cdiv(rows, tile_rows), scalars, constants, WARPS)


def _run(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, backward: bool, dtype: torch.dtype,
    head: int, strides: Sizes,
) -> Tensor:  # fmt: skip
    out = torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)
    launch = _launch(
        x.shape, x.stride(), strides, cos.shape, cos.stride(), sin.shape, sin.stride(), (x.dtype, cos.dtype, dtype),
        rotary_dim, interleaved, backward, head,
    )  # fmt: skip
    launch(out, x, cos, sin)
    return out


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int, backward: bool,
    dtype: torch.dtype, head: int, q_strides: Sizes, k_strides: Sizes,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """q and k rotated, or with ``backward`` turned back, of this dtype and these strides.

    Along dimension ``head`` (-1 for none) the tables repeat, and q and k may differ.
    """
    out = _run(q, cos, sin, rotary_dim, interleaved, backward, dtype, head, q_strides)
    if k is None:
        return out, None
    return out, _run(k, cos, sin, rotary_dim, interleaved, backward, dtype, head, k_strides)
