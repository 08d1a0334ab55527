"""What a report says of a forward in which no rule fuses anything: the nearest miss."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch.nn.functional as F
from torch import nn

from fastlayers import patch_model, patch_report, plan_patch
from fastlayers.patching import Match, Reason, View
from fastlayers.patching.capture.recording import Given
from fastlayers.patching.capture.trace import record
from fastlayers.patching.rules import GRAPH_RULES

NORMS = "a batch_norm, group_norm, instance_norm, linear layer with a bias"
ACTIVATIONS = "a relu, silu, gelu, hardswish, relu6, quick_gelu or leaky_relu of slope 0.01"
BEFORE_SUM = "a batch_norm, dropout, drop_path, product with a parameter or relu"
AFTER_SUM = "a layer_norm, rms_norm or relu"


LAYERS = """self.conv, self.plain = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
self.fc, self.biased = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
self.bn, self.gn, self.inorm = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
self.ln, self.rms, self.drop = nn.LayerNorm(4), nn.RMSNorm(4), nn.Dropout(0.5)
self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 1))])
self.nothing, self.gelu = nn.Identity(), nn.GELU()
self.scale, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float())
self.own = LayerNorm(4)"""


@pytest.mark.parametrize(
    ("inputs", "body", "words"),
    [
        (
            "x",
            "return self.conv(torch.relu(x))",
            "relu at LINE: return self.conv(torch.relu(x)); before it is the argument x, not "
            f"{NORMS}, sum of two tensors or convolution with a bias; after it is self.conv (Conv2d with a bias), not "
            "a product of two tensors or sum of two tensors",
        ),
        (
            "x",
            "x = self.blocks[0](x)\nreturn self.ln(x)",
            "layer_norm at LINE: return self.ln(x); before it is self.blocks[0] (Sequential), not a sum of two tensors",
        ),
        (
            "x",
            "return torch.tanh(self.nothing(self.gn(x)))",
            f"group_norm at LINE: return torch.tanh(self.nothing(self.gn(x))); after it is tanh, not {ACTIVATIONS}",
        ),
        (
            "x",
            "return F.leaky_relu(self.bn(x), 0.2)",
            "batch_norm at LINE: return F.leaky_relu(self.bn(x), 0.2); before it is the argument x, not a Conv2d "
            f"without a bias; after it is leaky_relu, not a sum of two tensors, {ACTIVATIONS.removeprefix('a ')}",
        ),
        (
            "x",
            "y = self.blocks[0](x)\ny = y + x\nreturn F.silu(y)",
            f"silu at LINE: return F.silu(y); before it is add, not {NORMS} or convolution with a bias; after it is "
            "the return, not a product of two tensors",
        ),
        (
            "x",
            "return x + self.nothing(self.blocks[0](x))",
            "add at LINE: return x + self.nothing(self.blocks[0](x)); before it are the argument x and self.blocks[0] "
            f"(Sequential), not {BEFORE_SUM}; after it is the return, not {AFTER_SUM}",
        ),
        (
            "x, gate",
            "x, y = x.chunk(2, dim=1)\nreturn x * y, torch.sigmoid(gate)",
            "mul at LINE: return x * y, torch.sigmoid(gate); before it is a part of chunk, not a silu, gelu, relu, "
            "sigmoid or hardsigmoid",
        ),
        (
            "x",
            "return self.gelu(self.fc(x))",
            "gelu at LINE: return self.gelu(self.fc(x)); before it is self.fc (Linear without a bias), not "
            f"{NORMS} or convolution with a bias; after it is the return, not a product of two tensors",
        ),
        (
            "x",
            "return self.bn(self.conv(x)), x.shape",
            "batch_norm at LINE: return self.bn(self.conv(x)), x.shape; before it is self.conv (Conv2d with a bias), "
            "not a Conv2d without a bias; after it is the return, not a sum of two tensors, "
            f"{ACTIVATIONS.removeprefix('a ')}",
        ),
        (
            "x",
            "a = x - 1\nreturn a.relu_() + a",
            "relu at LINE: return a.relu_() + a; before it is sub, not "
            f"{NORMS}, sum of two tensors or convolution with a bias; after it is add, but not in a form that a rule "
            "fuses",
        ),
        (
            "x",
            "y = self.ln(x)\nreturn y.reshape(y.shape[0], -1)",
            "layer_norm at LINE: y = self.ln(x); before it is the argument x, not a sum of two tensors",
        ),
        (
            "x",
            "x = F.silu(x) + self.blocks[0](x)\nreturn self.gn(x)",
            f"group_norm at LINE: return self.gn(x); after it is the return, not {ACTIVATIONS}",
        ),
        (
            "x, y",
            "x = self.conv(x + y)\nreturn x + y",
            "add at LINE: x = self.conv(x + y); before it are the argument x and the argument y, not "
            f"{BEFORE_SUM}; after it is self.conv (Conv2d with a bias), not {AFTER_SUM}",
        ),
        (
            "x, y",
            "z = x + y\nreturn self.own(z), y.to(z.dtype), z.mT",
            "add at LINE: z = x + y; before it are the argument x and the argument y, not "
            f"{BEFORE_SUM}; after it are self.own (block.LayerNorm) and add.mT, not {AFTER_SUM}",
        ),
        (
            "x, rows, columns",
            "return x.reshape(-1, rows * columns), rows * x",
            "mul at LINE: return x.reshape(-1, rows * columns), rows * x; before it are the argument rows and the "
            "argument x, not a silu, gelu, relu, sigmoid or hardsigmoid",
        ),
        (
            "x, y",
            "return torch.cat(\n    (\n        x,\n        torch.add(x, y),\n    )\n)",
            "add at LINE: torch.add(x, y),; before it are the argument x and the argument y, not "
            f"{BEFORE_SUM}; after it is cat, not {AFTER_SUM}",
        ),
    ],
)
def test_nearest_miss(build, tmp_path, inputs, body, words):
    row = plan_patch(build(LAYERS, inputs, body))[""]
    assert row.reason is Reason.NOTHING_TO_FUSE
    place, source = re.search(r"at (\S+:\d+): (.*?); (?:before|after) it ", row.detail).groups()
    assert row.detail.replace(place, "LINE") == f"nearest: {words}"
    file, line = place.split(":")
    assert (tmp_path / file).read_text().splitlines()[int(line) - 1].strip() == source


def test_layers_of_a_sequential_are_named():
    """The line of Sequential's own forward says nothing."""
    row = plan_patch(nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Hardswish(), nn.Flatten()))[""]
    assert row.detail == (
        f"nearest: self[1] (Hardswish); before it is self[0] (Conv2d without a bias), not {NORMS} or convolution with "
        "a bias"
    )


