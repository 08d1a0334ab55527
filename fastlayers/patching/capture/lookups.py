"""What code looks up by name: functions, methods and modules, which anyone can replace after a forward was read.

Both captures write each lookup down as a test that it gives the same object, :mod:`fastlayers.patching.capture.trace`
for the guard of a rewritten forward and :mod:`fastlayers.patching.capture.reads` for that of a region. A function or a
layer of torch is called as it is, so the lookups of its own code count too: ``nn.LayerNorm.forward`` calls
``F.layer_norm``, which calls ``torch.layer_norm``.

A test is Python source about ``self`` and about names that ``bind`` gives. It costs about 10 ns.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.patching.capture.recording import binder

__all__ = [
    "FUNCTIONS",
    "PARTS",
    "QUERIES",
    "Bind",
    "called_by",
    "computes_as_known",
    "global_variable",
    "inherited_from",
    "inside_function",
    "inside_layer",
    "member",
    "not_shadowed",
    "package",
    "parts_of",
    "same",
    "same_call",
    "same_inherited",
    "same_method",
    "same_operator",
    "same_tensor_method",
]

#: Gives an object a name in generated code, with a hint for that name.
Bind: TypeAlias = Callable[[object, str], str]

#: Types of what is compared by identity.
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type, types.ModuleType)
#: What someone may replace of a function. A notebook that reloads a file changes the code.
PARTS = ("__code__", "__defaults__", "__kwdefaults__")
#: These of a function. A graph asks for them before each replay.
parts_of: Callable[[types.FunctionType], tuple[Any, ...]] = operator.attrgetter(*PARTS)
#: What a call of a module looks up in its class.
CALLS = ("forward", "__call__", "_call_impl")
#: Methods of C. Dynamo of torch 2.11 takes one in a global variable for another than that of a class, but compares
#: those of two classes.
COMPARED_IN_CLASSES = {"__getattribute__": object} | dict.fromkeys(
    ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), torch._C.TensorBase
)
#: Functions of torch that compute nothing.
QUERIES = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic", "handle_torch_function",
     "are_deterministic_algorithms_enabled", "get_default_dtype", "is_grad_enabled", "is_autocast_enabled",
     "is_floating_point"}
)  # fmt: skip
#: The functions and the forwards of torch that rules mean by the names of operations and layers. If one is another
#: function already when a model is patched, the test fails, and the forward runs as it is.
STOCK: dict[int, dict[str, Any]] = {id(vars(module)): dict(vars(module)) for module in (torch, F)}
STOCK_CLASSES: dict[type, dict[str, Any]] = {
    cls: dict(vars(cls))
    for layer in vars(nn).values()
    if isinstance(layer, type) and issubclass(layer, nn.Module)
    for cls in layer.__mro__
} | {cls: dict(vars(cls)) for cls in Tensor.__mro__[:-1]}


def same(expression: str, value: Any, bind: Bind) -> str:
    """The test that an expression gives this object."""
    return f"{expression} is {bind(value, value.__name__ if isinstance(value, types.ModuleType) else expression)}"


def global_variable(scope: dict[str, Any], name: str, bind: Bind) -> str:
    """The expression of a global variable of the module with these variables."""
    module = sys.modules.get(scope.get("__name__", ""))
    if module is not None and vars(module) is scope and name.isidentifier():
        return member(module, name, bind)
    return f"{bind(scope, 'globals')}[{name!r}]"


def same_of_class(owner: type, name: str, value: Any, bind: Bind) -> str:
    """The test that a class has the same method."""
    definer = COMPARED_IN_CLASSES.get(name)
    if definer is not None and getattr(definer, name) is value:
        return f"{member(owner, name, bind)} is {member(definer, name, bind)}"
    return same(member(owner, name, bind), value, bind)


def member(owner: types.ModuleType | type, name: str, bind: Bind) -> str:
    """The expression of an attribute of a module or a class."""
    return f"{bind(owner, owner.__name__)}.{name}"


def same_method(origin: str, kind: type, name: str, bind: Bind) -> Iterator[str]:
    """The tests that a module has the same method, or property: in its class, and none on the instance.

    Args:
        origin: the expression of the module.
        kind: its class.
        name: of the method.
        bind: gives names.
    """
    method, expression = getattr(kind, name), f"type({origin}).{name}"
    if isinstance(method, types.MethodType):  # of the class
        method, expression = method.__func__, f"{expression}.__func__"
    yield same(expression, method, bind)
    yield f"{name!r} not in {origin}.__dict__"


def above(parent: Any) -> tuple[type, ...]:
    """The classes in which ``super()``, which is ``parent``, looks names up."""
    order = parent.__self_class__.__mro__
    return order[order.index(parent.__thisclass__) + 1 :]  # type: ignore[no-any-return]


def inherited_from(parent: Any, name: str) -> type | None:
    """The class in which ``super()`` finds a name."""
    return next((cls for cls in above(parent) if name in vars(cls)), None)


def same_inherited(parent: Any, name: str, bind: Bind) -> Iterator[str]:
    """The tests that ``super()``, which is ``parent``, finds the same method."""
    for cls in above(parent):
        if name in vars(cls):
            yield same(member(cls, name, bind), getattr(cls, name), bind)
            return
        yield f"{name!r} not in {bind(cls, cls.__name__)}.__dict__"


def same_tensor_method(name: str, bind: Bind) -> Iterator[str]:
    """The test that tensors have the same method."""
    if callable(method := method_of(Tensor, name)):
        yield same_of_class(Tensor, name, method, bind)


def same_operator(name: str, bind: Bind) -> Iterator[str]:
    """The tests that an operator of Python, such as ``mul`` or ``imul``, calls the same methods of tensors."""
    for prefix in ("", "r", "i"):
        yield from same_tensor_method(f"__{prefix}{name.strip('_')}__", bind)


def not_shadowed(origin: str, kind: type[nn.Module], name: str, bind: Bind) -> Iterator[str]:
    """The tests that a name gives what the module has registered: neither the module nor a class of it has such an
    attribute, or another way to look attributes up."""
    yield f"{name!r} not in {origin}.__dict__"
    for cls in kind.__mro__[:-1]:
        yield f"{name!r} not in {bind(cls, cls.__name__)}.__dict__"
    for lookup in ("__getattribute__", "__getattr__"):
        yield same_of_class(kind, lookup, getattr(kind, lookup), bind)


def inside_function(function: Any, bind: Bind) -> Iterator[str]:
    """The tests for what a function calls that is known to compute one operation."""
    if package(function) == "_operator":
        yield from same_operator(function.__name__, bind)
    if isinstance(function, types.FunctionType) and package(function) != "fastlayers":
        for scope, name, value in called_by(function, None):
            yield same_named(scope, name, value, bind)


def same_named(scope: Any, name: str, value: Any, bind: Bind) -> str:
    """The test that a name stands for the same function in a module, or the same method of tensors."""
    if scope is Tensor:
        return same_of_class(Tensor, name, value, bind)
    return same(global_variable(scope, name, bind), value, bind)


def same_call(layer: type[nn.Module], bind: Bind) -> Iterator[str]:
    """The tests that a call of a class runs the same forward."""
    for name in CALLS:
        yield same(member(layer, name, bind), method_of(layer, name), bind)


def inside_layer(layer: type[nn.Module], origin: str, bind: Bind) -> Iterator[str]:
    """The tests that a layer computes what its class is known to compute: for its forward, and for what that calls.

    Args:
        layer: the class, of torch or with a handwritten forward.
        origin: the expression of the layer.
        bind: gives names.
    """
    yield from same_call(layer, bind)
    stock = layer in STOCK_CLASSES
    forward = method_of(layer, "forward")
    if not isinstance(forward, types.FunctionType):
        return
    for scope, name, value in called_by(forward, layer):
        if scope is not None:
            yield same_named(scope, name, value, bind)
        elif stock:
            yield same(member(layer, name, bind), value, bind)
        else:
            yield from same_method(origin, layer, name, bind)


def computes_as_known(layer: type[nn.Module]) -> Callable[[nn.Module], bool]:
    """The tests of :func:`inside_layer` as a function."""
    scope: dict[str, Any] = {}
    tests = " and ".join(inside_layer(layer, "layer", binder(scope)))
    exec(f"def holds(layer):\n    return {tests}\n", scope)
    return scope["holds"]  # type: ignore[no-any-return]


def method_of(kind: type, name: str) -> Any:
    """A method of a class, that of torch if torch has the class that defines it; None if there is no such method."""
    for cls in kind.__mro__:
        members = STOCK_CLASSES.get(cls, vars(cls))
        if name in members:
            return members[name]
    return None


def looked_up(scope: Any, name: str, kind: Any) -> Any:
    """What a name stands for in a scope, or in a class: in ``kind`` with None for a scope."""
    if scope is None or scope is Tensor:
        return method_of(scope or kind, name)
    return STOCK.get(id(scope), scope).get(name)


def called_by(function: types.FunctionType, kind: Any) -> tuple[tuple[Any, str, Any], ...]:
    """The functions that a function looks up, with their names and the scopes that have them.

    Those of ``torch`` and ``torch.nn.functional``, those of the user, and methods: those of ``kind`` with None for a
    scope, those of tensors with Tensor.
    """
    found = read_code(function, kind)
    if any(looked_up(scope, name, kind) is not value for scope, name, value in found):  # replaced, then or since
        read_code.cache_clear()
        found = read_code(function, kind)
    return found


@functools.lru_cache(maxsize=512)
def read_code(function: types.FunctionType, kind: Any) -> tuple[tuple[Any, str, Any], ...]:
    """:func:`called_by`, as it was when the code was read."""
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    pending, seen = [function], {function}
    while pending:
        caller = pending.pop()
        for scope, name, value in named_by(caller, kind):
            if value is caller:  # for tensor subclasses
                continue
            public = id(scope) in STOCK and not name.startswith("_") and name not in QUERIES
            if scope is None or scope is Tensor or public or scope["__name__"].partition(".")[0] != "torch":
                found[id(scope), name] = scope, name, value
            follows = scope is None or package(value) == "torch"
            if isinstance(value, types.FunctionType) and follows and value not in seen:
                seen.add(value)
                pending.append(value)
    return tuple(found.values())


def named_by(function: types.FunctionType, kind: Any) -> Iterator[tuple[Any, str, Any]]:
    """The functions that the code of one function names: globals, members of modules of torch, methods of ``self`` and
    of tensors."""
    owner: Any = None
    itself = next(iter(inspect.signature(function).parameters), None) if kind is not None else None
    for instruction in dis.get_instructions(function):
        opname, names = instruction.opname, instruction.argval
        name = names[-1] if isinstance(names, tuple) and names else names
        if opname in ("LOAD_ATTR", "LOAD_METHOD") and owner is itself is not None:
            scope, value = None, method_of(kind, name)
            if getattr(value, "__module__", None) == nn.Module.__module__:
                value = None
        elif opname == "LOAD_GLOBAL" or (opname in ("LOAD_ATTR", "LOAD_METHOD") and owner is not None):
            scope = function.__globals__ if opname == "LOAD_GLOBAL" else vars(owner)
            value = looked_up(scope, name, kind)
        elif opname in ("LOAD_ATTR", "LOAD_METHOD"):  # of what may be a tensor
            scope, value = Tensor, method_of(Tensor, name)
        else:
            owner = name if opname.startswith("LOAD_FAST") and name == itself else None
            continue
        owner = value if isinstance(value, types.ModuleType) and package(value) == "torch" else None
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
            yield scope, name, value


def package(value: Any) -> str:
    """The name of the package of a function or a module."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return (name or "").partition(".")[0]
