"""graph_model: calls replayed as CUDA graphs, against the same calls of the stock model."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import needs_gpu
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs import pool as graphs_pool
from fastlayers.graphs import words
from fastlayers.graphs.capture import Replay, substituted
from fastlayers.graphs.gradients import Gradients, uses
from fastlayers.graphs.pool import Call, Pool, in_one_segment
from fastlayers.graphs.state import Counter, Generators, State, begun_collectives
from fastlayers.graphs.words import InWords, concatenated
from fastlayers.ops.dispatch import needs_operations
from fastlayers.patching.reasons import PatchError, Reason
from fastlayers.patching.regions.entries import autocast_state, no_regions
from fastlayers.patching.regions.patterns import flatten
from fastlayers.patching.regions.results import Taken, put_together, take_apart
from fastlayers.patching.rewrite.classes import become

gpu = needs_gpu
pytestmark = pytest.mark.usefixtures("deterministic")


class Block(nn.Module):
    def __init__(self, width=32, p=0.0):
        super().__init__()
        self.norm1, self.norm2, self.p = nn.LayerNorm(width), nn.LayerNorm(width), p
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, width))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / 4
        if mask is not None:
            scores = scores + mask
        x = x + self.proj(F.dropout(scores.softmax(-1), self.p, self.training) @ v)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Blocks, and convolutions with BatchNorm between their tokens."""

    def __init__(self, p=0.0, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p=p) for _ in range(depth))
        self.conv, self.bn, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.scale, self.spare = 1.0, nn.Linear(2, 2)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        x = x + self.bn(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)
        return self.head(x * self.scale)


def pair(make=Net, patch=False, **options):
    """A stock or a patched model on the GPU, and a graphed copy."""
    torch.manual_seed(0)
    model = make().cuda()
    if patch:
        fastlayers.patch_model(model)
    return model, fastlayers.graph_model(copy.deepcopy(model), **options)


def tokens(batch=4, **options):
    return torch.randn(batch, 8, 32, device="cuda", **options)


def inputs(count, batch=4):
    torch.manual_seed(1)
    return [tokens(batch) for _ in range(count)]


