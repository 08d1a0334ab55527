"""Linear layers, MLPs and convolutions under autocast: the Functions that cast their float32 parameters themselves.

Kernels made of torch operations stand in for those of a GPU, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import DRAWS, excess, greatest_error, needs_gpu, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastlayers import backends, functional, patch_model, patch_report, verify_patch
from fastlayers.ops import autocast, bias_act, linear
from fastlayers.ops.activations import BY_CODE
from fastlayers.patching import calls
from fastlayers.patching.convolutions import convolution_and_more, forked_convolution

HALVES = [torch.float16, torch.bfloat16]


class StandIns(SimpleNamespace):
    """The raw ops in torch operations, and which of them were called."""

    def __init__(self) -> None:
        super().__init__(backend="cuda", called=[])

    def column_sum(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        self.called.append("column_sum")
        return x.sum(0, dtype=dtype)

    def bias_act_forward(self, x: Tensor, bias: Tensor | None, act: int, *parameters: float) -> Tensor:
        self.called.append("bias_act_forward")
        z = x.float() if bias is None else x.float() + bias.float()
        return BY_CODE[act].function(z).to(x.dtype)

    def bias_act_backward(self, dy, x, bias, act, first, second, dbias, dtype=None) -> tuple[Tensor, Tensor]:
        self.called.append("bias_act_backward")
        dx = BY_CODE[act].backward(dy.float(), x.float() if bias is None else x.float() + bias.float())
        return dx.to(x.dtype), dx.sum_to_size(x.shape[-1:]).to(dtype or x.dtype) if dbias else x.new_empty(0)

    def linear_autocast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous()
        self.called.append("linear_autocast")
        low = weight.to(x.dtype)
        return F.linear(x, low, None if bias is None else bias.to(x.dtype)).clone(), low

    def linear_autocast_backward(self, dy, x, low, dx, dweight, dbias) -> tuple[Tensor, ...]:
        self.called.append("linear_autocast_backward")
        rows, flat = x.flatten(0, -2).float(), dy.flatten(0, -2).float()
        with torch.autocast("cpu", enabled=False):
            return (flat @ low.float()).view_as(x).to(x.dtype), flat.t() @ rows, flat.sum(0)

    def mlp_autocast(self, x, weight, bias, weight2, bias2, act, first, second) -> tuple[Tensor, ...]:
        self.called.append("mlp_autocast")
        low, low_bias, low2 = (t.to(x.dtype) for t in (weight, bias, weight2))
        product = F.linear(x.flatten(0, -2), low)
        activated = self.bias_act_forward(product, low_bias, act, first, second)
        y = F.linear(activated, low2, None if bias2 is None else bias2.to(x.dtype))
        return y.view(*x.shape[:-1], -1).clone(), product, low, low_bias, low2

    def mlp_autocast_backward(self, dy, x, product, low, low_bias, low2, act, first, second, *wanted):
        self.called.append("mlp_autocast_backward")
        activated = self.bias_act_forward(product, low_bias, act, first, second)
        dactivated, *of_second = self.linear_autocast_backward(dy.flatten(0, -2), activated, low2, *[True] * 3)
        dproduct, dbias = self.bias_act_backward(dactivated, product, low_bias, act, first, second, True, torch.float32)
        dx, dweight, _ = self.linear_autocast_backward(dproduct, x.flatten(0, -2), low, *[True] * 3)
        return dx.view_as(x), dweight, dbias, *of_second

    def convolution_autocast(self, x, weight, bias, *options) -> tuple[Tensor, Tensor]:
        self.called.append("convolution_autocast")
        low = weight.to(x.dtype)
        return F.conv2d(x, low, bias.to(x.dtype), *options), low

    def convolution_autocast_backward(self, dy, x, low, stride, padding, dilation, groups, dx, dweight, dbias):
        self.called.append("convolution_autocast_backward")
        found, found_weight, _ = torch.ops.aten.convolution_backward(
            dy, x, low, None, stride, padding, dilation, False, [0, 0], groups, [True, True, False]
        )
        return found, found_weight.float(), dy.sum((0, 2, 3), dtype=torch.float32)


@pytest.fixture
def kernels(monkeypatch) -> StandIns:
    """Stand-ins that serve calls of any size."""
    found = StandIns()
    for family in (autocast.FAMILY, linear.FAMILY, bias_act.FAMILY):
        monkeypatch.setattr(family, "serving", lambda x: found)
    monkeypatch.setattr(linear, "LEAST", 0)
    monkeypatch.setattr(calls, "GPU_LEAST", 0)
    return found


def leaves(*shapes: tuple[int, ...], device: str = "cpu", draw: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw)
    drawn = [torch.randn(shape, generator=generator) * (0.3 if place else 1.0) for place, shape in enumerate(shapes)]
    return [t.to(device).requires_grad_() for t in drawn]


def twice(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *parameters: layer(layer(x, *parameters), *parameters)


def torch_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight, bias)), weight2, bias2)


def our_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    return calls.mlp(x, weight, bias, "gelu", weight2, bias2)


def torch_fork(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1, groups=2) + x


def torch_pair(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return F.conv2d(F.conv2d(x, weight, bias, padding=1, groups=2), weight, bias, padding=1, groups=2)


def our_pair(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    layer = convolution(weight, bias)
    return convolution_and_more(layer, convolution_and_more(layer, x.contiguous(memory_format=torch.channels_last)))


def our_fork(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, x = forked_convolution(convolution(weight, bias), x)
    return y + x


def convolution(weight: Tensor, bias: Tensor) -> nn.Conv2d:
    layer = nn.Conv2d(weight.shape[1] * 2, weight.shape[0], weight.shape[2:], padding=1, groups=2)
    for name, t in (("weight", weight), ("bias", bias)):
        del layer._parameters[name]
        setattr(layer, name, t)
    return layer


LAYERS = {
    "linear": (twice(functional.linear), twice(F.linear), [(6, 8), (8, 8), (8,)]),
    "batch": (twice(functional.linear), twice(F.linear), [(2, 3, 8), (8, 8), (8,)]),
    "mlp": (our_mlp, torch_mlp, [(2, 3, 8), (12, 8), (12,), (8, 12), (8,)]),
    "mlp twice": (twice(our_mlp), twice(torch_mlp), [(6, 8), (12, 8), (12,), (8, 12), (8,)]),
    "convolution": (our_pair, torch_pair, [(2, 4, 5, 6), (4, 2, 3, 3), (4,)]),
    "forked convolution": (our_fork, torch_fork, [(2, 4, 5, 6), (4, 2, 3, 3), (4,)]),
}
EACH_LAYER = pytest.mark.parametrize(("ours", "theirs", "shapes"), LAYERS.values(), ids=LAYERS)


def results(function: Callable[..., Tensor], given: list[Tensor], low: torch.dtype) -> list[Tensor]:
    with torch.autocast(given[0].device.type, low):
        out = function(*given)
    dy = torch.linspace(-1, 1, out.numel()).view(out.shape).to(low).to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in given if t.requires_grad], dy)]


def assert_as_near(ours, theirs, shapes, low: torch.dtype, frozen: tuple[int, ...] = (), device: str = "cpu") -> None:
    """torch rounds gradients of parameters to 16 bits on their way, and ours may only be nearer to those of float64."""
    errors: list[list[float]] = []
    for draw in range(DRAWS):
        given = leaves(*shapes, device=device, draw=draw)
        for place in frozen:
            given[place].requires_grad_(False)
        exact = results(theirs, [t.detach().double().requires_grad_(t.requires_grad) for t in given], low)
        stock = results(theirs, given, low)
        errors.append([greatest_error(*pair) for pair in zip(stock, exact, strict=True)])
    found = results(ours, given, low)
    assert [t.dtype for t in found] == [t.dtype for t in stock]
    for mine, true, *allowed in zip(found, exact, *errors, strict=True):
        assert excess(mine, true, max(allowed)) is None


@EACH_LAYER
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_gradients(kernels, ours, theirs, shapes, low, frozen):
    assert_as_near(ours, theirs, shapes, low, frozen)


@EACH_LAYER
def test_the_kernels_are_used(kernels, ours, theirs, shapes):
    results(ours, leaves(*shapes), torch.bfloat16)
    assert [name for name in kernels.called if name.endswith("_autocast_backward")]


@EACH_LAYER
def test_without_autocast_and_without_gradients(kernels, ours, theirs, shapes):
    given = leaves(*shapes)
    torch.testing.assert_close(ours(*given), theirs(*given))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(*given), theirs(*given)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.05)
    assert not [name for name in kernels.called if "autocast" in name]


@EACH_LAYER
def test_second_derivatives(kernels, ours, theirs, shapes):
    found = []
    for function in (ours, theirs):
        given = leaves(*shapes)
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*given).sin()
        dx, dweight = torch.autograd.grad(out.float().sum(), given[:2], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum() + dweight.square().sum(), given))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0.1, atol=0.02 * float(its.detach().abs().max()))


@EACH_LAYER
def test_parameters_that_change_before_the_backward(kernels, ours, theirs, shapes):
    """It needs no more than the casts that it keeps, as torch's does. Its derivative needs the parameters."""
    found = []
    for function in (ours, theirs):
        given = leaves(*shapes)
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*given)
        with torch.no_grad():
            given[1].mul_(2)
        found.append(torch.autograd.grad(out.float().sum(), given, retain_graph=True))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0.02, atol=0.02 * float(its.detach().abs().max()))
    given = leaves(*shapes)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*given)
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified in place since: it is at version 1; expected 0"):
        torch.autograd.grad(out.float().sum(), given, create_graph=True)


