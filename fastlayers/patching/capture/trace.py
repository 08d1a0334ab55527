"""The trace: turns a forward into a small graph, without freezing what the forward decides on every call.

``torch.fx`` runs a forward once with proxies and records what happens to them. It silently freezes everything else: an
attribute, a default, the training flag, a random number, a context manager. The trace runs a rewritten source instead,
in which every attribute read, call, identity test and global goes through a method of :class:`Trace`. That method does
one of three things. It *records* the step as a node of the graph, so that the step happens on every call. Or it lets
Python do the step, and adds a *guard*: an expression that must be true for the recording to hold. Or it *refuses* the
module with a reason. No code of the user that could have a side effect runs.

Children are leaves: a call of one is one node. The trace follows methods and plain functions, and records a function
that it cannot follow as one opaque call.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import keyword
import math
import operator
import sys
import types
from collections.abc import Iterator, MappingView
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy, TraceError

from fastlayers.patching.capture.lookups import (
    FUNCTIONS,
    global_variable,
    member,
    not_shadowed,
    package,
    same,
    same_call,
)
from fastlayers.patching.capture.proxies import IS_TENSOR, Mapped, Opaque, Recorder
from fastlayers.patching.capture.recording import Given, Recording, Segment, equality, module_expression, note_attribute
from fastlayers.patching.capture.run import Run, errors_as_refusals, outside
from fastlayers.patching.capture.syntax import INPLACE, statement_at_fault
from fastlayers.patching.capture.values import (
    CALL_BACK,
    CONTAINERS,
    MEMBERS,
    PURE_BUILTINS,
    STRUCTURAL,
    builtin_module,
    containers_in,
    from_torch,
    is_primitive,
    is_stateless_layer,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.runtime import python
from fastlayers.patching.runtime.checks import original_class

__all__ = [
    "record",
    "record_child",
    "record_segment",
]

#: What ends a string in source, or its line, or changes what follows.
QUOTING = "\"'\\\n\r{}\0"
#: The prefix of the names of a child's parameters while it is recorded.
ARGUMENT = "__argument_"


class Trace(Run):
    """One run of a module's forward with proxies."""

    def __init__(self, module: nn.Module, training: bool | None) -> None:
        self.graph = fx.Graph()
        self.recorder = Recorder(self.graph)
        self.recording = Recording(self.graph)
        super().__init__(module, self.recording.guards, self.recording.namespace, max_depth=16)
        self.subject = module
        self.training = training
        self.closed: frozenset[Any] = frozenset()
        self.others: frozenset[str] = frozenset()
        self.statement = 0
        self.paths: dict[int, str] = {}
        for path, child in module.named_modules():
            self.paths.setdefault(id(child), path)

    # -- what the recording consists of ----------------------------------------------------------------------

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        # torch.fx writes a path into source as it is.
        if kind in ("call_module", "get_attr") and (
            not set(QUOTING).isdisjoint(target) or any(map(keyword.iskeyword, target.split(".")))
        ):
            raise Refusal(Reason.READS_STATE, f"a child or a tensor called {target!r}")
        try:
            return self.recorder.create_proxy(kind, target, args, kwargs)
        except NotImplementedError as error:
            name = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
            raise Refusal(Reason.UNKNOWN_CALL, f"{name}: {error}") from None

    def module_origin(self, module: nn.Module) -> str:
        path = self.paths.get(id(module))
        if path is None:
            raise Refusal(Reason.READS_STATE, f"uses a {type(module).__name__} that is not one of its submodules")
        return module_expression(path)

    def constant(self, value: Any, origin: str | None, what: str) -> Any:
        """A Python value: guarded if it can be compared, passed on if it cannot change meaning, refused otherwise."""
        if isinstance(value, Proxy | nn.Module):
            return value
        if isinstance(value, Tensor):
            if origin is None or not origin.startswith("self"):
                raise Refusal(Reason.READS_STATE, f"{what} is a tensor outside of the module")
            raise Refusal(Reason.READS_STATE, f"{what} is a tensor and neither a parameter nor a buffer")
        if is_primitive(value):
            if origin is not None:
                self.test(equality(origin, value, self.bind))
            if isinstance(value, list | dict):
                before, value = value, copy.deepcopy(value)
                self.lent.append((what, before, value))
            return value
        if isinstance(value, FUNCTIONS):
            if origin is not None:
                self.test(same(origin, value, self.bind))
            return value
        if origin is None or isinstance(value, list | tuple | dict | set | frozenset):
            raise Refusal(Reason.READS_STATE, f"{what} is a {type(value).__name__}")
        return Opaque(value, origin)

    def read(self, expression: str, value: Any) -> Any:
        return self.constant(value, expression, expression)

    # -- hooks: names, attributes, containers ------------------------------------------------------------------

    def closure_variable(self, cell: types.CellType, name: str) -> Any:
        value = cell.cell_contents
        if is_primitive(value):
            raise Refusal(Reason.READS_STATE, f"the closure variable {name}")
        origin = f"{self.bind(cell, 'cell')}.cell_contents" if isinstance(value, FUNCTIONS) else None
        return self.constant(value, origin, name)

    def global_variable(self, function: types.FunctionType, name: str) -> Any:
        origin = global_variable(function.__globals__, name, self.bind)
        return self.constant(function.__globals__[name], origin, f"the global {name}")

    def module_member(self, owner: types.ModuleType, name: str) -> Any:
        value = outside(getattr, owner, name)
        fixed = isinstance(value, types.ModuleType | type) and package(owner) in ("torch", "math")
        fixed |= owner in (torch, math) and is_primitive(value)  # Those of torch.backends are switches.
        return self.constant(value, None if fixed else member(owner, name, self.bind), f"{owner.__name__}.{name}")

    def value_attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Opaque):
            return self.object_attribute(owner, name)
        collections = Proxy | list | tuple | dict | set | torch.finfo | torch.iinfo
        if isinstance(owner, collections) or is_primitive(owner):
            return outside(getattr, owner, name)
        raise Refusal(Reason.READS_STATE, f"{type(owner).__name__}.{name}")

    def object_attribute(self, owner: Opaque, name: str) -> Any:
        """An attribute of an object that the module has, such as ``self.config.hidden_size``."""
        what = f"{owner.origin}.{name}"
        static = inspect.getattr_static(type(owner.value), name, None)
        if static is not None and not is_primitive(static):
            raise Refusal(Reason.READS_STATE, what)
        try:
            value = object.__getattribute__(owner.value, name)
        except AttributeError:
            raise Refusal(Reason.READS_STATE, what) from None
        return self.constant(value, what, what)

    def module_attribute(self, module: nn.Module, name: str) -> Any:
        if name != "training" or module is not self.subject:
            return super().module_attribute(module, name)
        return self.tensor(module, name) if self.training is None else self.training

    def held(self, module: nn.Module, origin: str, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(module, name)
        note_attribute(name)
        return super().held(module, origin, name, value)

    def registered(self, module: nn.Module, origin: str, registry: str, name: str) -> Any:
        value = vars(module)[registry][name]
        if registry == "_modules":
            if value is None:
                self.test(f"{origin}._modules[{name!r}] is None")
            self.test(*not_shadowed(origin, original_class(module), name, self.bind))
            return value
        if value is None:
            self.test(f"{origin}.{name} is None")
            return None
        return self.tensor(module, name)

    def tensor(self, module: nn.Module, name: str) -> Proxy:
        """A tensor, or the training flag, which is read on every call."""
        self.module_origin(module)
        path = self.paths[id(module)]
        return self.record("get_attr", f"{path}.{name}" if path else name, (), {})

    def hook_container(self, value: Any) -> Any:
        """A value that is iterated or indexed. A container of modules must keep its length."""
        collections = Proxy | list | tuple | dict | set | range | Iterator | MappingView
        if isinstance(value, collections) or is_primitive(value):
            return value
        if isinstance(value, CONTAINERS):
            if isinstance(value, nn.ParameterList | nn.ParameterDict):
                raise Refusal(Reason.READS_STATE, f"goes through a {type(value).__name__}")
            self.keep_children(value)
            return value
        if isinstance(value, Mapped):
            raise Refusal(Reason.DATA_DEPENDENT, "loops over a traced value")
        raise Refusal(Reason.READS_STATE, f"goes through a {type(value).__name__}")

    def keep_children(self, container: nn.Module) -> None:
        """A container must have the same names, and so must lists in it, which a loop may take apart at once."""
        self.test(f"tuple({self.module_origin(container)}._modules) == {tuple(container._modules)!r}")
        for child in container._modules.values():
            if isinstance(child, nn.ModuleList):
                self.keep_children(child)

    def hook_unpack(self, value: Any, count: int) -> Any:
        if isinstance(value, Mapped):
            return tuple(map(value.function, *(self.hook_unpack(arg, count) for arg in value.args)))
        if not isinstance(value, Proxy):
            return value
        items: Any = self.record("call_function", python.unpack, (value, count), {})
        return tuple(items[i] for i in range(count))

    # -- hooks: tests ------------------------------------------------------------------------------------------

    def hook_test(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            raise Refusal(Reason.DATA_DEPENDENT, f"tests a computed value{statement_at_fault()}")
        if isinstance(value, Opaque):
            raise Refusal(Reason.READS_STATE, f"tests {value.origin}")
        if isinstance(value, CONTAINERS):
            self.hook_container(value)
        elif isinstance(value, nn.Module):
            self.hook_same(value, None)
        return value

    def hook_string(self, *parts: Any) -> Any:
        """An f-string. It is recorded if it formats a traced value, as the message of an assertion may."""
        values = [part[0] for part in parts if isinstance(part, tuple)]
        if any(isinstance(value, nn.Module | Opaque) for value in values):
            raise Refusal(Reason.READS_STATE, "formats an object")
        if any(isinstance(value, Proxy) for value in values):
            return self.record("call_function", python.format_string, parts, {})
        return python.format_string(*parts)

    def require_tensor(self, proxy: Proxy) -> None:
        if proxy.node.op == "get_attr" and proxy.node.target != "training":  # a parameter or buffer
            self.hook_same(proxy, None)
            return
        if proxy.node.op != "placeholder":
            raise Refusal(Reason.TYPE_TEST, f"of {proxy.node}")
        proxy.node.meta[IS_TENSOR] = True
        self.test(f"isinstance({proxy.node.target}, {self.bind(Tensor, 'Tensor')})")

    def hook_same(self, left: Any, right: Any) -> bool:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Opaque):
                raise Refusal(Reason.READS_STATE, f"asks what {one.origin} is")
            if isinstance(one, nn.Module) and other is None and one is not self.root:
                self.test(f"{self.module_origin(one)} is not None")
                return False
            if not isinstance(one, Proxy):
                continue
            if isinstance(other, Proxy) or not (other is None or isinstance(other, bool)):
                raise Refusal(Reason.IDENTITY_TEST, f"of {one.node}")
            if one.node.op == "get_attr" and one.node.target != "training":
                path = one.node.target.split(".")  # type: ignore[union-attr]
                owner = self.module_origin(self.root.get_submodule(".".join(path[:-1])))
                self.test(f"{owner}.{path[-1]} is not None")
            elif one.node.op == "placeholder":
                self.require_tensor(one)
            elif not (one.node.op == "call_function" and getattr(one.node.target, "__module__", "") == "_operator"):
                raise Refusal(Reason.IDENTITY_TEST, f"of {one.node}")
            return False
        return left is right

    def hook_contains(self, item: Any, container: Any) -> bool:
        if isinstance(item, Proxy | nn.Module) or isinstance(container, Proxy | nn.Module):
            raise Refusal(Reason.DATA_DEPENDENT, "tests membership of a traced value")
        return outside(operator.contains, container, item)

    def hook_inplace(self, op: str, target: Any, value: Any) -> Any:
        if isinstance(target, Proxy):
            return self.record("call_function", INPLACE[op], (target, value), {})
        return super().hook_inplace(op, target, value)

    # -- hooks: calls --------------------------------------------------------------------------------------------

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, Proxy):
            return outside(function, *args, **kwargs)
        if isinstance(function, Opaque) and type(function.value) is functools.partial:
            self.test(f"type({function.origin}) is {self.bind(functools.partial, 'partial')}")
            return self.partial(function.value, function.origin, args, kwargs)
        return super().call(function, *args, **kwargs)

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_made(module):
            self.test(*same_call(type(module), self.bind))
            return self.follow(type(module).forward, (module, *args), kwargs)  # type: ignore[arg-type]
        if module is self.root or isinstance(module, torch.jit.ScriptModule):
            raise Refusal(Reason.UNKNOWN_CALL, type(module).__name__)
        self.module_origin(module)
        return self.record("call_module", self.paths[id(module)], args, kwargs)

    def method(self, function: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = function.__self__
        if isinstance(owner, nn.Module) and function.__func__ in MEMBERS:
            self.keep_children(owner)
            return outside(function, *args, **kwargs)
        if not isinstance(owner, nn.Module | type) or not isinstance(function.__func__, types.FunctionType):
            raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
        if from_torch(function.__func__) and owner is not self.root:
            raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
        return self.follow(function.__func__, (owner, *args), kwargs)

    def function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if from_torch(function):
            return self.record("call_function", function, args, kwargs)
        if function in self.closed:
            raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
        # A recorded call gets a copy of a list, so a function that might fill the caller's list must be followed.
        recordable = not any(isinstance(value, list | dict | set) for value in (*args, *kwargs.values()))
        # An attribute of a traced value gets its node at its first use. That node must not be erased below.
        fx.node.map_aggregate((args, kwargs), lambda value: value.node if isinstance(value, Proxy) else value)
        last = next(iter(reversed(self.graph.nodes)), None)
        try:
            if (function.__module__ or "").split(".")[0] in sys.stdlib_module_names:
                raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
            return self.follow(function, args, kwargs)
        except (Refusal, TraceError):
            if not recordable:
                raise
            while self.graph.nodes and (node := next(iter(reversed(self.graph.nodes)))) is not last:
                self.graph.erase_node(node)
            return self.record("call_function", function, args, kwargs)

    def default(self, value: Any, what: str) -> Any:
        if isinstance(value, tuple | dict) and not value:
            return value
        lists = any(True for _ in containers_in(value))  # which may be changed in place
        return self.constant(value, self.bind(value, "default") if lists else None, what)

    def builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__qualname__", repr(function))
        if function is isinstance:
            return self.is_instance(*args)
        if function is getattr and isinstance(args[1], str):
            if isinstance(args[0], Proxy) and len(args) > 2:
                return self.record("call_function", function, args, kwargs)
            return self.hook_attribute(args[0], args[1])
        if function is hasattr and isinstance(args[0], nn.Module) and isinstance(args[1], str):
            return self.has_attribute(*args)
        arguments = [*args, *kwargs.values()]
        traced = any(isinstance(value, Proxy) for value in arguments)
        if function in STRUCTURAL or (function in PURE_BUILTINS and not traced):
            for value in arguments[1:] if function in CALL_BACK else arguments:
                if isinstance(value, nn.Module | Opaque):
                    self.hook_container(value)
            if function is range and traced:
                raise Refusal(Reason.DATA_DEPENDENT, "loops over a traced range")
            args, kwargs = self.called_back(function, args, kwargs)
            if function is map and traced:
                return Mapped(args[0], args[1:])
            return outside(function, *args, **kwargs)
        if isinstance(function, types.BuiltinMethodType | types.MethodWrapperType):
            owner = function.__self__
            if (is_primitive(owner) and owner is not None) or isinstance(owner, list | tuple | dict | set):
                return outside(function, *args, **kwargs)
        if not traced and builtin_module(function) == "math":
            return outside(function, *args, **kwargs)
        recordable = isinstance(function, types.BuiltinFunctionType) or function in PURE_BUILTINS
        if recordable and (
            function in PURE_BUILTINS or function is print or builtin_module(function) in ("math", "torch")
        ):
            return self.record("call_function", function, args, kwargs)
        if builtin_module(function) == "_operator" and not any(
            isinstance(value, list | dict | set) for value in arguments
        ):
            return self.record("call_function", function, args, kwargs)
        if function in (torch.finfo, torch.iinfo, torch.Size, torch.device):
            return (
                self.record("call_function", function, args, kwargs) if traced else outside(function, *args, **kwargs)
            )
        if is_stateless_layer(function) and all(map(is_primitive, arguments)):
            self.made.append(outside(function, *args, **kwargs))
            return self.made[-1]
        raise Refusal(Reason.UNKNOWN_CALL, name)

    def has_attribute(self, module: nn.Module, name: str) -> bool:
        if isinstance(inspect.getattr_static(type(module), name, None), property):
            raise Refusal(Reason.READS_STATE, f"asks for the property {name}")
        there = hasattr(module, name)
        self.test(f"hasattr({self.module_origin(module)}, {name!r}) is {there}")
        return there

    def is_instance(self, value: Any, classes: Any) -> bool:
        if isinstance(value, Proxy):
            options = classes if isinstance(classes, tuple) else (classes,)
            if not all(option in (Tensor, tuple, list, dict, int, float, bool, str) for option in options):
                raise Refusal(Reason.TYPE_TEST, f"of {value.node}")
            name, asks = str(value.node.target), value.node.op == "placeholder" and options == (Tensor,)
            if asks and name in self.others:
                self.test(f"not isinstance({name}, {self.bind(Tensor, 'Tensor')})")
                return False
            self.require_tensor(value)
            if asks:
                self.recording.asked.add(name)
            return Tensor in options
        if isinstance(value, nn.Module) and value is not self.root:
            result = isinstance(value, classes)
            self.test(f"isinstance({self.module_origin(value)}, {self.bind(classes, 'classes')}) is {result}")
            return result
        if isinstance(value, Opaque):
            raise Refusal(Reason.READS_STATE, f"asks for the type of {value.origin}")
        return isinstance(value, classes)

    # -- the whole -------------------------------------------------------------------------------------------------

    def run_child(self, child: nn.Module, arguments: int | fx.Node) -> Recording:
        """Record the forward of a child. Its guards are expressions about the module."""
        self.subject = child
        args: Any = tuple(map(self.given, range(arguments))) if isinstance(arguments, int) else arguments.args
        kwargs: Any = {} if isinstance(arguments, int) else arguments.kwargs
        numbers = itertools.count()

        def taken(value: Any) -> Any:
            return self.given(next(numbers)) if isinstance(value, fx.Node) else value

        args, kwargs = fx.node.map_aggregate((args, kwargs), taken)
        result = self.follow(original_class(child).forward, (child, *args), dict(kwargs))  # type: ignore[arg-type]
        self.recorder.create_node("output", "output", (self.recorder.create_arg(result),), {})
        if any(before != lent for _, before, lent in self.lent) or any(
            ARGUMENT in guard for guard in self.recording.guards
        ):
            raise Refusal(Reason.READS_STATE, self.paths[id(child)])
        return self.recording

    def given(self, number: int) -> Proxy:
        return self.recorder.create_proxy("placeholder", f"{ARGUMENT}{number}", (), {})

    def run(self, forward: types.FunctionType, given: Given) -> Recording:
        """Record ``forward`` with the parameters that are given, and those without a default, as proxies."""
        self.others = given.others
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        itself, *parameters = inspect.signature(forward).parameters.values()
        if itself.kind is not itself.POSITIONAL_OR_KEYWORD and itself.kind is not itself.POSITIONAL_ONLY:
            raise Refusal(Reason.SIGNATURE, str(itself))
        for parameter in parameters:
            if parameter.name == "self":
                raise Refusal(Reason.SIGNATURE, "a parameter called self that is not the first")
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                if not given.bare:
                    raise Refusal(Reason.SIGNATURE, str(parameter))
                self.test(f"not {parameter.name}")
                continue
            if parameter.default is parameter.empty or parameter.name in given.tensors:
                value: Any = self.recorder.create_proxy("placeholder", parameter.name, (), {})
                if parameter.name in given.tensors:
                    self.require_tensor(value)
            else:
                value = parameter.default
                if not is_primitive(value):
                    raise Refusal(Reason.SIGNATURE, f"the default of {parameter.name}")
                self.test(equality(parameter.name, value, self.bind))
            if parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = value
            else:
                arguments.append(value)
        result = self.follow(forward, (self.root, *arguments), keywords)
        self.check_result(result)
        self.recorder.create_node("output", "output", (self.recorder.create_arg(result),), {})
        self.check_lent()
        return self.recording

    # -- a part of a forward -----------------------------------------------------------------------------------------

    def hook_mark(self, statement: int) -> None:
        self.statement = statement

    def run_segment(self, segment: Segment) -> tuple[str, ...]:
        """Record some statements of a function. Returns the variables that they set, in the order of the results."""
        given: dict[str, Any] = {}
        for name in segment.reads:
            if name == segment.itself:
                given[name] = self.root
            elif name in segment.absent:
                given[name] = None
                self.test(f"{name} is None")
            else:
                given[name] = self.recorder.create_proxy("placeholder", name, (), {})
                if name in segment.tensors:
                    self.require_tensor(given[name])
        marks = [f"    __trace_mark({i})" for i in range(len(segment.statements))]
        source = "\n".join([f"def segment({', '.join(segment.reads)}):", *marks, "    return locals()"])
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        *marked, end = tree.body
        tree.body = [*itertools.chain.from_iterable(zip(marked, segment.statements, strict=True)), end]
        self.statement = 0
        self.frames.append((segment.function, self.root if segment.itself else None))
        scope = dict(self.scope)
        exec(compile(ast.Module([tree], []), f"<traced {segment.function.__qualname__}>", "exec"), scope)
        found = scope["segment"](**given)
        self.frames.pop()
        self.statement = len(segment.statements)  # A failure from here on is due to the segment as a whole.
        written = tuple(name for name in segment.writes if name in found)
        self.check_result([found[name] for name in written])
        self.recorder.create_node("output", "output", (self.recorder.create_arg(tuple(found[n] for n in written)),), {})
        self.check_lent()
        return written


def record_segment(module: nn.Module, segment: Segment) -> tuple[Recording, tuple[str, ...]] | int:
    """Trace some statements of a function: the recording, and the variables that it returns.

    If they cannot be recorded, the number of the statement at fault; their count if no single one is at fault.
    """
    with Trace(module, None) as trace:
        trace.closed = segment.closed
        try:
            with errors_as_refusals():
                written = trace.run_segment(segment)
        except Refusal:
            return trace.statement
        return trace.recording, written


def record_child(
    module: nn.Module, child: nn.Module, arguments: int | fx.Node, training: bool | None = None
) -> Recording | None:
    """Trace the forward of a child in a mode, or in any; None if that is impossible.

    The recording serves to look at, not to run: its paths and guards refer to ``module``.

    Args:
        arguments: the number of positional arguments; or the node that calls the child. Each node among its arguments
            becomes a placeholder, in order, and the other arguments are known.
    """
    forward = original_class(child).forward
    if not isinstance(forward, types.FunctionType) or from_torch(forward) or "forward" in child.__dict__:
        return None
    try:
        with errors_as_refusals(), Trace(module, training) as trace:
            return trace.run_child(child, arguments)
    except Refusal:  # The child stays a leaf.
        return None


def record(module: nn.Module, forward: Any, given: Given, training: bool | None) -> Recording:
    """Trace the forward of a module with its children as leaves.

    Args:
        module: it is not changed, and none of its code with a side effect runs.
        forward: the forward of its original class.
        given: what a call gives.
        training: the value of ``self.training``. With None it is read on every call: enough for a forward that only
            passes it on, to ``F.dropout`` for example. A forward that branches on it is refused then.

    Raises:
        Refusal: the forward cannot be recorded; it has the reason.
    """
    if not isinstance(forward, types.FunctionType):
        raise Refusal(Reason.DECORATED, f"{type(module).__name__}.forward is a {type(forward).__name__}")
    with errors_as_refusals(), Trace(module, training) as trace:
        return trace.run(forward, given)
