"""Norms with what surrounds them: every spelling found, what is not safe left alone, the same answers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastlayers import backends
from fastlayers.patching import Reason, fold_batch_norm, patch_model, plan_patch, unpatch_model, verify_patch
from tests.harness import assert_no_worse
from tests.patching.harness import fused, reasons, same, tensors

BN = "self.conv = nn.Conv2d(3, 4, 3, padding=1)\nself.bn = nn.BatchNorm2d(4)\n"
ACTS = {
    "nn.ReLU()": "F.relu(y)",
    "nn.ReLU(inplace=True)": "F.relu(y, inplace=True)",
    "nn.SiLU()": "F.silu(y)",
    "nn.SiLU(inplace=True)": "F.silu(y, inplace=True)",
    "nn.GELU()": "F.gelu(y)",
    "nn.GELU('tanh')": "F.gelu(y, approximate='tanh')",
    "nn.Hardswish()": "F.hardswish(y)",
    "nn.ReLU6(inplace=True)": "F.relu6(y, True)",
    "nn.LeakyReLU()": "F.leaky_relu(y)",
    "nn.LeakyReLU(0.01, inplace=True)": "F.leaky_relu(y, 0.01, True)",
}
OTHER_ACTS = {
    "nn.LeakyReLU(0.2)": "F.leaky_relu(y, 0.2)",
    "nn.ELU()": "F.elu(y)",
    "nn.Tanh()": "torch.tanh(y)",
    "nn.Sequential()": "y * 2",
}


def image(*shape):
    torch.manual_seed(3)
    return torch.randn(shape or (2, 3, 5, 4), requires_grad=True)


# -- norm and activation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "call"), ACTS.items())
@pytest.mark.parametrize("norm", ["nn.BatchNorm2d(4)", "nn.GroupNorm(2, 4)"])
def test_norm_and_activation(build, layer, call, norm):
    name = "batch_norm_act" if "Batch" in norm else "group_norm_act"
    init = BN + f"self.norm = {norm}\nself.act = {layer}\nself.skip = nn.Identity()"
    for body in (
        "return self.act(self.norm(self.conv(x)))",
        f"y = self.norm(self.conv(x))\nreturn {call}",
        "return self.act(self.skip(self.norm(self.conv(x))))",
    ):
        block = build(init, "x", body)
        assert fused(block) == {name: 1}, body
        same(block, image())


@pytest.mark.parametrize(("layer", "call"), OTHER_ACTS.items())
def test_other_activations_are_left_alone(build, layer, call):
    block = build(BN + f"self.act = {layer}", "x", "return self.act(self.bn(self.conv(x)))")
    assert not fused(block)
    block = build(BN, "x", f"y = self.bn(self.conv(x))\nreturn {call}")
    assert not fused(block)
    same(block, image())


@pytest.mark.parametrize(
    "norm",
    [
        "nn.BatchNorm2d(4, momentum=None)",
        "nn.BatchNorm2d(4, momentum=0.5, eps=1e-2)",
        "nn.BatchNorm2d(4, track_running_stats=False)",
        "nn.BatchNorm2d(4, affine=False)",
        "nn.BatchNorm2d(4, affine=False, track_running_stats=False)",
    ],
)
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return F.relu(self.norm(self.conv(x)))", "batch_norm_act"),
        ("y = self.conv(x)\nreturn F.relu(self.norm(y) + y)", "batch_norm_add_act"),
    ],
)
def test_every_kind_of_batch_norm(build, norm, body, rule):
    block = build(BN + f"self.norm = {norm}", "x", body)
    assert fused(block) == {rule: 1}
    same(block, image())


@pytest.mark.parametrize(
    ("norm", "shape"),
    [("nn.BatchNorm1d(3)", (4, 3)), ("nn.BatchNorm1d(3)", (4, 3, 5)), ("nn.BatchNorm3d(3)", (2, 3, 2, 3, 4))],
)
def test_batch_norm_of_other_dimensions(build, norm, shape):
    block = build(f"self.bn = {norm}", "x", "return F.relu(self.bn(x * 2) + x)")
    assert fused(block) == {"batch_norm_add_act": 1}
    same(block, image(*shape))
    with pytest.raises(ValueError, match=r"expected [235]D"):
        patch_model(block)(torch.randn(2, 3, 4, 4))


INSTANCE_NORMS = {
    "nn.InstanceNorm2d(4)": (2, 4, 5, 4),
    "nn.InstanceNorm2d(4, affine=True, eps=1e-2)": (2, 4, 5, 4),
    "nn.InstanceNorm2d(4, affine=True, track_running_stats=True)": (2, 4, 5, 4),
    "nn.InstanceNorm2d(4, momentum=None, track_running_stats=True)": (2, 4, 5, 4),
    "nn.InstanceNorm1d(4, affine=True)": (2, 4, 5),
    "nn.InstanceNorm3d(4)": (2, 4, 3, 2, 2),
}


@pytest.mark.parametrize(("norm", "shape"), INSTANCE_NORMS.items())
@pytest.mark.parametrize("act", ["nn.ReLU(inplace=True)", "nn.SiLU()", "nn.LeakyReLU()"])
def test_instance_norm_and_activation(build, norm, shape, act):
    block = build(
        f"self.norm, self.act, self.skip = {norm}, {act}, nn.Identity()", "x", "return self.act(self.norm(x))"
    )
    assert fused(block) == {"instance_norm_act": 1}
    same(block, image(*shape))
    same(block, image(*shape[1:]))  # no batch
    same(block, image(2, 3, *shape[2:])) if "affine" in norm else None  # other channels: an error
    same(block, image(2, 4))  # and too few dimensions, but for InstanceNorm1d
    ended = nn.Sequential(nn.Sequential(nn.Identity(), block.norm), block.skip, block.act)
    assert fused(ended) == {"instance_norm_act": 1}
    same(ended, image(*shape))


def test_instance_norm_of_other_channels_warns_as_torch(build):
    block = build("self.norm, self.act = nn.InstanceNorm2d(4), nn.ReLU()", "x", "return self.act(self.norm(x))")
    expected = block(x := image(2, 3, 5, 4).detach())
    with pytest.warns(UserWarning, match="does not match num_features"):
        torch.testing.assert_close(patch_model(block)(x), expected)


def test_statistics_of_an_instance_norm_are_not_written_late(build):
    init = "self.norm = nn.InstanceNorm2d(3, track_running_stats=True)"
    body = "out = self.norm(x)\nm = self.norm.running_mean * 1\nreturn F.relu(out), m"
    block = build(init, "x", body)
    assert not fused(block)
    assert reasons(block) == {Reason.WRITTEN_BETWEEN}
    same(block, image())


# -- batch_norm, residual, activation ----------------------------------------------------------------------------------

RESIDUAL = [
    "out = self.bn(self.conv(x))\nout += y\nreturn self.act(out)",
    "out = self.bn(self.conv(x))\nout += y\nreturn self.inner(out)",
    "out = self.bn(self.conv(x)).add_(y)\nreturn F.relu(out, inplace=True)",
    "return F.relu(self.bn(self.conv(x)) + y)",
    "return self.act(y + self.bn(self.conv(x)))",
    "return torch.add(y, self.bn(self.conv(x)), alpha=1).relu()",
    "z = y * 2\nz += self.bn(self.conv(x))\nreturn self.inner(z)",
    "return self.act(self.skip(self.skip(self.bn(self.conv(x))) + y))",
    "out = self.bn(self.conv(x))\nif self.none is not None:\n    y = self.none(y)\nout += y\nreturn out.relu_()",
    "out = self.bn(self.conv(x))\ny = self.down(y)\nout += y\nreturn out.relu_()",
    "return self.act(self.bn(self.conv(x)) + self.other(y))",
]
INIT = (
    BN
    + """self.act = nn.ReLU()
