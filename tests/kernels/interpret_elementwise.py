"""The Triton elementwise kernels in the interpreter, against float64."""

from functools import partial

import pytest
import torch

from fastlayers.kernels.elementwise import (
    add_relu,
    add_relu_train,
    mul,
    mul_backward,
    relu_add,
    relu_add_backward,
    relu_add_train,
    relu_backward,
    scale_,
)
from tests.kernels.interpreted import DTYPES, INF, NAN, assert_near, in_memory, layout_of, tolerances, unpack

assert_close = partial(assert_near, tolerances(1e-6, 1e-3, 1.6e-2, 1e-14), magnitude=1.0)
SHAPE = (2, 5, 3, 4)


def pairs(dtype):
    """x and y of one shape in every combination of layouts."""
    x, y = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    last = torch.channels_last
    return {
        "contiguous": (x, y),
        "channels_last": (x.to(memory_format=last), y.to(memory_format=last)),
        "channels_last, contiguous": (x.to(memory_format=last), y),
        "contiguous, channels_last": (x, y.to(memory_format=last)),
        "transposed": (x.transpose(1, 2), y.transpose(1, 2)),
        "sliced": (x[:, 1:, :, 1:], y[:, 1:, :, 1:]),
        "sliced, dense": (x[:, 1:, :, 1:], y[:, 1:, :, 1:].contiguous()),
        "expanded, dense": (x[:1].expand(SHAPE), y),
        "misaligned": (torch.randn(121).to(dtype)[1:].view(SHAPE), torch.randn(123).to(dtype)[3:].view(SHAPE)),
        "one element": (x[:1, :1, :1, :1], y[:1, :1, :1, :1]),
        "no dimension": (x[0, 0, 0, 0], y[0, 0, 0, 0]),
    }


LAYOUTS = list(pairs(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_relu_add(layout, dtype):
    x, y = pairs(dtype)[layout]
    biases = [None, torch.randn(x.shape).to(dtype)]
    if x.dim() == 4:
        biases += [
            torch.randn(s).to(dtype) for s in [(x.shape[3],), (x.shape[1], 1, 1), (), (x.shape[0], 1, x.shape[2], 1)]
        ]
    for bias in biases:
        out, bits = relu_add_train(x, y, bias, 0.7)
        expected = x.double().relu() + y.double() + (0.0 if bias is None else bias.double()) + 0.7
        assert_close(out, expected, dtype)
        assert layout_of(out) == layout_of(torch.relu(x) + y)
        assert torch.equal(relu_add(x, y, bias, 0.7), out)
        assert torch.equal(unpack(bits, x.numel()), in_memory(torch.empty_like(out).copy_(x)) > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_add_relu(layout, dtype):
    x, y = pairs(dtype)[layout]
    out, bits = add_relu_train(x, y)
    assert_close(out, (x.double() + y.double()).relu(), dtype)
    assert layout_of(out) == layout_of(x + y)
    assert torch.equal(add_relu(x, y), out)
    assert torch.equal(unpack(bits, x.numel()), in_memory(out) > 0)
    dy = torch.empty_like(out).normal_()
    dx = relu_backward(dy, bits)
    assert dx.stride() == out.stride()
    assert torch.equal(dx, torch.where(out > 0, dy, 0.0))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 2047, 2048, 2049, 6001])
def test_bits_of_any_number_of_elements(n):
    x, y, dy = torch.randn(n), torch.randn(n), torch.randn(n)
    out, bits = relu_add_train(x, y, None, 0.0)
    assert bits.shape == ((n + 7) // 8,)
    assert torch.equal(unpack(bits, n), x > 0)
    assert torch.equal(out, x.relu() + y)
    assert torch.equal(relu_backward(dy, bits), torch.where(x > 0, dy, 0.0))
    assert torch.equal(relu_backward(torch.cat([dy[:1], dy])[1:], bits), torch.where(x > 0, dy, 0.0))
    dx, dbias = relu_add_backward(dy, bits, [1])
    assert torch.equal(dx, torch.where(x > 0, dy, 0.0))
    torch.testing.assert_close(dbias, dy.sum().reshape(1))


def test_nan_infinities_and_zeros():
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, INF])
    y = torch.tensor([1.0, -INF, INF, 1.0, 2.0, NAN, NAN, 1.0])
    for out, bits, v in [(*relu_add_train(x, y, None, 0.0), x), (*add_relu_train(x, y), x + y)]:
        expected = torch.relu(x) + y if v is x else torch.relu(x + y)
        torch.testing.assert_close(out, expected, equal_nan=True)
        leaf = v.clone().requires_grad_()
        (passes,) = torch.autograd.grad(torch.relu(leaf).sum(), leaf)
        assert torch.equal(relu_backward(torch.ones(8), bits), passes)
    dy = torch.tensor([NAN, INF, NAN, INF, -INF, 1.0, 2.0, 3.0])
    dx = relu_backward(dy, torch.tensor([0b10110011], dtype=torch.uint8))
    torch.testing.assert_close(dx, torch.tensor([NAN, INF, 0.0, 0.0, -INF, 1.0, 0.0, 3.0]), equal_nan=True)


def factors(shape, dtype):
    b, c, h, w = shape
    shapes = [
        (),
        (1,),
        (w,),
        (h, 1),
        (h, w),
        (c, 1, 1),
        (1, c, 1, 1),
        (b, c, 1, 1),
        (b, 1, 1, 1),
        (b, 1, h, 1),
        (b, 1, h, w),
    ]
    return [torch.randn(s).to(dtype) for s in shapes] + [torch.randn(1).to(dtype).expand(w)]


@pytest.mark.parametrize("factor", [1.0, -0.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_scale(size, dtype, factor):
    x = torch.randn(size).to(dtype)
    expected, by = x.clone(), torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))
    scale_(x, by)
    assert_close(x, expected.double() * by.double(), dtype)


def check_mul(x, y):
    dtype = x.dtype
    out = mul(x, y)
    assert_close(out, x.double() * y.double(), dtype)
    assert layout_of(out) == layout_of(x * y)
    for dy in (torch.randn(out.shape).to(dtype), torch.ones((), dtype=dtype).expand(out.shape)):
        for_x, for_y = mul_backward(dy, x, y)
        for gradient, factor, other in [(for_x, x, y), (for_y, y, x)]:
            terms = dy.double() * other.double()
            magnitude = terms.abs().sum_to_size(factor.shape).max().item()
            assert_close(gradient, terms.sum_to_size(factor.shape), dtype, magnitude=magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mul(layout, dtype):
    x, y = pairs(dtype)[layout]
    check_mul(x, y)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in ("contiguous", "channels_last", "transposed", "sliced")),
        ("contiguous", torch.float16),
        ("channels_last", torch.bfloat16),
        ("transposed", torch.float64),
        ("sliced", torch.bfloat16),
    ],
)
def test_mul_broadcasts(layout, dtype):
    x = pairs(dtype)[layout][0]
    for y in factors(x.shape, dtype):
        check_mul(x, y)
        check_mul(y, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((5, 1), (7,)),
        ((3, 5000), (3, 1)),
        ((300, 30), (30,)),
        ((2, 70, 130), (2, 1, 130)),
        ((2, 70, 130), (70, 1)),
        ((9001,), ()),
        ((1, 30), (30,)),
        ((1, 1), (1,)),
        ((2, 3, 2, 3, 2, 3), (3, 1, 3, 1, 3)),
    ],
)
def test_mul_sums_over_many_rows_and_columns(x, y, dtype):
    check_mul(torch.randn(x).to(dtype), torch.randn(y).to(dtype))
