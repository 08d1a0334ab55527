"""The C++ norms over channels for CPU tensors: shapes about a vector and a piece, threads, who gets them unasked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends, functional
from fastlayers.ops import batch_norm, group_norm
from tests.harness import assert_close

pytestmark = pytest.mark.skipif(backends.problem("cpu") is not None, reason="csrc was not built")

ops = torch.ops.fastlayers


def image(*shape: int, last: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


# Channels about a vector, and many enough to lie one pixel a row; pixels about a row and a piece.
SHAPES = ((1, 4, 1, 17), (2, 15, 3, 5), (3, 16, 2, 2), (2, 17, 5, 7), (1, 66, 9, 9), (1, 520, 6, 7), (1, 3, 91, 97))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shapes(shape, last, threads):
    x, dy = image(*shape, last=last).requires_grad_(), image(*shape, last=last).flip(0)
    weight, bias = (image(shape[1]).requires_grad_() for _ in range(2))
    residual = image(*shape, last=last).neg().requires_grad_()
    inputs = (x, weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with backends.backend("cpu"):
            for training in (True, False):
                statistics = [torch.ones(shape[1], dtype=x.dtype) for _ in range(2)]
                stock = F.silu(F.batch_norm(x, *statistics, weight, bias, training))
                ours = functional.batch_norm(x, *statistics, weight, bias, training, act="silu")
                assert_close(ours, stock)
                assert_close(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(stock, inputs, dy))
                stock = F.relu(F.batch_norm(x, *statistics, weight, bias, training) + residual)
                ours = functional.batch_norm(x, *statistics, weight, bias, training, residual=residual, act="relu")
                assert_close(ours, stock)
                more = (*inputs, residual)
                assert_close(torch.autograd.grad(ours, more, dy), torch.autograd.grad(stock, more, dy))
            stock = F.gelu(F.group_norm(x, 1, weight, bias))
            ours = functional.group_norm(x, 1, weight, bias, act="gelu")
            assert_close(ours, stock)
            assert_close(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(stock, inputs, dy))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("last", [False, True])
def test_first_values_are_outliers(last):
    """The moments are taken again where they were about a value far from the mean."""
    x = image(2, 4, 40, 40, last=last, dtype=torch.float32)
    x[:, :, 0] += 1e4
    exact = F.group_norm(x.double(), 2)
    y, _ = ops.group_norm_forward(x, 2, None, None, 1e-5, 0, torch.float32, False)
    assert (y - exact).abs().max() <= 1.5 * (F.group_norm(x, 2) - exact).abs().max() + 2e-6


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_channel_bias_act(last, residual):
    x, bias = image(2, 5, 4, 7, last=last), image(5)
    more = image(2, 5, 4, 7, last=last).flip(0) if residual else None
    expected = F.relu(x + bias.view(-1, 1, 1) + (0 if more is None else more))
    ops.channel_bias_act_(x, bias, more, batch_norm.RELU)
    assert_close(x, expected)


def test_unasked():
    """Small tensors and bare norms are torch's own; an activation in the same pass is not."""
    large = image(4, 64, 64, 64, dtype=torch.float32)
    assert group_norm._torch_is_as_fast(large, None, None, 0)
    assert not group_norm._torch_is_as_fast(large, None, None, 1)
    assert group_norm._torch_is_as_fast(large[:1, :8], None, None, 1)
    assert group_norm._torch_is_as_fast(large.bfloat16(), None, None, 1)
    last = large.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert not group_norm._torch_is_as_fast(last, None, None, 0)
    assert not batch_norm._torch_is_as_fast(large, True, None, 0)
    assert batch_norm._torch_is_as_fast(large, False, None, 0)
    assert not batch_norm._torch_is_as_fast(large, False, large, 1)
    assert batch_norm._torch_is_as_fast(large.view(256, 64, 8, 8), True, None, 1)
