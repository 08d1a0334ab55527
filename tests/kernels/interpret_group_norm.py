"""The Triton kernels of GroupNorm in the interpreter, against float64."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastlayers.kernels import group_norm
from fastlayers.kernels.group_norm import group_norm_backward, group_norm_forward
from tests.kernels.interpreted import ACTIVATIONS, DTYPES, assert_near, gradients, last, layout_of, leaf, tolerances

assert_close = partial(assert_near, tolerances(3e-6, 2e-3, 1.6e-2, 1e-13))
EPS = 1e-3
SILU = 2


@pytest.fixture(params=["whole", "split"])
def way(request, monkeypatch):
    """Groups in the registers, or by the kernels of ``channels`` with tiles so small that there are several."""
    plans = (group_norm._forward_plan, group_norm._backward_plan)
    for plan in plans:
        plan.cache_clear()
    if request.param == "split":
        monkeypatch.setattr(group_norm, "FORWARD", {})
        monkeypatch.setattr(group_norm, "BACKWARD", {})
        monkeypatch.setattr(group_norm, "FORWARD_TILE", 512)
        monkeypatch.setattr(group_norm, "BACKWARD_TILE", 512)
    yield request.param
    for plan in plans:
        plan.cache_clear()


def check(x, groups, act, parameters=None):
    dtype = x.dtype
    n, channels = x.shape[:2]
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = bias = None
    if parameters is not None:
        weight, bias = torch.randn(channels).to(parameters), torch.randn(channels).to(parameters)
    leaves = [leaf(t) for t in (x, weight, bias)]
    z = F.group_norm(leaves[0], groups, leaves[1], leaves[2], EPS)
    expected = ACTIVATIONS[act](z)
    y, stats = group_norm_forward(x, groups, weight, bias, EPS, act, dtype, True)
    again, empty = group_norm_forward(x, groups, weight, bias, EPS, act, dtype, False)
    assert torch.equal(y, again)
    assert empty.shape == (0,)
    assert empty.dtype == accumulator
    assert_close(y, expected.detach(), dtype, z.abs().max().item(), of=x.dtype)
    dense, _ = group_norm.dense(x)
    assert layout_of(y) == layout_of(dense)
    rows = x.double().reshape(n * groups, -1)
    assert_close(stats, torch.stack([rows.mean(1), (rows.var(1, correction=0) + EPS).rsqrt()]), accumulator)

    dy = torch.randn(x.shape).to(dtype)
    exact = gradients(expected, leaves, dy)
    actual = group_norm_backward(dy, x, groups, weight, bias, stats, act)
    scale = stats[1].max().item() * (1.0 if weight is None else weight.abs().max().item())
    assert_close(actual[0], exact[0], x.dtype, 2 * scale * dy.abs().max().item())
    assert layout_of(actual[0]) == layout_of(y)
    for gradient, value in zip(actual[1:], exact[1:], strict=True):
        if value is None:
            assert gradient.dtype == accumulator
            assert gradient.shape == (channels,)
        else:
            assert_close(gradient, value, parameters, x.numel() / channels)


SHAPES = [
    ((2, 4), 2),
    ((3, 6, 5), 3),
    ((1, 70, 9), 1),
    ((2, 12, 3, 7), 4),
    ((2, 16, 4, 6), 2),
    ((3, 5, 4, 4), 5),
    ((2, 6, 2, 3, 2), 1),
    ((1, 2, 700), 1),
    ((1, 64, 3, 3), 2),
]


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, last])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_shapes(way, shape, groups, layout):
    """Every shape in float32, and in one layout in one of the dtypes in turn."""
    number = SHAPES.index((shape, groups))
    others = [DTYPES[number % len(DTYPES)]] if (layout is last) == (number // len(DTYPES) % 2) else []
    for dtype in dict.fromkeys((torch.float32, *others)):
        x = layout(torch.randn(shape).to(dtype))
        check(x, groups, SILU if dtype is torch.float32 else 0, dtype if number % 2 else None)


def test_the_larger_groups_are_split(way):
    x = torch.randn(1, 8, 9, 20)
    for memory, groups in itertools.product([x, last(x)], [1, 2]):
        dtypes = (x.dtype, None, None, x.dtype)
        plan = group_norm._forward_plan(x.shape, memory is not x, dtypes, groups, EPS, 0, x.device)
        assert (plan.whole is None) == (way == "split")
        assert plan.geometry.splits > 1 or way == "whole"
        check(memory, groups, SILU, x.dtype)


def test_channels_far_apart_are_not_read_group_by_group():
    x = torch.randn(2, 8, 3, 5)
    arguments = ((x.dtype, None, None, x.dtype), 8, EPS, 0, x.device)
    assert group_norm._forward_plan(x.shape, True, *arguments).whole is None
    assert group_norm._forward_plan(x.shape, False, *arguments).whole is not None


def test_a_mean_far_from_zero_does_not_cancel(way):
    x = torch.randn(2, 4, 300) + 1000
    for layout in (torch.Tensor.contiguous, last):
        y, _ = group_norm_forward(layout(x), 2, None, None, EPS, 0, x.dtype, False)
        torch.testing.assert_close(y, F.group_norm(x.double(), 2, eps=EPS).float(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("table", ["FORWARD", "BACKWARD"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_launch_rule(table, itemsize):
    for per, inner, groups in itertools.product([1, 3, 40], [1, 49, 64, 4096], [1, 1000]):
        tile = group_norm.tile_for(per, inner, groups, getattr(group_norm, table), itemsize, 264)
        if tile is not None:
            assert tile.per >= per
            assert tile.inner >= inner
            assert tile.groups * tile.per * tile.inner * max(itemsize, 4) <= 128 * 32 * tile.warps
