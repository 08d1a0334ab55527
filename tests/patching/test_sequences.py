"""Random sequences of what people do with a model, stock and patched side by side in float64.

``make test`` runs 100 of them, ``make test-all`` 20,000, as FASTLAYERS_SEQUENCES=20000 says.
These are parts of 100, whose seeds are in the names of the tests. A part that passes becomes a line in
.hypothesis, and an interrupted run goes on with the others. A sequence that fails is shrunk and printed.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import ClassVar
from unittest import mock

import hypothesis
import pytest
import torch
import torch.nn.functional as F
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
    run_state_machine_as_test,
)
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel.replicate import replicate
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fastlayers
from fastlayers.graphs.capture import Capture
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.region import Region
from fastlayers.patching.rewrite.classes import Generated
from tests import ROOT

pytestmark = pytest.mark.cpu_kernels

MODES = {
    "grad": nullcontext, "more grad": nullcontext, "most grad": nullcontext, "checkpoint": nullcontext,
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "save_on_cpu": save_on_cpu,
}  # fmt: skip
BACKWARDS = [*["grad", "backward"] * 2, "retain_graph", "create_graph", "compiled autograd"]
WIDTH = 6
PART = 100
PARTS_OF_ALL = int(os.environ.get("FASTLAYERS_SEQUENCES", PART)) // PART
DONE = ROOT / ".hypothesis"
#: What a patched model may raise and a stock one does not: docs/guarantees.md says when.
ALLOWED = (
    "to differentiate the backward",
    "modified in place since",
    "patched forward were freed",
    "were written since",
    # A hook that was added since makes the recomputation of a checkpoint run op by op.
    "torch.utils.checkpoint: A different number of tensors",
    "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata",
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


class Adapted(nn.Module):
    """A frozen layer, an adapter with a parametrization beside it, and one that can be merged."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = weight_norm(nn.Linear(WIDTH, 2, bias=False)), nn.Linear(2, WIDTH, bias=False)
        self.merged = False

    def merge(self):
        delta = 0.5 * self.up.weight.data @ self.down.weight.data
        self.base.weight.data += -delta if self.merged else delta
        self.merged = not self.merged

    def forward(self, x):
        y = self.base(x)
        return torch.tanh(y if self.merged else y + 0.5 * self.up(self.down(x)))


