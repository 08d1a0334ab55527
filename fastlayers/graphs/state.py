"""What a captured graph takes for granted: the state of modules, and a call that the GPU can do alone."""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import random
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._ops import HigherOrderOperator
from torch.nn.modules.batchnorm import _NormBase

from fastlayers.ops.dtensor import handlers, memory_of
from fastlayers.ops.guard import PLAIN, is_dtensor
from fastlayers.ops.modes import QuietMode
from fastlayers.patching.capture.lookups import called_by, package, parts_of
from fastlayers.patching.program.program import storage
from fastlayers.patching.program.tape import communicates, written_arguments
from fastlayers.patching.regions.recording import attentions
from fastlayers.patching.runtime.checks import GLOBAL_HOOKS, HOOKS, original_class

__all__ = ["Counter", "Generators", "State", "UncapturedError", "begun_collectives", "draw", "waits"]

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)

#: Packages whose functions nobody replaces but in torch.nn.functional.
KNOWN = frozenset({"torch", "fastlayers", "builtins"})
#: Lists, dicts and sets that are compared at most.
MOST_CONTAINERS = 10_000
#: What every module has and no forward reads.
UNREAD = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}


class UncapturedError(Exception):
    """A call cannot be captured. The message is the reason, as the report shows it."""


class State:
    """The modules, parameters, buffers, attributes and hooks of a module, as they are now.

    It does not refer to the module itself, so that it does not keep it alive.

    Raises:
        UncapturedError: a graph could not stand for calls of such a module.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        modules = list(module.modules())
        found: dict[int, Any] = {}
        for each in modules:
            found[id(vars(each))] = vars(each)
            for name, value in vars(each).items():  # What may be changed in place: parameters, a configuration.
                if name not in UNREAD:
                    note_containers(value, found)
        kinds = dict.fromkeys(map(type, modules))
        self.functions: dict[types.FunctionType, tuple[Any, ...]] = {}
        self.globals: list[tuple[dict[str, Any], str]] = []
        for kind in dict.fromkeys(map(original_class, modules)):
            self.note_forward(kind)
        self.globals = [*{(id(scope), name): (scope, name) for scope, name in self.globals}.values()]
        self.values = [scope.get(name) for scope, name in self.globals]
        named = [value for value in self.values if isinstance(value, type) and package(value) not in KNOWN]
        classes = dict.fromkeys(cls for kind in (*kinds, *named, Tensor) for cls in kind.__mro__[:-1])
        others = (vars(cls).values() for cls in classes if package(cls) not in KNOWN)
        for value in (*self.values, *map(vars, self.functions), *map(list, others)):
            note_containers(value, found)
        for cls in classes:
            copyreg._slotnames(cls)  # type: ignore[attr-defined]  # The first copy of an object would add them.
        #: What may be changed: containers, the members of classes and of torch.nn.functional, and what DTensors call,
        #: which ``loss_parallel`` changes.
        self.dicts = [*found.values(), *map(vars, classes), vars(F), *handlers()]
        self.copies = [value.copy() for value in self.dicts]
        of_modules = {id(vars(each)) for each in modules}  # They have too many integers.
        #: Numbers with an equal one of another type or sign: 0.0 and -0.0, 1.0 and True.
        self.numbers = [
            (value, key, item)
            for value in self.dicts
            for key, item in (value.items() if hasattr(value, "items") else enumerate(value))
            if isinstance(item, Number) and not isinstance(value, set)
            if (id(value) in found and id(value) not in of_modules if isinstance(item, int) else item.real % 1 == 0)  # type: ignore[attr-defined]
        ]
        self.hooks = [*GLOBAL_HOOKS, *(vars(each)[name] for each in modules for name in HOOKS)]
        self.known_hooks = [*map(dict, self.hooks)]
        self.inner = modules[1:]
        self.kinds = [*map(type, self.inner)]
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        #: Whether torch's tensor parallelism has placed some of the parameters.
        self.is_parallel = any(map(is_dtensor, self.tensors))
        self.refuse(module, modules, device)
        # A batch norm that trains does not read its statistics.
        unread = {id(t) for each in modules if isinstance(each, _NormBase) and each.training for t in each.buffers()}
        #: Tensors without a gradient that a forward may read, and those that it changes: see :meth:`note_written`.
        self.constant = [t for t in self.tensors if not t.requires_grad and id(t) not in unread]
        self.changed: list[Tensor] = []
        self.addresses = self.present_addresses()
        self.trained = [t.requires_grad for t in self.tensors]
        options: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self.guard = TensorGuards(*map(memory_of, self.tensors), **options) if self.tensors else None
        self.flags = GlobalStateGuard()
        self.switches = switches()

    @staticmethod
    def refuse(module: nn.Module, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Raise an UncapturedError if a tensor or a hook of the module is of a kind that no graph is made with."""
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if type(memory_of(t)) not in PLAIN:
                raise UncapturedError(f"{name} is a {type(t).__name__}")
            if t.device != device:
                raise UncapturedError(f"{name} is on {t.device}, the inputs are on {device}")
        for each in modules:
            if not all(is_parallel(hook) for name in HOOKS for hook in vars(each)[name].values()):
                raise UncapturedError(f"a {type(each).__name__} has hooks")
        if any(GLOBAL_HOOKS):
            raise UncapturedError("hooks on all modules")

    def note_forward(self, kind: type[nn.Module]) -> None:
        """Add the functions and methods that the forward of a class calls, and the global variables that they read."""
        pending = [inspect.unwrap(kind.forward)]
        seen = set()  # Of this class: one that inherits a method may have other ones for this to call.
        while pending:
            function = pending.pop()
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            if package(function) in KNOWN:
                named = called_by(function, kind) if package(function) == "torch" else ()
                self.globals += [(scope, name) for scope, name, _ in named if isinstance(scope, dict)]
                continue
            seen.add(function)
            self.functions[function] = parts_of(function)
            scope = function.__globals__
            names, attributes = names_of(function.__code__)
            self.globals += [(scope, name) for name in names]
            self.globals += [(vars(torch), name) for name in attributes if name in vars(torch)]
            pending += [scope.get(name) for name in names]
            pending += [getattr(kind, name, None) for name in attributes]

    def note_written(self, written: set[int]) -> None:
        """Note which buffers a call changed, by the storages that it wrote."""
        self.changed = [t for t in self.constant if storage(memory_of(t)) in written]
        self.constant = [t for t in self.constant if storage(memory_of(t)) not in written]

    def holds(self) -> bool:
        """Whether everything still is as it was, and where it was."""
        return self.is_in_place() and self.is_same()

    def is_same(self) -> bool:
        """Whether everything still is as it was, though parameters may have moved."""
        return self.same_python() and self.same_tensors() and self.same_modes()

    def same_python(self) -> bool:
        """Whether the Python objects are as they were, that the forward of the modules depends on."""
        try:
            same = self.same_contents() and self.same_globals()
        except Exception:  # of a user's __eq__: what cannot be compared is another tensor, array or object
            return False
        return same and self.same_numbers() and self.same_functions() and self.same_hooks()

    def same_contents(self) -> bool:
        return self.dicts == self.copies and [*map(type, self.inner)] == self.kinds

    def same_numbers(self) -> bool:
        return all(value[key] is item or repr(value[key]) == repr(item) for value, key, item in self.numbers)

    def same_globals(self) -> bool:
        return [scope.get(name) for scope, name in self.globals] == self.values

    def same_functions(self) -> bool:
        return all(parts_of(function) == parts for function, parts in self.functions.items())

    def same_hooks(self) -> bool:
        return self.hooks == self.known_hooks

    def same_tensors(self) -> bool:
        same = self.guard is None or self.guard.check(*map(memory_of, self.tensors))
        return same and [t.requires_grad for t in self.tensors] == self.trained

    def same_modes(self) -> bool:
        return self.flags.check() and switches() == self.switches

    def is_in_place(self) -> bool:
        """Whether parameters and buffers are where they were: FSDP2 gathers its own again for a backward."""
        return self.present_addresses() == self.addresses

    def present_addresses(self) -> list[int]:
        return [memory_of(t).data_ptr() for t in self.tensors]


