"""Regions in autograd: derivatives, threads, modes, hooks, checkpoints, what is kept."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from contextlib import nullcontext
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastlayers
from fastlayers import functional
from fastlayers.graphs.state import Counter as Operations
from fastlayers.graphs.words import InWords
from fastlayers.ops import elementwise, rotary, squeeze_excite
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import Region
from tests.harness import DEVICES
from tests.ops.test_squeeze_excite import SqueezeExcite, StandIns
from tests.patching.networks import Parts
from tests.patching.regions.blocks import (
    Block,
    Bottleneck,
    Cross,
    FlashBlock,
    Plain,
    Spellings,
    images,
    in_regions,
    leaves,
    recorded,
    repeated,
    same,
    tokens,
)

pytestmark = [
    pytest.mark.cpu_kernels,
    pytest.mark.usefixtures("from_the_first_call", "any_size", "executor", "operations_of_torch"),
]


class Gated(nn.Module):
    """A convolution of x·gate, where the gate comes from the mean of x."""

    def __init__(self):
        super().__init__()
        self.first, self.se, self.last = nn.Conv2d(8, 3, 1), SqueezeExcite(), nn.Conv2d(3, 8, 1, bias=False)

    def forward(self, x):
        return self.last(self.se(self.first(x)))


@pytest.mark.parametrize("shape", ["expanded", "transposed", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_other_gradients(shape, device):
    module, x = Block().to(device), tokens(device=device)
    region = recorded(module, x)
    dy = {
        "expanded": lambda: torch.ones((), device=device).expand(2, 5, 16),
        "transposed": lambda: torch.randn(16, 5, 2, device=device).transpose(0, 2),
        "none": lambda: None,
    }[shape]()
    for kind in (module, region):
        x.grad = None
        out = kind(x)
        out.sum().backward() if dy is None else out.backward(dy)
        kind.dx = x.grad
    torch.testing.assert_close(region.dx, module.dx)


#: The threads that ran the backward of ``noted``.
THREADS = []


@torch.library.custom_op("fastlayers_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fastlayers_tests::noted_backward", mutates_args=())
def noted_backward(dy: torch.Tensor) -> torch.Tensor:
    THREADS.append(threading.get_ident())
    return dy * 2


noted.register_autograd(lambda ctx, dy: noted_backward(dy))
for op in (noted, noted_backward):
    op.register_fake(torch.empty_like)


class Noted(Parts):
    def forward(self, x):
        return torch.ops.fastlayers_tests.noted(x * self.weight) + x


@pytest.mark.parametrize("device", DEVICES)
def test_a_recording_runs_backwards_where_autograd_does(device, runs):
    """cuDNN makes its plans again in another thread: 5 s in EfficientNet-B0."""
    THREADS.clear()
    region, x = in_regions(Noted(weight=nn.Parameter(torch.randn(16))).to(device)), tokens(device=device)
    for _ in range(3):
        region(x).sum().backward()
    assert runs == [True, False, False]
    assert len(THREADS) >= 3
    assert len(set(THREADS)) == 1
    if device == "cuda":
        assert threading.get_ident() not in THREADS


def test_a_thread_does_not_wait_for_a_recording(runs):
    module, x, found = Block(), tokens(), []
    region = in_regions(module)
    with regions._lock:
        other = threading.Thread(target=lambda: found.append(region(x)))
        other.start()
        other.join(timeout=60)
    assert torch.equal(found[0], module(x))
    assert runs == []
    region(x)
    assert runs == [True]


def test_a_thread_does_not_run_what_is_being_recorded(monkeypatch, runs):
    """It found the entry of the recording, which had no code yet."""
    module, x, found = Block(), tokens(), []
    region = in_regions(module)
    record = regions.Region.record

    def meanwhile(self, *arguments):
        outcome = record(self, *arguments)
        other = threading.Thread(target=lambda: found.append(region(x)))
        other.start()
        other.join(timeout=60)
        return outcome

    monkeypatch.setattr(regions.Region, "record", meanwhile)
    out = region(x)
    assert torch.equal(found[0], module(x))
    assert torch.equal(out, found[0])
    assert runs == [True]


def test_twice_backward():
    region, x = recorded(Block(), tokens()), tokens()
    out = region(x).square().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_a_backward_lets_go_of_the_inputs():
    region, x = in_regions(Block()), tokens()
    for _ in range(2):
        given = x * 2
        gone, out = ref(given), region(given)
        del given
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert gone() is None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out.sum(), region.gamma, create_graph=True)


def test_two_forwards_before_a_backward():
    module = Block(p=0.2)
    region, a, b = recorded(module, tokens()), tokens(), tokens().detach() * 2
    found = []
    for kind in (module, region):
        torch.manual_seed(0)
        found.append(torch.autograd.grad((kind(a) * kind(b)).sum(), [*kind.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [lambda: Block(8, p=0.3), Bottleneck, Spellings])
def test_second_derivatives(make, device):
    module = make().double().to(device)
    x = torch.randn(*((2, 8, 4, 4) if make is Bottleneck else (2, 3, 8)), dtype=torch.float64, device=device)
    x.requires_grad_()
    region = recorded(module, x)
    found = []
    for kind in (module, region):
        torch.manual_seed(1)
        wanted = [x, *kind.parameters()]
        out = sum(t.square().sum() for t in leaves(kind(x)))
        grads = torch.autograd.grad(out, wanted, create_graph=True, materialize_grads=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), wanted, materialize_grads=True))
        found[-1] += tuple(kind.buffers())
    torch.testing.assert_close(*found)


def test_one_tensor_given_twice(runs, monkeypatch):
    monkeypatch.setattr(demand, "FREE", 4)
    module = Cross()
    region = in_regions(module)
    x, y = tokens(2, 3, 8), tokens(2, 3, 8)
    for given in ((x, x), (x, y), (x, x), (x, y), (x, x, (y, y)), (x, y, (x, y)), (x, x, (y, y)), (x, y, (x, y))):
        same(module, region, *given)
    assert runs == [True, True, False, False, True, True, False, False]


def test_a_second_derivative_for_one_tensor_given_twice():
    module = Cross().double()
    region = in_regions(module)
    x = tokens(2, 3, 8, dtype=torch.float64)
    for _ in range(2):
        assert torch.autograd.gradgradcheck(lambda x: region(x, x, (x,)), (x,))


def add_parameter(module):
    module.register_parameter("first", nn.Parameter(torch.ones(1)))
    module._parameters = {"first": module._parameters.pop("first"), **module._parameters}


def add_hook(module):
    module.hooks["double"] = lambda y: 2 * y


@pytest.mark.parametrize(
    "change",
    [
        add_parameter,
        add_hook,
        lambda module: setattr(module, "scale", 1.0),
        lambda module: module.sizes.update(second=5),
        lambda module: setattr(module, "join", lambda x, y: x - y),
        lambda module: module.register_buffer("extra", torch.ones(1)),
    ],
)
def test_a_change_of_what_is_read_by_the_way(change, runs):
    module = Plain()
    region = in_regions(module)
    same(module, region, tokens(2, 3, 8))
    change(module)
    change(region)
    same(module, region, tokens(2, 3, 8))
    assert runs[0]


class Moves(nn.Module):
    """Assigns what is there already, unless the tensors are somewhere else or the batch has another size."""

    def __init__(self):
        super().__init__()
        self.norm, self.size = nn.LayerNorm(8), 0
        self.register_buffer("table", torch.randn(8))
        self.rows = torch.randn(8)

    def forward(self, x):
        self.table, self.rows = self.table.to(x.device), self.rows.to(x.dtype)
        self.size = x.shape[0]
        return self.norm(x * self.table + self.rows).tanh() * self.size


def test_an_assignment_of_what_is_there(runs, monkeypatch):
    monkeypatch.setattr(demand, "CALLS", 2)  # as users have it: the first call assigns
    module = Moves()
    region = in_regions(module)
    for x in (tokens(2, 8), tokens(2, 8), tokens(2, 8), tokens(3, 8), tokens(3, 8)):
        same(module, region, x)
        assert region.size == len(x)
    assert runs == [True, False, True]
    region.double()
    assert region(tokens(3, 8).double()).dtype is torch.float64
    assert region.rows.dtype is torch.float64


class Remembers(Parts):
    """Keeps something for a method of its own, and forgets it, as attention layers of torch_geometric do."""

    def forward(self, x, keeps=False, counts=False):
        self.kept = x.exp()
        x = self.added(self.norm(x))
        self.kept = self.kept if keeps else None
        self.calls += counts
        return x.tanh()

    def added(self, x):
        return x * 2 + self.kept


def test_an_assignment_that_is_taken_back(runs):
    module = Remembers(norm=nn.LayerNorm(8), kept=None, calls=0)
    region = repeated(module, tokens(2, 8))
    assert runs == [True, False]
    assert region.kept is None
    region(tokens(2, 8), keeps=True)
    assert region.kept is not None
    same(module, region, tokens(2, 8))  # what was kept is forgotten again, op by op
    assert region.kept is None
    region(tokens(2, 8), counts=True)
    region(tokens(2, 8), counts=True)
    assert region.calls == 2
    assert not any(runs[2:])


class Collects(Parts):
    """Returns a list that it was given, beside what it made of it, as the heads of ultralytics do."""

    def forward(self, levels, more):
        total = self.norm(levels[0] + levels[1]).tanh() * more["scale"]
        return total, {"features": levels, "more": [more, total]}


def test_a_result_that_holds_an_argument(runs):
    module = Collects(norm=nn.LayerNorm(8))
    region = in_regions(module)
    for _ in range(2):
        levels, more = [tokens(2, 8), tokens(2, 8)], {"scale": tokens(2, 8)}
        total, rest = region(levels, more)
        assert torch.equal(total, module(levels, more)[0])
        assert rest["features"] is levels
        assert rest["more"][0] is more
        assert rest["more"][1] is total
    assert runs == [True, False]


class Makes(nn.Module):
    """Makes layers without parameters while it runs, and calls a function that calls another one."""

    def __init__(self, layer=nn.ReLU):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), layer

    def forward(self, x):
        act = getattr(self, "act", nn.Identity())
        x = functools.reduce(lambda y, n: y * n + self.norm.weight, (2, 3), nn.ZeroPad2d((1, 0, 0, 0))(x)[..., 1:])
        return act(self.layer()(self.norm(x)).tanh())


def test_layers_that_are_made_in_a_forward(runs, monkeypatch):
    module = Makes()
    region = repeated(module, tokens(2, 8))
    assert runs == [True, False]
    for each in (module, region):
        each.act = nn.Tanh()
    same(module, region, tokens(2, 8))
    assert runs == [True, False, True]
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 2)
    same(module, region, tokens(2, 8))
    calls = len(runs)
    draws, x = in_regions(Makes(functools.partial(nn.Linear, 8, 8))), tokens(2, 8)  # each time other weights
    assert not torch.equal(draws(x), draws(x))
    assert len(runs) == calls


def test_two_lambdas_in_a_line(runs):
    module = Plain()
    module.join, _ = lambda x, y: x - y, lambda x, y: x * y
    repeated(module, tokens(2, 3, 8))
    assert not runs


class Tied(nn.Module):
    """Two parameters in one memory, of which a view is needed in the backward."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(4, 4)
        self.a, self.b, self.norm = nn.Parameter(memory), nn.Parameter(memory.view(2, 8)), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm((x @ self.a.t()).tanh() @ self.b.view(4, 4)[:2].t().sigmoid()[:, :1].expand(4, 4)).tanh()


