"""patch_model on a model and the world around it: selection, report, undo, hooks, copies, wrappers, compilers."""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import linecache
import pickle
import random
import re
import sys
import warnings
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from fastlayers import FusedSoftmax
from fastlayers.patching import (
    PatchError,
    PatchWarning,
    Reason,
    patch_model,
    patch_report,
    patched,
    plan,
    plan_patch,
    unpatch_model,
    unpatched,
    verify_patch,
)
from fastlayers.patching.measure import verify as verification


class Block(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x):
        """The forward of a block."""
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x, temperature: float = 2.0):
        return self.soft(self.fc(x.mean((2, 3))) / temperature)


class Plain(nn.Module):
    def forward(self, x):
        return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block(inplace=False))
        self.layer2 = nn.Sequential(Block())
        self.plain = Plain()
        self.head = Head()
        self.log = nn.LogSoftmax(dim=1)

    def forward(self, x):
        return self.log(self.head(self.plain(self.layer2(self.layer1(x)))))


BLOCKS = {"layer1.0", "layer1.1", "layer2.0"}
NORMS = {f"{name}.bn" for name in BLOCKS}
ALL = BLOCKS | NORMS | {"head", "head.fc", "head.soft", "log"}
#: Modules in which nothing itself is fused, and which run as regions.
REGIONS = {"", "layer1", "layer2"}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 4, 6, 6)


def names(report):
    return {row.fqn for row in report if row.became is not None}


def types_of(model):
    return {name: type(module) for name, module in model.named_modules()}


# -- the swap ---------------------------------------------------------------------------------------------------------


def test_what_survives(net, x):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    keys, parameters, text = list(net.state_dict()), list(net.parameters()), repr(net)
    seen = []
    net.layer1[0].register_forward_hook(lambda *args: seen.append("hook"))
    net.eval()
    expected = net(x)
    assert patch_model(net) is net
    assert isinstance(net, Net)
    assert isinstance(net.layer1[0], Block)
    assert isinstance(net.head.soft, nn.Softmax)
    assert isinstance(net.head.soft, FusedSoftmax)
    assert repr(net.layer1[0]).startswith("FusedBlock(")
    assert type(net.layer1[0]).__module__ == __name__
    assert type(net.layer1[0]).forward.__doc__ == Block.forward.__doc__
    assert list(net.state_dict()) == keys
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert not net.training
    assert not net.layer1[0].training
    assert repr(net).replace("Fused", "") == text
    torch.testing.assert_close(net(x), expected)
    assert seen == ["hook", "hook"]
    net.train()(x).sum().backward()
    optimizer.step()


def test_undo_is_exact(net, x):
    net.eval()
    before, state = types_of(net), {name: dict(vars(module)) for name, module in net.named_modules()}
    expected = net(x)
    patch_model(net)
    assert {name for name, cls in types_of(net).items() if cls is not before[name]} == ALL | REGIONS
    assert unpatch_model(net) is net
    assert types_of(net) == before
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == state
    assert torch.equal(net(x), expected)
    assert unpatch_model(net) is net


def test_patching_twice_changes_nothing(net):
    patch_model(net)
    before = types_of(net)
    patch_model(net)
    assert types_of(net) == before
    unpatch_model(net)
    assert "Fused" not in repr(net)


def test_an_error_while_classes_change_leaves_the_model_as_it_was(net, monkeypatch):
    before, become = types_of(net), plan.become

    def fails(module, cls):
        if type(module) is nn.Softmax:
            raise KeyboardInterrupt
        return become(module, cls)

    monkeypatch.setattr(plan, "become", fails)
    with pytest.raises(KeyboardInterrupt):
        patch_model(net)
    assert types_of(net) == before


def test_a_setattr_of_the_user_does_not_see_the_swap(x):
    class Frozen(Block):
        closed = False

        def __setattr__(self, name, value):
            if self.closed:
                raise AttributeError(f"{name} of a frozen block")
            super().__setattr__(name, value)

    block = Frozen()
    expected = block.eval()(x)
    Frozen.closed = True
    torch.testing.assert_close(patch_model(block)(x), expected)
    assert type(block) is not Frozen
    assert type(unpatch_model(block)) is Frozen


def test_generated_sources_go_with_their_code(net):
    def sources():
        for _ in range(3):  # A class is kept by the key of the one below it.
            gc.collect()
        return {name for name in linecache.cache if name.startswith("<fastlayers ")}

    gc.freeze()  # What is there already takes the collector a second each time.
    with patched(net):
        pass
    left = sources()  # Some are kept: layers have one class for all models.
    for _ in range(3):
        with patched(net):
            assert sources() - left
            assert all(linecache.getline(name, 1) for name in sources())
        assert sources() <= left
    gc.unfreeze()


def test_a_context_in_which_a_model_is_unpatched(net, x):
    net.eval()
    own = types_of(net)
    patch_model(net)
    before = types_of(net)
    with unpatched(net) as same:
        assert same is net
        assert types_of(net) == own
        net.layer1[0].relu = nn.SiLU()  # What a tool does stays.
        net.log.__class__ = Plain
        expected = net(x)
    assert types_of(net) == before | {"layer1.0.relu": nn.SiLU, "log": Plain}
    torch.testing.assert_close(net(x), expected)
    with pytest.raises(KeyError), unpatched(net):
        raise KeyError
    assert type(net.head) is before["head"]
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"), unpatched(3):
        pass


