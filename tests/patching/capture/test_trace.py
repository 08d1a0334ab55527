"""The tracing traps: what a forward decides on every call it still decides when patched, or it is refused."""

from __future__ import annotations

import functools
import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import PatchWarning, Reason, patch_model, plan, plan_patch, unpatch_model
from tests.patching.capture import cases_of_state, cases_of_values, forwards  # noqa: F401  (they register)
from tests.patching.capture.forwards import CASES, SHAPE, TABLE, Base, check, identity_decorator, named

pytestmark = pytest.mark.filterwarnings("ignore::fastlayers.patching.PatchWarning")


def doubling_decorator(function):
    def forward(self, x, y):
        return function(self, x, y) * 2

    return forward


@pytest.fixture(autouse=True)
def flag(monkeypatch):
    """Each test begins with the flag that some forwards change."""
    monkeypatch.setattr(forwards, "FLAG", False)


def arguments():
    torch.manual_seed(1)
    return torch.randn(3, 4), torch.randn(3, 4)


class AnImportOfWhatIsNotLoaded(Base):
    def forward(self, x, y):
        import this  # would print

        return F.relu(x) + y * this.c


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
    if cls.__name__ == "ADefaultThatRemembers":
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
    module = patch_model(named("AnActivationThatIsMadeEachTime"))
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 3)
    x, y = arguments()
    torch.testing.assert_close(module(x, y), x * 3 + y)


def test_globals_that_change_are_followed(monkeypatch):
    module = patch_model(named("AGlobalFlag"))
    x, y = arguments()
    assert torch.equal(module(x, y), F.relu(x) + y)
    monkeypatch.setattr(cases_of_state, "FLAG", True)
    assert module(x, y) is x
    table = patch_model(named("AGlobalTable"))
    assert torch.equal(table(x, y), F.relu(x) + y)
    monkeypatch.setitem(TABLE, "on", False)
    assert table(x, y) is x
    monkeypatch.setitem(TABLE, "on", True)
    monkeypatch.setattr(cases_of_state, "SETTINGS", [4])
    assert torch.equal(table(x, y), F.relu(x) + y * 4)


def test_training_is_followed_in_both_modes():
    module = patch_model(named("FunctionalDropout"))
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
    row = plan_patch(named("StochasticDepthInTorch"))[""]
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
    module = patch_model(named("UnpackedShape"))
    with pytest.raises(ValueError, match="too many values to unpack"):
        module(torch.randn(2, 3, 4), torch.randn(4))
    with pytest.raises(ValueError, match="not enough values"):
        module(torch.randn(4), torch.randn(4))


def test_planning_runs_no_side_effect(capsys):
    module = named("Printing")
    plan_patch(module)
    assert capsys.readouterr().out == ""
    patch_model(module)(*arguments())
    assert "shape torch.Size([3, 4])" in capsys.readouterr().out


def test_nothing_to_patch_warns():
    with pytest.warns(PatchWarning, match="nothing in AForwardThatRaises was patched"):
        patch_model(named("AForwardThatRaises"), exclude=(nn.LayerNorm, nn.Linear, nn.Sequential))


def test_more_arguments_than_were_recorded():
    for module, args, kwargs in (
        (named("StarArgs"), (torch.randn(SHAPE),), {}),
        (named("StarKwargs"), (), {"z": torch.randn(SHAPE)}),
    ):
        expected = module(*arguments(), *args, **kwargs)
        assert torch.equal(patch_model(module)(*arguments(), *args, **kwargs), expected)


def test_an_import_of_what_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert plan_patch(AnImportOfWhatIsNotLoaded())[""].reason is Reason.SYNTAX
    assert "this" not in sys.modules


def test_a_list_where_there_was_a_tensor():
    module = named("AListOrATensor")
    x, y = arguments()
    expected = module([x[:, :1], x[:, 1:]], y)
    patch_model(module)
    assert torch.equal(module([x[:, :1], x[:, 1:]], y), expected)
    assert torch.equal(module(x, y), expected)
    source = type(module).__fastlayers_source__
    assert source.count("relu_add(") == 2, source


def test_a_list_of_lists_that_changes():
    module = named("ListsOfLists")
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
