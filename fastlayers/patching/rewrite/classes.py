"""The class that takes the place of another: undoable, copyable and, in a pickle, its original."""

from __future__ import annotations

import abc
import ast
import copy
import copyreg
import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import nn

from fastlayers.patching.capture.lookups import inside_layer
from fastlayers.patching.capture.rebuild import arguments_source, execute_shown, rebuild
from fastlayers.patching.capture.recording import binder
from fastlayers.patching.capture.syntax import parse
from fastlayers.patching.libraries.adapters import adapters
from fastlayers.patching.reasons import PatchError, Reason, Refusal
from fastlayers.patching.rules import idle_tests
from fastlayers.patching.rules.base import ModuleRule
from fastlayers.patching.runtime.checks import IdleTest, must_be_stock, original_class, original_of

__all__ = [
    "Generated",
    "absorbed_by",
    "become",
    "below_region",
    "called_by_class",
    "check_subclassing",
    "fused_or_stock",
    "generated_class",
    "is_folded",
    "is_fused",
    "is_patched",
    "is_sharded",
    "shown_name",
    "steps_aside",
    "swap_class",
    "without_sharding",
    "working",
]

#: The functions with which pickle rebuilds a plain object, in newer and in older protocols.
NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]
RECONSTRUCT: Any = copyreg._reconstructor  # type: ignore[attr-defined]


def is_patched(module: nn.Module) -> bool:
    return "__fastlayers_original__" in type(module).__dict__


def is_fused(module: nn.Module) -> bool:
    """Whether something is fused in the forward of a module, which may also be patched to run as a region alone."""
    return is_patched(module) and bool(getattr(type(module), "__fastlayers_rules__", ()))


class Generated(dict[Any, Any]):
    """Classes and functions that were generated for a plan, by all that they depend on.

    It also knows those of other plans that are in use: equal models that are patched one by one have equal classes, as
    torch.func.stack_module_state requires, and share what their regions recorded.
    """

    in_use: ClassVar[WeakValueDictionary[Any, Any]] = WeakValueDictionary()
    functions: ClassVar[dict[Any, Any]] = {}

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.in_use or key in self.functions

    def __missing__(self, key: Any) -> Any:
        return self.functions[key] if key in self.functions else self.in_use[key]

    def __setitem__(self, key: Any, made: Any) -> None:
        super().__setitem__(key, made)
        if isinstance(made, type):
            self.in_use[key] = made
        elif made is not None:
            self.functions[key] = made

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def absorbed_by(classes: dict[nn.Module, type[nn.Module]]) -> dict[nn.Module, nn.Module]:
    """Children whose work the rewritten forward of another module does without calling them, with that module.

    Args:
        classes: modules, and the classes that they have, or will have.
    """
    uses = Counter(child for module in classes for child in module._modules.values())
    found: dict[nn.Module, nn.Module] = {}
    for module, cls in classes.items():
        for path in getattr(cls, "__fastlayers_absorbs__", ()):
            child = module.get_submodule(path)
            if uses[child] == 1:
                found[child] = module
    return found


def working(model: nn.Module) -> list[nn.Module]:
    """The modules in whose forward something is fused, without those that :func:`absorbed_by` finds."""
    with without_sharding(model.modules()):
        absorbed = absorbed_by({module: type(module) for module in model.modules()})
        return [module for module in model.modules() if is_fused(module) and module not in absorbed]


def is_folded(module: nn.Module) -> bool:
    return "__fastlayers_unfolded__" in type(module).__dict__


