"""Graphs that torch.compile makes hold raw ops where autograd was asked for a custom one's gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import DRAWS, excess, greatest_error, needs_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastlayers.ops.layer_norm  # noqa: F401
from fastlayers import patch_model
from fastlayers.ops import dispatch

#: Custom ops, and the raw ops that graphs hold in their places.
HELD = {
    "layer_norm": "layer_norm_forward",
    "add_layer_norm": "add_layer_norm_forward",
    "layer_norm_grad": "layer_norm_backward",
    "group_norm": "group_norm_forward",
    "group_norm_grad": "group_norm_backward",
    "batch_norm": "batch_norm_moments",
    "batch_norm_grad": "batch_norm_backward",
    "softmax": "softmax_forward",
    "softmax_grad": "softmax_backward",
}
needs_csrc = pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "layer_norm_forward"), reason="csrc is not built")


def types(op):
    schema = op.default._schema
    return [str(a.type) for a in schema.arguments], [str(r.type) for r in schema.returns]


@needs_csrc
@pytest.mark.parametrize(("op", "raw"), HELD.items())
def test_a_raw_op_takes_and_gives_what_the_custom_one_does(op, raw):
    assert types(getattr(torch.ops.fastlayers, op)) == types(getattr(torch.ops.fastlayers, raw))


def held(function, *args):
    with FakeTensorMode():
        tensors = [torch.empty(a, device="cuda") for a in args]
        graph = make_fx(function)(*tensors).graph
    return [
        node.target.name().partition("::")[2]
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("fastlayers")
    ]


@needs_csrc
@pytest.mark.parametrize("csrc", [True, False])
def test_a_graph_holds_the_raw_op(monkeypatch, csrc):
    monkeypatch.setattr(dispatch, "graph_holds_csrc", lambda: csrc)

    def both(x, weight, bias):
        y, stats = torch.ops.fastlayers.layer_norm(x, weight, bias, 1, 1e-5, 0, torch.float32, True)
        return torch.ops.fastlayers.layer_norm_grad(y, None, x, stats, weight, 1, 0, True, True)

    expected = ["layer_norm_forward", "layer_norm_backward"] if csrc else ["layer_norm", "layer_norm_grad"]
    assert held(both, (4, 8), (8,), (8,)) == expected


@needs_csrc
@pytest.mark.parametrize("csrc", [True, False])
def test_and_that_of_a_batch_norm(monkeypatch, csrc):
    monkeypatch.setattr(dispatch, "graph_holds_csrc", lambda: csrc)

    def forward(x, weight, bias):
        return torch.ops.fastlayers.batch_norm(x, None, weight, bias, 1e-5, 0)

    assert held(forward, (4, 8, 2, 2), (8,), (8,)) == ["batch_norm_moments" if csrc else "batch_norm"]


@needs_gpu
def test_a_compiled_network_runs_raw_ops_and_keeps_its_statistics(monkeypatch):
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(49)
    stock = nn.Sequential(*layers).cuda()
    exact, model = copy.deepcopy(stock).double(), patch_model(copy.deepcopy(stock))
    compiled, compiled_stock = torch.compile(model), torch.compile(stock)

    def step(network, x):
        for _ in range(2):
            out = network(x)
        network.zero_grad()
        out.sin().sum().backward()
        counted = (b.to(x.dtype, copy=True) for b in network.buffers())
        return [out.detach(), *(p.grad for p in network.parameters()), *counted]

    def stacked(runs):
        return [torch.stack(results) for results in zip(*runs, strict=True)]

    draws = [torch.randn(4, 3, 9, 9, device="cuda") for _ in range(DRAWS)]
    first, code = run_and_get_code(step, compiled, draws[0])
    text = "".join(code)
    for raw in ("batch_norm_moments", "batch_norm_update_", "batch_norm_backward", "layer_norm_forward"):
        assert f"fastlayers.{raw}.default" in text
    for custom in ("batch_norm", "batch_norm_grad", "layer_norm", "layer_norm_grad"):
        assert f"fastlayers.{custom}.default" not in text
    ours = stacked([first, *(step(compiled, x) for x in draws[1:])])
    theirs = stacked(step(compiled_stock, x) for x in draws)
    true = stacked(step(exact, x.double()) for x in draws)
    for mine, its, right in zip(ours, theirs, true, strict=True):
        assert not (found := excess(mine, right, greatest_error(its, right))), found