self.inner = nn.ReLU(inplace=True)
self.skip = nn.Identity()
self.other = nn.BatchNorm2d(4)
self.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
self.none = None"""
)


@pytest.mark.parametrize("body", RESIDUAL)
def test_batch_norm_residual_activation(build, body):
    block = build(INIT, "x, y", body)
    assert fused(block) == {"batch_norm_add_act": 1}
    same(block, image(), image(2, 4, 5, 4))


@pytest.mark.parametrize("body", RESIDUAL)
@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (4, 1, 1), (1, 4, 5, 4), (3, 4, 5, 4), (2, 1, 5, 4)])
def test_a_residual_that_broadcasts_or_does_not_fit(build, body, shape):
    same(build(INIT, "x, y", body), image(), image(*shape))


@pytest.mark.parametrize("body", RESIDUAL[:7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_residual_of_another_dtype(build, body, dtype):
    y = image(2, 4, 5, 4).detach().to(dtype).requires_grad_(dtype.is_floating_point)
    same(build(INIT, "x, y", body), image(), y)


def test_batch_norm_and_residual_alone(build):
    block = build(INIT, "x, y", "return torch.tanh(self.bn(self.conv(x)) + y)")
    assert fused(block) == {"batch_norm_add": 1}
    same(block, image(), image(2, 4, 5, 4))


def test_the_largest_fusion_wins(build):
    body = """out = self.act(self.bn(self.conv(x)))
