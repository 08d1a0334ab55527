"""Linear layers, MLPs, convolutions and the norms behind them under autocast: Functions that cast float32 parameters.

Kernels made of torch operations stand in for those of a GPU, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastlayers import backends, functional, patch_model, patch_report, verify_patch
from fastlayers.ops import autocast, batch_norm, bias_act, linear
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE
from fastlayers.patching.runtime import calls
from fastlayers.patching.runtime.convolution import (
    convolution_and_more,
    convolution_batch_norm,
    forked_convolution,
)
from tests.harness import assert_no_worse, needs_gpu, same_bits

HALVES = [torch.float16, torch.bfloat16]


class StandIns(SimpleNamespace):
    """The raw ops in torch operations, and which of them were called."""

    def __init__(self) -> None:
        super().__init__(backend="cuda", unasked=False, called=[])

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

    def convolution_norm_autocast(
        self, x, weight, residual, gain, shift, mean, var, momentum, eps, act, bits, batches, *options
    ) -> tuple[Tensor, ...]:
        self.called.append("convolution_norm_autocast")
        low = weight.to(x.dtype)
        z = F.conv2d(x, low, None, *options)
        wide = F.batch_norm(z.float(), mean, var, gain, shift, True, momentum, eps)
        wide = wide if residual is None else wide + residual.float()
        batches.add_(1)
        y = BY_CODE[act].function(wide).to(x.dtype)
        packed = torch.empty(0, dtype=torch.uint8)
        if bits:
            memory = (y > 0).as_strided((y.numel(),), (1,))
            eights = F.pad(memory.to(torch.uint8), (0, -y.numel() % 8)).view(-1, 8)
            packed = (eights << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        return y, low, z, torch.full((2, z.shape[1]), eps), packed

    def convolution_norm_autocast_backward(
        self, dy, x, low, z, residual, bits, gain, shift, stats, act, stride, padding, dilation, groups, *wanted
    ) -> tuple[Tensor, ...]:
        self.called.append("convolution_norm_autocast_backward")
        if bits is not None:  # what is beyond the last element is not theirs
            bits = bits[: (z.numel() + 7) // 8]
        eps = float(stats[0, 0])
        dz, *others = batch_norm.decomposed_backward(dy, z, residual, bits, gain, shift, stats, True, eps, act)
        dx, dweight, _ = self.convolution_autocast_backward(
            dz, x, low, stride, padding, dilation, groups, True, True, False
        )
        return dx, dweight, *others


@pytest.fixture
def kernels(monkeypatch, op_by_op) -> StandIns:
    """Stand-ins that serve calls of any size."""
    found = StandIns()
    for family in (autocast.FAMILY, linear.FAMILY, bias_act.FAMILY):
        monkeypatch.setattr(family, "kernels_for", lambda x: found)
    monkeypatch.setattr(linear, "LEAST", 0)
    monkeypatch.setattr(calls, "GPU_LEAST", 0)
    return found


def leaves(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) * (0.3 if place else 1.0) for place, shape in enumerate(shapes)]
    return [t.to(device).requires_grad_() for t in drawn]


def flops_of(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.autocast(x.device.type, torch.bfloat16):
        model(x).sum().backward()
    return int(counter.get_total_flops())


def layers_with_products() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 8))


def test_a_counter_of_flops_sees_the_products(kernels):
    """The kernels have them inside."""
    stock = layers_with_products()
    model, x = patch_model(copy.deepcopy(stock)), torch.randn(512, 64, requires_grad=True)
    assert flops_of(model, x) == flops_of(stock, x) > 0
    assert not any("autocast" in name for name in kernels.called)


@needs_gpu
def test_a_counter_of_flops_sees_the_products_of_a_gpu():
    stock = layers_with_products().cuda()
    model, x = patch_model(copy.deepcopy(stock)), torch.randn(4096, 64, device="cuda", requires_grad=True)
    for _ in range(3):  # so that there is a region
        with torch.autocast("cuda", torch.bfloat16):
            model(x).sum().backward()
    assert flops_of(model, x) == flops_of(stock, x) > 0


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


def convolution(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    layer = nn.Conv2d(weight.shape[1] * 2, weight.shape[0], weight.shape[2:], padding=1, groups=2)
    for name, t in (("weight", weight), ("bias", bias)):
        del layer._parameters[name]
        setattr(layer, name, t)
    return layer


def our_norm(act: str | None) -> Callable[..., Tensor]:
    """act(batch_norm(convolution(x)) + residual)."""

    def ours(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            residual = residual.to(autocast.dtype_of(residual))
        layers = convolution(weight, None), normalization(gain, shift)
        return convolution_batch_norm(layers[0], x, layers[1], residual, act)

    return ours


def torch_norm(act: str | None) -> Callable[..., Tensor]:
    def theirs(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.batch_norm(F.conv2d(x, weight, None, padding=1, groups=2), None, None, gain, shift, True)
        if residual is not None:
            y = y + residual.to(autocast.dtype_of(residual))
        return ACTIVATIONS[act].function(y)

    return theirs


def normalization(gain: Tensor, shift: Tensor) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(gain.shape[0], device=gain.device, dtype=gain.dtype)
    for name, t in (("weight", gain), ("bias", shift)):
        del layer._parameters[name]
        setattr(layer, name, t)
    return layer


NORMED = [(4, 4, 5, 6), (6, 2, 3, 3), (6,), (6,)]
LAYERS = {
    "linear": (twice(functional.linear), twice(F.linear), [(6, 8), (8, 8), (8,)]),
    "batch": (twice(functional.linear), twice(F.linear), [(2, 3, 8), (8, 8), (8,)]),
    "mlp": (our_mlp, torch_mlp, [(2, 3, 8), (12, 8), (12,), (8, 12), (8,)]),
    "mlp twice": (twice(our_mlp), twice(torch_mlp), [(6, 8), (12, 8), (12,), (8, 12), (8,)]),
    "convolution": (our_pair, torch_pair, [(2, 4, 5, 6), (4, 2, 3, 3), (4,)]),
    "forked convolution": (our_fork, torch_fork, [(2, 4, 5, 6), (4, 2, 3, 3), (4,)]),
    "convolution and norm": (our_norm(None), torch_norm(None), NORMED),
    "and silu": (our_norm("silu"), torch_norm("silu"), NORMED),
    "and a residual": (our_norm(None), torch_norm(None), [*NORMED, (4, 6, 5, 6)]),
    "and a residual and silu": (our_norm("silu"), torch_norm("silu"), [*NORMED, (4, 6, 5, 6)]),
}
EACH_LAYER = pytest.mark.parametrize(("ours", "theirs", "shapes"), LAYERS.values(), ids=LAYERS)


def results(function: Callable[..., Tensor], given: list[Tensor], low: torch.dtype) -> list[Tensor]:
    with torch.autocast(given[0].device.type, low):
        out = function(*given)
    dy = (torch.arange(out.numel()) % 17 / 8 - 1).view(out.shape).to(out)  # which 16 bits hold
    return [out.detach(), *torch.autograd.grad(out, [t for t in given if t.requires_grad], dy)]


@EACH_LAYER
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_gradients(kernels, ours, theirs, shapes, low, frozen):
    """torch rounds gradients of parameters to 16 bits on their way, and ours may only be nearer to those of float64."""
    given = leaves(*shapes)
    for place in frozen:
        given[place].requires_grad_(False)
    assert_no_worse(results(ours, given, low), results, theirs, given, low)


@EACH_LAYER
def test_the_kernels_are_used(kernels, ours, theirs, shapes):
    results(ours, leaves(*shapes), torch.bfloat16)
    assert [name for name in kernels.called if name.endswith("_autocast_backward")]


@EACH_LAYER
def test_without_autocast_and_without_gradients(kernels, ours, theirs, shapes):
    given = leaves(*shapes)
    assert_no_worse(ours(*given), theirs, *given)
    assert not [name for name in kernels.called if "autocast" in name]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_no_worse(ours(*given), theirs, *given)
    assert not [name for name in kernels.called if "autocast" in name]


@EACH_LAYER
def test_second_derivatives(kernels, ours, theirs, shapes):
    def second(given, function=theirs):
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*given).sin()
        dx, dweight = torch.autograd.grad(out.float().sum(), given[:2], create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dweight.square().sum(), given)

    given = leaves(*shapes)
    assert_no_worse(second(given, ours), second, given)


@EACH_LAYER
def test_parameters_that_change_before_the_backward(kernels, ours, theirs, shapes):
    """It needs no more than the casts that it keeps, as torch's does. Its derivative needs the parameters."""

    def gradients(given, function=theirs):
        given = [t.detach().clone().requires_grad_() for t in given]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*given)
        if out.dtype is not torch.float64:  # of which no casts are kept
            with torch.no_grad():
                given[1].mul_(2)
        return torch.autograd.grad(out.float().sin().sum(), given, retain_graph=True)

    assert_no_worse(gradients(leaves(*shapes), ours), gradients, leaves(*shapes))
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

    def answer(layer, x, call=nn.Module.__call__):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(layer, x)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters()))

    assert_no_worse(answer(layer, x, convolution_and_more), answer, layer, x)
    assert ("convolution_autocast" in kernels.called) == value.isdecimal()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_relu_of_a_sum_behind_a_norm(kernels, layout):
    """Kept as one bit an element."""

    x, *parameters, residual = (t.detach() for t in leaves(*NORMED, (4, 6, 5, 6)))
    residual = torch.where(residual > 0, 9.0, -9.0)  # not near zero, where a rounding decides
    x, residual = (t.contiguous(memory_format=layout) for t in (x, residual))
    given = [t.requires_grad_() for t in (x, *parameters, residual)]
    low = torch.bfloat16
    assert_no_worse(results(our_norm("relu"), given, low), results, torch_norm("relu"), given, low)

    def derivable(given, norm=torch_norm):
        with torch.autocast("cpu", torch.bfloat16):
            out = norm("relu")(*given)
        assert out.is_contiguous(memory_format=layout)
        return torch.autograd.grad(out.float().sin().sum(), given, create_graph=True)

    assert_no_worse(derivable(given, our_norm), derivable, given)


