"""On a CPU, where few ops have a kernel, a patched model runs the forwards of before unless it gains by others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers import backends
from fastlayers.ops.raw_ops import Family
from fastlayers.patching import Gains, ModuleRule, PatchError, register_rule
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.harness import needs_gpu
from tests.patching.networks import Parts

X = torch.randn(2, 3, 8)


@pytest.fixture(autouse=True)
def _as_for_a_user():
    with rewritten_everywhere(False):
        yield


@pytest.fixture
def asked(monkeypatch):
    """A list that receives the name of the family of each fused op that is called."""
    found = []
    kernels_for = Family.kernels_for

    def noting(family, x):
        found.append(family.name)
        return kernels_for(family, x)

    monkeypatch.setattr(Family, "kernels_for", noting)
    return found


class Block(nn.Module):
    """Its forward is rewritten, with an op that has no CPU kernel."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=1.0):
        return self.norm(x + x.sin()) * scale


class Joint(nn.Module):
    """Its forward is rewritten, with an op that has a CPU kernel."""

    def forward(self, x, scale=1.0):
        return F.relu(x + x.sin()) * scale


@pytest.mark.parametrize("make", [Block, lambda: nn.Softmax(-1), lambda: nn.Sequential(nn.LayerNorm(8))])
def test_the_stock_forward_runs(make, asked):
    model = make()
    expected = model(X)
    fastlayers.patch_model(model)
    assert torch.equal(model(X), expected)
    assert not asked
    with rewritten_everywhere():
        model(X)
    assert asked


@needs_gpu
def test_little_is_left_to_torch(asked):
    """Where a call takes the host longer than the GPU, a kernel that stands for one of torch's gains nothing."""
    model, x = fastlayers.patch_model(nn.LayerNorm(512).cuda()), torch.randn(1024, 512, device="cuda")
    with torch.no_grad():
        assert torch.equal(model(x[:2]), F.layer_norm(x[:2], (512,), model.weight, model.bias))
        assert not asked
        model(x)
        assert asked.pop() == "layer_norm"
        with torch.autocast("cuda"):
            model(x[:2])
        assert asked.pop() == "layer_norm"
    model(x[:2])
    assert asked


def test_a_cpu_kernel_runs(asked):
    fastlayers.patch_model(Joint())(X)
    assert set(asked) == {"elementwise"}


def test_a_forced_backend_runs(asked):
    model = fastlayers.patch_model(Block())
    with backends.backend("eager"):
        model(X)
    assert set(asked) == {"layer_norm"}


@pytest.mark.parametrize(("when", "factor"), [(Gains.EVERYWHERE, 2), (Gains.ON_GPU, 1)])
def test_a_rule_of_a_user_runs_where_it_gains(when, factor):
    class Doubled(nn.Softmax):
        def forward(self, x):
            return 2 * F.softmax(x, self.dim)

    with register_rule(ModuleRule("doubled", "twice the softmax", nn.Softmax, Doubled, when=when)):
        model = fastlayers.patch_model(nn.Softmax(-1))
    assert torch.equal(model(X), factor * X.softmax(-1))


def test_folded_layers_run():
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)).eval()
    fastlayers.fold_batch_norm(model)
    operators = []
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(X)
    operators = [event.name for event in profile.events()]
    assert "aten::conv1d" in operators
    assert "aten::batch_norm" not in operators


def test_another_default_is_still_refused(monkeypatch):
    model = fastlayers.patch_model(Block())
    monkeypatch.setattr(Block, "forward", lambda self, x, scale=2.0: x * scale)
    with pytest.raises(PatchError, match="another default of scale"):
        model(X)


def test_verification_runs_what_was_rewritten(asked):
    assert fastlayers.verify_patch(Block(), X)
    assert asked


def test_segments_run_as_they_were(asked):
    class Layer(Parts):
        """A forward that cannot be recorded as a whole, for its keywords."""

        def forward(self, x, **kwargs):
            y = kwargs.get("added", x)
            return self.norm(x + y)

    model = fastlayers.patch_model(Layer(norm=nn.LayerNorm(8)))
    model.train()
    expected = F.layer_norm(2 * X, (8,))
    assert torch.equal(model(X), expected)
    assert not asked
    with rewritten_everywhere():
        torch.testing.assert_close(model(X), expected)
    assert asked
