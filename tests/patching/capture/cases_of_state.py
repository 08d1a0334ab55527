"""Forwards that read and change Python objects, and what they call."""

from __future__ import annotations

import dataclasses
import functools  # noqa: F401  (sources name it)
import logging
import types
import warnings  # noqa: F401
from collections import namedtuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.patching import Reason
from tests.patching.capture.forwards import (  # noqa: F401
    SHAPE,
    TABLE,
    WEIGHT,
    Base,
    forwards,
    forwards_of,
    identity_decorator,
    stateful_helper,
)

WRITTEN = False
FLAG = False
SETTINGS = [1, 2]
logger = logging.getLogger(__name__)
Pair = namedtuple("Pair", "first second")


def doubling(function):
    def doubled(a):
        return function(a) * 2

    return doubled


def helper(x, y, flag=False):
    return F.relu(x) + y if not flag else x


@identity_decorator
def decorated_helper(x):
    return x * 2


def remembering_helper(x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * len(seen)


def default_helper(x, factor=2.0, sizes=(1, 2), act=F.relu, *rest, **more):
    return act(x) * factor * sizes[1] + len(rest) + len(more)


def fills(values, x):
    values.append(x)


def fills_in_vain(values, x):
    values.append(x)
    with torch.no_grad():
        pass


def handed(values):
    return next(values)


#: The same in a module where the name of the helper has another meaning.
handed = types.FunctionType(handed.__code__, {"helper": None, "__builtins__": __builtins__})


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


# -- Python state -----------------------------------------------------------------------------------------------------

forwards_of(
    Reason.CHANGES_STATE,
    globals(),
    Counter="self.count += 1\nreturn F.relu(x) + y * self.count",
    AttributeStore="self.last = x\nreturn F.relu(x) + y",
    ItemStore='self.options["a"] = 2\nreturn F.relu(x) + y',
    StoreIntoATensor="x = x.clone()\nx[0] = 0\nreturn F.relu(x) + y",
    AppendToAListOfNumbers="self.sizes.append(3)\nreturn F.relu(x) + y",
    UpdateOfADict="self.options.update(b=2)\nreturn F.relu(x) + y",
    RegisterInForward='self.register_buffer("seen", x)\nreturn F.relu(x) + y',
    GlobalStatement="global WRITTEN\nWRITTEN = True\nreturn F.relu(x) + y",
    ADefaultThatRemembers="y = remembering_helper(y)\nreturn F.relu(x) + y",
)

forwards_of(
    Reason.READS_STATE,
    globals(),
    AppendToAListOfObjects="self.objects.append(1)\nreturn F.relu(x) + y",
    ALivePropertyOfAnObject="return F.relu(x) + y * self.config.live",
    NumberOfAnObject="return F.relu(x) + y * float(self.config)",
    TruthOfAnObject="return F.relu(x) + y if self.config else x",
    IdentityOfAnObject="return F.relu(x) + y if self.config is not None else x",
    StarOfObjects="return F.relu(x) + y * len([*self.objects])",
    ItemOfAListOfObjects="return F.relu(x) + y if self.objects[0] else x",
    ArithmeticWithAnObject="return F.relu(x) + y if self.config == 2 else x",
    AGlobalTensor="return F.relu(x) + y * WEIGHT",
)

forwards_of(
    Reason.UNKNOWN_CALL,
    globals(),
    SetattrCall='setattr(self, "last", x)\nreturn F.relu(x) + y',
    ADataclassArgument="return F.relu(x) + decorated_helper(y, Settings())",
)

forwards_of(
    None,
    globals(),
    StatefulFunction="y = stateful_helper(y)\nreturn F.relu(x) + y",
    AConfigObject="return F.relu(x * self.config.scale) + y * self.config.nested[1]",
    StarOfNumbers="return F.relu(x) + y.view(*SHAPE) * x.new_ones(*self.sizes, 1).sum()",
    DefaultsOfAHelper="return F.relu(x) + default_helper(y)",
    AFunctionAttribute="return self.act(x) + y",
    AModeAttribute='return F.relu(x) + y if self.mode == "fast" else x',
    ClassConstantsAndProperties="return F.relu(x * self.constant) + self.static(y) + self.classy(y) * self.prop",
    ATensorAttribute="return F.relu(x) + y * self.loose * self.mask",
    NumbersOfTheModule=(
        'return F.relu(x * self.scale) + y * self.count + self.sizes[0] + self.options["a"] + len(self.sizes)'
    ),
    AnAssertionOfTorch=(
        'torch._assert(x.ndim == 2, f"expected 2-D, got {x.ndim}-D {x.shape!r} {self.scale:>5.1f} {3}")\n'
        "return F.relu(x) + y"
    ),
)

forwards_of(
    Reason.DATA_DEPENDENT,
    globals(),
    ADictLookupOfAValue="return F.relu(x) + y * {3: 2.0}.get(x.shape[0], 1.0)",
    AValueInASet="return F.relu(x) + y if len({x.shape[0], 3}) == 1 else x",
    APercentFormat='return F.relu(x) + y if "%s" % x.shape[0] == "3" else x',
    AFormatCall='return F.relu(x) + y if "{}".format(x.shape[0]) == "3" else x',
    AListIndexByValue="return F.relu(x) + y * [1, 2, 3, 4][x.shape[0]]",
    NestedUnpacking="for a, b in [x.shape]:\n    y = F.relu(x) + y * a * b\nreturn y",
    AFormatSpecOfAValue=(
        'torch._assert(True, f"{x.ndim:{self.count + 3}}")\nreturn F.relu(x) + y if f"{x.ndim:>3}" else x'
    ),
)


@forwards(None)
class AGlobalFlag(Base):
    def forward(self, x, y):
        return x if FLAG else F.relu(x) + y


@forwards(None)
class AGlobalTable(Base):
    def forward(self, x, y):
        return F.relu(x) + y * SETTINGS[0] if TABLE["on"] else x


@forwards(None)
class GetattrWithADefault(Base):
    def forward(self, x, y):
        return F.relu(x) * getattr(self, "scale", 1.0) + y if False else F.relu(x) + y * getattr(self, "scale", 1.0)


# -- children ---------------------------------------------------------------------------------------------------------

forwards_of(
    None,
    globals(),
    OptionalChild="if self.maybe is not None:\n    y = self.maybe(y)\nreturn F.relu(x) + y",
    ChildThatIsThere="if self.norm is not None:\n    y = self.norm(y)\nreturn F.relu(x) + y",
    ChildAsATruth="if self.norm:\n    y = self.norm(y)\nreturn F.relu(x) + (y if not self.maybe else x)",
    ASequenceSLayers="for layer in self.seq:\n    y = layer(y)\nreturn F.relu(x) + y",
    MethodOfTheModule="return self.method(x, y)",
    MethodOfAChild="return F.relu(x) + self.child.compute(y)",
    InstanceTestOfAChild="return F.relu(x) + y if isinstance(self.norm, nn.LayerNorm) else x",
    AChildSAttribute="return F.relu(x) + y * self.child.gain * self.norm.eps * self.norm.weight",
    TheParentClass="return Base.forward(self, x, y) if False else F.relu(x) + y",
    AListOfChildren=(
        "for i, layer in enumerate(self.layers):\n    x = F.relu(layer(x)) + y * i\n"
        "return x + self.layers[-1](y) * len(self.layers)"
    ),
    ADictOfChildren=(
        'for name, layer in self.table.items():\n    y = layer(y) if name == "one" else y\n'
        'return F.relu(x) + self.table["one"](y)'
    ),
    ChildrenInAComprehension=(
        "outs = [layer(x) for layer in self.layers]\nouts.append(y)\n"
        "return F.relu(torch.cat(outs)) + torch.stack(outs).sum()"
    ),
)


@forwards(None)
class OptionalParametersAndBuffers(Base):
    def forward(self, x, y):
        if self.bias is not None:
            y = y + self.bias
        if self.nothing is None and self.gain is not None:
            y = y * self.gain
        return F.relu(x) + y


@forwards(None)
class AllChildrenOfAChild(Base):
    def forward(self, x, y):
        for layer in self.seq.children():
            y = layer(y)
        names = [name for name, _ in self.layers.named_children()]
        return F.relu(x) + y * len(names)


# -- calls ------------------------------------------------------------------------------------------------------------

forwards_of(
    Reason.TRACE_FAILED,
    globals(),
    AForwardThatRaises="raise NotImplementedError",
)


forwards_of(
    Reason.SYNTAX,
    globals(),
    ATryBlock="try:\n    return F.relu(x) + y\nexcept RuntimeError:\n    return x",
)


forwards_of(
    None,
    globals(),
    AHelper="return helper(x, y)",
    AHelperThatIsDecorated="y = decorated_helper(y)\nreturn F.relu(x) + y",
    AHelperThatFillsAList="values = []\nfills(values, x)\nreturn F.relu(values[0]) + y * len(values)",
    ALambda="return (lambda a: F.relu(a) + y)(x)",
    ALambdaWithADefault="sums = [lambda a, n=n: F.relu(a) + y * n for n in range(3)]\nreturn sums[0](x) + sums[2](x)",
    AMappedFunction="(out,) = map(helper, (x,), (y,))\nreturn out",
    AMappedLayer="a, b = map(self.fc, (x, y))\nreturn F.relu(a) + b",
    AKey="first = max((1, -2), key=lambda n: n * n)\nreturn F.relu(x) + y * first",
    APartial="act = functools.partial(helper, y=y)\nreturn act(x) + sum(map(act, (x,)))",
    ADictResult='return {"out": F.relu(x) + y, "x": [x, (y, 1)]}',
    AWalrus="if (n := self.count) == 0:\n    y = y * (n + 1)\nreturn F.relu(x) + y",
    Printing='print("shape", x.shape)\nreturn F.relu(x) + y',
    AnEarlyRaise=(
        'if self.mode not in ("fast", "slow"):\n    raise ValueError(f"unknown mode {self.mode!r}")\n'
        "return F.relu(x) + y"
    ),
    ConditionalExpressions=(
        'a = x if (self.maybe is None and not self.count) or self.mode == "slow" else y\n'
        "return F.relu(a) + (y if self.scale > 1 else x)"
    ),
)

forwards_of(
    Reason.CONTEXT_MANAGER,
    globals(),
    AHelperThatFillsAListAndIsNotFollowed="values = []\nfills_in_vain(values, x)\nreturn F.relu(x) + y * len(values)",
)

forwards_of(
    Reason.UNKNOWN_CALL,
    globals(),
    LoggingCall="warnings.catch_warnings()\nreturn F.relu(x) + y",
    ALayerWithParametersThatIsMadeEachTime="return F.relu(nn.Linear(4, 4)(x)) + y",
    ANamedTuple="return Pair(F.relu(x) + y, x)",
)

forwards_of(
    Reason.READS_STATE,
    globals(),
    LoggingOfAModuleLogger='logger.info("hello")\nreturn F.relu(x) + y',
    APartialOfSomethingElse="return F.relu(x) + functools.partial(logger.info)(y)",
)

forwards_of(
    Reason.DATA_DEPENDENT,
    globals(),
    AMapOfUnknownLength="return F.relu(torch.cat([*map(lambda t: t * 2, x.chunk(2, -1))], -1)) + y",
)


@forwards(None)
class AnActivationThatIsMadeEachTime(Base):
    """As the heads of ultralytics' RT-DETR do."""

    def __init__(self):
        super().__init__()
        self.kind = nn.ReLU

    def forward(self, x, y):
        return getattr(self, "kind", nn.ReLU)()(x) + y if self.scale > 1 else self.kind(True)(x + 0) + y


@forwards(None)
class AMappedLambda(Base):
    def forward(self, x, y):
        a, b = map(lambda t: t * 2, x.chunk(2, -1))  # noqa: C417
        c, d = map(lambda s, t: F.relu(s) + t, (a, b), y.chunk(2, -1))
        return torch.cat((c, d), -1)


@forwards(None)
class ALambdaThatIsCalledElsewhere(Base):
    """By a function with other globals, in which ``helper`` is not this one."""

    def forward(self, x, y):
        return handed(map(lambda a: helper(a, y), (x,)))  # noqa: C417


@forwards(None)
class ANestedFunction(Base):
    def forward(self, x, y):
        def inner(a: Tensor, factor: float = 2.0) -> Tensor:
            return F.relu(a) + y * factor

        return inner(x)


@forwards(None)
class ADecoratedNestedFunction(Base):
    def forward(self, x, y):
        @doubling
        @identity_decorator
        def inner(a):
            return F.relu(a) + y

        return inner(x)


@forwards(Reason.UNKNOWN_CALL)
class ANestedFunctionInAContext(Base):
    def forward(self, x, y):
        @torch.no_grad()
        def inner(a):
            return a * 2

        return F.relu(inner(x)) + y


@forwards(None)
class ANumberOfNumpy(Base):
    """Its repr names numpy, which generated code does not know."""

    def __init__(self):
        super().__init__()
        self.factor = numpy.float64(1.5)

    def forward(self, x, y):
        return (F.relu(x) + y) / self.factor


@forwards(None)
class ListsOfLists(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]) for _ in range(2))

    def forward(self, x, y):
        for layer, act in self.layers:
            x = act(layer(x)) + y
        return x


@forwards(None)
class AnImport(Base):
    def forward(self, x, y):
        import math as m

        import torch.nn.functional
        from torch.nn.functional import relu as act

        return act(x) + y * m.pi + torch.nn.functional.relu(y)


@forwards(None)
class AListOrATensor(Base):
    """As the layers of DenseNet: the features before, in a list but for the first layer."""

    def forward(self, x, y):
        parts = [x] if isinstance(x, Tensor) else x
        return F.relu(torch.cat(parts, 1)) + y


@forwards(Reason.SYNTAX)
class AWhileLoop(Base):
    def forward(self, x, y):
        i = 0
        while i < 2:
            y = F.relu(x) + y
            i += 1
        return y
