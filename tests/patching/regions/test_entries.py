"""What a call saw is what its derivatives see: of a region, whatever changes between a forward and its backward."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointError, checkpoint

import fastlayers
from fastlayers.graphs.capture import Storages
from fastlayers.ops.guard import kept_as_is
from fastlayers.patching.program.program import storage
from tests.harness import needs_gpu

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("executor", "any_size")]

SCALE = 1.0


class Net(nn.Module):
    """Two results, and whatever a forward may read."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.act, self.scale, self.sizes = nn.Tanh(), 1.0, [16, 4]
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        h = self.act(self.n(self.a(x)))
        y = F.dropout(h - self.mean, 0.4, self.training)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.5)
                self.steps.add_(1)
        y = self.b(y) * self.scale * self.sizes[1]
        return torch.sigmoid(y), torch.tanh(y)


def pair(make, steps=3):
    """A model and its twin that is patched, after calls that make it a region."""
    torch.manual_seed(0)
    stock = make().double()
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    for step in range(steps):
        for model in (stock, patched):
            torch.manual_seed(step)
            sum(t.sum() for t in model(inputs())).backward()
    return stock, patched


def inputs(seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator, dtype=torch.double).requires_grad_()


CHANGES = {
    "eval": lambda m: m.eval(),
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "an item": lambda m: m.sizes.__setitem__(1, 5),
    "a child": lambda m: setattr(m, "act", nn.Sigmoid()),
    "a hook": lambda m: m.b.register_forward_hook(lambda *_: torch.zeros(4, 4, dtype=torch.double)),
    "frozen": lambda m: m.requires_grad_(False),
    "a buffer": lambda m: m.mean.add_(3),
    "another parameter": lambda m: setattr(m.b, "weight", nn.Parameter(torch.ones(4, 16, dtype=torch.double))),
    "another call": lambda m: m(inputs(8)),
}


@pytest.mark.parametrize("used", ["both", "twice", "one", "one twice"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [1, 3], ids=["recorded", "region"])
def test_changes_between_a_forward_and_its_backward(change, used, steps, ran):
    found = []
    for model in pair(Net, steps):
        x, parameters = inputs(), [*model.parameters()]
        torch.manual_seed(5)
        z, aux = model(x)
        as_region = bool(ran)
        CHANGES[change](model)
        loss = z.square().sum() + (0 if "one" in used else aux.sum())
        if "twice" in used:
            loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        if change != "frozen":
            loss.backward()
            found.append([x.grad, *(p.grad for p in parameters)])
        else:
            found.append(torch.autograd.grad(loss, [x]))
    torch.testing.assert_close(found[1], found[0])
    assert as_region == (steps == 3)


def test_no_call_keeps_its_module():
    """Nor does a recording keep the parameters of the module that was recorded."""
    _, patched = pair(Net)
    z, _ = patched(inputs())
    gone = weakref.ref(patched), weakref.ref(patched.a)
    del patched, _
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert z.requires_grad


def test_what_a_forward_reads_elsewhere_has_changed(monkeypatch):
    class Reads(Net):
        def forward(self, x):
            z, aux = super().forward(x)
            return z * SCALE, aux

    models = pair(Reads)
    calls = []
    for model in models:
        torch.manual_seed(1)
        calls.append((model, model(inputs())[0]))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    found = []
    for model, z in calls:
        first = torch.autograd.grad(z.sum(), [*model.parameters()], create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(t.square().sum() for t in first), [*model.parameters()])])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("seed", range(2))
def test_penalties_with_buffers_that_a_forward_updates(seed):
    def critic():
        return nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    torch.manual_seed(seed)
    stock = critic().double()
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    for step in range(5):
        found = []
        for model in (stock, patched):
            x = inputs(step)
            loss = model(x)
            model(inputs(step + 1))  # as a critic sees real and generated samples
            if step != 3:
                (dx,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
                loss = (dx.norm(dim=1) - 1).square()
            found.append(torch.autograd.grad(loss.mean(), [*model.parameters()], allow_unused=True))
        torch.testing.assert_close(found[1], found[0])


@needs_gpu
def test_a_checkpoint_of_which_some_results_have_no_gradient():
    """The backward sees the buffers of the recomputation, as it does without a region."""

    class Updated(Net):
        def forward(self, x):
            h = torch.tanh(self.a(x))
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.25)
            h = F.dropout(h + self.mean, 0.25, self.training)
            return self.b(h), torch.sigmoid(h)

    found = []
    for model in pair(Updated, 0):
        model.cuda()
        x = inputs().detach().cuda().requires_grad_()
        for _ in range(4):
            torch.manual_seed(1)
            loss = checkpoint(model, x, use_reentrant=False)[0].square().sum()
            found.append(torch.autograd.grad(loss, [x, model.a.weight, model.b.weight]))
    for ours, theirs in zip(found[4:], found[:4], strict=True):
        torch.testing.assert_close(ours, theirs)


# -- backwards for some of the results ---------------------------------------------------------------------------------


