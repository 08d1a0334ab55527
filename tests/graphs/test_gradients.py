"""Backwards of replayed calls that come late, twice or differentiated, and the debugging mode that sees wrong ones."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fastlayers
from fastlayers.graphs import debug
from fastlayers.graphs import gradients as graphs_gradients
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs.capture import Capture
from fastlayers.graphs.gradients import Gradients
from fastlayers.graphs.module import graphs_of
from fastlayers.graphs.pool import Call, in_memory
from tests.harness import needs_gpu

gpu = needs_gpu
pytestmark = pytest.mark.usefixtures("deterministic")


class Scaled(nn.Module):
    """Layers with statistics, a factor, and a buffer that the forward reads and changes."""

    def __init__(self, norm=True):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4))
        )
        self.norm, self.factor = nn.BatchNorm1d(32) if norm else nn.Identity(), 2.0
        self.spectral = parametrizations.spectral_norm(nn.Linear(32, 8))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        y = self.spectral(self.norm(self.layers(x)) * self.factor)
        y = y * (1 + self.mean)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y


class Parts(nn.Module):
    """Not captured itself, but its parts are, into one pool."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x, order):
        x = x * torch.tensor(2.0).pin_memory().to(x.device, non_blocking=True)  # which no graph can hold
        return [getattr(self, name)(x) for name in order]


def rows():
    return torch.randn(16, 32, device="cuda", dtype=torch.float64)


def pair(make=Scaled, calls=5):
    """A stock model, and a graphed copy whose calls are replayed."""
    torch.manual_seed(0)
    stock = make().double().cuda()
    graphed = fastlayers.graph_model(copy.deepcopy(stock))
    for _ in range(calls):
        x = rows()
        for model in (stock, graphed):
            model(x).square().sum().backward()
            model.zero_grad()
    assert sum(row.replays for row in fastlayers.graph_report(graphed)) > 0
    return stock, graphed


def parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


def assert_same(found):
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", True)


CHANGES = {
    "nothing": lambda model: None,
    "an attribute": lambda model: setattr(model, "factor", 3.0),
    "eval": lambda model: model.eval(),
    "a buffer": lambda model: model.mean.zero_(),
    "a hook": lambda model: model.norm.register_forward_hook(lambda module, args, out: out * 2),
}


@gpu
@pytest.mark.parametrize("change", CHANGES)
def test_twice_backward_after_a_change(change, checked):
    """What a backward needs is copied where it may run again; no forward is repeated."""
    found, x = [], rows()
    for model in pair():
        y, wanted = model(x).square().sum(), parameters(model)
        first = torch.autograd.grad(y, wanted, retain_graph=True)
        CHANGES[change](model)
        found.append([*first, *torch.autograd.grad(y, wanted)])
    assert_same(found)


@gpu
def test_backwards_of_other_gradients():
    """As the rows of a Jacobian: the graph must not write the second gradients over the first ones."""
    found, x = [], rows()
    for model in pair():
        y = model(x)
        found.append([g for i in range(3) for g in torch.autograd.grad(y[i, i], parameters(model), retain_graph=True)])
    assert_same(found)


def test_gradients_of_an_earlier_backward_keep_their_values(monkeypatch):
    """The same without a GPU, where memory that nobody has is no graph's."""
    monkeypatch.setattr(graphs_gradients, "same_memory", torch.clone)
    lent = Gradients([torch.zeros(3)], lend=True)

    def replay():
        lent._grads[0].copy_(capture._dys[0] * 2)

    capture = SimpleNamespace(
        pool=SimpleNamespace(lock=nullcontext(), write=lambda number, device: None), device=None, _number=1, used=[0],
        _dys=[torch.zeros(3)], _backward=SimpleNamespace(replay=replay), _gradients=lent, _whole_grads=[None],
        _given=[True],
    )  # fmt: skip
    call = Call(nn.Identity(), (), [])
    call.save()  # as a backward that keeps the graph does
    first, second = (Capture.backward(capture, call, [torch.full((3,), dy)])[0] for dy in (1.0, 5.0))
    assert (first.tolist(), second.tolist()) == ([2.0] * 3, [10.0] * 3)


@gpu
def test_calls_between_two_backwards(checked):
    """A call is replayed while what another one left is a copy, which is put back over what the later one left."""
    found, x = [], rows()
    for model in pair(lambda: Scaled(norm=False)):
        y, wanted = model(x).square().sum(), parameters(model)
        first = torch.autograd.grad(y, wanted, retain_graph=True)
        z = model(x * 2).square().sum()
        found.append([*first, *torch.autograd.grad(y, wanted), *torch.autograd.grad(z, wanted)])
    assert_same(found)


@gpu
def test_a_late_backward_of_layers_that_share_memory(checked):
    """The graph of an earlier layer writes over what a later one keeps: that is copied before."""

    torch.manual_seed(0)
    stock = Parts().double().cuda()
    graphed = fastlayers.graph_model(copy.deepcopy(stock))
    for i in range(12):
        x, found = rows(), []
        for model in (stock, graphed):
            later, earlier = model(x, ("second", "first") if i > 8 else ("first", "second"))
            model.first.factor = 2.0 + i  # Seen by the next call.
            found.append(torch.autograd.grad(later.square().sum() + earlier.sum(), parameters(model)))
        assert_same(found)


@gpu
@pytest.mark.parametrize("change", CHANGES)
def test_a_derivative_of_a_replayed_backward(change):
    """A copy of the module, as it was, runs again, with the buffers as they were."""
    found, x = [], rows()
    for model in pair():
        y, wanted = model(x).square().sum(), parameters(model)
        CHANGES[change](model)
        gradients = torch.autograd.grad(y, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), wanted))
    assert_same(found)


