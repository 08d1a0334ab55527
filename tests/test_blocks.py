"""Whole blocks under autocast: chains of convolutions and norms, and the block of a transformer.

Kernels made of torch operations stand in for those of a GPU, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DRAWS, excess, greatest_error, needs_gpu, same_bits
from test_autocast import ConvNeXtBlock, StandIns
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fastlayers import fold_batch_norm, patch_model, patch_report, unpatch_model, verify_patch
from fastlayers.ops import autocast, convolution_chain, layer_norm, transformer_block
from fastlayers.ops.activations import BY_CODE
from fastlayers.patching.runtime import calls

HALVES = [torch.float16, torch.bfloat16]


class Blocks(StandIns):
    """The raw ops of blocks, too."""

    def convolution_chain_autocast(self, x, weights, of_gate, statistics, ints, floats, about):
        self.called.append("convolution_chain_autocast")
        added, gated, gate_act, gate_end = about
        steps = len(ints) // 8
        length = steps - (added == 2)
        kept: list[Any] = [None] * steps
        results, bits, gate = [], x.new_empty(0), []

        def step(h: Tensor, at: int, residual: Tensor | None = None) -> Tensor:
            nonlocal bits
            *sizes, groups, act = ints[8 * at : 8 * at + 8]
            packs = residual is not None and act == 1
            weight, gain, shift = weights[3 * at : 3 * at + 3]
            mean, var, batches = statistics[3 * at : 3 * at + 3]
            y, *kept[at], packed = self.convolution_norm_autocast(
                h, weight, residual, gain, shift, mean, var, *floats[2 * at : 2 * at + 2], act, packs, batches,
                sizes[:2], sizes[2:4], sizes[4:], groups,
            )  # fmt: skip
            bits = packed if packs else bits
            return y

        h = x
        for at in range(length):
            residual = None
            if at == length - 1 and added:
                residual = x if added == 1 else step(x, length)
            h = step(h, at, residual)
            if at < length - 1:
                results.append(h)
            if at == gated:
                gate = self.gate_of(h, of_gate, gate_act, gate_end)
                h = h * gate[-1]
        return [h, *(t for three in kept for t in three), *results, bits, *gate]

    def gate_of(self, h: Tensor, of_gate: list[Tensor], act: int, end: int) -> list[Tensor]:
        first, bias, second, bias2 = (t.to(h.dtype) for t in of_gate)
        mean = h.mean((2, 3), keepdim=True)
        product = mean.flatten(1) @ first.flatten(1).t()
        product2 = BY_CODE[act].function(product + bias) @ second.flatten(1).t()
        opened = BY_CODE[end].function(product2 + bias2).view_as(mean)
        return [first, bias, second, bias2, mean, product, product2, opened]

    def convolution_chain_folded(self, x, weights, of_gate, residual, ints, about):
        self.called.append("convolution_chain_folded")
        added, gated, *acts = about
        assert added == (residual is not None)
        h, length = x, len(weights) // 2
        for at in range(length):
            *sizes, groups, act = ints[8 * at : 8 * at + 8]
            weight, bias = weights[2 * at : 2 * at + 2]
            assert (weight.dtype, bias.dtype) == (x.dtype, torch.float32)
            z = F.conv2d(h, weight, None, sizes[:2], sizes[2:4], sizes[4:], groups).float() + bias.view(-1, 1, 1)
            if residual is not None and at == length - 1:
                assert (residual.dtype, residual.stride()) == (x.dtype, z.stride())
                z = z + residual
            h = BY_CODE[act].function(z).to(x.dtype)
            h = h * self.gate_of(h, of_gate, *acts)[-1] if at == gated else h
        return h

    def convolution_chain_autocast_backward(self, dy, x, kept, norms, ints, about, dx, apart):
        self.called.append("convolution_chain_autocast_backward")
        added, gated, gate_act, gate_end = about
        steps = len(ints) // 8
        length = steps - (added == 2)
        results, bits, gate = kept[3 * steps :][: length - 1], kept[3 * steps + length - 1], kept[3 * steps + length :]
        left = iter(norms)
        packs = [bool(added) and at == length - 1 and ints[8 * at + 7] == 1 for at in range(steps)]
        of_norms = [(next(left), next(left) if ints[8 * at + 7] and not packs[at] else None) for at in range(steps)]
        assert next(left, None) is None
        found: list[Any] = [None] * steps

        def back(d: Tensor, at: int, given: Tensor) -> tuple[Tensor, Tensor]:
            *sizes, groups, act = ints[8 * at : 8 * at + 8]
            low, z, stats = kept[3 * at : 3 * at + 3]
            dh, dweight, dresidual, *of_norm = self.convolution_norm_autocast_backward(
                d, given, low, z, None, bits if packs[at] else None, *of_norms[at], stats, act, sizes[:2], sizes[2:4],
                sizes[4:], groups,
            )  # fmt: skip
            found[at] = [dweight, *of_norm]
            return dh, dresidual

        of_gate, again = [], None
        for at in reversed(range(length)):
            h = x if at == 0 else results[at - 1]
            is_gated = at > 0 and gated == at - 1
            d, dresidual = back(dy, at, h * gate[7] if is_gated else h)
            if at == length - 1 and added:
                again = dresidual if ints[8 * at + 7] else dy
                again = back(again, length, x)[0] if added == 2 else again
            if is_gated:
                first, bias, second, bias2, mean, product, product2, opened = gate
                opening = (d * h).sum((2, 3))
                d2 = BY_CODE[gate_end].backward(opening, product2 + bias2)
                inside = BY_CODE[gate_act].function(product + bias)
                d1 = BY_CODE[gate_act].backward(d2 @ second.flatten(1), product + bias)
                wide = [t.float() for t in (d1, mean.flatten(1), d2, inside)]
                with torch.autocast("cpu", enabled=False):
                    of_gate = [(wide[0].t() @ wide[1]).view(first.shape), wide[0].sum(0)]
                    of_gate += [(wide[2].t() @ wide[3]).view(second.shape), wide[2].sum(0)]
                d = d * opened + (d1 @ first.flatten(1)).view_as(mean) / (h.shape[2] * h.shape[3])
            dy = d
        return [dy if again is None else dy + again, *(t for three in found for t in three), *of_gate]

    def transformer_block_autocast_open(self, x, parameters, heads, dtype, eps, apart):
        assert x.is_contiguous()
        self.called.append("transformer_block_autocast_open")
        gain, shift, *rest = parameters
        qkv, bias, *low = (t.to(dtype) for t in rest)
        rows = x.flatten(0, 1)
        normed = F.layer_norm(rows, gain.shape, gain, shift, eps).to(dtype)
        parts = F.linear(normed, qkv, bias).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        return [parts, normed, torch.full((2, len(rows)), eps), qkv, *low]

    def transformer_block_autocast_close(self, x, attended, low, gain, shift, eps, act, first, second, apart):
        self.called.append("transformer_block_autocast_close")
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        s = x.flatten(0, 1) + F.linear(attended, low[0], low[1])
        normed = F.layer_norm(s, gain.shape, gain, shift, eps).to(attended.dtype)
        product = F.linear(normed, low[2])
        last = F.linear(self.bias_act_forward(product, low[3], act, first, second), low[4], low[5])
        return [(s + last).view_as(x), s, normed, torch.full((2, len(s)), eps), product]

    def transformer_block_autocast_close_backward(self, dy, of_heads, low, kept, gain, act, first, second, apart):
        self.called.append("transformer_block_autocast_close_backward")
        by_token = of_heads.transpose(1, 2)
        attended = by_token.flatten(2).flatten(0, 1)
        s, normed, stats, product = kept
        rows = dy.reshape(s.shape)
        dnormed, *of_mlp = self.mlp_autocast_backward(
            rows.to(attended.dtype), normed, product, *low[2:5], act, first, second, *[True] * 5
        )
        ds, *of_norm = layer_norm.decomposed_backward(
            dnormed, rows, s, gain, 1, float(stats[0, 0]), layer_norm.LAYER, True, True
        )
        dattended, *of_proj = self.linear_autocast_backward(ds.to(attended.dtype), attended, low[0], True, True, True)
        return [ds, dattended.view(by_token.shape).transpose(1, 2), *of_proj, *of_norm, *of_mlp]

    def transformer_block_autocast_open_backward(self, dqkv, ds, x, normed, stats, low, gain, apart):
        self.called.append("transformer_block_autocast_open_backward")
        rows = torch.stack(list(dqkv)).permute(1, 3, 0, 2, 4).reshape(len(normed), -1)
        dnormed, *of_qkv = self.linear_autocast_backward(rows, normed, low, True, True, True)
        dx, *of_norm = layer_norm.decomposed_backward(
            dnormed, ds, x.flatten(0, 1), gain, 1, float(stats[0, 0]), layer_norm.LAYER, True, True
        )
        return [dx.view_as(x), *of_norm, *of_qkv]


@pytest.fixture
def kernels(monkeypatch, op_by_op) -> Blocks:
    found = Blocks()
    monkeypatch.setattr(autocast.FAMILY, "kernels_for", lambda x: found)
    return found


# -- networks, as torchvision and timm write them ----------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, stride: int = 1, width: int = 16, shortcut: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride, 1, groups=2, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.drop_block = nn.ReLU(inplace=True), nn.Identity()
        self.downsample = None
        if shortcut:
            self.downsample = nn.Sequential(nn.Conv2d(16, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.drop_block(self.bn2(self.conv2(out))))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Basic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + out)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.conv_reduce, self.act1 = nn.Conv2d(channels, 4, 1), nn.SiLU(inplace=True)
        self.conv_expand, self.gate = nn.Conv2d(4, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x_se = x.mean((2, 3), keepdim=True)
        x_se = self.conv_expand(self.act1(self.conv_reduce(x_se)))
        return x * self.gate(x_se)


class NormAct(nn.BatchNorm2d):
    """A norm that activates, as timm's."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(x))


