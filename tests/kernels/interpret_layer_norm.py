"""The Triton kernels of LayerNorm and RMSNorm in the interpreter, against float64."""

import itertools
from functools import partial

import pytest
import torch

from fastlayers.kernels import layer_norm, norm_rows
from fastlayers.kernels.layer_norm import add_layer_norm_forward, layer_norm_backward, layer_norm_forward
from tests.kernels.interpreted import DTYPES, assert_near, gradients, leaf, tolerances

near = partial(assert_near, tolerances(2e-6, 2e-3, 3.2e-2, 1e-13))
EPS = 1e-5
KINDS = [*itertools.product([0], DTYPES), *itertools.product([1, 2, 3], DTYPES[1:3])]


@pytest.fixture
def few_registers(monkeypatch):
    """Launch rules by which rows of a thousand elements are long: the interpreter takes its time over longer ones."""
    plans = (layer_norm._forward_plan, layer_norm._dx_plan, layer_norm._sums_plan)
    for plan in plans:
        plan.cache_clear()
    monkeypatch.setattr(layer_norm, "FORWARD", {512: 4})
    monkeypatch.setattr(layer_norm, "BACKWARD", {512: 4})
    monkeypatch.setattr(layer_norm, "LONG_FORWARD", 512)
    monkeypatch.setattr(layer_norm, "LONG_BACKWARD", 512)
    yield
    for plan in plans:
        plan.cache_clear()


def assert_close(actual, *given, **options):
    assert actual.is_contiguous()
    near(actual, *given, **options)


def reference(x, weight, bias, shape, kind):
    """In float64, differentiable."""
    dims = tuple(range(-len(shape), 0))
    if kind == 0:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, EPS)
    y = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + EPS)
    return y if weight is None else y * (1 + weight if kind == 3 else weight)


def check(x, weight, bias, dims, kind, residual=None, dsum=None):
    dtype, shape = x.dtype, x.shape[x.dim() - dims :]
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if residual is None:
        total = x
        y, stats = layer_norm_forward(x, dims, weight, bias, EPS, kind, dtype, True)
        again, empty = layer_norm_forward(x, dims, weight, bias, EPS, kind, dtype, False)
    else:
        y, total, stats = add_layer_norm_forward(x, residual, dims, weight, bias, EPS, kind, dtype, True)
        again, _, empty = add_layer_norm_forward(x, residual, dims, weight, bias, EPS, kind, dtype, False)
        assert_close(total, x.double() + residual.double(), torch.promote_types(x.dtype, residual.dtype))
    assert torch.equal(y, again)
    assert empty.shape == (0,)
    assert empty.dtype == stats.dtype == stats_dtype
    leaves = [leaf(t) for t in (total, weight, bias)]
    expected = reference(*leaves, shape, kind)
    assert_close(y, expected.detach(), dtype, of=x.dtype)
    rows = total.double().reshape(-1, shape.numel())
    if kind == 0:
        mean, variance = rows.mean(1), rows.var(1, correction=0)
        assert_close(stats, torch.stack([mean, (variance + EPS).rsqrt()]), stats_dtype)
    else:
        assert_close(stats, (rows.square().mean(1) + EPS).rsqrt()[None], stats_dtype)

    dy = torch.randn(x.shape).to(dtype)
    dx, dweight, dbias = gradients(expected, leaves, dy)
    if dsum is not None:
        dx = dx + dsum.double()
    for for_weight, for_bias in itertools.product({False, weight is not None}, {False, bias is not None}):
        actual = layer_norm_backward(dy, dsum, total, dims, weight, stats, kind, for_weight, for_bias)
        terms = dx.abs().max().item() + (dy.double().abs().max() * stats[-1].max()).item()
        assert_close(actual[0], dx, total.dtype, terms, of=x.dtype)
        for gradient, want, exact in zip(actual[1:3], (for_weight, for_bias), (dweight, dbias), strict=True):
            if want:
                assert_close(gradient, exact, x.dtype if weight is None else weight.dtype, 4.0)
            else:
                assert gradient.shape == (0,)
        assert actual[3].shape == (0,)
    if total.dtype is torch.float32:
        once, *_, twice = layer_norm_backward(dy, dsum, total, dims, weight, stats, kind, True, False, torch.bfloat16)
        assert torch.equal(twice, once.bfloat16())


def parameters(shape, kind, dtype):
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if kind == 0 else None


LONG = [(2, 1500), (5, 1001)]


@pytest.mark.parametrize(
    ("kind", "dtype", "rows", "n"),
    [
        (*KINDS[i], *shape)
        for i, shape in itertools.product(range(len(KINDS)), LONG)
        if KINDS[i][1] is torch.float32 or shape is LONG[i % 2]
    ],
)
def test_long(few_registers, rows, n, dtype, kind):
    """Past the registers: split among several programs, and in one. Either in float32, one of both in other dtypes."""
    x, residual, dsum = (torch.randn(rows, n).to(dtype) for _ in range(3))
    weight, bias = parameters((n,), kind, dtype)
    if kind == 0 and dtype in (torch.float32, torch.bfloat16):
        check(x, weight, bias, 1, kind)
    check(x, weight, bias, 1, kind, residual, dsum=dsum)


def test_all_ways_of_a_long_row_are_tested(few_registers):
    device = torch.device("cpu")
    assert norm_rows.splits_of(1500, 2, layer_norm.LONG_FORWARD // 2, device)[0] > 1
    assert norm_rows.splits_of(1001, 5, layer_norm.LONG_FORWARD, device)[0] == 1
    assert norm_rows.tile_for(1001, layer_norm.FORWARD, 2) is None
    assert norm_rows.tile_for(1001, layer_norm.BACKWARD, 2) is None


def test_a_row_that_is_long_by_the_rules_of_a_gpu():
    x = torch.randn(2, 33001).half()
    assert norm_rows.tile_for(33001, layer_norm.FORWARD, 2) is None
    y, stats = layer_norm_forward(x, 1, None, None, EPS, 0, x.dtype, True)
    assert_close(y, reference(x.double(), None, None, (33001,), 0), x.dtype)
    dx = layer_norm_backward(y, None, x, 1, None, stats, 0, False, False)[0]
    assert dx.double().abs().max() < 4e-3  # y is along x, which the norm does not see


@pytest.mark.parametrize("n", [70, 1500])
def test_a_mean_far_from_zero_does_not_cancel(few_registers, n):
    x = torch.randn(3, n) + 1000  # whose mean float32 rounds by 3e-5
    y, _ = layer_norm_forward(x, 1, None, None, EPS, 0, x.dtype, False)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.double(), (n,)).float(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("table", ["FORWARD", "BACKWARD"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_launch_rule(table, itemsize):
    for n in [*range(1, 300), 4095, 4096, 4097, 16384, 32768, 32769]:
        tile = norm_rows.tile_for(n, getattr(layer_norm, table), itemsize)
        if tile is not None:
            assert tile.block & (tile.block - 1) == 0
            assert tile.block >= n
            assert tile.rows >= 1
            assert tile.rows * tile.block * max(itemsize, 4) <= 128 * 32 * tile.warps
