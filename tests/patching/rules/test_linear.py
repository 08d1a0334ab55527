"""Linear layers with activations, and activations alone: what is found, what is left, the answers."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model
from fastlayers.patching.runtime import calls
from tests.harness import assert_no_worse
from tests.patching.harness import fused, reasons, same, tensors, undone

LINEAR_INIT = """self.fc, self.bare, self.skip = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Identity()
self.gelu, self.relu = nn.GELU(), nn.ReLU(inplace=True)"""


@pytest.fixture(params=["kernels", "composition"])
def served(request, monkeypatch, op_by_op):
    """Both ways that linear_act goes, on a machine without kernels."""

    def fits(x, weight, bias):  # test_linear_act_under_autocast has the rest
        return bias is not None and bias.dtype == x.dtype and not torch.is_autocast_enabled("cpu")

    if request.param == "kernels":
        monkeypatch.setattr("fastlayers.patching.runtime.calls.bias_in_act", fits)


@pytest.mark.parametrize(
    "body",
    [
        "return self.gelu(self.fc(x))",
        "return F.gelu(self.fc(x), approximate='tanh')",
        "return self.relu(self.fc(x))",
        "return F.silu(self.skip(self.fc(x)))",
        "return F.hardswish(self.fc(x))",
    ],
)
def test_linear_act(build, served, body):
    block = build(LINEAR_INIT, "x", body)
    assert fused(block) == {"linear_act": 1}
    for shape in ((3, 4), (4,), (2, 3, 4), (0, 4), (3, 5)):
        same(block, *tensors(shape))
    same(block, torch.randn(3, 4).double())
    undone(block, torch.randn(3, 4))
    with torch.autocast("cpu"):
        same(block, *tensors((3, 4)))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_linear_act_under_autocast(build, monkeypatch, op_by_op, low):
    """The bias goes to the activation's kernel in the product's dtype, and its gradient is float32, as torch has it."""
    given = []

    def bias_act(x, bias, act):
        given.append((x.dtype, bias.dtype))
        return F.gelu(x + bias)

    monkeypatch.setattr(calls, "bias_in_act", lambda x, weight, bias: True)
    monkeypatch.setattr(calls.functional, "bias_act", bias_act)
    block = build(LINEAR_INIT, "x", "return self.gelu(self.fc(x))")
    plain, x = copy.deepcopy(block), torch.randn(3, 4)

    def answer(block, x):
        with torch.autocast("cpu", low):
            out = block(x)
        return out, torch.autograd.grad(out.float().sin().sum(), list(block.fc.parameters()))

    assert_no_worse(answer(patch_model(block), x), answer, plain, x)
    assert given == [(low, low)]


def test_linear_act_of_a_sequential(served):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert fused(model) == {"linear_act": 1, "mlp": 1}  # of two that overlap the first
    same(model, torch.randn(3, 4))
    undone(model, torch.randn(3, 4))
    tied = nn.Linear(4, 4)
    shared = nn.Sequential(tied, nn.GELU(), tied, nn.GELU())
    assert fused(shared) == {"mlp": 1}
    same(shared, torch.randn(3, 4))


def test_no_linear_act(build):
    for body in ("return self.gelu(self.bare(x))", "y = self.fc(x)\nreturn self.gelu(y), y", "return self.fc(x).exp()"):
        block = build(LINEAR_INIT, "x", body)
        assert not fused(block)
        same(block, *tensors((3, 4)))
    block = build(LINEAR_INIT, "x", "return self.gelu(self.fc(x))")
    block.fc.register_forward_pre_hook(lambda *args: None)
    assert Reason.HOOKED_CHILD in reasons(block)
    mixed = build(LINEAR_INIT, "x", "return self.gelu(self.fc(x))")
    mixed.fc.weight.data = mixed.fc.weight.data.bfloat16()
    assert Reason.BIAS_DTYPE in reasons(mixed)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return F.gelu(x.exp(), approximate='tanh')", None),  # torch's kernel is at the memory limit
        ("return F.gelu(x)", "gelu"),
        ("return F.mish(x)", "mish"),
        ("return F.glu(x, 0)", "glu"),
        ("return F.glu(x)", "glu"),
        ("return F.mish(x, inplace=True)", None),
        ("return F.gelu(x, approximate='none') + self.gelu(x)", "gelu"),
    ],
)
def test_activation_functions(build, body, rule):
    block = build(LINEAR_INIT, "x", body)
    assert fused(block) == ({rule: 1} if rule else {})
    for shape in ((4, 4), (2, 3, 2)):
        same(block, *tensors(shape))


def test_what_bias_act_serves(monkeypatch):
    (weight, bias), x = nn.Linear(256, 256).parameters(), torch.randn(512, 256)
    assert not calls.bias_in_act(x, weight, bias)  # a CPU adds the bias in the product
    kernels = SimpleNamespace(unasked=False)
    monkeypatch.setattr(calls.bias_act, "FAMILY", SimpleNamespace(kernels_for=lambda x: kernels))
    assert calls.bias_in_act(x, weight, bias)
    assert not calls.bias_in_act(x[:2], weight, bias)
    assert not calls.bias_in_act(x.bfloat16(), weight, bias)
    with torch.autocast("cpu"):  # casts all of them
        assert calls.bias_in_act(x, weight, bias)
        assert calls.bias_in_act(x.bfloat16(), weight, bias)
        assert calls.bias_in_act(x, weight.bfloat16(), bias.bfloat16())
        assert not calls.bias_in_act(x.double(), weight, bias)
