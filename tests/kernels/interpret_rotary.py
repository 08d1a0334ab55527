"""The Triton rotary kernel in the interpreter, against float64."""

import pytest
import torch

from fastlayers.kernels.rotary import rotary
from tests.kernels.interpreted import DTYPES, HALF, assert_near, tolerances

TOLERANCE = tolerances(1e-6, 1e-3, 1.6e-2, 1e-14)


def turned(x, cos, sin, interleaved, backward):
    """The rotation as a matrix of the sides of the pairs, or its transpose."""
    n = cos.shape[-1]
    first = torch.arange(0, n, 2) if interleaved else torch.arange(n // 2)
    second = first + 1 if interleaved else first + n // 2
    a, b = x[..., first], x[..., second]
    out = x.clone()
    if backward:
        out[..., first] = a * cos[..., first] + b * sin[..., second]
        out[..., second] = b * cos[..., second] - a * sin[..., first]
    else:
        out[..., first] = a * cos[..., first] - b * sin[..., first]
        out[..., second] = b * cos[..., second] + a * sin[..., second]
    return out


def check(q, k, cos, sin, head, interleaved, dtype, half=False):
    width = cos.shape[-1] * (2 if half else 1)
    full = [t.double() for t in (cos, sin)]
    if half:
        full = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in full]
    for backward in (False, True):
        strides = [torch.empty_like(x).stride() for x in (q, k)]
        outs = rotary(q, k, cos, sin, interleaved, width, backward, dtype, head, *strides)
        for x, out, wanted in zip((q, k), outs, strides, strict=True):
            assert out.stride() == wanted
            assert_near(TOLERANCE, out, turned(x.double(), *full, interleaved, backward), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, interleaved):
    q, k = torch.randn(2, 6, 5, 24).to(dtype), torch.randn(2, 2, 5, 24).to(dtype)
    for width, half in ((24, False), (16, False), (8, True)):
        cos, sin = torch.randn(5, width).to(dtype), torch.randn(2, 1, 5, width).to(dtype)
        check(q, k, cos, sin, 1, interleaved, dtype, half)
        if dtype in HALF:
            check(q, k, cos.float(), sin.float(), 1, interleaved, dtype, half)
            check(q, k, cos.float(), sin.float(), 1, interleaved, torch.float32, half)
            check(q.float(), k.float(), cos.float(), sin.float(), 1, interleaved, dtype, half)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(2, 2), (6, 2), (7, 6), (80, 20), (1100, 1100), (2100, 1030), (600, 4)])
def test_lengths(dim, width, interleaved):
    rows = 9 if dim < 1000 else 1  # a program takes one long row, and the interpreter 2 ms for a program
    q, k = torch.randn(rows, 3, dim), torch.randn(rows, 5, dim)
    check(q, k, torch.randn(rows, 1, width), torch.randn(rows, 1, width), 1, interleaved, torch.float32)
    check(q, q, torch.randn(rows, 3, width), torch.randn(rows, 3, width), -1, interleaved, torch.float32)