def below_region(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward runs where the region of a class does not; the class itself if it has no region."""
    region: Any = vars(cls).get("__fastlayers_region__")
    return cls if region is None else region.present  # type: ignore[no-any-return]


def become(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Give a module another class: its own, or one that was generated for it.

    Bound forwards on the instance change too: the hooks of accelerate keep one, to call it and to restore it.

    Returns:
        False if a wrapper on the instance calls the present forward; nothing is changed then.
    """
    present = type(module)
    kinds: Any = present.__mro__[: present.__mro__.index(original_class(module)) + 1]
    forwards = [kind.forward for kind in kinds]
    bound = [
        name
        for name, value in vars(module).items()
        if isinstance(value, types.MethodType) and value.__self__ is module and value.__func__ in forwards
    ]
    if "forward" not in bound and any(function in forwards for function in wrapped(vars(module).get("forward"))):
        return False
    for name in bound:
        vars(module)[name] = types.MethodType(cls.forward, module)
    object.__setattr__(module, "__class__", cls)  # Not by a __setattr__ of the user's.
    return True


def is_sharded(cls: type[nn.Module]) -> bool:
    """Whether FSDP2 (``fully_shard`` or ``replicate``) made a class. Its second base is the class that FSDP2 found."""
    return len(cls.__bases__) == 2 and any(base.__name__ == "FSDPModule" for base in cls.__bases__[0].__mro__)


def sharded_class(sharded: type[nn.Module], inside: type[nn.Module]) -> type[nn.Module]:
    """The class that FSDP2 makes, or would make, of ``inside`` in the way in which it made ``sharded``."""
    wrapper, before = sharded.__bases__
    for cls in (sharded, *inside.__subclasses__()):
        if cls.__bases__ == (wrapper, inside):
            return cls
    members = {name: vars(sharded)[name] for name in ("__deepcopy__", "__module__")}
    return type(sharded.__name__.removesuffix(before.__name__) + inside.__name__, (wrapper, inside), members)


@contextmanager
def without_sharding(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules have the classes that FSDP2 found, and afterwards FSDP2's classes of those that they have by then.

    FSDP2 shards a module by a class that it derives from the module's own. Everything else about it, the parameters and
    the hooks, does not depend on which class that was.
    """
    sharded = [(module, type(module)) for module in modules if is_sharded(type(module))]
    try:
        for module, cls in sharded:
            object.__setattr__(module, "__class__", cls.__bases__[1])
        yield
    finally:
        for module, cls in sharded:
            if not is_sharded(type(module)):
                object.__setattr__(module, "__class__", sharded_class(cls, type(module)))


def wrapped(function: Any) -> Iterator[Any]:
    """A function and the functions inside of it, as far as ``__wrapped__`` shows them."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):  # It calls this function, whatever its attributes say.
            function = function.func
        yield function
        function = getattr(function, "__wrapped__", None)


def called_by_class(module: nn.Module) -> bool:
    """Whether a call of a module runs the forward of its class. Hooks may leave the same one on the instance."""
    present: Any = module.forward
    return getattr(present, "__self__", None) is module and present.__func__ is type(module).forward


def check_subclassing(original: type[nn.Module], harmless: tuple[type, ...] = ()) -> None:
    """Raise if creating a subclass runs code of the class: a registry would list the generated class."""
    if type(original) not in (type, abc.ABCMeta):
        raise Refusal(Reason.CLASS_HOOKS, f"metaclass {type(original).__name__}")
    for cls in original.__mro__:
        if "__init_subclass__" not in cls.__dict__ or cls.__module__ in ("builtins", "typing") or cls in harmless:
            continue
        if not any(adapter.may_subclass(cls) for adapter in adapters()):
            raise Refusal(Reason.CLASS_HOOKS, f"{cls.__name__}.__init_subclass__")


def swap_class(rule: ModuleRule) -> type[nn.Module]:
    """The class with which a module rule replaces a layer: a subclass of the fused class."""
    forward = swapped_forward(rule.fused, rule.layer, idle_tests([rule.name]))  # type: ignore[arg-type]
    members = {"forward": forward, "__fastlayers_rules__": ((rule.name, 1),)}
    return generated_class(rule.fused.__name__, rule.fused, members, original=rule.layer)


def steps_aside(forward: Any, idle: tuple[IdleTest, ...], bind: Callable[[object, str], str]) -> str:
    """Source of the test whether a generated forward leaves a call to the one in whose place it is: in a trace or a
    mode, and where it gains nothing, by tests of the first argument."""
    # First: a mode would see the others look at the input.
    tests = [f"{bind(must_be_stock, 'fastlayers_must_be_stock')}()"]
    first = list(inspect.signature(forward).parameters.values())[1:2]
    if first and first[0].kind in (first[0].POSITIONAL_ONLY, first[0].POSITIONAL_OR_KEYWORD):
        tests += (f"{bind(test, f'fastlayers_{test.__name__}')}({first[0].name})" for test in idle)
    return " or ".join(tests)


@functools.lru_cache(maxsize=128)
def swapped_forward(kind: Any, layer: Any, idle: tuple[IdleTest, ...]) -> Any:
    """The forward of a fused class, but that of the layer if it is replaced, or something that it calls, for calls that
    are ``idle``, in a trace or a mode, and for a layer that is not patched any more, if a wrapper still calls this."""
    fused = kind.forward
    bound: dict[str, Any] = {}
    bind = binder(bound)
    tests = [f"not ({steps_aside(fused, idle, bind)})", f"isinstance(self, {bind(kind, kind.__name__)})"]
    unchanged = " and ".join([*tests, *inside_layer(layer, "self", bind)])
    try:
        tree, stock = parse(fused), f"{bind(layer, layer.__name__)}.forward"
        arguments = ", ".join(arguments_source(inspect.signature(fused).parameters.values()))
        tree.body[:0] = ast.parse(f"if not ({unchanged}):\n    return {stock}({arguments})").body
        return rebuild(fused, tree, bound)[0]
    except Refusal:  # The class of a user's rule may call super().
        return fused_or_stock(fused, unchanged, layer, bound)


def fused_or_stock(fused: Any, unchanged: str, original: type[nn.Module], bound: dict[str, Any]) -> Any:
    """A forward that calls ``fused`` if a test holds, and that of the original class if not."""
    scope = {**bound, "_fused": fused, "_original": original}
    chosen = f"(_fused if {unchanged} else _original.forward)"
    source = f"def forward(self, *args, **kwargs):\n    return {chosen}(self, *args, **kwargs)\n"
    execute_shown(fused.__qualname__, source, scope)
    return functools.update_wrapper(scope["forward"], fused)


def shown_name(cls: type[nn.Module]) -> str:
    """The name of a generated class in a report and in ``print(model)``."""
    return cls.__fastlayers_name__  # type: ignore[attr-defined, no-any-return]


class OwnMethod:
    """A method that a wrapper does not get through its ``__getattr__``.

    Wrappers such as peft's look attributes up in their model. With this method, a copy of the wrapper would be a copy
    of its model alone.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:
            return self.function
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != copy.__name__:
            if frame.f_code.co_name == "__getattr__":
                raise AttributeError(self.function.__name__)
            frame = frame.f_back
        return types.MethodType(self.function, owner)


class Unregistered(nn.Module):
    """A base that comes before the one of a generated class, so that this one does not learn of its subclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def generated_class(
    name: str, base: type[nn.Module], members: dict[str, Any], *, original: Any = None, unseen: bool = False
) -> type[nn.Module]:
    """A subclass that is undoable, copyable, and pickled as its original, so that a file loads without fastlayers.

    The class takes the name and the module of its original, since others look classes up by them: initialisation of
    weights, lists of blocks that FSDP and accelerate must not split, leaf modules of torch.fx, the shifted labels of a
    Trainer. Only ``repr`` shows the name of the generated class.

    Args:
        name: of the generated class.
        base: the class that it is derived from.
        members: its attributes, such as its forward, and ``__fastlayers_source__`` if that was written.
        original: the class of an unpatched module; by default that of ``base``, which may be a generated class itself.
        unseen: whether ``__init_subclass__`` of the base does not run.
    """
    original = original or original_of(base)

    def represent(self: nn.Module) -> str:
        text = original.__repr__(self)
        return name + text.removeprefix(original.__name__) if text.startswith(original.__name__) else text

    def prepare_scriptable(self: nn.Module) -> Any:
        raise PatchError(
            f"{name} is a patched module, which torch.jit.script cannot compile: "
            "call fastlayers.unpatch_model(model) before it; torch.jit.trace and torch.export take patched models"
        )

    members = {
        "__doc__": base.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__repr__": represent,
        "__prepare_scriptable__": prepare_scriptable,
        "__fastlayers_original__": original,
        "__fastlayers_name__": name,
        "__fastlayers_forward__": members.get("forward", base.forward),
        **members,
    }
    generated: type[nn.Module] = type(original.__name__, (Unregistered, base) if unseen else (base,), members)
    copy_and_pickle(generated, original)
    return generated


def copy_and_pickle(generated: type[nn.Module], original: type[nn.Module]) -> None:
    """Let modules of a generated class be copied as such, and pickled as those of its original."""

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        reduced = super(generated, self).__reduce_ex__(protocol)  # type: ignore[misc]
        if isinstance(reduced, str) or type(self) is not generated:
            return reduced
        function, args, *rest = reduced
        if function is NEW_OBJECT and args == (generated,):
            # pickle requires the object's own class there; this is the same call by another name.
            function, args = RECONSTRUCT, (original, object, None)
        args = tuple(original if arg is generated else arg for arg in args)
        return (original if function is generated else function, args, *rest)

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        theirs: Callable[..., Any] | None = getattr(super(generated, self), "__deepcopy__", None)  # type: ignore[misc]
        if theirs is not None:
            copied = theirs(memo)
            if type(copied) is original:
                copied.__class__ = type(self)
            return copied
        if type(self) is not generated:  # A parametrized class: torch copies it in this way and refuses to reduce it.
            copied = type(self).__new__(type(self))
            memo[id(self)] = copied
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
            return copied
        reduced: Any = super(generated, self).__reduce_ex__(4)  # type: ignore[misc]
        function, args, state = reduced[:3]
        copied = function(*copy.deepcopy(args, memo))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    generated.__reduce_ex__, generated.__deepcopy__ = reduce_ex, OwnMethod(deepcopy)  # type: ignore