def test_parameters_that_share_memory(runs):
    repeated(Tied(), tokens(3, 4))
    assert runs == [True, False]


@pytest.mark.parametrize("target", ["result", "input", "parameter"])
def test_what_backward_needs_must_not_be_written(target):
    class Layer(Parts):
        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x))) * 2) * 3).sigmoid().view(-1, 2)

    module = Layer(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.LayerNorm(4))
    region = in_regions(module)
    for kind in (module, region, region):
        x = tokens(2, 3, 4) * 1
        out = kind(x)
        with torch.no_grad():
            {"result": out, "input": x, "parameter": kind.b.weight}[target].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_result_may_be_written_in_place():
    module = Block()
    region, x = recorded(module, tokens()), tokens()
    for kind in (module, region):
        out = kind(x)
        out += 1
        F.relu_(out)
        kind.dx = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(region.dx, module.dx)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, device):
    module = Block(p=0.3).to(device)
    region, x = in_regions(module), tokens(device=device)
    found = []
    for kind in (module, region, region):
        torch.manual_seed(0)
        x.grad = None
        checkpoint(kind, x, use_reentrant=reentrant).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


class Turns(Parts):
    def forward(self, x):
        angles = torch.arange(5 * 4, device=x.device, dtype=torch.float32).view(5, 4).repeat(1, 2)
        q, k = functional.rotary(*self.qk(x).unflatten(-1, (2, 8)).unbind(-2), angles.cos(), angles.sin())
        return q * k


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_call_of_an_op_is_recorded_as_later_ones(device, runs):
    """As a checkpoint has it recorded. The op plans its calls by running torch's on tensors without memory."""
    module, x = Turns(qk=nn.Linear(16, 16)).to(device), tokens(device=device)
    rotary.known_plan.cache_clear()
    same(in_regions(module), module, x)
    assert runs == [True]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_frees_what_a_region_is_given(frozen):
    """Also what only the derivative of the backward reads, which then computes it again."""
    module = Block().requires_grad_(not frozen)
    region, x = in_regions(module), tokens()
    found = []
    for kind in (module, region, region):
        memory = []

        def block(x, kind=kind, memory=memory):
            between = x * 2
            memory.append(StorageWeakRef(between.untyped_storage()))
            return kind(between)

        out = checkpoint(block, x, use_reentrant=False)
        assert memory[0].expired()
        (dx,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        found.append((dx, torch.autograd.grad(dx.sin().sum(), x)[0]))
    for dx, second in found[1:]:
        assert torch.equal(dx, found[0][0])
        torch.testing.assert_close(second, found[0][1])


def kept_by(call):
    """The bytes that a call leaves allocated, its result among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        out = call()
    events = run.profiler.kineto_results.events()
    assert out.requires_grad
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("kind", "inputs"), [(Block, tokens), (Bottleneck, images), (Gated, images)])
def test_a_region_keeps_no_more_than_op_by_op(kind, inputs, autocast, runs, monkeypatch):
    kernels = StandIns()
    for family in (squeeze_excite.FAMILY, elementwise.FAMILY):
        monkeypatch.setattr(family, "kernels_for", lambda x: kernels)
    monkeypatch.setattr(elementwise, "GPU_LEAST", 0)
    module, x, kept = fastlayers.patch_model(nn.Sequential(kind())), inputs(), []
    for context in (nullcontext, nullcontext, no_regions):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context():
            kept.append(kept_by(lambda: module(x)))
    assert runs == [True, False]
    assert kept[1] <= kept[2]


def test_hooks_on_saved_tensors_see_what_is_kept():
    region, x = in_regions(Block()), tokens()
    counts = []
    for _ in range(2):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, packed=packed: packed.append(t) or t, lambda t: t):
            out = region(x)
        out.sum().backward()
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0  # a recomputation that finds a region counts what the first forward saved


def test_transforms_run_op_by_op(runs):
    module = Block()
    region, x = recorded(module, tokens()), tokens()
    del runs[:]
    stacked = torch.stack([x, x * 2])
    torch.testing.assert_close(torch.func.vmap(region)(stacked), torch.func.vmap(module)(stacked))
    _, dx = torch.func.jvp(region, (x,), (x,))
    torch.testing.assert_close(dx, torch.func.jvp(module, (x,), (x,))[1])
    assert not runs


def test_copies_and_pickles():
    region = recorded(Block(), tokens())
    copied = copy.deepcopy(region)
    same(region, copied, tokens())
    state = pickle.loads(pickle.dumps(region))
    assert type(state) is Block
    same(state, region, tokens())


def test_gradients_that_are_not_asked_for(runs):
    module, x = Block(), tokens()
    region = recorded(module, x)
    for wanted in (lambda kind: [x], lambda kind: [kind.gamma], lambda kind: [kind.mlp[0].weight, x]):
        found = [torch.autograd.grad(kind(x).square().sum(), wanted(kind)) for kind in (module, region)]
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert runs == [True, False, False, False]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("transform", ["autograd", "torch.func"])
def test_batched_gradients(transform, p):
    module, x = Block(p=p), tokens()
    region, dys, found = recorded(module, x), torch.randn(3, 2, 5, 16), []
    for kind in (module, region):
        torch.manual_seed(0)
        grad = functools.partial(torch.autograd.grad, kind(x), [x, kind.gamma], retain_graph=True)
        batched = functools.partial(grad, is_grads_batched=True) if transform == "autograd" else torch.func.vmap(grad)
        found.append(batched(dys))
    torch.testing.assert_close(*found)


def test_forward_derivatives_of_a_backward():
    module, x = Block(), tokens()
    region = recorded(module, x)
    dy, tangent = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    found = []
    for kind in (module, region):
        out = kind(x)
        with forward_ad.dual_level():
            dx = torch.autograd.grad(out, x, forward_ad.make_dual(dy, tangent))[0]
            found.append(tuple(forward_ad.unpack_dual(dx)))
    torch.testing.assert_close(*found)


class Counting(TorchDispatchMode):
    """Counts the operations below autograd."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        assert "fastlayers_regions" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("differentiable", [False, True])
def test_modes_see_torchs_operations(differentiable):
    module, x = Block(), tokens()
    region, counts = recorded(module, x), []
    out = region(x)
    for kind in (module, region):
        with Counting() as counting:
            kind(x).sum().backward()
        counts.append(counting.count)
    assert counts[0] == counts[1]
    with Counting() as counting:  # of the backward alone, whose forward was a region
        torch.autograd.grad(out.sum(), x, create_graph=differentiable)
    assert counting.count > 20


def test_modes_that_need_no_single_operations(monkeypatch):
    """The one in which a parallel model is captured: regions run in it."""
    region, x, seen = recorded(Block(), tokens()), tokens(), []
    run = Region.run
    monkeypatch.setattr(Region, "run", lambda *call: seen.append(call) or run(*call))
    outs = [region(x)]
    with InWords():
        outs.append(region(x))
    assert len(seen) == 2
    with InWords(), Operations():
        outs.append(region(x))
    assert len(seen) == 2
    torch.testing.assert_close(outs[1:], [outs[0]] * 2)


def test_threads():
    module, x = Block(), tokens()
    region = recorded(module, x)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    wrong = []

    def work():
        for _ in range(20):
            found = torch.autograd.grad(region(x).square().sum(), [x, *region.parameters()])
            wrong.extend(1 for a, b in zip(found, expected, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_anomaly_mode_and_profiler(executor):
    region, x = recorded(Block(), tokens()), tokens()
    with torch.autograd.detect_anomaly(check_nan=True), profile(activities=[ProfilerActivity.CPU]) as run:
        region(x).sum().backward()
    names = {event.name for event in run.events()}
    assert {"aten::addmm", "aten::native_layer_norm_backward"} <= names
    assert ("FastlayersRegionBackward" in names) is (executor == "native")


def test_training_of_several_blocks():
    stock = nn.Sequential(*(Block() for _ in range(3)))
    blocks = nn.Sequential(*(in_regions(block) for block in stock))
    for model in (stock, blocks):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens()).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close([*blocks.parameters()], [*stock.parameters()], rtol=0, atol=0)


def test_a_module_that_keeps_its_result_is_collected():
    region, x = in_regions(Block()), tokens()
    for _ in range(3):
        region.__dict__["last"] = region(x)
    gone = ref(region)
    del region
    gc.collect()
    assert gone() is None


def test_a_second_derivative_without_the_module(runs):
    module, x = Block(), tokens()
    region = in_regions(module)
    for _ in range(2):
        out = region(x)
    del region
    gc.collect()
    assert runs == [True, False]
    found = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (out, module(x))]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(dx.square().sum(), x)[0] for dx in found))


