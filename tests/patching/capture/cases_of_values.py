"""Forwards that arguments, values, modes and random numbers decide."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.patching import Reason
from tests.patching.capture.forwards import WEIGHT, Base, forwards


def guarded_helper(x):
    with torch.no_grad():
        return x * 2


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
