"""The pointwise convolution that hands its input on: values, gradients, and where torch answers.

On a CPU the kernel is torch's operations, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.kernels import convolution as kernels
from fastlayers.ops import convolution
from fastlayers.patching.runtime.convolution import forked_convolution
from tests.harness import needs_gpu

SHAPES = [(2, 64, 8, 8, 64), (3, 256, 7, 5, 64), (2, 24, 9, 9, 144), (1, 40, 3, 3, 13), (2, 130, 4, 4, 200)]


def image(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def conv(channels: int, wanted: int, dtype: torch.dtype, device: str) -> nn.Conv2d:
    layer = nn.Conv2d(channels, wanted, 1, bias=False)
    layer.weight.data.copy_(image(wanted, channels, 1, 1, dtype=torch.float32, device="cpu", seed=1) * channels**-0.5)
    return layer.to(device, dtype)


def block(layer: nn.Conv2d, x: Tensor, call) -> list[Tensor]:
    y, again = call(layer, x)
    return [y, F.silu(again)]


def plainly(layer: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x), x


def results(layer: nn.Conv2d, x: Tensor, call, seeds: list[Tensor]) -> list[Tensor]:
    x = x.detach().requires_grad_()
    outputs = block(layer, x, call)
    return [*outputs, *torch.autograd.grad(outputs, [x, layer.weight], seeds)]


@pytest.fixture
def stand_in(monkeypatch) -> list[str]:
    """Lets the op serve CPU tensors of any size, by torch's operations; says when."""
    called: list[str] = []

    def backward(dy: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        called.append("backward")
        return (F.conv_transpose2d(dy.float(), weight.float()) + other.float()).to(other.dtype)

    monkeypatch.setattr(kernels, "pointwise_backward", backward)
    monkeypatch.setattr(convolution, "adds_gradients", lambda x, weight: True)
    return called


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_as_near_as_torch(shape, dtype, monkeypatch):
    monkeypatch.setattr(convolution, "LEAST", 0)
    n, channels, height, width, wanted = shape
    x, layer = image(n, channels, height, width, dtype=dtype, device="cuda"), conv(channels, wanted, dtype, "cuda")
    assert convolution.adds_gradients(x.requires_grad_(), layer.weight)
    seeds = [image(n, c, height, width, dtype=dtype, device="cuda", seed=3 + c) for c in (wanted, channels)]
    ours = results(layer, x, forked_convolution, seeds)
    torchs = results(layer, x, plainly, seeds)
    exact = results(layer.double(), x.double(), plainly, [seed.double() for seed in seeds])
    for mine, its, true in zip(ours, torchs, exact, strict=True):
        assert mine.shape == its.shape
        assert mine.dtype == its.dtype
        assert mine.stride() == its.stride()
        error, allowed = (mine - true).abs().max(), (its - true).abs().max()
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps * true.abs().max()


def test_a_launch_serves_one_dtype():
    """Its compiled kernel is looked up by the alignment of what it is given alone."""
    halves = [kernels._launch(64, 64, 64, dtype) for dtype in (torch.float16, torch.bfloat16)]
    assert halves[0] is not halves[1]


def test_derivatives(stand_in):
    x, layer = image(2, 6, 3, 3, dtype=torch.float64, device="cpu"), conv(6, 5, torch.float64, "cpu")
    seeds = [image(2, c, 3, 3, dtype=torch.float64, device="cpu", seed=c) for c in (5, 6)]
    for mine, its in zip(results(layer, x, forked_convolution, seeds), results(layer, x, plainly, seeds), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
    assert stand_in == ["backward"]

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [t.sin() for t in convolution.pointwise_fork(x, weight)]

    inputs = x.requires_grad_(), layer.weight.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("wanted", ["x", "weight", "both"])
def test_one_result_or_one_gradient(stand_in, used, wanted):
    x, layer = image(2, 6, 3, 3, dtype=torch.float64, device="cpu"), conv(6, 5, torch.float64, "cpu")
    x.requires_grad_(wanted != "weight")
    layer.requires_grad_(wanted != "x")
    for call in (plainly, forked_convolution):
        layer.zero_grad()
        x.grad = None
        result = call(layer, x)[used]
        if result.requires_grad:
            result.sin().sum().backward()
        found = [x.grad, layer.weight.grad]
        if call is plainly:
            expected = found
    for mine, its in zip(found, expected, strict=True):
        assert (mine is None) == (its is None)
        if its is not None:
            torch.testing.assert_close(mine, its)


def test_it_hands_on_the_tensor_itself(stand_in):
    x, layer = image(2, 6, 3, 3, dtype=torch.float64, device="cpu"), conv(6, 5, torch.float64, "cpu")
    _, again = forked_convolution(layer, x.requires_grad_())
    assert again.data_ptr() == x.data_ptr()
    assert again.stride() == x.stride()
    with pytest.raises(RuntimeError, match="modified inplace"):
        again.mul_(2)


@needs_gpu
def test_under_autocast(monkeypatch):
    monkeypatch.setattr(convolution, "LEAST", 0)
    x, layer = image(2, 64, 8, 8, dtype=torch.bfloat16, device="cuda"), conv(64, 32, torch.float32, "cuda")
    seeds = [image(2, c, 8, 8, dtype=torch.bfloat16, device="cuda", seed=c) for c in (32, 64)]
    with torch.autocast("cuda", torch.bfloat16):
        ours, its = (results(layer, x, call, seeds) for call in (forked_convolution, plainly))
    assert [t.dtype for t in ours] == [t.dtype for t in its]
    assert torch.equal(ours[0], its[0])
    exact = results(layer.double(), x.double(), plainly, [seed.double() for seed in seeds])
    layer.float()
    assert (ours[2] - exact[2]).abs().max() <= (its[2] - exact[2]).abs().max()  # rounded once, not twice
    assert torch.equal(ours[3], its[3])
    assert not convolution.adds_gradients(x.requires_grad_(), layer.weight)  # no autocast: torch's error


@needs_gpu
@pytest.mark.parametrize("case", ["float32", "contiguous", "no gradient", "few", "3x3", "subclass"])
def test_torch_answers(case, monkeypatch):
    monkeypatch.setattr(convolution, "LEAST", 0)
    x = image(2, 64, 8, 8, dtype=torch.float32 if case == "float32" else torch.bfloat16, device="cuda")
    weight = torch.randn(32, 64, 1, 1, device="cuda", dtype=x.dtype)
    assert case == "float32" or convolution.adds_gradients(x.clone().requires_grad_(), weight)
    if case == "contiguous":
        x = x.contiguous()
    if case == "few":
        monkeypatch.setattr(convolution, "LEAST", x.numel() + 1)
    if case == "3x3":
        weight = weight.expand(32, 64, 3, 3)
    if case == "subclass":
        weight = weight.as_subclass(type("Sub", (Tensor,), {}))
    assert not convolution.adds_gradients(x.requires_grad_(case != "no gradient"), weight)
