"""Gates, residuals, linear layers with activations and rotary embeddings: what is found, what is left, the answers."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch, unpatch_model, verify_patch
from fastlayers.patching.runtime import calls
from tests.harness import assert_no_worse, needs_gpu
from tests.ops.test_glu import StandIns
from tests.patching.harness import fused, reasons, same, tensors


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
        "return torch.tanh(x) * y",
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


# -- x * sigmoid(gate) -------------------------------------------------------------------------------------------------


EXCITE_INIT = """self.fc, self.gate, self.hard = nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.Hardsigmoid()
self.pool, self.flat, self.two = nn.AdaptiveAvgPool2d(1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)"""
SQUEEZED = {"squeeze_excite": 1, "squeeze": 1}


@pytest.mark.parametrize(
    "body",
    [
        "return x * self.gate(self.fc(x.mean((2, 3), keepdim=True)))",
        "return self.hard(self.fc(torch.mean(x, [-1, -2], True))) * x",
        "return x * torch.sigmoid(self.fc(x.mean(dim=(2, 3), keepdim=True)))",
        "return torch.mul(x, self.fc(self.pool(x)).sigmoid())",
        "s = self.flat(x.mean((2, 3), keepdim=True))\nreturn x * self.gate(self.fc(s))",
        "s = F.adaptive_avg_pool2d(x, (1, 1))\nreturn (self.gate(self.fc(0.5 * s + x.amax((2, 3), True))) * x) + s",
        "x = x + 1\nreturn x * self.gate(self.fc(x.mean((2, 3), keepdim=True))) + x",
    ],
)
def test_squeeze_excite(build, body):
    block = build(EXCITE_INIT, "x", body)
    assert fused(block) == SQUEEZED
    same(block, *tensors((2, 4, 5, 5)))
    undone(block, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    ("path", "rest"), [("timm.layers.SEModule", {"conv_bias": 1}), ("timm.layers.EffectiveSEModule", {})]
)
def test_squeeze_excite_of_timm(path, rest):
    module, name = path.rsplit(".", 1)
    block = getattr(pytest.importorskip(module), name)(16)
    assert fused(block) == {**SQUEEZED, **rest}
    same(block, *tensors((2, 16, 5, 5)))


def test_squeeze_excite_of_torchvision():
    block = pytest.importorskip("torchvision.ops.misc").SqueezeExcitation(16, 4)
    assert fused(block) == {**SQUEEZED, "conv_bias": 1}
    same(block, *tensors((2, 16, 5, 5)))
    undone(block, torch.randn(2, 16, 5, 5))


@pytest.mark.parametrize(
    "body",
    [
        "return x * F.hardsigmoid(self.fc(x))",
        "return x * self.gate(self.fc(self.two(x).mean((2, 3), keepdim=True)))",
        "return x * self.gate(self.fc(x.mean((2, 3))[:, :, None, None]))",
        "return x * self.gate(self.fc(x.mean((1, 2, 3), keepdim=True).expand(-1, 4, -1, -1)))",
        "y = x + 1\nreturn y * self.gate(self.fc(x.mean((2, 3), keepdim=True)))",
        "y = x * self.gate(self.fc(x))\nreturn y + x.mean((2, 3), keepdim=True)",
    ],
)
def test_excite(build, body):
    block = build(EXCITE_INIT, "x", body)
    assert fused(block) == {"mul": 1}
    same(block, *tensors((2, 4, 5, 5)))
    undone(block, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    "body", ["return x * self.fc(x)", "return x * 2", "x = x + 1\nx *= torch.sigmoid(x)\nreturn x"]
)
def test_no_excite(build, body):
    block = build("self.fc = nn.Conv2d(4, 4, 1)", "x", body)
    assert not fused(block)
    same(block, *tensors((2, 4, 5, 5)))


# -- residual + dropout(x), x + drop_path(gamma * f(x)) ----------------------------------------------------------------

DROP_INIT = """self.drop, self.other, self.flat = nn.Dropout(0.3), nn.Dropout(0.2), nn.Dropout(0.3, inplace=True)
self.linear, self.seq = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.4))
self.p, self.skip, self.gamma = 0.25, nn.Identity(), nn.Parameter(torch.randn(4))"""


@pytest.mark.parametrize(
    "body",
    [
        "return x + self.drop(self.linear(x))",
        "return self.drop(self.linear(x)) + x",
        "return x + F.dropout(self.linear(x), p=self.p, training=self.training)",
        "return F.dropout(self.linear(x), self.p) + x",
        "return F.dropout(self.linear(x)) + x",
        "y = self.drop(self.linear(x))\ny += x\nreturn y",
        "y = self.linear(x)\ny += self.drop(x)\nreturn y",
        "y = self.flat(self.linear(x))\nreturn x + y",
        "return x + self.seq(x)",
        "y = self.drop(x)\nz = self.linear(x)\nreturn z + y",
        "return self.other(self.linear(x)) + self.drop(x)",
        "return x + self.skip(self.drop(x))",
    ],
)
def test_dropout_add(build, body):
    block = build(DROP_INIT, "x", body)
    assert fused(block) == {"dropout_add": 1}
    same(block, *tensors((3, 4)))
    undone(block, torch.randn(3, 4))
    undone(block.eval(), torch.randn(3, 4))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 3, 4), (2, 4)])
@pytest.mark.parametrize("body", ["return y + self.drop(x)", "x = self.linear(x)\nx += self.drop(y)\nreturn x"])
def test_dropout_add_of_other_shapes(build, shape, body):
    block = build(DROP_INIT, "x, y", body)
    assert fused(block) == {"dropout_add": 1}
    same(block, *tensors((3, 4), shape))
    same(block, *tensors((3, 4)), torch.randn(shape).bfloat16())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = self.drop(x)\nz = self.other(x)\nreturn y + self.linear(z) ** 2 + x", None),
        ("y = self.drop(self.linear(x))\nz = self.seq(x)\nreturn y + z.exp()", Reason.DRAWN_BETWEEN),
        ("y = self.drop(x)\nreturn x + y, y", Reason.USED_ELSEWHERE),
        ("y = self.drop(x)\nreturn torch.add(x, y, alpha=2)", Reason.ALPHA),
        ("y = self.drop(x)\nreturn y + y", None),
        ("y = self.drop(x)\nreturn y + 1", None),
    ],
)
def test_no_dropout_add(build, body, reason):
    block = build(DROP_INIT, "x", body)
    assert reason is None or not fused(block)
    assert reason is None or reason in reasons(block)
    same(block, *tensors((3, 4)))


@needs_gpu
def test_verify_compares_with_torchs_masks(build):
    """A kernel draws another mask from a seed than torch does: large enough, verify would see nothing else."""
    block = patch_model(build(DROP_INIT, "x", "return x + self.drop(self.linear(x))").cuda())
    assert verify_patch(block, torch.randn(2**15, 4, device="cuda"))


def test_dropout_add_follows_its_layer(build):
    block = build(DROP_INIT, "x", "return x + self.drop(self.linear(x))")
    plain, x = copy.deepcopy(block), torch.randn(50, 4)
    patch_model(block)
    for module in (block, plain):
        module.drop.p = 0.9
        module.drop.eval()
    torch.testing.assert_close(block(x), plain(x), rtol=0, atol=0)
    block.drop.train(), plain.drop.train()
    outs = [torch.manual_seed(1) and module(x) for module in (block, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    seen = []
    block.drop.register_forward_hook(lambda *args: seen.append(1))
    block(x)
    assert seen == [1]


@pytest.mark.parametrize(
    "body",
    [
        "return x + self.gamma * self.linear(x)",
        "return self.linear(x) * self.gamma + x",
        "y = self.linear(x)\ny *= self.gamma\ny += x\nreturn y",
        "y = self.linear(x)\nreturn x + self.skip(y * self.gamma.view(1, -1))",
    ],
)
def test_layer_scale(build, body):
    block = build(DROP_INIT, "x", body)
    assert fused(block) == {"scale_add": 1}
    same(block, *tensors((3, 4)))
    same(block.bfloat16(), torch.randn(3, 4).bfloat16())
    block.gamma = nn.Parameter(torch.randn(4))
    same(block, torch.randn(3, 4).bfloat16())
    undone(block.float(), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("body", "fused_call"),
    [
        ("return self.drop(self.linear(x)) + x", "dropout_add"),
        ("return x + self.drop(self.linear(x))", "dropout_add"),
        ("return self.linear(x) * self.gamma + x", "scale_add"),
        ("return x + self.linear(x) * self.gamma", "scale_add"),
        ("y = self.linear(x)\ny *= self.gamma\nreturn y + x", None),
        ("y = self.drop(self.linear(x))\ny += x\nreturn y", None),
        ("x = x * 1\nx += self.linear(x) * self.gamma\nreturn x", None),
    ],
)
def test_residuals_under_autocast(build, monkeypatch, op_by_op, body, fused_call):
    """A half goes to a float32 residual as torch promotes it, unless an in-place operation says what comes out."""
    called = []
    for name in ("dropout_add", "scale_add"):
        given = getattr(calls.functional, name)

        def noted(*args, name=name, given=given):
            called.append(name)
            return given(*args)

        monkeypatch.setattr(calls.functional, name, noted)
    block = build(DROP_INIT, "x", body).eval()
    plain, x = copy.deepcopy(block), torch.randn(3, 4)
    patch_model(block)
    with torch.autocast("cpu"):
        ours, theirs = block(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    assert called == ([fused_call] if fused_call else [])


@pytest.mark.parametrize(
    "body",
    [
        "return x + (self.gamma * y).permute(0, 3, 1, 2)",
        "return x + self.skip((y * self.gamma).permute((0, -1, 1, 2)))",
        "return (y * self.gamma).permute(0, 3, 1, 2) + x",
        "return torch.permute(y * self.gamma.view(1, -1), (0, 3, 1, 2)) + x",
        "return x[:, :, :1] + (y * self.gamma).permute(0, 3, 1, 2)",
        "return x + self.path((y * self.gamma).permute(0, 3, 1, 2))",
        "return x.permute(2, 3, 0, 1) + self.path((y * self.gamma).permute(1, 2, 0, 3))",
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_layer_scale_before_a_permute(build, body, channels_last):
    pytest.importorskip("torchvision")
    path = "self.path = __import__('torchvision').ops.StochasticDepth(0.5, 'row')"
    block = build(f"{DROP_INIT}\n{path}", "x", f"y = self.linear(x.permute(0, 2, 3, 1))\n{body}")
    assert fused(block) == {"scale_add": 1}
    (x,) = tensors((3, 4, 5, 5))
    if channels_last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    same(block, x)
    undone(block, x.detach())


@pytest.mark.parametrize(
    "body", ["x += (y * self.gamma).permute(0, 3, 1, 2)\nreturn x", "y *= self.gamma\nreturn x + y.permute(0, 3, 1, 2)"]
)
def test_a_layer_scale_in_place_before_a_permute(build, body):
    block = build(DROP_INIT, "x", f"x = x * 1\ny = self.linear(x.permute(0, 2, 3, 1))\n{body}")
    same(block, *tensors((3, 4, 5, 5)))


class Unknown(nn.Module):
    def forward(self, x):
        return F.avg_pool1d(x, 3, 1, 1) - x


def test_layer_scale_of_a_residual_that_goes_through_an_identity(build):
    """timm's MetaFormer: the layers in between may write x, which the identity hands on all the same."""
    block = build(DROP_INIT, "x", "return self.skip(x) + self.linear(self.mixer(x)) * self.gamma")
    block.mixer = Unknown()
    assert fused(block) == {"scale_add": 1}, plan_patch(block)
    same(block, *tensors((3, 4)))