def test_patching_in_two_parts(net):
    patch_model(net, include="layer1")
    assert names(patch_report(net)) == {"layer1.0", "layer1.0.bn", "layer1.1", "layer1.1.bn"}
    patch_model(net)
    assert names(patch_report(net)) == ALL


def test_the_context_manager_takes_back_what_it_did(net):
    patch_model(net, include="head")
    before = types_of(net)
    with patched(net) as same:
        assert same is net
        assert names(patch_report(net)) == ALL
    assert types_of(net) == before
    with pytest.raises(KeyError), patched(net):
        raise KeyError
    assert types_of(net) == before


def test_the_root_module(x):
    block = patch_model(Block())
    assert repr(block).startswith("FusedBlock(")
    assert plan_patch(block)[""].became == "FusedBlock"
    soft = patch_model(nn.Softmax(-1))
    assert isinstance(soft, FusedSoftmax)
    assert type(unpatch_model(soft)) is nn.Softmax


def test_shared_modules_are_visited_once():
    block = Block()
    model = nn.Sequential(block, nn.Sequential(block), block)
    report = plan_patch(model)
    assert names(report) == {"0", "0.bn"}
    assert report["1.0"] is report["0"] is report["2"]
    assert report.counts() == {"batch_norm_add_act": 1}
    assert repr(patch_model(model)[1][0]).startswith("FusedBlock(")
    assert names(plan_patch(nn.Sequential(block, nn.ModuleDict({"again": block})), include="1.again")) == {"0", "0.bn"}


def test_equal_blocks_share_a_class(net):
    patch_model(net)
    assert type(net.layer1[0]) is type(net.layer2[0])
    assert type(net.layer1[0]) is not type(net.layer1[1])  # another ReLU, another guard


def test_generated_classes_are_freed(net):
    patch_model(net)
    reference = weakref.ref(type(net.layer1[0]))
    unpatch_model(net)
    gc.collect()
    assert reference() is None


def test_nothing_global_changes(net):
    before = {
        "relu": nn.ReLU.forward, "softmax": nn.Softmax.forward, "f": F.softmax, "t": torch.relu, "block": Block.forward,
        "call": nn.Module.__call__, "getattr": nn.Module.__getattr__,
    }  # fmt: skip
    patch_model(net)
    after = {
        "relu": nn.ReLU.forward, "softmax": nn.Softmax.forward, "f": F.softmax, "t": torch.relu, "block": Block.forward,
        "call": nn.Module.__call__, "getattr": nn.Module.__getattr__,
    }  # fmt: skip
    assert after == before
    assert type(Block()) is Block


def test_user_made_fused_layers_are_not_unpatched():
    model = nn.Sequential(FusedSoftmax(-1), Block())
    unpatch_model(patch_model(model))
    assert type(model[0]) is FusedSoftmax
    assert plan_patch(model)["0"].reason is Reason.NO_RULE


def test_subclasses_of_layers_keep_their_forward():
    class Own(nn.Softmax):
        def forward(self, input):
            return input * 2

    class Inherits(nn.Softmax):
        pass

    class Uses(nn.Softmax):
        def forward(self, input):
            return super().forward(input * 3)

    model = nn.ModuleList([Own(-1), Inherits(-1), Uses(-1), nn.Softmax(-1)])
    report = plan_patch(model)
    assert report["0"].reason is Reason.SUBCLASS
    assert report["1"].reason is Reason.SUBCLASS
    assert report["2"].became == "FusedUses"
    patch_model(model)
    x = torch.randn(3, 4)
    assert torch.equal(model[0](x), x * 2)
    torch.testing.assert_close(model[2](x), F.softmax(x * 3, -1))


# -- selection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ALL),
        ({"include": "layer1.*"}, {"layer1.0", "layer1.1", "layer1.0.bn", "layer1.1.bn"}),
        ({"include": "layer1"}, {"layer1.0", "layer1.1", "layer1.0.bn", "layer1.1.bn"}),
        ({"include": ["layer1.0", "layer2.?"]}, {"layer1.0", "layer2.0", "layer1.0.bn", "layer2.0.bn"}),
        ({"include": ("*.0",)}, {"layer1.0", "layer2.0", "layer1.0.bn", "layer2.0.bn"}),
        ({"include": Block}, BLOCKS | NORMS),
        ({"include": [nn.Softmax, "log"]}, {"head.soft", "log"}),
        ({"include": Head}, {"head", "head.fc", "head.soft"}),
        ({"exclude": "layer1"}, ALL - {"layer1.0", "layer1.1", "layer1.0.bn", "layer1.1.bn"}),
        ({"exclude": "layer1.1"}, ALL - {"layer1.1", "layer1.1.bn"}),
        ({"exclude": [Block]}, ALL - BLOCKS - NORMS),
        ({"exclude": nn.BatchNorm2d}, ALL - NORMS),
        ({"include": "layer*", "exclude": "layer1.0"}, (BLOCKS | NORMS) - {"layer1.0", "layer1.0.bn"}),
        ({"filter_fn": lambda module, fqn: isinstance(module, Block)}, BLOCKS),
        ({"filter_fn": lambda module, fqn: fqn == "head"}, {"head"}),
        ({"include": "layer?.*", "filter_fn": lambda module, fqn: fqn.endswith("0")}, {"layer1.0", "layer2.0"}),
    ],
)
def test_selection(net, options, expected):
    assert names(plan_patch(net, **options)) == expected
    patch_model(net, **options)
    assert names(patch_report(net)) == expected


