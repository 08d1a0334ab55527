"""verify_patch: what it finds, and that the model is afterwards what it was."""

from __future__ import annotations

import cProfile
import json
import random
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import patch_model, verify_patch
from fastlayers.patching.measure import verify as verification
from tests.patching.networks import Block, Net, Parts, Snapshot


@pytest.mark.parametrize("state", ["unpatched", "patched"])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_verify(net, x, state, mode, dtype):
    net.to(dtype).train(mode)
    if mode:
        net(x.to(dtype)).sum().backward()
    if state == "patched":
        patch_model(net)
    net.layer2[0].eval()
    before = Snapshot(net)
    report = verify_patch(net, x.to(dtype))
    assert report
    assert report.ok
    assert report.patched == 6
    assert report.first_difference is None
    assert {c.name for c in report.comparisons} >= {"output", "grad of layer1.0.conv.weight", "grad of input 0"}
    assert str(report).startswith("verify: equal (6 modules patched")
    assert ("every value is the same" in str(report)) == all(c.error == 0 for c in report.comparisons)
    before.check(net)


@pytest.mark.parametrize("error", ["output", "gradient", "dtype"])
def test_verify_finds_a_wrong_kernel_and_says_where(net, x, error, monkeypatch):
    """The second block is made wrong."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (1.001 if error == "output" else 1)

        @staticmethod
        def backward(ctx, grad):
            return grad * (1.001 if error == "gradient" else 1)

    patch_model(net)
    cls = type(net.layer1[1])
    right = cls.forward
    broken = {"dtype": lambda self, x: right(self, x).double().float().to(torch.float64)}
    monkeypatch.setattr(cls, "forward", broken.get(error, lambda self, x: Wrong.apply(right(self, x))))
    if error == "dtype":
        monkeypatch.setattr(Block, "forward", lambda self, x: F.relu(self.bn(self.conv(x)) + x).to(x.dtype))
        net = net.layer1[1]
    report = verify_patch(net, x)
    assert not report
    assert report.failures
    assert "DIFFER" in str(report)
    assert report.first_difference == {"output": "layer1.1", "gradient": None, "dtype": ""}[error]
    assert report.first_gradient_difference == ("layer1.1" if error == "gradient" else None)
    assert json.dumps(report.to_dict())


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_verify_allows_for_the_error_of_torch_itself(monkeypatch, factor):
    """A long sum that is added up one after the other is further off than a perturbed input makes it."""

    class Total(nn.Module):
        def forward(self, x):
            rows = torch.zeros(len(x), dtype=torch.long)
            return F.relu(x.new_zeros(1, 2).index_add(0, rows, x)) + 0 * x[:1]

    model = patch_model(Total())
    x = torch.full((100000, 2), 0.1)
    monkeypatch.setattr(type(model), "forward", lambda self, x: factor * F.relu(x.sum(0, True)) + 0 * x[:1])
    report = verify_patch(model, x)
    assert bool(report) == (factor == 1)
    assert report.comparisons[0].error > verification.ROUNDINGS * torch.finfo(x.dtype).eps * 10000


def test_verify_names_a_swapped_layer_beside_patched_blocks(net, x, monkeypatch):
    patch_model(net)
    cls = type(net.log)
    right = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: right(self, x) + 0.01)
    report = verify_patch(net, x)
    assert not report
    assert report.first_difference == "log"
    assert "the first module that differs: log" in str(report)


def test_verify_names_the_module_whose_parameter_gets_another_gradient(monkeypatch):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return F.relu(x) + x * self.weight

    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4), Scale())
    patch_model(model)
    model[3].__class__ = type("Wrong", (type(model[3]),), {**vars(type(model[3]))})
    right = type(model[3]).forward

    def forward(self, x):
        y = right(self, x)
        return y + 0.1 * (self.weight - self.weight.detach()).sum()

    monkeypatch.setattr(type(model[3]), "forward", forward)
    report = verify_patch(model, torch.randn(3, 4))
    assert [c.name for c in report.failures] == ["grad of 3.weight"]
    assert report.first_difference is None
    assert report.first_gradient_difference == "3"
    assert "the first module that differs in the backward: 3" in str(report)


def test_verify_where_parts_are_absorbed(net, x, monkeypatch):
    """A layer that a block has absorbed, and one after it that is given something else, are not what differs."""
    from fastlayers.patching.runtime import calls

    original = calls.batch_norm_layer
    monkeypatch.setattr(calls, "batch_norm_layer", lambda *args, **options: original(*args, **options) * 1.01)
    patch_model(net)
    report = verify_patch(net, x)
    assert report.first_difference == "layer1.0"


def test_a_printed_verification_is_short():
    rows = tuple(verification.Comparison(f"output {i}", 1.0, 0.1) for i in range(30))
    report = verification.VerifyReport(rows, 1, True)
    assert str(report).splitlines()[-2:] == ["  output 9: differs by 1, tolerance 0.1", "  and 20 more"]
    assert report.to_markdown().count("differs") == 30


def test_watching_under_cprofile():
    from fastlayers.patching.measure.watch import MODULE_CALL, watching

    profiler, seen = cProfile.Profile(), []
    with profiler:
        before = sys.getprofile()
        with watching({MODULE_CALL}, seen.append, lambda *left: None):
            nn.Identity()(1)
        assert sys.getprofile() is before
        sum([1, 2])
    assert len(seen) == 1
    assert any("sum" in str(entry.code) for entry in profiler.getstats())


def test_watching_leaves_the_profiler_of_others_alone(net, x):
    from fastlayers.patching.measure.watch import MODULE_CALL, watching

    seen = []
    mine = lambda *event: None  # noqa: E731
    sys.setprofile(mine)
    try:
        with watching({MODULE_CALL}, lambda frame: seen.append(type(frame.f_locals["self"])), lambda *left: None):
            patch_model(net)(x)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert issubclass(seen[0], Net)
    assert nn.Conv2d in seen
    assert not any(issubclass(cls, nn.BatchNorm2d) for cls in seen)  # absorbed, and still so


def test_verify_restores_shared_modules_and_tied_parameters():
    """torch.func.functional_call leaves its stand-ins in a module that is used in two places."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.second = self.first
            self.last = nn.Linear(4, 4)
            self.last.weight = self.first[0].weight

        def forward(self, x):
            return self.last(self.second(self.first(x)))

    model, x = Twice(), torch.randn(3, 4)
    before = Snapshot(model)
    assert verify_patch(model, x)
    before.check(model)


