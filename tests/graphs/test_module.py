"""Training steps of graph_model: calls replayed as CUDA graphs, against the same calls of the stock model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs.capture import Replay, substituted
from fastlayers.graphs.pool import Call, Pool
from fastlayers.graphs.state import Counter, State, begun_collectives
from fastlayers.patching.reasons import PatchError
from fastlayers.patching.regions.entries import autocast_state
from fastlayers.patching.regions.patterns import flatten
from fastlayers.patching.rewrite.classes import become
from tests.graphs.networks import (
    Block,
    Net,
    assert_equal,
    gpu,
    inputs,
    pair,
    reasons,
    replays,
    same_training,
    train,
)

pytestmark = pytest.mark.usefixtures("deterministic")


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


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_backward_does_not_need_may_be_written(compiled):
    """Compiled autograd takes all tensors that a node has saved, of which torch tests the versions."""
    x, w, b = (torch.randn(3, requires_grad=True) for _ in range(3))

    class Replayed(SimpleNamespace):
        def forward(self):
            return (torch.ones(3),)

        def constant(self, results):
            return []

        def fits(self, dys):
            return True

        def check(self, call):
            pass

        def backward(self, call, dys):
            call.done = True
            return [dys[0] * 2, None, dys[0] * 3]

    capture = Replayed(state=SimpleNamespace(is_in_place=lambda: True), places=[0], stale="", communicates=False)
    (out,) = Replay.apply(capture, Call((), []), [x], x, w, b)
    with torch.no_grad():
        b.add_(1)
    with compiled_autograd._enable(lambda graph: graph) if compiled else nullcontext():
        grads = torch.autograd.grad(out.sum(), [x, w, b], allow_unused=True)
    assert grads[1] is None
    assert_equal([grads[0], grads[2]], [torch.full((3,), 2.0), torch.full((3,), 3.0)])
    if not compiled:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, x, torch.ones(3))
