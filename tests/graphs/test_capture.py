"""What changes between calls is captured again, and what cannot be captured runs as it is."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs.state import Counter, Generators, State
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.results import Taken, put_together, take_apart
from fastlayers.patching.regions.stand_ins import stand_in
from tests.graphs.networks import (
    Block,
    Net,
    Waits,
    assert_equal,
    gpu,
    inputs,
    pair,
    reasons,
    replays,
    same_training,
    tokens,
    train,
)

pytestmark = pytest.mark.usefixtures("deterministic")


class Adapted(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.base, self.up, self.merged = nn.Linear(4, 4), nn.Linear(4, 4), merged

    def forward(self, x):
        y = self.base(x)
        return torch.tanh(y if self.merged else y + 0.5 * self.up(x))


def replace_parameter(model):
    torch.manual_seed(7)
    model.head.weight = nn.Parameter(torch.randn(8, 32, device="cuda"))


def move_data(model):
    model.head.weight.data = model.head.weight.data.clone() * 2


def freeze(model):
    model.blocks[0].requires_grad_(False)


def change_attribute(model):
    model.scale = 0.5


def replace_child(model):
    torch.manual_seed(7)
    model.blocks[1].mlp = nn.Linear(32, 32).cuda()


def add_hook(model):
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 2)


def own_forward(model):
    model.blocks[1].forward = lambda x, mask=None: x * 3


def other_precision(model):
    model.double()


@gpu
@pytest.mark.parametrize(
    "change",
    [replace_parameter, move_data, freeze, change_attribute, replace_child, add_hook, own_forward, other_precision],
)
def test_a_change_is_seen(change):
    stock, graphed = pair()
    for model in (stock, graphed):
        train(model, inputs(6))
        change(model)
    dtype = stock.head.weight.dtype
    for x in inputs(6):
        found = []
        for model in (stock, graphed):
            model.zero_grad()
            out = model(x.to(dtype))
            out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert_equal(found[1], found[0])


def test_another_model_of_a_class_is_patched():
    """What the report says of a class that nothing fuses may differ then, which is no change of the class."""
    model = fastlayers.patch_model(nn.Sequential(Adapted(merged=False)))
    state = State(model, torch.device("cpu"))
    other = fastlayers.patch_model(nn.Sequential(Adapted(merged=True)))
    assert type(model[0]) is type(other[0])
    assert state.holds()


def test_another_class_of_a_child_is_seen():
    """As another patch_model or fold_batch_norm gives it one."""
    model = Net()
    state = State(model, torch.device("cpu"))
    assert state.holds()
    fastlayers.patch_model(model.blocks)
    assert not state.holds()
    fastlayers.unpatch_model(model.blocks)
    assert state.holds()


@gpu
def test_values_of_parameters_may_change():
    stock, graphed = pair()
    for model in (stock, graphed):
        train(model, inputs(5))
        with torch.no_grad():
            model.head.weight.mul_(2)
    before = replays(graphed)
    assert_equal(graphed(inputs(1)[0]), stock(inputs(1)[0]))
    assert replays(graphed) == before + 1


class CopiesFromCPU(Net):
    def forward(self, x):
        self_made = torch.arange(32.0).pin_memory().to(x.device, non_blocking=True)
        return super().forward(x + self_made / 32)


class DrawsOnCPU(Net):
    def forward(self, x):
        return super().forward(x) * (1 if random.random() > 0.5 else 2)


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 2)


class Synchronizes(Net):
    def forward(self, x):
        x = super().forward(F.dropout(x, 0.1))
        torch.cuda.synchronize()
        return x


class SkipsAtRandom(Net):
    def forward(self, x):
        return super().forward(x) * (1 if torch.rand([]) < 0.5 else 2)


class CopiesANumber(Net):
    def forward(self, x):
        number = torch.tensor(2.0).pin_memory().to(x.device, non_blocking=True)
        return super().forward(x * number)


class Aliases(Net):
    def forward(self, x):
        y = super().forward(x)
        return y[0], y


class Fills(Net):
    def forward(self, x, found):
        x = super().forward(x)
        found.append(x.detach())
        return x


class GivesBack(Net):
    def forward(self, x, found):
        return super().forward(x + found[0]), found


@gpu
@pytest.mark.parametrize("make", [Fills, GivesBack])
def test_a_list_of_the_caller(make):
    """A replay would fill a list of its own, or return one."""
    stock, graphed = pair(make)
    for x in inputs(8):
        for model in (stock, graphed):
            found = [] if make is Fills else [x]
            out = model(x, found)
            assert len(found) == 1
            assert make is Fills or out[1] is found
        assert_equal(graphed(x, found), stock(x, found))
    assert any("a list or a dict that it is given" in reason for reason in reasons(graphed))


@gpu
def test_a_global_function_that_is_replaced_is_seen(monkeypatch):
    stock, graphed = pair()
    for x in inputs(6):
        graphed(x)
    assert replays(graphed)
    monkeypatch.setattr(F, "gelu", lambda x, approximate="none": x * 2)
    x = inputs(1)[0]
    assert_equal(graphed(x), stock(x))


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@gpu
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Waits, "waits for the GPU at"),
        (CopiesFromCPU, "copies a tensor of the CPU"),
        (CopiesANumber, "copies a tensor of the CPU"),
        (DrawsOnCPU, "draws random numbers on the CPU"),
        (SkipsAtRandom, "draws random numbers on the CPU"),
        (Counts, "changes attributes"),
        (Synchronizes, "rror"),
        (Aliases, "a result shares memory"),
        (Hooked, "has hooks"),
    ],
)
def test_uncaptured(kind, reason, monkeypatch):
    """The model runs as it is, its blocks are captured."""
    monkeypatch.setattr(graphs_module, "LEAST", 5)

    def step(model, x):
        out = model(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        return loss

    stock, graphed = pair(kind)
    xs = inputs(12)
    assert_equal(train(graphed, xs, step), train(stock, xs, step))
    assert any(reason in found for found in reasons(graphed))
    assert {row.fqn for row in fastlayers.graph_report(graphed).captured} == {"blocks.0", "blocks.1"}
    assert replays(graphed) > 4
    assert_equal(train(graphed, inputs(2), step), train(stock, inputs(2), step))


@gpu
def test_more_shapes_than_graphs():
    stock, graphed = pair(max_graphs=2)
    with torch.no_grad():
        for _ in range(6):
            for batch in range(1, 5):
                x = tokens(batch)
                assert_equal(graphed(x), stock(x))
    assert len(fastlayers.graph_report(graphed).captured) == 2
    assert reasons(graphed) == ["there are max_graphs=2 graphs already"] * 2


@gpu
def test_small_modules_run_as_they_are():
    graphed = fastlayers.graph_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda())
    for _ in range(5):
        graphed(torch.ones(2, 4, device="cuda"))
    assert reasons(graphed) == ["too small: 2 operations"]


@gpu
def test_transforms_and_compile():
    stock, graphed = pair()
    x = tokens()
    stock.eval(), graphed.eval()
    for _ in range(5):
        graphed(x)
    stacked = torch.stack([x, x * 2])
    torch.testing.assert_close(torch.func.vmap(graphed)(stacked), torch.func.vmap(stock)(stacked))
    compiled = torch.compile(graphed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), stock(x))


class Recurrent(nn.Module):
    """Weights that are in a list too."""

    def __init__(self):
        super().__init__()
        self.blocks, self.lstm = nn.Sequential(Block(), Block()), nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(self.blocks(x))[0]


@gpu
def test_weights_in_a_list():
    same_training(Recurrent)


class Elsewhere(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0].hidden = (nn.Parameter(torch.ones(32, device="cuda")),)

    def forward(self, x):
        return super().forward(x * self.blocks[0].hidden[0])


@gpu
def test_a_parameter_that_is_in_no_module():
    stock, graphed = pair(Elsewhere)
    for model in (stock, graphed):
        for x in inputs(6):
            model(x).square().mean().backward()
    assert torch.equal(graphed.blocks[0].hidden[0].grad, stock.blocks[0].hidden[0].grad)
    assert reasons(graphed)


def test_a_class_that_registers_its_subclasses():
    known = []

    class Registering(nn.Module):
        def __init_subclass__(cls, **options):
            known.append(cls)

    class Kept(Registering):
        pass

    fastlayers.graph_model(Kept())
    assert known == [Kept]


@gpu
def test_inside_of_another_capture():
    stock, graphed = pair()
    graphed.eval(), stock.eval()
    x = tokens()
    with torch.no_grad():
        stock(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = graphed(x)
        graph.replay()
        assert_equal(out, stock(x))


def test_on_a_cpu():
    torch.manual_seed(0)
    stock = Net()
    graphed = fastlayers.graph_model(copy.deepcopy(stock))
    x = torch.randn(2, 8, 32)
    for _ in range(5):
        assert_equal(graphed(x), stock(x))
    (row,) = fastlayers.graph_report(graphed)
    assert row.reason == "arguments are on cpu"
    assert "arguments are on cpu" in str(fastlayers.graph_report(graphed))
    assert not any(hasattr(type(child), "__fastlayers_graphed__") for child in graphed.children())


@pytest.mark.parametrize(("draws", "chances", "idle"), [
    (lambda: [bool(torch.rand([]) < 0.0) for _ in range(3)], 3, True),
    (lambda: torch.ones(3).sum(), 0, True),
    (lambda: bool(torch.rand([]) < 0.1), 1, False),
    (lambda: torch.rand([]) * 0.0, 1, False),
    (lambda: torch.rand(2), 0, False),
    (lambda: random.random(), 0, False),
    (lambda: (torch.rand([]) < 0, random.random()), 1, False),
])  # fmt: skip
def test_numbers_that_decide_nothing(draws, chances, idle):
    before = Generators()
    with Counter() as counter:
        draws()
    assert len(counter.chances) == chances
    assert (before.drew(chances) and not counter.decided) is idle


def test_views_among_results():
    y = torch.randn(3, 4, requires_grad=True) * 2
    value = {"turned": y.t(), "again": y, "first": [y[0], y[1, 1:3]], "detached": y.detach(), "other": y + 1}
    taken = Taken()
    parts = take_apart(value, taken)
    assert [t.shape for t in taken] == [(4, 3), (3, 4), (3, 4)]
    assert [number for number, _ in taken.views] == [0, 0, 0]
    copies = [t.clone() for t in taken]
    assert_equal(put_together(parts, copies), value)
    assert put_together(parts, copies)["again"].data_ptr() == copies[0].data_ptr()


def test_a_state_holds_while_regions_run(monkeypatch):
    """They count their calls, in objects that the classes of patched modules have."""
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))

    class Kinds(nn.Module):
        kinds = {"a": 2.0}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return torch.sin(self.norm(x) * self.kinds["a"]).cos()

    model = fastlayers.patch_model(nn.Sequential(Kinds(), Kinds()))
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    states = State(model, torch.device("cpu")), State(stand_in(model, lambda t: t), torch.device("cpu"))
    for rows in (2, 3, 3, 3):
        model(torch.randn(rows, 8)).sum().backward()
    assert [state.same_python() for state in states] == [True, True]
    monkeypatch.setitem(Kinds.kinds, "a", 3.0)
    assert [state.same_python() for state in states] == [False, False]