class Remembers(nn.Module):
    """As LeViT's attention: in eval it keeps what it computed of its parameters for the next call."""

    def __init__(self):
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.randn(4)), nn.LayerNorm(4)
        self.known, self.calls, self.last = {}, [], None

    def forward(self, x):
        self.calls.append(len(self.calls))
        self.last = x
        if self.training or "bias" not in self.known:
            self.known["bias"] = self.bias * 2
        return self.norm(x) + self.known["bias"]


def test_verify_with_a_model_that_remembers():
    model = patch_model(Remembers().eval())
    known, calls = model.known, model.calls
    report = verify_patch(model, torch.randn(3, 4))
    assert report, report
    assert model.known is known
    assert model.calls is calls
    assert not known
    assert not calls
    assert model.last is None


class Draws(Parts):
    """As VITS: which layers are left out in training is drawn from NumPy's generator, not from torch's."""

    def forward(self, x):
        return self.norm(x) * numpy.random.uniform(0, 1) * random.random()


def test_verify_with_random_numbers_of_others():
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    report = verify_patch(Draws(norm=nn.LayerNorm(4)), torch.randn(3, 4))
    assert report, report
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_verify_restores_after_an_error(net):
    wrong = torch.randn(2, 3, 6, 6)
    before = Snapshot(net)
    with pytest.raises(RuntimeError, match="expected input"):
        verify_patch(net, wrong)
    before.check(net)


def test_verify_with_dropout_and_integer_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.drop = nn.Dropout(0.5)

        def forward(self, ids, *, scale):
            h = self.drop(self.embedding(ids))
            return {"out": (h @ h.transpose(1, 2) * 0.3).softmax(-1), "ids": ids, "scale": scale}

    report = verify_patch(Model().train(), torch.randint(0, 11, (2, 7)), scale=2)
    assert report, report


def test_verify_where_inputs_can_have_no_gradient(x):
    class Model(nn.Module):
        def forward(self, x):
            x = x[:, None]
            if self.training:
                x.requires_grad = True  # as transformers' Wav2Vec2 does
            return F.relu(x * 2) + x

    model = nn.Sequential(Model(), nn.Softmax(-1))
    report = verify_patch(model.train(), x)
    assert report
    assert [c.name for c in report.comparisons] == ["output"]
    assert {c.name for c in verify_patch(model.eval(), x).comparisons} == {"output", "grad of input 0"}


def test_verify_sees_nan_at_other_places():
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert verification.compare_values("x", nan, nan, nan).ok
    assert not verification.compare_values("x", nan, torch.tensor([1.0, 2.0, float("inf")]), nan).ok
    assert not verification.compare_values("x", nan, torch.tensor([1.0, float("nan"), -float("inf")]), nan).ok


def test_verify_where_gradients_are_nothing_but_roundings():
    """That of a bias before a norm is 0. What comes out is noise, which may be 0 in one of both orders of summation."""
    zero, one = torch.zeros(3), torch.full((3,), 1e-8)
    assert verification.compare_values("grad of bias", zero, one, zero, noise=1.0).ok
    assert not verification.compare_values("grad of bias", zero, one, zero, noise=0.01).ok
    assert not verification.compare_values("grad of bias", zero, torch.full((3,), 1e-6), zero, noise=1.0).ok
    assert not verification.compare_values("output", zero, one, zero).ok
    assert not verification.compare_values("grad of bias", one * 1e3, one, one * 1e3, noise=1.0).ok


class Odd(nn.Module):
    """Changes the list that it is given, has a sparse buffer, and an output whose length depends on values."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()
        self.register_buffer("pairs", torch.eye(3).to_sparse())

    def forward(self, parts):
        for i, part in enumerate(parts):
            parts[i] = self.act(self.fc(part)) + part
        total = sum(parts)
        return total, total[total > total.detach().median()]


def test_verify_with_an_odd_model():
    report = verify_patch(Odd(), [torch.randn(5, 4), torch.randn(5, 4)])
    assert report, report
    names = {comparison.name for comparison in report.comparisons}
    assert names >= {"output 1", "grad of input 0", "grad of input 1", "buffer pairs"}


def test_verify_looks_through_wrappers(net, x):
    assert verify_patch(nn.DataParallel(net), x)
    assert verify_patch(torch.compile(net, backend="eager"), x)
