"""Modules and wrappers that are special, compilers and transforms."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from fastlayers.patching import (
    PatchWarning,
    Reason,
    patch_model,
    patch_report,
    plan_patch,
    unpatch_model,
)
from tests.patching.networks import ALL, Block, names

# -- modules and wrappers that are special ---------------------------------------------------------------------------


def test_a_forward_on_the_instance_is_detected(net, x):
    """As accelerate does it."""
    block = net.layer1[0]
    block.forward = lambda x, old=block.forward: old(x) * 2
    net.layer1[1].relu.forward = lambda x: x
    with pytest.warns(PatchWarning, match="replaced on the instance"):
        patch_model(net)
    report = patch_report(net)
    assert report["layer1.0"].reason is Reason.FORWARD_REPLACED
    assert report["layer1.1"].fused == (("batch_norm_add", 1),)
    assert type(block) is Block


def swap(name, layer):
    def change(net):
        setattr(net.layer1[0], name, layer)
        net.head.soft = nn.Softmax(dim=0)

    return change


@pytest.mark.parametrize(
    "change",
    [
        swap("relu", nn.GELU()),
        swap("relu", nn.ReLU6()),
        swap("relu", nn.Identity()),
        lambda net: setattr(net.layer1[0].relu, "forward", torch.sigmoid),
        lambda net: net.layer1[0].relu.register_forward_hook(lambda module, args, out: out * 3),
        lambda net: (setattr(net.head.soft, "dim", 0), setattr(net.log, "dim", 0)),
    ],
)
def test_an_absorbed_child_that_changes_afterwards(net, x, change):
    net.eval()
    patch_model(net)
    change(net)
    actual = net(x)
    unpatch_model(net)
    torch.testing.assert_close(actual, net(x))


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_parametrized_modules(net, x):
    parametrize.register_parametrization(net.layer1[0].conv, "weight", Double())
    nn.utils.parametrizations.weight_norm(net.head.fc)
    net.eval()
    expected = net(x)
    patch_model(net)
    torch.testing.assert_close(net(x), expected)
    parametrize.remove_parametrizations(net.layer1[0].conv, "weight")
    torch.testing.assert_close(net(x), expected)

    class Own(nn.Linear):
        def forward(self, x):
            return F.relu(F.linear(x, self.weight)) + x

    own = Own(4, 4)
    parametrize.register_parametrization(own, "weight", Double())
    assert plan_patch(own)[""].reason is Reason.PARAMETRIZED
    later = patch_model(Own(4, 4))
    parametrize.register_parametrization(later, "weight", Double())
    with pytest.warns(PatchWarning, match="was changed again after patching"):
        unpatch_model(later)
    parametrize.remove_parametrizations(later, "weight")
    assert type(unpatch_model(later)) is Own


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripted_modules_are_left_alone(net, x):
    net.layer1[0] = torch.jit.script(Block())
    with pytest.warns(PatchWarning, match="holds scripted modules"):
        patch_model(net)
    assert names(patch_report(net)) == ALL - {"layer1.0", "layer1.0.bn"}
    net(x)


def test_wrappers(net, x):
    model = nn.DataParallel(net)
    with pytest.warns(PatchWarning, match="wrapped in DataParallel"):
        patch_model(model)
    assert names(patch_report(model)) == {f"module.{name}" for name in ALL}
    assert patch_report(model)[""].reason is Reason.WRAPPER
    unpatch_model(model)
    compiled = torch.compile(net, backend="eager")
    with pytest.warns(PatchWarning, match="wrapped in OptimizedModule"):
        patch_model(compiled)
    assert repr(net.layer1[0]).startswith("FusedBlock(")
    torch.testing.assert_close(compiled.eval()(x), net(x))


def test_graph_modules(x):
    traced = torch.fx.symbolic_trace(Block())
    report = plan_patch(traced)
    assert report[""].reason is Reason.GRAPH_MODULE


class NamedLikeBuiltins(nn.Sequential):
    def forward(self, x, dict=None, type=None):
        return super().forward(x)


@pytest.mark.parametrize("cls", [NamedLikeBuiltins, type("Named[int]", (nn.Sequential,), {})])
def test_names_that_generated_source_could_not_have(cls):
    model, x = cls(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    assert torch.equal(model(x), patch_model(model)(x))


# -- compilers and transforms -----------------------------------------------------------------------------------------


def test_compile_sees_what_changes(net, x):
    """Guards of the generated forward are guards of the compiled code too."""
    patch_model(net.eval())
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    net.layer1[0].relu = nn.Sigmoid()
    unpatch_model(reference := copy.deepcopy(net))
    torch.testing.assert_close(compiled(x), reference(x))
    seen = []
    net.layer1[1].relu.register_forward_hook(lambda *args: seen.append(1))
    torch._dynamo.reset()  # as torch documents for hooks added after compiling
    torch.testing.assert_close(compiled(x), reference(x))
    assert seen


def test_export(net, x):
    patch_model(net.eval())
    expected = net(x)
    for strict in (False, True):
        program = torch.export.export(net, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), expected)
    dynamic = torch.export.export(net, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})
    torch.testing.assert_close(dynamic.module()(torch.cat([x, x, x])), net(torch.cat([x, x, x])))
