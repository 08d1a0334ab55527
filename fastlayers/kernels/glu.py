"""act(gate) * up, forward and backward, of two tensors or of the halves of one.

Stock PyTorch writes act(gate) out and keeps it; here the forward is one pass (two reads, one write), and the backward
one (three reads, two writes) that computes act(gate) again. The result is walked flat, in memory order: program = TILE
neighbouring elements. Halves of a packed tensor are read where they are, through a stride pattern of the result, and
their gradients are written into one packed tensor in the same way.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.activations import activate, activate_backward
from fastlayers.kernels.flat import FLAT, Reading, Sizes, empty_result, in_layout, in_memory_order, memory_dims, reading
from fastlayers.kernels.indexing import extent, index_type, pattern, pattern_offset
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator

# As the elementwise kernels have it; the backward holds five tensors, and half as many elements of each.
TILE, BACKWARD_TILE, WARPS = 2048, 1024, 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _gated(
    out_ptr, gate_ptr, up_ptr, n, g_size1, g_size2, g0, g1, g2, u_size1, u_size2, u0, u1, u2, ACT: tl.constexpr,
    GATE_FLAT: tl.constexpr, UP_FLAT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    gate_at = element if GATE_FLAT else pattern_offset(element, g_size1, g_size2, g0, g1, g2)
    up_at = element if UP_FLAT else pattern_offset(element, u_size1, u_size2, u0, u1, u2)
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(ACC)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + element, (activate(gate, ACT) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    dgate_ptr, dup_ptr, dy_ptr, gate_ptr, up_ptr, n, g_size1, g_size2, g0, g1, g2, u_size1, u_size2, u0, u1, u2,
    d_size1, d_size2, d0, d1, d2, ACT: tl.constexpr, GATE_FLAT: tl.constexpr, UP_FLAT: tl.constexpr,
    GRADIENT_FLAT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dgate = dy * up * act'(gate), dup = dy * act(gate); the two lie alike, and dgate may be dy."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    gate_at = element if GATE_FLAT else pattern_offset(element, g_size1, g_size2, g0, g1, g2)
    up_at = element if UP_FLAT else pattern_offset(element, u_size1, u_size2, u0, u1, u2)
    to = element if GRADIENT_FLAT else pattern_offset(element, d_size1, d_size2, d0, d1, d2)
    dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(ACC)
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(ACC)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(ACC)
    dgate = activate_backward(dy * up, gate, ACT)
    tl.store(dgate_ptr + to, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + to, (dy * activate(gate, ACT)).to(dup_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


@lru_cache(KEPT)
def _launch(n: int, dtype: torch.dtype, readings: tuple[Reading, ...], act: int) -> Launch:
    """Forward for the readings of gate and up; backward where that of the gradients follows."""
    backward = len(readings) == 3
    tile = BACKWARD_TILE if backward else TILE
    index = index_type(n, *(each.extent for each in readings))
    arguments = (n, *(argument for each in readings for argument in each.pattern))
    constants = (act, *(each.flat for each in readings), accumulator(dtype)[0], index, tile)
    return Launch(_gated_backward if backward else _gated, cdiv(n, tile), arguments, constants, WARPS)


def _reading_of(t: Tensor, out: Tensor) -> Reading:
    return reading(t.shape, t.stride(), out.shape, out.stride())


def gated_forward(gate: Tensor, up: Tensor, act: int) -> Tensor:
    """act(gate) * up, in the layout that torch gives it."""
    out = torch.empty_like(gate)  # the layout of act(gate), which with that of up decides the product's
    if out.stride() != up.stride():
        out = empty_result(out, up)
    at = (_reading_of(gate, out), _reading_of(up, out))
    _launch(out.numel(), out.dtype, at, act)(out, at[0].of(gate, out), at[1].of(up, out))
    return out


def _writing(t: Tensor, out: Tensor) -> Reading:
    """A half of a dense tensor, of the memory order of out: always a pattern."""
    if t.stride() == out.stride():
        return FLAT
    sizes, strides = in_memory_order(t.shape, t.stride(), out.shape, out.stride())
    found = pattern(sizes, strides)
    assert found is not None
    return Reading(copy=False, flat=False, pattern=found, extent=extent(sizes, strides))


def _run_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, act: int, out: Tensor) -> None:
    at = (_reading_of(gate, out), _reading_of(up, out))
    launch = _launch(out.numel(), out.dtype, (*at, _writing(dgate, out)), act)
    launch(dgate, dup, in_layout(dy, out), at[0].of(gate, out), at[1].of(up, out))


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    _run_backward(dy, gate, up, dgate, dup, act, dgate)
    return dgate, dup


def gated_backward_(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> Tensor:
    """The gradient of up; that of gate is written to dy."""
    if not dy.is_contiguous():
        raise RuntimeError("fastlayers::gated_backward_: expected a contiguous dy to write to")
    dup = torch.empty_like(dy)
    _run_backward(dy, gate, up, dy, dup, act, dy)
    return dup


def _halves(x: Tensor, dim: int, gate_first: bool) -> tuple[Tensor, Tensor]:
    """(gate, up)"""
    first, second = x.chunk(2, dim)
    return (first, second) if gate_first else (second, first)


def glu_forward(x: Tensor, dim: int, act: int, gate_first: bool) -> Tensor:
    """The same of the halves of x along dim, which are not copied."""
    return gated_forward(*_halves(x, dim, gate_first), act)


def glu_backward(dy: Tensor, x: Tensor, dim: int, act: int, gate_first: bool) -> Tensor:
    """The gradient of x."""
    gate, up = _halves(x, dim, gate_first)
    out = torch.empty_like(gate)
    order = memory_dims(out.stride())
    dx = torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device).permute(_inverse(tuple(order)))
    dgate, dup = _halves(dx, dim, gate_first)
    _run_backward(dy, gate, up, dgate, dup, act, out)
    return dx


def _inverse(order: Sizes) -> Sizes:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
