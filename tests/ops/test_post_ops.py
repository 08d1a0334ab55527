"""Linear layers and convolutions by oneDNN with what follows them, on a CPU without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fastlayers
from fastlayers.backends import backend
from fastlayers.ops import post_ops
from fastlayers.ops.activations import ACTIVATIONS
from fastlayers.patching.runtime.calls import linear_act
from tests.harness import assert_no_worse

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


ACTS = [*post_ops.ATTRIBUTES, *post_ops.IN_PLACE]


def check(ours: Tensor, function: Callable[..., Tensor], *args: Any) -> None:
    assert ours.stride() == assert_no_worse(ours, function, *args).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@torch.no_grad()
def test_linear(act: str, dtype: torch.dtype) -> None:
    """oneDNN has bfloat16 on some CPUs only; on the others torch computes what a model calls."""
    layer, x = nn.Linear(40, 24).to(dtype), torch.randn(3, 17, 40).to(dtype)
    served = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (post_ops.linear(x, layer.weight, layer.bias, act) is not None) == served
    ours = linear_act(x, layer.weight, layer.bias, act)
    check(ours, lambda layer, x: ACTIVATIONS[act].function(layer(x)), layer, x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("act", [None, "relu", "silu", "hardswish", "relu6"], ids=str)
@torch.no_grad()
def test_convolution(act: str, summed: bool, layout: Any) -> None:
    layer = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2)
    x = torch.randn(2, 8, 9, 10).to(memory_format=layout)
    residual = torch.randn_like(layer(x)) if summed else None
    ours = post_ops.convolution(layer, x, layer.weight, layer.bias, residual, act)
    if summed and act in ("silu", "hardswish"):
        assert ours is None
        return
    assert ours is not None

    def function(layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
        return ACTIVATIONS[act].function(layer(x) if residual is None else layer(x) + residual)

    check(ours, function, layer, x, residual)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_convolution_and_norm(bias: bool, affine: bool, layout: Any) -> None:
    layer, norm = nn.Conv2d(4, 6, 3, bias=bias), nn.BatchNorm2d(6, affine=affine)
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    for parameter in norm.parameters():
        parameter.normal_()
    x = torch.randn(2, 4, 12, 12).to(memory_format=layout)
    assert post_ops.convolution_norm(layer, x, norm, None, "relu") is None  # in training
    norm.eval()
    ours = post_ops.convolution_norm(layer, x, norm, None, "relu")
    assert ours is not None
    check(ours, lambda layer, norm, x: norm(layer(x)).relu(), layer, norm, x)


@pytest.mark.parametrize("values", [torch.nan, torch.inf, -torch.inf])
@torch.no_grad()
def test_special_values(values: float) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(32, 8)
    x[3] = values
    for act in ACTS:
        ours = post_ops.linear(x, layer.weight, layer.bias, act)
        assert ours is not None
        assert torch.equal(ours.isnan(), ACTIVATIONS[act].function(layer(x)).isnan()), act
    conv, images = nn.Conv2d(8, 8, 3, padding=1, groups=2), x.t().reshape(1, 8, 4, 8)
    for act in ACTS:
        ours = post_ops.convolution(conv, images, conv.weight, conv.bias, None, act)
        assert ours is not None
        assert torch.equal(ours.isnan(), ACTIVATIONS[act].function(conv(images)).isnan()), act


def test_what_torch_has_to_compute() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(32, 8)
    given = (layer.weight, layer.bias, "relu")
    assert post_ops.linear(x, *given) is None  # needs a gradient
    with torch.no_grad():
        assert post_ops.linear(x, *given) is not None
        assert post_ops.linear(x[:2], *given) is None  # few rows
        assert post_ops.linear(x.half(), layer.weight.half(), layer.bias.half(), "relu") is None
        assert post_ops.linear(x.double(), *given) is None  # torch's error
        assert post_ops.linear(x[:, :4], *given) is None  # torch's error
        assert post_ops.linear(x.t().contiguous().t(), *given) is None
        assert post_ops.linear(x, layer.weight, layer.bias, "mish") is None
        with FlopCounterMode(display=False):
            assert post_ops.linear(x, *given) is None
        with torch.autocast("cpu"):
            assert post_ops.linear(x, *given) is None
        with torch.backends.mkldnn.flags(enabled=False):
            assert post_ops.linear(x, *given) is None
        with backend("eager"):
            assert post_ops.linear(x, *given) is None
        torch.func.vmap(lambda x: torch.tensor(0) if post_ops.linear(x, *given) is None else 1 / 0)(x[None])


@torch.no_grad()
@torch.no_grad()
def test_small_images_are_computed_as_torch_computes_them() -> None:
    """Not by oneDNN, where torch's own convolution is not."""
    layer = nn.Conv2d(8, 8, 3, padding=1)
    for side, served in ((50, False), (51, True)):
        x = torch.randn(1, 8, side, 51)
        assert (post_ops.convolution(layer, x, layer.weight, layer.bias, None, "silu") is not None) == served


def test_residual_that_is_expanded_or_lies_otherwise() -> None:
    layer, x = nn.Conv2d(4, 4, 1), torch.randn(2, 4, 5, 5)
    for residual in (torch.randn(4, 1, 1), torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)):
        assert post_ops.convolution(layer, x, layer.weight, layer.bias, residual, "relu") is None
    assert post_ops.convolution(nn.Conv2d(4, 4, 1, padding="same"), x, layer.weight, None, None, "relu") is None
    circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    assert post_ops.convolution(circular, x, circular.weight, None, None, "relu") is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)) + x)
        return self.fc2(nn.functional.gelu(self.fc1(y.flatten(2).transpose(1, 2).contiguous())))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_patched_model(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Block()
    with torch.no_grad():
        model(torch.randn(8, 8, 12, 12))  # running statistics
    model.eval()
    x = torch.randn(2, 8, 12, 12).to(memory_format=layout)
    stock, answers = copy.deepcopy(model), []
    for name in ("linear", "convolution", "convolution_norm"):
        function = getattr(post_ops, name)
        monkeypatch.setattr(post_ops, name, lambda *args, f=function: answers.append(y := f(*args)) or y)
    fastlayers.patch_model(model)
    with torch.inference_mode():
        y = model(x)
    with torch.no_grad():
        assert_no_worse(y, lambda stock, x: stock(x), stock, x)
    assert len(answers) == 3
    assert all(answer is not None for answer in answers)
    model(x).sum().backward()  # with gradients torch computes it
    assert all(parameter.grad is not None for parameter in model.parameters())
