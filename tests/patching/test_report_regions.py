"""What a report says after the first calls: which run as regions, what these cost, and why others run op by op."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

from fastlayers.patching import Reason, RegionRow, Row, SignatureRow, patch_model, patch_report
from fastlayers.patching.program.cost import Cost, cost_of
from fastlayers.patching.program.program import Operation, Program, Value
from fastlayers.patching.report import PatchReport
from tests.patching.networks import Parts


class Mixer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return x + self.out(torch.tanh(self.wide(self.norm(x))) * 2)


class Counts(nn.Module):
    """Its forward changes Python state, so that no call is a region."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.counts = nn.ModuleList(Mixer() for _ in range(3)), Counts()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.counts(x)


@pytest.fixture
def net():
    return patch_model(Net())


def train(net, steps, *shape):
    x = torch.randn(*shape or (2, 8, 16))
    for _ in range(steps):
        net(x).sum().backward()


def test_nothing_is_said_before_the_first_call(net):
    report = patch_report(net)
    assert report.regions == ()
    assert "launches" not in str(report)
    assert report.summary().endswith("7 Linear")


def test_a_signature_that_came_once(net):
    train(net, 1)
    region = patch_report(net)["blocks.1"].region
    # The input of the model needs no gradient, that of its other blocks does.
    assert region == RegionRow("Mixer", (), ((Reason.SEEN_ONCE, "1 signatures"),))


def test_what_runs_and_what_does_not(net):
    train(net, 5)
    report = patch_report(net)
    blocks = report["blocks.0"].region
    assert all(report[f"blocks.{i}"].region is blocks for i in range(3))
    assert [each.what for each in blocks.signatures] == ["2x8x16 float32; training"] * 2
    # Of the second step the first two calls were recorded, and ran op by op.
    assert [each.calls for each in blocks.signatures] == [3, 7]
    assert blocks.op_by_op == ()
    assert report["counts"].region.signatures == ()
    assert report["counts"].region.op_by_op == ((Reason.CHANGES_STATE, "assigns calls of a Counts"),)
    assert report["counts.linear"].region is None
    assert report.regions == (report[""].region, blocks, report["counts"].region)
    assert report.summary().endswith("; 10 calls of 1 classes ran as regions")
    text = " ".join(str(report).split())
    assert "10 calls with 2 signatures ran as regions" in text
    assert "op by op: its forward changes Python state (assigns calls of a Counts)" in text


def test_the_modules_inside_of_a_region_wait_for_nothing(net):
    model = patch_model(nn.ModuleDict({"outer": nn.Sequential(Mixer(), Mixer(), Mixer())}))["outer"]
    train(model, 3)
    report = patch_report(model)
    assert report[""].region.calls == 1
    assert report["0"].region is None


def test_other_signatures_and_modes(net):
    train(net, 3)
    train(net, 3, 4, 8, 16)
    with torch.no_grad():
        for _ in range(3):
            net.eval()(torch.randn(2, 8, 16))
    blocks = patch_report(net)["blocks.0"].region
    assert Counter(each.what for each in blocks.signatures) == {
        "2x8x16 float32; training": 2, "*x8x16 float32; training": 2, "2x8x16 float32; eval, no_grad": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "reason", "detail"),
    [
        (lambda m, x, i: m(x, object()), Reason.UNKNOWN_ARGUMENT, "object"),
        (lambda m, x, i: m(x, float(i)), Reason.MANY_SIGNATURES, "4 recordings"),
        (lambda m, x, i: m(x[:, :0].sum(1), 0.0), Reason.REGION_SIZE, "1 operations"),
    ],
)
def test_why_calls_run_op_by_op(call, reason, detail, monkeypatch):
    class Scaled(Parts):
        def forward(self, x, scale):
            if x.dim() < 3:
                return x * 2
            return self.inner(x) * (scale if type(scale) is float else 1.0)

    model, x = patch_model(Scaled(inner=Mixer())), torch.randn(2, 8, 16)
    monkeypatch.setattr("fastlayers.patching.regions.demand.CALLS", 1)
    monkeypatch.setattr("fastlayers.patching.regions.demand.FREE", 2)
    for i in [*range(4), 3]:
        call(model, x, i)
    assert (reason, detail) in patch_report(model)[""].region.op_by_op


