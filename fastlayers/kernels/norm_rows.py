"""What the kernels of norms over rows share: tiles, what a program loads and scales, and long rows that are split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.launch import Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import unit

#: A longer row does not fit the registers of a program, and is one of LONG_WARPS.
MAX_ROW_BYTES = 65536
LONG_WARPS = 32
# The split of a long row: every program of it reads what all of them left, so that is kept to one tile.
MAX_SPLITS = 1024


@dataclass(frozen=True)
class Tile:
    rows: int
    block: int
    warps: int


def tile_for(n: int, table: dict[int, int], itemsize: int) -> Tile | None:
    """The tile of whole rows of n elements of ``itemsize`` bytes; None where the registers do not hold one."""
    block = triton.next_power_of_2(n)
    for elements, warps in table.items():
        elements //= 4 if itemsize == 8 else 1
        if block <= elements and block * itemsize <= MAX_ROW_BYTES:
            return Tile(elements // block, block, warps)
    return None


@triton.jit
def load(pointer, offset, inside, ACC: tl.constexpr):
    return tl.load(pointer + offset, mask=inside, other=0.0).to(ACC)


@triton.jit
def normed(x_ptr, sum_ptr, residual_ptr, offset, inside, ACC: tl.constexpr):
    """What is normalised: x, or x + residual as it is rounded to the dtype of the sum."""
    x = load(x_ptr, offset, inside, ACC)
    if residual_ptr is not None:
        x = (x + load(residual_ptr, offset, inside, ACC)).to(sum_ptr.dtype.element_ty).to(ACC)
    return x


@triton.jit
def load_weight(pointer, group, column, inside, tokens, strides, UNIT: tl.constexpr, ACC: tl.constexpr):
    """Weight or bias of some columns: of a group of rows, where each has its own."""
    if tokens is not None:
        column += group * (strides * UNIT)
    return load(pointer, column, inside, ACC)


@triton.jit
def scaled(normal, weight, bias, KIND: tl.constexpr, INNER: tl.constexpr, PRODUCT: tl.constexpr, ACC: tl.constexpr):
    """y of (x - mean) * rstd. Llama's kind rounds to INNER, the dtype of x, and the product to PRODUCT."""
    if KIND == 2:
        normal = normal.to(INNER).to(ACC)
    if weight is not None:
        normal = normal * (weight + 1.0 if KIND > 2 else weight)
        if KIND == 2:
            normal = normal.to(PRODUCT).to(ACC)
    return normal if bias is None else normal + bias


# A long row in one program (BOTH), or split: one launch for what every split ADDS, one that WRITEs.
BOTH, ADD, WRITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def split_values(part_ptr, row, rows, splits, which: tl.constexpr, SPLITS: tl.constexpr):
    """What the splits of a row left in part[which, row, split]."""
    s = tl.arange(0, SPLITS)
    return tl.load(part_ptr + (which * rows + row) * splits + s, mask=s < splits, other=0.0)


@triton.jit
def statistics(stats_ptr, row, rows, inside, KIND: tl.constexpr):
    """(mean, rstd) of rows."""
    rstd = tl.load(stats_ptr + row, mask=inside, other=0.0)
    mean = tl.zeros_like(rstd)
    if KIND % 4 == 0:
        mean = rstd
        rstd = tl.load(stats_ptr + rows + row, mask=inside, other=0.0)
    return mean, rstd


@triton.jit
def times_weight(dy, weight, KIND: tl.constexpr):
    """The gradient of what weight multiplies."""
    if weight is not None:
        dy = dy * (weight + 1.0 if KIND > 2 else weight)
    return dy


def splits_of(n: int, rows: int, block: int, device: torch.device) -> tuple[int, int]:
    """(programs a row, elements each takes of it): more than one where the rows leave the machine idle."""
    idle = 2 * multiprocessors(device) // rows
    splits = min(idle, cdiv(n, 2 * block), MAX_SPLITS) if idle > 2 else 1
    chunk = cdiv(cdiv(n, splits), block) * block
    return cdiv(n, chunk), chunk


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of the rows; those of a split row share a buffer."""

    rows: int
    accumulator: torch.dtype
    sum_dtype: torch.dtype
    launches: tuple[Launch, ...]
    long: bool
    buffer: tuple[int, int, int] | None = None

    def run(self, first: Tensor, *tensors: Tensor | None) -> None:
        if not self.long:
            self.launches[0](first, *tensors)
            return
        part = None
        if self.buffer is not None:
            part = torch.empty(self.buffer, dtype=self.accumulator, device=first.device)
        for launch in self.launches:
            launch(first, *tensors, part)


def long_plan(
    function: object, n: int, rows: int, block: int, scalars: tuple[float, ...], constants: tuple[object, ...],
    dtypes: tuple[torch.dtype, torch.dtype], device: torch.device,
) -> Plan:  # fmt: skip
    """A long row in one program, or split among several. ``dtypes``: the accumulator, and that of x + residual."""
    splits, chunk = splits_of(n, rows, block, device)
    units = n // unit(n)
    if splits == 1:
        launch = Launch(function, rows, (1, n, rows, units, *scalars), (*constants, block, BOTH.value, 1), LONG_WARPS)
        return Plan(rows, *dtypes, (launch,), long=True)
    arguments = (splits, chunk, rows, units, *scalars)
    launches = tuple(
        Launch(
            function, rows * splits, arguments, (*constants, block, stage, triton.next_power_of_2(splits)), LONG_WARPS
        )
        for stage in (ADD.value, WRITE.value)
    )
    return Plan(rows, *dtypes, launches, long=True, buffer=(2, rows, splits))