def switches() -> tuple[Any, ...]:
    """What chooses kernels, of which a graph keeps the ones that it captured, and is in no guard of torch."""
    precisions = [torch._C._get_fp32_precision_getter("cuda", name) for name in ("matmul", "conv", "rnn")]
    cudnn = torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
    return attentions(), precisions, cudnn


def is_parallel(hook: Any) -> bool:
    """Whether a hook is torch's, which makes DTensors of arguments and results."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor.")


def note_containers(value: Any, found: dict[int, Any], depth: int = 4) -> None:
    """Add the lists, dicts and sets in a value, those of the attributes of objects among them."""
    if isinstance(value, (nn.Module, Tensor, type, types.FunctionType, types.ModuleType)) or not depth:
        return
    # They have caches of their own, and regions count calls.
    if package(type(value)) in ("fastlayers", "logging", "threading", "torch", "weakref"):
        return
    if isinstance(value, functools.partial):
        value = [value.func, value.args, value.keywords]
    inner = value if isinstance(value, (list, tuple, dict, set)) else getattr(value, "__dict__", None)
    if not isinstance(inner, (list, tuple, dict, set)) or id(inner) in found or len(found) >= MOST_CONTAINERS:
        return
    found[id(inner)] = inner if not isinstance(inner, tuple) else list(inner)
    for item in inner.values() if isinstance(inner, dict) else inner:
        note_containers(item, found, depth - 1)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global variables that code reads, and the names of attributes in it."""
    own, attributes = set[str](), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            own.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, other = names_of(inner)
            own |= more
            attributes |= other
    return frozenset(own), frozenset(attributes)