def test_an_excluded_child_is_not_absorbed(net, x):
    net.eval()
    expected = net(x)
    row = plan_patch(net, exclude="*.relu")["layer1.0"]
    assert (row.fused, row.left[0][0]) == ((("batch_norm_add", 1),), Reason.EXCLUDED_CHILD)
    assert plan_patch(net, exclude=["*.relu", "*.bn"])["layer1.0"].reason is Reason.EXCLUDED_CHILD
    with patched(net, exclude=[nn.ReLU, nn.BatchNorm2d, nn.Softmax]):
        assert type(net.layer1[0]) is Block
        assert type(net.head) is Head
        assert torch.equal(net(x)[0], expected[0])


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_warns(net, option):
    with pytest.warns(PatchWarning, match="'layer9.*' matched no module"):
        patch_model(net, **{option: ["layer9.*", "layer1"]})
    with pytest.warns(PatchWarning, match="'Conv3d' matched no module"):
        patch_model(net, **{option: nn.Conv3d})


def test_nothing_matched_warns():
    with pytest.warns(PatchWarning, match=r"nothing in Tanh was patched"):
        patch_model(nn.Tanh())


def test_a_complete_patch_does_not_warn(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(net)
        patch_model(net)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: patch_model(torch.ones(2)), "expected a torch.nn.Module, got Tensor"),
        (lambda net: patch_model(Net), "expected a torch.nn.Module, got type"),
        (lambda net: unpatch_model({}), "expected a torch.nn.Module, got dict"),
        (lambda net: verify_patch("net"), "expected a torch.nn.Module, got str"),
        (lambda net: patch_model(net, include=3), "include must be .* got 3"),
        (lambda net: patch_model(net, exclude=["a", 3]), "exclude must hold .* got 3"),
        (lambda net: patch_model(net, exclude=int), "exclude must hold .* got <class 'int'>"),
        (lambda net: patch_model(net, filter_fn="relu"), "filter_fn must be a function .* got str"),
        (lambda net: patch_model(net, includes="x"), "unexpected keyword argument 'includes'"),
    ],
)
def test_wrong_arguments(net, call, message):
    before = types_of(net)
    with pytest.raises(TypeError, match=message):
        call(net)
    assert types_of(net) == before


def test_an_error_while_planning_changes_nothing(net):
    before = types_of(net)

    def filter_fn(module, fqn):
        if fqn == "log":
            raise ZeroDivisionError
        return True

    with pytest.raises(ZeroDivisionError):
        patch_model(net, filter_fn=filter_fn)
    assert types_of(net) == before


def test_strict(net):
    class Refused(nn.Module):
        def forward(self, x):
            while x.ndim < 3:
                x = x[None]
            return F.relu(x)

    patch_model(copy.deepcopy(net), strict=True)
    net.extra = Refused()
    before = types_of(net)
    with pytest.raises(PatchError, match=r"(?s)nothing was changed.*extra: its forward uses a construct .*while"):
        patch_model(net, strict=True)
    with pytest.raises(PatchError, match="'nowhere' matched no module"):
        patch_model(net, include=["layer1", "nowhere"], strict=True)
    with pytest.raises(PatchError, match="nothing in Tanh was patched"):
        patch_model(nn.Tanh(), strict=True)
    assert types_of(net) == before
    patch_model(net, exclude="extra", strict=True)


# -- the report -------------------------------------------------------------------------------------------------------


def test_report(net):
    report = plan_patch(net)
    assert len(report) == len(list(net.named_modules()))
    row = report["layer1.0"]
    assert (row.was, row.became, row.fused, row.reason) == ("Block", "FusedBlock", (("batch_norm_add_act", 1),), None)
    assert report["layer1.0.conv"].reason is Reason.NO_RULE
    assert report["plain"].reason is Reason.NOTHING_TO_FUSE
    assert report.counts() == {"batch_norm_add_act": 3, "softmax": 1, "Linear": 1, "LogSoftmax": 1}
    assert report.summary() == "Net: 6 of 20 modules patched: 3 batch_norm_add_act, 1 softmax, 1 Linear, 1 LogSoftmax"
    text = str(report)
    assert "layer1.*  2 x Block   FusedBlock" in text
    assert "layer2.0  Block       FusedBlock" in text
    assert "details=True gives each its own" in text
    assert "layer1.0.conv" not in text
    assert "no rule looks for this layer" in text
    with pytest.raises(KeyError, match="nowhere"):
        report["nowhere"]
    for each in (plan_patch(net, details=True), patch_report(patch_model(net), details=True)):
        assert "layer1.0  Block       FusedBlock" in str(each)
        assert "details" not in str(each)