def normed(conv: dict[str, object] | None = None, norm: dict[str, object] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, **{"bias": False, **(conv or {})}), nn.BatchNorm2d(6, **(norm or {})), nn.ReLU()
    )


@pytest.mark.parametrize(
    ("model", "served"),
    [
        (normed(), True),
        (normed({"stride": 2, "dilation": 2, "padding": (1, 2), "groups": 3}), True),
        (normed({"padding": "same"}), False),
        (normed({"padding": 1, "padding_mode": "reflect"}), False),
        (normed(norm={"momentum": None}), False),
        (normed(norm={"track_running_stats": False}), False),
        (normed(norm={"affine": False}), False),
        (normed().eval(), False),
        (normed().bfloat16(), False),
        (normed().requires_grad_(False), True),  # x has a gradient
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else None,
)
def test_convolutions_and_norms_of_all_kinds(kernels, model, served):
    stock, x = copy.deepcopy(model), torch.randn(4, 3, 9, 9, requires_grad=True)
    patch_model(model)
    assert patch_report(model).counts()["conv_batch_norm_act"] == 1

    def answer(network, x):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                out = network(x)
        wanted = [x, *(t for t in network.parameters() if t.requires_grad)]
        return out, *torch.autograd.grad(out.float().sin().sum(), wanted), *network.buffers()

    assert_no_worse(answer(model, x), answer, stock, x)
    assert ("convolution_norm_autocast" in kernels.called) == served


def test_a_norm_of_one_value_a_channel_is_refused_as_by_torch(kernels):
    model = patch_model(normed())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, 3, 3))


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        var = self.running_var if not self.training or self.track_running_stats else None
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))