@EACH_LAYER
def test_backward_within_autocast_twice_and_checkpointed(kernels, ours, theirs, shapes):
    given = leaves(*shapes)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*given).float().sum()
        inside = torch.autograd.grad(out, given, retain_graph=True)
        again = torch.autograd.grad(out, given)
        kept = checkpoint(ours, *given, use_reentrant=False).float().sum()
    checkpointed = torch.autograd.grad(kept, given)
    for grads in (again, checkpointed):
        assert all(map(same_bits, inside, grads))


@EACH_LAYER
def test_results_may_be_written(kernels, ours, theirs, shapes):
    given = leaves(*shapes)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*given)
    out += 1
    out.float().sum().backward()
    assert all(t.grad is not None for t in given)


def test_convolutions_keep_their_layout(kernels):
    """And that of their weights: the cast of one that is channels_last is so too."""
    x, weight, bias = leaves((2, 4, 5, 6), (4, 2, 3, 3), (4,))
    with torch.no_grad():
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    given = [x.requires_grad_(), weight.requires_grad_(), bias]
    ours, torchs = (results(function, given, torch.bfloat16) for function in (our_fork, torch_fork))
    assert [t.stride() for t in ours] == [t.stride() for t in torchs]


@pytest.mark.parametrize("options", ["padding=same", "padding_mode=circular", "stride=2", "dilation=2"])
def test_convolutions_of_all_kinds(kernels, options):
    name, _, value = options.partition("=")
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, **{name: int(value) if value.isdecimal() else value})
    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    found = []
    for call in (convolution_and_more, nn.Module.__call__):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(layer, x)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters()))))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0.02, atol=0.02 * float(its.detach().abs().max()))
    assert ("convolution_autocast" in kernels.called) == value.isdecimal()


