"""What a region cannot repeat runs op by op."""

from __future__ import annotations

import functools
import gc
import random
from weakref import ref

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.ops import raw_ops
from fastlayers.patching.program.executors import Facts, executor_class
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.regions import demand
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import region_class
from tests.patching.harness import written
from tests.patching.regions.blocks import (
    Block,
    Bottleneck,
    Intermediates,
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


class Base(nn.Module):
    size = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.average = nn.BatchNorm1d(4, momentum=None, affine=False)
        self.calls, self.log, self.holder = 0, [], Intermediates(torch.ones(4))
        self.values = numpy.ones(4, numpy.float32)

    @property
    def seen(self):
        return None

    @seen.setter
    def seen(self, value):
        self.log.append(value)

    def work(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


#: Forwards of Base. What they read and change is no tensor, of no module, or of another call.
REFUSED = {
    "the factor of a norm is the value of a tensor": "return self.average(self.work(x))",
    "a branch": "return self.work(x) if x.sum() > 0 else x",
    "a counter": "self.calls += 1\nreturn self.work(x) * self.calls",
    "a size": "self.size = float(len(x)) + self.calls\nself.calls += 1\nreturn self.work(x)",
    "a property that is set": "self.seen = None\nreturn self.work(x)",
    "a list": "self.log.append(x.shape)\nreturn self.work(x)",
    "a random number": "return self.work(x) * random.random()",
    "a write to an argument": "x.mul_(2)\nreturn self.work(x)",
    "the argument": "return x if x.shape[0] > 0 else self.work(x)",
    "two results in one memory, of which the first is not the larger one": "y = self.work(x)\nreturn y[0], y",
    "numpy": "y = self.work(x)\nreturn y * float(y.detach().numpy().max())",
    "an item of an array": "self.values[0] += 1\nreturn self.work(x) * torch.as_tensor(self.values)",
    "an attribute of an object": "self.holder.value = self.calls\nreturn self.work(x)",
    "a function that counts": (
        "def count():\n    self.calls += 1\n    return self.calls\nreturn self.work(x) * count()"
    ),
    "an object": "return self.work(x), self.holder",
    "an error": ("try:\n    return self.work(x) * self.factor\nexcept AttributeError:\n    return self.work(x) * 2"),
    "a finally": "try:\n    x = x * 2\nfinally:\n    x = x * 3\nreturn self.work(x)",
    "a cache": "return self.work(x) * table(4)",
}


@functools.cache
def table(size):
    return torch.arange(size, dtype=torch.float32)


def refused(what):
    return written(Base, REFUSED[what], globals())()


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_region_cannot_repeat_runs_op_by_op(what, runs):
    module = refused(what)
    region = in_regions(module)
    for i in range(5):
        found = []
        for each in (module, region):
            random.seed(i)
            x = tokens(2, 4).detach() * (-1) ** i
            found.append([*leaves(each(x)), x])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert (module.calls, module.log) == (region.calls, region.log)
    assert not runs


class Holding(Base):
    """Returns an object that it makes, which holds views of other results and of an argument."""

    def forward(self, x):
        y = self.work(x)
        held = Intermediates(y, [y[..., 1:].mT, y[0]], x.view(-1))
        return self.work(y), {"held": held, "none": None, "again": (held, x)}


@pytest.mark.parametrize("grads", [True, False])
def test_objects_and_views_among_results(grads, runs):
    module = Holding()
    region = in_regions(module)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(4):
        found = []
        for each in (module, region):
            with torch.set_grad_enabled(grads):
                out, rest = each(x)
            held = rest["held"]
            assert type(held) is Intermediates
            assert rest["again"][0] is held
            assert rest["again"][1] is x
            assert held.last.data_ptr() == x.data_ptr()
            assert held.scores.untyped_storage().data_ptr() == held.history[0].untyped_storage().data_ptr()
            tensors = [out, held.scores, *held.history, held.last]
            total = sum(t.square().sum() for t in tensors)
            more = torch.autograd.grad(total, [x, *each.parameters()]) if grads else ()
            found.append((tensors, more))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0, check_stride=True)
        torch.testing.assert_close(found[0][1], found[1][1])  # Those of views are added up in another order.
    assert runs[0]
    (entry,) = (e for found in type(region).__fastlayers_region__.entries.values() for e in found)
    assert "tensor(" not in repr(entry.parts)  # What was recorded holds no result.


def test_a_forward_that_fails_on_shapes_alone_says_nothing(runs, caplog, capfd):
    """torch logs the errors of its own fake tensors with a traceback."""

    class Quiet(Base):
        def forward(self, x):
            try:
                x = x @ x
            except RuntimeError:
                x = x * 2
            return self.work(x)

    module, x = Quiet(), torch.randn(2, 4)
    region = in_regions(module)
    for _ in range(3):
        assert torch.equal(region(x), module(x))
    assert not runs
    assert not caplog.records
    assert not capfd.readouterr().err


def test_a_cache_keeps_no_fake_tensor(monkeypatch):
    monkeypatch.setattr(demand, "CALLS", 1)
    table.cache_clear()
    module, x = refused("a cache"), torch.randn(2, 4)
    assert torch.equal(in_regions(module)(x), module(x))
    assert type(table(4)) is torch.Tensor


def test_a_failed_recording_leaves_no_trace(runs):
    class Late(Bottleneck):
        def forward(self, x):
            y = F.dropout(super().forward(x), 0.5)
            return y[0], y

    repeated(Late(), images())  # statistics and random numbers as if there had been none
    assert not runs


def test_a_kernel_that_the_dispatcher_does_not_see_is_refused():
    x = torch.ones(4)
    with Tape([x], []):
        y = torch.empty(4)  # a foreign kernel would write here
        with pytest.raises(Refusal, match="no operation of torch"):
            torch.add(y, x)


class Twice(torch.autograd.Function):
    """Calls what torch's dispatcher does not see, forward and backward, with results of several kinds."""

    @staticmethod
    def forward(ctx, x, scale):
        doubled, *_ = raw_ops.observable(twice)(x, [scale, None], 2)
        ctx.save_for_backward(doubled)
        return doubled

    @staticmethod
    def backward(ctx, dy):
        doubled, rest, none = raw_ops.observable(twice)(dy, [ctx.saved_tensors[0], dy], 2)
        assert none is None
        return doubled + 0 * rest, None


kernel_calls = []


def twice(x, others, factor):
    kernel_calls.append(factor)
    assert len(others) == 2
    return x.detach() * factor, others[0] + 1, None


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        y = self.a(x)
        return self.norm(self.b(y * 2).tanh())


class DoubledByKernels(Doubled):
    __fastlayers_original__ = Doubled  # as patch_model would mark it

    def forward(self, x):
        y = self.a(x)
        return self.norm(self.b(Twice.apply(y, y.detach().sigmoid())).tanh())


def test_kernels_of_ours_run_in_a_region(runs):
    region = repeated(DoubledByKernels(), tokens(2, 4), calls=3)
    assert runs == [True, False, False]
    del kernel_calls[:]
    region(tokens(2, 4)).sum().backward()
    assert kernel_calls == [2, 2]


def test_a_kernel_of_ours_is_seen():
    calls = []

    def double(x):
        calls.append(x)
        return (x.detach() * 2).add_(0)

    x = torch.ones(4)
    tape = Tape([x], [])
    with raw_ops.observed(tape.kernel), tape:
        y = raw_ops.observable(double)(x) + 1
    assert raw_ops.observable(double) is double
    program = tape.program(len(tape.operations), [tape.name(y)], [], [])
    (result,), kept = executor_class()(program, Facts()).forward(x * 3)
    assert torch.equal(result, torch.full((4,), 7.0))
    assert len(calls) == 2
    assert not kept


def test_a_kernel_of_ours_does_not_keep_who_saw_it():
    tape = Tape([torch.ones(4)], [])
    with raw_ops.observed(tape.kernel):
        seen = raw_ops.observable(torch.neg)
    known = ref(tape)
    del tape
    gc.collect()
    assert known() is None
    assert seen(torch.ones(())) == -1


def test_statistics_that_are_inference_tensors(runs):
    with torch.inference_mode():
        repeated(Bottleneck(), images().detach())
    assert runs == [True, False]


def test_a_buffer_of_inference_mode(runs):
    class Shifted(Base):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.shift = torch.ones(4)

        def forward(self, x):
            return self.work(x + self.shift)

    module = Shifted()
    region, x = in_regions(module), tokens(2, 4)
    region.shift = module.shift  # a copy would be a tensor like others
    for _ in range(2):
        same(module, region, x)
    found = [torch.autograd.grad(kind(x).sum(), x, create_graph=True)[0] for kind in (module, region)]
    assert torch.equal(*found)
    assert runs == [True, False, False]


def test_a_foreign_kernel_in_a_rewritten_forward(runs):
    """The function of a user's rule may launch what it likes, also into memory that has values."""

    class Inside(Base):
        def forward(self, x):
            return self.work(x)

    class Rewritten(Inside):
        def forward(self, x):
            y = self.work(x).clone()
            y.detach().numpy().fill(3.0)
            return y

    Rewritten.__fastlayers_original__ = Inside  # as patch_model would mark it
    module = Rewritten()
    module.__class__ = region_class(Rewritten, {})
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(tokens(2, 4)), torch.full((2, 4), 3.0))
    assert not runs


def test_small_forwards_stay_as_they_are(runs):
    region = repeated(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), tokens(2, 4), calls=5)
    assert not runs
    assert type(region).__fastlayers_region__.off == [False, True]


@pytest.mark.parametrize("what", ["a branch", "two results in one memory, of which the first is not the larger one"])
def test_a_refusal_keeps_no_tensor(what):
    region, x = in_regions(refused(what)), tokens(2, 4)
    region(x)
    gone = ref(x)
    del x
    assert gone() is None


def test_op_by_op_on_request(runs):
    region, x = recorded(Block(), tokens()), tokens()
    del runs[:]
    with no_regions():
        region(x)
    assert not runs
    region(x)
    assert runs == [False]
