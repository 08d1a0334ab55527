"""What a patched forward and a graph take for granted: whatever changes, they compute what the stock forward would."""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn.quantized import FloatFunctional

import fastlayers
from fastlayers.graphs.state import State
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.runtime.checks import original_class, rewritten_everywhere
from tests.harness import assert_no_worse
from tests.patching.networks import Parts
from tests.patching.regions.guarded import (
    FACTORS,
    Body,
    Counting,
    Middle,
    Output,
    Settings,
    Thing,
    agree,
    checked,
    doubled,
    helper,
    logger,
    made,
    patched_as,
)

pytestmark = pytest.mark.cpu_kernels


@contextmanager
def other_code(function, other):
    before, function.__code__ = function.__code__, other.__code__
    yield
    function.__code__ = before


@contextmanager
def without_flash():
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


def globals_of(m):
    return original_class(m).forward.__globals__


#: What is changed: the result of a forward, attributes of the module, and a change, which may be a context manager.
CHANGES = {
    "an attribute of a class": ("F.gelu(x) * Settings.scale", {}, lambda m: patch.object(Settings, "scale", 9.0)),
    "an object of a class": (
        "F.gelu(x) * Settings.nested.value", {}, lambda m: patch.object(Settings.nested, "value", 9.0),
    ),
    "a class method": (
        "F.gelu(x) * Settings.twice()", {}, lambda m: patch.object(Settings, "twice", classmethod(lambda cls: 9.0)),
    ),
    "what a class method reads": ("F.gelu(x) * Settings.twice()", {}, lambda m: patch.object(Settings, "scale", 9.0)),
    "a static method": (
        "F.gelu(Settings.half(x))", {}, lambda m: patch.object(Settings, "half", staticmethod(lambda x: x * 9)),
    ),
    "an attribute of its class": ("F.gelu(x) * Body.kind", {}, lambda m: patch.object(Body, "kind", 9.0)),
    "an attribute of a function": ("F.gelu(x) * helper.factor", {}, lambda m: patch.object(helper, "factor", 9.0)),
    "defaults": ("helper(F.gelu(x))", {}, lambda m: patch.object(helper, "__defaults__", (9.0,))),
    "keyword defaults": ("helper(F.gelu(x))", {}, lambda m: patch.object(helper, "__kwdefaults__", {"shift": 9.0})),
    "code": ("helper(F.gelu(x))", {}, lambda m: other_code(helper, doubled)),
    "a class between, for super()": (
        "super().middle(F.gelu(x))", {"base": Middle},
        lambda m: patch.object(Middle, "middle", lambda self, x: x * 9, create=True),
    ),
    "what a property reads, for super()": (
        "F.gelu(x) * super().factor", {"number": 2.0}, lambda m: setattr(m, "number", 9.0),
    ),
    "what a dict of a class has, for super()": (
        "F.gelu(x) * super().kinds['a']", {}, lambda m: patch.dict(Body.kinds, a=9.0),
    ),
    "a global that hides a built-in function": (
        "F.gelu(x) * max(1.0, 2.0)", {}, lambda m: globals_of(m).update(max=lambda *args: 9.0),
    ),
    "the call of a layer": (
        "F.gelu(x)", {}, lambda m: patch.object(nn.Linear, "__call__", lambda self, x: nn.Module.__call__(self, x) * 9),
    ),
    "a set": ("F.gelu(x) * (9.0 if 'b' in self.names else 1.0)", {"names": {"a"}}, lambda m: m.names.add("b")),
    "truth of a set": ("F.gelu(x) * (9.0 if self.names else 1.0)", {"names": {"a"}}, lambda m: m.names.clear()),
    "a list in a dict": (
        "F.gelu(x) * self.config['scales'][0]", {"config": {"scales": [2.0], "more": None}},
        lambda m: m.config["scales"].__setitem__(0, 9.0),
    ),
    "an object in a dict": (
        "F.gelu(x) * self.config['a'].value", {"config": {"a": types.SimpleNamespace(value=2.0)}},
        lambda m: setattr(m.config["a"], "value", 9.0),
    ),
    "another object in a dict": (
        "F.gelu(x) * self.config['a'].value", {"config": {"a": types.SimpleNamespace(value=2.0)}},
        lambda m: m.config.update(a=types.SimpleNamespace(value=9.0)),
    ),
    "a defaultdict": (
        "F.gelu(x) * self.config['a']", {"config": defaultdict(float, a=2.0)}, lambda m: m.config.update(a=9.0),
    ),
    "truth of a list of objects": (
        "F.gelu(x) * (9.0 if self.things else 1.0)", {"things": [types.SimpleNamespace()]}, lambda m: m.things.clear(),
    ),
    "the number of children": ("F.gelu(x) * len(self._modules)", {}, lambda m: m.add_module("more", nn.Identity())),
    "a number of another type": (
        "F.gelu(x) + torch.full((4, 16), self.number) / 4", {"number": 2}, lambda m: setattr(m, "number", 2.0),
    ),
    "a flag behind a function": (
        "F.gelu(x) * (9.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0)", {}, lambda m: without_flash(),
    ),
    "a flag of a backend": (
        "F.gelu(x) * (9.0 if torch.backends.mkldnn.enabled else 1.0)", {},
        lambda m: torch.backends.mkldnn.flags(enabled=False),
    ),
    "a flag of autograd": (
        "F.gelu(x) * (9.0 if torch.is_anomaly_enabled() else 1.0)", {},
        lambda m: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ),
    "what a call of a layer calls": (
        "F.gelu(x)", {}, lambda m: patch.object(nn.Linear, "_call_impl", lambda self, x: x * 9, create=True),
    ),
    "a layer that was compiled": ("F.gelu(x)", {}, lambda m: vars(m.up).update(_compiled_call_impl=lambda x: x * 9)),
    "a parameter that its class hides": (
        "F.gelu(x)", {}, lambda m: patch.object(nn.Linear, "weight", property(lambda self: torch.eye(16)), create=True),
    ),
    "how attributes are found": (
        "F.gelu(x)", {}, lambda m: patch.object(Body, "__getattr__", lambda self, name: F.relu, create=True),
    ),
    "an operator of tensors": (
        "F.gelu(x) * x", {}, lambda m: patch.object(torch.Tensor, "__mul__", lambda x, y: x + 9),
    ),
    "a slice": ("F.gelu(x) + x[:, self.first].sum()", {"first": slice(2)}, lambda m: setattr(m, "first", slice(9))),
    "a truth in a list": (
        "F.gelu(x) * (9.0 if self.flags[0] is True else 1.0)", {"flags": [1]}, lambda m: m.flags.__setitem__(0, True),
    ),
    "the sign of a zero of numpy": (
        "F.gelu(x) * (9.0 if np.signbit(self.n) else 1.0)", {"n": np.float32(0)}, lambda m: vars(m).update(n=-m.n),
    ),
    "a child that an attribute hides": ("F.gelu(x)", {}, lambda m: vars(m).update(act=F.relu)),
    "a child that its class hides": (
        "F.gelu(x)", {}, lambda m: patch.object(Body, "act", staticmethod(F.relu), create=True),
    ),
    # Of these there are no regions.
    "a list that is a default": (
        "with_list(F.gelu(x))", {}, lambda m: patch.object(sys.modules[__name__], "FACTORS", FACTORS.insert(0, 9.0)),
    ),
    "truth of an object": (
        "F.gelu(x) * (9.0 if self.thing else 1.0)", {"thing": Thing(2)}, lambda m: setattr(m.thing, "value", 0),
    ),
    "equality of an object": (
        "F.gelu(x) * (9.0 if self.thing == 2 else 1.0)", {"thing": Thing(2)}, lambda m: setattr(m.thing, "value", 0),
    ),
    "the product of an object": ("F.gelu(x) * self.thing", {"thing": Thing(2)}, lambda m: setattr(m.thing, "value", 9)),
    "an attribute of a parameter": (
        "F.gelu(x) * (9.0 if hasattr(self.up.weight, 'scaled') else 1.0)", {},
        lambda m: setattr(m.up.weight, "scaled", True),
    ),
}  # fmt: skip
REFUSED = [*CHANGES][-5:]