def test_equal_rows_share_a_line(monkeypatch):
    """Patched ones in places that differ in numbers, and those of one class that were left alone for one reason."""

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    block = nn.ModuleDict({"first": Branches(), "second": Branches(), "soft": nn.Softmax(-1)})
    model = nn.ModuleDict({"blocks": nn.ModuleList(copy.deepcopy(block) for _ in range(3)), "soft": nn.Softmax(-1)})
    report = plan_patch(model)
    monkeypatch.setenv("COLUMNS", "200")
    assert [line.split()[:5] for line in str(report).splitlines()[2:5]] == [
        ["blocks.0.first,", "...", "6", "x", "Branches"],
        ["blocks.*.soft", "3", "x", "Softmax", "FusedSoftmax"],
        ["soft", "Softmax", "FusedSoftmax", "Softmax"],
    ]
    assert report.rows == plan_patch(model, details=True).rows


def test_a_reason_names_the_line():
    class Tests(nn.Module):
        def forward(self, x):
            if (x > 0).all():  # Here.
                return torch.softmax(x, -1)
            return x

    detail = plan_patch(Tests())[""].detail
    assert re.fullmatch(r"tests a computed value at test_patching\.py:\d+: if \(x > 0\)\.all\(\):  # Here\.", detail)


def test_report_of_a_patched_model_is_that_of_the_plan(net):
    plan = plan_patch(net)
    assert str(patch_report(net)) != str(plan)
    assert not patch_report(net).patched
    patch_model(net)
    assert str(patch_report(net)) == str(plan)
    assert str(plan_patch(net)) == str(plan)


class HalfFused(nn.Module):
    def forward(self, x, y, mask):
        return torch.relu(x + y) * x.masked_fill(mask, -1e9).softmax(-1)


def test_report_of_a_patched_model_still_says_what_was_left():
    model = HalfFused()
    plan = plan_patch(model)
    assert [reason for reason, _ in plan[""].left] == [Reason.FINITE_FILL]
    assert str(patch_report(patch_model(model))) == str(plan)


def test_report_with_nothing_to_say_has_no_table():
    report = plan_patch(nn.Tanh())
    assert (
        report.to_markdown()
        == "Tanh: 0 of 1 modules patched: nothing to fuse\n\n- 1 modules: no rule looks for this layer\n"
    )


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(PatchWarning) as caught:
        patch_model(nn.Tanh())
    with pytest.warns(PatchWarning) as inside, patched(nn.Tanh()):
        pass
    assert {caught[0].filename, inside[0].filename} == {__file__}


def test_report_in_other_forms(net):
    report = plan_patch(net, include=["layer1", "nowhere"])
    data = json.loads(report.to_json())
    assert data["counts"] == {"batch_norm_add_act": 2}
    assert data["unmatched"] == ["nowhere"]
    rows = {row["module"]: row for row in data["modules"]}
    assert rows["layer1.0"]["fused"] == {"batch_norm_add_act": 1}
    assert rows["layer2.0"]["reason"] == "NOT_SELECTED"
    markdown = report.to_markdown()
    assert "| layer1.* | 2 x Block | FusedBlock | batch_norm_add_act |" in markdown
    assert "pattern 'nowhere' matched nothing" in markdown


# -- hooks ------------------------------------------------------------------------------------------------------------


def recorded(model, name, register, x):
    """What a hook on a module sees, and the model's output."""
    seen = []

    def hook(module, *values):
        tensors = [t for value in values for t in (value if isinstance(value, tuple) else (value,)) if t is not None]
        seen.append(tensors)

    handle = getattr(model.get_submodule(name), register)(hook)
    x = x.clone().requires_grad_()
    out = model(x)
    out.sum().backward()
    handle.remove()
    # Read after the forward: an in-place operation shows in what a hook kept.
    return out.detach(), x.grad, [t.detach().clone() for tensors in seen for t in tensors]


@pytest.mark.parametrize(
    "name", ["layer1.0.relu", "layer1.1.relu", "layer1.0.bn", "layer1.0.conv", "layer1.1", "head.soft", "head"]
)
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_what_they_saw(net, x, name, register, when):
    net.double()
    x = x.double()
    if name in ("layer1.0.bn", "layer1.0.relu") and register == "register_full_backward_hook":
        pytest.skip("torch raises: an in-place operation next to a backward hook")
    expected = recorded(net, name, register, x)
    if when == "before":
        handle = net.get_submodule(name).register_forward_hook(lambda *args: None)
        patch_model(net)
        handle.remove()
    else:
        patch_model(net)
    actual = recorded(net, name, register, x)
    for a, b in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b)
    assert len(actual[2]) == len(expected[2])
    for a, b in zip(actual[2], expected[2], strict=True):
        torch.testing.assert_close(a, b)


def test_a_hook_that_changes_the_output_of_an_absorbed_child(net, x):
    net.eval()
    patch_model(net)
    handle = net.layer1[0].relu.register_forward_hook(lambda module, args, out: out * 3)
    actual = net(x)
    unpatch_model(net)
    assert torch.equal(actual, net(x))
    handle.remove()


def test_global_hooks_fire_for_absorbed_children(net, x):
    patch_model(net)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    net(x)
    handle.remove()
    assert seen.count("ReLU") == 3


