"""Regions: a whole forward, with the children that it calls, as one node of autograd made of straight-line code.

Most of the host's time in a step is spent on deciding what to do: calls of modules, checks of shapes and modes, one
autograd node for each operation. All of that has the same outcome in every step. A region decides once: at the second
call with a signature :mod:`fastlayers.patching.capture.reads` finds what Python decides by, and
:mod:`fastlayers.patching.program.tape` what is computed, forward and backward. Later calls test one guard and run these
operations. Where the guard fails, the forward runs as it did: rewritten, with its fused ops.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.autograd.graph import saved_tensors_hooks

from fastlayers import backends
from fastlayers.ops import guard, layouts, modes
from fastlayers.patching.capture.caches import Arguments, Caches, Slot, with_caches
from fastlayers.patching.capture.fake_run import load_fake_tensors
from fastlayers.patching.capture.reads import read_by
from fastlayers.patching.capture.rebuild import arguments_source
from fastlayers.patching.libraries.adapters import adapters, slot_or_value, undecorated
from fastlayers.patching.program.cost import cost_of
from fastlayers.patching.program.derivative import Derivative
from fastlayers.patching.program.executors import (
    Executor,
    NativeExecutor,
    PythonExecutor,
    executor_class,
    items,
)
from fastlayers.patching.program.numbers import OTHER_LAYOUT
from fastlayers.patching.reasons import PatchWarning, Reason, Refusal
from fastlayers.patching.regions.demand import Demand
from fastlayers.patching.regions.entries import (
    Again,
    Entry,
    Sized,
    autocast_as,
    described,
    no_regions,
    note_derivative,
    op_by_op,
    random_state,
)
from fastlayers.patching.regions.patterns import (
    LEAVES,
    NESTED,
    NONE,
    Flat,
    flatten,
    unflatten,
    with_caches_that_grow,
    without_repeats,
)
from fastlayers.patching.regions.readers import Reader
from fastlayers.patching.regions.recording import (
    Before,
    Recorded,
    Recording,
    attentions,
    place_of,
    what_may_be_written,
    what_torch_refuses,
    without_plans,
)
from fastlayers.patching.regions.results import Taken, put_together, take_apart, take_changes
from fastlayers.patching.regions.sizes import ManySizes
from fastlayers.patching.regions.stand_ins import stand_in
from fastlayers.patching.rewrite.generate import forward_source, written_class
from fastlayers.patching.runtime.checks import original_class, original_of, stock_forwards

__all__ = [
    "FEW_MODULES",
    "Region",
    "region_class",
    "size_of",
    "text_of",
]

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
#: Refused calls, without one region that was made, after which a class is not tried any more: a test costs 8 us.
MAX_REFUSALS = 3

#: How many modes of ``__torch_function__`` there are. A default device counts: factories of tensors ask for it.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

#: Whether an error of a pass is raised, as the tests want it. For a user the call runs without the pass.
RAISE_ERRORS = False

logger = logging.getLogger(__name__)
_lock = threading.RLock()
_regions: WeakSet[Region] = WeakSet()


def forget_all() -> None:
    for region in list(_regions):
        region.forget()


backends.on_change(forget_all)  # The recorded kernels are those of the backend.


BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
#: How the arguments of a parameter are spelled, one by one.
EACH: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*{}", inspect.Parameter.VAR_KEYWORD: "*{}.values()"}


def size_of(module: nn.Module) -> int:
    """The number of modules in it, and itself, without those that only hold others: each layer with an adapter of peft
    has six."""
    return sum(not isinstance(each, CONTAINERS) for each in module.modules())


class RecordingError(Exception):
    """An error of fastlayers while a forward was traced or a call was recorded, which only the tests raise."""


def text_of(what: str, error: Exception) -> str:
    """What to say of an error of ours; the tests raise it."""
    text = f"{what}: {type(error).__name__}: {error}".splitlines()[0]
    if RAISE_ERRORS:
        raise RecordingError(text) from error
    logger.debug("%s", text, exc_info=error)
    return text


# -- the region -------------------------------------------------------------------------------------------------------


class Region:
    """The regions of the modules of one class, by what they read and by the signature of the call.

    Args:
        present: the class whose forward runs where no region does.
        infers_only: whether only calls without grad mode run as regions.
    """

    def __init__(self, present: type[nn.Module], infers_only: bool = False) -> None:
        self.present: Any = present
        self.original = original_of(present)
        self.infers_only = infers_only
        #: Whether someone wants to see the programs of its calls.
        self.explained = False
        self.readers: list[Reader] = []
        self.entries: dict[Any, list[Entry]] = {}
        self.many_sizes = ManySizes(self.present, self.derivative_of, self.note_error)
        #: Calls that no region can be made for, by their pattern.
        self.refused: dict[Any, Refusal] = {}
        #: Calls with caches that grow without a program, by their pattern: to look for one takes 50 us a layer.
        self.given_up: set[Any] = set()
        #: Types of arguments that there is no pattern for.
        self.strange: set[type] = set()
        self.caches = Caches(slot_or_value)
        self.demand = Demand()
        #: Whether calls without and with grad mode run op by op, since no region could be made for the first ones.
        self.off = [False, infers_only]
        self._failures = [0, 0]
        #: What failed when a call was recorded, each once.
        self.errors: list[str] = []
        _regions.add(self)

    def forget(self) -> None:
        self.readers.clear()
        self.entries.clear()
        self.many_sizes = ManySizes(self.present, self.derivative_of, self.note_error)
        self.refused.clear()
        self.given_up.clear()
        self.demand = Demand()
        self.off[:] = False, self.infers_only
        self._failures[:] = 0, 0
        self.errors.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op_by_op() or modes.needs_operations() or function_modes() or guard.must_decompose():
            return self.present.forward(module, *args, **kwargs)
        arguments, pattern, given = self.flattened(module, args, kwargs)
        if None in pattern or not given:
            left = *arguments[0], *arguments[1].values()
            self.strange |= {*map(type, left)}.difference(LEAVES, guard.PLAIN, NESTED, {Slot})
            self.failed()
            return self.present.forward(module, *args, **kwargs)
        if self.given_up and (torch.is_grad_enabled(), pattern) in self.given_up:
            self.failed()
            return self.present.forward(module, *args, **kwargs)
        shape, reads = given[0].shape, list[Any]()
        for reader in self.readers:
            try:
                found = reader.read(module)
            except (AttributeError, KeyError, IndexError, TypeError):  # it has not what was read
                continue
            if found is None:
                return self.present.forward(module, *args, **kwargs)
            values, tensors = found
            try:
                entry = self.entry_of((reader, values, pattern), shape, given, tensors)
            except (TypeError, ValueError, RuntimeError):  # what was read cannot be compared any more
                return self.present.forward(module, *args, **kwargs)
            reads.append((reader, values, tensors))
            if entry is not None:
                many = entry.fits is not None and not with_caches_that_grow(pattern)
                many = many and self.prefers_one_size(given[0].device)
                if many and self.comes_again(module, pattern, given, reads, served=True):
                    break
                if entry.refusal is not None:
                    self.failed()
                    return self.present.forward(module, *args, **kwargs)
                # A checkpoint compares what a forward keeps with what it keeps when it runs again.
                if (entry.differentiated or entry.apart) and _saved_tensors_hooks(True) is None:
                    with no_regions(), stock_forwards() if entry.differentiated else nullcontext():
                        return self.present.forward(module, *args, **kwargs)
                try:
                    return self.run(entry, arguments, (*given, *tensors))
                except RuntimeError as error:
                    # Of one that writes a buffer the values before are gone, and random numbers were drawn.
                    if OTHER_LAYOUT not in str(error) or entry.changed or entry.draws:
                        raise
                    self.many_sizes.entries[reader, values, pattern].remove(entry)
                return self.present.forward(module, *args, **kwargs)
        else:
            if not self.comes_again(module, pattern, given, reads):
                with no_regions() if self.many_sizes.waits(reads, pattern, given) else nullcontext():
                    return self.present.forward(module, *args, **kwargs)
        return self.first(module, args, kwargs, given, pattern, arguments)

    def flattened(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Arguments, tuple[Any, Any], list[Tensor]]:
        """The arguments of a call with slots in place of caches, their pattern, and its tensors, each once."""
        given: list[Tensor] = []
        arguments, caches = (args, kwargs), self.caches
        if caches.seen:
            arguments = caches.taken_apart(module, args, kwargs)
        pattern = flatten(arguments[0], given), flatten(arguments[1], given) if kwargs else NONE
        if None in pattern and not caches.seen:
            given.clear()
            arguments = caches.taken_apart(module, args, kwargs)
            pattern = flatten(arguments[0], given), flatten(arguments[1], given) if kwargs else NONE
        if None not in pattern and len(given) > 1 and len({*map(id, given)}) < len(given):
            return arguments, *without_repeats(pattern, given)
        return arguments, pattern, given

    def entry_of(self, key: Any, shape: torch.Size, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> Entry | None:
        """The entry of a call by its reader, what that read, and the pattern: one for its sizes, or one for many."""
        reader, values, _ = key
        several = self.many_sizes.entries
        for entries in (self.entries.get((*key, shape), ()), several.get(key, ()) if several else ()):
            for entry in entries:
                if (
                    entry.tensors.check(*given, *tensors)
                    and (entry.exact is None or entry.exact == reader.exact(values))
                    and entry.state.check()
                    and entry.attentions in (None, attentions())
                    and (entry.fits is None or entry.fits(*given))
                ):
                    return entry
        return None

    @staticmethod
    def prefers_one_size(device: torch.device) -> bool:
        """Whether an entry for one size is faster than one for many, as generated kernels are."""
        return backends.generates_kernels(device)

    def made(self) -> list[Entry]:
        """What runs calls as regions."""
        every = [*self.entries.values(), *self.many_sizes.entries.values()]
        return [entry for entries in every for entry in entries if entry.refusal is None]

    def comes_again(
        self, module: nn.Module, pattern: Any, given: list[Tensor], reads: Sequence[Any], served: bool = False
    ) -> bool:
        """Whether a call without an entry of its own is to be recorded; it counts as seen.

        Args:
            reads: readers, and what each has read.
            served: whether an entry for many sizes serves it.
        """
        demand, call = self.demand, (module, pattern, given)
        demand.count(*call)
        if _saved_tensors_hooks(True) is not None:
            return not served and demand.has_room(module)
        grows = with_caches_that_grow(pattern)
        other = not served and demand.may_be_one_of_many(*call, reads, grows)
        if other and self.many_sizes.may_be(reads, pattern, given):
            return True  # of other sizes than before: there may be one program for all
        if grows and self.many_sizes.has_none(reads, pattern, given):
            self.given_up.add((torch.is_grad_enabled(), pattern))
        return self.explained or (not grows and demand.is_due(*call, reads, served))

    def run(self, entry: Entry, arguments: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> Any:
        """The result of a call."""
        entry.calls += 1
        ordered, code = entry.order((*inputs, *entry.constants)), entry.code
        if entry.facts.wanted:
            if len(entry.facts.active) > 1 and guard.hooks_decide_what_is_kept():
                # A backward for some results needs what the plain code keeps, as a checkpoint computes it again.
                code = entry.plain
            assert code is not None
            random = random_state(inputs) if entry.draws else None
            old = tuple(inputs[i].detach().clone() for i in entry.read)
            results = code.record(Again(entry, code is entry.plain, random, old), ordered)
        else:
            assert code is not None
            results = code.call(ordered)
        return entry.result(inputs, arguments, results)

    def failed(self) -> None:
        """Note that no region could be made for a call."""
        grads = torch.is_grad_enabled()
        self._failures[grads] += 1
        self.off[grads] = (self._failures[grads] >= MAX_REFUSALS and not self.made()) or (grads and self.infers_only)

    # -- the first call of a signature -----------------------------------------------------------------------------

    def first(
        self, module: nn.Module, args: Any, kwargs: Any, given: list[Tensor], pattern: Any, arguments: Arguments
    ) -> Any:
        """Record a call, and return its result. ``arguments`` are the same with slots in place of caches."""
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return self.present.forward(module, *args, **kwargs)
        # With hooks, and one thread at a time. To wait could be to wait for oneself: a recording needs the thread of
        # autograd, which a checkpoint makes run a forward.
        if not (_hooks_enabled() and _lock.acquire(blocking=False)):
            return self.present.forward(module, *args, **kwargs)
        asked_for = self.explained or _saved_tensors_hooks(True) is not None
        new_size = not asked_for and self.demand.is_new(module, pattern, given)
        new_size |= with_caches_that_grow(pattern)
        try:
            with no_regions(), saved_tensors_hooks(guard.kept_as_is, guard.kept_as_is):
                found = self.prepared(module, *arguments, given, pattern, new_size)
        finally:
            _lock.release()
        if found is None:  # Smaller regions inside of this one may apply.
            self.failed()
            return self.present.forward(module, *args, **kwargs)
        entry, inputs = found
        if _saved_tensors_hooks(True) is not None:
            return self.run(entry, arguments, inputs)
        with no_regions():
            out = self.present.forward(module, *args, **kwargs)
        taken = Taken(inputs, arguments)
        parts = take_apart(out, taken)
        results = taken[len(inputs) :]
        for t in results:
            if t.grad_fn is not None:
                t.grad_fn.register_prehook(partial(note_derivative, entry))
        # Regions that follow are recorded for the strides that these have from now on.
        if any(t.stride() != strides for t, strides in zip(results, entry.strides, strict=False)):
            results = [layouts.with_strides(t, s) for t, s in zip(results, entry.strides, strict=False)]
            return put_together(parts, (*inputs, *results), arguments)
        return out

    def prepared(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], given: list[Tensor], pattern: Any, new_size: bool
    ) -> tuple[Entry, tuple[Tensor, ...]] | None:
        """A new entry for such calls, and what this one is given and reads; None if there can be none.

        ``new_size`` says that its sizes come for the first time: it may do what later ones do not."""
        if pattern in self.refused:
            return None
        self.demand.of(module).count += 1
        try:
            lookups = frozenset[Any]().union(*(adapter.lookups() for adapter in adapters()))
            original = original_class(module).forward
            reads = read_by(module, original, args, kwargs, lookups, undecorated, self.caches.number)
            reader = Reader(reads, module)
        except Refusal as refusal:
            if new_size:
                self.many_sizes.refused(pattern)
            else:
                self.refused[pattern] = refusal.kept()
            return None
        except Exception as error:
            self.refused[pattern] = Refusal(Reason.RECORDING_FAILED, self.note_error("reading", error))
            return None
        try:
            found = reader.read(module)
        except KeyError:
            self.refused[pattern] = Refusal(Reason.UNKNOWN_CALL, "a function of torch that was replaced")
            return None
        reader = next((known for known in self.readers if known.key == reader.key), reader)
        if found is None:
            return None
        values, tensors = found
        if reader not in self.readers:
            self.readers.append(reader)
        inputs = (*given, *tensors)
        guard = TensorGuards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        entry = Entry(guard, GlobalStateGuard(), reader, values, pattern, len(given))
        entry.exact, entry.what = reader.exact(values), described(module, given)
        entry.geometries = tuple(map(Sized.of, inputs))
        self.demand.add(module, entry, tensors)
        try:
            recorded = self.record(entry, module, inputs, new_size)
        except Refusal as refusal:
            entry.refusal = refusal.kept()
        if not new_size or entry.refusal is not None:
            key = reader, values, pattern, given[0].shape
            self.entries.setdefault(key, []).append(entry)  # Complete: another thread may run it from now on.
        if entry.refusal is None:
            many = self.many_sizes.look_for(entry, module, inputs, recorded)
            self.demand.add(module, many, tensors)
        return None if entry.refusal is not None else (entry, inputs)

    def record(self, entry: Entry, module: nn.Module, real: tuple[Tensor, ...], new_size: bool) -> Recorded:
        """Complete an entry from one run, which leaves everything as it was before. One of a new size has no generated
        kernels: it is there to be compared.

        Raises:
            Refusal: such calls cannot be a region.
        """
        state = what_may_be_written(entry, real)
        before = Before(state, real)
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # A cast that was made before would be a tensor from outside.
        try:
            with without_plans() if new_size else nullcontext():
                recording = Recording(entry, self.present.forward, module, real, state, self.explained)
            generated = self.made_of(recording, entry, module, not new_size)
            inputs = (*real, *entry.constants)
            changed = {*map(id, before.changed())}
            written = [entry.order(range(len(inputs)))[i] for i in entry.facts.written]
            entry.changed = tuple(i for i, t in enumerate(real) if id(t) in changed or i in written)
            depends = recording.depends()
            entry.read = tuple(i for i in entry.changed if i in depends) if entry.facts.wanted else ()
            if entry.facts.wanted:
                entry.set_derivative(self.derivative_of(entry, module, real), entry.plain, generated)
            entry.draws = before.has_drawn()

            def agrees(code: Executor) -> bool:
                """Whether this code, run from where the recording began, gives what that gave."""
                before.restore()
                return recording.is_given_by(code, entry.order(inputs), kinks=code is not entry.plain)

            # A kernel that the tape cannot see would be missing. Generated kernels are loaded here, which a capture
            # could not do.
            assert entry.plain is not None
            if not agrees(entry.plain):
                raise Refusal(Reason.UNKNOWN_CALL, "a kernel that is no operation of torch")
            entry.code = entry.plain
            if generated is not None:
                with self.reported("generated kernels"):
                    if agrees(generated):
                        entry.code = generated
                if entry.code is entry.plain:
                    entry.fused, entry.costs = None, entry.costs[:1]
                if entry.fused is None and any([*child.children()] for child in module.children()):
                    raise Refusal(Reason.TRACE_FAILED, "its generated kernels give something else")

            def agrees_again(code: Executor) -> bool:
                try:
                    return agrees(code)
                finally:
                    before.restore()

            return Recorded(recording.tape, agrees_again)
        except (Refusal, RecordingError):
            raise
        except Exception as error:
            raise Refusal(Reason.RECORDING_FAILED, self.note_error("recording", error)) from None
        finally:
            before.restore()
            torch.set_autocast_cache_enabled(cached)

    def made_of(self, recording: Recording, entry: Entry, module: nn.Module, kernels: bool) -> Executor | None:
        """Complete the entry. Returns the code with generated kernels, if there are to be and are any.

        Raises:
            Refusal: there are too few operations, or too many.
        """
        execute, count = executor_class(), len(recording.tape.operations)
        size = recording.tape.size(recording.split) + entry.reader.folds
        if size < LEAST[execute][not recording.active]:
            raise Refusal(Reason.REGION_SIZE, f"{size} operations")
        if count > MOST and size_of(module) > FEW_MODULES:
            raise Refusal(Reason.REGION_SIZE, f"{count} operations in {size_of(module)} modules")
        program = recording.complete(entry, execute, re.sub("[^a-zA-Z0-9]", "_", place_of(self.original)))
        generated = None
        if recording.generates and kernels:
            from fastlayers.patching.fusion.passes import fused  # needs Triton

            with self.reported("fusing"):
                other = fused(program, self.note_error)
                generated = execute(other, entry.facts)
                entry.fused = replace(other, values={}, fake=None)
                entry.costs.append(cost_of(other))
        return generated

    def derivative_of(self, entry: Entry, module: nn.Module, real: tuple[Tensor, ...]) -> Derivative | Refusal:
        """Autograd's graph of what the forward computed before it was patched."""
        copy, count = stand_in(module), entry.count

        def forward(inputs: list[Tensor]) -> list[Tensor]:
            flat = Flat(inputs[:count])
            args, kwargs = (unflatten(part, flat) for part in entry.pattern)
            arguments = args, kwargs or {}
            given = with_caches(*arguments)
            with autocast_as(entry.autocast), entry.reader.replaced(copy, inputs[count:]), stock_forwards():
                out = self.present.forward(copy, *given[0], **given[1])
            taken = Taken(inputs, arguments)
            take_apart(out, taken)
            for _ in take_changes(arguments, taken):
                pass
            return [taken[len(inputs) + i] for i in (*entry.facts.active, *entry.facts.aside)]

        wanted = entry.order(range(len(real) + len(entry.constants)))[: entry.facts.wanted]
        try:
            with what_torch_refuses():
                return Derivative(forward, real, wanted)
        except Refusal as refusal:
            return refusal.kept()

    @contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Go on without what fails inside."""
        try:
            yield
        except Exception as error:
            self.note_error(what, error)

    def note_error(self, what: str, error: Exception) -> str:
        """Warn of an error of ours, once, and keep it for the report; the tests raise it."""
        text = text_of(what, error)
        if text not in self.errors:
            self.errors.append(text)
            name = self.original.__name__
            message = f"calls of {name} run without what failed, and may be slower; please report it: {text}"
            warnings.warn(message, PatchWarning, stacklevel=2)
        return text


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
    key = ("region", present, present.forward, kind, infers_only)
    if key in known:
        return known[key]  # type: ignore[no-any-return]
    load_fake_tensors()
    if backends.problem("triton") is None:
        import_module("fastlayers.patching.fusion.passes")  # In a call its imports would keep tensors as well.
    region = Region(present, infers_only)
    name = getattr(present, "__fastlayers_name__", f"Fused{region.original.__name__}")
    namespace: dict[str, Any] = {
        "_region": region,
        "_off": region.off,
        "_strange": region.strange,
        "_is_compiling": torch.compiler.is_compiling,
        "_is_grad_enabled": torch.is_grad_enabled,
    }
    _, *parameters = inspect.signature(present.forward).parameters.values()
    positional = arguments_source(p for p in parameters if p.kind not in BY_KEYWORD)
    keywords = arguments_source(p for p in parameters if p.kind in BY_KEYWORD)
    each = items(EACH.get(p.kind, "{}").format(p.name) for p in parameters)
    aside = f"_is_compiling() or _off[_is_grad_enabled()] or _strange and not _strange.isdisjoint(map(type, {each}))"
    body = f"return _region(self, {items(positional)}, dict({', '.join(keywords)}))"
    source = forward_source(present, aside, body, namespace)
    known[key] = written_class(present, name, name, source, namespace, {"__fastlayers_region__": region})
    return known[key]  # type: ignore[no-any-return]
