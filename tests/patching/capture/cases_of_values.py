"""Forwards that arguments, values, modes and random numbers decide."""

from __future__ import annotations

import math  # noqa: F401
import random  # noqa: F401  (sources name it)

import torch
import torch.nn.functional as F
from torch import Tensor  # noqa: F401

from fastlayers.patching import Reason
from tests.patching.capture.forwards import WEIGHT, Base, forwards, forwards_of  # noqa: F401


def guarded_helper(x):
    with torch.no_grad():
        return x * 2


# -- decided by arguments ---------------------------------------------------------------------------------------------

forwards_of(
    Reason.SIGNATURE,
    globals(),
    ADefaultThatIsAnObject=("x, y, other=WEIGHT", "return F.relu(x) + y * other"),
    AParameterThatHidesABuiltin=("x, y, type=None, len=3", "return F.relu(x * self.scale) + y * len"),
    AParameterThatHidesAModule=("x, y, torch=1", "return F.relu(x) + y.sigmoid() * F.relu6(x) * torch"),
)


forwards_of(
    None,
    globals(),
    RequiredArgumentThatIsTested="if y is None:\n    return x\nreturn F.relu(x) + y",
    InstanceTestOfAnArgument="return F.relu(x) + y if isinstance(x, torch.Tensor) else x",
    InstanceTestOfSeveralTypes="if isinstance(y, (tuple, list)):\n    y = y[0]\nreturn F.relu(x) + y",
    DefaultNoneThatIsTested=("x, y, z=None", "if z is None:\n    z = y\nreturn F.relu(x) + z"),
    DefaultNumber=("x, y, factor=2.0", "return F.relu(x * factor) + y"),
    DefaultFlag=("x, y, flag=False", "return F.relu(x) + y if not flag else x"),
    DefaultStringAndTuple=(
        'x, y, how="a", dims=(0, 1)',
        'return F.relu(x) + y if how == "a" and dims == (0, 1) else x',
    ),
    KeywordOnly=("x, y, *, z=None, flag=True", "out = F.relu(x) + y\nreturn out if z is None else out + z"),
    PositionalOnly=("x, y, /, z=1", "return F.relu(x) + y * z"),
    StarArgs=("x, y, *rest", "return F.relu(x) + y"),
    StarKwargs=("x, y, **rest", "return F.relu(x) + y"),
    AParameterCalledInput=("input, y, x=None, relu=None, add=0", "return F.relu(input) + y if relu is None else add"),
)

forwards_of(
    Reason.TYPE_TEST,
    globals(),
    InstanceTestOfAResult="h = self.fc(x)\nreturn F.relu(h) + y if isinstance(h, Tensor) else h",
)

forwards_of(
    Reason.UNKNOWN_CALL,
    globals(),
    TypeOfAnArgument="return F.relu(x) + y if type(x) is Tensor else x",
)

forwards_of(
    Reason.IDENTITY_TEST,
    globals(),
    NoneTestOfAChildSResult="h = self.child(x)\nreturn x if h is None else F.relu(h) + y",
    IdentityOfTwoArguments="return F.relu(x) + y if x is not y else x",
)

forwards_of(
    Reason.DATA_DEPENDENT,
    globals(),
    TruthOfAnArgument="return F.relu(x) + y if y else x",
)


@forwards(None)
class AnotherNameForSelf(Base):
    def forward(this, x, y):  # noqa: N805
        return this.relu(x * this.scale) + y


@forwards(Reason.SIGNATURE)
class AnotherParameterCalledSelf(Base):
    def forward(this, x, self):  # noqa: N805
        return F.relu(x) + self


# -- decided by values ------------------------------------------------------------------------------------------------