out = self.other(out) + y
z = F.relu(out)
return F.relu(z + y)"""
    block = build(INIT, "x, y", body)
    assert fused(block) == {"batch_norm_add_act": 1, "batch_norm_act": 1, "add_relu": 1}
    same(block, image(), image(2, 4, 5, 4))


@pytest.mark.parametrize(
    ("body", "rules", "reason"),
    [
        ("out = self.bn(self.conv(x))\nreturn F.relu(out), out", {}, Reason.USED_ELSEWHERE),
        ("out = self.bn(self.conv(x)) + y\nreturn F.relu(out), out", {"batch_norm_add": 1}, Reason.USED_ELSEWHERE),
        ("out = self.bn(self.conv(x))\nreturn F.relu(out + y) + out", {"add_relu": 1}, Reason.USED_ELSEWHERE),
        ("out = torch.add(self.bn(self.conv(x)), y, alpha=2)\nreturn F.relu(out)", {}, Reason.ALPHA),
        ("y += self.bn(self.conv(x))\nreturn F.relu(y)", {}, Reason.VISIBLE_MUTATION),
        (
            "out = self.bn(self.conv(x))\nm = self.bn.running_mean * 1\nreturn F.relu(out), m",
            {},
            Reason.WRITTEN_BETWEEN,
        ),
        ("out = self.bn(y)\nz = self.bn(y * 2)\nreturn F.relu(out) + z.tanh()", {}, Reason.WRITTEN_BETWEEN),
        ("out = self.bn(z := y * 2)\nz.mul_(3)\nreturn F.relu(out)", {}, Reason.WRITTEN_BETWEEN),
    ],
)
def test_what_is_not_safe_is_left_alone(build, body, rules, reason):
    block = build(INIT, "x, y", body)
    if reason is not Reason.WRITTEN_BETWEEN or "mul_" in body or "running" in body:
        assert fused(block) == rules
    assert reason in reasons(block)
    same(block, image(), image(2, 4, 5, 4))


def test_a_norm_called_twice(build):
    """Statistics are updated in the order of the calls, and counted twice."""
    block = build(INIT, "x", "return F.relu(self.bn(F.relu(self.bn(self.conv(x)))))")
    assert fused(block) == {"batch_norm_act": 2}
    same(block, image())


def test_sync_batch_norm_is_left_alone():
    class Norm(nn.SyncBatchNorm):
        def forward(self, x):
            return F.relu(super().forward(x))

    for model in (nn.SyncBatchNorm(4), Norm(4), nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU())):
        assert not plan_patch(model).patched


class Synchronised(nn.Module):
    """Every place of a BatchNorm that a patch fuses: with a residual, with an activation, in a Sequential, alone."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.other, self.alone = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.stem(x)
        out = self.bn(self.conv(x))
        out += x
        out = F.silu(self.other(self.relu(out)))
        return self.alone(out)