@pytest.mark.parametrize("op_by_op", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_later_change_is_honoured(what, trains, op_by_op, ran):
    result, attributes, change = CHANGES[what]
    stock = made(result, **copy.deepcopy(attributes)).train(trains)
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    with torch.set_grad_enabled(trains), rewritten_everywhere(op_by_op), no_regions() if op_by_op else nullcontext():
        agree(stock, patched, calls=4)
        assert bool(ran) == (not op_by_op and what not in REFUSED)
        changed = change(stock)
        if not hasattr(changed, "__enter__"):
            change(patched)
            changed = nullcontext()
        with changed:
            agree(stock, patched, calls=4)


#: Changes that a graph does not see, or does not mind.
UNSEEN = ("a number of another type", *REFUSED[:-1])


@pytest.mark.parametrize("what", [what for what in CHANGES if what not in UNSEEN])
def test_a_graph_sees_the_change(what):
    result, attributes, change = CHANGES[what]
    for is_patched in (False, True):
        m = made(result, **copy.deepcopy(attributes))
        state = State(fastlayers.patch_model(m) if is_patched else m, torch.device("cpu"))
        assert state.holds()
        changed = change(m)
        with changed if hasattr(changed, "__enter__") else nullcontext():
            seen = not state.holds()
        assert seen or what == "an attribute of a parameter" or what.startswith("a flag")


class Called(nn.Module):
    """With a ``__call__`` of its own, as an aggregation of torch_geometric has."""

    def __call__(self, x):
        return super().__call__(x) * Settings.scale

    def forward(self, x):
        return x + 1


class Tool:
    @staticmethod
    def scaled(x):
        return x * 2


class Holding(Body):
    """With parameters in several places, and children and objects of unusual kinds."""

    def __init__(self):
        super().__init__()
        self.called, self.tool, self.sums = Called(), Tool(), FloatFunctional()
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.up.weight
        self.biases = [self.up.bias, self.down.bias]
        self.gammas = nn.ParameterList([nn.Parameter(torch.full((16,), 2.0)), nn.Parameter(torch.ones(16))])
        self.backends = [torch.nn.attention.SDPBackend.MATH]


HELD = {
    "self.called(x)": [
        lambda m: patch.object(Settings, "scale", 9.0),
        lambda m: patch.object(Called, "__call__", nn.Module.__call__),
        lambda m: patch.object(Called, "forward", lambda self, x: x - 1),
    ],
    "self.tool.scaled(x)": [
        lambda m: patch.object(Tool, "scaled", staticmethod(lambda x: x * 9)),
        lambda m: patch.dict(vars(m.tool), scaled=lambda x: x * 9),
    ],
    "self.sums.add(x, self.sums.mul_scalar(x, 2.0))": [
        lambda m: patch.object(FloatFunctional, "add", lambda self, x, y: x - y),
        lambda m: patch.dict(m.sums._modules, activation_post_process=nn.ReLU()),
    ],
    "self.tied(x)": [lambda m: patch.dict(m.tied._parameters, weight=nn.Parameter(torch.ones(16, 16)))],
    "x * torch.stack(self.biases).sum()": [
        lambda m: patch.object(m, "biases", [nn.Parameter(torch.ones(16)), m.down.bias]),
        lambda m: patch.dict(m.up._parameters, bias=nn.Parameter(torch.ones(16))),
    ],
    "sum(gamma * x for gamma in self.gammas)": [
        lambda m: patch.dict(m.gammas._parameters, {"1": nn.Parameter(torch.full((16,), 9.0))}),
        lambda m: patch.object(m, "gammas", nn.ParameterList([nn.Parameter(torch.ones(16))])),
    ],
    "x * self.gammas[0] + sum(gamma * i * x for i, gamma in enumerate(self.gammas)) * len(self.gammas)": [
        lambda m: patch.dict(m.gammas._parameters, {"0": nn.Parameter(torch.full((16,), 9.0))})
    ],
    "x * torch.cat([*self.gammas]).sum()": [],
    "x * (2 if self.backends[0] == torch.nn.attention.SDPBackend.MATH else 3)": [
        lambda m: patch.object(m, "backends", [torch.nn.attention.SDPBackend.FLASH_ATTENTION])
    ],
    "x * torch.sqrt(torch.FloatTensor([0.5]).to(x.device))": [
        lambda m: patch.object(torch, "FloatTensor", lambda values: torch.tensor(values) * 9)
    ],
    "x * 2 if type(self.up.weight) is nn.Parameter else x": [],
    "x * 2 if isinstance(self.up.weight, nn.Parameter) else x": [],
    "x * Settings.scale if type(F.gelu(x)) is torch.Tensor else x": [lambda m: patch.object(Settings, "scale", 9.0)],
}


@pytest.mark.parametrize("result", HELD)
def test_what_a_module_holds_in_unusual_ways(result, ran):
    stock = made(result, base=Holding)
    patched = patched_as(stock)
    assert ran
    for change in HELD[result]:
        torch.manual_seed(1)
        with change(stock), change(patched):
            agree(stock, patched, calls=4)
        agree(stock, patched)
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    for of in (lambda m: x, lambda m: m.up.weight) * 2:  # A region is recorded in the second call.
        seconds = []
        for m in (stock.double(), patched.double()):
            (dx,) = torch.autograd.grad(m(x).square().sum(), of(m), create_graph=True)
            seconds.append(torch.autograd.grad(dx.square().sum(), [x, *m.parameters()], allow_unused=True))
        torch.testing.assert_close(seconds[1], seconds[0])


SCALE = 2.0


class Plain(nn.Module):
    def forward(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * 2


class Overridden(Plain):
    def scaled(self, x):
        return x * SCALE


def test_a_graph_sees_what_an_override_reads(monkeypatch):
    """Of two classes with the same forward, the second one calls another method."""
    state = State(nn.Sequential(Plain(), Overridden()), torch.device("cpu"))
    assert state.holds()
    monkeypatch.setitem(globals(), "SCALE", 9.0)
    assert not state.holds()


def test_a_graph_does_not_mind_a_copy():
    """The first copy of an object of a class adds an attribute to that class."""
    state = State(made("Output(F.gelu(x)).value"), torch.device("cpu"))
    copy.copy(Output(1))
    assert state.holds()


def test_lists_and_dicts_of_the_caller_are_filled(ran):
    class Block(Body):
        def forward(self, x, skips, cache):
            h = self.body(x)
            skips.append(h)
            if "k" in cache:
                h = h + cache["k"]
            cache["k"] = h.detach()
            return F.gelu(h)

    stock, x = Block(), torch.randn(4, 16)
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    found = []
    for m in (stock, patched):
        cache, results = {}, []
        for _ in range(4):
            skips = []
            results.append(m(x, skips, cache))
            assert len(skips) == 1
        found.append(results)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("result", ["[F.gelu(x)] + rest[0]", "rest[0]", "(F.gelu(x), rest[0])", "self.results"])
def test_a_list_that_is_returned_is_the_same_one(result):
    patched = fastlayers.patch_model(made(result, results=[1.0, 2.0]))
    given, x = [torch.ones(4, 16)], torch.randn(4, 16)
    for _ in range(4):
        out = patched(x, given)
        out = out[1] if isinstance(out, tuple) else out
        assert (out is given) == ("+" not in result and "self" not in result)
        assert (out is patched.results) == ("self" in result)


def test_a_list_that_is_only_read(ran):
    stock = made("F.gelu(x) + rest[0][0]")
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    for i in range(4):
        torch.testing.assert_close(patched(torch.ones(4, 16), [i * torch.ones(16)]), stock(torch.ones(4, 16), [i]))
    assert ran


@pytest.mark.parametrize("kind", ["torch.Tensor", "(int, torch.Tensor)", "nn.Parameter"])
@pytest.mark.parametrize("given", [nn.Parameter(torch.ones(16)), torch.ones(16)])
def test_the_type_of_an_argument(given, kind, ran):
    """A recording has a parameter that it is given as a tensor."""
    stock = made(f"F.gelu(x) if isinstance(rest[0], {kind}) else x")
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    for _ in range(4):
        torch.testing.assert_close(patched(torch.ones(4, 16), given), stock(torch.ones(4, 16), given))
    assert bool(ran) == (kind != "nn.Parameter" or type(given) is torch.Tensor)


class Two(nn.Module):
    """Two results with layers of their own, on layers that they share."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)
        self.main, self.aside = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = F.gelu(self.fc(self.norm(x))) + x
        return self.main(h), F.gelu(self.aside(h))


@pytest.mark.usefixtures("executor", "any_size")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_parameters_of_a_result_without_a_gradient_have_none(used, autocast, twice, ran):
    """Zeros would let weights decay, and an optimizer count the step."""
    stock, x = Two(), torch.randn(8, 16)
    patched = fastlayers.patch_model(copy.deepcopy(stock))

    def gradients(m, x, twice=twice):
        m.zero_grad()
        inner = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = m(inner)
        loss = sum(results[i].float().square().sum() for i in used)
        if twice:
            (dx,) = torch.autograd.grad(loss, inner, create_graph=True)
            loss = dx.square().sum()
        loss.backward()
        return inner.grad, *(p.grad for p in m.parameters())

    for _ in range(3):  # Calls whose backward is differentiated are no regions any more.
        gradients(patched, x, twice=False)
    for _ in range(2):
        assert_no_worse(gradients(patched, x), gradients, stock, x)
    assert len(ran) == (2 if twice else 3)


@pytest.mark.usefixtures("executor", "any_size")
def test_a_result_without_a_gradient_has_no_backward():
    """With zeros for a gradient that of a square root of 0 would be NaN."""
    stock = made("((x * 2).tanh() + 1, rest[0].pow(2).sum(-1).sqrt() + 1)")
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    x = torch.randn(4, 16)
    for _ in range(5):
        found = []
        for m in (stock, patched):
            given = torch.zeros(4, 16, requires_grad=True)
            m(x, given)[0].sum().backward()
            found.append(given.grad)
            m.zero_grad()
        assert found == [None, None]


def test_an_iterator_goes_on():
    stock, patched = (made("F.gelu(x) * next(self.steps)", steps=itertools.count()) for _ in range(2))
    patched = fastlayers.patch_model(patched)
    patched.load_state_dict(stock.state_dict())
    agree(stock, patched, calls=5)
    assert next(patched.steps) == next(stock.steps) == 5


def test_a_context_manager_is_entered_in_each_call():
    class With(Body):
        def forward(self, x):
            with self.context:
                return F.gelu(self.body(x))

    patched = fastlayers.patch_model(With(context=Counting()))
    for _ in range(5):
        patched(torch.randn(4, 16))
    assert patched.context.entered == 5


class Quiet(Body):
    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = self.body(x)
        return F.gelu(self.body(x)) * scale


def test_a_context_manager_of_torch_is_followed(ran):
    patched_as(Quiet())
    assert ran


@pytest.mark.parametrize(
    "scale",
    ["x.scale if hasattr(given, 'scale') else 1", "getattr(given, 'scale', 1.0)", "2 + given.storage_offset()",
     "2 if isinstance(given, nn.Parameter) else 3", "2 if type(given) is nn.Parameter else 3",
     "2 if given._is_view() else 3"],
)  # fmt: skip
def test_what_an_argument_is(scale):
    """Its geometry and its dtype are those of the recording; what else it is may be another thing in each call."""
    stock = made(f"F.gelu(x) * ({scale.replace('x.scale', 'given.scale').replace('given', 'rest[0]')})")
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    storage, marked = torch.randn(5, 16), torch.randn(4, 16)
    marked.scale = 3.0
    for given in (marked, storage[:4], storage[1:], nn.Parameter(storage[:4]), storage[:4].clone()):
        for _ in range(4):
            torch.testing.assert_close(patched(marked, given), stock(marked, given))


def test_a_function_of_main_that_is_not_followed():
    """torch.fx calls it ``__main___checked``, which Python would change in the body of a class."""
    stock = made("checked(F.gelu(x))", module="__main__")
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    x = torch.randn(4, 16)
    with patch.object(checked, "__module__", "__main__"), rewritten_everywhere():
        torch.testing.assert_close(patched(x), stock(x))


def test_a_call_while_hooks_on_saved_tensors_are_disabled():
    """A recording has hooks of its own."""
    stock = made("F.gelu(x)")
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        patched_as(stock)


def test_a_logger_is_no_state_of_a_graph():
    stock = made("F.gelu(x) if logger.isEnabledFor(30) else x")
    state = State(stock, torch.device("cpu"))
    logger.isEnabledFor(31)
    assert state.holds()


class Divided(Parts):
    def forward(self, x, by=1.0):
        y = torch.tanh(self.fc(x)).abs() + 1
        return y / self.s + y / self.pair[0] + y / by, torch.full((2,), self.s), torch.full((2,), self.pair[1])


@pytest.mark.usefixtures("any_size")
def test_equal_numbers_are_told_apart(ran):
    """The sign of a zero decides about that of infinity, the type of a number about the dtype of a result."""
    stock = Divided(fc=nn.Linear(8, 8), s=1.0, pair=(1.0, 2))
    patched, x = fastlayers.patch_model(copy.deepcopy(stock)), torch.randn(4, 8)
    numbers = [0.0, -0.0, 1, 1.0, True, 2.0, 2, 0]
    for s, first, by in itertools.product(numbers[:5], (0.0, -0.0), (0.0, -0.0)):
        for second in numbers if s is numbers[0] else (2,):
            for model in (stock, patched):
                model.s, model.pair = s, (first, second)
            for _ in range(3):
                torch.testing.assert_close(patched(x, by), stock(x, by), equal_nan=True)
    assert ran


@pytest.mark.parametrize("place", ["attribute", "list", "dict", "class"])
def test_equal_numbers_are_told_apart_by_a_graph(place):
    class Scaled(nn.Linear):
        shift = 0.0

    layer = Scaled(4, 4)
    layer.scale, layer.scales, layer.options = 0.0, [0.0, 1.0], {"scale": 0.0}
    owner, key = {
        "attribute": (vars(layer), "scale"), "list": (layer.scales, 0), "dict": (layer.options, "scale"),
        "class": (None, "shift"),
    }[place]  # fmt: skip
    state = State(nn.Sequential(layer), torch.device("cpu"))
    for value, same in ((0.0, True), (-0.0, False), (0, False), (False, False), (float("0"), True)):
        setattr(Scaled, key, value) if owner is None else owner.__setitem__(key, value)
        assert state.holds() == same, value
