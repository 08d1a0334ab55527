"""The Triton cross-entropy kernels in the interpreter, against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fastlayers.kernels import cross_entropy as kernels
from tests.kernels.interpreted import assert_near, leaf, tolerances

TOLERANCE = tolerances(1e-6, 1e-3, 1.6e-2, 1e-14)


def check(x, target, weight, smoothing, softcap, z_loss):
    dtype = x.dtype
    exact = leaf(x)
    scores = softcap * torch.tanh(exact / softcap) if softcap else exact
    dim = 0 if x.dim() == 1 else 1
    losses = F.cross_entropy(
        scores, target, weight if weight is None else weight.double(), reduction="none", label_smoothing=smoothing
    )
    losses = losses + z_loss * scores.logsumexp(dim).square().masked_fill(target == -100, 0.0)
    dy = torch.linspace(0.5, 2.0, target.numel(), dtype=dtype).view(target.shape)
    (expected,) = torch.autograd.grad(losses, exact, dy.double())
    arguments = (-100, 0, smoothing, softcap, z_loss)
    ours, stats = kernels.cross_entropy_forward(x, target, weight, *arguments, dtype)
    dx = kernels.cross_entropy_backward(dy, x, target, weight, stats, *arguments)
    assert_near(TOLERANCE, ours, losses.detach(), ours.dtype, 1.0)
    assert_near(TOLERANCE, dx, expected, x.dtype, 1.0)


def made(shape, dtype):
    torch.manual_seed(0)
    target = torch.randint(shape[0 if len(shape) == 1 else 1], shape[:1] * (len(shape) > 1) + shape[2:])
    if target.dim():
        target.view(-1)[1::3] = -100
    return torch.randn(shape).to(dtype), target


@pytest.mark.parametrize("shape", [(2, 4099), (1, 9000), (2, 9, 5)])
def test_options(shape):
    x, target = made(shape, torch.float32)
    weight = torch.rand(shape[1]) + 0.5
    for w, smoothing, softcap, z_loss in itertools.product((None, weight), (0.0, 0.2), (0.0, 2.0), (0.0, 0.1)):
        check(x, target, w, smoothing, softcap, z_loss)


def test_both_ways_of_a_line_are_tested():
    device = torch.device("cpu")
    tile = kernels._tile(9000, 1, False)
    assert kernels.choose_splits(9000, 1, tile, device)[0] > 1
    assert kernels.choose_splits(4099, 2, kernels._tile(4099, 1, False), device)[0] == 1