def test_a_hooked_child_is_reported(net):
    net.layer1[0].relu.register_forward_hook(lambda *args: None)
    assert plan_patch(net)["layer1.0"].reason is Reason.HOOKED_CHILD


# -- copies, pickles, checkpoints --------------------------------------------------------------------------------------


def test_deepcopy_stays_patched_and_can_be_undone(net, x):
    net.eval()
    expected = net(x)
    patch_model(net)
    clone = copy.deepcopy(net)
    assert types_of(clone) == types_of(net)
    torch.testing.assert_close(clone(x), expected)
    unpatch_model(clone)
    assert type(clone.layer1[0]) is Block
    assert type(net.layer1[0]) is not Block
    assert clone.layer1[0].conv.weight is not net.layer1[0].conv.weight
    assert torch.equal(clone(x), expected)


def test_deepcopy_keeps_what_is_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.me = [self]

        def forward(self, x):
            return F.relu(self.a(x)) + self.b(x)

    model = patch_model(Tied())
    clone = copy.deepcopy(model)
    assert clone.a.weight is clone.b.weight
    assert clone.me[0] is clone
    assert type(clone) is type(model)


class Custom(Block):
    """Says itself how it is copied and pickled."""

    def __deepcopy__(self, memo):
        clone = Custom()
        clone.load_state_dict(self.state_dict())
        clone.copied = True
        return clone

    def __reduce__(self):
        return (rebuild, (type(self), self.state_dict()))


def rebuild(cls, state):
    module = cls()
    module.load_state_dict(state)
    return module


def test_a_class_with_its_own_copy_and_pickle(x):
    block = patch_model(Custom().eval())
    clone = copy.deepcopy(block)
    assert clone.copied
    assert type(clone) is type(block)
    loaded = pickle.loads(pickle.dumps(block))
    assert type(loaded) is Custom
    torch.testing.assert_close(loaded.eval()(x), block(x))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_holds_the_original_classes(net, x, protocol):
    expected = net.eval()(x)
    patch_model(net)
    data = pickle.dumps(net, protocol)
    assert b"Fused" not in data
    assert b"fastlayers" not in data
    loaded = pickle.loads(data)
    assert type(loaded.layer1[0]) is Block
    assert type(loaded.head.soft) is nn.Softmax
    assert torch.equal(loaded(x), expected)
    assert repr(net.layer1[0]).startswith("FusedBlock(")


def test_torch_save_of_a_whole_model(net, x, tmp_path):
    expected = net.eval()(x)
    torch.save(patch_model(net), tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    assert torch.equal(loaded(x), expected)
    torch.testing.assert_close(patch_model(loaded)(x), expected)


def test_state_dicts_go_both_ways(net, x):
    other = Net()
    patch_model(net).eval()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other.eval()(x), net(x))
    net.load_state_dict(other.state_dict())


def test_training_patched_then_unpatching_gives_the_trained_weights(net, x):
    twin = copy.deepcopy(net)
    patch_model(net)
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    unpatch_model(net)
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_dtype_and_device_moves_after_patching(net, x):
    patch_model(net).double()
    assert net(x.double()).dtype == torch.float64
    net.to("meta")
    assert net(x.to("meta", torch.float64)).device.type == "meta"


# -- modules and wrappers that are special ---------------------------------------------------------------------------


def test_a_forward_on_the_instance_is_detected(net, x):
    """As accelerate does it."""
    block = net.layer1[0]
    block.forward = lambda x, old=block.forward: old(x) * 2
    net.layer1[1].relu.forward = lambda x: x
    with pytest.warns(PatchWarning, match="replaced on the instance"):
        patch_model(net)
    report = patch_report(net)
    assert report["layer1.0"].reason is Reason.FORWARD_REPLACED
    assert report["layer1.1"].fused == (("batch_norm_add", 1),)
    assert type(block) is Block


def test_a_forward_put_on_an_absorbed_child_afterwards(net, x):
    net.eval()
    patch_model(net)
    net.layer1[0].relu.forward = torch.sigmoid
    actual = net(x)
    unpatch_model(net)
    torch.testing.assert_close(actual, net(x))


@pytest.mark.parametrize("relu", [nn.GELU(), nn.ReLU6(), nn.Identity()])
def test_an_absorbed_child_that_is_replaced_afterwards(net, x, relu):
    net.eval()
    patch_model(net)
    net.layer1[0].relu = relu
    net.head.soft = nn.Softmax(dim=0)
    actual = net(x)
    unpatch_model(net)
    torch.testing.assert_close(actual, net(x))