def step_of(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model, xs, step=step_of):
    """Losses of steps of SGD, and the parameters and buffers after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    random.seed(2)
    losses = []
    for x in xs:
        losses.append(step(model, x).detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.parameters(), *model.buffers(), torch.rand(1, device="cuda")]


def assert_equal(actual, expected):
    actual, expected = (pytree.tree_leaves(value) for value in (actual, expected))
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
            assert torch.equal(a, b)
        else:
            assert a == b


def same_training(make=Net, xs=None, step=step_of, patch=False, **options):
    stock, graphed = pair(make, patch, **options)
    xs = inputs(8) if xs is None else xs
    calls, watched = itertools.count(1), options.get("warmup", 3)

    def stock_step(model, x):
        """A graphed model watches the operations of its last call before the capture, and regions leave it alone."""
        with no_regions() if next(calls) == watched else nullcontext():
            return step(model, x)

    # Regions are recorded before: calls that run op by op add up in another order than generated kernels. The classes
    # of the two models differ, so that each has regions of its own.
    for model in (stock, graphed) if patch else ():
        train(copy.deepcopy(model), xs[:3], step)
    assert_equal(train(graphed, xs, step), train(stock, xs, stock_step))
    return graphed


def replays(model):
    return sum(row.replays for row in fastlayers.graph_report(model))


def reasons(model):
    return [row.reason for row in fastlayers.graph_report(model) if row.state == "uncaptured"]


# -- steps -------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_training(p, patch):
    graphed = same_training(lambda: Net(p), patch=patch)
    (row,) = fastlayers.graph_report(graphed).captured
    assert (row.fqn, row.graphs, row.replays) == ("", 1, 5)
    assert row.memory > 0


@gpu
@pytest.mark.parametrize("patch", [False, True])
def test_autocast(patch):
    def step(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    assert replays(same_training(step=step, patch=patch)) == 5


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_grad_scaler(dtype):
    def step(model, x):
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
        loss = model(x.to(dtype)).float().square().mean()
        scaler.scale(loss).backward()
        return loss

    assert replays(same_training(lambda: Net().to(dtype), step=step)) == 5


@gpu
def test_gradient_accumulation():
    def step(model, x):
        for part in x.chunk(2):
            loss = model(part).square().mean()
            loss.backward()
        return loss

    assert replays(same_training(step=step)) == 16 - 3


@gpu
def test_two_forwards_before_a_backward():
    def step(model, x):
        loss = (model(x) * model(x * 2)).mean()
        loss.backward()
        return loss

    graphed = same_training(lambda: Net(0.1), step=step)
    (row,) = fastlayers.graph_report(graphed).captured
    assert row.graphs == 2


@gpu
def test_a_smaller_last_batch():
    xs = [x for _ in range(4) for x in (*inputs(3), *inputs(1, batch=2))]
    graphed = same_training(xs=xs)
    assert len(fastlayers.graph_report(graphed).captured) == 2


@gpu
def test_training_and_evaluation_in_turns():
    def step(model, x):
        model.eval()
        with torch.no_grad():
            before = model(x)
        model.train()
        loss = (model(x) - before).square().mean()
        loss.backward()
        return loss

    graphed = same_training(step=step)
    assert [row.replays for row in fastlayers.graph_report(graphed).captured] == [5, 5]


@gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    xs = [x.requires_grad_() for x in inputs(8)]
    same_training(lambda: Checkpointed(0.2), xs=xs)


@gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_outside(reentrant):
    def step(model, x):
        loss = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()
        loss.backward()
        return loss

    same_training(lambda: Net(0.2), step=step)


@gpu
def test_inside_of_ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stock, graphed = pair()
        wrapped = [nn.parallel.DistributedDataParallel(m, find_unused_parameters=True) for m in (stock, graphed)]
        assert_equal(*(train(m, inputs(8)) for m in wrapped[::-1]))
        assert replays(graphed) == 5
    finally:
        dist.destroy_process_group()


class Reduces(nn.Module):
    """What tensor parallelism does without DTensors: a sum over processes in the forward, or in the backward."""

    def __init__(self, backward):
        super().__init__()
        self.blocks, self.backward = nn.ModuleList([Block(), Block()]), backward

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if not self.backward:
            return self.summed(x)
        if x.requires_grad:
            x.register_hook(self.summed)
        return x * 2

    @staticmethod
    def summed(x):
        x = x.clone()
        dist.all_reduce(x.detach())
        return x


@gpu
@pytest.mark.parametrize("backward", [False, True])
def test_collectives(tmp_path, backward, monkeypatch):
    """The model runs as it is, its blocks are captured."""
    monkeypatch.setattr(graphs_module, "LEAST", 5)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        graphed = same_training(lambda: Reduces(backward), inputs(12))
        assert "communicates with other processes" in reasons(graphed)
        assert {row.fqn for row in fastlayers.graph_report(graphed).captured} == {"blocks.0", "blocks.1"}
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("backward", [False, True])
def test_collectives_are_seen(one_process, backward):
    """Those of the forward by its operations, those of the backward, which runs later, by their number."""
    model, x = Reduces(backward), torch.randn(2, 3, 32)
    with Counter() as counter:
        out = model(x)
    assert counter.communicates is not backward
    before = begun_collectives()
    out.sum().backward()
    assert (begun_collectives() > before) is backward
    with Counter() as counter:
        model.blocks[0](x).sum().backward()
    assert not counter.communicates


def test_no_collectives_are_seen():
    assert begun_collectives() == 0
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # It does not count them.
    try:
        dist.all_reduce(torch.ones(2))
        assert begun_collectives() == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("first", [False, True])
def test_children_of_a_sharded_module_are_left(one_process, first):
    """FSDP2 gathers their parameters for the forward and, elsewhere, for the backward."""
    model = Net()
    if first:
        become(model.blocks[0], graphs_module.graphed_class(Block, 3, 8, True))
    fully_shard(model.blocks[0], mesh=dist.init_device_mesh("cpu", (1,)))
    graphs_module.graph_children(model.blocks[0], 3, 8, Pool(shared=True))
    assert not any(map(graphs_module.is_graphed, model.blocks[0].children()))
    graphs_module.graph_children(model.blocks[1], 3, 8, Pool(shared=True))
    assert graphs_module.is_graphed(model.blocks[1].mlp)


def test_a_model_that_was_sharded_afterwards(one_process):
    """It runs as it is, says so, and can be undone; one that was sharded before is refused."""
    mesh = dist.init_device_mesh("cpu", (1,))
    stock, model = fully_shard(Block(), mesh=mesh), fully_shard(fastlayers.graph_model(Block()), mesh=mesh)
    x = torch.randn(2, 3, 32)
    model(x).sum().backward()
    (row,) = fastlayers.graph_report(model)
    assert (row.fqn, row.was, row.reason) == ("", "Block", "arguments are on cpu")
    fastlayers.ungraph_model(model)
    assert type(model) is type(stock)
    assert not [*fastlayers.graph_report(model)]
    model(x).sum().backward()
    with pytest.raises(PatchError, match="a wrapper"):
        fastlayers.graph_model(model)
    assert type(model) is type(stock)


def test_parameters_that_move_before_a_backward():
    """A graph would read where they were: the forward runs again, op by op."""
    model, x = Block(), torch.randn(2, 3, 32)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    parameters = [*model.parameters()]
    given: list[torch.Tensor] = []
    pattern = flatten((x,), given), flatten({}, given)

    class Replayed(SimpleNamespace):
        def uncaptured(self, pattern, given, random, others):
            with substituted(model, others):
                return model(*given)

        def forward(self):
            return (model(x).detach(),)

        def constant(self, results):
            return []

        def fits(self, dys):
            return True

        def backward(self, call, dys):
            raise AssertionError("the graph was replayed")

    capture = Replayed(
        state=State(model, x.device), places=[], autocast=autocast_state(), stale="", communicates=False, read=[],
    )  # fmt: skip
    (out,) = Replay.apply(capture, Call(pattern, []), given, *parameters)
    with torch.no_grad():
        for p in parameters:
            p.data = p.clone()
    assert_equal(torch.autograd.grad(out.square().sum(), parameters), expected)
    assert capture.stale == "its parameters move between a forward and its backward"


# -- calls -------------------------------------------------------------------------------------------------------------


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


def test_a_gradient_in_use_gets_memory_of_its_own():
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
    first, second = gradients.hand_out()
    assert first.data_ptr() != address
    assert second.data_ptr() == other
    assert gradients.in_use()


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


@gpu
def test_another_result_is_used():
    stock, graphed = pair(Several)
    for i, x in enumerate(inputs(12)):
        for model in (stock, graphed):
            model.zero_grad()
            out = model(x)["out"]
            (out.first.mean() + (out.second.mean() if i > 5 else 0)).backward()
        for p, q in zip(stock.parameters(), graphed.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)
    assert replays(graphed) > 6


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


def backward(loss):
    loss.backward()
    return loss


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


# -- what changes between calls ----------------------------------------------------------------------------------------


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


# -- what is not captured ----------------------------------------------------------------------------------------------


class Waits(Net):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum().item() > 0 else -x


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


# -- the model ---------------------------------------------------------------------------------------------------------


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


# -- one segment -------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def allocator(monkeypatch):
    """The settings of torch's allocator, which this test may change, with a device that has virtual memory."""
    before = graphs_pool.settings()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(graphs_pool, "has_virtual_memory", lambda device: True)
    yield graphs_pool.set_settings
    graphs_pool.set_settings("expandable_segments:False")
    graphs_pool.set_settings(before)


