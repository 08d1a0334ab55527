"""What Python decides a forward by: every state that it reads, found by running it on tensors without data.

The forward runs once from instrumented source, as in :mod:`fastlayers.patching.capture.trace`, but on fake tensors in
place of proxies: sizes are numbers, ``None`` is ``None``, branches are taken as the call would take them. Each read of
a module, a global or an object is written down as an expression with its value. As long as these expressions have these
values, and tensors of the same geometry come in, Python does the same again; that is what a region relies on. What
could do anything else (writes, values of tensors, unknown functions) is refused, before anything has happened.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_leaves, tree_map_only

from fastlayers.patching.capture.caches import Slot
from fastlayers.patching.capture.fake_run import ARGUMENT, FakeRun, Reads
from fastlayers.patching.capture.lookups import QUERIES, inside_function, member, package, same
from fastlayers.patching.capture.run import errors_as_refusals, outside
from fastlayers.patching.capture.syntax import parse
from fastlayers.patching.capture.values import (
    CALL_BACK,
    MEMBERS,
    PURE_BUILTINS,
    STRUCTURAL,
    TRUSTED,
    TRUSTED_CLASSES,
    are_values,
    containers_in,
    from_numpy,
    in_context,
    is_apply,
    is_named_tuple,
    is_stateless_layer,
    is_value,
    objects_in,
    only_holds,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.runtime.checks import original_class

__all__ = ["read_by", "without_a_log_of_errors"]

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
#: Methods that give the tensors of a module, and where it holds them.
REGISTRIES: dict[Any, str] = {nn.Module.parameters: "_parameters", nn.Module.buffers: "_buffers"}
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def read_by(
    module: nn.Module,
    forward: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lookups: frozenset[Any] = frozenset(),
    undecorated: Callable[[Any, Iterable[str]], Any] = lambda forward, names: forward,
    number: str | None = None,
) -> Reads:
    """What a call of ``forward(module, *args, **kwargs)`` reads.

    Args:
        module: it is not changed, and none of its code with a side effect runs.
        forward: the forward of its original class.
        args, kwargs: tensors, plain values, and tuples, lists and dicts of them; a :class:`Slot`, which the call may
            change, for a cache.
        lookups: functions that only look something up. Their results count as read.
        undecorated: gives the forward inside of a library's decorators, for a call with such keywords.
        number: the expression of the number of the module's layer in caches, which are asked for that one alone.

    Raises:
        Refusal: the call does what a region cannot repeat.
    """
    if not isinstance(forward, types.FunctionType):
        raise Refusal(Reason.DECORATED, f"{type(module).__name__}.forward is a {type(forward).__name__}")
    watch = Watch(module, lookups, undecorated)
    reads, original = watch.reads, original_class(module)
    watch.test(same(member(original, "forward", watch.bind), original.forward, watch.bind))
    try:
        with errors_as_refusals(), watch.fake_mode, without_a_log_of_errors():
            args, kwargs = watch.given(args, kwargs)
            watch.number = number if watch.slots else None
            for given in containers_in((*args, *kwargs.values())):
                watch.keep(ARGUMENT, given)
            result = watch.follow(undecorated(forward, kwargs), (module, *args), kwargs)
        watch.check_caches()
        watch.check_lent()
        watch.check_assigned()
        watch.check_result(result)
        for value in objects_in(result):
            if not watch.is_made(value):
                raise Refusal(Reason.READS_STATE, f"it returns a {type(value).__name__} that it has not made")
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


class Watch(FakeRun):
    """One run of a module's forward on fake tensors."""

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with fake tensors. What is done to a cache must not be read, so it counts as made here."""

        def argument(value: Any) -> Any:
            if not isinstance(value, Slot):
                return tree_map_only(Tensor, self.fake, value)
            state = tree_map_only(Tensor, self.fake, value.state)
            made = Slot.stand_in(type(value.cache), type(value.layer), state)
            self.slots.append(made)
            self.made += made.cache, made.layer
            return made.cache

        return tuple(map(argument, args)), {name: argument(value) for name, value in kwargs.items()}

    def follow(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = in_context(function)
        if found is None:
            return super().follow(function, args, kwargs)
        context, inner = found
        with outside(context):
            return self.follow(inner, args, kwargs)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_apply(function):
            return self.differentiable(function, args, kwargs)
        origin = self.origin(function)
        if isinstance(function, functools._lru_cache_wrapper):
            return self.cached(function, origin, args, kwargs)
        if origin is None or isinstance(function, nn.Module | types.MethodType | types.FunctionType):
            return super().call(function, *args, **kwargs)
        if type(function) is functools.partial:
            return self.partial(function, origin, args, kwargs)
        if isinstance(function, torch.jit.ScriptFunction):
            self.test(same(origin, function, self.bind))
            return outside(function, *args, **kwargs)
        called = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(called, types.FunctionType):
            self.test(same(f"type({origin}).__call__", called, self.bind))
            return self.follow(called, (function, *args), kwargs)
        return super().call(function, *args, **kwargs)

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
        if function in (isinstance, type) and len(args) == 2 - (function is type) and type(args[0]) is int:
            self.reads.tests_numbers = True
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
