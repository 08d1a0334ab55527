"""Norms of which autocast only casts the result, and residual streams that a norm forks off: what is found, what is
left alone, and bits that stay what they were."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fastlayers.patching import patch_model
from tests.patching.harness import clone, fused, same, spelled, tensors

CASTING = (
    F.linear,
    F.conv2d,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    F.scaled_dot_product_attention,
)


class Given(TorchFunctionMode):
    """The dtype that the first operation which autocast casts for is given."""

    dtype = None
    needs_operations = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CASTING and self.dtype is None:
            self.dtype = args[0].dtype
        return func(*args, **(kwargs or {}))


def run(module, inputs, autocast=True):
    """Output, gradients, and the dtype that the first casting operation was given."""
    inputs = clone(inputs)
    module.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Given() as given:
        out = module(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    sum(o.float().sin().sum() for o in outs).backward()
    leaves = (*module.parameters(), *(v for v in inputs if v.requires_grad))
    return [*outs, *(leaf.grad for leaf in leaves)], given.dtype


def narrows(module, *inputs):
    """Whether the patched norm answers in bfloat16 under autocast; all bits are those of the unpatched module."""
    patched = patch_model(copy.deepcopy(module))
    for training, autocast in itertools.product((True, False), (False, True)):
        module.train(training), patched.train(training)
        expected, before = run(module, inputs, autocast)
        actual, after = run(patched, inputs, autocast)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert before in (None, torch.float32)
        assert autocast or after == before
    return after == torch.bfloat16


NORM = "self.norm = nn.LayerNorm(8)\nself.fc = nn.Linear(8, 8)\nself.w = nn.Parameter(torch.randn(8, 8))\n"


# -- what autocast casts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "inputs", "body"),
    [
        spelled("return self.fc(self.norm(x))", "x"),
        spelled("y = self.norm(x)\nn = y.shape[0]\nreturn self.fc(y.reshape(n, -1, 8).transpose(0, 1)[:, 0])", "x"),
        spelled("return F.linear(F.layer_norm(x, (8,)), self.w)", "x"),
        spelled("return F.linear(F.rms_norm(x, (8,), eps=1e-6), self.w)", "x"),
        spelled("return self.norm(x) @ self.w", "x"),
        spelled("return torch.matmul(self.norm(x), x.mT)", "x"),
        spelled("return F.scaled_dot_product_attention(self.norm(x), x, x)", "x"),
        spelled("s = x + y\nreturn self.fc(self.norm(s)), s"),
        spelled("return self.seq(self.norm(x))", "x", "self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())"),
        spelled("return self.fc(self.id(self.norm(x)))", "x", "self.id = nn.Identity()"),
        spelled("return x + self.fc(self.norm(x))", "x"),
        spelled("return x + self.fc(self.rms(x))", "x", "self.rms = nn.RMSNorm(8)"),
    ],
)
def test_cast_results(build, init, inputs, body):
    block = build(NORM + init, inputs, body)
    assert narrows(block, *tensors(*[(2, 3, 8)] * len(inputs.split(", "))))


def test_images(build):
    body = "return self.conv(F.layer_norm(x.permute(0, 2, 3, 1), (3,), self.g).permute(0, 3, 1, 2))"
    block = build("self.conv = nn.Conv2d(3, 4, 1)\nself.g = nn.Parameter(torch.rand(3))", "x", body)
    assert fused(block) == {"channel_layer_norm": 1}
    assert narrows(block, *tensors((2, 3, 5, 4)))
    padded = build("self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode='circular')\nself.g = None", "x", body)
    assert not narrows(padded, *tensors((2, 3, 5, 4)))  # pads in the dtype that it is given


@pytest.mark.parametrize(
    ("init", "inputs", "body"),
    [
        spelled("return self.norm(x)", "x"),
        spelled("y = self.norm(x)\nreturn self.fc(y), y", "x"),
        spelled("y = self.norm(x)\nreturn self.fc(y) + y", "x"),
        spelled("y = self.norm(x)\nreturn self.fc(y) + F.linear(y, self.w)", "x"),  # gradients are added in float32
        spelled("y = self.norm(x)\nreturn y @ y.mT", "x"),
        spelled("return self.fc(F.dropout(self.norm(x), 0.5, self.training))", "x"),
        spelled("return self.fc(self.drop(self.norm(x)))", "x", "self.drop = nn.Dropout(0.5)"),
        spelled("return self.fc(2 * self.norm(x))", "x"),
        spelled("return self.fc(F.relu(self.norm(x)))", "x"),
        spelled("y = self.norm(x)\nreturn self.fc(y.add_(1))", "x"),
        spelled("y = self.norm(x)\nreturn self.fc(y.to(y.dtype))", "x"),
        spelled("return self.fc(self.norm(x).expand(2, 2, 3, 8))", "x"),
        spelled("return self.fc(self.norm(x)[:, [0, 0, 1]])", "x"),
        spelled("return self.fc(torch.cat((self.norm(x), x)))", "x"),
        spelled("y = self.norm(x)\ntorch.set_autocast_enabled('cpu', False)\nreturn self.fc(y)", "x"),
        spelled("y = self.norm(x)\ny.register_hook(lambda g: g)\nreturn self.fc(y)", "x"),
        spelled("s = x + y\nt = self.norm(s)\nreturn self.fc(t), t, s"),
    ],
)
def test_what_else_sees_the_result(build, init, inputs, body):
    block = build(NORM + init, inputs, body)
    assert "_casts_" not in (getattr(type(patch_model(copy.deepcopy(block))), "__fastlayers_source__", "") or "")
    if "set_autocast" not in body:
        narrows(block, *tensors(*[(2, 3, 8)] * len(inputs.split(", "))))


# -- into children ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)
        self.gate = None

    def forward(self, x, mask=None, causal=False):
        b, n, c = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.drop.p if self.training else 0.0, causal)
        y = self.proj(y.transpose(1, 2).reshape(b, n, c))
        return y if gate is None else y * gate


class Mlp(nn.Module):
    def __init__(self, casts=True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.casts = casts

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x if self.casts else x * 2)))


class Block(nn.Module):
    def __init__(self, casts=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.mlp = Attention(), Mlp(casts)
        self.scale, self.path = nn.Identity(), nn.Identity()

    def forward(self, x, mask=None):
        x = x + self.path(self.scale(self.attn(self.norm1(x), mask=mask, causal=True)))
        return x + self.path(self.mlp(self.norm2(x)))


def test_a_block():
    block = Block()
    assert fused(block) == {"forked_layer_norm": 1, "add_layer_norm": 1}
    assert narrows(block, *tensors((2, 5, 8)))
    patched = patch_model(block)
    seen = set()
    for linear in (patched.attn.qkv, patched.mlp.fc1):
        with Spy(linear) as spy:
            run(patched, tensors((2, 5, 8)))
        seen |= spy.dtypes
    assert seen == {torch.bfloat16}


class Spy(TorchFunctionMode):
    """The dtypes that F.linear is given for a layer, without a hook, which would be heeded."""

    needs_operations = False

    def __init__(self, layer):
        self.weight, self.dtypes = layer.weight, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[1] is self.weight:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Subclass(nn.Parameter):
    pass


class Handing(nn.Module):
    def forward(self, x, mask=None, causal=False):
        return x


def lora(block):
    block.attn.qkv = nn.Sequential(block.attn.qkv, nn.Identity())


def gated(block):
    torch.manual_seed(0)
    block.attn.gate = nn.Linear(8, 8)


def doubled(block):
    block.attn.forward = lambda x, **options: Attention.forward(block.attn, 2 * x, **options)


def subclass(block):
    block.attn.qkv.weight = Subclass(block.attn.qkv.weight.detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.attn.register_forward_pre_hook(lambda module, args: None),
        lambda block: block.attn.qkv.register_forward_hook(lambda module, args, out: None),
        lambda block: block.attn.qkv.register_full_backward_hook(lambda *_: None),
        lora,
        gated,
        doubled,
        subclass,
    ],
)
def test_what_changes_after_patching(change):
    """What the recording does not know makes the norm answer as it did; the rest stays fused."""
    block, inputs = Block(), tensors((2, 5, 8))
    patched = patch_model(copy.deepcopy(block))
    assert run(patched, inputs)[1] == torch.bfloat16
    change(block), change(patched)
    (expected, _), (actual, dtype) = run(block, inputs), run(patched, inputs)
    assert dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_child_that_is_gone():
    """Another one, without the children that the recording knew."""
    block, inputs = Block(), tensors((2, 5, 8))
    patched = patch_model(copy.deepcopy(block))
    block.attn, patched.attn = Handing(), Handing()
    torch.testing.assert_close(run(patched, inputs)[0], run(block, inputs)[0], rtol=0, atol=0)


def test_a_child_that_does_more():
    block = Block(casts=False)
    narrows(block, *tensors((2, 5, 8)))
    with Spy(block.mlp.fc1) as spy:
        run(patch_model(block), tensors((2, 5, 8)))
    assert spy.dtypes == {torch.float32}


def test_excluded_children_are_not_absorbed():
    block = patch_model(Block(), exclude="norm1")
    assert run(block, tensors((2, 5, 8)))[1] == torch.float32


def test_float64_is_left_alone():
    """autocast does not cast it."""
    block = Block().double()
    inputs = [t.detach().double().requires_grad_() for t in tensors((2, 5, 8))]
    expected, before = run(block, inputs)
    actual, after = run(patch_model(block), inputs)
    assert before == after == torch.float64
    assert all(map(torch.equal, expected, actual))


# -- the residual stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "inputs", "body"),
    [
        spelled("return x + torch.tanh(self.norm(x))", "x"),
        spelled("return torch.add(torch.tanh(self.norm(x)), x)", "x"),
        spelled("return x + torch.tanh(F.layer_norm(x, (8,), self.w[0]))", "x"),
        spelled("a = x * 2\ny = a + self.norm(a)\nreturn a + y", "x"),
        spelled("y = torch.tanh(self.norm(x))\nz = y * 2\nz.add_(1)\nreturn x + z", "x"),
    ],
)
def test_forks(build, init, inputs, body):
    block = build(NORM + init, inputs, body)
    assert fused(block) == {"forked_layer_norm": 1}
    same(block, *tensors((2, 3, 8)))


@pytest.mark.parametrize(
    ("init", "inputs", "body"),
    [
        spelled("x += torch.tanh(self.norm(x))\nreturn x", "x"),
        spelled("return torch.tanh(self.norm(x)), x", "x"),
        spelled("y = self.norm(x)\nreturn y, x * 2", "x"),
        spelled("y = self.norm(x)\nx.mul_(2)\nreturn x + y", "x"),
        spelled("y = self.norm(x)\nx.view(-1).mul_(2)\nreturn x + y", "x"),
        spelled("y = self.norm(x)\nkeep(x)\nreturn x + y", "x"),
        spelled("z = x + 1\ny = self.norm(x)\nreturn z + y", "x"),
    ],
)
def test_not_forked(build, init, inputs, body):
    block = build(NORM + init, inputs, body)
    assert "forked_layer_norm" not in fused(block)
    same(block, *tensors((2, 3, 8)))


WIDE, LOW = torch.float32, torch.bfloat16


@pytest.mark.parametrize("norm", ["nn.LayerNorm(4)", "nn.RMSNorm(4)"])
@pytest.mark.parametrize("dtypes", [(WIDE, LOW), (LOW, WIDE), (WIDE, WIDE)], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_the_layout_of_a_sum_of_two_dtypes(build, norm, dtypes, turned):
    """The first operand decides on it: a ``view`` of the sum may follow."""
    block = build(f"self.norm = {norm}", "x, y", "s = x + y\nreturn self.norm(s), s")
    x, y = (
        torch.randn(2, 4, 3).mT.to(dtype) if turn else torch.randn(2, 3, 4).to(dtype)
        for dtype, turn in zip(dtypes, turned, strict=True)
    )
    expected = block(x, y)
    patch_model(block)
    torch.testing.assert_close(block(x, y), expected, check_stride=True)