def test_a_differentiated_backward():
    net = patch_model(nn.Sequential(Mixer(), Mixer()))
    x = torch.randn(2, 8, 16, requires_grad=True)
    for _ in range(3):
        (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        dx.sum().backward()
    assert (Reason.DIFFERENTIATED, "2x8x16 float32; training") in patch_report(net)[""].region.op_by_op


# -- the forms of a report --------------------------------------------------------------------------------------------

TRAINS = SignatureRow(
    "16x1024x768 bfloat16; training", 30, (41, 12), (400 * 2**20, 150 * 2**20), ("fused_add", "fused_casts")
)
INFERS = SignatureRow("16x1024x768 bfloat16; eval, no_grad", 10, (13, 4), (80 * 2**20, 40 * 2**20), ("fused_add",))
RAN = RegionRow("Block", (TRAINS, INFERS), ((Reason.SEEN_ONCE, "2 signatures"),))


@pytest.fixture
def report():
    rows = [Row(f"encoder.{i}", "Block", "FusedBlock", (("add_relu", 1),), region=RAN) for i in range(2)]
    return PatchReport((*rows, Row("decoder.0", "Block", reason=Reason.NOTHING_TO_FUSE, region=RAN)), "Net")


def test_numbers_of_all_calls_and_of_one(report):
    assert report.summary() == (
        "Net: 2 of 3 modules patched: 2 add_relu; 40 calls of 1 classes ran as regions: 1360 launches as 400, "
        "12.5 GiB as 4.8 GiB"
    )  # fmt: skip
    assert RAN.of_a_call("launches") == (34, 10)
    assert RAN.notes() == [
        "40 calls with 2 signatures ran as regions, 2 generated kernels",
        f"op by op: {Reason.SEEN_ONCE.value} (2 signatures)",
    ]


def test_table(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in str(report).splitlines()]
    assert lines[1:5] == [
        ["module", "was", "became", "launches", "moved", "fused, or why not"],
        ["encoder.*", "2 x Block", "FusedBlock", "34 -> 10", "320.0 MiB -> 122.5 MiB", "add_relu"],
        ["40 calls with 2 signatures ran as regions, 2 generated kernels"],
        [f"op by op: {Reason.SEEN_ONCE.value} (2 signatures)"],
    ]
    assert lines[5] == ["decoder.0", "Block", "-", "as above", "as above", Reason.NOTHING_TO_FUSE.value]
    assert (
        "| encoder.* | 2 x Block | FusedBlock | 34 -> 10 | 320.0 MiB -> 122.5 MiB | add_relu |" in report.to_markdown()
    )


def test_json(report):
    data = json.loads(report.to_json())
    assert [row["region"] for row in data["modules"]] == [0, 0, 0]
    (region,) = data["regions"]
    assert region["signatures"][1] == {
        "what": "16x1024x768 bfloat16; eval, no_grad", "calls": 10, "launches": [13, 4],
        "moved": [80 * 2**20, 40 * 2**20], "kernels": ["fused_add"],
    }  # fmt: skip
    assert region["op_by_op"] == [{"reason": "SEEN_ONCE", "detail": "2 signatures"}]


# -- what a program costs ---------------------------------------------------------------------------------------------

aten = torch.ops.aten


def program_of(*operations, **values):
    return Program(("x",), list(operations), ("y",), (), (), [], (), values=values)


def operation(function, *args, makes="y", view=False, effect=False):
    return Operation(function, args, {}, (makes,) if makes else ("",), True, effect, view)


def test_what_operations_cost():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    x_, y_ = Value("x"), Value("y")
    cost = {
        "two operands": (operation(aten.add.Tensor, x_, x_), Cost(1, 2 * 128)),
        "a view": (operation(aten.view.default, x_, (4, 8), view=True), Cost(0, 0)),
        "an allocation": (operation(aten.empty_like.default, x_), Cost(0, 0)),
        "in place": (operation(aten.add_.Tensor, x_, y_, makes="", effect=True), Cost(1, 3 * 128)),
        "a softmax of masked rows": (operation(aten._safe_softmax.default, x_, -1), Cost(4, 2 * 128)),
        "a convolution with a bias": (
            operation(aten.convolution.default, x_, x_, x_, [1], [0], [1], False, [0], 1), Cost(2, 4 * 128)
        ),
    }  # fmt: skip
    assert {name: cost_of(program_of(each, x=x, y=y)) for name, (each, _) in cost.items()} == {
        name: expected for name, (_, expected) in cost.items()
    }
    assert cost_of(program_of(operation(aten.neg.default, x_), x=x[:1].expand(8, 4), y=y)) == Cost(1, 16 + 128)