FACTOR = 2.0


@gpu
def test_a_derivative_after_a_change_elsewhere(monkeypatch):
    class Reads(Scaled):
        def forward(self, x):
            return super().forward(x) * FACTOR

    _, graphed = pair(Reads)
    y = graphed(rows()).square().sum()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*what it reads besides its arguments has changed since"):
        torch.autograd.grad(y, parameters(graphed), create_graph=True)


@gpu
def test_a_derivative_while_another_thread_calls():
    """The forward that runs again leaves the module alone."""
    stock, graphed = pair(lambda: Scaled().layers)
    x, wanted = rows(), parameters(graphed)
    expected = torch.autograd.grad(stock(x).square().sum(), parameters(stock))
    with ThreadPoolExecutor(2) as pool:

        def derived(_):
            gradients = torch.autograd.grad(graphed(x).square().sum(), wanted, create_graph=True)
            return [g.detach() for g in gradients]

        for found in pool.map(derived, range(16)):
            assert_same([expected, found])


@gpu
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_parameter_that_is_written_before_a_backward(part):
    """torch raises where the backward reads it."""
    found, x = [], rows()
    for model in pair():
        y, wanted = model(x).square().sum(), parameters(model)
        with torch.no_grad():
            getattr(model.layers[1][3], part).mul_(2)
        if part == "bias":
            found.append(torch.autograd.grad(y, wanted))
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y, wanted)
    if found:
        assert_same(found)


@gpu
def test_graphs_after_one_that_was_dropped():
    """torch closes the pool that graphs shared when the last one is gone."""
    torch.manual_seed(0)
    model = fastlayers.graph_model(Parts().double().cuda())

    def replays():
        for _ in range(8):
            sum(y.square().sum() for y in model(rows(), ("first", "second"))).backward()
        return [row.replays for row in fastlayers.graph_report(model) if row.state == "captured"]

    before = replays()
    model.first.factor = model.second.factor = 3.0
    after = replays()
    assert len(before) == len(after) == 2
    assert all(b > a for a, b in zip(before, after, strict=True))


@gpu
def test_a_constant_that_is_written_before_a_derivative():
    _, graphed = pair()
    graphed.layers[0][0].bias.requires_grad_(False)
    for _ in range(5):
        y = graphed(rows()).square().sum()
        torch.autograd.grad(y, parameters(graphed), retain_graph=True)
    graphed.layers[0][0].bias.zero_()
    with pytest.raises(RuntimeError, match="written since"):
        torch.autograd.grad(y, parameters(graphed), create_graph=True)


@gpu
def test_an_argument_that_is_written():
    class Writes(Scaled):
        def forward(self, x):
            return super().forward(x.mul_(2))

    torch.manual_seed(0)
    model = fastlayers.graph_model(Writes().double().cuda())
    for _ in range(5):
        x = torch.ones(16, 32, device="cuda", dtype=torch.float64)
        model(x)
        assert x.unique().tolist() == [2.0]
    reasons = [row.reason for row in fastlayers.graph_report(model)]
    assert "writes into an argument" in reasons


@gpu
def test_a_forward_that_differentiates():
    """torch.func allows no hooks on saved tensors, by which a capture learns what its backward reads."""

    class Slopes(Scaled):
        def forward(self, x):
            y = super().forward(x)
            return y + torch.func.grad(lambda z: z.tanh().square().sum())(y)

    found, x = [], rows()
    for model in pair(Slopes):
        y, wanted = model(x).square().sum(), parameters(model)
        found.append(torch.autograd.grad(y, wanted))
    assert_same(found)


@gpu
def test_a_replay_leaves_the_memory_of_another_signature_alone(monkeypatch):
    """torch gives cuBLAS one workspace a stream, in the memory of the graph that was captured first."""
    monkeypatch.setattr(graphs_module, "LEAST", 1)
    layers = [nn.Linear(8192, 512), nn.Linear(512, 8192)] * 2
    graphed = fastlayers.graph_model(nn.Sequential(*layers).cuda().bfloat16())
    few, many = (torch.randn(n, 8192, device="cuda", dtype=torch.bfloat16) for n in (16, 256))
    for _ in range(5):
        for x in (many, few):
            graphed(x).square().sum().backward()
    of_many, of_few = (one for each in graphs_of(graphed).signatures.values() for one in each.captures)
    assert (of_many.replays, of_few.replays) == (2, 2)
    graphed.zero_grad()
    memory = [in_memory(b, x.device) for used in (True, False) for b in of_many.pool.blocks(used)]
    for each in memory:
        each.fill_(77)
    graphed(few).square().sum().backward()
    assert of_few.replays == 3
    assert all((each == 77).all() for each in memory)


@gpu
def test_memory_that_is_written_over_is_seen(checked, monkeypatch):
    """What a backward needs is not copied: the debugging mode sees other gradients."""
    _, graphed = pair()
    y = graphed(rows()).square().sum()
    torch.autograd.grad(y, parameters(graphed), retain_graph=True)
    monkeypatch.setattr(Call, "restore", lambda call: None)
    with pytest.raises(AssertionError, match=r"gradients of a Scaled.*, number"):
        torch.autograd.grad(y, parameters(graphed))


@gpu
def test_a_replay_that_differs_is_seen(checked):
    """A forward that reads what neither its arguments nor its modules hold."""
    outside = torch.ones(8, device="cuda", dtype=torch.float64)

    class Reads(Scaled):
        def forward(self, x):
            return super().forward(x) * outside

    _, graphed = pair(Reads)
    outside = torch.zeros(8, device="cuda", dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"results of a Reads.*, number 0, of a replay and of the call op by op"):
        graphed(rows())
