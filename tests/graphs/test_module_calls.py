"""Calls that are replayed as CUDA graphs: what they are given and give, and who uses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fastlayers
from fastlayers.graphs import gradients as graphs_gradients
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs.capture import Capture
from fastlayers.graphs.gradients import Gradients, same_memory, uses
from fastlayers.graphs.pool import Call, Pool
from tests.graphs.networks import (
    Block,
    Net,
    Waits,
    assert_equal,
    backward,
    gpu,
    inputs,
    pair,
    reasons,
    replays,
    same_training,
    step_of,
    train,
)

pytestmark = pytest.mark.usefixtures("deterministic")


@dataclass
class Output:
    first: torch.Tensor
    second: torch.Tensor | None = None


pytree.register_dataclass(Output) if hasattr(pytree, "register_dataclass") else None


class Several(Net):
    def forward(self, x, *, mask=None, options=None):
        y = super().forward(x, mask)
        z = y * (options or {}).get("factor", 1)
        return {"out": Output(y.sin(), z.cos()), "rank": y.dim(), "best": z.argmax(-1)}


@gpu
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_keywords_and_nested_results(mode):
    stock, graphed = pair(Several)
    mask = torch.randn(8, 8, device="cuda")
    with mode():
        for options in ({}, {"mask": mask}, {"mask": mask, "options": {"factor": 3}}):
            for x in inputs(5):
                expected, actual = stock(x, **options), graphed(x, **options)
                assert_equal(actual, expected)
                for out in (expected, actual) if mode is torch.enable_grad else ():
                    (out["out"].first.mean() + out["out"].second.mean()).backward()
    assert replays(graphed) == 6
    for p, q in zip(stock.parameters(), graphed.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


class Views(Net):
    """As CLIP returns its logits, and their transpose."""

    def forward(self, x):
        y = super().forward(x)
        return {"turned": y.transpose(0, 1), "y": y, "first": y[0], "detached": y.detach().sum(1)}


@gpu
@pytest.mark.parametrize("used", ["turned", "y", "first"])
def test_results_that_are_views(used):
    def step(model, x):
        out = model(x)
        loss = out[used].square().mean() + out["y"].mean() * (used == "y")
        loss.backward()
        return torch.cat([t.flatten() for t in out.values()])

    graphed = same_training(Views, step=step)
    assert replays(graphed) == 5
    out = graphed(inputs(1)[0])
    assert out["first"]._is_view() or out["y"]._is_view()


class SkipsNothing(Net):
    """As transformers skip layers at random, with a probability of 0."""

    def __init__(self):
        super().__init__()
        self.layerdrop = 0.0

    def forward(self, x):
        skipped = [torch.rand([]) < self.layerdrop for _ in range(3)]
        return super().forward(x) if not any(skipped) else x


@gpu
def test_layers_that_are_skipped_with_a_probability_of_zero():
    stock, graphed = pair(SkipsNothing)
    drawn = []
    for model in (stock, graphed):
        torch.manual_seed(3)
        drawn.append([])
        for x in inputs(8):
            model(x).square().mean().backward()
            drawn[-1].append(torch.rand(2))
    assert_equal(drawn[1], drawn[0])
    assert replays(graphed) == 5
    stock.layerdrop = graphed.layerdrop = 1.5
    assert torch.equal(graphed(x), stock(x))


@gpu
def test_children_have_a_warm_up_of_their_own():
    """A region of their parent may have run their operations, so that they have none yet. DeBERTa took 1.5x the time
    of a step without graphs: its layers were captured op by op."""
    stock, graphed = pair(Waits)
    xs = inputs(12)
    assert_equal(train(graphed, xs[:6]), train(stock, xs[:6]))
    assert not fastlayers.graph_report(graphed).captured
    assert_equal(train(graphed, xs[6:]), train(stock, xs[6:]))
    assert fastlayers.graph_report(graphed).captured


class Layers(nn.Module):
    """Not captured itself, but its layers are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x, order="first second"):
        x = x * torch.tensor(2.0).pin_memory().to(x.device, non_blocking=True)
        return [getattr(self, name)(x) for name in order.split()]