class Three(nn.Module):
    """Results with parts in common, sums of gradients in every order, and parameters of their own."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 12), nn.LayerNorm(12)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        a, b, c = self.norm(self.fc(x)).chunk(3, -1)
        first = self.heads[0](F.gelu(a + b))
        second = self.heads[1](torch.cat([b, c], -1)[..., 2:6].relu()) + a
        third = self.heads[2](c.exp() * b.t().contiguous().t() + x[..., ::2])
        third[0] = 0
        return first, second, (third.abs() + 1).sqrt()


@pytest.mark.parametrize("used", [u for n in (1, 2) for u in itertools.combinations(range(3), n)])
def test_some_results(used, ran):
    found = []
    for model in pair(Three):
        x, parameters = inputs(), [*model.parameters()]
        results = model(x)
        found.append(
            torch.autograd.grad(sum(results[i].square().sum() for i in used), [x, *parameters], allow_unused=True)
        )
    torch.testing.assert_close(found[1], found[0])
    assert len(ran) == 2


def test_some_results_run_no_forward(monkeypatch):
    _, patched = pair(Three)
    first, *_ = patched(inputs())
    monkeypatch.setattr(Three, "forward", None)
    torch.autograd.grad(first.sum(), [*patched.parameters()], allow_unused=True)


@pytest.mark.parametrize("used", [(0,), (2,)])
def test_some_results_of_a_checkpoint(used):
    """What a forward keeps of its inputs, which another node computed, is unpacked once."""
    found = []
    for model in pair(Three):
        x, parameters = inputs(), [*model.parameters()]
        results = checkpoint(lambda x, call=model: call(torch.sin(x)), x, use_reentrant=False)
        found.append(torch.autograd.grad(sum(results[i].sum() for i in used), [x, *parameters], allow_unused=True))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1, 2)])
def test_what_a_backward_does_not_need_may_be_written(used, executor):
    """Such as by an optimizer's step, before a backward for some of the results or of the parameters."""
    if executor == "python":
        pytest.skip("torch unpacks all that a Function of Python keeps")
    found = []
    for model in pair(Three):
        results = model(inputs())
        with torch.no_grad():
            (model.fc if len(used) == 3 else model.heads[2]).weight.mul_(2)
        loss = sum(results[i].square().sum() for i in used)
        found.append(torch.autograd.grad(loss, [*model.heads[0].parameters()], allow_unused=True))
    torch.testing.assert_close(found[1], found[0])


# -- the form of a call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_of_penalty", [1, 2, 4])
def test_differentiated_calls_run_op_by_op_from_then_on(step_of_penalty, ran):
    _, patched = pair(Net, steps=0)
    counts = []
    for step in range(7):
        x = inputs()
        z, aux = patched(x)
        penalised = step >= step_of_penalty
        (dx,) = torch.autograd.grad((z + aux).sum(), x, create_graph=penalised)
        if penalised:
            dx.square().sum().backward()
        counts.append(len(ran))
    assert counts == [0, 0, *range(1, step_of_penalty), *[max(step_of_penalty - 1, 0)] * 7][: len(counts)]


def test_differentiated_calls_record_the_operations_of_torch():
    """What stands for several is differentiated a second time by its reference, which takes longer."""
    stock = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    kinds = []
    with fastlayers.backends.backend("cpu"):
        for _ in range(4):
            x = torch.randn(64, 256, requires_grad=True)
            y = patched(x)
            kinds.append(nodes_of(y))
            (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            dx.square().sum().backward()
    assert kinds[0] != nodes_of(stock(x)) == kinds[-1]


def nodes_of(t):
    """How many nodes of each kind autograd has recorded."""
    kinds, nodes = Counter(), {t.grad_fn}
    while nodes:
        nodes = {following for node in nodes for following, _ in node.next_functions if following is not None}
        kinds.update(node.name() for node in nodes)
    return kinds


def test_a_checkpoint_around_a_call_that_was_differentiated():
    """What its forward keeps is what its recomputation keeps, also if a signature is differentiated in between."""
    stock, patched = pair(Net)
    found = []
    for model in (stock, patched):
        x = inputs()
        torch.manual_seed(5)
        z, aux = checkpoint(model, x, use_reentrant=False)
        state = torch.get_rng_state()
        other = inputs()
        torch.autograd.grad(model(other)[0].sum(), other, create_graph=True)
        torch.set_rng_state(state)
        found.append(torch.autograd.grad((z + aux).sum(), x)[0])
    assert found[0].shape == found[1].shape


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch, self.layer, self.act = nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GELU()

    def forward(self, x):
        return self.act(self.layer(self.batch(x))) + x


def test_a_parameter_that_is_frozen_between_a_checkpoint_and_its_backward():
    """What the recomputation keeps has the same shapes in another order: gradients were wrong, without an error."""
    stock = Normed().double()
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    for _ in range(3):
        patched(inputs()).sum().backward()
    out = checkpoint(patched, inputs(), use_reentrant=False)
    patched.batch.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"different metadata|A different number of tensors"):
        torch.autograd.grad(out.sum(), [patched.batch.bias, patched.layer.weight])


@pytest.mark.parametrize("how", ["data", "in place"])
def test_a_derivative_of_what_hooks_have_copied(how, ran):
    """As save_on_cpu does on a GPU: a second derivative, too, has the weights of the call."""
    stock, found = Normed().double(), []
    for model in (stock, fastlayers.patch_model(copy.deepcopy(stock))):
        for _ in range(3):
            model(inputs()).sum().backward()
        x = inputs()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            y = model(x)
        with torch.no_grad():
            weight = model.layer.weight
            (weight.data if how == "data" else weight).mul_(3)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append([dx, *torch.autograd.grad(dx.square().sum(), [x, *model.parameters()], allow_unused=True)])
    assert ran
    torch.testing.assert_close(found[1], found[0])


def test_a_capture_sees_what_a_backward_reads(ran):
    """Its hook on saved tensors does not get what a second derivative alone reads, such as vectors of spectral norm,
    which calls in between may change."""
    model = fastlayers.patch_model(nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.LayerNorm(8)).double())
    for _ in range(3):
        model(inputs()).sum().backward()
    ran.clear()
    storages = Storages()
    with torch.autograd.graph.saved_tensors_hooks(storages, kept_as_is):
        model(inputs())
    assert ran
    assert storages.found
    assert storages.found.isdisjoint(map(storage, model[0].parametrizations.weight[0].buffers()))
