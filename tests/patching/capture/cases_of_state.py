"""Forwards that read and change Python objects, and what they call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import warnings
from collections import namedtuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.patching import Reason
from tests.patching.capture.forwards import (
    SHAPE,
    TABLE,
    WEIGHT,
    Base,
    forwards,
    identity_decorator,
    stateful_helper,
)

WRITTEN = False
FLAG = False
SETTINGS = [1, 2]
logger = logging.getLogger(__name__)


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


@forwards(Reason.CHANGES_STATE)
class Counter(Base):
    def forward(self, x, y):
        self.count += 1
        return F.relu(x) + y * self.count


@forwards(Reason.CHANGES_STATE)
class AttributeStore(Base):
    def forward(self, x, y):
        self.last = x
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class ItemStore(Base):
    def forward(self, x, y):
        self.options["a"] = 2
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class StoreIntoATensor(Base):
    def forward(self, x, y):
        x = x.clone()
        x[0] = 0
        return F.relu(x) + y


@forwards(Reason.READS_STATE)
class AppendToAListOfObjects(Base):
    def forward(self, x, y):
        self.objects.append(1)
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class AppendToAListOfNumbers(Base):
    def forward(self, x, y):
        self.sizes.append(3)
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class UpdateOfADict(Base):
    def forward(self, x, y):
        self.options.update(b=2)
        return F.relu(x) + y


@forwards(Reason.UNKNOWN_CALL)
class SetattrCall(Base):
    def forward(self, x, y):
        setattr(self, "last", x)  # noqa: B010
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class RegisterInForward(Base):
    def forward(self, x, y):
        self.register_buffer("seen", x)
        return F.relu(x) + y


@forwards(Reason.CHANGES_STATE)
class GlobalStatement(Base):
    def forward(self, x, y):
        global WRITTEN
        WRITTEN = True
        return F.relu(x) + y


@forwards(None)
class StatefulFunction(Base):
    def forward(self, x, y):
        y = stateful_helper(y)
        return F.relu(x) + y


@forwards(None)
class NumbersOfTheModule(Base):
    def forward(self, x, y):
        return F.relu(x * self.scale) + y * self.count + self.sizes[0] + self.options["a"] + len(self.sizes)


@forwards(None)
class AConfigObject(Base):
    def forward(self, x, y):
        return F.relu(x * self.config.scale) + y * self.config.nested[1]


@forwards(Reason.READS_STATE)
class ALivePropertyOfAnObject(Base):
    def forward(self, x, y):
        return F.relu(x) + y * self.config.live


@forwards(Reason.READS_STATE)
class NumberOfAnObject(Base):
    def forward(self, x, y):
        return F.relu(x) + y * float(self.config)


@forwards(Reason.READS_STATE)
class TruthOfAnObject(Base):
    def forward(self, x, y):
        return F.relu(x) + y if self.config else x


@forwards(Reason.READS_STATE)
class IdentityOfAnObject(Base):
    def forward(self, x, y):
        return F.relu(x) + y if self.config is not None else x


@forwards(Reason.READS_STATE)
class StarOfObjects(Base):
    def forward(self, x, y):
        return F.relu(x) + y * len([*self.objects])


@forwards(Reason.READS_STATE)
class ItemOfAListOfObjects(Base):
    def forward(self, x, y):
        return F.relu(x) + y if self.objects[0] else x


@forwards(Reason.READS_STATE)
class ArithmeticWithAnObject(Base):
    def forward(self, x, y):
        return F.relu(x) + y if self.config == 2 else x


@forwards(Reason.UNKNOWN_CALL)
class ADataclassArgument(Base):
    def forward(self, x, y):
        return F.relu(x) + decorated_helper(y, Settings())


@forwards(None)
class StarOfNumbers(Base):
    def forward(self, x, y):
        return F.relu(x) + y.view(*SHAPE) * x.new_ones(*self.sizes, 1).sum()


@forwards(Reason.CHANGES_STATE)
class ADefaultThatRemembers(Base):
    def forward(self, x, y):
        y = remembering_helper(y)
        return F.relu(x) + y


@forwards(None)
class DefaultsOfAHelper(Base):
    def forward(self, x, y):
        return F.relu(x) + default_helper(y)


@forwards(Reason.DATA_DEPENDENT)
class ADictLookupOfAValue(Base):
    def forward(self, x, y):
        return F.relu(x) + y * {3: 2.0}.get(x.shape[0], 1.0)


@forwards(Reason.DATA_DEPENDENT)
class AValueInASet(Base):
    def forward(self, x, y):
        return F.relu(x) + y if len({x.shape[0], 3}) == 1 else x


@forwards(None)
class AnAssertionOfTorch(Base):
    def forward(self, x, y):
        torch._assert(x.ndim == 2, f"expected 2-D, got {x.ndim}-D {x.shape!r} {self.scale:>5.1f} {3}")
        return F.relu(x) + y


@forwards(Reason.DATA_DEPENDENT)
class AFormatSpecOfAValue(Base):
    def forward(self, x, y):
        torch._assert(True, f"{x.ndim:{self.count + 3}}")
        return F.relu(x) + y if f"{x.ndim:>3}" else x


@forwards(Reason.DATA_DEPENDENT)
class APercentFormat(Base):
    def forward(self, x, y):
        return F.relu(x) + y if "%s" % x.shape[0] == "3" else x  # noqa: UP031


@forwards(Reason.DATA_DEPENDENT)
class AFormatCall(Base):
    def forward(self, x, y):
        return F.relu(x) + y if "{}".format(x.shape[0]) == "3" else x  # noqa: UP032


@forwards(Reason.DATA_DEPENDENT)
class AListIndexByValue(Base):
    def forward(self, x, y):
        return F.relu(x) + y * [1, 2, 3, 4][x.shape[0]]


@forwards(Reason.DATA_DEPENDENT)
class NestedUnpacking(Base):
    def forward(self, x, y):
        for a, b in [x.shape]:
            y = F.relu(x) + y * a * b
        return y


@forwards(None)
class AFunctionAttribute(Base):
    def forward(self, x, y):
        return self.act(x) + y


@forwards(None)
class AModeAttribute(Base):
    def forward(self, x, y):
        return F.relu(x) + y if self.mode == "fast" else x


@forwards(None)
class ClassConstantsAndProperties(Base):
    def forward(self, x, y):
        return F.relu(x * self.constant) + self.static(y) + self.classy(y) * self.prop


@forwards(None)
class AGlobalFlag(Base):
    def forward(self, x, y):
        return x if FLAG else F.relu(x) + y


@forwards(None)
class AGlobalTable(Base):
    def forward(self, x, y):
        return F.relu(x) + y * SETTINGS[0] if TABLE["on"] else x


@forwards(Reason.READS_STATE)
class AGlobalTensor(Base):
    def forward(self, x, y):
        return F.relu(x) + y * WEIGHT


@forwards(None)
class ATensorAttribute(Base):
    def forward(self, x, y):
        return F.relu(x) + y * self.loose * self.mask


@forwards(None)
class GetattrWithADefault(Base):
    def forward(self, x, y):
        return F.relu(x) * getattr(self, "scale", 1.0) + y if False else F.relu(x) + y * getattr(self, "scale", 1.0)


# -- children ---------------------------------------------------------------------------------------------------------


@forwards(None)
class OptionalChild(Base):
    def forward(self, x, y):
        if self.maybe is not None:
            y = self.maybe(y)
        return F.relu(x) + y


@forwards(None)
class ChildThatIsThere(Base):
    def forward(self, x, y):
        if self.norm is not None:
            y = self.norm(y)
        return F.relu(x) + y


@forwards(None)
class ChildAsATruth(Base):
    def forward(self, x, y):
        if self.norm:
            y = self.norm(y)
        return F.relu(x) + (y if not self.maybe else x)


@forwards(None)
class OptionalParametersAndBuffers(Base):
    def forward(self, x, y):
        if self.bias is not None:
            y = y + self.bias
        if self.nothing is None and self.gain is not None:
            y = y * self.gain
        return F.relu(x) + y


@forwards(None)
class AListOfChildren(Base):
    def forward(self, x, y):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) + y * i
        return x + self.layers[-1](y) * len(self.layers)


@forwards(None)
class ADictOfChildren(Base):
    def forward(self, x, y):
        for name, layer in self.table.items():
            y = layer(y) if name == "one" else y
        return F.relu(x) + self.table["one"](y)


@forwards(None)
class AllChildrenOfAChild(Base):
    def forward(self, x, y):
        for layer in self.seq.children():
            y = layer(y)
        names = [name for name, _ in self.layers.named_children()]
        return F.relu(x) + y * len(names)


@forwards(None)
class ASequenceSLayers(Base):
    def forward(self, x, y):
        for layer in self.seq:
            y = layer(y)
        return F.relu(x) + y


@forwards(None)
class ChildrenInAComprehension(Base):
    def forward(self, x, y):
        outs = [layer(x) for layer in self.layers]
        outs.append(y)
        return F.relu(torch.cat(outs)) + torch.stack(outs).sum()


@forwards(None)
class MethodOfTheModule(Base):
    def forward(self, x, y):
        return self.method(x, y)


@forwards(None)
class MethodOfAChild(Base):
    def forward(self, x, y):
        return F.relu(x) + self.child.compute(y)


@forwards(None)
class InstanceTestOfAChild(Base):
    def forward(self, x, y):
        return F.relu(x) + y if isinstance(self.norm, nn.LayerNorm) else x


@forwards(None)
class AChildSAttribute(Base):
    def forward(self, x, y):
        return F.relu(x) + y * self.child.gain * self.norm.eps * self.norm.weight


@forwards(None)
class TheParentClass(Base):
    def forward(self, x, y):
        return Base.forward(self, x, y) if False else F.relu(x) + y


# -- calls ------------------------------------------------------------------------------------------------------------


@forwards(None)
class AHelper(Base):
    def forward(self, x, y):
        return helper(x, y)


@forwards(None)
class AHelperThatIsDecorated(Base):
    def forward(self, x, y):
        y = decorated_helper(y)
        return F.relu(x) + y


@forwards(Reason.CONTEXT_MANAGER)
class AHelperThatFillsAListAndIsNotFollowed(Base):
    def forward(self, x, y):
        values = []
        fills_in_vain(values, x)
        return F.relu(x) + y * len(values)


@forwards(None)
class AHelperThatFillsAList(Base):
    def forward(self, x, y):
        values = []
        fills(values, x)
        return F.relu(values[0]) + y * len(values)


@forwards(None)
class Printing(Base):
    def forward(self, x, y):
        print("shape", x.shape)
        return F.relu(x) + y


@forwards(Reason.UNKNOWN_CALL)
class LoggingCall(Base):
    def forward(self, x, y):
        warnings.catch_warnings()
        return F.relu(x) + y


@forwards(Reason.READS_STATE)
class LoggingOfAModuleLogger(Base):
    def forward(self, x, y):
        logger.info("hello")
        return F.relu(x) + y


@forwards(Reason.SYNTAX)
class ATryBlock(Base):
    def forward(self, x, y):
        try:
            return F.relu(x) + y
        except RuntimeError:
            return x


@forwards(None)
class ALambda(Base):
    def forward(self, x, y):
        return (lambda a: F.relu(a) + y)(x)


@forwards(None)
class ALambdaWithADefault(Base):
    def forward(self, x, y):
        sums = [lambda a, n=n: F.relu(a) + y * n for n in range(3)]
        return sums[0](x) + sums[2](x)


@forwards(None)
class AnActivationThatIsMadeEachTime(Base):
    """As the heads of ultralytics' RT-DETR do."""

    def __init__(self):
        super().__init__()
        self.kind = nn.ReLU

    def forward(self, x, y):
        return getattr(self, "kind", nn.ReLU)()(x) + y if self.scale > 1 else self.kind(True)(x + 0) + y