def test_a_softmax_whose_dim_changes_afterwards(net, x):
    net.eval()
    patch_model(net)
    net.head.soft.dim = 0
    net.log.dim = 0
    actual = net(x)
    unpatch_model(net)
    torch.testing.assert_close(actual, net(x))


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_parametrized_modules(net, x):
    parametrize.register_parametrization(net.layer1[0].conv, "weight", Double())
    nn.utils.parametrizations.weight_norm(net.head.fc)
    net.eval()
    expected = net(x)
    patch_model(net)
    torch.testing.assert_close(net(x), expected)
    parametrize.remove_parametrizations(net.layer1[0].conv, "weight")
    torch.testing.assert_close(net(x), expected)

    class Own(nn.Linear):
        def forward(self, x):
            return F.relu(F.linear(x, self.weight)) + x

    own = Own(4, 4)
    parametrize.register_parametrization(own, "weight", Double())
    assert plan_patch(own)[""].reason is Reason.PARAMETRIZED
    later = patch_model(Own(4, 4))
    parametrize.register_parametrization(later, "weight", Double())
    with pytest.warns(PatchWarning, match="was changed again after patching"):
        unpatch_model(later)
    parametrize.remove_parametrizations(later, "weight")
    assert type(unpatch_model(later)) is Own


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripted_modules_are_left_alone(net, x):
    net.layer1[0] = torch.jit.script(Block())
    with pytest.warns(PatchWarning, match="holds scripted modules"):
        patch_model(net)
    assert names(patch_report(net)) == ALL - {"layer1.0", "layer1.0.bn"}
    net(x)


def test_wrappers(net, x):
    model = nn.DataParallel(net)
    with pytest.warns(PatchWarning, match="wrapped in DataParallel"):
        patch_model(model)
    assert names(patch_report(model)) == {f"module.{name}" for name in ALL}
    assert patch_report(model)[""].reason is Reason.WRAPPER
    unpatch_model(model)
    compiled = torch.compile(net, backend="eager")
    with pytest.warns(PatchWarning, match="wrapped in OptimizedModule"):
        patch_model(compiled)
    assert repr(net.layer1[0]).startswith("FusedBlock(")
    torch.testing.assert_close(compiled.eval()(x), net(x))


def test_a_replica_of_data_parallel(net, x):
    expected = net.eval()(x)
    patch_model(net)
    replica = net.layer1[0]._replicate_for_data_parallel()
    assert type(replica) is type(net.layer1[0])
    torch.testing.assert_close(net(x), expected)


def test_graph_modules(x):
    traced = torch.fx.symbolic_trace(Block())
    report = plan_patch(traced)
    assert report[""].reason is Reason.GRAPH_MODULE


def test_quantised_layers_are_left_alone():
    model = nn.Sequential(Block(), torch.ao.nn.quantized.ReLU6())
    with pytest.warns(PatchWarning, match="quantised layers"):
        patch_model(model)


class Registry(nn.Module):
    known: list = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Registry.known.append(cls)

    def forward(self, x):
        return F.relu(x) + x


def test_a_class_that_reacts_to_subclasses_is_left_alone():
    before = list(Registry.known)
    assert plan_patch(Registry())[""].reason is Reason.CLASS_HOOKS
    assert Registry.known == before


def test_convert_sync_batchnorm_after_patching(net):
    patch_model(net)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert names(patch_report(converted)) == ALL - NORMS
    assert isinstance(converted.layer1[0].bn, nn.SyncBatchNorm)


# -- compilers and transforms -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
def test_compile_in_one_graph(net, x, mode):
    patch_model(net)
    net.train(mode)
    state = copy.deepcopy(net.state_dict())
    expected = net(x)
    net.load_state_dict(state)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    gradient = torch.autograd.grad(compiled(x).square().sum(), list(net.parameters()))
    assert len(gradient) == len(list(net.parameters()))


def test_compile_sees_what_changes(net, x):
    """Guards of the generated forward are guards of the compiled code too."""
    patch_model(net.eval())
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    net.layer1[0].relu = nn.Sigmoid()
    unpatch_model(reference := copy.deepcopy(net))
    torch.testing.assert_close(compiled(x), reference(x))
    seen = []
    net.layer1[1].relu.register_forward_hook(lambda *args: seen.append(1))
    torch._dynamo.reset()  # as torch documents for hooks added after compiling
    torch.testing.assert_close(compiled(x), reference(x))
    assert seen


def test_export(net, x):
    patch_model(net.eval())
    expected = net(x)
    for strict in (False, True):
        program = torch.export.export(net, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), expected)
    dynamic = torch.export.export(net, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})
    torch.testing.assert_close(dynamic.module()(torch.cat([x, x, x])), net(torch.cat([x, x, x])))


def test_checkpointing_and_functional_call(net, x):
    from torch.utils.checkpoint import checkpoint

    net.eval()
    x = x.requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), x)[0]
    patch_model(net)
    torch.testing.assert_close(
        torch.autograd.grad(checkpoint(net, x, use_reentrant=False).square().sum(), x)[0], expected
    )
    parameters = {name: p * 1 for name, p in net.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(net, parameters, (x,)), net(x))
    stacked = torch.stack([x, x])
    torch.testing.assert_close(torch.func.vmap(net)(stacked)[0], net(x))
    gradient = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).square().sum())(parameters)
    assert gradient.keys() == parameters.keys()


# -- verify_patch -----------------------------------------------------------------------------------------------------


def snapshot(model):
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return tensors, grads, [m.training for m in model.modules()], types_of(model), torch.random.get_rng_state()


def unchanged(before, after):
    for a, b in zip(before[:2], after[:2], strict=True):
        assert a.keys() == b.keys()
        assert all((a[key] is None and b[key] is None) or torch.equal(a[key], b[key]) for key in a)
    return before[2:4] == after[2:4] and torch.equal(before[4], after[4])