# -- in a patched model ------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.act, self.drop = nn.Linear(8, 12), nn.GELU(), nn.Dropout(p)
        self.norm, self.fc2 = nn.Identity(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop(self.act(self.fc1(x)))))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_mlp_is_found(kernels, p):
    torch.manual_seed(0)
    model, x = Mlp(p), torch.randn(4, 8)
    stock = copy.deepcopy(model)
    patch_model(model)
    assert patch_report(model).counts()["mlp"] == 1
    for autocast_on in (False, True):
        for training in (False, True):
            found = []
            for network in (model.train(training), stock.train(training)):
                torch.manual_seed(1)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast_on):
                    out = network(x)
                found.append((out.float(), *torch.autograd.grad(out.float().sin().sum(), network.parameters())))
            torch.testing.assert_close(*found, rtol=0.05 if autocast_on else 1.3e-6, atol=0.05 if autocast_on else 1e-5)
    assert ("mlp_autocast" in kernels.called) == (p == 0) or "linear_autocast" in kernels.called


def test_a_hook_on_a_layer_of_an_mlp(kernels):
    """A hook that is added later is called."""
    model, seen = patch_model(Mlp()), []
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        for layer in (model.fc1, model.drop, model.fc2):
            handle = layer.register_forward_hook(lambda module, args, out: seen.append(type(module)))
            model(x)
            handle.remove()
    assert len(seen) == 3


