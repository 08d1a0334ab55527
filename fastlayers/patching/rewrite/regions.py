"""Regions: a whole forward, with the children that it calls, as one node of autograd made of straight-line code.

Most of the host's time in a step is spent on deciding what to do: calls of modules, checks of shapes and modes, one
autograd node for each operation. All of that has the same outcome in every step. A region decides once: at the second
call with a signature :mod:`fastlayers.patching.capture.reads` finds what Python decides by, and
:mod:`fastlayers.patching.rewrite.tape` what is computed, forward and backward. Later calls test one guard and run these
operations. Where the guard fails, the forward runs as it did: rewritten, with its fused ops.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from fastlayers import backends
from fastlayers.ops import dispatch
from fastlayers.ops.autocast import Given
from fastlayers.patching.capture.reads import load_fake_tensors, read_by
from fastlayers.patching.capture.rebuild import arguments_source
from fastlayers.patching.libraries.adapters import adapters, decorated, takes_former_names, undecorated
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.classes import seal
from fastlayers.patching.rewrite.executors import (
    KEYS,
    Executor,
    Facts,
    NativeExecutor,
    PythonExecutor,
    excluding,
    executor_class,
    items,
)
from fastlayers.patching.rewrite.generate import signature_source
from fastlayers.patching.rewrite.readers import Reader
from fastlayers.patching.rewrite.results import OpaqueError, Place, Taken, put_together, take_apart
from fastlayers.patching.rewrite.tape import Tape, plain_name, storage
from fastlayers.patching.runtime.checks import check_defaults, original_class

__all__ = [
    "FEW_MODULES",
    "NONE",
    "Flat",
    "Region",
    "attentions",
    "autocast_as",
    "autocast_state",
    "drawing",
    "flatten",
    "no_regions",
    "random_state",
    "region_class",
    "size_of",
    "unflatten",
]

#: Calls of one module with the same signature, of which the last is recorded: what is seen once may not come again, and
#: a recording takes the time of some 100 calls.
CALLS = 2
#: Recordings that one module may ask for. More mean that shapes or numbers keep changing.
MAX_RECORDINGS = 32
#: Calls that are remembered as seen.
MAX_SEEN = 4096
#: Operations in the forward of a region, where views do not count, and a kernel of ours stands for two of torch's. With
#: tiny tensors on a CPU the time of forward and backward in Python was 1.14x with 3 operations, 1.08x with 5, .92x with
#: 10 and .90x with 12; that of inference 1.17x, 1.15x, .56x and .79x. In C++ it was .94x with 2 operations, .80x with 3
#: and .64x with 5; that of inference 1.07x, .87x and .76x. But between other work, which displaces it from the caches,
#: that of an MLP of 3 operations took 24 us longer than they do, that of one of 5 13 us: the second number is for calls
#: without a backward.
LEAST = {PythonExecutor: (10, 10), NativeExecutor: (3, 6)}
#: Modules that hold others and have no forward.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: What is larger may consist of alike blocks,
FEW_MODULES = 40
#: and has so many operations at most, forward and backward: the time of the search for kernels grows with their square.
#: 6 blocks of a Swin-T at once, 873 operations, took 5.6 s where one block took .5 s, and its code serves all of them.
MOST = 600
#: The share of the largest element, and of each, that two runs may differ by at most,
ALIKE = 0.05
#: and the roundings of the largest gradient.
NOISE = 4
#: The norm of what a few elements may differ by, as a share of all: of a batch norm of 16 bits, its residual and a ReLU
#: one element of some 2000 has the other sign, and its gradient another 3 % in the norm.
FEW = 0.1
#: Refused calls, without one region that was made, after which a class is not tried any more: a test costs 8 us.
MAX_REFUSALS = 3

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_tracing: Callable[[], bool] = torch._C._is_tracing
_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


class _Thread(threading.local):
    """Whether the forwards of this thread run op by op: inside of a recording, or since someone asked for it."""

    op_by_op = False


_thread = _Thread()
_lock = threading.RLock()
_regions: WeakSet[Region] = WeakSet()


def forget_all() -> None:
    for region in list(_regions):
        region.forget()


backends.on_change(forget_all)  # The recorded kernels are those of the backend.


BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
#: How the arguments of a parameter are spelled, one by one.
EACH: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*{}", inspect.Parameter.VAR_KEYWORD: "*{}.values()"}


#: What stands for a tensor in the pattern of a call.
TENSOR = Tensor
#: What stands for None, which would say that there is no pattern.
NONE = (type(None),)
#: Types of arguments that patterns contain besides tensors and values.
NESTED = frozenset({tuple, list, dict, type(None)})
#: Types of arguments that are compared by value.
LEAVES = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.memory_format})


# -- one signature ----------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What a call with one signature does.

    Attributes:
        tensors: the guard on the given tensors and on those that the forward reads.
        state: the guard on the modes and flags of torch.
        autocast: what is cast, and to which dtype, by the type of a device.
        attentions: which attentions torch may choose; None if it chooses none.
        refusal: why such calls run op by op; None if there is code for them.
        order: brings the inputs into the order of the code, those that need a gradient first.
        facts: what the code has to know about a call.
        code: what runs such calls.
        parts: the result, taken apart, of the inputs and the results of the code; None if it is the only one of these.
        constants: further inputs, the same in every call.
        changed: the places of buffers that the code changes.
        draws: whether the code draws random numbers.
        apart: modules by their id that run op by op, since some result of theirs got no gradient: the recorded backward
            takes all of them.
    """

    tensors: Any
    state: Any
    autocast: Autocast
    attentions: tuple[bool, ...] | None = None
    refusal: Refusal | None = None
    order: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = tuple
    facts: Facts = field(default_factory=Facts)
    code: Executor | None = None
    parts: Any = None
    constants: tuple[Tensor, ...] = ()
    changed: tuple[int, ...] = ()
    draws: bool = False
    apart: set[int] = field(default_factory=set)