@pytest.mark.parametrize("fold", [False, True])
def test_sync_batch_norm_takes_the_place_of_patched_layers(fold):
    """Converted after patching: the original forwards answer, and what is undone is the rest of the model."""
    model = Synchronised()
    for layer in (model.stem[1], model.bn, model.other, model.alone):
        nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    model.train()(image())
    stock = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    expected = model.eval()(image())
    patch_model(model)
    if fold:
        fold_batch_norm(model)
        with torch.no_grad():
            model(image())  # so that folded weights are there
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model) is model
    synced = {name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    assert synced == {"bn", "other", "alone", "stem.1"}
    with torch.no_grad():
        torch.testing.assert_close(model(image()), expected)
    for training in (False, True):  # in one process they train on a CPU as well
        model.train(training), stock.train(training)
        torch.testing.assert_close(model(image()), stock(image()))
        torch.testing.assert_close(model.state_dict(), stock.state_dict())
    unpatch_model(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    torch.testing.assert_close(model(image()), stock(image()))


# -- the sum that is normalised ---------------------------------------------------------------------------------------

SUMS = [
    ("x = x + y\nz = self.norm(x)\nreturn x + z * 2", "add_layer_norm"),
    ("x = self.fc(x)\nx += y\nreturn x, self.norm(x)", "add_layer_norm"),
    ("x = self.fc(x)\nx += y\nz = self.norm(x)\nx = x + z\nreturn x", "add_layer_norm"),
    ("return self.norm(x + y)", "add_layer_norm"),
    ("return self.norm(torch.add(x, y))", "add_layer_norm"),
    ("return F.layer_norm(x + y, (4,), self.norm.weight, self.norm.bias, self.norm.eps)", "add_layer_norm"),
    ("x = x + y\nreturn x, F.layer_norm(x, (4,))", "add_layer_norm"),
    ("x = x + y\nreturn x, F.layer_norm(x, (3, 4))", "add_layer_norm"),
    ("x = x + y\nreturn x, self.rms(x)", "add_rms_norm"),
    ("x = self.fc(x)\nx += y\nreturn x, self.rms(x)", "add_rms_norm"),
    ("x = x + y\nreturn x, F.rms_norm(x, [4])", "add_rms_norm"),
    (
        "x = x + y\nreturn F.rms_norm(input=x, normalized_shape=[4], weight=self.rms.weight, eps=1e-3), x * 3",
        "add_rms_norm",
    ),
]
NORMS = "self.fc = nn.Linear(4, 4)\nself.norm = nn.LayerNorm(4)\nself.rms = nn.RMSNorm(4)\nself.keep = nn.Identity()"


@pytest.mark.parametrize(("body", "rule"), SUMS)
@pytest.mark.parametrize(
    "shapes", [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 4)), ((3, 4), (2, 3, 4)), ((2, 3, 4), (4,))]
)
def test_sum_and_norm(build, body, rule, shapes):
    block = build(NORMS, "x, y", body)
    assert fused(block) == {rule: 1}
    same(block, *tensors(*shapes))


@pytest.mark.parametrize(("body", "rule"), SUMS)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("y", [torch.float32, torch.bfloat16, torch.float64])
def test_sum_and_norm_of_several_dtypes(build, body, rule, x, y):
    block = build(NORMS, "x, y", body).to(torch.promote_types(x, y))
    a, b = (t.detach().to(d).requires_grad_() for t, d in zip(tensors((2, 3, 4), (2, 3, 4)), (x, y), strict=True))
    with backends.backend("eager"):  # Kernels round less than torch's composition of 16 bits does.
        same(block, a, b)