class Block(nn.Module):
    """As a ConvNeXt's starts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.shortcut = nn.BatchNorm2d(4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        return torch.tanh(self.norm(self.conv(x))) + self.shortcut(shortcut)


def test_forked_convolution_is_found(kernels):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Block())
    patch_model(model)
    assert patch_report(model).counts()["forked_convolution"] == 1
    assert verify_patch(model, torch.randn(2, 4, 5, 5))


# -- the kernels -------------------------------------------------------------------------------------------------------


@needs_gpu
@EACH_LAYER
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_gradients_on_a_gpu(ours, theirs, shapes, low, backend):
    with backends.backend(backend):
        assert_as_near(ours, theirs, shapes, low, device="cuda")


@needs_gpu
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (8, 8), (5, 8), (1000, 1031)], ids=str)
def test_casts(low, shape):
    """Of parameters that start anywhere, to the bit."""
    with backends.backend("cuda"):
        kernels = autocast.FAMILY.serving(torch.empty(0, device="cuda"))
    for offset in (0, 1, 4):
        count = shape[0] * shape[1]
        weight, weight2 = torch.randn(2, count + offset, device="cuda")[:, offset:].unbind()
        weight, weight2 = weight.view(shape), weight2.view(shape[::-1])
        bias, bias2 = torch.randn(shape[0] + offset, device="cuda")[offset:], torch.randn(shape[1], device="cuda")
        x = torch.randn(3, shape[1], device="cuda").to(low)
        _, product, *casts = kernels.mlp_autocast(x, weight, bias, weight2, bias2, 1, 0.0, 0.0)
        for found, given in zip(casts, (weight, bias, weight2), strict=True):
            assert same_bits(found, given.to(low))
        assert same_bits(product, x @ weight.to(low).t())
        y, found = kernels.linear_autocast(x, weight, bias)
        assert same_bits(found, weight.to(low))
        assert same_bits(y, F.linear(x, weight.to(low), bias.to(low)))


@needs_gpu
def test_the_casts_of_a_convolution_keep_its_layout():
    with backends.backend("cuda"):
        kernels = autocast.FAMILY.serving(torch.empty(0, device="cuda"))
    x = torch.randn(2, 4, 5, 6, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(6, 4, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    y, low = kernels.convolution_autocast(x, weight, torch.zeros(6, device="cuda"), (1, 1), (0, 0), (1, 1), 1)
    assert low.stride() == weight.stride()
    assert same_bits(low, weight.bfloat16())
    assert y.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="expected dense float32 parameters"):
        kernels.convolution_autocast(x, weight[:, ::2], torch.zeros(6, device="cuda"), (1, 1), (0, 0), (1, 1), 2)