@pytest.mark.parametrize("state", ["unpatched", "patched"])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_verify(net, x, state, mode, dtype):
    net.to(dtype).train(mode)
    if mode:
        net(x.to(dtype)).sum().backward()
    if state == "patched":
        patch_model(net)
    net.layer2[0].eval()
    before = snapshot(net)
    report = verify_patch(net, x.to(dtype))
    assert report
    assert report.ok
    assert report.patched == 6
    assert report.first_difference is None
    assert {c.name for c in report.comparisons} >= {"output", "grad of layer1.0.conv.weight", "grad of input 0"}
    assert str(report).startswith("verify: equal (6 modules patched")
    assert ("every value is the same" in str(report)) == all(c.error == 0 for c in report.comparisons)
    assert unchanged(before, snapshot(net))


@pytest.mark.parametrize("error", ["output", "gradient", "dtype"])
def test_verify_finds_a_wrong_kernel_and_says_where(net, x, error, monkeypatch):
    """The second block is made wrong."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (1.001 if error == "output" else 1)

        @staticmethod
        def backward(ctx, grad):
            return grad * (1.001 if error == "gradient" else 1)

    patch_model(net)
    cls = type(net.layer1[1])
    right = cls.forward
    broken = {"dtype": lambda self, x: right(self, x).double().float().to(torch.float64)}
    monkeypatch.setattr(cls, "forward", broken.get(error, lambda self, x: Wrong.apply(right(self, x))))
    if error == "dtype":
        monkeypatch.setattr(Block, "forward", lambda self, x: F.relu(self.bn(self.conv(x)) + x).to(x.dtype))
        net = net.layer1[1]
    report = verify_patch(net, x)
    assert not report
    assert report.failures
    assert "DIFFER" in str(report)
    assert report.first_difference == {"output": "layer1.1", "gradient": None, "dtype": ""}[error]
    assert report.first_gradient_difference == ("layer1.1" if error == "gradient" else None)
    assert json.dumps(report.to_dict())


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_verify_allows_for_the_error_of_torch_itself(monkeypatch, factor):
    """A long sum that is added up one after the other is further off than a perturbed input makes it."""

    class Total(nn.Module):
        def forward(self, x):
            rows = torch.zeros(len(x), dtype=torch.long)
            return F.relu(x.new_zeros(1, 2).index_add(0, rows, x)) + 0 * x[:1]

    model = patch_model(Total())
    x = torch.full((100000, 2), 0.1)
    monkeypatch.setattr(type(model), "forward", lambda self, x: factor * F.relu(x.sum(0, True)) + 0 * x[:1])
    report = verify_patch(model, x)
    assert bool(report) == (factor == 1)
    assert report.comparisons[0].error > verification.ROUNDINGS * torch.finfo(x.dtype).eps * 10000


def test_verify_names_a_swapped_layer_beside_patched_blocks(net, x, monkeypatch):
    patch_model(net)
    cls = type(net.log)
    right = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: right(self, x) + 0.01)
    report = verify_patch(net, x)
    assert not report
    assert report.first_difference == "log"
    assert "the first module that differs: log" in str(report)


def test_verify_names_the_module_whose_parameter_gets_another_gradient(monkeypatch):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return F.relu(x) + x * self.weight

    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4), Scale())
    patch_model(model)
    model[3].__class__ = type("Wrong", (type(model[3]),), {**vars(type(model[3]))})
    right = type(model[3]).forward

    def forward(self, x):
        y = right(self, x)
        return y + 0.1 * (self.weight - self.weight.detach()).sum()

    monkeypatch.setattr(type(model[3]), "forward", forward)
    report = verify_patch(model, torch.randn(3, 4))
    assert [c.name for c in report.failures] == ["grad of 3.weight"]
    assert report.first_difference is None
    assert report.first_gradient_difference == "3"
    assert "the first module that differs in the backward: 3" in str(report)


def test_verify_where_parts_are_absorbed(net, x, monkeypatch):
    """A layer that a block has absorbed, and one after it that is given something else, are not what differs."""
    from fastlayers.patching.runtime import calls

    original = calls.batch_norm_layer
    monkeypatch.setattr(calls, "batch_norm_layer", lambda *args, **options: original(*args, **options) * 1.01)
    patch_model(net)
    report = verify_patch(net, x)
    assert report.first_difference == "layer1.0"


def test_a_printed_verification_is_short():
    rows = tuple(verification.Comparison(f"output {i}", 1.0, 0.1) for i in range(30))
    report = verification.VerifyReport(rows, 1, True)
    assert str(report).splitlines()[-2:] == ["  output 9: differs by 1, tolerance 0.1", "  and 20 more"]
    assert report.to_markdown().count("differs") == 30


def test_watching_under_cprofile():
    from fastlayers.patching.measure.watch import MODULE_CALL, watching

    profiler, seen = cProfile.Profile(), []
    with profiler:
        before = sys.getprofile()
        with watching({MODULE_CALL}, seen.append, lambda *left: None):
            nn.Identity()(1)
        assert sys.getprofile() is before
        sum([1, 2])
    assert len(seen) == 1
    assert any("sum" in str(entry.code) for entry in profiler.getstats())


def test_watching_leaves_the_profiler_of_others_alone(net, x):
    from fastlayers.patching.measure.watch import MODULE_CALL, watching

    seen = []
    mine = lambda *event: None  # noqa: E731
    sys.setprofile(mine)
    try:
        with watching({MODULE_CALL}, lambda frame: seen.append(type(frame.f_locals["self"])), lambda *left: None):
            patch_model(net)(x)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert issubclass(seen[0], Net)
    assert nn.Conv2d in seen
    assert not any(issubclass(cls, nn.BatchNorm2d) for cls in seen)  # absorbed, and still so


def test_verify_restores_shared_modules_and_tied_parameters():
    """torch.func.functional_call leaves its stand-ins in a module that is used in two places."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.second = self.first
            self.last = nn.Linear(4, 4)
            self.last.weight = self.first[0].weight

        def forward(self, x):
            return self.last(self.second(self.first(x)))

    model = Twice()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert verify_patch(model, torch.randn(3, 4))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])