@pytest.mark.parametrize("before", ["", "garbage_collection_threshold:0.8"])
def test_segments_grow_while_graphs_are_captured(allocator, before):
    allocator(before)
    with in_one_segment(GPU):
        assert graphs_pool.settings().split(",") == [*filter(None, [before]), "expandable_segments:True"]
    assert graphs_pool.settings() == before


def test_segments_are_fixed_after_a_capture_that_failed(allocator):
    allocator("")
    with pytest.raises(RuntimeError, match="not permitted"), in_one_segment(GPU):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert graphs_pool.settings() == ""


@pytest.mark.parametrize("value", ["True", "False"])
def test_what_the_user_chose_for_segments_holds(allocator, value):
    allocator(f"expandable_segments:{value}")
    with in_one_segment(GPU):
        assert graphs_pool.settings() == f"expandable_segments:{value}"
    assert graphs_pool.settings() == f"expandable_segments:{value}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_concatenation_in_words(dtype, monkeypatch):
    """Of parts with gaps, as a reduce-scatter along the second dimension has them: with torch's bits and layout."""
    seen, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim: seen.append(tensors[0].dtype) or cat(tensors, dim))
    x, odd = torch.randn(4, 6, 16, dtype=dtype), torch.randn(4, 6, 9, dtype=dtype)
    cases = {
        "chunks": (x.chunk(3, 1), 0, True),
        "rows": (x[:, 0].chunk(2), -2, True),
        "the last dimension": (x.chunk(3, 1), -1, False),
        "no gaps": ((x, x), 1, False),
        "odd sizes": (odd.chunk(3, 1), 0, False),
        "unaligned": ((x[:, :, 1:9], x[:, :, 1:9]), 0, False),
        "columns": ((x[:, :, ::2], x[:, :, ::2]), 0, False),
        "other dtypes": ((x[:, :2], x[:, 2:4].double()), 0, False),
        "four dimensions": (x.view(2, 2, 6, 16).chunk(3, 2), 0, False),
        "one dimension": ((torch.randn(0, dtype=dtype), x[:, 0]), 0, False),
    }
    for name, (tensors, dim, in_words) in cases.items():
        seen.clear()
        found, expected = concatenated(tensors, dim), cat(tensors, dim)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name
        assert torch.equal(found, expected), name
        assert (seen == [torch.complex128]) is in_words, name


