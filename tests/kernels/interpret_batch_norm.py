"""The Triton kernels of BatchNorm in the interpreter, against float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastlayers.kernels import batch_norm, image_geometry
from fastlayers.kernels.batch_norm import batch_norm_backward, batch_norm_train, channel_bias_act_
from tests.kernels.interpreted import ACTIVATIONS, DTYPES, assert_near, gradients, last, layout_of, leaf, tolerances

assert_close = partial(assert_near, tolerances(3e-6, 2e-3, 1.6e-2, 1e-13))
EPS, MOMENTUM = 1e-3, 0.2
RELU = 1


def in_memory(t):
    return t.as_strided((t.numel(),), (1,))


def unpack(bits, n):
    return (bits[:, None] >> torch.arange(8) & 1).flatten()[:n].bool()


def check(x, act=0, residual=None, bits=False):
    """In training, forward and backward."""
    channels = x.shape[1]
    weight, bias, mean = (torch.randn(channels) for _ in range(3))
    var = torch.rand(channels) + 0.5
    leaves = [leaf(t) for t in (x, residual, weight, bias)]
    exact_mean, exact_var = mean.double(), var.double()
    z = F.batch_norm(leaves[0], exact_mean, exact_var, *leaves[2:], True, MOMENTUM, EPS)
    z = z if residual is None else z + leaves[1]
    expected = ACTIVATIONS[act](z)
    y, stats, packed = batch_norm_train(x, mean, var, weight, bias, MOMENTUM, EPS, residual, act, bits)
    assert_close(mean, exact_mean, x.dtype, 1.0)
    assert_close(var, exact_var, x.dtype, 1.0)
    assert_close(y, expected.detach(), x.dtype, z.abs().max().item())
    dense, _ = image_geometry.dense(x)
    assert layout_of(y) == layout_of(dense)
    other = [d for d in range(x.dim()) if d != 1]
    used = torch.stack([x.double().mean(other), (x.double().var(other, correction=0) + EPS).rsqrt()])
    assert_close(stats, used, x.dtype)
    if bits:
        sure = in_memory(torch.empty_like(y, dtype=torch.float64).copy_(z.detach()))
        assert packed.shape == ((x.numel() + 7) // 8,)
        assert torch.equal(unpack(packed, x.numel())[sure.abs() > 1e-5], (sure > 0)[sure.abs() > 1e-5])
    else:
        assert packed.shape == (0,)

    dy = torch.randn(x.shape)
    if bits:  # where the last digit decides, the forward's decision is the one that counts
        passes = torch.empty_like(y, dtype=torch.float64)
        in_memory(passes).copy_(unpack(packed, x.numel()))
        expected = z * passes
    exact = gradients(expected, leaves, dy)
    for dresidual in {False, residual is not None}:
        keep = residual if residual is not None and not bits else None
        actual = batch_norm_backward(dy, x, weight, bias, stats, True, keep, packed if bits else None, act, dresidual)
        scale = (stats[1].max() * weight.abs().max()).item()
        assert_close(actual[0], exact[0], x.dtype, 2 * scale * dy.abs().max().item())
        assert layout_of(actual[0]) == layout_of(y)
        if dresidual:
            assert_close(actual[1], exact[1], x.dtype, 1.0)
            assert layout_of(actual[1]) == layout_of(y)
        else:
            assert actual[1].shape == (0,)
        for gradient, wanted in zip(actual[2:], exact[2:], strict=True):
            assert_close(gradient, wanted, x.dtype, x.numel() / channels)


SHAPES = [(2, 1), (7, 3), (5, 130), (2, 3, 5), (1, 70, 9), (2, 5, 3, 4), (3, 24, 7, 1), (2, 3, 2, 3, 2), (9, 2, 600)]


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
    check(x)
    check(x, RELU, residual, bits=True)
    for plan in (batch_norm._forward_plan, batch_norm._backward_plan):
        plan.cache_clear()
