"""A run of instrumented source, which calls a hook at each step that matters."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx.proxy import TraceError

from fastlayers.patching.capture.lookups import (
    PARTS,
    inherited_from,
    member,
    parts_of,
    same,
    same_inherited,
    same_method,
)
from fastlayers.patching.capture.recording import binder
from fastlayers.patching.capture.syntax import INPLACE, Instrument, compiled_with_hooks, parse, require_a_name
from fastlayers.patching.capture.values import CALL_BACK, MISSING, TRUSTED, containers_in, is_primitive, is_value
from fastlayers.patching.reasons import Reason, Refusal

#: The folders of the code that patches and captures models.
ROOMS = tuple(os.path.join(__file__.rpartition("patching")[0], room, "") for room in ("patching", "graphs"))
_instrumented: WeakKeyDictionary[
    types.FunctionType, dict[tuple[type[Instrument], types.CodeType], tuple[types.CodeType, str]]
] = WeakKeyDictionary()


def unchanged(value: Any) -> Any:
    return value


def outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a forward calls, or look up what it looks up: an error in here is one of the forward."""
    return function(*args, **kwargs)


def is_ours(error: Exception) -> bool:
    """Whether code of ours raised an error in a run, which is no refusal, and not the forward and what it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_code.co_filename.startswith(ROOMS) and frame.f_code is not outside.__code__
    return ours and not isinstance(error, Refusal | NotImplementedError)  # torch.fx asks a tracer for the latter.


@contextmanager
def errors_as_refusals() -> Iterator[None]:
    """Take an error of a forward, which gets proxies or fake tensors where it expects tensors, for a refusal. One of
    ours goes through."""
    try:
        yield
    except Refusal:
        raise
    except TraceError as error:
        raise Refusal(Reason.DATA_DEPENDENT, str(error).splitlines()[0]) from None
    except Exception as error:
        if is_ours(error):
            raise
        raise refusal_of(error) from None


def refusal_of(error: Exception) -> Refusal:
    """What a forward that raised this is refused with.

    The error lets go of its frames. In a generator that handles it one of them refers to it, so all would live until
    the collector runs, and with them their variables: models, and the hooks on saved tensors of a checkpoint.
    """
    error.__traceback__ = None
    return Refusal(Reason.TRACE_FAILED, f"{type(error).__name__}: {error}".splitlines()[0])


R = TypeVar("R", bound="Run")


class Run:
    """One run of instrumented source, which calls the ``hook_`` methods. Subclasses define what each step means.

    Args:
        module: the module whose forward runs.
        tests: gets the tests under which the run would be the same.
        namespace: gets the objects that these name.
        max_depth: functions that call functions are followed this deep.
    """

    #: How the source is instrumented.
    instrument: type[Instrument] = Instrument

    def __init__(self, module: nn.Module, tests: dict[str, None], namespace: dict[str, Any], max_depth: int) -> None:
        self.root = module
        self.tests = tests
        self.bind = binder(namespace, reuse=True)
        self.max_depth = max_depth
        self.depth = 0
        self.frames: list[tuple[types.FunctionType, Any]] = []
        #: The lambdas and nested functions of the source, which are instrumented with it and are called as they are.
        self.lambdas: list[Callable[..., Any]] = []
        #: Objects that the source has made, such as ``nn.ReLU()``.
        self.made: list[Any] = []
        #: What was read and could be changed: how to call it, the value, and the copy that the source got.
        self.lent: list[tuple[str, Any, Any]] = []
        hooks = [name for name in dir(self) if name.startswith("hook_")]
        self.scope: dict[str, Any] = {f"__trace_{name.removeprefix('hook_')}": getattr(self, name) for name in hooks}

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of everything. The run and its hooks refer to each other: its modules and tensors would live on."""
        vars(self).clear()

    def is_made(self, value: Any) -> bool:
        return any(value is made for made in self.made)

    def test(self, *tests: str) -> None:
        self.tests.update(dict.fromkeys(tests))

    def default(self, value: Any, what: str) -> Any:
        """What a function gets for a default."""
        raise NotImplementedError

    def global_variable(self, function: types.FunctionType, name: str) -> Any:
        raise NotImplementedError

    def closure_variable(self, cell: types.CellType, name: str) -> Any:
        raise NotImplementedError

    def parsed(self, function: types.FunctionType) -> ast.FunctionDef:
        return parse(function)

    def code(self, function: types.FunctionType) -> tuple[types.CodeType, str]:
        """The instrumented code of a function, and its name there."""
        known = _instrumented.setdefault(function, {})
        key = self.instrument, function.__code__
        if key not in known:
            known[key] = compiled_with_hooks(self.parsed(function), self.instrument, function.__code__)
        return known[key]

    def follow(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the instrumented source of a Python function."""
        if self.depth >= self.max_depth:
            raise Refusal(Reason.UNKNOWN_CALL, f"{function.__qualname__}: calls are nested too deeply")
        for part, held in zip(PARTS, parts_of(function), strict=True):
            if held is not None:
                self.test(same(f"{self.named(function)}.{part}", held, self.bind))
        bound = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name not in given:
                bound.arguments[name] = self.default(value, f"the default {name} of {function.__qualname__}")
        code, name = self.code(function)
        scope = dict(self.scope)
        exec(code, scope)
        self.depth += 1
        self.frames.append((function, args[0] if args else None))
        try:
            return scope[name](*bound.args, **bound.kwargs)
        finally:
            self.frames.pop()
            self.depth -= 1

    def read(self, expression: str, value: Any) -> Any:
        """Write a read down, and return what the source gets."""
        raise NotImplementedError

    def hook_attribute(self, owner: Any, name: str) -> Any:
        require_a_name(owner, name)
        if isinstance(owner, nn.Module):
            return outside(getattr, owner, name) if self.is_made(owner) else self.module_attribute(owner, name)
        if isinstance(owner, super):
            return self.inherited(owner, name)
        if isinstance(owner, types.ModuleType):
            return self.module_member(owner, name)
        if isinstance(owner, type):
            return self.class_attribute(owner, name)
        if isinstance(owner, types.FunctionType):
            return self.function_attribute(owner, name)
        return self.value_attribute(owner, name)

    def value_attribute(self, owner: Any, name: str) -> Any:
        """An attribute of what is neither a module, a class nor a function."""
        raise NotImplementedError

    def module_member(self, owner: types.ModuleType, name: str) -> Any:
        return self.read(member(owner, name, self.bind), outside(getattr, owner, name))

    def module_attribute(self, module: nn.Module, name: str) -> Any:
        origin = self.module_origin(module)
        static = inspect.getattr_static(type(module), name, MISSING)
        if isinstance(static, property) and static.fget is not None:
            return self.read_property(static, origin, module, name)
        state = vars(module)
        if name in state:
            return self.held(module, origin, name, state[name])
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state[registry]:
                return self.registered(module, origin, registry, name)
        if isinstance(static, types.FunctionType | staticmethod | classmethod):
            self.test(*same_method(origin, type(module), name, self.bind))
            return getattr(module, name)
        if is_primitive(static) or is_value(static):
            return self.read(f"{origin}.{name}", static)
        raise Refusal(Reason.READS_STATE, f"{origin}.{name}")

    def module_origin(self, module: nn.Module) -> str:
        """The expression of a module."""
        raise NotImplementedError

    def held(self, module: nn.Module, origin: str, name: str, value: Any) -> Any:
        """What a module has in its ``__dict__``."""
        return self.read(f"{origin}.{name}", value)

    def registered(self, module: nn.Module, origin: str, registry: str, name: str) -> Any:
        """A parameter, a buffer or a child."""
        raise NotImplementedError

    def inherited(self, parent: Any, name: str) -> Any:
        """What ``super()`` gives: a method, the result of a property, or a value that the class has."""
        cls = inherited_from(parent, name)
        self.test(*same_inherited(parent, name, self.bind))
        static = vars(cls)[name] if cls is not None else None
        if isinstance(static, property):
            return self.follow(static.fget, (parent.__self__,), {})  # type: ignore[arg-type]
        found = outside(getattr, parent, name)
        return found if cls is None or callable(found) else self.read(member(cls, name, self.bind), found)

    def class_attribute(self, owner: type, name: str) -> Any:
        value = outside(getattr, owner, name)
        if getattr(value, "__self__", None) is owner:  # A function is made a method each time.
            self.test(f"{member(owner, name, self.bind)} == {self.bind(value, name)}")
            return value
        if isinstance(value, types.FunctionType) or owner.__module__.split(".")[0] not in ("builtins", *TRUSTED):
            return self.read(member(owner, name, self.bind), value)
        return value

    def function_attribute(self, function: types.FunctionType, name: str) -> Any:
        if name not in function.__dict__:
            return outside(getattr, function, name)
        return self.read(f"{self.named(function)}.{name}", function.__dict__[name])

    def named(self, function: types.FunctionType) -> str:
        return self.bind(function, function.__qualname__)

    def read_property(self, static: property, origin: str, owner: Any, name: str) -> Any:
        self.test(same(f"type({origin}).{name}", static, self.bind))
        return self.follow(static.fget, (owner,), {})  # type: ignore[arg-type]

    def check_lent(self) -> None:
        for what, before, lent in self.lent:
            if before != lent:
                raise Refusal(Reason.CHANGES_STATE, f"changes {what}")

    def check_result(self, result: Any) -> None:
        """A list that was read or given would be another one in each call."""
        if any(value is lent for value in containers_in(result) for _, _, lent in self.lent):
            raise Refusal(Reason.READS_STATE, "it returns a list or a dict that it has not made")

    def hook_name(self, name: str) -> Any:
        function, _ = self.frames[-1]
        if name in function.__code__.co_freevars:
            cells = function.__closure__ or ()
            return self.closure_variable(cells[function.__code__.co_freevars.index(name)], name)
        if name in function.__globals__:
            return self.global_variable(function, name)
        if hasattr(builtins, name):
            self.test(f"{name!r} not in {self.bind(function.__globals__, 'globals')}")
            return getattr(builtins, name)
        raise Refusal(Reason.TRACE_FAILED, f"the name {name} is not defined")

    def hook_module(self, name: str) -> types.ModuleType:
        """A module that the source imports, which must have been imported before."""
        scope = self.frames[-1][0].__globals__
        module = sys.modules.get(importlib.util.resolve_name(name, scope.get("__package__")))
        if module is None:
            raise Refusal(Reason.SYNTAX, f"imports {name}, which is not loaded")
        return module

    def hook_lambda(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A lambda or a nested function. Whoever calls it, its globals are those of the function that it is in."""
        frame = self.frames[-1]

        def inside(*args: Any, **kwargs: Any) -> Any:
            self.frames.append(frame)
            try:
                return outside(function, *args, **kwargs)
            finally:
                self.frames.pop()

        self.lambdas.append(inside)
        return inside

    def hook_call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call. Subclasses say what other calls do."""
        if function is functools.partial:
            return functools.partial(self.hook_call, *args, **kwargs)
        if function is functools.wraps:  # what it adds to a function changes no call
            return functools.partial(self.hook_call, unchanged)
        if function is unchanged:
            return args[0]
        partial = type(function) is functools.partial and function.func == self.hook_call
        if partial or any(function is known for known in self.lambdas):
            return outside(function, *args, **kwargs)
        return self.call(function, *args, **kwargs)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, nn.Module):
            return self.call_module(function, args, kwargs)
        if isinstance(function, types.MethodType):
            return self.method(function, args, kwargs)
        if function is torch.jit.is_scripting:  # A patched model runs as Python.
            return False
        if isinstance(function, types.FunctionType):
            return self.function(function, args, kwargs)
        return self.builtin(function, args, kwargs)

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def method(self, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def partial(self, value: functools.partial[Any], origin: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a functools.partial that was read, such as the tanh-approximated GELU of transformers."""
        function, given, options = (self.read(f"{origin}.{n}", getattr(value, n)) for n in ("func", "args", "keywords"))
        return self.hook_call(function, *given, *args, **{**options, **kwargs})

    def called_back(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a built-in function. A function that it calls is followed as if the source called it."""

        def instead(place: int | str, value: Any) -> Any:
            is_called = place == "key" or (place == 0 and function in CALL_BACK)
            if is_called and isinstance(value, types.FunctionType | types.MethodType | nn.Module):
                return functools.partial(self.hook_call, value)
            if isinstance(value, types.FunctionType | types.MethodType):
                raise Refusal(Reason.UNKNOWN_CALL, f"{function.__name__} with a function")
            return value

        return tuple(map(instead, itertools.count(), args)), {key: instead(key, value) for key, value in kwargs.items()}

    def hook_parent(self) -> Any:
        """What ``super()`` gives in a method."""
        function, owner = self.frames[-1]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "__class__" not in cells:
            raise Refusal(Reason.SYNTAX, "super() outside of a method")
        return super(cells["__class__"].cell_contents, owner)

    def hook_inplace(self, op: str, target: Any, value: Any) -> Any:
        return outside(INPLACE[op], target, value)
