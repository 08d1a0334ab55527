"""What a forward computes with: values that can be compared, and functions and classes without side effects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast_decorator
from torch.nn.attention import SDPBackend
from torch.utils._contextlib import context_decorator
from torch.utils._pytree import tree_leaves

#: Types whose values a guard can compare with what they were while tracing.
PRIMITIVES = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout, enum.Enum,
)  # fmt: skip
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
#: Methods that list a module's children.
MEMBERS = frozenset(
    {nn.Module.children, nn.Module.named_children, nn.ModuleDict.keys, nn.ModuleDict.values, nn.ModuleDict.items}
)
#: Built-ins without side effects. Python runs them while tracing; they are recorded if an argument is a traced value.
PURE_BUILTINS = frozenset(
    {abs, all, any, divmod, len, max, min, pow, round, sorted, sum, math.prod, float, int, bool, str, complex}
)
#: Built-ins that only arrange their arguments. Python runs them even on traced values.
STRUCTURAL = frozenset(
    {list, tuple, dict, set, zip, enumerate, reversed, range, slice, iter, next, map, filter, functools.reduce}
)
#: Built-in functions that call their first argument.
CALL_BACK = frozenset({map, filter, functools.reduce})
#: The files of torch.nn.modules whose layers have no parameters, but for PReLU and MultiheadAttention.
STATELESS = frozenset({"activation", "dropout", "flatten", "padding", "pixelshuffle", "pooling", "upsampling"})
#: Packages whose functions are called as they are: what they do follows from their arguments and torch's global state.
TRUSTED = frozenset({"torch", "fastlayers", "einops", "math", "_operator"})
#: Classes whose objects are made as they are.
TRUSTED_CLASSES = (torch.Size, torch.device, torch.finfo, torch.iinfo, torch.autocast, torch.no_grad, torch.enable_grad)
#: The code of the functions that context managers of torch return as decorators.
CONTEXT_DECORATORS = frozenset(
    code
    for maker in (autocast_decorator, context_decorator)
    for code in maker.__code__.co_consts
    if isinstance(code, types.CodeType) and "func" in code.co_freevars
)
#: What a class does not have.
MISSING = object()
#: Packages with the classes of context managers that change nothing but how torch computes.
OF_TORCH = ("torch.autograd.", "torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.", "torch.nn.attention")


def is_primitive(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(is_primitive(item) for item in value)
    if isinstance(value, dict):
        return all(is_primitive(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, PRIMITIVES)


def is_value(value: Any) -> bool:
    """Whether a value can be compared, and is all that matters of itself."""
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__"):  # a number of numpy's; not an array
        return True
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_value, value))
    if type(value) is range:
        return True
    return value is None or isinstance(
        value, (*PRIMITIVES, SDPBackend, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    )


def are_values(value: Any) -> bool:
    return is_value(tuple(value) if type(value) is list else value)


def is_stateless_layer(cls: Any) -> bool:
    """Whether a class is a layer of torch without parameters, such as ``nn.ReLU`` or ``nn.ZeroPad2d``, which a forward
    may make each time."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn.modules.")):
        return False
    stateless = cls is nn.Identity or cls.__module__.rpartition(".")[2] in STATELESS
    return stateless and cls not in (nn.PReLU, nn.MultiheadAttention)


def from_numpy(function: Any) -> bool:
    """Whether a function is one of numpy's, such as ``np.prod``: of numbers it gives the same each time."""
    return type(function).__module__.split(".")[0] == "numpy" and callable(function)


def from_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


def builtin_module(function: Any) -> str:
    """The package of a C function. Functions of torch have no ``__module__``, or that of a namespace class."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__.split(".")[0]
    name = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    return "torch" if getattr(torch, function.__name__, None) is function else name.split(".")[0]


def in_context(function: types.FunctionType) -> tuple[Callable[[], AbstractContextManager[Any]], Any] | None:
    """The context manager and the function of what ``@torch.autocast(...)`` or ``@torch.no_grad()`` returned."""
    if function.__code__ not in CONTEXT_DECORATORS:
        return None
    held = inspect.getclosurevars(function).nonlocals
    if "autocast_instance" in held:
        return (lambda: held["autocast_instance"]), held["func"]
    known = isinstance(getattr(held["ctx_factory"], "__self__", None), TRUSTED_CLASSES)
    return (held["ctx_factory"], held["func"]) if known else None


def is_apply(function: Any) -> bool:
    """Whether a function is ``apply`` of a ``torch.autograd.Function``, as torch has it."""
    owner, torchs = getattr(function, "__self__", None), torch.autograd.Function.apply
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return False
    if isinstance(torchs, types.MethodType):
        return getattr(function, "__func__", None) is torchs.__func__
    return isinstance(function, types.BuiltinFunctionType) and function.__name__ == torchs.__name__


def only_holds(cls: Any) -> bool:
    """Whether a class is a dataclass whose objects only hold what they are made of."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return False
    written = "__init__" in vars(cls) and vars(cls)["__init__"].__code__.co_filename == "<string>"
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__new__", "__setattr__", "__getattribute__"))
    return written and plain and type(cls) is type and not hasattr(cls, "__post_init__")


def is_named_tuple(cls: Any) -> bool:
    """Whether a class is a named tuple that is made as ``collections.namedtuple`` has written it."""
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return False
    return cls.__init__ is object.__init__ and cls.__new__.__module__ == f"namedtuple_{cls.__name__}"


def objects_in(value: Any) -> Iterator[Any]:
    """The objects of a nested result that are neither tensors nor values, nor containers that torch takes apart."""
    if isinstance(value, Tensor) or is_value(value):
        return
    leaves = tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        yield value
        leaves = list(getattr(value, "__dict__", {}).values())
    for leaf in leaves:
        yield from objects_in(leaf)


def computes_alike(context: Any) -> bool:
    """Whether a context manager is one of torch's that only says how to compute, such as ``torch.no_grad()``."""
    maker = getattr(context, "func", None)  # of what @contextmanager decorates
    return f"{(maker or type(context)).__module__}.".startswith(OF_TORCH)


def containers_in(value: Any) -> Iterator[Any]:
    """The lists and dicts of a nested value."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers_in(item)


def contents(container: Any) -> list[Any]:
    """What a list or a dict holds, for a comparison by identity."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def same_items(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
