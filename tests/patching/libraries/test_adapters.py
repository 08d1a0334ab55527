"""Adapters: what a model library, or a user's, tells the engine about its modules."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections import Counter

import pytest
import torch
from torch import nn

from fastlayers import patch_model, patch_report, plan_patch, unpatch_model, verify_patch
from fastlayers.patching import Adapter, Reason, register_adapter
from fastlayers.patching.libraries.adapters import RewrittenModel, adapters


@pytest.fixture
def library(monkeypatch):
    """A library that has been imported."""
    made = types.ModuleType("my_library")
    monkeypatch.setitem(sys.modules, "my_library", made)
    return made


def wrap(forward):
    """What a library does to the forward of a layer."""

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    call.wrapped_by_my_library = forward
    return call


class Wrapped(nn.Module):
    @wrap
    def forward(self, x, y):
        return torch.relu(x + y)


def test_a_wrapper_that_an_adapter_knows(library):
    class Mine(Adapter):
        def plain_forward(self, forward):
            return getattr(forward, "wrapped_by_my_library", forward)

    with register_adapter("my_library", Mine):
        net = patch_model(Wrapped())
        assert patch_report(net).counts() == {"add_relu": 1}
        assert verify_patch(net, torch.randn(3, 4), torch.randn(3, 4))
        assert type(unpatch_model(net)) is Wrapped
    assert plan_patch(Wrapped())[""].reason is Reason.DECORATED


class Registering:
    known = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Registering.known += (cls,)


class Registered(Registering, nn.Module):
    def forward(self, x, y):
        return torch.relu(x + y)


def test_a_hook_of_subclasses_that_an_adapter_knows(library):
    class Mine(Adapter):
        def may_subclass(self, cls):
            return cls is Registering

    with pytest.warns(UserWarning, match="nothing in Registered was patched"):
        assert patch_report(patch_model(Registered()))[""].reason is Reason.CLASS_HOOKS
    assert Registering.known == (Registered,)
    with register_adapter("my_library", Mine):
        assert patch_report(patch_model(Registered())).counts() == {"add_relu": 1}


class Model(nn.Module):
    def forward(self, **kwargs):
        return kwargs["x"] + 1


def test_a_whole_model_that_an_adapter_rewrites(library):
    class Mine(Adapter):
        def rewrite_model(self, module, excluded):
            if not isinstance(module, Model):
                return None
            members = {"forward": lambda self, **kwargs: {"loss": kwargs["x"] + 1}}
            return RewrittenModel(members, Counter({"mine": 1}), key=(Model,), omits=frozenset({"logits"}))

    with register_adapter("my_library", Mine):
        net = patch_model(Model())
        assert patch_report(net).counts() == {"mine": 1}
        assert net(x=1) == {"loss": 2}
        assert unpatch_model(net)(x=1) == 2


def scaled(x):
    return x


class Flexible(nn.Module):
    def forward(self, x, **kwargs):
        return scaled(x)


def test_a_method_that_an_adapter_rewrites(library):
    class Mine(Adapter):
        def rewrite_method(self, module, tree, function):
            class Rename(ast.NodeTransformer):
                def visit_Name(self, node):
                    return ast.Name("_doubled", node.ctx) if node.id == "scaled" else node

            Rename().visit(tree)
            return Counter({"doubled": 1}), {"_doubled": lambda x: 2 * x}

    with register_adapter("my_library", Mine):
        net = patch_model(Flexible())
        assert patch_report(net).counts() == {"doubled": 1}
        assert net(torch.ones(1)).item() == 2


def test_an_adapter_is_made_when_its_library_is_there(monkeypatch):
    made = []

    class Mine(Adapter):
        def __init__(self):
            made.append(self)

    with register_adapter("my_library", Mine):
        list(adapters())
        assert not made
        monkeypatch.setitem(sys.modules, "my_library", types.ModuleType("my_library"))
        assert made == [adapter for adapter in (*adapters(), *adapters()) if isinstance(adapter, Mine)][:1]
        assert len(made) == 1
    assert not [adapter for adapter in adapters() if isinstance(adapter, Mine)]


def test_what_is_not_an_adapter():
    with pytest.raises(TypeError, match="expected the name of a library and a callable, got 3"):
        register_adapter(3, Adapter)
    with pytest.raises(TypeError, match="and a callable, got 'my_library' and None"):
        register_adapter("my_library", None)