@pytest.mark.parametrize(
    "body",
    [
        "return self.blocks[0](self.fc(F.dropout(x, 0.5)))",
        "return torch.cat((x, x)) * self.scale.view(1, -1) + self.bias",
    ],
)
def test_a_forward_without_such_an_operation_has_no_detail(build, body):
    report = plan_patch(build(LAYERS, "x", body))
    assert (report[""].reason, report[""].detail) == (Reason.NOTHING_TO_FUSE, "")
    assert "nearest" not in str(report)


def test_the_miss_may_be_in_a_mode(build):
    module = build("pass", "x, y", "if self.training:\n    return torch.cat((x, y))\nreturn torch.relu(x)")
    assert plan_patch(module)[""].detail.startswith("nearest: relu at ")


# -- the report -------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return x + self.inside(x)


class OnlyChildren(Around):
    def forward(self, x):
        return self.inside(F.dropout(x, 0.5))


def test_equal_misses_share_a_line():
    sums, child = Around(nn.Sequential(nn.Conv2d(4, 4, 1))), OnlyChildren(nn.Sequential(nn.Conv2d(4, 4, 1)))
    report = plan_patch(nn.ModuleList([sums, child, copy.deepcopy(sums)]))
    found = [line for line in report.to_markdown().splitlines() if "nearest: " in line]
    assert len(found) == 1
    assert "2 x Around" in found[0]
    assert "4 modules: nothing in its forward that a rule fuses" in str(report)  # OnlyChildren, and the inside of all
    assert sum("nearest: " in line for line in str(plan_patch(sums, details=True)).splitlines()) == 1
    assert not report.refused
    assert report.to_dict()["modules"][1]["explanation"].startswith("nothing in its forward that a rule fuses (nearest")


class Silu(nn.Module):
    def forward(self, x):
        return F.silu(x)


class GatedUnit(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x, gate):
        return self.act(gate) * x


def test_a_layer_whose_work_its_parent_does_misses_nothing():
    act = Silu()
    assert plan_patch(act)[""].detail.startswith("nearest: silu at ")
    model = GatedUnit(act)
    for report in (plan_patch(model), patch_report(patch_model(model))):
        assert report["act"].detail == ""
        assert report.counts() == {"swiglu": 1}


def test_the_report_of_a_patched_model_keeps_misses_that_are_sure():
    """Modules of one class share a class after patching, and it has one detail."""
    same = nn.ModuleList([Around(nn.Flatten()), Around(nn.Flatten())])
    plan = plan_patch(same)
    assert "self.inside (Flatten)" in plan["1"].detail
    assert str(patch_report(patch_model(same))) == str(plan)
    others = nn.ModuleList([Around(nn.Flatten()), Around(nn.Sigmoid()), Around(nn.Flatten())])
    plan = plan_patch(others)
    assert ["self.inside (Sigmoid)" in plan[name].detail for name in "012"] == [False, True, False]
    report = patch_report(patch_model(others))
    assert [(report[name].reason, report[name].detail) for name in "012"] == [(Reason.NOTHING_TO_FUSE, "")] * 3


# -- the pairs of the rules -------------------------------------------------------------------------------------------

FUSED = [
    "return self.bn(self.plain(x)) + y, F.relu(self.bn(x)), F.silu(self.gn(x)), F.relu(self.inorm(x))",
    "return self.ln(x + y), self.rms(x * 2 + y), F.gelu(self.biased(x)), F.silu(self.conv(x)), x + self.drop(y)",
    "return F.silu(x) * y, F.gelu(x) * y, F.relu(x) * y, x * torch.sigmoid(y), x + self.scale * y",
    "return F.relu(x + y), F.relu(x) + y, F.nll_loss(F.log_softmax(x, 1), y)",
]


def test_matches_have_both_kinds_of_a_pair(build):
    seen = set()
    for body in FUSED:
        module = build(LAYERS, "x, y", body)
        view = View(record(module, type(module).forward, Given(), None).graph, module)
        for rule, node in itertools.product(GRAPH_RULES, view.position):
            for match in rule.find(view, node) if rule.pair is not None else ():
                assert isinstance(match, Match)
                first, second = rule.pair
                fitting = [op.node for op in match.ops if second.fits(view, op.node)]
                operands = itertools.chain.from_iterable(node.all_input_nodes for node in fitting)
                assert any(first.fits(view, operand) for operand in operands), rule.name
                seen.add(rule.name)
    assert seen == {rule.name for rule in GRAPH_RULES if rule.pair is not None}