def test_no_layer_scale(build):
    for body in ("return x * self.gamma + self.linear.bias", "return x + x * self.linear(x)", "return x + x * 0.5"):
        assert not fused(build(DROP_INIT, "x", body))


@pytest.mark.parametrize("path", [0.0, 0.4])
@pytest.mark.parametrize("inplace", [False, True])
def test_blocks_of_timm(path, inplace):
    layers = pytest.importorskip("timm.layers")
    drop = layers.DropPath(path) if path else nn.Identity()

    class Block(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.f, self.ls, self.drop_path = nn.Conv2d(6, 6, 1), scale, drop

        def forward(self, x):
            return x + self.drop_path(self.ls(self.f(x)))

    x = torch.randn(8, 6, 3, 6)
    for scale in (layers.LayerScale(6, 0.5, inplace), layers.LayerScale2d(6, 0.5, inplace)):
        block = Block(scale)
        assert fused(block) == {"scale_add": 1}
        same(block, x)
        undone(block, x)
    block.drop_path = layers.DropPath(0.5, scale_by_keep=False)
    assert not fused(block)


def test_models_with_stochastic_depth():
    models, timm = pytest.importorskip("torchvision.models.convnext"), pytest.importorskip("timm")
    block = models.CNBlock(8, 0.5, 0.3)
    assert fused(block) == {"scale_add": 1}
    same(block, torch.randn(6, 8, 5, 5))
    undone(block, torch.randn(6, 8, 5, 5))
    options = {"depths": (1, 2, 1, 1), "dims": (8, 16, 16, 16), "drop_path_rate": 0.3, "num_classes": 3}
    model = timm.models.convnext.ConvNeXt(**options)
    undone(model, torch.randn(4, 3, 32, 32))
    patch_model(model)
    found = type(model.stages[1].blocks[1]).__fastlayers_rules__
    assert found == (("forked_convolution", 1), ("cast_layer_norm", 1), ("scale_add", 1))


# -- act(linear(x)) ----------------------------------------------------------------------------------------------------

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


def test_linear_act_heeds_changes_of_its_layer(build, served):
    block = build(LINEAR_INIT, "x", "return self.gelu(self.fc(x))")
    plain, x = copy.deepcopy(block), torch.randn(3, 4)
    patch_model(block)
    seen = []
    handle = block.fc.register_forward_hook(lambda *args: seen.append(1))
    block(x)
    assert seen == [1]
    handle.remove()
    for module in (block, plain):
        module.fc = module.bare
    torch.testing.assert_close(block(x), plain(x))


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


# -- the rotary function of an attention -------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_rotary_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name.title()}Config")(**SIZES, num_key_value_heads=2, head_dim=8)
    model = getattr(transformers, f"{name.title()}ForCausalLM")(config)
    attention = model.model.layers[0].self_attn
    scope = inspect.unwrap(type(attention).forward).__globals__
    names, rotate = set(scope), scope["apply_rotary_pos_emb"]
    assert fused(attention) == {"rotary": 1}
    undone(model, torch.randint(0, 60, (2, 7)))
    assert set(scope) == names
    assert scope["apply_rotary_pos_emb"] is rotate
    patch_model(model)
    assert type(attention) is type(model.model.layers[1].self_attn)
    calls_seen = []
    try:
        scope["apply_rotary_pos_emb"] = lambda *args: calls_seen.append(1) or rotate(*args)
        model(torch.randint(0, 60, (2, 7)))
    finally:
        scope["apply_rotary_pos_emb"] = rotate
    assert calls_seen == [1, 1]


def test_no_rotary_of_another_casting():
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo2Config(**SIZES)
    model = transformers.Olmo2ForCausalLM(config)
    assert not fused(model.model.layers[0].self_attn)


# -- activations that a library wrote out, with what is around them ----------------------------------------------------

WRITTEN_OUT = {
    "gelu_pow": "0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))))",
    "gelu_mul": "0.5 * g * (1.0 + torch.tanh(g * 0.7978845608 * (1.0 + 0.044715 * g * g)))",
}
WRITTEN_INIT = """class Act(nn.Module):
    def forward(self, g):
        return {}
self.act = Act()
self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)"""


@pytest.mark.parametrize("code", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return {} * self.up(x)", "geglu"),
        ("return self.up(x) * {}", "geglu"),
        ("u = self.up(x)\nu *= {}\nreturn u", "geglu"),
        ("return self.down({} * self.up(x))", "gated_linear"),
        ("return self.down(self.up(x) * {})", "gated_linear"),
        ("return {}", "linear_act"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_activation_that_is_written_out(build, tmp_path, code, child, body, rule, autocast):
    given = "self.act(g)" if child else f"({code})"
    path = tmp_path / "act.py"
    path.write_text(f"import math, torch\nfrom torch import nn\n{WRITTEN_INIT.partition('self.act')[0].format(code)}")
    init = (
        f"scope = {{}}\nexec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'), scope)\nAct = scope['Act']\n"
    )
    init += "self.act" + WRITTEN_INIT.partition("self.act")[2]
    block = build(init, "x", f"g = self.gate(x)\n{body.format(given)}")
    assert fused(block) == {rule: 1}, plan_patch(block)
    with torch.autocast("cpu", enabled=autocast):
        same(block, *tensors((3, 4)))
