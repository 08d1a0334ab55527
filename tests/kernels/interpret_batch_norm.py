"""The Triton kernels of BatchNorm in the interpreter, against float64."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastlayers.kernels import batch_norm, image_geometry
from fastlayers.kernels.batch_norm import batch_norm_backward, batch_norm_eval, batch_norm_train, channel_bias_act_
from tests.kernels.interpreted import (
    ACTIVATIONS,
    DTYPES,
    INF,
    NAN,
    assert_near,
    gradients,
    in_memory,
    last,
    layout_of,
    leaf,
    tolerances,
    unpack,
)

assert_close = partial(assert_near, tolerances(3e-6, 2e-3, 1.6e-2, 1e-13))
EPS, MOMENTUM = 1e-3, 0.2
RELU, SILU = 1, 2


def check(x, act=0, residual=None, parameters=None, running=None, training=True, bits=False, dy=None):
    """All three ops; ``parameters`` is the dtype of weight and bias, ``running`` that of the running statistics."""
    channels = x.shape[1]
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = bias = mean = var = None
    if parameters is not None:
        weight, bias = torch.randn(channels).to(parameters), torch.randn(channels).to(parameters)
    if running is not None:
        mean, var = torch.randn(channels).to(running), (torch.rand(channels) + 0.5).to(running)
    leaves = [leaf(t) for t in (x, residual, weight, bias)]
    exact_mean, exact_var = (None if t is None else t.double() for t in (mean, var))
    z = F.batch_norm(leaves[0], exact_mean, exact_var, leaves[2], leaves[3], training, MOMENTUM, EPS)
    z = z if residual is None else z + leaves[1]
    expected = ACTIVATIONS[act](z)
    if training:
        y, stats, packed = batch_norm_train(x, mean, var, weight, bias, MOMENTUM, EPS, residual, act, bits)
        if running is not None:
            assert_close(mean, exact_mean, running, 1.0)
            assert_close(var, exact_var, running, 1.0)
    else:
        before = (mean.clone(), var.clone())
        y, stats, packed = batch_norm_eval(x, mean, var, weight, bias, EPS, residual, act, bits, True)
        again, empty, _ = batch_norm_eval(x, mean, var, weight, bias, EPS, residual, act, bits, False)
        assert torch.equal(y, again)
        assert empty.shape == (0,)
        assert torch.equal(mean, before[0])
        assert torch.equal(var, before[1])
    assert_close(y, expected.detach(), x.dtype, z.abs().max().item())
    dense, _ = image_geometry.dense(x)
    assert layout_of(y) == layout_of(dense)
    other = [d for d in range(x.dim()) if d != 1]
    used = torch.stack(
        [x.double().mean(other), (x.double().var(other, correction=0) + EPS).rsqrt()]
        if training
        else [mean.double(), (var.double() + EPS).rsqrt()]
    )
    assert_close(stats, used, accumulator, of=torch.float32 if accumulator == torch.float32 else None)
    if bits:
        sure = in_memory(torch.empty_like(y, dtype=torch.float64).copy_(z.detach()))
        assert packed.shape == ((x.numel() + 7) // 8,)
        assert torch.equal(unpack(packed, x.numel())[sure.abs() > 1e-5], (sure > 0)[sure.abs() > 1e-5])
    else:
        assert packed.shape == (0,)

    dy = torch.randn(x.shape).to(x.dtype) if dy is None else dy
    if bits:  # where the last digit decides, the forward's decision is the one that counts
        passes = torch.empty_like(y, dtype=torch.float64)
        in_memory(passes).copy_(unpack(packed, x.numel()))
        expected = z * passes
    exact = gradients(expected, leaves, dy)
    for dresidual in {False, residual is not None}:
        keep = residual if residual is not None and not bits else None
        actual = batch_norm_backward(
            dy, x, weight, bias, stats, training, keep, packed if bits else None, act, dresidual
        )
        scale = stats[1].max().item() * (1.0 if weight is None else weight.abs().max().item())
        assert_close(actual[0], exact[0], x.dtype, 2 * scale * dy.abs().max().item())
        assert layout_of(actual[0]) == layout_of(y)
        if dresidual:
            assert_close(actual[1], exact[1], x.dtype, 1.0)
            assert layout_of(actual[1]) == layout_of(y)
        else:
            assert actual[1].shape == (0,)
        if parameters is not None:
            for gradient, wanted in zip(actual[2:], exact[2:], strict=True):
                assert_close(gradient, wanted, parameters, x.numel() / channels)
        else:
            assert actual[2].dtype == actual[3].dtype == accumulator
            assert actual[2].shape == actual[3].shape == (channels,)


SHAPES = [(2, 1), (7, 3), (5, 130), (2, 3, 5), (1, 70, 9), (2, 5, 3, 4), (3, 24, 7, 1), (2, 3, 2, 3, 2), (9, 2, 600)]
#: The bits of a byte next to each other in one tile, contiguous or channels last, and across channels and rows.
BITS = [(2, 8, 4, 2), (3, 72, 2, 2), (2, 5, 3, 3), (2, 3, 5, 8), (3, 2, 24, 31), (5, 16), (3, 7), (2, 3, 16, 80)]


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, last])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, layout):
    """Every shape in float32, and in one of the dtypes in turn."""
    for dtype in dict.fromkeys((torch.float32, DTYPES[SHAPES.index(shape) % len(DTYPES)])):
        x = layout(torch.randn(shape).to(dtype))
        check(x, parameters=dtype, running=dtype)
        check(x, training=False, running=dtype)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", range(8))
def test_activations(act, training):
    """Each in one layout: it is applied to a value, wherever that lies."""
    layout = (torch.Tensor.contiguous, last)[act // 2 % 2]
    x, residual = layout(torch.randn(2, 10, 4, 5)), layout(torch.randn(2, 10, 4, 5))
    another = (torch.bfloat16, torch.float64)[act % 2]
    for dtype, other in ((torch.float32, None), (torch.float32, residual), (another, residual.to(another))):
        check(x.to(dtype) * 2, act, other, torch.float32 if dtype == torch.bfloat16 else dtype, dtype, training)


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, last])
@pytest.mark.parametrize(
    ("shape", "act"), [*((shape, RELU) for shape in SHAPES), *(((2, 10, 4, 5), act) for act in range(8))]
)
def test_bias_in_place(shape, act, layout):
    for dtype in DTYPES if shape == (2, 10, 4, 5) else DTYPES[::2]:
        x, other = (layout(torch.randn(shape).to(dtype)) for _ in range(2))
        bias = torch.randn(shape[1]).to(torch.float32 if dtype == torch.bfloat16 else dtype)
        for residual in (None, other):
            expected = x.double() + bias.double().view(-1, *[1] * (len(shape) - 2))
            if residual is not None:
                expected = expected + residual.double()
            y = x.clone(memory_format=torch.preserve_format)
            channel_bias_act_(y, bias, residual, act)
            assert_close(y, ACTIVATIONS[act](expected), dtype, expected.abs().max().item())


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, last])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", BITS)
def test_bits(shape, training, layout):
    """Each shape in two dtypes: the bits depend on where a value lies, and on its sign."""
    dtype, parameters = ((torch.float16, None), (torch.float32, torch.float32))[training]
    x, residual = (layout(torch.randn(shape).to(dtype)) for _ in range(2))
    check(x, RELU, residual, parameters, torch.float32, training, bits=True)


def views():
    yield torch.randn(6, 40)[:, 3:36]
    yield torch.randn(40, 6).t()
    yield torch.randn(2, 3, 8, 5)[:, :, ::2]
    yield torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last)[:, :6]
    yield torch.randn(2, 3, 4, 5).transpose(0, 1)
    yield torch.randn(241)[1:].view(6, 10, 2, 2)
    yield torch.randn(1, 4, 2, 2).expand(3, 4, 2, 2)
    yield torch.randn(3, 1, 2, 5)
    yield torch.randn(3, 4, 1, 1).to(memory_format=torch.channels_last)
    yield torch.randn(2, 4, 3, 2, 3).to(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("number", range(len(list(views()))))
def test_views(number):
    x = list(views())[number]
    before = x.clone()
    y = torch.randn(x.shape)
    check(x, SILU, y, x.dtype, x.dtype)
    check(y, SILU, x, x.dtype, x.dtype, dy=x)
    check(y, RELU, x, x.dtype, x.dtype, bits=True, dy=torch.tensor(0.5).expand(x.shape))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((24, 6, 5, 6), last), ((24, 6, 5, 6), torch.Tensor.contiguous), ((600, 3), torch.Tensor.contiguous),
     ((3, 2, 1100), torch.Tensor.contiguous), ((3, 3, 700), last)],
)  # fmt: skip
def test_several_tiles_and_splits(shape, layout, monkeypatch):
    for plan in (batch_norm._forward_plan, batch_norm._backward_plan):
        plan.cache_clear()
    monkeypatch.setattr(image_geometry, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(batch_norm, "FORWARD_TILE", 512)
    monkeypatch.setattr(batch_norm, "BACKWARD_TILE", 512)
    x, residual = layout(torch.randn(shape) + 30), layout(torch.randn(shape))
    g = image_geometry.geometry(x.shape, image_geometry.is_channels_last(x), True, 1, 512, x.dtype, x.device)
    assert max(g.splits, g.outer_steps * g.inner_steps) > 1
    check(x, 0, None, x.dtype, x.dtype)
    check(x, RELU, residual, x.dtype, x.dtype, bits=True)
    for plan in (batch_norm._forward_plan, batch_norm._backward_plan):
        plan.cache_clear()


def test_nan_and_infinities():
    x = torch.randn(3, 4, 5)
    x[0, 1, 2], x[1, 2, 3] = NAN, INF
    for layout, act in itertools.product([torch.Tensor.contiguous, last], [0, RELU]):
        y, _, _ = batch_norm_train(layout(x), None, None, None, None, 0.1, EPS, None, act, False)
        expected = ACTIVATIONS[act](F.batch_norm(x, None, None, None, None, True, 0.1, EPS))
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_a_mean_far_from_zero_does_not_cancel():
    x = torch.randn(20, 4, 30) + 1000
    for layout in (torch.Tensor.contiguous, last):
        y, _, _ = batch_norm_train(layout(x), None, None, None, None, 0.1, EPS, None, 0, False)
        expected = F.batch_norm(x.double(), None, None, None, None, True, 0.1, EPS).float()
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-4)
