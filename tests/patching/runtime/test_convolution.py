"""Convolutions with what follows them: a bias of folding or of their own, a residual, an activation."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401  (sources name it)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

from fastlayers.ops.activations import BY_CODE
from fastlayers.patching import (
    fold_batch_norm,
    patch_model,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
)
from fastlayers.patching.runtime import convolution, folded_layers
from tests.harness import assert_no_worse
from tests.patching.harness import written
from tests.patching.runtime.folding import LAYERS, Block, NormAct, features, infer, warmed

# -- what follows a folded convolution ---------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Bottleneck(nn.Module):
    """As timm's, with a shortcut of its own where ``strided``."""

    def __init__(self, strided):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.drop_block = nn.Identity()
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3, padding=1, stride=1 + strided), nn.BatchNorm2d(4)
        self.act2 = nn.ReLU(inplace=True)
        layers = (nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.downsample = nn.Sequential(*layers) if strided else None

    def forward(self, x):
        shortcut = x
        x = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        x = self.bn2(self.conv2(x))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.side, self.unknown = nn.Conv2d(4, 4, 3, padding=1), QuickGELU()


def spelled(body):
    return written(Layers, body, globals())


#: Something that fastlayers does not know runs between the convolution and the sum.
BETWEEN = spelled("y = self.bn(self.conv(x * 2))\nreturn F.relu(y + self.unknown(x))")
#: With how often a kernel adds a bias; of one convolution none follows that could.
FOLLOWED = [
    (lambda: Bottleneck(False), 2),
    (lambda: Bottleneck(True), 2),
    (spelled("return F.silu(self.bn1(self.dense(x)) + self.bn(self.conv(x)))"), 1),
    (spelled("y = self.side(x)\ny += self.bn(self.conv(x))\nreturn F.gelu(y)"), 1),  # y is not normalised
    (BETWEEN, 1),
    (spelled("return F.hardswish(self.bn(self.conv(x)) + x.mean((2, 3), keepdim=True))"), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.01)), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.SiLU(inplace=True))), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.Softplus())), 1),
    (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU6()), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Identity(), QuickGELU()), 1),
]


@pytest.fixture
def kernel(monkeypatch, op_by_op):
    """The path of a GPU, its kernel in torch's operators; what it was called with."""
    calls = []

    def channel_bias_act_(x, bias, residual, act):
        calls.append((x, residual, act))
        assert residual is None or (residual.dtype, residual.stride()) == (x.dtype, x.stride())
        z = x.float() + bias.view(-1, *[1] * (x.dim() - 2)) + (0 if residual is None else residual)
        x.copy_(BY_CODE[act].function(z))

    def adds_bias(layer, x, weight, bias):
        return bias is not None and not isinstance(layer, nn.Linear) and not torch.is_grad_enabled()

    kernels = types.SimpleNamespace(channel_bias_act_=channel_bias_act_)
    monkeypatch.setattr(convolution, "FAMILY", types.SimpleNamespace(kernels_for=lambda x: kernels))
    for module in (convolution, folded_layers):
        monkeypatch.setattr(module, "adds_bias", adds_bias)
    return calls


@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("patch", [False, True])
def test_what_follows_is_part_of_it(make, count, patch):
    model = warmed(make(), features())
    expected, before = infer(model, features()), features()
    if patch:
        patch_model(model)
    fold_batch_norm(model, strict=False)
    x = features()
    actual = infer(model, x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    assert torch.equal(x, before)


@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_kernel_adds_bias_residual_and_activation(make, count, channels_last, kernel):
    torch.manual_seed(0)
    x = features(channels_last=channels_last)
    model = warmed(make(), x)
    expected = infer(model, x)
    fold_batch_norm(model)
    torch.testing.assert_close(infer(model, x), expected)
    assert len(kernel) == count
    with torch.enable_grad():  # of the input
        y = model.requires_grad_(False)(x.requires_grad_())
    assert len(kernel) == count
    torch.testing.assert_close(y, expected)
    y.sum().backward()


def test_a_shortcut_of_its_own(kernel):
    """Its convolution comes without its bias, which is added with the other's."""
    model = warmed(Bottleneck(True), features())
    plain = copy.deepcopy(model)
    expected = infer(plain, features())
    fold_batch_norm(model)
    assert "folded_sum" in type(model).__fastlayers_source__
    infer(model, features())
    assert [(residual is not None, act) for _, residual, act in kernel] == [(False, 1), (True, 1)]
    seen = []
    handle = model.downsample[1].register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(infer(model, features()), expected)
    assert len(seen) == 1
    handle.remove()
    for other in (model, plain):
        torch.manual_seed(2)
        other.downsample[1] = nn.Conv2d(4, 4, 3, padding=1)
    torch.testing.assert_close(infer(model, features()), infer(plain, features()))
    for other in (model, plain):
        other.downsample.append(nn.Tanh())
    torch.testing.assert_close(infer(model, features()), infer(plain, features()))


def test_a_stranger_between_convolution_and_sum(kernel):
    infer(fold_batch_norm(warmed(BETWEEN(), features())), features())
    assert [(residual is not None, act) for _, residual, act in kernel] == [(True, 1)]


def test_an_activation_with_a_hook_or_another_one(kernel):
    model = warmed(nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.SiLU(inplace=True))), features())
    plain = copy.deepcopy(model)
    fold_batch_norm(model)
    seen = []
    handle = model[1].act.register_forward_hook(lambda module, args, out: seen.append(out))
    assert_no_worse(infer(model, features()), infer, plain, features())
    assert len(seen) == 1
    handle.remove()
    model[1].act = plain[1].act = nn.Tanh()
    assert_no_worse(infer(model, features()), infer, plain, features())
    model[1].act.forward = plain[1].act.forward = torch.exp
    assert_no_worse(infer(model, features()), infer, plain, features())


