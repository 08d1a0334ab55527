"""What is reported of a patch: a row for each module, the reasons, the lines that they name."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import nn

from fastlayers.patching import (
    PatchWarning,
    Reason,
    patch_model,
    patch_report,
    patched,
    plan_patch,
)


def test_report(net):
    report = plan_patch(net)
    assert len(report) == len(list(net.named_modules()))
    row = report["layer1.0"]
    assert (row.was, row.became, row.fused, row.reason) == ("Block", "FusedBlock", (("batch_norm_add_act", 1),), None)
    assert report["layer1.0.conv"].reason is Reason.NO_RULE
    assert report["plain"].reason is Reason.NOTHING_TO_FUSE
    assert report.counts() == {"batch_norm_add_act": 3, "softmax": 1, "Linear": 1, "LogSoftmax": 1}
    assert report.summary() == "Net: 6 of 20 modules patched: 3 batch_norm_add_act, 1 softmax, 1 Linear, 1 LogSoftmax"
    text = str(report)
    assert "layer1.*  2 x Block   FusedBlock" in text
    assert "layer2.0  Block       FusedBlock" in text
    assert "details=True gives each its own" in text
    assert "layer1.0.conv" not in text
    assert "no rule looks for this layer" in text
    with pytest.raises(KeyError, match="nowhere"):
        report["nowhere"]
    for each in (plan_patch(net, details=True), patch_report(patch_model(net), details=True)):
        assert "layer1.0  Block       FusedBlock" in str(each)
        assert "details" not in str(each)


def test_equal_rows_share_a_line(monkeypatch):
    """Patched ones in places that differ in numbers, and those of one class that were left alone for one reason."""

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    block = nn.ModuleDict({"first": Branches(), "second": Branches(), "soft": nn.Softmax(-1)})
    model = nn.ModuleDict({"blocks": nn.ModuleList(copy.deepcopy(block) for _ in range(3)), "soft": nn.Softmax(-1)})
    report = plan_patch(model)
    monkeypatch.setenv("COLUMNS", "200")
    assert [line.split()[:5] for line in str(report).splitlines()[2:5]] == [
        ["blocks.0.first,", "...", "6", "x", "Branches"],
        ["blocks.*.soft", "3", "x", "Softmax", "FusedSoftmax"],
        ["soft", "Softmax", "FusedSoftmax", "Softmax"],
    ]
    assert report.rows == plan_patch(model, details=True).rows


def test_a_reason_names_the_line():
    class Tests(nn.Module):
        def forward(self, x):
            if (x > 0).all():  # Here.
                return torch.softmax(x, -1)
            return x

    detail = plan_patch(Tests())[""].detail
    assert re.fullmatch(r"tests a computed value at test_report\.py:\d+: if \(x > 0\)\.all\(\):  # Here\.", detail)


def test_report_of_a_patched_model_is_that_of_the_plan(net):
    plan = plan_patch(net)
    assert str(patch_report(net)) != str(plan)
    assert not patch_report(net).patched
    patch_model(net)
    assert str(patch_report(net)) == str(plan)
    assert str(plan_patch(net)) == str(plan)


class HalfFused(nn.Module):
    def forward(self, x, y, mask):
        return torch.relu(x + y) * x.masked_fill(mask, -1e9).softmax(-1)


def test_report_of_a_patched_model_still_says_what_was_left():
    model = HalfFused()
    plan = plan_patch(model)
    assert [reason for reason, _ in plan[""].left] == [Reason.FINITE_FILL]
    assert str(patch_report(patch_model(model))) == str(plan)


def test_report_with_nothing_to_say_has_no_table():
    report = plan_patch(nn.Tanh())
    assert (
        report.to_markdown()
        == "Tanh: 0 of 1 modules patched: nothing to fuse\n\n- 1 modules: no rule looks for this layer\n"
    )


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(PatchWarning) as caught:
        patch_model(nn.Tanh())
    with pytest.warns(PatchWarning) as inside, patched(nn.Tanh()):
        pass
    assert {caught[0].filename, inside[0].filename} == {__file__}


def test_report_in_other_forms(net):
    report = plan_patch(net, include=["layer1", "nowhere"])
    data = json.loads(report.to_json())
    assert data["counts"] == {"batch_norm_add_act": 2}
    assert data["unmatched"] == ["nowhere"]
    rows = {row["module"]: row for row in data["modules"]}
    assert rows["layer1.0"]["fused"] == {"batch_norm_add_act": 1}
    assert rows["layer2.0"]["reason"] == "NOT_SELECTED"
    markdown = report.to_markdown()
    assert "| layer1.* | 2 x Block | FusedBlock | batch_norm_add_act |" in markdown
    assert "pattern 'nowhere' matched nothing" in markdown