class Routed(nn.Module):
    """Experts, each of which gets the rows that a router chooses."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + y


class Views(nn.Module):
    """Operations in place on views, and views of a parameter."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, x):
        y = x @ self.table[::2]
        y[:, 1:3].mul_(0.5)
        y.t()[0].add_(x[:, 0])
        z = y.view(-1, 2, WIDTH // 2).transpose(1, 2)
        return torch.tanh(z.reshape(-1, WIDTH)) + self.table[1].expand_as(x)


PARTS = {
    "reads": Reads,
    "norms": Norms,
    "gated": Gated,
    "adapted": Adapted,
    "routed": Routed,
    "views": Views,
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


def nothing(module, args, out):
    """A hook."""


def of(kind, change):
    """A change of all parts of a kind."""
    return lambda model, n: [change(part, n) for part in model.parts if isinstance(part, kind)]


VALUES = [0.0, -0.0, 1, 2.0, 3]
#: What a number may change in a model.
CHANGES = {
    "mode": lambda model, n: model.train(n > 4),
    "scale": of(Reads, lambda part, n: setattr(part, "scale", VALUES[n % 5])),
    "step": of(Reads, lambda part, n: part.steps.__setitem__(1, VALUES[n % 5])),
    "branch": of(Reads, lambda part, n: setattr(part, "twice", n > 4)),
    "buffer": of(Reads, lambda part, n: part.mean.add_(n)),
    "child": of(Norms, lambda part, n: setattr(part, "act", nn.Softplus())),
    "merge": of(Adapted, lambda part, n: part.merge()),
    "hook": of(nn.Module, lambda part, n: n > 4 and part.register_forward_hook(nothing)),
    "no hooks": of(nn.Module, lambda part, n: part._forward_hooks.clear()),
    "data": lambda model, n: model.last.weight.data.mul_(1 + n / 9),
    "in place": lambda model, n: torch.no_grad()(model.last.bias.add_)(n),
    "parameter": lambda model, n: setattr(model.last, "weight", nn.Parameter(model.last.weight.detach() * n / 5)),
    "method": lambda model, n: setattr(model.last, "forward", torch.tanh),
    "no method": lambda model, n: model.last.__dict__.pop("forward", None),
    "frozen": lambda model, n: [p.requires_grad_(not p.requires_grad) for p in [*model.parameters()][n : n + 1]],
}


def copies(tensors, devices, detach=False):
    """What DataParallel gives its replicas, of which there is one on each device."""
    return [[t.detach() if detach else t.view_as(t) for t in tensors] for _ in devices]


class Twins(RuleBasedStateMachine):
    """A stock model and a patched one, to which the same happens."""

    calls = Bundle("calls")
    device, functions = "cpu", ExitStack()
    #: What the calls of patched models ran as.
    ran: ClassVar[Counter] = Counter()

    @initialize(parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3), seed=st.integers(0, 99))
    def make(self, parts, seed):
        Generated.in_use.clear()  # What another sequence has recorded serves no model of this one.
        torch.manual_seed(seed)
        self.parts, self.seed = parts, seed
        self.models = [Model(parts).double().to(self.device)]
        self.models.append(self.patched(copy.deepcopy(self.models[0])))
        self.averages, self.saved = None, None
        self.new_optimizers()

    def teardown(self):
        self.functions.close()

    def new_optimizers(self):
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in self.models]

    def patched(self, model):
        """The model, patched, and graphed on a GPU."""
        fastlayers.patch_model(fastlayers.ungraph_model(model))
        return fastlayers.graph_model(model, warmup=1) if self.device == "cuda" else model

    def inputs(self, rows, seed, needs=True):
        torch.manual_seed(seed)
        x = torch.randn(rows, WIDTH, dtype=torch.double)
        x = x.t().contiguous().t() if seed == 5 else x
        torch.manual_seed(seed + 100)
        return x.to(self.device).requires_grad_(needs)

    def both(self, do):
        """Do the same to both; whether both could. An error of one is one of both, but for those that are allowed."""
        found, errors = [], []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            try:
                found.append(do(model, optimizer))
                errors.append(None)
            except (RuntimeError, ValueError) as error:
                # Its frames hold the hooks on saved tensors of a checkpoint, which would be those of later calls, too.
                errors.append(error.with_traceback(None))
        if errors[1] is not None and errors[0] is None and not any(text in str(errors[1]) for text in ALLOWED):
            raise errors[1]
        # A fused operation does not keep what an operation in place overwrites.
        lenient = isinstance(errors[0], CheckpointError) or "modified by an inplace operation" in str(errors[0])
        if errors[0] is not None and not lenient:
            assert errors[1] is not None, errors[0]
        if errors == [None, None]:
            return found
        for model in self.models:
            model.zero_grad()
        return None

    def same(self, do):
        """Do the same to both, with the same results."""
        found = self.both(do)
        if found is not None:
            torch.testing.assert_close(found[1], found[0])
        return found

    @rule(
        target=calls, rows=st.sampled_from([3, 3, 3, 5, 1]), mode=st.sampled_from(sorted(MODES)),
        seed=st.integers(0, 5), needs=st.booleans(), repeats=st.integers(2, 5),
    )  # fmt: skip
    def forward(self, rows, mode, seed, needs, repeats):
        """One of several equal calls, of which the second one is recorded."""
        for _ in range(repeats):
            found = self.forward_once(rows, mode, seed, needs)
        return multiple() if found is None or mode in ("no_grad", "inference_mode") else (mode, found)

    def forward_once(self, rows, mode, seed, needs):
        def call(model, _):
            x = self.inputs(rows, seed, needs)
            before = self.ran["regions"] + self.ran["graphs"]
            with MODES[mode]():
                out = checkpoint(model, x, use_reentrant=False) if mode == "checkpoint" else model(x)
            if model is self.models[1]:
                self.ran["calls"] += 1
                self.ran["recorded calls"] += self.ran["regions"] + self.ran["graphs"] > before
            return x, out

        return self.same(call)

    @rule(call=consumes(calls), used=st.sets(st.integers(0, 3), min_size=1), how=st.sampled_from(BACKWARDS))
    def backward(self, call, used, how):
        mode, results = call
        if mode == "checkpoint" and how != "backward":  # Its recomputation sees buffers that the forward has updated.
            how = "grad"

        def run(model, _):
            x, out = results[self.models.index(model)]
            chosen = [out[i] for i in sorted(used) if i < len(out)] or [out[0]]
            loss = sum(t.square().sum() for t in chosen)
            wanted = [t for t in (*model.parameters(), x) if t.requires_grad]
            if not loss.requires_grad or not wanted:
                return []
            if how == "backward":
                return loss.backward()
            grads = functools.partial(torch.autograd.grad, loss, wanted, allow_unused=True)
            if how == "retain_graph":
                grads(retain_graph=True)
            compiled = compiled_autograd._enable(lambda graph: graph)
            with compiled if how == "compiled autograd" else nullcontext():
                found = grads(create_graph=how == "create_graph")
            penalty = [g.square().sum() for g in found if g is not None and g.requires_grad]
            if penalty:
                sum(penalty).backward()
            return list(found)

        self.same(run)

    @rule(
        rows=st.sampled_from([3, 5]), mode=st.sampled_from(["grad", "grad", "checkpoint", "save_on_cpu"]),
        steps=st.integers(2, 4), used=st.sets(st.integers(0, 3), min_size=1), how=st.sampled_from(BACKWARDS),
    )  # fmt: skip
    def train(self, rows, mode, steps, used, how):
        for seed in range(steps):
            found = self.forward_once(rows, mode, seed, False)
            if found is not None:
                self.backward((mode, found), used, how)
                self.step(True)

    @rule(call=calls, what=st.sampled_from(["input", "result", "data of a result"]))
    def write_into(self, call, what):
        """Write into a tensor of a call before its backward. Results of a graph are copies of what it has kept."""
        if self.device == "cuda" and what == "data of a result":
            return

        def change(model, _):
            x, out = call[1][self.models.index(model)]
            with torch.no_grad() if what == "input" else nullcontext():
                (x if what == "input" else out[0] if what == "result" else out[0].data).mul_(2)

        self.both(change)

    @rule(clear=st.booleans())
    def step(self, clear):
        def do(model, optimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # Where training diverges, roundings grow.
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear)

        self.both(do)

    @rule(
        how=st.sampled_from([*["threads", "replicas", "average", "low_precision"] * 5, "compile"]),
        rows=st.sampled_from([3, 5]), seed=st.integers(0, 5),
    )  # fmt: skip
    def elsewhere(self, how, rows, seed):
        getattr(self, how)(rows, seed)

    def threads(self, rows, seed):
        """Calls in two threads, in which nothing random happens and no buffer changes."""

        def call(model, _):
            def work(x):
                out = model(x)
                return [*out, *torch.autograd.grad(sum(t.sum() for t in out), x)]

            training, inputs = model.training, [self.inputs(rows, seed + number) for number in range(4)]
            model.eval()
            try:
                with ThreadPoolExecutor(2) as pool:
                    return [*pool.map(work, inputs)]
            finally:
                model.train(training)

        self.same(call)

    def replicas(self, rows, seed):
        """What DataParallel does."""

        def call(model, _):
            with mock.patch(f"{replicate.__module__}._broadcast_coalesced_reshape", copies):
                replicas = replicate(model, [0, 0])
            out = [t for replica in replicas for _ in range(2) for t in replica(self.inputs(rows, seed))]
            sum(t.square().sum() for t in out).backward()
            return out

        self.same(call)

    def average(self, rows, seed):
        """An exponential moving average of the parameters, which is called, or swapped in for a call."""
        if self.averages is None:
            self.averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in self.models]

        def do(model, _):
            average = self.averages[self.models.index(model)]
            average.update_parameters(model)
            if rows == 5:
                return average(self.inputs(rows, seed))
            pairs = [*zip(model.parameters(), average.module.parameters(), strict=True)]
            for p, q in pairs:
                p.data, q.data = q.data, p.data
            out = model(self.inputs(rows, seed))
            for p, q in pairs:
                p.data, q.data = q.data, p.data
            return out

        self.same(do)

    def low_precision(self, rows, seed):
        """Calls of copies in another dtype, whose error against float64 is at most twice that of torch."""
        if {"routed", "gated", "linear"} & {*self.parts} or self.device != "cpu":
            return  # A rounding changes what is chosen, or the sign of what a ReLU is given; other numbers are drawn.
        dtype, autocast = [torch.float32, torch.bfloat16][seed % 2], seed > 2
        stock, patched = (copy.deepcopy(m).to(dtype) for m in self.models)
        eps = torch.finfo(torch.bfloat16 if autocast else dtype).eps
        for _ in range(3):
            found = []
            for model in (copy.deepcopy(stock).double(), stock, patched):
                x = self.inputs(rows, seed).detach().to(dtype).to(model.last.weight.dtype).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, autocast and len(found) > 0):
                    out = model(x)
                wanted = [t for t in (*model.parameters(), x) if t.requires_grad]
                found.append(
                    [*out, *torch.autograd.grad(sum(t.double().sum() for t in out), wanted, allow_unused=True)]
                )
            assert [t is None for t in found[2]] == [t is None for t in found[1]]
            triples = [[t.double() for t in each] for each in zip(*found, strict=True) if each[1] is not None]
            largest = max(t.norm() for t, *_ in triples)
            for exact, torchs, ours in triples:
                assert (ours - exact).norm() <= 2 * (torchs - exact).norm() + 4 * eps * largest
            patched.load_state_dict(stock.state_dict())

    def compile(self, rows, seed):
        if self.seed % 4 == 3:  # It takes a second.
            torch._dynamo.reset()
            self.same(lambda model, _: torch.compile(model, backend="eager")(self.inputs(rows, seed)))

    @rule(what=st.sampled_from(sorted(CHANGES)), n=st.integers(0, 9))
    def change(self, what, n):
        if self.device == "cuda" and what in ("data", "merge"):
            return  # A forward that runs again after a replay would see what was written through .data since.
        self.both(lambda model, _: [CHANGES[what](model, n)])
        self.new_optimizers()

    @rule(how=st.sampled_from(["deepcopy", "pickle", "unpatch", "patch", "save", "load", "assign", "function"]))
    def remake(self, how):
        if how == "deepcopy":
            self.models = [copy.deepcopy(m) for m in self.models]
        elif how == "pickle":  # A parametrization cannot be.
            self.models = self.both(lambda model, _: pickle.loads(pickle.dumps(model))) or self.models
        elif how == "save":
            self.saved = [copy.deepcopy(m.state_dict()) for m in self.models]
        elif how in ("load", "assign") and self.saved:
            for model, state in zip(self.models, self.saved, strict=True):
                # One optimizer steps several tensors at once, which may not share memory.
                apart = {name: t.clone() for name, t in state.items()}
                model.load_state_dict(apart, assign=how == "assign")
        elif how == "unpatch":
            fastlayers.unpatch_model(fastlayers.ungraph_model(self.models[1]))
        elif how == "function" and self.device == "cpu":  # A graph does not see it.
            self.functions.enter_context(mock.patch.object(F, "silu", torch.sigmoid))
        if how in ("unpatch", "patch"):
            self.patched(self.models[1])
        self.new_optimizers()

    @precondition(lambda self: hasattr(self, "models"))
    @invariant()
    def are_equal(self):
        for a, b in zip(*(m.state_dict().values() for m in self.models), strict=True):
            torch.testing.assert_close(b, a)
        for p, q in zip(*(m.parameters() for m in self.models), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("part", range(PARTS_OF_ALL))
def test_sequences(part, device, monkeypatch, pytestconfig):
    """Regions or graphs run in half of the calls at least."""
    seed, passed = part, DONE / f"sequences-{device}"
    if PARTS_OF_ALL == 1:
        seed = pytestconfig.getoption("randomly_seed", 0)
    elif passed.exists() and str(part) in passed.read_text().split():
        pytest.skip("passed before the run was interrupted")
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))
    monkeypatch.setattr(demand, "CALLS", 1)
    monkeypatch.setattr(Twins, "device", device)
    monkeypatch.setattr(Twins, "ran", Counter())

    def counted(function, what):
        return lambda *args: Twins.ran.update([what]) or function(*args)

    monkeypatch.setattr(Region, "run", counted(Region.run, "regions"))
    monkeypatch.setattr(Capture, "run", counted(Capture.run, "graphs"))
    examples = 40 if pytestconfig.getoption("draw") else PART
    settings = {
        "max_examples": examples,
        "stateful_step_count": 25,
        "suppress_health_check": list(hypothesis.HealthCheck),
    }
    settings = hypothesis.settings(**settings, deadline=None, database=None, print_blob=False)
    run_state_machine_as_test(hypothesis.seed(seed)(type("Sequences", (Twins,), {})), settings=settings)
    print(f"seed {seed}: {dict(Twins.ran)}")
    assert Twins.ran["recorded calls"] >= Twins.ran["calls"] / 2, Twins.ran
    if PARTS_OF_ALL > 1:
        DONE.mkdir(exist_ok=True)
        with passed.open("a") as file:
            file.write(f"{part}\n")
        if len({*passed.read_text().split()}) == PARTS_OF_ALL:
            passed.unlink(missing_ok=True)