@gpu
@pytest.mark.parametrize("order", ["first second", "second first"])
@pytest.mark.parametrize("together", [True, False])
def test_layers_that_share_memory(order, together):
    """Whatever the order of forwards and backwards, none may find that another one wrote over what it kept."""
    stock, graphed = pair(Layers)
    for i, x in enumerate(inputs(12)):
        for model in (stock, graphed):
            model.zero_grad()
            losses = [y.square().mean() for y in model(x, order if i > 8 else "first second")]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
        assert_equal([p.grad for p in graphed.parameters()], [p.grad for p in stock.parameters()])
    first, second = (graphs_module.graphs_of(layer) for layer in (graphed.first, graphed.second))
    assert first.pool is second.pool
    assert all(row.replays >= 5 for row in fastlayers.graph_report(graphed).captured)


def test_what_graphs_that_share_memory_write_over():
    kept = [torch.full((2,), float(i)) for i in range(3)]
    pool, calls = Pool(shared=True), [Call((), [], [t]) for t in kept]
    numbers = [pool.number() for _ in calls]
    for number, call in zip(numbers, calls, strict=True):
        pool.overwrite(number)
        pool.expect(number, call)
    pool.overwrite(numbers[2])
    assert pool.pending() == calls
    pool.overwrite(numbers[1])
    assert pool.pending() == calls[:2]
    assert torch.equal(calls[2].copies[0], kept[2])


def test_a_region_stays_that_of_a_graphed_module(monkeypatch):
    monkeypatch.setattr(
        graphs_module.Graphs, "__call__", lambda self, module, args, kwargs: self.present.forward(module, *args)
    )
    model = fastlayers.patch_model(Net())
    x = torch.randn(2, 8, 32)
    for _ in range(3):
        model(x).sum().backward()
    region = type(model).__fastlayers_region__
    (entries,) = region.entries.values()
    assert entries[0].code is not None
    fastlayers.graph_model(model)
    for _ in range(3):
        model(x).sum().backward()
    assert list(region.entries.values()) == [entries]


class Cache:
    """What a language model returns beside its logits."""

    def __init__(self, keys, name):
        self.layers, self.name, self.device = [{"keys": key} for key in keys], name, keys[0].device


class Caching(Net):
    def forward(self, x):
        y = super().forward(x)
        return y, Cache([y * 2, y.detach() + 1], "dynamic")


@gpu
def test_results_that_are_objects():
    stock, graphed = pair(Caching)
    for x in inputs(6):
        (y, expected), (z, actual) = stock(x), graphed(x)
        assert_equal([z, actual.layers, actual.name], [y, expected.layers, expected.name])
        assert isinstance(actual, Cache)
        (y + expected.layers[0]["keys"]).mean().backward(), (z + actual.layers[0]["keys"]).mean().backward()
    for p, q in zip(stock.parameters(), graphed.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)
    assert replays(graphed) == 3


class Asks(Net):
    """As mask code of transformers does."""

    def forward(self, x):
        if not torch.cuda.is_current_stream_capturing() and x.isnan().any().item():
            return x
        return super().forward(x)


@gpu
def test_code_that_asks_whether_it_is_captured():
    assert replays(same_training(Asks)) == 5


@gpu
def test_results_that_are_kept():
    stock, graphed = pair()
    xs = inputs(8)
    with torch.no_grad():
        assert_equal([graphed(x) for x in xs], [stock(x) for x in xs])