class Inverted(nn.Module):
    def __init__(self, gate: bool = True, skip: bool = True, stride: int = 1) -> None:
        super().__init__()
        self.conv_pw, self.bn1 = nn.Conv2d(16, 24, 1, bias=False), NormAct(24, nn.SiLU(inplace=True))
        self.conv_dw = nn.Conv2d(24, 24, 3, stride, 1, groups=24, bias=False)
        self.bn2, self.aa = NormAct(24, nn.SiLU(inplace=True)), nn.Identity()
        self.se = SqueezeExcite() if gate else nn.Identity()
        self.conv_pwl, self.bn3 = nn.Conv2d(24, 16, 1, bias=False), NormAct(16, nn.Identity())
        self.drop_path, self.has_skip = nn.Identity(), skip

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn1(self.conv_pw(x))
        x = self.se(self.aa(self.bn2(self.conv_dw(x))))
        x = self.bn3(self.conv_pwl(x))
        if self.has_skip:
            x = self.drop_path(x) + shortcut
        return x


CHAINS = {
    "bottleneck": Bottleneck,
    "shortcut": lambda: Bottleneck(2, 32, shortcut=True),
    "basic": Basic,
    "inverted": Inverted,
    "inverted without a gate": lambda: Inverted(gate=False),
    "inverted without a sum": lambda: Inverted(skip=False, stride=2),
}


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.q_norm, self.k_norm = nn.Linear(width, 3 * width), nn.Identity(), nn.Identity()
        self.attn_drop, self.norm = nn.Dropout(0.0), nn.Identity()
        self.proj, self.proj_drop = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.attn_drop.p if self.training else 0.0, is_causal=is_causal
        )
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(self.norm(x)))


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(width, 24), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(24, width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Transformer(nn.Module):
    """The block of timm's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = nn.LayerNorm(16), Attention(), nn.Identity(), nn.Identity()
        self.norm2, self.mlp, self.ls2, self.drop_path2 = nn.LayerNorm(16), Mlp(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


BLOCKS = {**CHAINS, "transformer": Transformer}
EACH_BLOCK = pytest.mark.parametrize("name", BLOCKS)


def op_of(name: str) -> str:
    return "transformer_block_autocast_open" if name == "transformer" else "convolution_chain_autocast"


def rule_of(name: str) -> str:
    return "transformer_block" if name == "transformer" else "convolution_chain"


def made(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = BLOCKS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.to(device)


def given_to(name: str, low: torch.dtype = torch.bfloat16, draw: int = 0, device: str = "cpu") -> Tensor:
    """What a block is given in a network: images in a half; in float32 a transformer, its stream, and a ConvNeXt."""
    generator = torch.Generator().manual_seed(draw)
    if name == "transformer":
        return torch.randn(3, 5, 16, generator=generator).to(device)
    if name == "convnext":
        return torch.randn(2, 8, 9, 9, generator=generator).to(device).contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 16, 7, 6, generator=generator).to(device, low)
    return x.contiguous(memory_format=torch.channels_last)


def results(model: nn.Module, x: Tensor, low: torch.dtype | None) -> list[Tensor]:
    """What it gives, its gradients, and what it knows afterwards."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, low or torch.bfloat16, enabled=low is not None):
        out = model(x)
    dy = torch.empty_like(out).copy_(torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape))
    buffers = [t for t in model.buffers() if t.is_floating_point()]
    return [out, *torch.autograd.grad(out, (x, *model.parameters()), dy), *buffers]


