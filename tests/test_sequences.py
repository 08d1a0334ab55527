"""Random sequences of what people do with a model, stock and patched side by side.

``FASTLAYERS_SEQUENCES=20000 pytest tests/test_sequences.py`` runs more of them, 7 in a second. A sequence that fails is
shrunk and printed as Python.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointError, checkpoint

import fastlayers
from fastlayers.patching.rewrite import regions
from fastlayers.patching.rewrite.regions import Region

MODES = ["grad", "grad", "grad", "no_grad", "checkpoint"]
WRITTEN = ["scale", "steps", "twice", "mean", "data", "in place"]
SEQUENCES = int(os.environ.get("FASTLAYERS_SEQUENCES", "0"))
WIDTH = 6
#: What a patched model may raise and a stock one does not: docs/guarantees.md says when.
ALLOWED = (
    "to differentiate the backward",
    "modified in place since",
    "patched forward were freed",
    "torch.utils.checkpoint: ",  # A hook that was added since makes its recomputation run op by op.
)


class Reads(nn.Module):
    """Attributes in arithmetic and branches, a buffer that is read and updated, two results."""

    def __init__(self):
        super().__init__()
        self.fc, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.steps, self.twice = 1.0, [1, 2], False
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        h = torch.tanh(self.fc(x)) * self.scale + self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.detach().mean(0), 0.25)
        if self.twice:
            h = h * self.steps[1]
        h = F.dropout(h, 0.25, self.training)
        return h, torch.sigmoid(self.aside(h))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch, self.layer, self.act = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.GELU()

    def forward(self, x):
        y = self.act(self.layer(self.batch(x)))
        y += x
        return y


class Gated(nn.Module):
    """A parameter in two places, views and an operation in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.bias = self.down.bias

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b).relu_() + x * self.bias


PARTS = {
    "reads": Reads,
    "norms": Norms,
    "gated": Gated,
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
}