@forwards(Reason.UNKNOWN_CALL)
class ALayerWithParametersThatIsMadeEachTime(Base):
    def forward(self, x, y):
        return F.relu(nn.Linear(4, 4)(x)) + y


@forwards(None)
class AMappedLambda(Base):
    def forward(self, x, y):
        a, b = map(lambda t: t * 2, x.chunk(2, -1))  # noqa: C417
        c, d = map(lambda s, t: F.relu(s) + t, (a, b), y.chunk(2, -1))
        return torch.cat((c, d), -1)


@forwards(None)
class AMappedFunction(Base):
    def forward(self, x, y):
        (out,) = map(helper, (x,), (y,))
        return out


@forwards(None)
class AMappedLayer(Base):
    def forward(self, x, y):
        a, b = map(self.fc, (x, y))
        return F.relu(a) + b


@forwards(None)
class AKey(Base):
    def forward(self, x, y):
        first = max((1, -2), key=lambda n: n * n)
        return F.relu(x) + y * first


@forwards(None)
class APartial(Base):
    def forward(self, x, y):
        act = functools.partial(helper, y=y)
        return act(x) + sum(map(act, (x,)))


@forwards(Reason.DATA_DEPENDENT)
class AMapOfUnknownLength(Base):
    def forward(self, x, y):
        return F.relu(torch.cat([*map(lambda t: t * 2, x.chunk(2, -1))], -1)) + y  # noqa: C417