def assert_near(mine: list[Tensor], theirs: list[Tensor], most: float) -> None:
    """Taken together: a relu lets a few other elements through where its argument is rounded otherwise."""
    for ours, its in zip(mine, theirs, strict=True):
        assert ours.dtype == its.dtype
        assert float((ours.detach().double() - its.detach().double()).norm()) <= most * float(its.detach().norm())


def assert_as_near(name: str, low: torch.dtype, device: str = "cpu", draws: int = 4 * DRAWS) -> None:
    """As near to the results of float64 as torch's own."""
    errors = []
    for draw in range(draws):
        x, stock = given_to(name, low, draw, device), made(name, device)
        exact = results(copy.deepcopy(stock).double(), x.double(), None)
        theirs = results(copy.deepcopy(stock), x, low)
        errors.append([greatest_error(*pair) for pair in zip(theirs, exact, strict=True)])
    mine = results(patch_model(made(name, device)), x, low)
    assert [t.dtype for t in mine] == [t.dtype for t in theirs]
    assert [t.squeeze().stride() for t in mine] == [t.squeeze().stride() for t in theirs]
    for place, (ours, true, *allowed) in enumerate(zip(mine, exact, *errors, strict=True)):
        assert excess(ours, true, max(allowed)) is None, place


#: Those without a relu, which lets other elements through where they are rounded otherwise.
EACH_SMOOTH_BLOCK = pytest.mark.parametrize(
    "name", [name for name in BLOCKS if name.startswith(("inverted", "transformer"))]
)