forwards_of(
    Reason.DATA_DEPENDENT,
    globals(),
    BranchOnAShape="return F.relu(x) + y if x.shape[0] > 2 else x",
    BranchOnADim="if x.dim() == 3:\n    x = x[0]\nreturn F.relu(x) + y",
    BranchOnAValue="return F.relu(x) + y if x.sum() > 0 else x",
    BranchOnADevice='return F.relu(x) + y if x.device.type == "cpu" else x',
    BranchOnRequiresGrad="return F.relu(x) + y if x.requires_grad else x",
    AnAssertionAboutAShape="assert x.shape[1] == 4\nreturn F.relu(x) + y",
    ALoopOverASize="for _ in range(x.shape[0]):\n    y = F.relu(x) + y\nreturn y",
    Membership="return F.relu(x) + y if x.shape[0] in (1, 3) else x",
    AFormattedValue='key = f"{x.shape[0]}"\nreturn F.relu(x) + y if key == "3" else x',
    ALoopOverATensor="total = 0\nfor row in x:\n    total = total + F.relu(row) + y\nreturn total",
)

forwards_of(
    None,
    globals(),
    AnAssertionAboutTheModule='assert self.mode == "fast", f"mode {self.mode}"\nreturn F.relu(x) + y',
    FinfoAsData="return F.relu(x) + y.clamp(min=torch.finfo(x.dtype).eps)",
    UnpackedShape="b, c = x.shape\nreturn F.relu(x.view(b, c)) + y",
    SizesAsData=(
        "n = x.shape[-1] // 2\nreturn F.relu(x[:, :n]) + y[:, int(n) :] / math.sqrt(n) * max(x.size(0), 2) * len(x)"
    ),
)


# -- decided by modes -------------------------------------------------------------------------------------------------

forwards_of(
    None,
    globals(),
    TrainingBranch="if self.training:\n    return F.relu(x) + y\nreturn F.relu(x + y) * 2",
    TrainingInOneModeOnly="if self.training:\n    x = x * 2\nreturn F.relu(x) + y",
    FunctionalDropoutByName="return F.dropout(F.relu(x) + y, p=0.5, training=self.training, inplace=False)",
    ScriptingBranch="return F.relu(x) + y if not torch.jit.is_scripting() else x",
    ContextManagerInAHelper="y = guarded_helper(y)\nreturn F.relu(x) + y",
    FunctionalDropout="return F.dropout(F.relu(x) + y, 0.5, self.training)",
)

forwards_of(
    Reason.DATA_DEPENDENT,
    globals(),
    GradModeBranch="return F.relu(x) + y if torch.is_grad_enabled() else x",
    AutocastBranch='return F.relu(x) + y if torch.is_autocast_enabled("cpu") else x',
    TracingBranch="return F.relu(x) + y if torch.jit.is_tracing() else x",
)

forwards_of(
    Reason.CONTEXT_MANAGER,
    globals(),
    NoGradBlock="with torch.no_grad():\n    y = y * 2\nreturn F.relu(x) + y",
    AutocastBlock='with torch.autocast("cpu", enabled=False):\n    return F.relu(x.float()) + y',
)

forwards_of(
    Reason.UNKNOWN_CALL,
    globals(),
    GradModeSwitch="torch.set_grad_enabled(True)\nreturn F.relu(x) + y",
)


# -- random numbers ---------------------------------------------------------------------------------------------------

forwards_of(
    None,
    globals(),
    RandomTensor="return F.relu(x) + y * torch.rand(1)",
    RandomLike="return F.relu(x) + y * torch.rand_like(x) + torch.randn(x.shape)",
    Bernoulli="return F.relu(x) + y * x.new_empty((3, 1)).bernoulli_(0.5)",
    ATensorConstant="return F.relu(x) + y * torch.tensor(2.0) + torch.arange(4) + torch.zeros(x.shape[0], 1)",
)

forwards_of(
    Reason.UNKNOWN_CALL,
    globals(),
    StochasticDepthInPython="if random.random() < 0.5:\n    return x\nreturn F.relu(x) + y",
)


@forwards(None)  # in eval
class StochasticDepthInTorch(Base):
    def forward(self, x, y):
        if self.training and torch.rand(()).item() < 0.5:
            return x
        return F.relu(x) + y
