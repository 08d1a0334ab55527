"""The Triton softmax kernels in the interpreter, against float64."""

import itertools
from functools import partial

import pytest
import torch

from fastlayers.kernels import softmax
from fastlayers.kernels.softmax import softmax_backward, softmax_forward
from tests.kernels.interpreted import INF, NAN, assert_near, largest, tolerances

near = partial(assert_near, tolerances(1e-6, 1e-3, 1.6e-2, 1e-14))


def reference(x, mask, dim, scale, log):
    scores = x.double() * scale
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    return (torch.log_softmax if log else torch.softmax)(scores, dim)


def reference_backward(dy, y, mask, dim, scale, log):
    dy, y = dy.double(), y.double()
    dx = dy - y.exp() * dy.sum(dim, True) if log else y * (dy - (dy * y).sum(dim, True))
    return scale * (dx if mask is None or mask.dtype != torch.bool else torch.where(mask, dx, 0.0))


def assert_close(actual, *given):
    assert actual.is_contiguous()
    near(actual, *given)


def check(x, mask, dim, log=False):
    dtype, scale = x.dtype, 1.3
    y = softmax_forward(x, dim, scale, mask, dtype, log)
    assert_close(y, reference(x, mask, dim, scale, log), dtype)
    dy = torch.randn(x.shape).to(dtype)
    keep = mask if mask is not None and mask.dtype == torch.bool else None
    dx = softmax_backward(dy, y, dim, scale, keep, x.dtype, log)
    magnitude = abs(scale) * largest(dy if log else dy * y)
    assert_close(dx, reference_backward(dy, y, keep, dim, scale, log), x.dtype, magnitude)


@pytest.mark.parametrize(
    ("shape", "dim", "dtype"),
    [
        ((2, 33001), 1, torch.float16),
        ((5, 33001), 1, torch.bfloat16),
        ((2, 520, 40), 1, torch.float64),
        ((515, 3), 0, torch.float16),
    ],
)
def test_long(shape, dim, dtype):
    """Past the registers: in one program, and split among several where there are few lines."""
    x = torch.randn(shape)
    check(x, None, dim)
    check(x, None, dim, log=True)
    check(x.to(dtype), None, dim)


def test_both_ways_of_a_long_line_are_tested():
    tile = softmax.tile_for(33001, 1, False, 4)
    device = torch.device("cpu")
    assert not tile.whole
    assert softmax.choose_splits(33001, 2, tile, device)[0] > 1
    assert softmax.choose_splits(33001, 5, tile, device)[0] == 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_long_lines_and_of_many_dimensions(kind):
    for x, shape in [(torch.randn(2, 2, 33001), (2, 1, 33001)), (torch.randn(2, 3, 2, 3, 4), (2, 1, 2, 1, 4))]:
        check(x, torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape), x.dim() - 1)
    check(torch.randn(3, 530, 2), torch.rand(530, 1) > 0.3 if kind == "bool" else torch.randn(530, 1), 1)
    check(torch.randn(2, 3, 8)[..., ::2], torch.rand(3, 8)[:, ::2] > 0.3, 2)


LOWEST = torch.finfo(torch.float32).min
ROWS = [
    [NAN, 1.0],
    [INF, 1.0],
    [INF, INF],
    [-INF, 1.0],
    [-INF, -INF],
    [-INF, NAN],
    [NAN, NAN],
    [INF, -INF],
    [3e38, 1.0],
]
ROWS += [[LOWEST, LOWEST], [LOWEST, -INF]]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [2, 70, 33001])
def test_nan_and_infinities(n, log):
    """Exactly where torch has them. A row is half the one value and half the other, in both orders."""
    rows = torch.stack(
        [torch.tensor(order)[(torch.arange(n) > n // 2).long()] for row in ROWS for order in (row, row[::-1])]
    )
    expected = (torch.log_softmax if log else torch.softmax)(rows, 1)
    torch.testing.assert_close(softmax_forward(rows, 1, 1.0, None, rows.dtype, log), expected, equal_nan=True)
    if n == 70:
        across = softmax_forward(rows.t().contiguous(), 0, 1.0, None, rows.dtype, log)
        torch.testing.assert_close(across, expected.t(), equal_nan=True)
    dy = torch.randn(rows.shape)
    formula = torch._log_softmax_backward_data if log else torch._softmax_backward_data
    dx = softmax_backward(dy, expected, 1, 1.0, None, rows.dtype, log)
    torch.testing.assert_close(dx, formula(dy, expected, 1, rows.dtype), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [7, 33001])
def test_masked_rows(n):
    x = torch.randn(4, n)
    mask = torch.ones(4, n, dtype=torch.bool)
    mask[1], mask[2, : n // 2], mask[3, n // 2 :] = False, False, False
    for log in (False, True):
        expected = (torch.log_softmax if log else torch.softmax)(torch.where(mask, x, -INF), 1)
        torch.testing.assert_close(softmax_forward(x, 1, 1.0, mask, x.dtype, log), expected, equal_nan=True)
    absorbed = torch.where(mask, 0.0, LOWEST)  # "minus infinity" as many models write it: a row of it is uniform
    torch.testing.assert_close(softmax_forward(x, 1, 1.0, absorbed, x.dtype, False), torch.softmax(x + absorbed, 1))


def test_masked_gradient_is_zero_whatever_dy():
    x, dy = torch.randn(3, 9), torch.randn(3, 9)
    mask = torch.rand(3, 9) > 0.4
    y = softmax_forward(x, 1, 1.0, mask, x.dtype, False)
    dx = softmax_backward(torch.where(mask, dy, NAN), y, 1, 1.0, mask, x.dtype, False)
    assert (dx[~mask] == 0).all()


@pytest.mark.parametrize(("axis", "backward", "itemsize"), [*itertools.product((0, 1), (False, True), (2, 4, 8))])
def test_launch_rule(axis, backward, itemsize):
    """Tiles are powers of two, hold the line where they say so, and fit 1024 threads of 64 registers or more."""
    for n in [*range(1, 300), 4095, 4096, 4097, 32768, 32769, 2**20, 2**31 + 1]:
        tile = softmax.tile_for(n, axis, backward, itemsize)
        assert tile.lines & (tile.lines - 1) == 0
        assert tile.block & (tile.block - 1) == 0
        assert tile.block >= n or not tile.whole
        assert tile.warps <= 32
        assert tile.lines * tile.block * max(itemsize, 4) // (tile.warps * 32) <= 256