class Counter(QuietMode):
    """Looks at the operations of torch in a call.

    Attributes:
        count: of those that compute something.
        communicates: whether one of them waits for other processes.
        written: the storages that were written.
        copies: whether a tensor of the CPU is copied: a graph would read the memory of the first one in each replay.
        chances: numbers between 0 and 1 that were drawn on the CPU.
        decided: whether such a number was used otherwise than to find that it is not below 0, as a library does that
            skips layers at random with a probability of 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.communicates = self.copies = self.decided = False
        self.chances: list[Tensor] = []
        self.written: set[int] = set()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            self.count += 1
            return out
        self.communicates |= communicates(func)
        returns = func._schema.returns
        for value in written_arguments(func, args, kwargs):
            tensors = value if isinstance(value, (list, tuple)) else [value]
            self.written.update(storage(t) for t in tensors if isinstance(t, Tensor))
        self.count += not (returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write)
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if isinstance(out, Tensor) and out.is_cuda:
            # Arithmetic reads a tensor of one element on the host.
            least = 0 if func in COPIES else 1
            self.copies |= any(not t.is_cuda and t.dim() >= least for t in given)
        if func is aten.rand.default and not out.is_cuda and out.dim() == 0:
            self.chances.append(out)
        memory = [chance.data_ptr() for chance in self.chances]
        if memory and any(t.dim() == 0 and t.data_ptr() in memory for t in given):
            self.decided |= not (func is aten.detach.default or (func is aten.lt.Scalar and args[1] <= 0))
        return out


def begun_collectives() -> int:
    """How many collectives this process has begun, also while a stream is captured."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    begun = 0
    groups: Any = dist.distributed_c10d._world.pg_map
    for group in groups:
        with suppress(RuntimeError):  # Not all backends count.
            begun += group._get_sequence_number_for_group()
    return begun


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list that receives, at the end, where the host waited for the GPU."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode is a prototype" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class Generators:
    """The states of the random generators of the CPU, as they are now."""

    def __init__(self) -> None:
        self.of_torch = torch.get_rng_state()
        self.others = self.of_others()

    @staticmethod
    def of_others() -> Any:
        numpy = sys.modules.get("numpy")
        of_numpy = () if numpy is None else numpy.random.get_state()
        return random.getstate(), of_numpy and (of_numpy[1].tolist(), of_numpy[2])

    def drew(self, chances: int) -> bool:
        """Whether only so many numbers were drawn since, by ``torch.rand([])``."""
        now = torch.get_rng_state()
        torch.set_rng_state(self.of_torch)
        draw(chances)
        found = torch.get_rng_state()
        torch.set_rng_state(now)
        return torch.equal(found, now) and self.of_others() == self.others


def draw(chances: int) -> None:
    """Draw so many numbers on the CPU, as a replayed call would."""
    for _ in range(chances):
        torch.rand([])