#: For each type of device whether operations cast, and to which dtype.
Autocast: TypeAlias = Mapping[str, tuple[bool, torch.dtype | None]]
NO_AUTOCAST: Autocast = {"cpu": (False, None), "cuda": (False, None)}


def autocast_state() -> Autocast:
    return {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in NO_AUTOCAST}


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Cast as this state says, whatever is cast outside."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in state.items():
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


def attentions() -> tuple[bool, ...]:
    """Which attentions torch may choose."""
    return (
        torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )  # fmt: skip


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """A nested value with a marker in place of each tensor, all of them hashable; None if it holds anything else."""
    kind = type(value)
    if kind in dispatch.PLAIN:
        tensors.append(value)
        return TENSOR
    if kind is tuple or kind is list:
        parts = []
        for item in value:
            part = flatten(item, tensors) if item is not None else NONE
            if part is None:
                return None
            parts.append(part)
        return (kind, *parts)
    if kind is dict:
        part = flatten(tuple(value.values()), tensors)
        return None if part is None else (dict, tuple(value), part)
    return (kind, value) if kind in LEAVES else None


class Repeat(NamedTuple):
    """What stands for a tensor that is in a call before, by its number."""

    number: int


def without_repeats(pattern: Any, given: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The pattern of a call, and its tensors, each once: ``attention(x, x, x)`` has one tensor."""
    numbers: dict[int, int] = {}
    every, once = iter(given), list[Tensor]()

    def walk(part: Any) -> Any:
        if part is TENSOR:
            t = next(every)
            if id(t) in numbers:
                return Repeat(numbers[id(t)])
            numbers[id(t)] = len(once)
            once.append(t)
            return TENSOR
        return tuple(map(walk, part)) if type(part) is tuple and part is not NONE else part

    return walk(pattern), once


def size_of(module: nn.Module) -> int:
    """The number of modules in it, and itself, without those that only hold others: each layer with an adapter of peft
    has six."""
    return sum(not isinstance(each, CONTAINERS) for each in module.modules())


class Flat:
    """The tensors of a call, in their order, for :func:`unflatten`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.taken = tensors, 0


def unflatten(pattern: Any, flat: Flat) -> Any:
    """The value of which :func:`flatten` made a pattern, with other tensors."""
    if pattern is TENSOR:
        flat.taken += 1
        return flat.tensors[flat.taken - 1]
    if type(pattern) is Repeat:
        return flat.tensors[pattern.number]
    if pattern is NONE:
        return None
    kind, *parts = pattern
    if kind is dict:
        return dict(zip(parts[0], unflatten(parts[1], flat), strict=True))
    if kind in (tuple, list):
        return kind(unflatten(part, flat) for part in parts)
    return parts[0]


class Again(NamedTuple):
    """What the derivative of a backward needs to run the forward again."""

    entry: Entry
    region: Region
    module: ReferenceType[nn.Module]  # A module that keeps its result would be kept by it.
    reader: Reader
    pattern: Any
    random: list[Tensor] | None

    def differentiate(self, given: Given, grads: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of a region's inputs with a graph of their own: its forward runs again, op by op."""
        ordered: Any = given.unchanged()
        places = self.entry.order(range(len(ordered)))  # type: ignore[arg-type]
        inputs = [t for _, t in sorted(zip(places, ordered, strict=True), key=operator.itemgetter(0))]
        del inputs[len(inputs) - len(self.entry.constants) :]
        module = self.module()
        if module is None:
            raise RuntimeError("to differentiate the backward of a patched forward takes its module, which was deleted")
        if any(dy is None for dy in grads):
            self.entry.apart.add(id(module))
        wants_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Of aliases: an argument may itself depend on another one. What is written is a copy.
            aliases = [t.clone() if i in self.entry.changed else t.view_as(t) for i, t in enumerate(inputs)]
            count = len(inputs) - len(self.reader.places)
            flat = Flat(aliases[:count])
            args, kwargs = (unflatten(part, flat) for part in self.pattern)
            with (
                autocast_as(self.entry.autocast),  # The backward may be outside of it.
                drawing(self.random, inputs),
                self.reader.replaced(module, aliases[count:]),
                no_regions(),
            ):
                out = self.region.present.forward(module, *args, **(kwargs or {}))
        tensors = Taken(aliases)
        take_apart(out, tensors)
        every = [tensors[len(aliases) + i] for i in self.entry.facts.active]
        results = [t for t, dy in zip(every, grads, strict=True) if dy is not None]
        ordered = self.entry.order((*aliases, *self.entry.constants))
        wanted = [t for t, needed in zip(ordered, needs, strict=False) if needed]
        dys = [dy for dy in grads if dy is not None]
        gradients = torch.autograd.grad(results, wanted, dys, create_graph=wants_graph, allow_unused=True)
        found = iter(gradients)
        return [next(found) if needed else None for needed in needs]


@contextmanager
def no_regions() -> Iterator[None]:
    """Let forwards run op by op, in this thread."""
    before, _thread.op_by_op = _thread.op_by_op, True
    try:
        yield
    finally:
        _thread.op_by_op = before


# -- the region -------------------------------------------------------------------------------------------------------


class Region:
    """The regions of the modules of one class, by what they read and by the signature of the call.

    Args:
        present: the class whose forward runs where no region does.
        infers_only: whether only calls without grad mode run as regions.
    """

    def __init__(self, present: type[nn.Module], infers_only: bool = False) -> None:
        self.present: Any = present
        self.infers_only = infers_only
        self.readers: list[Reader] = []
        self.entries: dict[Any, list[Entry]] = {}
        #: Calls that no region can be made for, by their pattern.
        self.refused: dict[Any, Refusal] = {}
        #: Types of arguments that there is no pattern for, such as a cache of keys and values.
        self.strange: set[type] = set()
        #: How often each module was called with a signature without an entry.
        self.seen: Counter[Any] = Counter()
        #: How many recordings a module has asked for.
        self.asked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        #: Whether calls without and with grad mode run op by op, since no region could be made for the first ones.
        self.off = [False, infers_only]
        self._failures = [0, 0]
        _regions.add(self)

    def forget(self) -> None:
        self.readers.clear()
        self.entries.clear()
        self.refused.clear()
        self.seen.clear()
        self.asked.clear()
        self.off[:] = False, self.infers_only
        self._failures[:] = 0, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            _thread.op_by_op
            or dispatch.needs_operations()
            or _function_modes()
            or _transforms_active()
            or forward_ad._current_level >= 0
            or _is_tracing()
        ):
            return self.present.forward(module, *args, **kwargs)
        given: list[Tensor] = []
        pattern = flatten(args, given), flatten(kwargs, given) if kwargs else NONE
        if None in pattern or not given:
            self.strange |= {*map(type, (*args, *kwargs.values()))}.difference(LEAVES, dispatch.PLAIN, NESTED)
            self.failed()
            return self.present.forward(module, *args, **kwargs)
        if len(given) > 1 and len({*map(id, given)}) < len(given):
            pattern, given = without_repeats(pattern, given)
        shape = given[0].shape
        try:
            for reader in self.readers:
                try:
                    found = reader.read(module)
                except (AttributeError, KeyError, IndexError):
                    continue
                if found is None:
                    return self.present.forward(module, *args, **kwargs)
                values, tensors = found
                for entry in self.entries.get((reader, values, pattern, shape), ()):
                    if (
                        entry.tensors.check(*given, *tensors)
                        and entry.state.check()
                        and entry.attentions in (None, attentions())
                    ):
                        if entry.apart and id(module) in entry.apart:
                            return self.present.forward(module, *args, **kwargs)
                        if entry.refusal is not None:
                            self.failed()
                            return self.present.forward(module, *args, **kwargs)
                        return self.run(entry, module, reader, (args, kwargs), pattern, (*given, *tensors), None)
        except TypeError:  # what was read cannot be compared any more
            return self.present.forward(module, *args, **kwargs)
        if not self.comes_again(module, (pattern, shape)):
            return self.present.forward(module, *args, **kwargs)
        return self.first(module, args, kwargs, given, pattern)

    def comes_again(self, module: nn.Module, key: Any) -> bool:
        """Whether a call without an entry is to be recorded; it counts as seen."""
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()
        seen = id(module), key
        self.seen[seen] += 1
        # A checkpoint compares what a forward keeps with what the same forward keeps when it is computed again.
        enough = self.seen[seen] >= CALLS or _saved_tensors_hooks(True) is not None
        return enough and self.asked.get(module, 0) < MAX_RECORDINGS

    def run(
        self,
        entry: Entry,
        module: nn.Module,
        reader: Reader,
        arguments: tuple[Any, ...],
        pattern: Any,
        inputs: tuple[Tensor, ...],
        first: Any,
    ) -> Any:
        """The result of a call. ``first`` are the results and what is kept of a call that was just recorded."""
        ordered, code = entry.order((*inputs, *entry.constants)), entry.code
        assert code is not None
        if entry.facts.wanted:
            random = random_state(inputs) if entry.draws else None
            if first is not None:
                *first, random = first
            results = code.record(Again(entry, self, ref(module), reader, pattern, random), ordered, first)
        else:
            results = code.call(ordered) if first is None else first[0]
        return results[0] if entry.parts is None else put_together(entry.parts, (*inputs, *results), arguments)

    def failed(self) -> None:
        """Note that no region could be made for a call."""
        grads = torch.is_grad_enabled()
        self._failures[grads] += 1
        made = any(entry.refusal is None for entries in self.entries.values() for entry in entries)
        self.off[grads] = (self._failures[grads] >= MAX_REFUSALS and not made) or (grads and self.infers_only)

    # -- the first call of a signature -----------------------------------------------------------------------------

    def first(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], pattern: Any
    ) -> Any:
        """Record a call, and return its result."""
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return self.present.forward(module, *args, **kwargs)
        # One thread at a time. To wait for it could be to wait for oneself: it needs the thread of autograd, which a
        # checkpoint makes run a forward.
        if not _lock.acquire(blocking=False):
            return self.present.forward(module, *args, **kwargs)
        try:
            with no_regions(), saved_tensors_hooks(dispatch.kept_as_is, dispatch.kept_as_is):
                found = self.prepared(module, args, kwargs, given, pattern)
        finally:
            _lock.release()
        if found is None:  # Smaller regions inside of this one may apply.
            self.failed()
            return self.present.forward(module, *args, **kwargs)
        entry, reader, inputs, first = found
        return self.run(entry, module, reader, (args, kwargs), pattern, inputs, first)

    def prepared(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], pattern: Any
    ) -> tuple[Entry, Reader, tuple[Tensor, ...], Any] | None:
        """A new entry for such calls, and the outcome of this one; None if there can be none."""
        if pattern in self.refused:
            return None
        self.asked[module] = self.asked.get(module, 0) + 1
        try:
            lookups = frozenset[Any]().union(*(adapter.lookups() for adapter in adapters()))
            reads = read_by(module, original_class(module).forward, args, kwargs, lookups, undecorated)
            reader = Reader(reads, module)
            found = reader.read(module)
        except KeyError:
            self.refused[pattern] = Refusal(Reason.UNKNOWN_CALL, "a function of torch that was replaced")
            return None
        except Refusal as refusal:
            self.refused[pattern] = remembered(refusal)
            return None
        reader = next((known for known in self.readers if known.key == reader.key), reader)
        if found is None:
            return None
        values, tensors = found
        entries = self.entries.setdefault((reader, values, pattern, given[0].shape), [])
        if reader not in self.readers:
            self.readers.append(reader)
        inputs = (*given, *tensors)
        guard = TensorGuards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        entry, outcome = Entry(guard, GlobalStateGuard(), autocast_state()), None
        try:
            outcome = self.record(entry, module, pattern, given, tensors, reader.folds)
        except Refusal as refusal:
            entry.refusal = remembered(refusal)
        entries.append(entry)  # Complete: another thread may run it from now on.
        return None if outcome is None else (entry, reader, inputs, outcome)

    def record(
        self,
        entry: Entry,
        module: nn.Module,
        pattern: Any,
        given: list[Tensor],
        tensors: tuple[Tensor, ...],
        folds: int,
    ) -> tuple[Any, ...]:
        """Complete an entry from one run; returns the results, what is kept, and the random state before. ``folds`` is
        the number of folded norms, which are operations of torch, too."""
        real = (*given, *tensors)
        if not all(type(t) in dispatch.PLAIN and t.device.type in ("cpu", "cuda") for t in real):
            raise Refusal(Reason.READS_STATE, "a tensor of another type, or on another device")
        if any(t._backward_hooks for t in tensors):  # The gradients of a recording are none.
            raise Refusal(Reason.READS_STATE, "a parameter with a hook")
        state = [t for t in tensors if not t.requires_grad]
        random, before = random_state(real), [t.clone() for t in state]
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # A cast that was made before would be a tensor from outside.
        try:
            recorded, grads, gradients, (plain, *generated), rounding = self.recorded(
                entry, module, pattern, real, len(given), folds
            )
            inputs = (*real, *entry.constants)
            changed = {id(t) for t, old in zip(state, before, strict=True) if not torch.equal(t, old)}
            written = [entry.order(range(len(inputs)))[i] for i in entry.facts.written]  # type: ignore[arg-type]
            entry.changed = tuple(i for i, t in enumerate(real) if id(t) in changed or i in written)
            entry.draws = any(not torch.equal(a, b) for a, b in zip(random, random_state(real), strict=True))

            def agrees(code: Executor) -> tuple[Any, ...] | None:
                """The results and what is kept of this code, run from where it began; None if it gives others."""
                with torch.no_grad(), excluding(KEYS):
                    for t, old in zip(state, before, strict=True):
                        if id(t) in changed:
                            t.copy_(old)
                    restore_random_state(random, real)
                    results, kept = code.forward(*entry.order(inputs))
                    found = in_backward(partial(code.backward, grads, list(kept)), grads[0].device) if grads else ()
                same = agree(results, recorded, rounding)
                same &= agree(found, gradients if grads else (), rounding, grads, kinks=code is not plain)
                return (results, kept) if same else None

            # A kernel that the tape cannot see would be missing. Generated kernels are loaded here, which a capture
            # could not do.
            entry.code, run = plain, agrees(plain)
            if run is not None and generated:
                run = None
                with suppress(Exception):
                    run = agrees(*generated)
                if run is not None:
                    (entry.code,) = generated
                elif any([*child.children()] for child in module.children()):
                    raise Refusal(Reason.TRACE_FAILED, "its generated kernels give something else")
                else:
                    run = agrees(plain)
            if run is None:
                raise Refusal(Reason.UNKNOWN_CALL, "a kernel that is no operation of torch")
            # Results and what is kept are of one run: a backward may ask where a result is the largest of these.
            return *run, random if entry.draws else None
        except Exception as error:
            with torch.no_grad():
                for t, old in zip(state, before, strict=True):
                    if not torch.equal(t, old):
                        t.copy_(old)
            restore_random_state(random, real)
            if isinstance(error, Refusal):
                raise
            raise Refusal(Reason.TRACE_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
        finally:
            torch.set_autocast_cache_enabled(cached)

    def recorded(
        self, entry: Entry, module: nn.Module, pattern: Any, real: tuple[Tensor, ...], count: int, folds: int
    ) -> tuple[Any, ...]:
        """The results, and gradients of results and of inputs, of a run that gives the entry its facts. The last items
        are the code as it was recorded and, if there are any, with generated kernels, and the largest rounding error of
        a dtype that it computes in."""
        records = torch.is_grad_enabled()
        with torch.enable_grad():
            aliases = [t.detach().requires_grad_(t.requires_grad) for t in real[:count]]
        inputs = (*aliases, *real[count:])
        wanted = [i for i, t in enumerate(inputs) if records and t.requires_grad]
        places = [*wanted, *(i for i in range(len(inputs)) if i not in wanted)]
        tape = Tape([inputs[i] for i in places], [t for t in real[count:] if not t.requires_grad])
        if len(set(tape.inputs)) < len(tape.inputs):
            raise Refusal(Reason.READS_STATE, "two inputs are one tensor")

        def kernel_call(kernel: Callable[..., Any], *call: Any) -> Any:
            return tape.kernel(kernel, *call) if _get_current_dispatch_mode() is tape else kernel(*call)

        flat = Flat(aliases)
        args, kwargs = (unflatten(part, flat) for part in pattern)
        generates = backends.generates_kernels(inputs[0].device)
        grads: tuple[Tensor, ...] = ()
        gradients: tuple[Tensor | None, ...] = ()
        dys: list[str] = []
        with dispatch.observed(kernel_call), tape:
            out = self.present.forward(module, *args, **(kwargs or {}))
            taken = Taken(inputs, (args, kwargs))
            try:
                parts = take_apart(out, taken)
            except OpaqueError as error:
                raise Refusal(Reason.READS_STATE, str(error)) from None
            if taken.lazy and records:  # Their source would be a result without a gradient.
                raise Refusal(Reason.LOGITS_USED, "computed when somebody uses them")
            results = taken[len(inputs) :]
            if generates:
                from fastlayers.patching.rewrite.layouts import in_rows  # needs Triton

                viewed = {number - len(inputs) for number, _ in taken.views}
                results = [t if i in viewed else in_rows(tape, t) for i, t in enumerate(results)]
            split = len(tape.operations)
            self.check_results(results, (*inputs, *tape.constants))
            tape.check_read(results)
            active = [i for i, t in enumerate(results) if records and t.requires_grad]
            if active:
                with _disable_current_modes():
                    grads = tuple(some_gradient(results[i]) for i in active)
                dys = [tape.protect(dy, f"g{i}") for i, dy in zip(active, grads, strict=True)]
                # A backward has the dtypes of its forward; it runs outside of the context.
                with autocast_as(NO_AUTOCAST):
                    gradients = torch.autograd.grad(
                        [results[i] for i in active], [inputs[i] for i in wanted], grads, allow_unused=True
                    )
        execute = executor_class()
        if tape.size(split) + folds < LEAST[execute][not active]:
            raise Refusal(Reason.NOTHING_TO_FUSE, "too small for a region")
        if len(tape.operations) > MOST and size_of(module) > FEW_MODULES:
            raise Refusal(Reason.NOTHING_TO_FUSE, "too large for a region")
        names = [tape.name(t) for t in results]
        program = tape.program(split, names, dys, [None if t is None else tape.name(t) for t in gradients])
        attends = any("attention" in plain_name(operation.function) for operation in tape.operations)
        entry.attentions = attentions() if attends else None
        entry.constants = tuple(tape.constants)
        places += range(len(inputs), len(tape.inputs))
        entry.order = operator.itemgetter(*places) if len(places) > 1 else tuple
        every = (*inputs, *entry.constants)
        written = {id(t) for t in tape.written if not t.is_inference()}  # Those have no version.
        entry.facts = Facts(
            wanted=len(wanted) if active else 0,
            written=tuple(k for k, i in enumerate(places) if id(every[i]) in written),
            active=tuple(active),
            constant=tuple(i for i in range(len(results)) if i not in active),
            strides=tuple(results[i].stride() for i in active),
        )
        codes = [execute(program, entry.facts)]
        if generates:
            from fastlayers.patching.rewrite.fusion import fused  # needs Triton

            with suppress(Exception):  # What was recorded runs as well if Triton cannot compile a kernel.
                codes.append(execute(fused(program, tape.values), entry.facts))
        entry.parts = None if parts == Place(len(inputs)) else parts
        dtypes = {t.dtype for t in tape.values.values() if t.is_floating_point()}
        rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return tuple(t.detach() for t in results), grads, gradients, codes, rounding

    @staticmethod
    def check_results(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        own = {storage(t) for t in results}
        if len(own) < len(results) or not own.isdisjoint(map(storage, inputs)):
            raise Refusal(Reason.VISIBLE_MUTATION, "a result shares memory with another tensor")
        if not results:
            raise Refusal(Reason.READS_STATE, "it returns no tensor of its own")


def remembered(refusal: Refusal) -> Refusal:
    """A refusal to keep: the one that was raised holds, by its traceback, every tensor of the recording."""
    return Refusal(refusal.reason, refusal.detail)


def some_gradient(t: Tensor) -> Tensor:
    """A gradient for a result, of values between -1 and 1 in no order, without drawing random numbers.

    Sums of regular ones would cancel, and leave rounding to be compared.
    """
    mixed = torch.arange(t.numel(), device=t.device) * 0x9E3779B97F4A7C1 + 1
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    values = (mixed >> 40) / 2.0**23
    return dispatch.with_strides(values.to(t.dtype).view(t.shape), t.stride())


def agree(
    run: Sequence[Tensor | None],
    known: Sequence[Tensor | None],
    rounding: float,
    grads: Sequence[Tensor] = (),
    kinks: bool = False,
) -> bool:
    """Whether two runs gave the same, but for operations that sum in another order each time.

    Half of the digits that a ``rounding`` leaves have to be the same. Gradients may differ by a rounding of the largest
    number of all, the given ``grads`` among them: those that cancel, as the ones of a key's bias do, are nothing but
    rounding. ``kinks`` allows a few elements anything: where a sum is within a rounding of 0, the gradient of its ReLU
    is all or nothing, and generated code does not round what is added first.
    """
    largest = max((largest_of(t) for t in (*known, *grads) if t is not None), default=0.0) if grads else 0.0
    half = rounding**0.5
    alike, few = min(ALIKE, half), min(FEW, 2 * half)
    for a, b in zip(run, known, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not b.is_floating_point() or b.numel() == 0:
            if not torch.equal(a, b):
                return False
        else:
            allowed = max(alike * largest_of(b), NOISE * rounding * largest)
            close = torch.allclose(a, b, rtol=alike, atol=allowed, equal_nan=True)
            if not close and not (kinks and (a.double() - b.double()).norm() <= few * b.double().norm()):
                return False
    return True


def largest_of(t: Tensor) -> float:
    return t.detach().nan_to_num(0, 0, 0).abs().max().item() if t.is_floating_point() and t.numel() else 0.0


class Backward(torch.autograd.Function):
    """Calls a function where a gradient would be computed."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.call()
        return None, None


def in_backward(function: Callable[[], Sequence[Tensor | None]], device: torch.device) -> Sequence[Tensor | None]:
    """The result of a raw backward, called in the thread in which autograd calls those of this device.

    cuDNN's plans are kept by thread, and to make one for the backward of a depthwise convolution takes up to half a
    second.
    """
    found: list[Sequence[Tensor | None]] = []

    def call() -> None:
        with torch.no_grad(), excluding(KEYS):
            found.append(function())

    with torch.enable_grad():
        start = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(Backward.apply(start, call), start, allow_unused=True)
    return found[0]


def random_state(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The states of torch's generators of the CPU and of the GPUs of these tensors."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus_of(inputs))]


def restore_random_state(states: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    of_cpu, *of_gpus = states
    torch.set_rng_state(of_cpu)
    for device, state in zip(gpus_of(inputs), of_gpus, strict=True):
        torch.cuda.set_rng_state(state, device)


def gpus_of(inputs: Sequence[Tensor]) -> list[int]:
    return sorted({t.get_device() for t in inputs if t.is_cuda})


@contextmanager
def drawing(states: Sequence[Tensor] | None, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Draw the random numbers that follow these states, and leave the generators as they are now."""
    with torch.random.fork_rng(gpus_of(inputs)):
        if states:
            restore_random_state(states, inputs)
        yield


def region_class(
    present: type[nn.Module], known: dict[Any, Any], kind: Any = None, infers_only: bool = False
) -> type[nn.Module]:
    """A subclass whose forward runs as a region where it can.

    Args:
        present: the class of the module.
        known: the classes generated so far.
        kind: tells modules of this class apart that have nothing in common but their forward. A class of which no
            region can be made is not tried any more.
        infers_only: whether only calls without grad mode run as regions.

    Raises:
        Refusal: the forward has parameters that a generated one could not have.
    """
    key = ("region", present, kind, infers_only)
    if key in known:
        return known[key]  # type: ignore[no-any-return]
    _, *parameters = inspect.signature(present.forward).parameters.values()
    if any(p.name == "self" for p in parameters):
        raise Refusal(Reason.SIGNATURE, "a parameter called self that is not the first")
    load_fake_tensors()
    if backends.problem("triton") is None:
        import_module("fastlayers.patching.rewrite.fusion")  # In a call its imports would keep tensors as well.
    original = present.__dict__.get("__fastlayers_original__", present)
    name, region = getattr(present, "__fastlayers_name__", f"Fused{original.__name__}"), Region(present, infers_only)
    namespace: dict[str, Any] = {
        "_present": present,
        "_region": region,
        "_off": region.off,
        "_strange": region.strange,
        "_is_compiling": torch.compiler.is_compiling,
        "_is_grad_enabled": torch.is_grad_enabled,
        "_decorated": partial(decorated, original),
    }
    declared, _ = signature_source(present.forward, namespace)  # type: ignore[arg-type]
    check = ""
    if "=" in declared and present is original:  # A generated forward makes this test itself.
        namespace |= {"_stock": present.forward, "_check_defaults": check_defaults}
        check = "        if _present.forward is not _stock:\n            _check_defaults(_stock, _present.forward)\n"
    decorator = "    @_decorated\n" if takes_former_names(original) else ""
    positional = arguments_source(p for p in parameters if p.kind not in BY_KEYWORD)
    keywords = arguments_source(p for p in parameters if p.kind in BY_KEYWORD)
    each = items(EACH.get(p.kind, "{}").format(p.name) for p in parameters)
    strange = f" or (_strange and not _strange.isdisjoint(map(type, {each})))"
    source = (
        f"class {name}(_present):\n"
        f"{decorator}"
        f"    def forward{declared}:\n"
        f"{check}"
        f"        if _is_compiling() or _off[_is_grad_enabled()]{strange}:\n"
        f"            return _present.forward(self, {', '.join((*positional, *keywords))})\n"
        f"        return _region(self, {items(positional)}, dict({', '.join(keywords)}))\n"
    )
    exec(compile(source, f"<fastlayers {name}>", "exec"), namespace)
    made: Any = seal(namespace[name], original, getattr(present, "__fastlayers_source__", None))
    made.forward.__doc__ = original.forward.__doc__
    made.__fastlayers_region__ = region
    known[key] = made
    return made  # type: ignore[no-any-return]