@forwards(Reason.READS_STATE)
class APartialOfSomethingElse(Base):
    def forward(self, x, y):
        return F.relu(x) + functools.partial(logger.info)(y)


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


Pair = namedtuple("Pair", "first second")


@forwards(Reason.UNKNOWN_CALL)
class ANamedTuple(Base):
    def forward(self, x, y):
        return Pair(F.relu(x) + y, x)


@forwards(None)
class ADictResult(Base):
    def forward(self, x, y):
        return {"out": F.relu(x) + y, "x": [x, (y, 1)]}


@forwards(None)
class AWalrus(Base):
    def forward(self, x, y):
        if (n := self.count) == 0:
            y = y * (n + 1)
        return F.relu(x) + y


@forwards(None)
class AnEarlyRaise(Base):
    def forward(self, x, y):
        if self.mode not in ("fast", "slow"):
            raise ValueError(f"unknown mode {self.mode!r}")
        return F.relu(x) + y


@forwards(None)
class ConditionalExpressions(Base):
    def forward(self, x, y):
        a = x if (self.maybe is None and not self.count) or self.mode == "slow" else y
        return F.relu(a) + (y if self.scale > 1 else x)


@forwards(Reason.TRACE_FAILED)
class AForwardThatRaises(Base):
    def forward(self, x, y):
        raise NotImplementedError
