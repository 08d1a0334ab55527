"""Gates, and the linear layers before and after them: what is found, what is left, the answers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch
from tests.ops.test_glu import StandIns
from tests.patching.harness import fused, reasons, same, tensors, undone

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
        "return torch.tanh(x) * y",
        "a = F.silu(x)\nreturn a * y, a",
        "y *= F.silu(x)\nreturn y",
    ],
)
def test_no_gates(build, body):
    block = build("pass", "x, y", body)
    assert not fused(block)
    same(block, *tensors((3, 4), (3, 4)))


def test_a_partial_that_changes_is_guarded(build):
    block = build(GATE_INIT, "x", "return self.partial(self.gate(x)) * self.up(x)")
    x = torch.randn(3, 4)
    patch_model(block)
    block.partial = functools.partial(F.gelu, approximate="none")
    torch.testing.assert_close(block(x), F.gelu(block.gate(x)) * block.up(x), rtol=0, atol=0)
    block.partial = torch.tanh
    torch.testing.assert_close(block(x), torch.tanh(block.gate(x)) * block.up(x))


# -- down(act(gate(x)) * up(x)) ----------------------------------------------------------------------------------------

DOWN_INIT = f"""{GATE_INIT}
self.down, self.bare = nn.Linear(6, 4), nn.Linear(6, 4, bias=False)
self.skip, self.drop = nn.Identity(), nn.Dropout()"""
DOWN = "return self.down(self.silu(self.gate(x)) * self.up(x))"


@pytest.fixture(params=["kernels", "composition"])
def gate_kernels(request, monkeypatch, op_by_op):
    """Both ways that gated_linear goes, on a machine without kernels."""
    if request.param == "kernels":
        kernels = StandIns()
        monkeypatch.setattr("fastlayers.ops.glu.FAMILY.kernels_for", lambda x: kernels)


@pytest.mark.parametrize("act", [act for acts in ACTS.values() for act in acts])
@pytest.mark.parametrize("form", ["{} * u", "u * {}", "{}.mul_(u)", "u.mul_({})"])
def test_gated_linear(build, act, form):
    block = build(DOWN_INIT, "x", f"g, u = self.gate(x), self.up(x)\nreturn self.down({form.format(act)})")
    assert fused(block) == {"gated_linear": 1}
    same(block, *tensors((2, 3, 4)))
    if act not in ACTS["reglu"] or form != "{}.mul_(u)":  # as above
        undone(block, torch.randn(3, 4))


@pytest.mark.parametrize(
    "body",
    [
        DOWN,
        "return self.bare(self.up(x) * F.relu(self.gate(x)))",
        "return F.linear(self.silu(self.gate(x)) * self.up(x), self.down.weight)",
        "return self.down(self.skip(self.silu(self.gate(x)) * self.up(x))) + x",
        "y = self.silu(self.gate(x)) * self.up(x)\nreturn self.gelu(self.down(y))",
    ],
)
def test_gated_linear_of_a_block(build, gate_kernels, body):
    block = build(DOWN_INIT, "x", body)
    assert fused(block)["gated_linear"] == 1
    for shape in ((3, 4), (4,), (2, 3, 4), (0, 4), (3, 5)):
        same(block, *tensors(shape))
    undone(block, torch.randn(3, 4))
    with torch.autocast("cpu"):
        same(block, *tensors((3, 4)))
    block.down.requires_grad_(False)
    block.bare.requires_grad_(False)
    same(block, *tensors((3, 4)))


@pytest.mark.parametrize("shapes", [((3, 6), (6,)), ((3, 1), (3, 6)), ((3, 6), (3, 1)), ((3, 6), (2, 6))])
@pytest.mark.parametrize("product", ["F.silu(x) * y", "y * F.silu(x)", "F.silu(x).mul_(y)"])
def test_gated_linear_of_other_shapes(build, shapes, product):
    block = build(DOWN_INIT, "x, y", f"return self.down({product})")
    assert fused(block) == {"gated_linear": 1}
    same(block, *tensors(*shapes))
    x, y = tensors((3, 6), (3, 6))
    same(block, x, y.detach().double())
    same(block, x.detach().bfloat16(), y)
    same(block, x, 2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = self.silu(self.gate(x)) * self.up(x)\nreturn self.down(y), y", Reason.USED_ELSEWHERE),
        ("y = self.silu(self.gate(x)) * self.up(x)\nreturn self.down(y) + self.bare(y)", Reason.USED_ELSEWHERE),
        ("return self.down(self.drop(self.silu(self.gate(x)) * self.up(x)))", None),
    ],
)
def test_the_gate_alone(build, body, reason):
    block = build(DOWN_INIT, "x", body)
    assert fused(block) == {"swiglu": 1}
    assert reason is None or reason in reasons(block)
    same(block, *tensors((3, 4)))


class OtherLinear(nn.Linear):
    pass


def test_the_gate_alone_before_other_layers(build):
    block = build(DOWN_INIT, "x", DOWN)
    handle = block.down.register_forward_pre_hook(lambda *args: None)
    assert fused(block) == {"swiglu": 1}
    assert Reason.HOOKED_CHILD in reasons(block)
    handle.remove()
    assert dict(plan_patch(block, exclude="down")[""].fused) == {"swiglu": 1}
    plain = block.down
    block.down = OtherLinear(6, 4)
    assert fused(block) == {"swiglu": 1}
    block.down = plain
    assert fused(block) == {"gated_linear": 1}
    nn.utils.parametrizations.orthogonal(block.down)
    assert fused(block) == {"swiglu": 1}
    same(block, *tensors((3, 4)))
    block.down = OtherLinear(6, 4)
    block.down.forward = lambda x: x
    assert fused(block) == {"swiglu": 1}


def test_gated_linear_heeds_changes_of_its_layers(build, gate_kernels):
    block = build(DOWN_INIT, "x", DOWN)
    plain, x = copy.deepcopy(block), torch.randn(3, 4)
    patch_model(block)

    def alike():
        torch.testing.assert_close(block(x), plain(x))

    seen = []
    for name in ("down", "silu"):
        for hook in ("register_forward_hook", "register_full_backward_hook"):
            handle = getattr(block._modules[name], hook)(lambda *args: seen.append(1) and None)
            block(x).sum().backward()
            assert seen.pop() == 1
            handle.remove()
    for module in (block, plain):
        module.down.weight = nn.Parameter(torch.ones(4, 6))
        module.down.bias = None
    alike()
    for module in (block, plain):
        torch.manual_seed(0)
        nn.utils.parametrizations.weight_norm(module.down)
    alike()
    for module in (block, plain):
        module.down = nn.Sequential(module.bare, nn.Tanh())
    alike()
    for module in (block, plain):
        module.down, module.silu = nn.Linear.__new__(nn.Linear), nn.Tanh()
        module.down.__dict__.update(module.bare.__dict__)
        module.down.forward = torch.sum
    alike()


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu", "relu"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"])
def test_gated_mlp_of_transformers(family, act):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{family.title()}Config")(hidden_size=32, intermediate_size=12)
    config.hidden_act = config.hidden_activation = act
    mlp = getattr(modeling, f"{family.title()}MLP")(config)
    assert fused(mlp) == {"gated_linear": 1}
    same(mlp, *tensors((2, 3, 32)))
    undone(mlp, torch.randn(2, 3, 32))


def test_gated_mlps_of_timm():
    layers = pytest.importorskip("timm.layers")
    packed = layers.GluMlp(8, 12, act_layer=nn.SiLU, gate_last=False)
    for mlp, more in ((layers.SwiGLU(8, 6), {}), (packed, {"split": 1})):  # with a dropout before the linear layer
        assert fused(mlp) == {"swiglu": 1, **more}
        same(mlp.eval(), *tensors((2, 3, 8)))
