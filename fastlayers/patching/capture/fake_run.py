"""A run of a forward on fake tensors, which writes down what it reads: values, attributes, containers."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MappingView
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastlayers.patching.capture.caches import ATTRIBUTE, NUMBER, Layers, Slot
from fastlayers.patching.capture.lookups import (
    FUNCTIONS,
    global_variable,
    member,
    not_shadowed,
    package,
    same,
    same_operator,
    same_tensor_method,
)
from fastlayers.patching.capture.run import Run, outside
from fastlayers.patching.capture.syntax import OPERATORS, Concrete
from fastlayers.patching.capture.values import (
    CONTAINERS,
    MISSING,
    computes_alike,
    containers_in,
    contents,
    is_value,
    same_items,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.runtime.checks import original_class

#: What a list or dict is called that was given.
ARGUMENT = "an argument"
#: Methods with which torch and operators would take an object for a number or a tensor.
NUMERIC = ("__array__", "__float__", "__index__", "__torch_function__")
#: What f-strings do with a value before they format it.
CONVERSIONS: dict[str, Any] = {"r": repr, "s": str, "a": ascii, "": lambda value: value}
#: Dicts of objects with more items are not read one by one.
MAX_ITEMS = 64
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


@functools.cache
def load_fake_tensors() -> None:
    """Import what the first fake mode imports, in a thread: the frames of that import are garbage in a cycle, and with
    them those of their callers, which would keep tensors and models until the collector runs."""
    thread = threading.Thread(target=FakeTensorMode)
    thread.start()
    thread.join()


class Subscripted:
    """What a subscript sees of an object whose ``__getitem__`` only looks something up."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, key: Any) -> Any:
        if not is_value(key):
            raise Refusal(Reason.READS_STATE, f"looks up a {type(key).__name__}")
        return self.read(key)


class Assigned:
    """What an assignment sees of a module: the last one is written down for :meth:`FakeRun.check_assigned`."""

    def __init__(self, module: nn.Module, watch: FakeRun) -> None:
        vars(self).update(module=module, watch=watch)

    def __setattr__(self, name: str, value: Any) -> None:
        module, watch = vars(self)["module"], vars(self)["watch"]
        watch.module_origin(module)
        watch.assigned[id(module), name] = module, value

    def __getattr__(self, name: str) -> Any:  # of self.count += 1
        return vars(self)["watch"].module_attribute(vars(self)["module"], name)


class FakeRun(Run):
    """A run on fake tensors, with what it reads: values, modules and their attributes, containers."""

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
        #: The expression of the number of the module's layer in a cache; None if it is read like other values.
        self.number: str | None = None
        #: What the caches that were given hold for that layer.
        self.slots: list[Slot] = []

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

    def check_caches(self) -> None:
        if any(number is not None and number is not NUMBER for number in (s.cache.layers.number for s in self.slots)):
            raise Refusal(Reason.READS_STATE, "reads what a cache holds for a layer by another number than its own")

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
            present = super().module_attribute(module, name) if known else MISSING
            if value is not present and not (is_value(value) and type(value) is type(present) and value == present):
                raise Refusal(Reason.CHANGES_STATE, f"assigns {name} of a {type(module).__name__}")

    def closure_variable(self, cell: types.CellType, name: str) -> Any:
        return self.read(f"{self.bind(cell, 'cell')}.cell_contents", cell.cell_contents)

    def global_variable(self, function: types.FunctionType, name: str) -> Any:
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and package(function) == "torch":
            return value
        return self.read(global_variable(function.__globals__, name, self.bind), value)

    def value_attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Tensor):
            if name in REFUSED_ATTRIBUTES or not hasattr(Tensor, name):
                raise Refusal(Reason.READS_STATE, f"a tensor's {name}")
            self.test(*same_tensor_method(name, self.bind))
            return outside(getattr, owner, name)
        origin = self.origin(owner)
        if any(owner is held for slot in self.slots for held in (slot.cache, slot.layer)):
            return self.cache_attribute(owner, name)
        return outside(getattr, owner, name) if origin is None else self.object_attribute(origin, owner, name)

    def cache_attribute(self, owner: Any, name: str) -> Any:
        """An attribute of a cache, or of what it holds for a layer. The class may be changed later."""
        static = inspect.getattr_static(type(owner), name, None)
        if isinstance(static, types.FunctionType | property) and name not in getattr(owner, "__dict__", ()):
            self.test(same(member(type(owner), name, self.bind), getattr(type(owner), name), self.bind))
        if isinstance(static, property) and static.fget is not None:
            return self.follow(static.fget, (owner,), {})  # type: ignore[arg-type]
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
        return super().module_attribute(module, name)

    def held(self, module: nn.Module, origin: str, name: str, value: Any) -> Any:
        if name == ATTRIBUTE and self.number is not None and type(value) is int:
            self.test(f"{origin}.{name} == {self.number}")
            return NUMBER
        return super().held(module, origin, name, value)

    def registered(self, module: nn.Module, origin: str, registry: str, name: str) -> Any:
        self.test(*not_shadowed(origin, original_class(module), name, self.bind))
        return self.read(f"{origin}.{registry}[{name!r}]", vars(module)[registry][name])

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
        if isinstance(value, Layers):
            return value
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