def test_a_second_derivative_of_inputs_that_were_written():
    region, x = recorded(Block(), tokens()), tokens()
    out = region(x)
    with torch.no_grad():
        region.attn.proj.bias.add_(1)  # a backward does not need its values
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified in place since"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_what_was_computed_of_a_parameter_that_was_written_through_data():
    """It is computed again for a second derivative. torch has kept it, and no version tells."""
    region, x = recorded(Block(), tokens()), tokens()
    out = region(x)
    region.mlp[0].weight.data.mul_(1 + 1e-6)
    with pytest.raises(RuntimeError, match="written through"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("compiler", [lambda graph: graph, torch.compile(backend="eager")], ids=["graph", "dynamo"])
def test_compiled_autograd(compiler):
    """Two calls of one region in a graph, which is compiled once and run with the values of other calls."""
    module = Block()
    region = recorded(module, tokens())
    for step in range(3):
        found = []
        for call in (module, region):
            x, wanted = tokens(), [*call.parameters()]
            out = call(call(x * step))
            found.append(torch.autograd.grad(out.sum(), [x, *wanted], retain_graph=True))
            with compiled_autograd._enable(compiler):
                found.append(torch.autograd.grad(out.sum(), [x, *wanted]))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                out.sum().backward()
        torch.testing.assert_close(found[1:], [found[0]] * 3)


@pytest.mark.parametrize("make", [Block, FlashBlock])
def test_a_flop_counter_counts_as_without_a_region(make, runs):
    """A forward runs op by op under the mode, the backward of a region is seen as it runs."""
    block = make()
    region, x = in_regions(block), tokens()
    counts = []
    for module in (block, region, region):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        out = module(x)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((counter.get_total_flops(), backward.get_total_flops()))
    assert runs == [True, False]
    assert counts[0][0] > counts[0][1] > 0
    assert counts[1:] == [counts[0]] * 2


def test_activations_may_be_offloaded(runs):
    block = Block()
    region, x = in_regions(block), tokens()
    found = []
    for module in (block, region, region):
        kept: list[torch.Tensor] = []

        def pack(t, kept=kept):
            kept.append(t)
            return t.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(x)
        first = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        with torch.autograd.graph.save_on_cpu():
            out = module(x)
        second = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        assert kept
        found.append((*first, *second))
    assert runs == [True, *[False] * 4]  # Under hooks a call that is recorded is a region, too.
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=0)