@EACH_SMOOTH_BLOCK
@pytest.mark.parametrize("low", HALVES, ids=str)
def test_gradients(kernels, name, low):
    assert_as_near(name, low)
    assert op_of(name) in kernels.called
    assert [called for called in kernels.called if called.endswith("backward")]


def results_of_the_steps(name: str, x: Tensor, low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(convolution_chain, "convolution_chain", lambda *args: None)
        patch.setattr(transformer_block, "transformer_block", lambda *args: None)
        return results(patch_model(made(name, x.device.type)), x, low)


@EACH_BLOCK
@pytest.mark.parametrize("low", HALVES, ids=str)
def test_a_block_is_its_steps(kernels, monkeypatch, name, low):
    """To the bit, but where a sum or a gate is rounded once less, or an attention computed in another order."""
    x = given_to(name, low)
    steps = results_of_the_steps(name, x, low, monkeypatch)
    assert op_of(name) not in kernels.called
    found = results(patch_model(made(name)), x, low)
    assert op_of(name) in kernels.called
    for ours, theirs in zip(found, steps, strict=True):
        assert name.startswith(("inverted", "transformer")) or same_bits(ours, theirs)
    assert_near(found, steps, 0.02)


@EACH_BLOCK
def test_a_block_is_found_and_undone(kernels, name):
    stock = made(name)
    model = patch_model(copy.deepcopy(stock))
    assert patch_report(model).counts()[rule_of(name)] == 1
    x = given_to(name, torch.float32)
    assert verify_patch(copy.deepcopy(stock), x)
    for low in (None, torch.bfloat16):
        unpatched = unpatch_model(patch_model(copy.deepcopy(stock)))
        assert all(map(same_bits, results(unpatched, x, low), results(copy.deepcopy(stock), x, low)))


@EACH_BLOCK
def test_calls_that_blocks_are_not_for(kernels, name):
    """They run what they ran without them: all without autocast, and chains where they do not train."""
    model, x = patch_model(made(name)), given_to(name)
    model(x.float())
    if name != "transformer":
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(x)
        with torch.autocast("cpu", torch.bfloat16):
            model.eval()(x)
    assert op_of(name) not in kernels.called


def in_use(name: str, device: str = "cpu") -> nn.Module:
    """In eval, with statistics of images that it was trained with."""
    model = made(name, device)
    with torch.no_grad():
        for draw in range(3):
            model(given_to(name, draw=draw, device=device).float() * 2 + 1)
    return model.eval()


EACH_CHAIN = pytest.mark.parametrize("name", CHAINS)


@EACH_CHAIN
@pytest.mark.parametrize("patched", [False, True], ids=["folded", "patched and folded"])
def test_a_folded_chain(kernels, name, patched):
    stock = in_use(name)
    model = copy.deepcopy(stock)
    fold_batch_norm(patch_model(model) if patched else model)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert patch_report(model).counts()["fold_batch_norm"] == norms
    x = given_to(name)

    def run(network: nn.Module = model, x: Tensor = x, low: bool = True) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            return network(x)

    with torch.no_grad():
        theirs, exact = run(stock), run(stock, x.float(), low=False)
        found = run()
        assert kernels.called == ["convolution_chain_folded"]
        assert_near([found], [theirs], 0.02)
        assert found.stride() == theirs.stride()
        torch.testing.assert_close(run(x=x.float(), low=False), exact)  # the steps answer
    with torch.inference_mode():
        assert same_bits(run().clone(), found)
    model.requires_grad_(False)
    assert same_bits(run(), found)
    assert kernels.called == ["convolution_chain_folded"] * 3
    y = run(x=x.clone().requires_grad_())  # of the input
    assert y.requires_grad
    assert_near([y], [theirs], 0.02)
    model.train()
    run()
    assert kernels.called[3:] in ([], ["convolution_chain_autocast"])


def test_what_looks_on_at_a_folded_chain_or_changes_it(kernels):
    stock = in_use("inverted")
    model, x = fold_batch_norm(copy.deepcopy(stock)).requires_grad_(False), given_to("inverted")

    def served(x: Tensor = x) -> bool:
        kernels.called.clear()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert_near([model(x)], [stock(x)], 0.02)
        return "convolution_chain_folded" in kernels.called

    assert served()
    for path in ("conv_dw", "bn2", "bn2.act", "aa", "se", "se.conv_reduce", "se.gate", "drop_path"):
        seen = []
        layer = model.get_submodule(path)
        handle = layer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(type(module)))
        assert not served(), path
        assert len(seen) == 1
        handle.remove()
    assert served()
    assert served(x.contiguous()) is False  # torch would lay the sum out otherwise
    assert not served(x.float())  # and give it in float32
    for network in (model, stock):
        network.bn2.act = nn.Tanh()
    assert not served()
    for network in (model, stock):
        network.bn2.act = nn.SiLU()
    assert served()
    for network in (model, stock):
        network.conv_dw.padding_mode = "circular"
    assert not served()
    for network in (model, stock):
        network.conv_dw.padding_mode = "zeros"
        nn.init.normal_(network.se.conv_expand.weight, generator=torch.Generator().manual_seed(0))
        nn.init.normal_(network.conv_dw.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    assert served()  # by the new weights
    with torch.autocast("cpu", torch.bfloat16):
        model.se.requires_grad_(True)
        kernels.called.clear()
        assert model(x).requires_grad  # of the gate's parameters
    assert not kernels.called


class Pair(nn.Module):
    """Two folded convolutions, and what ``forward`` makes of them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.of_pair = nn.ReLU(), forward
        self.gate, self.nothing = SqueezeExcite(16), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.of_pair(self, x)


def adds_its_input(self: Pair, x: Tensor) -> Tensor:
    y = self.relu(self.bn1(self.conv1(x)))
    return self.relu(self.bn2(self.conv2(y)) + y)


def adds_what_a_gate_made(self: Pair, x: Tensor) -> Tensor:
    y = self.gate(self.bn1(self.conv1(x)))
    return self.bn2(self.conv2(y)) + y


def adds_it_behind_an_identity(self: Pair, x: Tensor) -> Tensor:
    y = self.nothing(self.bn1(self.conv1(x)))
    h = self.bn2(self.conv2(y))
    h += y
    return h


def writes_its_input_in_between(self: Pair, x: Tensor) -> Tensor:
    x = x * 2
    y = self.bn1(self.conv1(x))
    x.add_(1)
    return self.bn2(self.conv2(y)) + x


def sums_twice(self: Pair, x: Tensor) -> Tensor:
    y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    y = y + x
    y += self.nothing(x)
    return F.relu(y)


@pytest.mark.parametrize("patched", [False, True], ids=["folded", "patched and folded"])
@pytest.mark.parametrize(
    ("forward", "chains"),
    [
        (adds_its_input, 0),
        (adds_what_a_gate_made, 0),
        (adds_it_behind_an_identity, 0),
        (writes_its_input_in_between, 0),
        (sums_twice, 1),
    ],
)
def test_what_is_no_chain_is_folded_all_the_same(kernels, forward, chains, patched):
    torch.manual_seed(0)
    stock, x = Pair(forward).eval(), given_to("basic")
    model = copy.deepcopy(stock)
    fold_batch_norm(patch_model(model) if patched else model, strict=True)
    assert patch_report(model).counts()["fold_batch_norm"] == 2
    assert patch_report(model).counts().get("add_relu", 0) == (patched and forward is sums_twice)
    with torch.no_grad():
        torch.testing.assert_close(model(x.float()), stock(x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            assert_near([model(x)], [stock(x)], 0.02)
    assert kernels.called.count("convolution_chain_folded") == chains


@pytest.mark.parametrize(("name", "value"), [("stride", 1), ("stride", (1,)), ("dilation", 1), ("padding", (1,))])
@pytest.mark.parametrize("training", [False, True])
def test_numbers_that_are_no_pairs(kernels, name, value, training):
    stock = in_use("basic")
    model = patch_model(copy.deepcopy(stock)) if training else fold_batch_norm(copy.deepcopy(stock))
    for network in (model, stock):
        setattr(network.train(training).conv2, name, value)
    x = given_to("basic")
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        assert_near([model(x)], [stock(x)], 0.02)
    assert not [op for op in kernels.called if "chain" in op]


@needs_gpu
@EACH_CHAIN
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_folded_chain_on_a_gpu(name, low, layout, monkeypatch):
    stock = in_use(name, "cuda")
    exact, model = copy.deepcopy(stock).double(), fold_batch_norm(patch_model(copy.deepcopy(stock)))
    calls_of, raw = [], autocast.FAMILY.kernels_for(given_to(name, device="cuda"))
    of_chain = raw.convolution_chain_folded
    monkeypatch.setattr(raw, "convolution_chain_folded", lambda *args: calls_of.append(1) or of_chain(*args))
    errors = []
    for draw in range(4 * DRAWS):
        x = given_to(name, low, draw, "cuda").contiguous(memory_format=layout)
        with torch.autocast("cuda", low), torch.no_grad():
            mine, theirs, true = model(x), stock(x), exact(x.double())
        errors.append(greatest_error(theirs, true))
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
    assert len(calls_of) == (0 if layout is torch.contiguous_format and is_sum(name) else 4 * DRAWS)
    assert excess(mine, true, max(errors)) is None


class OneChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


@needs_gpu
def test_the_layout_of_an_image_of_one_channel_on_a_gpu():
    """It has both layouts; the result has the one that torch gives it."""
    stock, x = OneChannel().cuda(), torch.randn(4, 1, 7, 6, device="cuda")
    patched = patch_model(copy.deepcopy(stock))
    folded = fold_batch_norm(copy.deepcopy(stock).eval()).requires_grad_(False)
    with torch.autocast("cuda", torch.bfloat16):
        assert type(patched(x).grad_fn).__name__ == "_ConvolutionChainBackward"
        strides = {model(x).stride() for model in (stock, patched, folded)}
    assert len(strides) == 1


def is_sum(name: str) -> bool:
    """Whether a chain ends with a sum. One with a shortcut's ends before it."""
    return name in ("bottleneck", "basic", "inverted", "inverted without a gate")


INFERENCE = pytest.mark.parametrize(("name", "block"), [("transformer", Transformer), ("convnext", ConvNeXtBlock)])


@INFERENCE
def test_inference(kernels, name, block):
    """The block as it trains, to the bit, and nothing recorded."""
    torch.manual_seed(0)
    stock = block()
    model, x = patch_model(copy.deepcopy(stock)), given_to(name)

    def run(network: nn.Module = model) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(x)

    trained, model = run(), model.eval()
    found = [run()]
    with torch.no_grad():
        found.append(run())
        theirs = run(stock)
    with torch.inference_mode():
        found.append(run().clone())
    model.requires_grad_(False)
    found.append(run())
    for dropout in (m for m in model.mlp.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.5  # nothing is dropped in eval
    found.append(run())
    assert [out.requires_grad for out in found] == [True, *[False] * 4]
    assert all(same_bits(trained, out) for out in found)
    assert_near([trained], [theirs], 0.02)
    assert len([op for op in kernels.called if op.endswith(("_open", "block_autocast"))]) == 6
    kernels.called.clear()
    with torch.no_grad():  # graphs hold what Inductor fuses
        graph = torch.compile(model, fullgraph=True, backend="eager")
        assert_near([run(graph)], [theirs], 0.02)
    assert not kernels.called


@needs_gpu
@pytest.mark.parametrize("low", HALVES, ids=str)
@INFERENCE
def test_inference_on_a_gpu(name, block, low):
    torch.manual_seed(0)
    stock = block().cuda().eval().requires_grad_(False)
    exact, model = copy.deepcopy(stock).double(), patch_model(copy.deepcopy(stock))
    errors = []
    for draw in range(4 * DRAWS):
        x = given_to(name, draw=draw, device="cuda")
        with torch.autocast("cuda", low):
            mine, theirs = model(x), stock(x)
        true = exact(x.double())
        errors.append(greatest_error(theirs, true))
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
    assert excess(mine, true, max(errors)) is None


@EACH_BLOCK
def test_second_derivatives(kernels, name):
    found = []
    for model in (made(name), patch_model(made(name))):
        x = given_to(name, torch.float16).requires_grad_()
        given = [x, *model.parameters()]
        with torch.autocast("cpu", torch.float16), sdpa_kernel(SDPBackend.MATH):
            out = model(x).float().sin()
        with sdpa_kernel(SDPBackend.MATH):  # torch derives no other attention twice
            dx, dweight = torch.autograd.grad(out.sum(), given[:2], create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().mean() + dweight.square().mean(), given))
    assert op_of(name) in kernels.called
    assert_near(*found, 0.1)


@EACH_BLOCK
def test_backward_twice_and_checkpointed(kernels, name):
    model, x = patch_model(made(name)), given_to(name).requires_grad_()
    given = [x, *model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x).float().sum()
        first = torch.autograd.grad(out, given, retain_graph=True)
        again = torch.autograd.grad(out, given)
        kept = checkpoint(model, x, use_reentrant=False).float().sum()
    for grads in (again, torch.autograd.grad(kept, given)):
        assert all(map(same_bits, first, grads))


@EACH_BLOCK
def test_parameters_that_change_before_the_backward(kernels, name):
    model, x = patch_model(made(name)), given_to(name).requires_grad_()
    weight = next(model.parameters())
    convolution = next(m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)).weight
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x).float().sum()
    expected = torch.autograd.grad(out, x, retain_graph=True)
    with torch.no_grad():
        convolution.mul_(2)
    assert same_bits(*expected, *torch.autograd.grad(out, x, retain_graph=True))
    with pytest.raises(RuntimeError, match="it was modified in place since: it is at version"):
        torch.autograd.grad(out, (x, weight), create_graph=True)


