"""Rules that users register: found wherever fastlayers looks, checked like its own, and gone when they are removed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import (
    GraphRule,
    Match,
    ModuleRule,
    Op,
    Reason,
    Refusal,
    compile_report,
    dynamo_backend,
    patch_model,
    plan_patch,
    register_rule,
    unpatch_model,
    verify_patch,
)
from tests.patching.harness import written


def hinge(x, margin):
    """What a user's fused kernel would compute."""
    return (margin - x).clamp(min=0)


def find_hinge(view, node):
    if node.target not in ("clamp", torch.clamp) or dict(node.kwargs) != {"min": 0}:
        return
    sub = view.op(node.args[0], "sub")
    if sub is None:
        return
    if not view.is_number(sub["input"]):
        yield Refusal(Reason.TENSOR_SCALE, str(sub.node))
        return
    clamp = Op("clamp", node, {"input": sub.node})
    yield Match((sub, clamp), hinge, (sub["other"], sub["input"]), {}, tensors=(sub["other"],))


HINGE = GraphRule("hinge", "max(margin - x, 0)", find_hinge)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = self.fc(x)
        return (1.0 - x).clamp(min=0)


def net(body):
    return written(Net, body, globals())()


def test_graph_rule():
    model, x = Net(), torch.randn(3, 4)
    with register_rule(HINGE):
        assert plan_patch(model).counts() == {"hinge": 1}
        patch_model(model)
        assert verify_patch(model, x)
    unpatch_model(model)
    assert type(model) is Net
    assert not plan_patch(model).counts()


def test_a_match_is_checked_like_those_of_fastlayers():
    with register_rule(HINGE):
        report = plan_patch(
            net("difference = torch.sub(1.0, self.fc(x))\nreturn torch.clamp(difference, min=0), difference")
        )
        assert not report.counts()
        assert report[""].reason is Reason.USED_ELSEWHERE
        learned = net("return torch.clamp(torch.sub(self.fc.weight[0], self.fc(x)), min=0)")
        assert plan_patch(learned)[""].reason is Reason.TENSOR_SCALE
        hooked = Net()
        hooked.fc.register_forward_hook(lambda *args: None)
        assert plan_patch(hooked).counts() == {"hinge": 1}  # the linear layer is not part of it


def test_graph_rule_in_captured_graphs():
    model, x = Net(), torch.randn(3, 4)
    torch._dynamo.reset()
    with register_rule(HINGE):
        compiled = torch.compile(model, backend=dynamo_backend)
        torch.testing.assert_close(compiled(x), model(x))
    assert compile_report().counts() == {"hinge": 1}
    torch._dynamo.reset()


def test_it_comes_before_those_of_fastlayers():
    def relu_add(x, y):
        return F.relu(x) + y

    def find(view, node):
        add = view.op(node, "add")
        relu = view.op(add["input"], "relu") if add is not None else None
        if relu is not None:
            yield Match((relu, add), relu_add, (relu["input"], add["other"]), {}, (relu["input"], add["other"]))

    class Block(nn.Module):
        def forward(self, x, y):
            return F.relu(x) + y

    assert plan_patch(Block()).counts() == {"relu_add": 1}
    handle = register_rule(GraphRule("mine", "relu(x) + y", find))
    assert plan_patch(Block()).counts() == {"mine": 1}
    handle.remove()
    assert plan_patch(Block()).counts() == {"relu_add": 1}


class Scale(nn.Module):
    def forward(self, x):
        return x * 2


class FusedScale(Scale):
    def forward(self, x):
        return x + x


def test_module_rule():
    model = nn.Sequential(Scale(), nn.Linear(4, 4, bias=False))
    with register_rule(ModuleRule("scale", "Scale -> FusedScale", Scale, FusedScale)):
        patch_model(model)
    assert isinstance(model[0], FusedScale)
    assert verify_patch(model, torch.randn(3, 4))
    unpatch_model(model)
    assert type(model[0]) is Scale


def test_what_is_no_rule():
    with pytest.raises(TypeError, match="GraphRule or a ModuleRule, got function"):
        register_rule(find_hinge)
    with pytest.raises(ValueError, match="a rule called 'softmax' exists already"):
        register_rule(GraphRule("softmax", "", find_hinge))
    with pytest.raises(TypeError, match="by a subclass of it, and ReLU is not a subclass of Scale"):
        register_rule(ModuleRule("scale", "", Scale, nn.ReLU))
    with register_rule(HINGE), pytest.raises(ValueError, match="'hinge' exists already"):
        register_rule(HINGE)
    register_rule(HINGE).remove()