class Model(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(PARTS[name]() for name in parts)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        aside = []
        for part in self.parts:
            x = part(x)
            if isinstance(x, tuple):
                x, more = x
                aside.append(more)
        return (self.last(x), *aside)


class Twins(RuleBasedStateMachine):
    """A stock model and a patched one, to which the same happens."""

    calls = Bundle("calls")
    regions_run = total = 0

    @initialize(parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3), seed=st.integers(0, 99))
    def make(self, parts, seed):
        torch.manual_seed(seed)
        stock = Model(parts).double()
        self.models = [stock, fastlayers.patch_model(copy.deepcopy(stock))]
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in self.models]
        self.hooks: list = []
        self.seed = seed

    def both(self, do):
        """Do the same to both; whether both could. An error of one is one of both, but for those that are allowed."""
        found, errors = [], []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            try:
                found.append(do(model, optimizer))
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)
        if errors[1] is not None and errors[0] is None:
            assert any(text in str(errors[1]) for text in ALLOWED), errors[1]
        # A fused operation does not keep what an operation in place overwrites.
        lenient = isinstance(errors[0], CheckpointError) or "modified by an inplace operation" in str(errors[0])
        if errors[0] is not None and not lenient:
            assert errors[1] is not None, errors[0]
        if errors == [None, None]:
            return found
        for model in self.models:
            model.zero_grad()
        return None

    @rule(
        target=calls, rows=st.sampled_from([3, 3, 3, 5]), mode=st.sampled_from(MODES), seed=st.integers(0, 5),
        needs=st.booleans(), repeats=st.integers(1, 3),
    )  # fmt: skip
    def forward(self, rows, mode, seed, needs, repeats):
        """One of several equal calls, of which the second one is recorded."""
        for _ in range(repeats - 1):
            self.forward_once(rows, mode, seed, needs)
        found = self.forward_once(rows, mode, seed, needs)
        return multiple() if found is None or mode == "no_grad" else (mode, found)

    def forward_once(self, rows, mode, seed, needs):
        def call(model, _):
            torch.manual_seed(seed)
            x = torch.randn(rows, WIDTH, dtype=torch.double, requires_grad=needs)
            torch.manual_seed(seed + 100)
            with torch.no_grad() if mode == "no_grad" else nullcontext():
                out = checkpoint(model, x, use_reentrant=False) if mode == "checkpoint" else model(x)
            return x, out

        found = self.both(call)
        if found is not None:
            torch.testing.assert_close(found[1][1], found[0][1])
        return found

    @rule(
        call=consumes(calls), used=st.sets(st.integers(0, 3), min_size=1), twice=st.sampled_from([False, False, True])
    )
    def backward(self, call, used, twice):
        mode, results = call
        twice &= mode != "checkpoint"  # Its recomputation sees buffers that the forward has updated.

        def run(model, _):
            x, out = results[self.models.index(model)]
            chosen = [out[i] for i in sorted(used) if i < len(out)] or [out[0]]
            loss = sum(t.square().sum() for t in chosen)
            parameters = [p for p in model.parameters() if p.requires_grad]
            wanted = [*parameters, *([x] if x.requires_grad else [])]
            if not loss.requires_grad or not wanted:
                return []
            grads = torch.autograd.grad(loss, wanted, create_graph=twice, allow_unused=True)
            if twice:
                penalty = sum(g.square().sum() for g in grads if g is not None and g.requires_grad)
                if isinstance(penalty, torch.Tensor):
                    penalty.backward()
            else:
                for p, g in zip(wanted, grads, strict=True):
                    if g is not None:
                        p.grad = g if p.grad is None else p.grad + g
            return list(grads)

        found = self.both(run)
        if found is not None:
            torch.testing.assert_close(found[1], found[0])

    @rule(clear=st.booleans())
    def step(self, clear):
        self.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad(set_to_none=clear)))

    @rule(training=st.booleans())
    def mode(self, training):
        self.both(lambda model, _: model.train(training) and None)

    @rule(
        what=st.sampled_from(["scale", "steps", "twice", "mean", "data", "in place"]),
        value=st.sampled_from([0.0, -0.0, 1, 2.0]),
    )
    def write(self, what, value):
        def change(model, _):
            for part in model.parts:
                if isinstance(part, Reads) and what in ("scale", "twice"):
                    setattr(part, what, bool(value) if what == "twice" else value)
                if isinstance(part, Reads) and what == "steps":
                    part.steps[1] = value
                if isinstance(part, Reads) and what == "mean":
                    part.mean.add_(value)
            if what == "data":
                model.last.weight.data.mul_(1 + value / 4)
            if what == "in place":
                with torch.no_grad():
                    model.last.bias.add_(value)

        self.both(change)

    @rule(frozen=st.booleans(), which=st.integers(0, 9))
    def freeze(self, frozen, which):
        self.both(
            lambda model, _: list(model.parameters())[which % len(list(model.parameters()))].requires_grad_(not frozen)
        )

    @rule(which=st.integers(0, 2), kind=st.sampled_from(["child", "hook", "parameter"]))
    def replace(self, which, kind):
        def change(model, _):
            torch.manual_seed(self.seed)
            part = model.parts[which % len(model.parts)]
            if kind == "child" and isinstance(part, Norms):
                part.act = nn.Tanh()
            if kind == "hook":
                part.register_forward_hook(lambda module, args, out: None)
            if kind == "parameter":
                model.last.weight = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.double))

        self.both(change)
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in self.models]

    @rule(how=st.sampled_from(["deepcopy", "unpatch", "patch again"]))
    def remake(self, how):
        if how == "deepcopy":
            self.models = [copy.deepcopy(m) for m in self.models]
        elif how == "unpatch":
            fastlayers.unpatch_model(self.models[1])
        fastlayers.patch_model(self.models[1])
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in self.models]

    @precondition(lambda self: hasattr(self, "models"))
    @invariant()
    def are_equal(self):
        for a, b in zip(*(m.state_dict().values() for m in self.models), strict=True):
            torch.testing.assert_close(b, a)
        for p, q in zip(*(m.parameters() for m in self.models), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)


Twins.TestCase.settings = settings(
    stateful_step_count=25, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_sequences(monkeypatch, pytestconfig):
    """A quarter of the calls run as regions at least: children are called op by op beside these."""
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))
    monkeypatch.setattr(regions, "CALLS", 1)
    counts = {"calls": 0, "regions": 0}
    call, run = Region.__call__, Region.run

    def counted(self, *args):
        counts["calls"] += 1
        return call(self, *args)

    def as_region(self, *args):
        counts["regions"] += 1
        return run(self, *args)

    monkeypatch.setattr(Region, "__call__", counted)
    monkeypatch.setattr(Region, "run", as_region)
    sequences = SEQUENCES or (40 if pytestconfig.getoption("draw") else 100)
    monkeypatch.setattr(Twins.TestCase, "settings", settings(Twins.TestCase.settings, max_examples=sequences))
    Twins.TestCase("runTest").runTest()
    assert counts["regions"] > counts["calls"] / 4, counts