def test_a_chain_of_residuals(build):
    body = "x = x + self.fc(y)\nx = x + self.fc(self.norm(x))\nx = x + self.rms(x)\nreturn self.norm(x)"
    block = build(NORMS, "x, y", body)
    assert fused(block) == {"add_layer_norm": 2, "add_rms_norm": 1}
    same(block, *tensors((2, 3, 4), (2, 3, 4)))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("s = x + y\nt = self.fc(s)\nreturn self.norm(s) + t", Reason.USED_BETWEEN),
        ("s = torch.add(x, y, alpha=2)\nreturn self.norm(s)", Reason.ALPHA),
        ("x += y\nreturn self.norm(x)", Reason.VISIBLE_MUTATION),
        ("z = x * 2\ns = z + y\nz.mul_(2)\nreturn self.norm(s) + z", Reason.WRITTEN_BETWEEN),
    ],
)
def test_sums_that_are_left_alone(build, body, reason):
    block = build(NORMS, "x, y", body)
    assert not fused(block)
    assert reasons(block) == {reason}
    same(block, *tensors((2, 3, 4), (2, 3, 4)))


def test_a_sum_with_a_number_is_not_one(build):
    block = build(NORMS, "x", "return self.norm(x + 1)")
    assert not fused(block)


# -- norms as functions -----------------------------------------------------------------------------------------------

FUNCTIONS = [
    ("return F.layer_norm(x, x.shape[1:])", "layer_norm"),
    ("return F.layer_norm(x, normalized_shape=(5, 4), eps=1e-3)", "layer_norm"),
    ("return F.rms_norm(x, (4,))", "rms_norm"),
    ("return F.group_norm(x, 3)", "group_norm"),
    ("return F.instance_norm(x, weight=self.w, bias=self.b, eps=1e-3)", "instance_norm"),
    ("return F.instance_norm(x, self.m, self.v, None, None, self.training, 0.3)", "instance_norm"),
    ("return F.relu(F.instance_norm(x, None, None, self.w, self.b))", "instance_norm_act"),
    ("return F.group_norm(x, 1, self.w, self.b, 1e-3)", "group_norm"),
    ("return F.silu(F.group_norm(x, 1, weight=self.w, bias=self.b))", "group_norm_act"),
    ("return F.batch_norm(x, self.m, self.v, self.w, self.b, self.training, 0.3, 1e-3)", "batch_norm"),
    ("return F.batch_norm(x, None, None, training=True)", "batch_norm"),
    ("return F.relu(F.batch_norm(x, self.m, self.v, training=self.training))", "batch_norm_act"),
    ("return F.relu(F.batch_norm(x, self.m, self.v, self.w, training=self.training) + x)", "batch_norm_add_act"),
    (
        "y = F.batch_norm(x, self.m, self.v, self.w, training=self.training)\ny += x\nreturn F.relu(y)",
        "batch_norm_add_act",
    ),
    ("y = F.batch_norm(x, self.m, self.v)\ny += x\nreturn y", "batch_norm_add"),
    (
        "return F.layer_norm(x.permute(0, 2, 3, 1), (3,), self.w, self.b, 1e-3).permute(0, 3, 1, 2)",
        "channel_layer_norm",
    ),
    ("return torch.permute(F.layer_norm(x.permute((0, 2, 3, 1)), [3]), (0, -1, 1, 2))", "channel_layer_norm"),
    ("return F.layer_norm(x.permute(0, 2, 3, 1), (4, 3)).permute(0, 3, 1, 2)", "layer_norm"),
    ("return F.layer_norm(x.permute(0, 3, 2, 1), (3,)).permute(0, 3, 1, 2)", "layer_norm"),
    ("y = x.permute(0, 2, 3, 1)\nreturn F.layer_norm(y, (3,)).permute(0, 3, 1, 2), y", "layer_norm"),
]
TENSORS = """self.w = nn.Parameter(torch.randn(3))
self.b = nn.Parameter(torch.randn(3))
self.register_buffer("m", torch.randn(3))
self.register_buffer("v", torch.rand(3) + 1)"""


