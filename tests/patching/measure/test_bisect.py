"""What names the pass, the operation and the line of source behind a difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

pytest.importorskip("triton")

from fastlayers import backends, cli
from fastlayers.patching.fusion import passes
from fastlayers.patching.fusion.matcher import Op, Patterns, Row
from fastlayers.patching.measure.bisect import bisect_patch, first_wrong
from fastlayers.patching.reasons import PatchWarning
from fastlayers.patching.regions import region

TARGET = f"{__name__}:Block"
SINE = "y = torch.sin(y) * 3"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        y = y + torch.cos(x)
        y = torch.tanh(y) + torch.exp(-x)
        y = torch.sin(y) * 3
        return self.out(torch.relu(y) - x)


def other(function):
    """A row that puts another function in the place of one."""
    return lambda match: [replace(match.root, function=function)]


@pytest.fixture
def plant(monkeypatch):
    """Have these passes, and no kernels."""
    monkeypatch.setattr(backends, "generates_kernels", lambda device: True)

    def put(**wrong):
        table = [each for each in passes.PASSES if each.name not in ("kernels", "residual_products")]
        planted = [passes.Pass(name, Patterns(row), "is wrong") for name, row in wrong.items()]
        monkeypatch.setattr(passes, "PASSES", (*table[:3], *planted, *table[3:]))

    return put


def bisect(model):
    torch.manual_seed(0)
    return bisect_patch(model, torch.randn(4, 8))


def test_right_passes(plant):
    plant()
    report = bisect(Block())
    assert report.ok
    assert report.summary() == "bisect: 1 programs were rewritten, all give the same"


def test_a_wrong_pass_in_the_forward(plant):
    plant(
        right=Row(Op("tanh"), other(torch.ops.aten.tanh.default)),
        wrong=Row(Op("sin"), other(torch.ops.aten.cos.default)),
    )
    (fault,) = bisect(Block()).faults
    assert fault.rewrite == "wrong"
    assert "= sin(" in fault.operation
    assert fault.source.startswith("test_bisect.py:")
    assert fault.source.endswith(SINE)
    assert "differs by" in fault.problem


def test_a_wrong_pass_in_the_backward(plant):
    """The line of the forward is named, whose gradient it is."""
    plant(wrong=Row(Op("cos"), other(torch.ops.aten.sin.default), "backward"))
    (fault,) = bisect(Block()).faults
    assert (fault.rewrite, fault.source.split(": ", 1)[1]) == ("wrong", SINE)


def test_the_first_operation_of_those_that_a_pass_changed(plant):
    plant(wrong=Row(Op("sin", "cos"), other(torch.ops.aten.tan.default), "forward"))
    (fault,) = bisect(Block()).faults
    assert "= cos(" in fault.operation


def test_a_pass_that_fails(plant, monkeypatch):
    def fails(match):
        raise KeyError("v1")

    monkeypatch.setattr(region, "RAISE_ERRORS", False)  # as users have it
    plant(wrong=Row(Op("sin"), fails))
    with pytest.warns(PatchWarning, match="the pass wrong"):
        (fault,) = bisect(Block()).faults
    assert (fault.rewrite, fault.problem) == ("wrong", "KeyError: 'v1'")


def test_the_command(plant, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 200)
    arguments = ["verify", TARGET, "--input", "4,8", "--bisect"]
    plant()
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert "1 programs were rewritten, all give the same" in result.output
    plant(wrong=Row(Op("sin"), other(torch.ops.aten.cos.default)))
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 1
    assert "wrong" in result.output
    assert SINE in result.output


@pytest.mark.parametrize("missing", ["gpu", "triton"])
def test_where_nothing_is_rewritten(plant, missing, monkeypatch):
    plant()
    if missing == "gpu":
        monkeypatch.setattr(backends, "generates_kernels", lambda device: False)
    else:
        monkeypatch.setattr("fastlayers.patching.measure.bisect.find_spec", lambda name: None)
    report = bisect(Block())
    assert report.ok
    assert "no call was recorded" in report.summary()


@pytest.mark.parametrize("wrong", range(1, 9))
def test_a_binary_search(wrong):
    assert first_wrong(8, lambda count: count >= wrong) == wrong
