"""What is replaced after patching: a forward, a helper, a global function, a function or a layer of torch.

A patched model does then what the stock model does, and what it did before once that is undone. Every case runs op by
op and as regions: the third call runs recorded code.
"""

from __future__ import annotations

import copy
import sys
import types
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import PatchError, fold_batch_norm, patch_model, unpatch_model
from fastlayers.patching.capture.lookups import read_code

HERE = sys.modules[__name__]


def gated(gate, x):
    return F.silu(gate) * x


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class Tools:
    @staticmethod
    def double(x):
        return x + x


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = 1e-6

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * self._norm(x.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class Scores(nn.Module):
    """Attention that takes the softmax by itself, with a rotary embedding."""

    def __init__(self, size):
        super().__init__()
        self.q = nn.Linear(size, size)
        self.k = nn.Linear(size, size)

    def forward(self, x):
        q, k = self.q(x)[:, None], self.k(x)[:, None]
        cos, sin = x.cos(), x.sin()
        q, k = rotary(q, k, cos, sin)
        scores = (q @ k.transpose(-1, -2)) * 0.25
        return (scores.softmax(-1) @ x[:, None])[:, 0]


class Base(nn.Module):
    scale = 2.0

    def helper(self, x):
        return F.gelu(x) * self.scale

    def parent(self, x):
        return F.relu(x) + x


class MLP(Base):
    def __init__(self, size):
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * size, size)
        self.gate = nn.Linear(size, size)

    @property
    def shift(self):
        return 0.5

    def parent(self, x):
        return super().parent(x) + self.shift

    def forward(self, x):
        h = self.down(self.act(self.up(x)))
        return self.parent(self.helper(h)) + gated(self.gate(x), Tools.double(x))


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.norm1 = nn.LayerNorm(size)
        self.attn = Attention(size)
        self.norm2 = nn.LayerNorm(size)
        self.scores = Scores(size)
        self.norm3 = RMSNorm(size)
        self.mlp = MLP(size)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.scores(self.norm2(x))
        return x + self.mlp(self.norm3(x))