@pytest.mark.parametrize(("body", "rule"), FUNCTIONS)
def test_norms_as_functions(build, body, rule):
    block = build(TENSORS, "x", body)
    assert fused(block) == {rule: 1}
    same(block, image())
    channels_last = image().detach().to(memory_format=torch.channels_last)
    expected = block.eval()(channels_last)
    actual = patch_model(block)(channels_last)
    if isinstance(actual, torch.Tensor):
        assert actual.stride() == expected.stride()


class LayerNorm(nn.LayerNorm):
    """As timm's: one known operation in a class of its own."""

    fast = False

    def forward(self, x):
        if self.fast:
            return x
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Swish(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.other = nn.Linear(4, 4), LayerNorm(4, eps=1e-3), LayerNorm(4, eps=1e-2)
        self.bn, self.act = nn.BatchNorm1d(3), Swish()

    def forward(self, x):
        x = x + self.fc(x)
        y = self.norm(x)
        x = x + y
        return self.other(x) + self.act(self.bn(x))


def test_children_that_are_one_operation():
    block = Block()
    nn.init.normal_(block.norm.weight)
    assert fused(block) == {"add_layer_norm": 2, "batch_norm_act": 1}
    assert Reason.USED_BETWEEN not in reasons(block)
    same(block, *tensors((2, 3, 4)))
    patch_model(block)
    x = torch.randn(2, 3, 4)
    for change in ("eps", "fast", "weight", "forward"):
        value = {"eps": 0.5, "fast": True, "weight": nn.Parameter(torch.ones(4) * 3), "forward": lambda x: x * 2}[
            change
        ]
        setattr(block.norm, change, value)
        actual = block(x)
        torch.testing.assert_close(actual, unpatch_model(copy.deepcopy(block))(x), msg=change)


# -- modes, compilers, autocast ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(inplace=True)
        )
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.group, self.act = nn.GroupNorm(2, 4), nn.SiLU()
        self.norm, self.rms, self.fc = nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x)
        out = self.bn(self.conv(x))
        out += x
        out = self.relu(out)
        x = self.act(self.group(out)).flatten(2).mT
        x = x + self.fc(x)
        x = x + self.fc(self.norm(x))
        return self.rms(x)


RULES = {"batch_norm_add_act": 1, "group_norm_act": 1, "add_layer_norm": 1, "add_rms_norm": 1}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_network_is_equal_in_both_modes(net, dtype):
    assert fused(net) == RULES
    for training in (True, False, True):
        report = verify_patch(net.to(dtype).train(training), image().detach().to(dtype))
        assert report, report
    assert any(c.name == "buffer stem.1.running_mean" for c in report.comparisons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_autocast(net, dtype, training):
    net.train(training)
    patched = patch_model(copy.deepcopy(net))

    def answer(net, x):
        with torch.autocast("cpu", dtype):
            out = net(x)
        return out, torch.autograd.grad(out.float().sum(), list(net.parameters()))

    assert_no_worse(answer(patched, image()), answer, net, image())


@pytest.mark.parametrize("training", [True, False])
def test_compile_in_one_graph(net, training):
    net.stem[1].momentum = 0.1  # 1 / float(num_batches_tracked) breaks the graph of torch's own layer too
    net.train(training)
    patched = patch_model(copy.deepcopy(net))
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(image()), net(image()))
    assert net.bn.num_batches_tracked == patched.bn.num_batches_tracked == int(training)
    patched.train(not training), net.train(not training)
    torch.testing.assert_close(compiled(image()), net(image()))


def test_checkpointing(net):
    patched = patch_model(copy.deepcopy(net))
    x, y = image(), image()
    checkpoint(net, x, use_reentrant=False).sum().backward()
    checkpoint(patched, y, use_reentrant=False).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert net.bn.num_batches_tracked == patched.bn.num_batches_tracked
    torch.testing.assert_close(patched.bn.running_var, net.bn.running_var)
