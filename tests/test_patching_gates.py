"""Gates, residuals, linear layers with activations and rotary embeddings: what is found, what is left, the answers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from patching_harness import builder, fused, reasons, same, tensors
from torch import nn

from fastlayers.patching import Reason, patch_model, patched, unpatch_model, verify_patch


@pytest.fixture
def build(tmp_path):
    return builder(tmp_path)


def undone(model, x):
    """Patching and undoing leave the classes and the state dict as they were; a copy stays patched."""
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    patch_model(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in copy.deepcopy(model).modules()] == [type(m) for m in model.modules()]
    assert verify_patch(model, x)
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == kinds


# -- act(gate(x)) * up(x) ----------------------------------------------------------------------------------------------

ACTS = {
    "swiglu": ["F.silu(g)", "self.silu(g)", "F.silu(g, inplace=True)", "F.silu(input=g)"],
    "geglu": ["F.gelu(g)", "self.gelu(g)", "F.gelu(g, approximate='tanh')", "self.partial(g)"],
    "reglu": ["F.relu(g)", "g.relu()", "torch.relu_(g)", "self.relu(g)"],
}
GATE_INIT = """self.gate, self.up = nn.Linear(4, 6), nn.Linear(4, 6)
self.silu, self.gelu, self.relu = nn.SiLU(), nn.GELU('tanh'), nn.ReLU(inplace=True)
self.partial = __import__('functools').partial(F.gelu, approximate='tanh')"""


@pytest.mark.parametrize(("rule", "act"), [(rule, act) for rule, acts in ACTS.items() for act in acts])
@pytest.mark.parametrize("form", ["{} * u", "u * {}", "torch.mul(u, {})", "{}.mul(u)", "{}.mul_(u)", "u.mul_({})"])
def test_gates(build, rule, act, form):
    block = build(GATE_INIT, "x", f"g, u = self.gate(x), self.up(x)\nreturn {form.format(act)}")
    assert fused(block) == {rule: 1}
    same(block, *tensors((3, 4)))
    if (rule, form) != ("reglu", "{}.mul_(u)"):  # of which torch itself has no gradient
        undone(block, torch.randn(3, 4))


@pytest.mark.parametrize("body", ["return F.silu(x) * y", "x = F.silu(x)\nx *= y\nreturn x"])
@pytest.mark.parametrize("shapes", [((3, 4), (4,)), ((3, 1), (3, 4)), ((3, 4), (3, 1)), ((3, 4), (2, 4))])
def test_gates_of_other_shapes(build, body, shapes):
    block = build("pass", "x, y", body)
    assert fused(block) == {"swiglu": 1}
    same(block, *tensors(*shapes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_gates_of_other_dtypes(build, dtype):
    for body in ("return F.silu(x) * y", "x = F.silu(x)\nx *= y\nreturn x", "y = y * 1\ny *= F.silu(x)\nreturn y"):
        block = build("pass", "x, y", body)
        x, y = tensors((3, 4), (3, 4))
        same(block, x, y.detach().to(dtype))
        same(block, x.detach().to(dtype), y)


@pytest.mark.parametrize(
    "body",
    [
        "a = F.silu(x)\nreturn a * a",
        "return F.silu(x) * 2",
        "return F.silu(x) * x.shape[0]",
        "return torch.sigmoid(x) * y",
        "a = F.silu(x)\nreturn a * y, a",
        "y *= F.silu(x)\nreturn y",
    ],
)
def test_no_gates(build, body):
    block = build("pass", "x, y", body)
    assert not fused(block)
    same(block, *tensors((3, 4), (3, 4)))


def test_gate_of_a_patched_up_projection_is_guarded(build):
    block = build(GATE_INIT, "x", "return self.silu(self.gate(x)) * self.up(x)")
    x = torch.randn(3, 4)
    patch_model(block)
    seen = []
    handle = block.silu.register_forward_hook(lambda *args: seen.append(1))
    block(x)
    assert seen == [1]
    handle.remove()
    block.silu = nn.Tanh()
    torch.testing.assert_close(block(x), torch.tanh(block.gate(x)) * block.up(x))
    hooked = build(GATE_INIT, "x", "return self.silu(self.gate(x)) * self.up(x)")
    hooked.silu.register_forward_hook(lambda *args: None)
    assert Reason.HOOKED_CHILD in reasons(hooked)


def test_a_partial_that_changes_is_guarded(build):
    block = build(GATE_INIT, "x", "return self.partial(self.gate(x)) * self.up(x)")
    x = torch.randn(3, 4)
    patch_model(block)
    block.partial = functools.partial(F.gelu, approximate="none")
    torch.testing.assert_close(block(x), F.gelu(block.gate(x)) * block.up(x), rtol=0, atol=0)
    block.partial = torch.tanh
    torch.testing.assert_close(block(x), torch.tanh(block.gate(x)) * block.up(x))


@pytest.mark.parametrize(("act", "rule"), [("silu", "swiglu"), ("gelu_pytorch_tanh", "geglu"), ("relu", "reglu")])
def test_gated_mlp_of_transformers(act, rule):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=32, intermediate_size=12, hidden_act=act)
    mlp = llama.LlamaMLP(config)
    assert fused(mlp) == {rule: 1}
    undone(mlp, torch.randn(2, 3, 32))
    with patched(mlp):
        mlp(torch.randn(2, 3, 32)).sum().backward()
