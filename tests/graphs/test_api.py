"""graph_model on a model: undo, copies, memory, wrong arguments."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from weakref import ref

import pytest
import torch
from torch import nn

import fastlayers
from fastlayers.patching.reasons import PatchError, Reason
from tests.graphs.networks import Net, assert_equal, gpu, inputs, pair, replays, same_training, tokens, train

pytestmark = pytest.mark.usefixtures("deterministic")


def test_undo():
    model = Net()
    assert fastlayers.graph_model(model) is model
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert fastlayers.graph_model(model, warmup=1) is model
    assert fastlayers.ungraph_model(model) is model
    assert type(model) is Net
    fastlayers.patch_model(model)
    patched = type(model)
    fastlayers.graph_model(model)
    assert fastlayers.patch_report(model).patched
    assert type(fastlayers.ungraph_model(model)) is patched
    fastlayers.unpatch_model(fastlayers.graph_model(model))
    assert type(model) is Net


def test_patch_comes_first():
    model = fastlayers.graph_model(Net())
    fastlayers.patch_model(model)
    assert fastlayers.patch_report(model)[""].reason is Reason.GRAPHED


def test_copies_and_pickles():
    model = fastlayers.graph_model(Net())
    assert type(copy.deepcopy(model)) is type(model)
    assert type(pickle.loads(pickle.dumps(model))) is Net
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert list(model.state_dict()) == list(Net().state_dict())


@gpu
def test_a_copy_has_graphs_of_its_own():
    _, graphed = pair()
    train(graphed, inputs(6))
    copied = copy.deepcopy(graphed)
    with torch.no_grad():
        copied.head.weight.zero_()
    assert not graphed.head.weight.eq(0).all()
    assert_equal(copied(tokens()), copied.head.bias.expand(4, 8, 8).contiguous())


class Funnel(torch.nn.Module):
    """Tensors of many sizes, few of which fit where another one was."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, n + 8) for n in range(64, 256, 8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin() * x.mean(1, keepdim=True).cos()
        return x


@gpu
def test_tensors_share_one_block(gpu_memory):
    gpu_memory(2**31)
    model, graphed = pair(Funnel)
    x = torch.randn(16384, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    for _ in range(5):
        graphed(x).mean().backward()
    (row,) = fastlayers.graph_report(graphed).captured
    assert row.memory < 1.15 * peak


@gpu
def test_a_forward_may_free_more_than_it_keeps(monkeypatch):
    falling = itertools.count(0, -(2**20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: next(falling))
    assert replays(same_training()) == 5


@gpu
def test_memory_is_given_back():
    _, graphed = pair()
    train(graphed, inputs(6))
    gone = ref(graphed)
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated()
    fastlayers.ungraph_model(graphed)
    assert torch.cuda.memory_allocated() < used
    fastlayers.graph_model(graphed)
    train(graphed, inputs(6))
    del graphed
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "got int"),
        ((Net(), {"warmup": 0}), ValueError, "warmup must be at least 1, got 0"),
        ((Net(), {"max_graphs": 0}), ValueError, "max_graphs must be at least 1, got 0"),
        ((torch.jit.script(nn.Linear(2, 2)),), PatchError, "cannot capture calls of RecursiveScriptModule"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    model, *options = arguments
    with pytest.raises(error, match=message):
        fastlayers.graph_model(model, **dict(*options))