@pytest.mark.parametrize(("make", "norm", "shape"), LAYERS)
def test_weights_are_cast_once_under_autocast(make, norm, shape):
    """Autocast would cast a folded weight in every call: it keeps the casts of leaves that want a gradient alone."""
    x = torch.randn(shape)
    model = warmed(nn.Sequential(make(), copy.deepcopy(norm)), x)
    fold_batch_norm(model)
    unfolded = unfold_batch_norm(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        first, again = infer(model, x), infer(model, x)
        assert_no_worse(first, lambda model, x: infer(model, x).bfloat16(), unfolded, x)
    assert torch.equal(first, again)
    (kept,) = [folded_layers._folded[module] for module in model.modules() if module in folded_layers._folded]
    assert {dtype: weight.dtype for dtype, (weight, _) in kept.weights.items()} == {torch.bfloat16: torch.bfloat16}
    assert infer(model, x).dtype == torch.float32
    assert set(kept.weights) == {torch.float32, torch.bfloat16}


def check_on_a_gpu(make, prepare, dtype, autocast):
    """A prepared model errs at most 1.5 times as much as the model, measured by float64."""
    for channels_last in (False, True):
        x = features(torch.float64, channels_last).cuda()
        model = warmed(make().double().cuda(), x)
        exact = infer(model, x)
        model, x = model.to(torch.float32 if autocast else dtype), x.to(torch.float32 if autocast else dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), torch.backends.cudnn.flags(allow_tf32=False):
            stock = infer(model, x)
            ours = infer(prepare(model), x)
        assert (ours.dtype, ours.stride()) == (stock.dtype, stock.stride())
        allowed = 1.5 * (stock - exact).abs().max() + 4 * torch.finfo(stock.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed
        if prepare is patch_model:
            assert infer(model, x[0]).shape == stock.shape[1:]  # without a batch


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(make, count, dtype, autocast):
    check_on_a_gpu(make, fold_batch_norm, dtype, autocast)


# -- convolutions with a bias of their own, in a patched model ---------------------------------------------------------


class ConvNeXt(nn.Module):
    """As timm's block, with a stem of patches before it."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv_dw = nn.Conv2d(4, 6, 2, stride=2), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.reduce, self.expand = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        x = self.conv_dw(self.stem(x))
        return x * self.expand(self.act(self.reduce(x))).sigmoid()


BIASED = [
    (ConvNeXt, 3, [0, 0, 2]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True)), 1, [1]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), nn.GELU()), 1, [3]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), QuickGELU()), 0, []),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.ReLU()), 0, []),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 3)), 0, []),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), nn.ReLU()), 0, []),
]


@pytest.mark.parametrize(("make", "count", "acts"), BIASED)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bias_of_its_own(make, count, acts, channels_last, kernel):
    torch.manual_seed(0)
    x, model = features(channels_last=channels_last), make()
    plain = copy.deepcopy(model)
    assert plan_patch(model).counts().get("conv_bias", 0) == count
    if count:
        patch_model(model)
    expected = infer(plain, x)
    actual = infer(model, x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    assert [act for _, _, act in kernel] == acts
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for other, leaf in zip((plain, model), inputs, strict=True):
        other(leaf).square().sum().backward()
    assert len(kernel) == len(acts)  # it has no backward
    found = [
        [leaf.grad, *(p.grad for p in other.parameters())] for other, leaf in zip((plain, model), inputs, strict=True)
    ]
    torch.testing.assert_close(*found)


def test_a_bias_that_is_taken_away_or_of_another_dtype(kernel):
    model = patch_model(nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU()))
    plain = unpatch_model(copy.deepcopy(model))
    for other in (model, plain):
        other[0].bias = None
    with torch.backends.mkldnn.flags(enabled=False):  # its SiLU rounds otherwise
        assert torch.equal(infer(model, features()), infer(plain, features()))
    torch.testing.assert_close(infer(model, features()[0]), infer(plain, features()[0]))  # without a batch
    assert not kernel


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "count", "acts"), BIASED[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_bias_of_its_own_on_a_gpu(make, count, acts, dtype, autocast):
    check_on_a_gpu(make, patch_model, dtype, autocast)


def test_weights_that_fsdp_gathers_are_not_kept(tmp_path, monkeypatch):
    """They change without a version counter that shows it, and, as here, at the same address."""
    monkeypatch.setattr(folded_layers, "states", lambda given: [])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        stock = nn.Sequential(Block(), Block()).eval()
        model, x = fold_batch_norm(copy.deepcopy(stock)), torch.randn(2, 4, 6, 6)
        infer(model, x)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            with torch.no_grad():
                assert_no_worse(model(x), infer, stock, x)
                for p in (*model.parameters(), *stock.parameters()):
                    p.mul_(1.5)
        assert all(folded_layers.folded_layer(block.bn1) is None for block in model)
    finally:
        dist.destroy_process_group()