def test_the_mode_of_a_captured_parallel_model(monkeypatch):
    """It sees the concatenations of a forward and of a backward, and leaves regions as they are."""
    seen = []
    monkeypatch.setattr(words, "concatenated", lambda *args: seen.append(args) or concatenated(*args))
    x = torch.randn(2, 4, 8, requires_grad=True)
    with InWords():
        assert not needs_operations()
        torch.cat(x.detach().chunk(2, 1))
        assert len(seen) == 1
        Concatenates.apply(x).sum().backward()
        assert len(seen) == 2
    assert torch.equal(x.grad, torch.ones_like(x))
    with Counter():
        assert needs_operations()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [Counter, InWords])
def test_modes_that_torch_compiles_in(mode):
    """A function that was compiled as a whole before, and one that is then; and a higher-order operator."""
    from torch.nn.attention.flex_attention import flex_attention

    before, then = (torch.compile(lambda t: (t.sin() * 2).cos(), fullgraph=True, backend="eager") for _ in range(2))
    x, q = torch.randn(4), torch.randn(1, 2, 16, 8)
    expected = before(x)
    with mode() as active:
        found = before(x), then(x)
        attended = flex_attention(q, q, q)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert torch.equal(then(x), expected)
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(q, q, q))
    assert mode is InWords or active.count > 6


class Concatenates(torch.autograd.Function):
    """The identity, whose backward is a concatenation, as that of an all-gather is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.cat([part.clone() for part in dy.chunk(2, 1)], 1)


def test_a_device_without_virtual_memory_has_fixed_segments(allocator, monkeypatch):
    allocator("")
    monkeypatch.setattr(graphs_pool, "has_virtual_memory", lambda device: False)
    with in_one_segment(GPU):
        assert graphs_pool.settings() == ""


@gpu
def test_graphs_are_in_one_segment():
    _, graphed = pair()
    for _ in range(6):
        graphed(tokens()).sum().backward()
    ((capture,),) = (signature.captures for signature in graphs_module.graphs_of(graphed).signatures.values())
    x = torch.empty(2**26, device="cuda")
    found = torch.cuda.memory_snapshot()
    of_graphs = [s["is_expandable"] for s in found if tuple(s["segment_pool_id"]) == capture.pool.handle]
    assert of_graphs
    assert all(of_graphs)
    assert not any(s["is_expandable"] for s in found if s["address"] == x.data_ptr())


@gpu
@pytest.mark.parametrize("end", [fastlayers.ungraph_model, lambda model: model.zero_grad()])
def test_memory_that_is_in_use_is_not_given_back(end):
    """A graph may still run when it is deleted, and its gradients be in use."""
    stock, graphed = pair()
    for x in inputs(6):
        for model in (stock, graphed):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda._sleep(50_000_000)  # some 25 ms
    x = tokens()
    for model in (stock, graphed):
        model.zero_grad()
        model(x).square().mean().backward()
    grads = [p.grad for p in graphed.parameters()]
    expected = [p.grad for p in stock.parameters()]
    end(graphed)
    del graphed, model
    gc.collect()
    torch.cuda.empty_cache()
    other = torch.ones(2**22, device="cuda")
    assert_equal(grads, expected)
    assert other.sum() == 2**22
