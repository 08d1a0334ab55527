"""What Python decides a forward by: every state that it reads, found by running it on tensors without data.

The forward runs once from instrumented source, as in :mod:`fastlayers.patching.capture.trace`, but on fake tensors in
place of proxies: sizes are numbers, ``None`` is ``None``, branches are taken as the call would take them. Each read of
a module, a global or an object is written down as an expression with its value. As long as these expressions have these
values, and tensors of the same geometry come in, Python does the same again; that is what a region relies on. What
could do anything else (writes, values of tensors, unknown functions) is refused, before anything has happened.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import operator
import os
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MappingView
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.amp.autocast_mode import autocast_decorator
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend
from torch.utils._contextlib import context_decorator
from torch.utils._pytree import tree_leaves, tree_map_only

from fastlayers.patching.capture.lookups import (
    FUNCTIONS,
    QUERIES,
    global_variable,
    inside_function,
    member,
    not_shadowed,
    package,
    same,
    same_inherited,
    same_method,
    same_operator,
    same_tensor_method,
)
from fastlayers.patching.capture.syntax import (
    CALL_BACK,
    OPERATORS,
    TRUSTED,
    Instrument,
    Run,
    containers_in,
    contents,
    hook,
    is_ours,
    outside,
    parse,
    require_a_name,
    same_items,
)
from fastlayers.patching.capture.trace import (
    CONTAINERS,
    MEMBERS,
    PRIMITIVES,
    PURE_BUILTINS,
    STRUCTURAL,
    is_stateless_layer,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.runtime.checks import original_class

__all__ = ["Reads", "is_value", "load_fake_tensors", "read_by"]

#: Functions of torch that read or change what no guard knows.
REFUSED_FUNCTIONS = frozenset(
    {"manual_seed", "seed", "set_grad_enabled", "set_default_dtype", "compile", "save", "load", "backward", "grad",
     "checkpoint", "register_hook", "retain_grad", "requires_grad_", "set_", "share_memory_", "item", "tolist", "numpy",
     "__dlpack__", "detach_", "resize_", "synchronize", "data_ptr", "storage_offset", "untyped_storage", "is_inference",
     "is_pinned", "is_shared", "_is_view", "is_autocast_cache_enabled",
     "apply_", "map_", "map2_"}  # The last three would write through null.
)  # fmt: skip
#: Those that ask for what a region tests itself.
KNOWN_FLAGS = QUERIES | {"is_compiling", "is_tracing"}
#: The code of the functions that context managers of torch return as decorators.
CONTEXT_DECORATORS = frozenset(
    code
    for maker in (autocast_decorator, context_decorator)
    for code in maker.__code__.co_consts
    if isinstance(code, types.CodeType) and "func" in code.co_freevars
)
#: Methods with which torch and operators would take an object for a number or a tensor.
NUMERIC = ("__array__", "__float__", "__index__", "__torch_function__")
#: What f-strings do with a value before they format it.
CONVERSIONS: dict[str, Any] = {"r": repr, "s": str, "a": ascii, "": lambda value: value}
#: Classes whose objects are made as they are.
TRUSTED_CLASSES = (torch.Size, torch.device, torch.finfo, torch.iinfo, torch.autocast, torch.no_grad, torch.enable_grad)
#: Methods that give the tensors of a module, and where it holds them.
REGISTRIES: dict[Any, str] = {nn.Module.parameters: "_parameters", nn.Module.buffers: "_buffers"}
#: What a list or dict is called that was given.
ARGUMENT = "an argument"
#: What a class does not have.
MISSING = object()
#: Dicts of objects with more items are not read one by one.
MAX_ITEMS = 64
#: Packages with the classes of context managers that change nothing but how torch computes.
OF_TORCH = ("torch.autograd.", "torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.", "torch.nn.attention")
#: Modules whose numbers a backward may read, which runs after a guard has looked.
CONSTANT = ("torch", "math")
#: Attributes of tensors that depend on more than their geometry.
REFUSED_ATTRIBUTES = frozenset({"grad", "grad_fn", "is_leaf", "_version", "_base", "name", "_backward_hooks"})


class Reads:
    """What a call read.

    Attributes:
        values: expressions about ``self`` and the names of :attr:`namespace`, with their values.
        tests: tests of what was looked up, see :mod:`fastlayers.patching.capture.lookups`.
        called: expressions of the modules that were called, which must have no hooks.
        tensors: expressions of the tensors that were read, with these.
        namespace: the objects that the expressions name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.tests: dict[str, None] = {}
        self.called: dict[str, None] = {}
        self.tensors: dict[str, Tensor] = {}
        self.namespace: dict[str, Any] = {}


_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


@functools.cache
def load_fake_tensors() -> None:
    """Import what the first fake mode imports, in a thread: the frames of that import are garbage in a cycle, and with
    them those of their callers, which would keep tensors and models until the collector runs."""
    thread = threading.Thread(target=FakeTensorMode)
    thread.start()
    thread.join()


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