@EACH_BLOCK
@pytest.mark.parametrize("kind", ["parameters", "input"])
def test_what_is_frozen(kernels, name, kind):
    """Parameters: the steps answer. The input: it gets no gradient."""
    stock = made(name)
    model, x = patch_model(copy.deepcopy(stock)), given_to(name, torch.float16)
    found = []
    for network in (model, stock):
        if kind == "parameters":
            for parameter in list(network.parameters())[::2]:
                parameter.requires_grad_(False)
        given = x.clone().requires_grad_(kind == "parameters")
        with torch.autocast("cpu", torch.float16):
            out = network(given)
        wanted = [t for t in (given, *network.parameters()) if t.requires_grad]
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), wanted)])
    assert_near(*found, 0.05)
    assert (op_of(name) in kernels.called) == (kind == "input")


def test_the_steps_of_a_transformer_are_fused_too(kernels, monkeypatch):
    """Of a stream in a half, which a block is not for, and of frozen parameters."""
    model, x = patch_model(made("transformer")), given_to("transformer")
    called: list[dict[str, Any]] = []
    real = calls.add_layer_norm
    monkeypatch.setattr(calls, "add_layer_norm", lambda *args, **rest: called.append(rest) or real(*args, **rest))
    for given, frozen in ((x.bfloat16(), False), (x, True)):
        model.requires_grad_(not frozen)
        called.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(given.requires_grad_())
        assert [options["casts"] is not None for options in called] == [True, True]
    assert op_of("transformer") not in kernels.called