@gpu
def test_gradients_that_are_kept():
    stock, graphed = pair()
    kept = []
    for model in (stock, graphed):
        kept.append([])
        for x in inputs(8):
            model(x).square().mean().backward()
            kept[-1].append([p.grad for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    assert_equal(kept[1], kept[0])


def test_gradients_are_handed_out_without_a_copy():
    tensors = torch.randn(3, 4), torch.randn(5)
    gradients = Gradients(tensors, lend=True)
    parameters = [nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for p, grad in zip(parameters, gradients.hand_out(), strict=True):
        p.grad = grad
    del p, grad
    assert [p.grad.data_ptr() for p in parameters] == [t.data_ptr() for t in tensors]
    assert gradients.in_use()
    for p in parameters:
        p.grad = None
    assert not gradients.in_use()


def test_a_gradient_in_use_gets_memory_of_its_own(monkeypatch):
    # What `move` frees stays the graph's on a GPU. A CPU may give it to the next tensor, so the graph writes elsewhere.
    monkeypatch.setattr(graphs_gradients, "same_memory", lambda t: written.append(t.clone()) or written[-1])
    written = []
    tensors = torch.randn(3, 4), torch.randn(5)
    gradients, before = Gradients(tensors, lend=True), [t.clone() for t in tensors]
    first, second = gradients.hand_out()
    row, address, other = first[1], tensors[0].data_ptr(), tensors[1].data_ptr()
    del first, second, tensors
    gradients.move()
    assert torch.equal(row, before[0][1])
    assert not address <= row.data_ptr() < address + before[0].nbytes
    assert not gradients.in_use()  # The next ones are copies, of what the graph writes where it did.
    assert uses([row]) == uses([torch.empty(2)[1]])  # Nobody else keeps it.
    written[0].fill_(7)
    first, second = gradients.hand_out()
    assert first.data_ptr() != written[0].data_ptr()
    assert torch.equal(first, written[0])
    assert torch.equal(row, before[0][1])
    assert second.data_ptr() == other
    assert gradients.in_use()


def test_a_graph_writes_where_it_did():
    t = torch.randn(4, 3).t()
    same = same_memory(t)
    assert (same.data_ptr(), same.stride()) == (t.data_ptr(), t.stride())
    assert torch.equal(same, t)


@pytest.mark.parametrize("lend", [False, True])
def test_gradients_that_share_memory_are_copied(lend):
    """Autograd gives both terms of a sum one gradient; clipping would scale it twice."""
    one, two, part = torch.randn(3), torch.randn(3), torch.randn(6)[:4]
    shared = one, one.detach(), two, two, part
    gradients = Gradients([*shared, torch.randn(2)], lend)
    own = {t.data_ptr() for t in shared}
    *copies, last = gradients.hand_out()
    assert [torch.equal(a, b) for a, b in zip(copies, shared, strict=True)] == [True] * len(shared)
    assert own.isdisjoint(t.data_ptr() for t in copies)
    assert gradients.in_use() is lend
    del last
    assert not gradients.in_use()


@gpu
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_take_no_second_memory(keep):
    """Unless they are kept: then these are copied from the next backward on."""
    _, graphed = pair()
    kept, others = [], set()
    for i, x in enumerate(inputs(8)):
        step_of(graphed, x)
        if keep:
            kept.append(graphed.head.weight.grad)
        if i > 3:
            others.add(graphed.head.bias.grad.data_ptr())
        graphed.zero_grad()
    (row,) = fastlayers.graph_report(graphed).captured
    (signature,) = graphs_module.graphs_of(graphed).signatures.values()
    assert row.replays == 5
    assert signature.changes == 0
    assert len({grad.data_ptr() for grad in kept}) == len(kept)
    assert len(others) == 1


@gpu
def test_clipped_gradients_of_one_sum():
    class Sum(Net):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(32)) for _ in range(2))

        def forward(self, x):
            return super().forward(x * (self.first + self.second))

    def step(model, x):
        loss = step_of(model, x)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    assert replays(same_training(Sum, step=step)) == 5


@gpu
def test_gradients_of_arguments():
    stock, graphed = pair()
    for x in inputs(6):
        found = []
        for model in (stock, graphed):
            own = x.clone().requires_grad_()
            (model(own * 2).square().mean() + own.sum()).backward()
            found.append(own.grad)
        assert_equal(found[1], found[0])


class Two(Net):
    """Each of two results depends on a parameter that the other one does not depend on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x):
        h = super().forward(x)
        return h * self.first, (h * self.second).abs().sqrt()


@gpu
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
@pytest.mark.parametrize("later", [[0], [1], [0, 1]])
def test_which_results_are_used_changes(used, later):
    """Parameters of a result that is not used get no gradient, those of one that is now get theirs."""
    stock, graphed = pair(Two)
    for i, x in enumerate(inputs(14)):
        for model in (stock, graphed):
            model.zero_grad()
            out = model(x)
            sum(out[k].mean() for k in (used if i < 6 else later)).backward()
        for p, q in zip(stock.parameters(), graphed.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)
    assert replays(graphed) > 6
    assert reasons(graphed) == []


class LossAndLogits(Net):
    def forward(self, x):
        logits = super().forward(x)
        return {"loss": logits.square().mean(), "logits": logits}


@gpu
def test_a_result_that_another_comes_from_is_not_used():
    """Else its gradient, zeros from outside, would take its memory, and a sum in each backward."""
    graphed = same_training(LossAndLogits, step=lambda model, x: backward(model(x)["loss"]))
    (signature,) = graphs_module.graphs_of(graphed).signatures.values()
    assert [capture.used for capture in signature.captures] == [[0]]


@gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_twice_backward(autocast):
    stock, graphed = pair(lambda: Net(0.2))
    for x in inputs(6):
        found = []
        for model in (stock, graphed):
            torch.manual_seed(3)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):  # Not the backward, as torch recommends.
                loss = model(x).float().square().mean()
            wanted = [*model.blocks.parameters()]
            found.append([torch.autograd.grad(loss, wanted, retain_graph=True), torch.autograd.grad(loss, wanted)])
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(loss, wanted)
        assert_equal(found[1], found[0])
    assert_equal([*graphed.buffers()], [*stock.buffers()])


@gpu
def test_create_graph():
    stock, graphed = pair()
    for x in inputs(6):
        found = []
        for model in (stock, graphed):
            own = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(model(own).square().mean(), own, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), [*model.blocks.parameters()]))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert reasons(graphed) == ["its backward is differentiated (create_graph=True)"]


@gpu
@pytest.mark.parametrize("streams", [False, True])
def test_threads(streams):
    """A server calls one model from several threads."""
    stock, graphed = pair()
    stock.eval(), graphed.eval()
    xs = inputs(200)
    with torch.no_grad():
        expected = [stock(x) for x in xs]
        for x in xs[:4]:
            graphed(x)

    def work(first):
        stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            found = [graphed(x) for x in xs[first::4]]
        stream.synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        for first, found in enumerate(threads.map(work, range(4))):
            assert_equal(found, expected[first::4])
    assert replays(graphed) > 190


@gpu
def test_a_capture_leaves_the_module_alone(monkeypatch):
    """Another thread may run it, and has to give its own parameters their gradients."""
    graphed, found, capture = fastlayers.graph_model(Net().cuda()), [], Capture._capture_forward
    parameters = [*graphed.parameters()]

    def checked(self, *args, **options):
        capture(self, *args, **options)
        found.append(all(p is q for p, q in zip(graphed.parameters(), parameters, strict=True)))

    monkeypatch.setattr(Capture, "_capture_forward", checked)
    for x in inputs(5):
        backward(graphed(x).sum())
    assert found == [True]


def test_gradients_move_while_no_other_thread_runs_a_backward():
    seen = []

    class Lock:
        def __enter__(self):
            seen.append("locked")

        def __exit__(self, *error):
            seen.append("free")

    gradients = SimpleNamespace(in_use=lambda: True, move=lambda: seen.append("move"))
    pool = SimpleNamespace(lock=Lock(), write=lambda number, device: None)
    capture = SimpleNamespace(pool=pool, _gradients=gradients, _number=1, device=None, stale="dropped")
    assert not Capture.holds(capture)
    assert seen == ["locked", "move", "free"]