class Sum(nn.Module):
    """As those of a network of residual blocks."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), norm(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        out = self.bn2(self.conv2(x))
        out += x
        return F.hardswish(out)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, NormAct])
def test_convolutions_and_norms_are_found(kernels, norm):
    torch.manual_seed(0)
    stock = Sum(norm)
    model = patch_model(copy.deepcopy(stock))
    counts = patch_report(model).counts()
    assert counts["conv_batch_norm_add_act"] == 1
    assert counts["conv_batch_norm" if norm is nn.BatchNorm2d else "conv_batch_norm_act"] == 1
    assert verify_patch(copy.deepcopy(stock), torch.randn(4, 3, 9, 9))

    def step(network: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            out = network(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), network.parameters()), *network.buffers()

    x = torch.randn(4, 3, 9, 9)
    for training in (True, False):
        assert_no_worse(step(model.train(training), x), step, stock.train(training), x)
    assert kernels.called.count("convolution_norm_autocast") == 2
    assert kernels.called.count("convolution_norm_autocast_backward") == 2
    for layer in (model.conv1, model.bn1, *model.bn1.children()):
        seen = []
        handle = layer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(type(module)))
        model.train()(x)
        handle.remove()
        assert len(seen) == 1


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

    def answer(network, x, autocast_on):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_on):
            out = network(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), network.parameters())

    for autocast_on in (False, True):
        for training in (False, True):
            given = (x, autocast_on)
            assert_no_worse(answer(model.train(training), *given), answer, stock.train(training), *given)
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


class ConvNeXtBlock(nn.Module):
    """As timm writes it."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.mlp, self.gamma = Mlp(p), nn.Parameter(torch.rand(8))
        self.drop_path, self.shortcut = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv_dw(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.mlp(x)
        x = x.permute(0, 3, 1, 2)
        x = x.mul(self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(x) + self.shortcut(shortcut)


def test_the_steps_of_a_convnext_block_are_found(kernels):
    torch.manual_seed(0)
    stock = ConvNeXtBlock()
    model = patch_model(copy.deepcopy(stock))
    counts = patch_report(model).counts()
    assert [counts[rule] for rule in ("forked_convolution", "cast_layer_norm", "mlp", "scale_add")] == [1, 1, 1, 1]
    assert verify_patch(copy.deepcopy(stock), torch.randn(2, 8, 9, 9))
    x = torch.randn(2, 8, 9, 9).contiguous(memory_format=torch.channels_last).requires_grad_()

    def answer(network: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            out = network(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), (x, *network.parameters()))

    assert_no_worse(answer(model, x), answer, stock, x)
    for op in ("convolution_autocast_backward", "mlp_autocast_backward"):
        assert op in kernels.called


# -- the kernels -------------------------------------------------------------------------------------------------------


@needs_gpu
@EACH_LAYER
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_gradients_on_a_gpu(ours, theirs, shapes, low, backend):
    given = leaves(*shapes, device="cuda")
    with backends.backend(backend):
        assert_no_worse(results(ours, given, low), results, theirs, given, low)


@needs_gpu
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (8, 8), (5, 8), (1000, 1031)], ids=str)
def test_casts(low, shape):
    """Of parameters that start anywhere, to the bit."""
    with backends.backend("cuda"):
        kernels = autocast.FAMILY.kernels_for(torch.empty(0, device="cuda"))
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
        kernels = autocast.FAMILY.kernels_for(torch.empty(0, device="cuda"))
    x = torch.randn(2, 4, 5, 6, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(6, 4, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    y, low = kernels.convolution_autocast(x, weight, torch.zeros(6, device="cuda"), (1, 1), (0, 0), (1, 1), 1)
    assert low.stride() == weight.stride()
    assert same_bits(low, weight.bfloat16())
    assert y.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="expected dense float32 parameters"):
        kernels.convolution_autocast(x, weight[:, ::2], torch.zeros(6, device="cuda"), (1, 1), (0, 0), (1, 1), 2)


@needs_gpu
@pytest.mark.parametrize("act", [None, "relu", "silu"])
@pytest.mark.parametrize("summed", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_convolution_and_its_norm_are_those_alone(backend, layout, summed, act):
    """To the bit: one call does what two do."""
    shapes = [(4, 16, 9, 9), (24, 8, 3, 3), (24,), (24,), (4, 24, 9, 9)]
    x, weight, gain, shift, residual = leaves(*shapes, device="cuda")
    x, residual = (t.detach().bfloat16().contiguous(memory_format=layout).requires_grad_() for t in (x, residual))
    given = [x, weight, gain, shift, *([residual] if summed else [])]
    dy = torch.linspace(-1, 1, residual.numel(), device="cuda").view(residual.shape).bfloat16()
    found = []
    for together in (True, False):
        conv, norm = convolution(weight, None), normalization(gain, shift)
        # Not by assignment, which torch's own tests forbid in a process that has imported them.
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            with backends.backend(backend), torch.autocast("cuda", torch.bfloat16):
                if together:
                    out = convolution_batch_norm(conv, x, norm, residual if summed else None, act)
                    assert type(out.grad_fn).__name__ == "ConvolutionNormBackward"
                else:
                    out = calls.batch_norm_layer(norm, conv(x), residual if summed else None, act)
            grads = torch.autograd.grad(out, given, dy)
        found.append([out, *grads, norm.running_mean, norm.running_var, norm.num_batches_tracked])
    assert all(map(same_bits, *found))
    assert [t.stride() for t in found[0]] == [t.stride() for t in found[1]]