def called_in(model: nn.Module, x: Tensor) -> set[str]:
    """The modules that are called, of others only attributes are read."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: seen.add(name))
    model(x)
    return seen


@EACH_BLOCK
def test_what_looks_on_at_a_block_or_changes_it(kernels, name):
    model, x = patch_model(made(name)), given_to(name)

    def served(x: Tensor = x) -> bool:
        kernels.called.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        return op_of(name) in kernels.called

    assert served()
    for path in called_in(made(name), given_to(name, torch.float32)) - {""}:
        seen: list[Any] = []
        layer = model.get_submodule(path)
        handle = layer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(type(module)))
        assert not served(), path
        assert seen, path
        handle.remove()
    assert served()
    model.eval()
    assert served() == (name == "transformer")
    model.train()
    assert served(x[:1]) == (name == "transformer")  # of one image there might be one value in a channel
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.5
        assert not served()
        dropout.p = 0.0
    assert served()
    for norm in (m for m in model.modules() if type(m).__name__ == "BatchNorm2d"):
        norm.momentum = None
        assert not served()
        norm.momentum = 0.1
        norm.track_running_stats = False
        assert not served()
        norm.track_running_stats = True
        norm.eval()
        assert not served()
        norm.train()
    assert served()


def test_a_norm_that_is_replaced(kernels):
    model = patch_model(made("bottleneck"))
    model.bn2 = nn.GroupNorm(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(given_to("bottleneck"))
    assert out.shape == (4, 16, 7, 6)
    assert not kernels.called or "convolution_chain_autocast" not in kernels.called


def test_a_shortcut_with_more_in_it_is_left(kernels):
    model = made("shortcut")
    model.downsample.insert(0, nn.AvgPool2d(1))
    counts = patch_report(patch_model(model)).counts()
    assert counts["convolution_chain"] == 1  # of the first two
    x = given_to("shortcut")
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert "convolution_chain_autocast" in kernels.called


# -- the kernels -------------------------------------------------------------------------------------------------------


@needs_gpu
@EACH_SMOOTH_BLOCK
@pytest.mark.parametrize("low", HALVES, ids=str)
def test_gradients_on_a_gpu(name, low):
    assert_as_near(name, low, "cuda")


@needs_gpu
@EACH_BLOCK
@pytest.mark.parametrize("low", HALVES, ids=str)
def test_a_block_is_as_near_as_its_steps_on_a_gpu(monkeypatch, name, low):
    """To the results of float64, each tensor taken as a whole: sums are rounded in another order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = given_to(name, low, device="cuda")
    steps = results_of_the_steps(name, x, low, monkeypatch)
    found = results(patch_model(made(name, "cuda")), x, low)
    exact = results(made(name, "cuda").double(), x.double(), None)
    for place, (ours, theirs, true) in enumerate(zip(found, steps, exact, strict=True)):
        # That of a 1x1 weight's gradient is the weight's own, whatever cuDNN gives it.
        assert ours.squeeze().stride() == theirs.squeeze().stride()
        mine, its = (float((t.detach().double() - true.detach()).norm()) for t in (ours, theirs))
        assert mine <= 2 * its, place


@needs_gpu
@EACH_BLOCK
def test_blocks_serve_on_a_gpu(name):
    model, x = patch_model(made(name, "cuda")), given_to(name, device="cuda").requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = model(x)
    assert type(out.grad_fn).__name__ in ("_ConvolutionChainBackward", "_TransformerBlockBackward")
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *model.parameters()))