class Cell(nn.Module):
    """Convolution, BatchNorm and activation, of which the BatchNorm can be folded."""

    def __init__(self, size=4):
        super().__init__()
        self.conv1 = nn.Conv2d(size, size, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(size, size, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.rest = nn.Sequential(nn.GroupNorm(2, size), nn.SiLU(), nn.Dropout(0.0))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.rest(self.relu(out)) + x


class Loop(nn.Module):
    """A forward that is cut into segments."""

    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc = nn.Linear(size, size)

    def forward(self, x, **options):
        residual = x
        x = residual + self.fc(x)
        x = self.norm(x)
        if options.get("twice"):
            x = x * 2
        x, _ = rotary(x, x, x[:, 0].cos(), x[:, 0].sin())
        return F.gelu(x) + residual


class Encoder(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attn = nn.MultiheadAttention(size, 2, batch_first=True)
        self.fc = nn.Linear(size, size)
        self.act = nn.GELU()

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.act(self.fc(self.norm(x)))


def step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def changed(function):
    """A function that gives something else."""

    def other(*args, **kwargs):
        out = function(*args, **kwargs)
        return tuple(t if t is None else t * 1.5 for t in out) if isinstance(out, tuple) else out * 1.5

    return other


#: A class of models; what has the attribute, or finds it in a model; and the name of the attribute.
REPLACED = {
    "forward": (Block, Block, "forward"),
    "forward of a child": (Block, MLP, "forward"),
    "forward of a norm": (Block, RMSNorm, "forward"),
    "forward of segments": (Loop, Loop, "forward"),
    "forward by type()": (Block, lambda model: type(model[0]), "forward"),
    "forward of a child by type()": (Block, lambda model: type(model[0].attn), "forward"),
    "forward of a norm by type()": (Block, lambda model: type(model[0].norm3), "forward"),
    "forward of a layer by type()": (Block, lambda model: type(model[0].norm1), "forward"),
    "forward of an instance": (Block, lambda model: model[0], "forward"),
    "forward of a child's instance": (Block, lambda model: model[0].mlp, "forward"),
    "forward of a layer's instance": (Block, lambda model: model[0].norm2, "forward"),
    "method": (Block, Attention, "split"),
    "method of a base class": (Block, Base, "helper"),
    "method of a subclass": (Block, MLP, "helper"),
    "method by type()": (Block, lambda model: type(model[0].attn), "split"),
    "method of an instance": (Block, lambda model: model[0].attn, "split"),
    "method of a norm": (Block, RMSNorm, "_norm"),
    "method of a norm's instance": (Block, lambda model: model[0].norm3, "_norm"),
    "method by super()": (Block, Base, "parent"),
    "static method": (Block, Tools, "double"),
    "global function": (Block, HERE, "gated"),
    "global rotary function": (Block, HERE, "rotary"),
    "global function of a rotary function": (Block, HERE, "rotate_half"),
    "F.scaled_dot_product_attention": (Block, F, "scaled_dot_product_attention"),
    "F.gelu": (Block, F, "gelu"),
    "F.silu": (Block, F, "silu"),
    "F.linear": (Block, F, "linear"),
    "F.layer_norm": (Block, F, "layer_norm"),
    "torch.layer_norm": (Block, torch, "layer_norm"),
    "torch.rsqrt": (Block, torch, "rsqrt"),
    "torch.cat": (Block, torch, "cat"),
    "Tensor.softmax": (Block, torch.Tensor, "softmax"),
    "nn.Linear.forward": (Block, nn.Linear, "forward"),
    "nn.LayerNorm.forward": (Block, nn.LayerNorm, "forward"),
    "nn.GELU.forward": (Block, nn.GELU, "forward"),
    "F.gelu in segments": (Loop, F, "gelu"),
    "global rotary function in segments": (Loop, HERE, "rotary"),
    "global function of a rotary function in segments": (Loop, HERE, "rotate_half"),
    "torch.cat in segments": (Loop, torch, "cat"),
    "nn.LayerNorm.forward in segments": (Loop, nn.LayerNorm, "forward"),
    "nn.Conv2d.forward": (Cell, nn.Conv2d, "forward"),
    "nn.Conv2d._conv_forward": (Cell, nn.Conv2d, "_conv_forward"),
    "nn.BatchNorm2d.forward": (Cell, nn.BatchNorm2d, "forward"),
    "nn.ReLU.forward": (Cell, nn.ReLU, "forward"),
    "nn.SiLU.forward": (Cell, nn.SiLU, "forward"),
    "nn.GroupNorm.forward": (Cell, nn.GroupNorm, "forward"),
    "nn.Dropout.forward": (Cell, nn.Dropout, "forward"),
    "nn.Sequential.forward": (Cell, nn.Sequential, "forward"),
    "F.conv2d": (Cell, F, "conv2d"),
    "F.batch_norm": (Cell, F, "batch_norm"),
    "torch.batch_norm": (Cell, torch, "batch_norm"),
    "F.relu": (Cell, F, "relu"),
    "F.group_norm": (Cell, F, "group_norm"),
    "nn.MultiheadAttention.forward": (Encoder, nn.MultiheadAttention, "forward"),
    "F.linear in F": (Encoder, F, "linear"),
    "F.scaled_dot_product_attention in F": (Encoder, F, "scaled_dot_product_attention"),
    "F.multi_head_attention_forward": (Encoder, F, "multi_head_attention_forward"),
}
#: The code of what is rewritten in these models.
STOCK_FORWARDS = {
    kind.forward.__code__
    for kind in (Attention, Scores, MLP, RMSNorm, Block, Cell, Loop, Encoder, nn.LayerNorm, nn.GroupNorm)
}


def model_of(case):
    """The model of a case, and an input for it."""
    kind = REPLACED[case][0]
    torch.manual_seed(0)
    return nn.Sequential(kind()), torch.randn((2, 4, 6, 6) if kind is Cell else (2, 3, 8))


@pytest.fixture(params=["as regions", "op by op"])
def way(request):
    if request.param == "op by op":
        request.getfixturevalue("op_by_op")


@contextmanager
def replaced(case, model):
    """Replace an attribute of a class or a module, or of what has it in a model."""
    _, owner, name = REPLACED[case]
    owner = owner(model) if owner.__class__ is types.FunctionType else owner
    stock = getattr(owner, "__fastlayers_original__", owner) if isinstance(owner, type) else owner
    # Not pytest's monkeypatch, which before version 9.1 left a bound method on an instance.
    with mock.patch.object(owner, name, changed(getattr(stock, name))):
        yield


def results(model, x, calls=1):
    """Output and gradients of each of several calls, and the output without gradients."""
    found = []
    for _ in range(calls):
        found.append(step(model, x) if model.training else None)
        with torch.no_grad():
            found.append(model(x))
    return found


def stock_code(model, x):
    """The forwards of stock layers, and those of this file, that a call runs: those that a guard did not let pass."""
    seen = set()

    def profile(frame, event, arg):
        if event == "call" and frame.f_code in STOCK_FORWARDS:
            seen.add(frame.f_code)

    with torch.no_grad():
        sys.setprofile(profile)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    return seen


def expect(model, x, expected):
    torch.testing.assert_close(results(model, x, 3), expected * 3)


@pytest.mark.parametrize("case", REPLACED)
def test_replaced(case, way):
    stock, x = model_of(case)
    model = patch_model(copy.deepcopy(stock))
    before = results(stock, x)
    with replaced(case, stock):
        expected = results(stock, x)
    assert not torch.equal(before[1], expected[1])
    expect(model, x, before)
    assert not stock_code(model, x)
    with replaced(case, model):
        expect(model, x, expected)
    expect(model, x, before)
    assert not stock_code(model, x)


@pytest.mark.parametrize("case", [case for case, (kind, *_) in REPLACED.items() if kind is Cell])
def test_replaced_in_a_folded_model(case, way):
    stock, x = model_of(case)
    model = fold_batch_norm(patch_model(copy.deepcopy(stock.eval())))
    before = results(stock, x)
    with replaced(case, stock):
        expected = results(stock, x)
    expect(model, x, before)
    with replaced(case, model):
        expect(model, x, expected)
    expect(model, x, before)


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.filterwarnings("ignore:the model holds modules whose forward was replaced on the instance")
def test_patched_while_replaced(case, op_by_op):
    read_code.cache_clear()
    stock, x = model_of(case)
    model, before = copy.deepcopy(stock), results(stock, x)
    with replaced(case, stock):
        expected = results(stock, x)
    with replaced(case, model):
        expect(patch_model(model), x, expected)
    expect(model, x, before)
    expect(unpatch_model(model), x, before)
    assert not stock_code(patch_model(stock), x)  # Nothing is remembered of what was replaced.


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=2.0):
        return F.relu(x + self.norm(x)) * scale


def test_replaced_forward_with_another_signature():
    """A generated forward passes its defaults on, which would silently win over those of the new one."""
    model, x = patch_model(nn.Sequential(Scaled())), torch.randn(2, 8)
    stock, before = Scaled.forward, model(x)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Scaled, "forward", lambda self, x, scale=2.0, shift=1.0: stock(self, x, scale) + shift)
        torch.testing.assert_close(model(x), before + 1)
        monkeypatch.setattr(Scaled, "forward", lambda self, x, scale=3.0: stock(self, x, scale))
        with pytest.raises(PatchError, match="another default of scale"):
            model(x)
    torch.testing.assert_close(model(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["forward", "method of a base class", "F.gelu", "nn.LayerNorm.forward"])
def test_replaced_under_compile(case):
    """The guards break no graph, and Dynamo captures another one where they fail."""
    stock, x = model_of(case)
    model = patch_model(copy.deepcopy(stock))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(x)
        torch.testing.assert_close(before, stock(x))
        with replaced(case, model):
            torch.testing.assert_close(compiled(x), stock(x))
        torch.testing.assert_close(compiled(x), before)


def test_the_code_of_every_function_of_torch_is_read():
    """That of torch.norm has an empty tuple among its constants."""
    named = [f for scope in (torch, F, torch.functional) for f in vars(scope).values()]
    for function in filter(lambda f: isinstance(f, types.FunctionType), named):
        assert isinstance(read_code(function, None), tuple)