def from_numpy(function: Any) -> bool:
    """Whether a function is one of numpy's, such as ``np.prod``: of numbers it gives the same each time."""
    return type(function).__module__.split(".")[0] == "numpy" and callable(function)


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


def read_by(
    module: nn.Module,
    forward: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lookups: frozenset[Any] = frozenset(),
    undecorated: Callable[[Any, Iterable[str]], Any] = lambda forward, names: forward,
) -> Reads:
    """What a call of ``forward(module, *args, **kwargs)`` reads.

    Args:
        module: it is not changed, and none of its code with a side effect runs.
        forward: the forward of its original class.
        args, kwargs: tensors, plain values, and tuples, lists and dicts of them.
        lookups: functions that only look something up. Their results count as read.
        undecorated: gives the forward inside of a library's decorators, for a call with such keywords.

    Raises:
        Refusal: the call does what a region cannot repeat.
    """
    if not isinstance(forward, types.FunctionType):
        raise Refusal(Reason.DECORATED, f"{type(module).__name__}.forward is a {type(forward).__name__}")
    watch = Watch(module, lookups, undecorated)
    reads, original = watch.reads, original_class(module)
    watch.test(same(member(original, "forward", watch.bind), original.forward, watch.bind))
    try:
        with watch.fake_mode, without_a_log_of_errors():
            args, kwargs = tree_map_only(Tensor, watch.fake, (args, kwargs))
            for given in containers_in((*args, *kwargs.values())):
                watch.keep(ARGUMENT, given)
            result = watch.follow(undecorated(forward, kwargs), (module, *args), kwargs)
        watch.check_lent()
        watch.check_assigned()
        watch.check_result(result)
        for value in objects_in(result):
            if not watch.is_made(value):
                raise Refusal(Reason.READS_STATE, f"it returns a {type(value).__name__} that it has not made")
    except Refusal:
        raise
    except Exception as error:  # An error of the forward itself, or what fake tensors cannot do.
        if is_ours(error):
            raise
        raise Refusal(Reason.TRACE_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
    finally:
        # Its weak references to parameters would stay until the collector runs: torch.utils.swap_tensors refuses these.
        vars(watch.fake_mode.fake_tensor_converter.meta_converter).clear()
        watch.__exit__()
    return reads


@contextmanager
def without_a_log_of_errors() -> Iterator[None]:
    """torch logs what fails on fake tensors, with a traceback; here that is one reason among others for a refusal."""
    before, _fake_log.disabled = _fake_log.disabled, True
    try:
        yield
    finally:
        _fake_log.disabled = before


class Concrete(Instrument):
    """The instrumentation for a run on fake tensors: what only a proxy cannot do is allowed, and so is everything in a
    branch that is not taken."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.While | ast.With):
            return ast.NodeTransformer.visit(self, node)
        if isinstance(node, ast.Try) and not node.finalbody:  # An error ends the run: what a handler does is not seen.
            body = ast.Module([*node.body, *node.orelse], [])
            ast.NodeTransformer.generic_visit(self, body)
            return body.body
        try:
            return super().visit(node)
        except Refusal as refusal:
            if not isinstance(node, ast.stmt):
                raise
            return ast.Expr(hook("refuse", ast.Constant(refusal.reason.name), ast.Constant(refusal.detail)))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        node.left, node.right = (hook("operand", part, operator_of(node)) for part in (node.left, node.right))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        super().visit_UnaryOp(node)
        if not isinstance(node.op, ast.Not):
            node.operand = hook("operand", node.operand, operator_of(node))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        found = super().visit_Compare(node)
        if found is node:
            node.left = hook("operand", node.left, operator_of(node))
            node.comparators = [hook("operand", part, operator_of(node)) for part in node.comparators]
        return found

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return super().visit_Subscript(node)
        node.value, node.slice = hook("local", self.visit(node.value)), self.visit(node.slice)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        node.value = hook("made", self.visit(node.value))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if isinstance(node.target, ast.Name):
            return super().visit_AugAssign(node)
        node.target, node.value = self.visit(node.target), self.visit(node.value)
        return node


def operator_of(node: ast.BinOp | ast.UnaryOp | ast.Compare) -> ast.expr:
    return ast.Constant(type(node.ops[0] if isinstance(node, ast.Compare) else node.op).__name__)


class Subscripted:
    """What a subscript sees of an object whose ``__getitem__`` only looks something up."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, key: Any) -> Any:
        if not is_value(key):
            raise Refusal(Reason.READS_STATE, f"looks up a {type(key).__name__}")
        return self.read(key)


class Assigned:
    """What an assignment sees of a module: the last one is written down for :meth:`Watch.check_assigned`."""

    def __init__(self, module: nn.Module, watch: Watch) -> None:
        vars(self).update(module=module, watch=watch)

    def __setattr__(self, name: str, value: Any) -> None:
        module, watch = vars(self)["module"], vars(self)["watch"]
        watch.module_origin(module)
        watch.assigned[id(module), name] = module, value

    def __getattr__(self, name: str) -> Any:  # of self.count += 1
        return vars(self)["watch"].module_attribute(vars(self)["module"], name)


class Watch(Run):
    """One run of a module's forward on fake tensors."""

    instrument = Concrete

    def __init__(
        self, module: nn.Module, lookups: frozenset[Any], undecorated: Callable[[Any, Iterable[str]], Any]
    ) -> None:
        self.reads = Reads()
        super().__init__(module, self.reads.tests, self.reads.namespace, max_depth=24)
        self.lookups, self.undecorated = lookups, undecorated
        self.fake_mode = FakeTensorMode()
        self.fakes: dict[int, tuple[Tensor, Tensor]] = {}
        #: Expressions of modules and other objects, by identity; the objects themselves keep it unique.
        self.origins: dict[int, tuple[str, Any]] = {id(module): ("self", module)}
        #: What was assigned to attributes of modules, last, by identity and name.
        self.assigned: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        #: Whether a backward is followed, which will run later.
        self.late = False

    def follow(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = in_context(function)
        if found is None:
            return super().follow(function, args, kwargs)
        context, inner = found
        with outside(context):
            return self.follow(inner, args, kwargs)

    # -- values --------------------------------------------------------------------------------------------------

    def fake(self, t: Tensor) -> Tensor:
        """The fake tensor of a tensor, the same each time."""
        if id(t) not in self.fakes:
            self.fakes[id(t)] = (t, self.fake_mode.from_tensor(t, static_shapes=True))
        return self.fakes[id(t)][1]

    def origin(self, value: Any) -> str | None:
        found = self.origins.get(id(value))
        return found[0] if found is not None else None

    def read(self, expression: str, value: Any) -> Any:
        """Write a read down, and return what the forward gets."""
        if self.late and not isinstance(value, FUNCTIONS) and not self.is_constant(expression):
            raise Refusal(Reason.READS_STATE, f"a backward reads {expression}, which may have changed by then")
        if isinstance(value, Tensor):
            self.reads.tensors[expression] = value
            return self.fake(value)
        if isinstance(value, FUNCTIONS) and not expression.startswith("self"):
            self.test(same(expression, value, self.bind))
            return value
        if type(value) in (slice, torch.Generator):  # Operations take them as they are.
            self.test(same(expression, value, self.bind))
            return value
        if is_value(value):
            self.reads.values[expression] = value
            if type(value) in (int, float):  # 2 == 2.0, but a product with it has another dtype
                self.test(f"type({expression}) is {type(value).__name__}")
            return value
        if type(value) is list and is_value(tuple(value)):
            self.reads.values[f"tuple({expression})"] = tuple(value)
            self.reads.values[f"type({expression})"] = list
            return self.lend(expression, value)
        if type(value) in (dict, OrderedDict) and is_value(tuple(value.items())):
            self.reads.values[f"tuple({expression}.items())"] = tuple(value.items())
            self.reads.values[f"type({expression})"] = type(value)
            return self.lend(expression, value)
        if not isinstance(value, nn.Module) and any(hasattr(type(value), name) for name in NUMERIC):
            raise Refusal(Reason.READS_STATE, f"{expression} is a {type(value).__name__}")
        self.reads.values[f"type({expression})"] = type(value)
        self.origins.setdefault(id(value), (expression, value))
        return value

    def is_constant(self, expression: str) -> bool:
        """Whether nobody changes what is read: a constant of torch's or of math, or a variable of torch's own code."""
        scope = self.frames[-1][0].__globals__  # A wrapper of functools.wraps has the __module__ of what it wraps.
        return expression.partition(".")[0] in CONSTANT or scope.get("__name__", "").partition(".")[0] == "torch"

    def lend(self, expression: str, value: Any) -> Any:
        """A copy of a list or dict, which must not be changed."""
        return self.keep(expression, value.copy())

    def keep(self, what: str, container: Any) -> Any:
        """A list or dict that must not be changed."""
        self.lent.append((what, contents(container), container))
        return container

    def check_lent(self) -> None:
        for what, before, container in self.lent:
            if not same_items(contents(container), before):
                raise Refusal(Reason.CHANGES_STATE, f"changes {what}")

    def check_result(self, result: Any) -> None:
        """A list that was read would be another one in each call; one that was given is that of the call."""
        if any(value is lent for value in containers_in(result) for what, _, lent in self.lent if what != ARGUMENT):
            raise Refusal(Reason.READS_STATE, "it returns a list or a dict that it has not made")

    def check_assigned(self) -> None:
        """What was assigned must be back at what it was, which is read here: nothing assigns it in a later call."""
        for (_, name), (module, value) in self.assigned.items():
            state = vars(module)
            known = name in state or any(name in state[r] for r in ("_parameters", "_buffers", "_modules"))
            known = known and not isinstance(inspect.getattr_static(type(module), name, None), property)
            present = self.present_attribute(module, name) if known else MISSING
            if value is not present and not (is_value(value) and type(value) is type(present) and value == present):
                raise Refusal(Reason.CHANGES_STATE, f"assigns {name} of a {type(module).__name__}")

    # -- hooks ---------------------------------------------------------------------------------------------------

    def closure_variable(self, cell: types.CellType, name: str) -> Any:
        return self.read(f"{self.bind(cell, 'cell')}.cell_contents", cell.cell_contents)

    def global_variable(self, function: types.FunctionType, name: str) -> Any:
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and package(function) == "torch":
            return value
        return self.read(global_variable(function.__globals__, name, self.bind), value)

    def hook_attribute(self, owner: Any, name: str) -> Any:
        require_a_name(owner, name)
        if isinstance(owner, Tensor):
            if name in REFUSED_ATTRIBUTES or not hasattr(Tensor, name):
                raise Refusal(Reason.READS_STATE, f"a tensor's {name}")
            self.test(*same_tensor_method(name, self.bind))
            return outside(getattr, owner, name)
        if isinstance(owner, nn.Module):
            return outside(getattr, owner, name) if self.is_made(owner) else self.module_attribute(owner, name)
        if isinstance(owner, types.ModuleType):
            return self.read(member(owner, name, self.bind), outside(getattr, owner, name))
        if isinstance(owner, super):
            self.test(*same_inherited(owner, name, self.bind))
        if isinstance(owner, type):
            return self.class_attribute(owner, name)
        if isinstance(owner, types.FunctionType):
            return self.function_attribute(owner, name)
        origin = self.origin(owner)
        if origin is not None:
            return self.object_attribute(origin, owner, name)
        return outside(getattr, owner, name)

    def object_attribute(self, origin: str, owner: Any, name: str) -> Any:
        """An attribute of an object that was read, such as ``self.config.hidden_size``."""
        static = inspect.getattr_static(type(owner), name, None)
        if isinstance(static, property):
            return self.read_property(static, origin, owner, name)
        if isinstance(static, types.FunctionType | staticmethod) and name not in getattr(owner, "__dict__", ()):
            self.test(same(f"type({origin}).{name}", getattr(type(owner), name), self.bind))
            if hasattr(owner, "__dict__"):
                self.test(f"{name!r} not in {origin}.__dict__")
            return outside(getattr, owner, name)
        held = name in getattr(owner, "__dict__", ()) or name in getattr(owner, "_fields", ())  # of a namedtuple
        if isinstance(owner, functools.partial) or held or is_value(static):
            return self.read(f"{origin}.{name}", outside(getattr, owner, name))
        raise Refusal(Reason.READS_STATE, f"{origin}.{name}")

    def module_attribute(self, module: nn.Module, name: str) -> Any:
        if (id(module), name) in self.assigned:
            return self.assigned[id(module), name][1]
        return self.present_attribute(module, name)

    def present_attribute(self, module: nn.Module, name: str) -> Any:
        """An attribute as it was before the call."""
        origin = self.module_origin(module)
        static = inspect.getattr_static(type(module), name, MISSING)
        state = module.__dict__
        if isinstance(static, property) and static.fget is not None:
            return self.read_property(static, origin, module, name)
        if name in state:
            return self.read(f"{origin}.{name}", state[name])
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state[registry]:
                self.test(*not_shadowed(origin, original_class(module), name, self.bind))
                return self.read(f"{origin}.{registry}[{name!r}]", state[registry][name])
        if isinstance(static, types.FunctionType | staticmethod | classmethod):
            self.test(*same_method(origin, type(module), name, self.bind))
            found = getattr(type(module), name)
            if isinstance(static, types.FunctionType):
                return types.MethodType(found, module)
            return found
        if is_value(static):
            return self.read(f"{origin}.{name}", static)
        raise Refusal(Reason.READS_STATE, f"{origin}.{name}")

    def kind(self, module: nn.Module | None, origin: str) -> None:
        """Write down that a module has this class, or is None."""
        self.reads.values[f"type({origin})"] = type(module)

    def module_origin(self, module: nn.Module) -> str:
        origin = self.origin(module)
        if origin is None:
            raise Refusal(Reason.READS_STATE, f"a {type(module).__name__} that is not one of its submodules")
        if module is not self.root:  # Its class has this forward, or inherits it, as that of graph_model does.
            self.kind(module, origin)
        return origin

    def hook_container(self, value: Any) -> Any:
        if isinstance(value, nn.ParameterList):
            return self.parameters_in(value)
        if isinstance(value, nn.ParameterDict):
            raise Refusal(Reason.READS_STATE, "goes through a ParameterDict")
        if isinstance(value, CONTAINERS):
            if self.origin(value) is not None or any(self.origin(child) is None for child in value.children()):
                self.children(value)  # Otherwise it is a slice of one that was read.
            return value
        origin = self.origin(value)
        if origin is not None and isinstance(value, list | tuple):  # of objects: each by its place
            self.reads.values[f"len({origin})"] = len(value)
            items = [self.read(f"{origin}[{i}]", item) for i, item in enumerate(value)]
            return self.keep(origin, items) if isinstance(value, list) else tuple(items)
        if origin is not None and isinstance(value, dict | set | frozenset):
            return self.items_of(origin, value)
        if origin is not None and isinstance(value, Iterator | MappingView):
            raise Refusal(Reason.CHANGES_STATE, f"goes on with {origin}, a {type(value).__name__}")
        lookup = getattr(type(value), "__getitem__", None)
        if origin is not None and lookup in self.lookups:
            self.test(same(f"type({origin}).__getitem__", lookup, self.bind))
            return Subscripted(lambda key: self.read(f"{origin}[{self.bind(key, 'value')}]", value[key]))
        if isinstance(value, Tensor):
            self.test(*same_operator("getitem", self.bind), *same_operator("iter", self.bind))
        collections = Tensor | list | tuple | dict | set | range | Iterator | MappingView | types.MappingProxyType
        if isinstance(value, collections) or is_value(value):
            return value
        raise Refusal(Reason.READS_STATE, f"goes through a {type(value).__name__}")

    def parameters_in(self, value: nn.ParameterList) -> list[Any]:
        origin, held = self.module_origin(value), value._parameters
        self.reads.values[f"{origin}._size"] = len(value)
        names = [str(i) for i in range(len(value))]
        if names != [*held]:  # It may hold other values, too.
            raise Refusal(Reason.READS_STATE, f"goes through {origin}, which holds more than parameters")
        items = [self.read(f"{origin}._parameters[{name!r}]", held[name]) for name in names]
        return self.keep(origin, items)  # type: ignore[no-any-return]

    def items_of(self, origin: str, value: Any) -> Any:
        """A copy of a dict or a set that was read, whose items count as read, in their order."""
        keys = tuple(value)
        if not is_value(keys) or len(keys) > MAX_ITEMS:
            raise Refusal(Reason.READS_STATE, f"goes through {origin}, a {type(value).__name__}")
        self.reads.values[f"tuple({origin})"] = keys
        if not isinstance(value, dict):
            return frozenset(keys)
        places = [repr(key) if type(key) in (str, int) else self.bind(key, "key") for key in keys]
        items = {key: self.read(f"{origin}[{place}]", value[key]) for key, place in zip(keys, places, strict=True)}
        return self.keep(origin, items)

    def children(self, module: nn.Module) -> None:
        origin = self.module_origin(module)
        self.reads.values[f"tuple({origin}._modules)"] = tuple(module._modules)
        for name, child in module._modules.items():
            place = f"{origin}._modules[{name!r}]"
            self.kind(child, place)  # A loop sees which of them are None.
            if child is not None:
                self.origins.setdefault(id(child), (place, child))
            if isinstance(child, nn.ModuleList):  # A loop may take it apart at once.
                self.children(child)

    def tensors_of(self, module: nn.Module, registry: str, seen: set[int]) -> Iterator[Tensor]:
        """The parameters or buffers of a module and those inside, of which only those count as read that are taken:
        ``next(self.parameters()).dtype`` takes the first."""
        origin = self.module_origin(module)
        held = module.__dict__[registry]
        self.reads.values[f"tuple({origin}.{registry})"] = tuple(held)
        for name, t in held.items():
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                yield self.read(f"{origin}.{registry}[{name!r}]", t)
        self.children(module)
        for child in module._modules.values():
            if child is not None:
                yield from self.tensors_of(child, registry, seen)

    def hook_unpack(self, value: Any, count: int) -> Any:
        return value

    def hook_test(self, value: Any) -> Any:
        if isinstance(value, CONTAINERS) or (self.origin(value) is not None and hasattr(type(value), "__len__")):
            self.hook_container(value)  # It is true if it is not empty.
        elif self.origin(value) is not None and hasattr(type(value), "__bool__"):
            raise Refusal(Reason.READS_STATE, f"tests {self.origin(value)}, a {type(value).__name__}")
        return value

    def hook_operand(self, value: Any, op: str = "") -> Any:
        if isinstance(value, Tensor) and op in OPERATORS:
            self.test(*same_operator(OPERATORS[op], self.bind))
        origin = self.origin(value)
        if origin is None or isinstance(value, nn.Module):
            return value
        if isinstance(value, list | tuple | dict | set | frozenset):
            return self.hook_container(value)
        raise Refusal(Reason.READS_STATE, f"computes with {origin}, a {type(value).__name__}")

    def hook_inplace(self, op: str, target: Any, value: Any) -> Any:
        return super().hook_inplace(op, self.hook_operand(target, op), self.hook_operand(value, op))

    def hook_context(self, value: Any) -> Any:
        """A context manager of a with statement, which replays do not enter: what it does is in what torch computes."""
        if self.origin(value) is not None or not computes_alike(value):
            raise Refusal(Reason.CONTEXT_MANAGER, f"a {type(value).__name__}")
        return value

    def hook_string(self, *parts: Any) -> str:
        def show(part: Any) -> str:
            if isinstance(part, str):
                return part
            value, convert, spec = part
            if not is_value(value):
                raise Refusal(Reason.READS_STATE, "formats an object")
            return outside(format, CONVERSIONS[convert](value), spec)

        return "".join(map(show, parts))

    def hook_same(self, left: Any, right: Any) -> bool:
        first, second = self.origin(left), self.origin(right)
        if first is not None and second is not None:
            self.reads.values[f"{first} is {second}"] = left is right
        return left is right

    def hook_contains(self, item: Any, container: Any) -> bool:
        return outside(operator.contains, self.hook_container(container), item)

    def hook_local(self, value: Any) -> Any:
        """What an item is assigned to: it must have been made in this call. The tape sees to tensors."""
        if not isinstance(value, Tensor | list | dict) or self.origin(value) is not None:
            raise Refusal(Reason.CHANGES_STATE, f"assigns an item of a {type(value).__name__}")
        return value

    def hook_made(self, value: Any) -> Any:
        """An object of which an attribute is assigned: it was made in this call, or is a module that has this value."""
        if self.is_made(value):
            return value
        if isinstance(value, nn.Module) and type(value).__setattr__ is nn.Module.__setattr__:
            return Assigned(value, self)
        raise Refusal(Reason.CHANGES_STATE, f"assigns an attribute of a {type(value).__name__}")

    def hook_refuse(self, reason: str, detail: str) -> None:
        raise Refusal(Reason[reason], detail)

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, nn.Module):
            return self.call_module(function, args, kwargs)
        if is_apply(function):
            return self.differentiable(function, args, kwargs)
        if isinstance(function, types.MethodType):
            return self.method(function, args, kwargs)
        if isinstance(function, types.FunctionType):
            return self.function(function, args, kwargs)
        if type(function) is functools.partial:
            origin = self.origin(function)
            if origin is not None:
                inner, given, options = (
                    self.read(f"{origin}.{n}", getattr(function, n)) for n in ("func", "args", "keywords")
                )
                return self.hook_call(inner, *given, *args, **{**options, **kwargs})
        origin = self.origin(function)
        if isinstance(function, torch.jit.ScriptFunction) and origin is not None:
            self.test(same(origin, function, self.bind))
            return outside(function, *args, **kwargs)
        if isinstance(function, functools._lru_cache_wrapper):
            return self.cached(function, origin, args, kwargs)
        called = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(called, types.FunctionType) and origin is not None:
            self.test(same(f"type({origin}).__call__", called, self.bind))
            return self.follow(called, (function, *args), kwargs)
        return self.builtin(function, args, kwargs)

    def differentiable(self, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a ``torch.autograd.Function``.

        Its methods are followed in a subclass, so that torch makes the context. The backward is followed at once: where
        it runs nobody asks what it reads.
        """
        cls, stock = apply.__self__, torch.autograd.Function
        if (origin := self.origin(apply)) is not None:
            self.test(same(origin, apply, self.bind))

        def followed(function: Any, late: bool) -> Any:
            @functools.wraps(function)  # torch binds arguments by its signature.
            def method(ctx: Any, *given: Any) -> Any:
                if isinstance(ctx, FunctionCtx):  # A forward with a setup_context has none.
                    self.made.append(ctx)
                before, self.late = self.late, late
                try:
                    return self.follow(function, (ctx, *given), {})
                finally:
                    self.late = before

            return staticmethod(method)

        methods = {name: getattr(cls, name) for name in ("forward", "setup_context", "backward", "vjp")}
        for name, function in methods.items():
            self.test(same(member(cls, name, self.bind), function, self.bind))
        own = {name: function for name, function in methods.items() if function is not getattr(stock, name)}
        if not all(isinstance(function, types.FunctionType) for function in own.values()):
            raise Refusal(Reason.UNKNOWN_CALL, f"{cls.__qualname__}, whose methods are no functions")
        late = "backward", "vjp"
        namespace = {name: followed(function, name in late) for name, function in own.items()}
        result = type(cls)(cls.__name__, (cls,), namespace).apply(*args, **kwargs)
        differentiated = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
        if differentiated and wanted:
            torch.autograd.grad(differentiated, wanted, [*map(torch.empty_like, differentiated)], allow_unused=True)
        return result

    def cached(self, function: Any, origin: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function with a cache. That of values is the same each time."""
        if origin is None or not is_value((*args, *kwargs.values())):
            return self.call(function.__wrapped__, *args, **kwargs)
        self.test(same(origin, function, self.bind))
        with unset_fake_temporarily():  # The cache would keep a fake tensor.
            found = outside(function, *args, **kwargs)
        if not is_value(found):
            raise Refusal(Reason.UNKNOWN_CALL, f"{function.__name__}, whose cache has a {type(found).__name__}")
        return found

    def call_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inherited: bool = False
    ) -> Any:
        """The result of a module. ``inherited`` says that a ``__call__`` of its own calls ``super().__call__``."""
        if self.is_made(module):
            return self.follow(self.forward(module), (module, *args), kwargs)
        origin = self.origin(module)
        if origin is None or isinstance(module, torch.jit.ScriptModule):
            raise Refusal(Reason.UNKNOWN_CALL, f"a {type(module).__name__} that is not one of its submodules")
        if module is self.root:
            raise Refusal(Reason.UNKNOWN_CALL, "calls itself")
        self.kind(module, origin)
        called: Any = type(module).__call__
        for name in ("__call__", "_call_impl"):
            self.test(same(member(type(module), name, self.bind), getattr(type(module), name), self.bind))
        if called is not nn.Module.__call__ and not inherited:
            if not isinstance(called, types.FunctionType):
                raise Refusal(Reason.UNKNOWN_CALL, f"{type(module).__name__}.__call__")
            return self.follow(called, (module, *args), kwargs)
        self.reads.called[origin] = None
        forward = self.forward(module)
        if "forward" in module.__dict__ or not isinstance(forward, types.FunctionType):
            raise Refusal(Reason.FORWARD_REPLACED, origin)
        return self.follow(self.undecorated(forward, kwargs), (module, *args), kwargs)

    def forward(self, module: nn.Module) -> Any:
        """The forward of a module as it is written, not as it was patched."""
        present, original = type(module), original_class(module)
        stays = present is original or present.forward is present.__fastlayers_forward__  # type: ignore[attr-defined]
        for kind in (present, original):
            self.test(same(member(kind, "forward", self.bind), kind.forward, self.bind))
        return (original if stays else present).forward

    def method(self, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, function = method.__self__, method.__func__
        if isinstance(owner, nn.Module) and function in MEMBERS:
            self.children(owner)
            return outside(method, *args, **kwargs)
        if isinstance(owner, nn.Module) and function is nn.Module.__call__:
            return self.call_module(owner, args, kwargs, inherited=True)
        if isinstance(owner, nn.Module) and function in REGISTRIES and not args and not kwargs:
            return self.tensors_of(owner, REGISTRIES[function], set())
        if isinstance(owner, Tensor):
            return self.builtin(method, args, kwargs)
        if not isinstance(function, types.FunctionType):
            raise Refusal(Reason.UNKNOWN_CALL, method.__qualname__)
        origin = self.origin(owner)
        looks_up = function in self.lookups or owner is os.environ
        if looks_up and origin is not None and is_value(args) and not kwargs:
            names = [self.bind(arg, "value") for arg in args]
            return self.read(f"{origin}.{function.__name__}({', '.join(names)})", outside(method, *args))
        return self.follow(function, (owner, *args), kwargs)

    def function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is torch.jit.is_scripting:  # A patched model runs as Python.
            return False
        if function is inspect.signature:
            return outside(function, *args, **kwargs)
        if package(function) in TRUSTED:
            if function is torch.is_tensor:
                return outside(function, *args)
            if function.__name__ in REFUSED_FUNCTIONS or any(isinstance(arg, nn.Module) for arg in args):
                raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
            if function.__module__.startswith("torch.backends") and (args or kwargs):
                raise Refusal(Reason.UNKNOWN_CALL, function.__qualname__)
            if self.asks_for_flag(function, args, kwargs):
                return self.flag(function, args)
            self.test(*inside_function(function, self.bind))
            return outside(
                function, *map(self.items, args), **{key: self.items(value) for key, value in kwargs.items()}
            )
        return self.follow(function, args, kwargs)

    def asks_for_flag(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call asks torch for a flag that no guard of torch compares."""
        name, of_backend = function.__name__, (function.__module__ or "").startswith("torch.backends")
        if kwargs or name in KNOWN_FLAGS or not all(type(arg) is str for arg in args):
            return False
        asks = name.lstrip("_").startswith(("is_", "get_", "are_")) or name.endswith("_enabled")
        return of_backend or (asks and not self.late)

    def flag(self, function: Any, args: tuple[str, ...]) -> Any:
        return self.read(f"{self.bind(function, function.__name__)}({', '.join(map(repr, args))})", function(*args))

    def default(self, value: Any, what: str) -> Any:
        if not is_value(value) and value:
            raise Refusal(Reason.READS_STATE, what)
        return value

    def parsed(self, function: types.FunctionType) -> ast.FunctionDef:
        tree = parse(function, decorated=True)
        if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in ast.walk(tree)):
            raise Refusal(Reason.SYNTAX, f"a yield in {function.__qualname__}")
        return tree

    def items(self, value: Any) -> Any:
        """An argument of what is called as it is: a list or a tuple that was read has its items read, too."""
        held = isinstance(value, list | tuple | nn.ParameterList) and self.origin(value) is not None
        return self.hook_container(value) if held else value

    def builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", repr(function))
        args, kwargs = tuple(map(self.items, args)), {key: self.items(value) for key, value in kwargs.items()}
        if function in (isinstance, type) and len(args) == 2 - (function is type) and isinstance(args[0], Tensor):
            return self.type_of(function, *args)
        if function in (isinstance, callable):
            if isinstance(args[0], nn.Module):
                self.kind(args[0], self.origin(args[0]) or "")
            return outside(function, *args)
        if function is getattr and isinstance(args[1], str):
            if len(args) > 2 and not hasattr(args[0], args[1]):
                self.has(args[0], args[1])
                return args[2]
            return self.hook_attribute(args[0], args[1])
        if function is hasattr:
            return self.has(*args)
        if function in PURE_BUILTINS or function in STRUCTURAL or function in (print, type, repr):
            for value in (*(args[1:] if function in CALL_BACK else args), *kwargs.values()):
                self.hook_container(value)
            if function is print or (function is type and len(args) != 1):
                raise Refusal(Reason.UNKNOWN_CALL, name)
            args, kwargs = self.called_back(function, args, kwargs)
            return outside(function, *args, **kwargs)
        owner = getattr(function, "__self__", None)
        if (
            isinstance(function, types.BuiltinMethodType | types.MethodWrapperType | types.MethodType)
            and owner is not None
        ):
            if isinstance(owner, Tensor):
                if name in REFUSED_FUNCTIONS:
                    raise Refusal(Reason.UNKNOWN_CALL, f"a tensor's {name}")
                return outside(function, *args, **kwargs)
            local = isinstance(owner, list | tuple | dict | set | types.MappingProxyType) and self.origin(owner) is None
            if local or (is_value(owner) and not isinstance(owner, types.ModuleType)):
                return outside(function, *args, **kwargs)
        if name in REFUSED_FUNCTIONS:
            raise Refusal(Reason.UNKNOWN_CALL, name)
        module = getattr(function, "__module__", None) or getattr(owner, "__name__", None) or ""
        known = module.split(".")[0] in TRUSTED or getattr(torch, name, None) is function
        if isinstance(function, types.BuiltinFunctionType) and known:
            if self.asks_for_flag(function, args, kwargs):
                return self.flag(function, args)
            return outside(function, *args, **kwargs)
        if from_numpy(function) and all(map(are_values, (*args, *kwargs.values()))):
            if (origin := self.origin(function)) is not None:
                self.test(same(origin, function, self.bind))
            found = outside(function, *args, **kwargs)
            if is_value(found):
                return found
        layer = is_stateless_layer(function) and all(map(are_values, (*args, *kwargs.values())))
        if layer or only_holds(function) or is_named_tuple(function):
            self.made.append(outside(function, *args, **kwargs))
            return self.made[-1]
        if type(function) is type(torch.FloatTensor) and list in map(type, args) and all(map(are_values, args)):
            return self.fake_mode.from_tensor(outside(function, *args))  # of numbers, as torch.tensor makes it
        if function in TRUSTED_CLASSES or isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            return outside(function, *args, **kwargs)
        raise Refusal(Reason.UNKNOWN_CALL, name)

    def type_of(self, function: Any, t: Tensor, *classes: Any) -> Any:
        """What ``type`` or ``isinstance`` gives for the tensor that this fake one stands for."""
        kind: type = next((type(real) for real, fake in self.fakes.values() if fake is t), Tensor)
        # An argument is a plain tensor in a recording, while a second forward has parameters for parameters.
        if kind is not Tensor and not any(self.fakes[id(real)][1] is t for real in self.reads.tensors.values()):
            plain = function is isinstance and issubclass(kind, *classes) == issubclass(Tensor, *classes)
            if not plain:
                raise Refusal(Reason.READS_STATE, "tests the type of a parameter")
        return kind if function is type else isinstance(t, *classes)

    def has(self, owner: Any, name: str) -> bool:
        if isinstance(owner, Tensor) and not hasattr(Tensor, name):  # Its fake tensor lacks what someone gave it.
            raise Refusal(Reason.READS_STATE, f"a tensor's {name}")
        found = hasattr(owner, name)
        origin = self.origin(owner)
        if origin is not None:
            self.reads.values[f"hasattr({origin}, {name!r})"] = found
        elif isinstance(owner, nn.Module):
            raise Refusal(Reason.READS_STATE, f"asks for {name}")
        return found
