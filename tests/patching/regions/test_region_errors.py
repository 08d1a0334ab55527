"""What a recording raises: an error of ours stays one, and what a forward refuses is a refusal."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.patching import PatchWarning, Reason
from fastlayers.patching.regions import region as regions

pytestmark = pytest.mark.cpu_kernels


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.gamma


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), LayerScale()

    def forward(self, x, names=None):
        if x.dim() > 3:  # The trace as a whole ends here, and segments are tried.
            x = x[names["missing"]]
        y = torch.relu(self.scale(self.inner(x)) + x) * 2
        return y.sigmoid() * torch.tanh(y) + x.exp()


def failing(error):
    """A function of fastlayers that raises an error."""
    scope = {"error": error}
    exec(compile("def fails(*args, **kwargs):\n    raise error", regions.__file__, "exec"), scope)
    return scope["fails"]


@pytest.mark.parametrize(
    "error", [KeyError("ours"), AttributeError("ours"), AssertionError("ours"), RuntimeError("ours")]
)
@pytest.mark.parametrize(
    "place",
    ["capture.fake_run.FakeRun.fake", "capture.fake_run.FakeRun.read", "capture.fake_run.FakeRun.kind",
     "regions.readers.places",
     "regions.region.Reader", "regions.recording.agree", "program.tape.Tape.program", "capture.trace.Trace.record",
     "capture.trace.Trace.constant", "capture.trace.Trace.run_segment", "capture.trace.Trace.run_child"],
)  # fmt: skip
def test_an_error_of_ours_is_no_refusal(place, error, monkeypatch):
    monkeypatch.setattr(f"fastlayers.patching.{place}", failing(error))
    x, stock = torch.randn(4, 8), Gated()
    expected = stock(x)

    def run():
        model = fastlayers.patch_model(copy.deepcopy(stock))
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
        return model

    with pytest.raises(regions.RecordingError, match="ours"):
        run()
    monkeypatch.setattr(regions, "RAISE_ERRORS", False)  # as users have it
    with pytest.warns(PatchWarning, match="please report"):
        model = run()
    row = fastlayers.patch_report(model).rows[0]
    assert Reason.RECORDING_FAILED in (row.reason, *(reason for reason, _ in row.left))


def test_an_error_of_a_forward_is_a_refusal():
    model = fastlayers.patch_model(Gated())
    for _ in range(3):
        with pytest.raises(KeyError, match="missing"):
            model(torch.randn(1, 1, 4, 8), {"other": 0})
        with pytest.raises(AttributeError, match="dim"):
            model(None)
    model(torch.randn(4, 8))


class Mapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.norm(x).detach().clone()
        return y.apply_(abs).tanh() * y.map_(y.clone(), max) + y.map2_(y.clone(), y.clone(), max).sigmoid()


class Picking(Mapping):
    def forward(self, x):
        return self.norm(x)[x[:, 0].long()].tanh() * 2 + 1


def test_methods_that_need_memory_are_not_called_on_fake_tensors():
    stock, x = Mapping(), torch.randn(4, 8)
    model = fastlayers.patch_model(copy.deepcopy(stock))
    for _ in range(3):
        assert torch.equal(model(x), stock(x))


def test_values_that_a_forward_refuses_and_other_layouts_are_refusals():
    stock = Picking()
    model = fastlayers.patch_model(copy.deepcopy(stock))
    for _ in range(3):
        with pytest.raises(IndexError, match="out of bounds"):
            model(torch.full((4, 8), 9.0))
    model, x = fastlayers.patch_model(copy.deepcopy(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))), None
    for _ in range(3):
        x = model(torch.randn(4, 8).to_mkldnn())
    assert x.layout is torch._mkldnn


class Normed(Gated):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_a_forward_that_fails_leaves_no_frames():
    """The hooks of a checkpoint end with the frame that opened them: they would be those of later calls, too."""
    patched = fastlayers.patch_model(Normed())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(ValueError, match="more than 1 value") as raised:
                checkpoint(patched, torch.randn(1, 8), use_reentrant=False)
            del raised
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    finally:
        gc.enable()
