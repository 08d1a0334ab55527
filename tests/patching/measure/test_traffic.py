"""The estimate of the bytes that patching saves."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers import functional
from fastlayers.patching import PatchWarning, Reason, patch_model, patch_report, plan_patch
from fastlayers.patching.measure import traffic as counting
from fastlayers.patching.report import readable
from tests.patching.networks import Snapshot

ELEMENTS = 64 * 32
TENSOR = 4 * ELEMENTS  # bytes


class Join(nn.Module):
    """Moves x, y, sum, sum, result where x, y, result would do."""

    def forward(self, x, y):
        return F.relu(x + y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.act = nn.ReLU()
        self.join = Join()

    def forward(self, x):
        return self.join(self.act(self.norm(self.fc(x))), x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def x():
    return torch.randn(64, 32)


def test_what_is_not_written_and_read_is_saved(x):
    report = plan_patch(Join(), example_inputs=(x, x.clone()))
    assert report[""].bytes_saved == report.bytes_saved == 2 * TENSOR


def test_a_step_that_trains_saves_it_in_the_backward_too(x):
    model = Block()
    report = plan_patch(model, example_inputs=x)
    assert report["join"].bytes_saved == 2 * 2 * TENSOR
    # act(norm(x)), and the norm's count of batches, which its kernel does; the product stays what it is
    assert report[""].bytes_saved == 2 * 2 * TENSOR + 2 * 8
    assert report["norm"].bytes_saved == 0  # part of the block now
    assert report["fc"].bytes_saved == 0  # the sum over the rows reads as much; only faster
    assert plan_patch(model.eval(), example_inputs=x)["join"].bytes_saved == 2 * TENSOR
    model.train().requires_grad_(False)
    assert plan_patch(model, example_inputs=x)["join"].bytes_saved == 2 * TENSOR


def test_an_expanded_tensor_is_what_is_there(x):
    assert counting.bytes_in([x, {"y": x[:1].expand(64, 32)}, 3]) == TENSOR + TENSOR // 64
    assert counting.bytes_in(torch.empty(0, 3)) == 0


def test_a_gated_mlp_still_hands_its_product_to_the_matrix_product(x):
    report = plan_patch(Gated().eval(), example_inputs=x)
    assert report.counts() == {"gated_linear": 1, "Linear": 2}
    assert report.bytes_saved == 2 * 2 * TENSOR  # silu(gate), written and read; not the product


def test_the_logits_of_a_head_are_written_and_read_once(x):
    class Head(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function, self.weight = function, nn.Parameter(torch.randn(96, 32))

        def forward(self, x, target):
            return self.function(x, self.weight, target)

    def moved(function):
        model = Head(function)
        return counting.traffic(model, {model}, (x, torch.zeros(64, dtype=torch.long)), {}).moved[model]

    logits, target, scalar = 64 * 96 * 4, 64 * 8, 4
    operands = TENSOR + 96 * 32 * 4
    assert moved(functional.linear_cross_entropy) == operands + 2 * logits + target + scalar
    # torch's log-probabilities are written and read besides; its second result is the sum of the classes' weights.
    whole = moved(lambda x, weight, target: F.cross_entropy(x @ weight.T, target))
    assert whole == operands + 4 * logits + target + 2 * scalar


def test_where_the_original_forward_answers_nothing_is_saved(x):
    class Model(nn.Module):
        def forward(self, x, flag=False):
            return F.relu(x + 1.5 * x) if not flag else x

    model = Model()
    assert plan_patch(model, example_inputs={"x": x}).bytes_saved == 2 * TENSOR
    assert plan_patch(model, example_inputs={"x": x, "flag": True}).bytes_saved == 0


def test_a_patched_model_is_reported_the_same(x):
    model = Block()
    planned = plan_patch(model, example_inputs=x)
    patch_model(model)
    classes = [type(module) for module in model.modules()]
    reported = plan_patch(model, example_inputs=[x])
    assert {row.fqn: row.bytes_saved for row in reported} == {row.fqn: row.bytes_saved for row in planned}
    assert [type(module) for module in model.modules()] == classes


def test_nothing_of_the_model_changes(x):
    model = Block()
    model(x).sum().backward()
    before = Snapshot(model)
    plan_patch(model, example_inputs=x)
    with pytest.raises(RuntimeError):
        plan_patch(model, example_inputs=x[:, 1:])
    before.check(model)


def test_on_the_meta_device():
    with torch.device("meta"):
        report = plan_patch(Block(), example_inputs=torch.empty(64, 32))
    assert report["join"].bytes_saved == 2 * 2 * TENSOR


def test_shared_modules_and_several_calls(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = Join()

        def forward(self, x):
            return self.a(x, x.clone()) * self.b(x, x.clone())

    assert plan_patch(Twice(), example_inputs=x)["b"].bytes_saved == 2 * 2 * TENSOR


def test_in_every_form_of_the_report(x):
    report = plan_patch(Block(), example_inputs=x)
    total = readable(report.bytes_saved)
    assert total == "64.0 KiB"
    assert f"about {total} a step less to move" in report.summary()
    assert "saved a step" in str(report)
    assert "| join | Join | FusedJoin | 32.0 KiB | add_relu |" in report.to_markdown()
    data = json.loads(report.to_json())
    assert data["bytes_saved"] == report.bytes_saved
    assert {row["module"]: row["bytes_saved"] for row in data["modules"]}["join"] == 4 * TENSOR
    assert data["reasons"] == {"NO_RULE": 1}
    plain = plan_patch(Block())
    assert plain.bytes_saved is None
    assert "saved" not in str(plain)
    assert "saved" not in plain.to_markdown()


def test_inputs_of_a_wrong_type():
    with pytest.raises(TypeError, match=r"example_inputs must be a tensor, a sequence .* got int"):
        plan_patch(Join(), example_inputs=3)


def test_readable():
    assert [readable(n) for n in (0, 1023, 1024, -2048, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "-2.0 KiB",
        "5.0 GiB",
    ]


def test_every_function_is_known():
    assert set(counting.FUNCTIONS.values()) == set(functional.__all__)
    assert set(counting.HANDS_ON) <= set(functional.__all__)


class Transformer(nn.Module):
    """Its rewritten forward does the work of both norms; the linear layers are called."""

    def __init__(self, p=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mix, self.fc = nn.Linear(32, 32), nn.Linear(32, 32)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.drop(self.fc(self.norm2(x)))


def test_a_sum_and_its_norm_save_the_sum_that_is_read_again(x):
    report = plan_patch(Transformer().eval(), example_inputs=x)
    assert report[""].bytes_saved == report.bytes_saved == TENSOR


@pytest.mark.parametrize("when", ["planned", "patched"])
def test_a_child_whose_parent_does_its_work_counts_no_more(x, when):
    model = Transformer()
    report = plan_patch(model) if when == "planned" else patch_report(patch_model(model))
    assert [row.fqn for row in report.patched] == ["", "mix", "fc"]
    assert [row.fqn for row in report.absorbed] == ["norm1", "norm2"]
    row = report["norm1"]
    assert (row.became, row.absorbed_by) == ("FusedLayerNorm", "")
    assert row.outcome() == "the forward of (model) does its work"
    assert report.counts()["Linear"] == 2
    assert "LayerNorm" not in report.counts()
    assert "3 of 6 modules patched" in report.summary()
    assert "2 modules: the forward of a patched parent does their work" in str(report)
    assert [row["absorbed_by"] for row in json.loads(report.to_json())["modules"]].count("") == 2


def test_an_absorbed_child_is_right_where_it_is_called_alone(x):
    model = Transformer()
    before = model.norm1(x)
    patch_model(model)
    torch.testing.assert_close(model.norm1(x), before)


def test_a_child_that_is_called_as_well_or_shared_counts(x):
    class Twice(Transformer):
        def forward(self, x):
            return self.norm1(super().forward(x).relu())

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.norm = Transformer(), None
            self.norm = self.block.norm1

        def forward(self, x):
            return self.norm(self.block(x))

    assert "norm1" in {row.fqn for row in plan_patch(Twice()).patched}
    assert {"block.norm1", "norm"} & {row.fqn for row in plan_patch(Shared()).patched}


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_dropout_that_drops_nothing_saves_nothing(p):
    report = plan_patch(Transformer(p))
    assert ("dropout_add" in report.counts()) == (p > 0)


def test_where_nothing_is_saved_the_row_says_so(x):
    class Tanh(nn.Module):
        def forward(self, x):
            return F.gelu(x, approximate="tanh")

    class Drop(nn.Module):
        def forward(self, x):
            return x + F.dropout(x.exp(), 0.0, self.training)

    model = nn.Sequential(nn.GELU("tanh"), Tanh(), Drop(), nn.Linear(32, 32, bias=False))
    with pytest.warns(PatchWarning, match="no rule fuses anything"):
        report = patch_report(patch_model(model))
    assert {row.reason for row in report if row.fqn} == {Reason.SAVES_NOTHING}
    assert not report.refused  # strict=True has nothing to complain of
    assert "4 modules: a fused kernel would save neither a launch nor a byte" in str(report)