class Remembers(nn.Module):
    """As LeViT's attention: in eval it keeps what it computed of its parameters for the next call."""

    def __init__(self):
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.randn(4)), nn.LayerNorm(4)
        self.known, self.calls, self.last = {}, [], None

    def forward(self, x):
        self.calls.append(len(self.calls))
        self.last = x
        if self.training or "bias" not in self.known:
            self.known["bias"] = self.bias * 2
        return self.norm(x) + self.known["bias"]


def test_verify_with_a_model_that_remembers():
    model = patch_model(Remembers().eval())
    known, calls = model.known, model.calls
    report = verify_patch(model, torch.randn(3, 4))
    assert report, report
    assert model.known is known
    assert model.calls is calls
    assert not known
    assert not calls
    assert model.last is None


class Draws(nn.Module):
    """As VITS: which layers are left out in training is drawn from NumPy's generator, not from torch's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x) * numpy.random.uniform(0, 1) * random.random()


def test_verify_with_random_numbers_of_others():
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    report = verify_patch(Draws(), torch.randn(3, 4))
    assert report, report
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_verify_restores_after_an_error(net):
    wrong = torch.randn(2, 3, 6, 6)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="expected input"):
        verify_patch(net, wrong)
    assert unchanged(before, snapshot(net))


def test_verify_with_dropout_and_integer_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.drop = nn.Dropout(0.5)

        def forward(self, ids, *, scale):
            h = self.drop(self.embedding(ids))
            return {"out": (h @ h.transpose(1, 2) * 0.3).softmax(-1), "ids": ids, "scale": scale}

    report = verify_patch(Model().train(), torch.randint(0, 11, (2, 7)), scale=2)
    assert report, report


def test_verify_where_inputs_can_have_no_gradient(x):
    class Model(nn.Module):
        def forward(self, x):
            x = x[:, None]
            if self.training:
                x.requires_grad = True  # as transformers' Wav2Vec2 does
            return F.relu(x * 2) + x

    model = nn.Sequential(Model(), nn.Softmax(-1))
    report = verify_patch(model.train(), x)
    assert report
    assert [c.name for c in report.comparisons] == ["output"]
    assert {c.name for c in verify_patch(model.eval(), x).comparisons} == {"output", "grad of input 0"}


def test_verify_sees_nan_at_other_places():
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert verification.compare_values("x", nan, nan, nan).ok
    assert not verification.compare_values("x", nan, torch.tensor([1.0, 2.0, float("inf")]), nan).ok
    assert not verification.compare_values("x", nan, torch.tensor([1.0, float("nan"), -float("inf")]), nan).ok


def test_verify_where_gradients_are_nothing_but_roundings():
    """That of a bias before a norm is 0. What comes out is noise, which may be 0 in one of both orders of summation."""
    zero, one = torch.zeros(3), torch.full((3,), 1e-8)
    assert verification.compare_values("grad of bias", zero, one, zero, noise=1.0).ok
    assert not verification.compare_values("grad of bias", zero, one, zero, noise=0.01).ok
    assert not verification.compare_values("grad of bias", zero, torch.full((3,), 1e-6), zero, noise=1.0).ok
    assert not verification.compare_values("output", zero, one, zero).ok
    assert not verification.compare_values("grad of bias", one * 1e3, one, one * 1e3, noise=1.0).ok


class Odd(nn.Module):
    """Changes the list that it is given, has a sparse buffer, and an output whose length depends on values."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()
        self.register_buffer("pairs", torch.eye(3).to_sparse())

    def forward(self, parts):
        for i, part in enumerate(parts):
            parts[i] = self.act(self.fc(part)) + part
        total = sum(parts)
        return total, total[total > total.detach().median()]


def test_verify_with_an_odd_model():
    report = verify_patch(Odd(), [torch.randn(5, 4), torch.randn(5, 4)])
    assert report, report
    names = {comparison.name for comparison in report.comparisons}
    assert names >= {"output 1", "grad of input 0", "grad of input 1", "buffer pairs"}


def test_verify_looks_through_wrappers(net, x):
    assert verify_patch(nn.DataParallel(net), x)
    assert verify_patch(torch.compile(net, backend="eager"), x)
