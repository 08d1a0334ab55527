"""The tracing traps: what a forward decides anew on every call it still does when patched, or it is refused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import random
import sys
import types
import warnings
from collections import namedtuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.patching import PatchWarning, Reason, patch_model, plan, plan_patch, unpatch_model

pytestmark = pytest.mark.filterwarnings("ignore::fastlayers.patching.PatchWarning")

FLAG = False
WRITTEN = False
TABLE = {"on": True}
SETTINGS = [1, 2]
WEIGHT = torch.ones(4)
logger = logging.getLogger(__name__)


def identity_decorator(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


def doubling(function):
    def doubled(a):
        return function(a) * 2

    return doubled


def doubling_decorator(function):
    def forward(self, x, y):
        return function(self, x, y) * 2

    return forward


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


@pytest.fixture(autouse=True)
def flag(monkeypatch):
    """Each test begins with the flag that some forwards change."""
    monkeypatch.setitem(globals(), "FLAG", False)


def stateful_helper(x):
    global FLAG
    FLAG = not FLAG
    return x * 2 if FLAG else x * 3


def guarded_helper(x):
    with torch.no_grad():
        return x * 2


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

SHAPE = (3, 4)


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


class Config:
    def __init__(self):
        self.scale = 2.0
        self.nested = [1, 2]

    @property
    def live(self):
        return random.random()


class Base(nn.Module):
    """All that the forwards below use; each subclass has a fusable relu(x) + y somewhere."""

    constant = 3

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.maybe = None
        self.norm = nn.LayerNorm(4)
        self.scale = 2.0
        self.sizes = [1, 2]
        self.options = {"a": 1}
        self.count = 0
        self.cache = []
        self.objects = [object()]
        self.config = Config()
        self.act = F.relu
        self.mode = "fast"
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.table = nn.ModuleDict({"one": nn.Linear(4, 4)})
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gain = nn.Parameter(torch.ones(4))
        self.register_parameter("bias", None)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("nothing", None)
        self.loose = torch.ones(4)
        self.child = Child()

    def method(self, x, y):
        return F.relu(x) + y * self.scale

    @property
    def prop(self):
        return self.scale * 2

    @staticmethod
    def static(x):
        return x * 3

    @classmethod
    def classy(cls, x):
        return x * cls.constant

    def forward(self, x, y):
        return F.relu(x) + y


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 2.0

    def compute(self, x):
        return x * self.gain

    def forward(self, x):
        return None if self.gain == 0 else x * self.gain


def check(module, *args, **kwargs):
    """The patched module agrees with the unpatched one for this call, in both modes."""
    global FLAG
    cls = type(module)
    for mode in (True, False):
        results = []
        for patched in (True, False):
            if not patched:
                unpatch_model(module)
            FLAG, module.count = False, 0
            module.train(mode)
            torch.manual_seed(0)
            random.seed(0)
            results.append(attempt(module, args, kwargs))
            module.__class__ = cls
        actual, expected = results
        if isinstance(expected, type) or isinstance(actual, type):
            assert actual is expected
        else:
            torch.testing.assert_close(actual, expected, equal_nan=True)


def attempt(module, args, kwargs):
    try:
        return module(*args, **kwargs)
    except Exception as error:  # the kind of error is what is compared
        return type(error)


def arguments():
    torch.manual_seed(1)
    return torch.randn(3, 4), torch.randn(3, 4)


def forwards(expected):
    """Register a forward with the reason for which it is refused, or None where it is fused."""

    def register(cls):
        CASES.append(pytest.param(cls, expected, id=cls.__name__))
        return cls

    return register


CASES: list = []


# -- decided by arguments ---------------------------------------------------------------------------------------------


@forwards(None)
class DefaultNoneThatIsTested(Base):
    def forward(self, x, y, z=None):
        if z is None:
            z = y
        return F.relu(x) + z


@forwards(None)
class RequiredArgumentThatIsTested(Base):
    def forward(self, x, y):
        if y is None:
            return x
        return F.relu(x) + y


@forwards(None)
class DefaultNumber(Base):
    def forward(self, x, y, factor=2.0):
        return F.relu(x * factor) + y


@forwards(None)
class DefaultFlag(Base):
    def forward(self, x, y, flag=False):
        return F.relu(x) + y if not flag else x


@forwards(None)
class DefaultStringAndTuple(Base):
    def forward(self, x, y, how="a", dims=(0, 1)):
        return F.relu(x) + y if how == "a" and dims == (0, 1) else x


@forwards(None)
class KeywordOnly(Base):
    def forward(self, x, y, *, z=None, flag=True):
        out = F.relu(x) + y
        return out if z is None else out + z


@forwards(None)
class PositionalOnly(Base):
    def forward(self, x, y, /, z=1):
        return F.relu(x) + y * z


@forwards(None)
class StarArgs(Base):
    def forward(self, x, y, *rest):
        return F.relu(x) + y


@forwards(None)
class StarKwargs(Base):
    def forward(self, x, y, **rest):
        return F.relu(x) + y


@forwards(Reason.SIGNATURE)
class ADefaultThatIsAnObject(Base):
    def forward(self, x, y, other=WEIGHT):
        return F.relu(x) + y * other


@forwards(None)
class AnotherNameForSelf(Base):
    def forward(this, x, y):  # noqa: N805
        return this.relu(x * this.scale) + y


@forwards(Reason.SIGNATURE)
class AnotherParameterCalledSelf(Base):
    def forward(this, x, self):  # noqa: N805
        return F.relu(x) + self


@forwards(Reason.SIGNATURE)
class AParameterThatHidesABuiltin(Base):
    def forward(self, x, y, type=None, len=3):
        return F.relu(x * self.scale) + y * len


@forwards(None)
class AParameterCalledInput(Base):
    def forward(self, input, y, x=None, relu=None, add=0):
        return F.relu(input) + y if relu is None else add


@forwards(Reason.SIGNATURE)
class AParameterThatHidesAModule(Base):
    def forward(self, x, y, torch=1):
        return F.relu(x) + y.sigmoid() * F.relu6(x) * torch


@forwards(None)
class InstanceTestOfAnArgument(Base):
    def forward(self, x, y):
        return F.relu(x) + y if isinstance(x, torch.Tensor) else x


@forwards(None)
class InstanceTestOfSeveralTypes(Base):
    def forward(self, x, y):
        if isinstance(y, (tuple, list)):
            y = y[0]
        return F.relu(x) + y


@forwards(Reason.TYPE_TEST)
class InstanceTestOfAResult(Base):
    def forward(self, x, y):
        h = self.fc(x)
        return F.relu(h) + y if isinstance(h, Tensor) else h


@forwards(Reason.UNKNOWN_CALL)
class TypeOfAnArgument(Base):
    def forward(self, x, y):
        return F.relu(x) + y if type(x) is Tensor else x


@forwards(Reason.IDENTITY_TEST)
class NoneTestOfAChildSResult(Base):
    def forward(self, x, y):
        h = self.child(x)
        return x if h is None else F.relu(h) + y


@forwards(Reason.IDENTITY_TEST)
class IdentityOfTwoArguments(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x is not y else x


@forwards(Reason.DATA_DEPENDENT)
class TruthOfAnArgument(Base):
    def forward(self, x, y):
        return F.relu(x) + y if y else x


# -- decided by values ------------------------------------------------------------------------------------------------


@forwards(Reason.DATA_DEPENDENT)
class BranchOnAShape(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x.shape[0] > 2 else x


@forwards(Reason.DATA_DEPENDENT)
class BranchOnADim(Base):
    def forward(self, x, y):
        if x.dim() == 3:
            x = x[0]
        return F.relu(x) + y


@forwards(Reason.DATA_DEPENDENT)
class BranchOnAValue(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x.sum() > 0 else x


@forwards(Reason.DATA_DEPENDENT)
class BranchOnADevice(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x.device.type == "cpu" else x


@forwards(Reason.DATA_DEPENDENT)
class BranchOnRequiresGrad(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x.requires_grad else x


@forwards(Reason.DATA_DEPENDENT)
class AnAssertionAboutAShape(Base):
    def forward(self, x, y):
        assert x.shape[1] == 4
        return F.relu(x) + y


@forwards(None)
class AnAssertionAboutTheModule(Base):
    def forward(self, x, y):
        assert self.mode == "fast", f"mode {self.mode}"
        return F.relu(x) + y


@forwards(Reason.DATA_DEPENDENT)
class ALoopOverATensor(Base):
    def forward(self, x, y):
        total = 0
        for row in x:
            total = total + F.relu(row) + y
        return total


@forwards(Reason.DATA_DEPENDENT)
class ALoopOverASize(Base):
    def forward(self, x, y):
        for _ in range(x.shape[0]):
            y = F.relu(x) + y
        return y


@forwards(Reason.DATA_DEPENDENT)
class Membership(Base):
    def forward(self, x, y):
        return F.relu(x) + y if x.shape[0] in (1, 3) else x


@forwards(Reason.DATA_DEPENDENT)
class AFormattedValue(Base):
    def forward(self, x, y):
        key = f"{x.shape[0]}"
        return F.relu(x) + y if key == "3" else x


@forwards(None)
class UnpackedShape(Base):
    def forward(self, x, y):
        b, c = x.shape
        return F.relu(x.view(b, c)) + y


@forwards(None)
class SizesAsData(Base):
    def forward(self, x, y):
        n = x.shape[-1] // 2
        return F.relu(x[:, :n]) + y[:, int(n) :] / math.sqrt(n) * max(x.size(0), 2) * len(x)


@forwards(None)
class FinfoAsData(Base):
    def forward(self, x, y):
        return F.relu(x) + y.clamp(min=torch.finfo(x.dtype).eps)


# -- decided by modes -------------------------------------------------------------------------------------------------


@forwards(None)
class TrainingBranch(Base):
    def forward(self, x, y):
        if self.training:
            return F.relu(x) + y
        return F.relu(x + y) * 2


@forwards(None)
class TrainingInOneModeOnly(Base):
    def forward(self, x, y):
        if self.training:
            x = x * 2
        return F.relu(x) + y


@forwards(None)
class FunctionalDropout(Base):
    def forward(self, x, y):
        return F.dropout(F.relu(x) + y, 0.5, self.training)


@forwards(None)
class FunctionalDropoutByName(Base):
    def forward(self, x, y):
        return F.dropout(F.relu(x) + y, p=0.5, training=self.training, inplace=False)


@forwards(Reason.DATA_DEPENDENT)
class GradModeBranch(Base):
    def forward(self, x, y):
        return F.relu(x) + y if torch.is_grad_enabled() else x


@forwards(Reason.DATA_DEPENDENT)
class AutocastBranch(Base):
    def forward(self, x, y):
        return F.relu(x) + y if torch.is_autocast_enabled("cpu") else x


@forwards(Reason.DATA_DEPENDENT)
class TracingBranch(Base):
    def forward(self, x, y):
        return F.relu(x) + y if torch.jit.is_tracing() else x


@forwards(None)
class ScriptingBranch(Base):
    def forward(self, x, y):
        return F.relu(x) + y if not torch.jit.is_scripting() else x


@forwards(Reason.CONTEXT_MANAGER)
class NoGradBlock(Base):
    def forward(self, x, y):
        with torch.no_grad():
            y = y * 2
        return F.relu(x) + y


@forwards(Reason.CONTEXT_MANAGER)
class AutocastBlock(Base):
    def forward(self, x, y):
        with torch.autocast("cpu", enabled=False):
            return F.relu(x.float()) + y


@forwards(None)
class ContextManagerInAHelper(Base):
    def forward(self, x, y):
        y = guarded_helper(y)
        return F.relu(x) + y


@forwards(Reason.UNKNOWN_CALL)
class GradModeSwitch(Base):
    def forward(self, x, y):
        torch.set_grad_enabled(True)
        return F.relu(x) + y


# -- random numbers ---------------------------------------------------------------------------------------------------


@forwards(None)
class RandomTensor(Base):
    def forward(self, x, y):
        return F.relu(x) + y * torch.rand(1)


@forwards(None)
class RandomLike(Base):
    def forward(self, x, y):
        return F.relu(x) + y * torch.rand_like(x) + torch.randn(x.shape)


@forwards(None)  # in eval
class StochasticDepthInTorch(Base):
    def forward(self, x, y):
        if self.training and torch.rand(()).item() < 0.5:
            return x
        return F.relu(x) + y


@forwards(Reason.UNKNOWN_CALL)
class StochasticDepthInPython(Base):
    def forward(self, x, y):
        if random.random() < 0.5:
            return x
        return F.relu(x) + y


@forwards(None)
class Bernoulli(Base):
    def forward(self, x, y):
        return F.relu(x) + y * x.new_empty((3, 1)).bernoulli_(0.5)


@forwards(None)
class ATensorConstant(Base):
    def forward(self, x, y):
        return F.relu(x) + y * torch.tensor(2.0) + torch.arange(4) + torch.zeros(x.shape[0], 1)


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


class AnImportOfWhatIsNotLoaded(Base):
    def forward(self, x, y):
        import this  # would print

        return F.relu(x) + y * this.c


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


@pytest.mark.parametrize(("cls", "reason"), CASES)
def test_a_forward_is_fused_or_refused_with_its_reason(cls, reason, monkeypatch):
    monkeypatch.setattr(plan, "fuse_segments", lambda *args, **options: None)  # as a whole, not in parts
    module = cls()
    before = {name: repr(value) for name, value in vars(module).items()}
    row = plan_patch(module)[""]
    assert {name: repr(value) for name, value in vars(module).items()} == before, "planning changed the module"
    assert row.reason is reason, f"{row.reason}: {row.detail}"
    assert (row.became is None) == (reason is not None)


CHANGES = {
    "nothing": lambda m: None,
    "scale": lambda m: setattr(m, "scale", 5.0),
    "scale is a tensor": lambda m: setattr(m, "scale", torch.tensor(2.0)),
    "scale is a parameter": lambda m: (delattr(m, "scale"), setattr(m, "scale", nn.Parameter(torch.tensor(2.0)))),
    "sizes": lambda m: m.sizes.append(9),
    "options": lambda m: m.options.update(a=4),
    "mode": lambda m: setattr(m, "mode", "slow"),
    "config": lambda m: setattr(m.config, "scale", 9.0),
    "config list": lambda m: m.config.nested.__setitem__(1, 5),
    "another config": lambda m: setattr(m, "config", type("Other", (), {"scale": 1.0, "nested": [3, 4], "live": 1})()),
    "act": lambda m: setattr(m, "act", torch.sigmoid),
    "maybe": lambda m: setattr(m, "maybe", nn.Linear(4, 4)),
    "no norm": lambda m: setattr(m, "norm", None),
    "another norm": lambda m: setattr(m, "norm", nn.Linear(4, 4)),
    "norm of one attribute": lambda m: setattr(m.norm, "eps", 3.0),
    "one more layer": lambda m: m.layers.append(nn.Linear(4, 4)),
    "another layer": lambda m: m.layers.__setitem__(1, nn.Tanh()),
    "one more entry": lambda m: m.table.update({"two": nn.Linear(4, 4)}),
    "seq": lambda m: m.seq.append(nn.Tanh()),
    "bias": lambda m: setattr(m, "bias", nn.Parameter(torch.full((4,), 3.0))),
    "no gain": lambda m: setattr(m, "gain", None),
    "buffer": lambda m: setattr(m, "nothing", torch.ones(4)),
    "mask": lambda m: setattr(m, "mask", torch.full((4,), 5.0)),
    "loose": lambda m: setattr(m, "loose", torch.full((4,), 5.0)),
    "child": lambda m: setattr(m.child, "gain", 0.5),
    "child says None": lambda m: setattr(m.child, "gain", 0),
    "relu is a sigmoid": lambda m: setattr(m, "relu", nn.Sigmoid()),
}


@pytest.mark.parametrize("cls", [pytest.param(case.values[0], id=case.id) for case in CASES if case.values[1] is None])
def test_a_fused_forward_follows_what_changes_after_patching(cls, capsys):
    source = inspect.getsource(cls.forward) + inspect.getsource(Base.method) + inspect.getsource(Base.prop.fget)
    for change in CHANGES.values():
        if "nothing" in change.__code__.co_names or any(str(name) in source for name in mentioned(change)):
            torch.manual_seed(0)
            module = patch_model(cls())
            change(module)
            check(module, *arguments())


def mentioned(change):
    """The names of attributes that a change touches."""
    return {*change.__code__.co_names, *(c for c in change.__code__.co_consts if isinstance(c, str))} - {
        "setattr",
        "append",
    }


@pytest.mark.parametrize("cls", [pytest.param(case.values[0], id=case.id) for case in CASES])
def test_a_call_with_other_arguments_is_answered_as_before(cls, capsys):
    x, y = arguments()
    if cls is ADefaultThatRemembers:
        pytest.skip("answers differently on every call by itself")
    calls = [
        ((x, y), {}),
        ((x, y, y), {}),
        ((x, None), {}),
        ((x, 2.0), {}),
        ((x, (y, x)), {}),
        ((x[None], y), {}),
        ((x[0], y[0]), {}),
        ((x.double(), y.double()), {}),
        ((), {"x": x, "y": y}),
        ((x, y), {"z": y}),
        ((x, y), {"flag": True}),
        ((x, y), {"factor": 3}),
        ((x, y), {"how": "b"}),
        ((x, y), {"dims": [0, 1]}),
        ((x, y), {"unknown": 1}),
        ((x,), {}),
        ((x.clone().requires_grad_(), y), {}),
    ]
    torch.manual_seed(0)
    module = patch_model(cls())
    for args, kwargs in calls:
        check(module, *args, **kwargs)


def test_the_forward_of_an_activation_that_is_made_each_time(monkeypatch):
    module = patch_model(AnActivationThatIsMadeEachTime())
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 3)
    x, y = arguments()
    torch.testing.assert_close(module(x, y), x * 3 + y)


def test_globals_that_change_are_followed(monkeypatch):
    module = patch_model(AGlobalFlag())
    x, y = arguments()
    assert torch.equal(module(x, y), F.relu(x) + y)
    monkeypatch.setitem(globals(), "FLAG", True)
    assert module(x, y) is x
    table = patch_model(AGlobalTable())
    assert torch.equal(table(x, y), F.relu(x) + y)
    monkeypatch.setitem(TABLE, "on", False)
    assert table(x, y) is x
    monkeypatch.setitem(TABLE, "on", True)
    monkeypatch.setitem(globals(), "SETTINGS", [4])
    assert torch.equal(table(x, y), F.relu(x) + y * 4)


def test_training_is_followed_in_both_modes():
    module = patch_model(FunctionalDropout())
    x, y = arguments()
    assert torch.equal(module.eval()(x, y), F.relu(x) + y)
    assert not torch.equal(module.train()(x, y), F.relu(x) + y)


class Decorated(Base):
    @identity_decorator
    def forward(self, x, y):
        return F.relu(x) + y


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, x, y):
        return F.relu(x) + y


class Doubled(Base):
    @doubling_decorator
    def forward(self, x, y):
        return F.relu(x) + y


class Compiled(Base):
    forward = torch.compiler.disable(Base.forward)


class Inherits(Base):
    def forward(self, x, y):
        return super().forward(x, y) * 2


class InheritsFromTorch(nn.Linear):
    def forward(self, x):
        return F.relu(super().forward(x)) + x


class Partial(Base):
    forward = functools.partialmethod(Base.method)


class Mangled(Base):
    def __init__(self):
        super().__init__()
        self.__secret = 2.0

    def forward(self, x, y):
        return F.relu(x) + y * self.__secret


def test_decorated_forwards():
    for cls in (Decorated, NoGrad, Compiled):
        assert plan_patch(cls())[""].reason is Reason.DECORATED, cls
    assert dict(plan_patch(Doubled())[""].fused) == {"relu_add": 1}  # its closure has the function, which is followed
    assert plan_patch(Partial())[""].became is None
    for cls in (Doubled, Partial):
        check(patch_model(cls()), *arguments())


def test_what_is_fused_in_one_mode_only_is_said():
    row = plan_patch(StochasticDepthInTorch())[""]
    assert [reason for reason, _ in row.left] == [Reason.DATA_DEPENDENT]


def test_super():
    module = patch_model(Inherits())
    assert repr(module).startswith("FusedInherits(")
    check(module, *arguments())
    linear = patch_model(InheritsFromTorch(4, 4))
    assert repr(linear).startswith("FusedInheritsFromTorch(")
    check(linear, torch.randn(2, 4))


def test_private_names_are_refused():
    assert plan_patch(Mangled())[""].reason is Reason.SYNTAX


def test_no_source():
    scope: dict = {}
    code = "class M(nn.Module):\n    def forward(self, x, y):\n        return F.relu(x) + y\n"
    exec(code, {"nn": nn, "F": F, "__name__": "nowhere"}, scope)
    assert plan_patch(scope["M"]())[""].reason is Reason.NO_SOURCE


def test_source_that_changed_since_it_was_loaded(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("class M(nn.Module):\n    def forward(self, x, y):\n        return F.relu(x) + y\n")
    scope = {"nn": nn, "F": F, "__name__": "edited"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    path.write_text("class M(nn.Module):\n    def forward(self, x, z):\n        return F.relu(x) - z\n")
    assert plan_patch(scope["M"]())[""].reason is Reason.NO_SOURCE


def test_a_closure_variable_is_refused():
    factor = 2.0

    class Closure(Base):
        def forward(self, x, y):
            return F.relu(x) + y * factor

    assert plan_patch(Closure())[""].reason is Reason.READS_STATE


def test_a_helper_in_a_closure_is_followed():
    def double(x):
        return x * 2

    class Closure(Base):
        def forward(self, x, y):
            return F.relu(x) + double(y)

    check(patch_model(Closure()), *arguments())


def test_wrong_numbers_of_values_to_unpack_still_raise():
    module = patch_model(UnpackedShape())
    with pytest.raises(ValueError, match="too many values to unpack"):
        module(torch.randn(2, 3, 4), torch.randn(4))
    with pytest.raises(ValueError, match="not enough values"):
        module(torch.randn(4), torch.randn(4))


def test_planning_runs_no_side_effect(capsys):
    module = Printing()
    plan_patch(module)
    assert capsys.readouterr().out == ""
    patch_model(module)(*arguments())
    assert "shape torch.Size([3, 4])" in capsys.readouterr().out


def test_nothing_to_patch_warns():
    with pytest.warns(PatchWarning, match="nothing in AForwardThatRaises was patched"):
        patch_model(AForwardThatRaises(), exclude=(nn.LayerNorm, nn.Linear, nn.Sequential))


def test_more_arguments_than_were_recorded():
    for module, args, kwargs in (
        (StarArgs(), (torch.randn(SHAPE),), {}),
        (StarKwargs(), (), {"z": torch.randn(SHAPE)}),
    ):
        expected = module(*arguments(), *args, **kwargs)
        assert torch.equal(patch_model(module)(*arguments(), *args, **kwargs), expected)


def test_an_import_of_what_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert plan_patch(AnImportOfWhatIsNotLoaded())[""].reason is Reason.SYNTAX
    assert "this" not in sys.modules


def test_a_list_where_there_was_a_tensor():
    module = AListOrATensor()
    x, y = arguments()
    expected = module([x[:, :1], x[:, 1:]], y)
    patch_model(module)
    assert torch.equal(module([x[:, :1], x[:, 1:]], y), expected)
    assert torch.equal(module(x, y), expected)
    source = type(module).__fastlayers_source__
    assert source.count("relu_add(") == 2, source


def test_a_list_of_lists_that_changes():
    module = ListsOfLists()
    x, y = arguments()
    patch_model(module)
    module.layers[1].append(nn.ReLU())
    with pytest.raises(ValueError, match="too many values"):
        module(x, y)
    del module.layers[1]
    expected = F.relu(module.layers[0][0](x)) + y
    torch.testing.assert_close(module(x, y), expected)


def register(function):
    """A decorator that returns what it is given, as transformers' auto_docstring does."""
    function.registered = True
    function.__doc__ = "Another one."
    return function


class Registered(Base):
    @register
    def forward(self, x, y):
        """Its own.

        With a second line.
        """
        return F.relu(x) + y


class RegisteredLayer(Base):
    @register
    def forward(self, x, y, **kwargs):
        x = self.fc(x, *kwargs.values())
        return F.relu(x) + y


def test_decorators_that_return_what_they_are_given():
    for cls in (Registered, RegisteredLayer):
        module = cls()
        assert dict(plan_patch(module)[""].fused) == {"relu_add": 1}, plan_patch(module)
        check(patch_model(module), *arguments())
        unpatch_model(module)
        assert module.forward.registered


def test_a_decorator_that_changes_the_code():
    def changed(self, x, y):
        return F.relu(x) - y

    class Changes(Base):
        @lambda f: types.FunctionType(f.__code__.replace(co_code=changed.__code__.co_code), f.__globals__, "forward")
        def forward(self, x, y):
            return F.relu(x) + y

    assert plan_patch(Changes())[""].reason is Reason.DECORATED
