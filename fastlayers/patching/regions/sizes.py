"""One program for all sizes of what a call is given.

Where calls of two sizes were recorded, the forward runs once more, on tensors without memory whose sizes are torch's
symbols, and its numbers become expressions of these. It is no guess from two examples: 64 may be a head or a length.
What Python or torch decides by a size, such as a window or a broadcast, is a condition on the symbols. The program is
compared with both recordings, operation by operation, numbers included.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastlayers.kernels.symbolic import NAME
from fastlayers.ops import guard
from fastlayers.patching.capture.reads import without_a_log_of_errors
from fastlayers.patching.program.cost import cost_of
from fastlayers.patching.program.derivative import Derivative
from fastlayers.patching.program.executors import executor_class
from fastlayers.patching.program.numbers import at_sizes, is_one, is_symbolic, map_numbers, number_at, with_sizes
from fastlayers.patching.program.program import Program, renamed
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.regions.entries import Entry, Sized, described, no_regions
from fastlayers.patching.regions.recording import Recorded, Recording, what_torch_refuses, without_plans
from fastlayers.patching.regions.results import Number, with_numbers
from fastlayers.patching.regions.stand_ins import stand_in
from fastlayers.patching.regions.symbols import Size, as_recorded, symbolic_inputs, symbols_of

__all__ = ["ManySizes"]

#: Recordings of calls that differ in sizes, after which no program for all is looked for any more.
TRIES = 3
#: One in so many calls that no program serves, where there is one for others, is too few for another program.
RARE = 16
#: Programs for calls that differ in sizes alone, after which no other one is looked for.
MOST_PROGRAMS = 8
#: What of a program is the same for all sizes.
NAMES = ("inputs", "results", "kept", "grads", "wanted", "constants")


class ManySizes:
    """The entries of a region that serve calls of many sizes.

    Args:
        present: the class whose forward runs where no region does.
        derivative_of: gives the derivative of an entry, for a module and what a call was given and read.
        note_error: warns of an error of ours, and gives what to say of it.

    Attributes:
        entries: by what they read and by the pattern of the call.
        reason: why the last try found none.
    """

    def __init__(
        self,
        present: Any,
        derivative_of: Callable[..., Derivative | Refusal],
        note_error: Callable[[str, Exception], str],
    ) -> None:
        self._present, self._derivative_of, self._note_error = present, derivative_of, note_error
        self.entries: dict[Any, list[Entry]] = {}
        self.reason: Refusal | None = None
        self._tries: Counter[Any] = Counter()
        self._missed: Counter[Any] = Counter()
        self._recorded: dict[Any, list[Entry]] = defaultdict(list)

    def may_be(self, reads: Iterable[Any], pattern: Any, given: Sequence[Tensor]) -> bool:
        """Whether it is to be tried once more for such calls; ``reads`` are readers, and what they have read. One of
        sizes that were recorded, as of another layer in the same step, says nothing new. Where there is a program that
        serves others, those that it does not serve must not be rare."""
        keys = keys_of(reads, pattern, given)
        if max(self._tries[key] for key in (*keys, pattern)) >= TRIES or self._is_known(keys, given):
            return False
        for key in keys:
            served = self.entries.get(key[:3])
            if served:
                self._missed[key] += 1
                return RARE * (self._missed[key] - 1) > sum(entry.calls for entry in served)
        return True

    def waits(self, reads: Iterable[Any], pattern: Any, given: Sequence[Tensor]) -> bool:
        """Whether a call is one of the first size that was recorded, and no other one has come. Smaller regions inside
        are not looked for then."""
        keys = keys_of(reads, pattern, given)
        return (
            self.reason is None and self._is_known(keys, given) and not any(self.entries.get(key[:3]) for key in keys)
        )

    def _is_known(self, keys: Iterable[Any], given: Sequence[Tensor]) -> bool:
        """Whether such sizes were recorded."""
        looks = tuple(map(Sized.of, given))
        every = (entry for key in keys for entry in self._recorded.get(key, ()))
        return any(all(map(lie_alike, entry.geometries[: entry.count], looks)) for entry in every)

    def has_none(self, reads: Iterable[Any], pattern: Any, given: Sequence[Tensor]) -> bool:
        """Whether such calls have no program, and none is looked for any more."""
        keys = keys_of(reads, pattern, given)
        tried = max(self._tries[key] for key in (*keys, pattern)) >= TRIES
        return tried and not any(self.entries.get(key[:3]) for key in keys)

    def refused(self, pattern: Any) -> None:
        """Note that a call of sizes that were not seen before could not be recorded."""
        self._tries[pattern] += 1

    def look_for(self, entry: Entry, module: nn.Module, inputs: tuple[Tensor, ...], recorded: Recorded) -> Entry | None:
        """Look for an entry for all sizes, if a new one differs from one before in sizes alone, and return it.

        Args:
            module, inputs: the module, and what the call was given and read.
            recorded: what the call was found to do.
        """
        key = entry.reader, entry.values, entry.pattern
        given = entry.geometries[: entry.count]
        kind = *key, kind_of_call(given), shapes_of(entry.geometries[entry.count :])
        if any(serves(known, entry) for known in self.entries.get(key, ())):
            return None
        self._tries[kind] += 1
        alike = [other for other in self._recorded[kind] if differ_in_sizes(other, entry)]
        self._recorded[kind].append(entry)
        if not alike or self._tries[kind] > TRIES or entry.reader.tests_numbers:
            return None
        buffers = (i for i, t in enumerate(inputs) if i >= entry.count and not t.requires_grad)
        try:
            forward, written = self._present.forward, {*entry.changed, *buffers}
            pair = Pair(forward, alike[-1], entry, module, inputs, written, recorded)
            found = generalised(pair, self._note_error)
        except Refusal as refusal:
            self.reason = refusal.kept()
        except Exception as error:
            self.reason = Refusal(Reason.RECORDING_FAILED, self._note_error("sizes", error))
        else:
            found.late = partial(self._late_derivative, found, stand_in(module))
            every = self.entries.setdefault(key, [])
            every.append(found)
            self._tries[kind] = 0 if len(every) < MOST_PROGRAMS else TRIES  # Other sizes may decide otherwise.
            return found
        return None

    def _late_derivative(self, entry: Entry, copy: nn.Module, inputs: tuple[Tensor, ...]) -> Derivative | Refusal:
        """The derivative for the sizes of a call, of a copy of the module as it was when its calls were recorded."""
        try:
            found = entry.reader.read(copy)
        except (AttributeError, KeyError, IndexError, TypeError):
            found = None
        if found is None or found[0] != entry.values or entry.exact != entry.reader.exact(found[0]):
            return Refusal(Reason.READS_STATE, "what its forward reads outside of the module has changed")
        with no_regions(), saved_tensors_hooks(guard.kept_as_is, guard.kept_as_is):
            return self._derivative_of(entry, copy, inputs)


def keys_of(reads: Iterable[Any], pattern: Any, given: Sequence[Tensor]) -> list[Any]:
    """What tells apart calls for which programs are looked for."""
    kind = kind_of_call(map(Sized.of, given))
    return [(reader, values, pattern, kind, shapes_of(tensors)) for reader, values, tensors in reads]


def kind_of_call(given: Iterable[Sized]) -> tuple[Any, ...]:
    """What tells calls apart that may have different programs, whatever their sizes."""
    return torch.is_grad_enabled(), *((len(each.shape), each.kind, each.is_contiguous()) for each in given)


def shapes_of(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """What tells modules apart that are not alike."""
    return tuple(tuple(t.shape) for t in tensors if t is not None)


def serves(entry: Entry, other: Entry) -> bool:
    """Whether an entry for many sizes serves the calls of one for one size."""
    first, second = entry.geometries, other.geometries
    alike = kind_of_call(first) == kind_of_call(second) and shapes_of(first[entry.count :]) == shapes_of(
        second[other.count :]
    )
    return alike and entry.fits is not None and entry.fits(*second)


def lie_alike(a: Sized, b: Sized) -> bool:
    """Whether two tensors look alike, whatever the strides of dimensions with one element."""
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    return a.shape == b.shape and a.kind == b.kind and all(n == 1 or first == second for n, first, second in steps)


def differ_in_sizes(first: Entry, second: Entry) -> bool:
    """Whether two recordings differ in sizes of what their calls are given alone."""
    if first.refusal is not None or second.refusal is not None or first is second or not first.state.check():
        return False
    pairs = [*zip(first.geometries, second.geometries, strict=True)]
    alike = all(len(a.shape) == len(b.shape) and a.kind == b.kind for a, b in pairs)
    same = (first.exact, first.attentions) == (second.exact, second.attentions)
    same = same and all(map(torch.equal, first.constants, second.constants))
    return alike and same and all(a == b for a, b in pairs[first.count :])


class Traced(NamedTuple):
    """A run of a forward on symbols.

    Attributes:
        entry: what is known of it.
        program: with symbolic numbers.
        fused: the same with generated kernels; None if there are none.
        sizes: those that are symbols.
        conditions: on them, as source.
        inputs: the tensors that it was run on.
    """

    entry: Entry
    program: Program
    fused: Program | None
    sizes: list[Size]
    conditions: list[str]
    inputs: list[Tensor]


class Pair(NamedTuple):
    """Two recorded calls that differ in sizes.

    Attributes:
        forward: of the class whose calls were recorded.
        first, second: their entries.
        module, real: the module, and what the second call was given and read.
        written: the places of what the forward may write.
        recorded: what the second call was found to do.
    """

    forward: Callable[..., Any]
    first: Entry
    second: Entry
    module: nn.Module
    real: Sequence[Tensor]
    written: Container[int]
    recorded: Recorded


def generalised(pair: Pair, note_error: Callable[[str, Exception], str]) -> Entry:
    """The entry of all calls that differ from two recorded ones in sizes; ``note_error`` takes note of what fails and
    leaves a program that is right.

    Raises:
        Refusal: there is no such program.
    """
    _, first, second, module, real, _, recorded = pair
    with as_recorded(), what_torch_refuses(), without_a_log_of_errors():
        traced = run_on_symbols(pair, note_error)
    entry, sizes, strides = traced.entry, traced.sizes, traced.entry.facts.strides
    entry.fits = fits_of(traced.inputs, sizes, traced.conditions)
    if not all(entry.fits(*known.geometries) for known in (first, second)):
        raise Refusal(Reason.SIZES, f"needs {' and '.join(traced.conditions)}")
    entry.facts = second.facts._replace(strides=(None,) * len(second.facts.strides))
    plain = with_sizes(traced.program, strides)
    entry.program, entry.fused, entry.costs = replace(plain, values={}), None, second.costs[:1]
    entry.code = entry.plain = executor_class()(plain, entry.facts)
    if not recorded.agrees(entry.plain):
        raise Refusal(Reason.SIZES, "it gives something else")
    if traced.fused is not None:
        generated = with_sizes(traced.fused, strides)
        code = executor_class()(generated, entry.facts)
        if recorded.agrees(code):
            entry.code, entry.fused = code, replace(generated, values={}, fake=None)
            entry.costs.append(cost_of(traced.fused))
    entry.order, entry.constants, entry.attentions = second.order, second.constants, second.attentions
    entry.parts, entry.stores = results_with(entry, lambda symbol: number_of(symbol, sizes))
    entry.tensors = dynamic_guard(real, sizes)
    entry.what = described(module, [any_size(second.geometries[i], i, sizes) for i in range(second.count)])
    return entry


def run_on_symbols(pair: Pair, note_error: Callable[[str, Exception], str]) -> Traced:
    """Trace a call on tensors without memory, and compare that with both recordings."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import symbolic_shapes

    forward, first, second, module, real, written, recorded = pair
    environment = symbolic_shapes.ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # Nothing comes twice here, and to look takes a quarter of the time.

    def gradient(t: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    fakes, sizes = symbolic_inputs(mode, first, second, real)
    entry = replace(second, calls=0, _partial={}, geometry={}, stores=(), parts=None)
    copy = stand_in(module)
    replaced = entry.reader.replaced(copy, fakes[entry.count :])
    with mode, enable_python_dispatcher(), replaced, without_plans():
        state = [t for i, t in enumerate(fakes) if i in written]
        call = entry, forward, copy, tuple(fakes), state
        recording = Recording(*call, gradient=gradient, like=recorded.tape)
    program = replace(recording.describe(entry), fake=mode, symbols=symbols_of(sizes))
    for which, known in enumerate((first, second)):
        check_same(program, entry, known, {size.symbol: size.values[which] for size in sizes})
    other = None
    if recording.generates:
        from fastlayers.patching.fusion.passes import fused  # needs Triton

        other = fused(program, note_error)
    symbols: Any = [fakes[size.place].shape[size.dim] for size in sizes]
    needs = environment.produce_guards_expression(symbols)
    conditions = [*filter(None, [needs]), *(other.conditions if other else ())]
    return Traced(entry, program, other, sizes, conditions, fakes)


def any_size(geometry: Sized, place: int, sizes: Sequence[Size]) -> Sized:
    """How a tensor looks, with a star in place of each size that may be any."""
    free = {size.dim for size in sizes if size.place == place}
    shape: Any = tuple("*" if dim in free else size for dim, size in enumerate(geometry.shape))
    return geometry._replace(shape=shape)


def check_same(program: Program, entry: Entry, recorded: Entry, sizes: Mapping[Any, int]) -> None:
    """Compare the program, for the sizes of a recording, with what was recorded.

    Raises:
        Refusal: they differ.
    """
    assert recorded.program is not None
    known, program = numbered(recorded.program), numbered(program)
    for ours, theirs in ((program.forward, known.forward), (program.backward, known.backward)):
        for a, b in zip(at_sizes(ours, sizes), at_sizes(theirs, {}), strict=False):
            if a != b:
                raise Refusal(Reason.SIZES, f"{a} instead of {b}")
        if len(ours) != len(theirs):
            raise Refusal(Reason.SIZES, f"{len(ours)} operations instead of {len(theirs)}")
    for name in NAMES:
        if getattr(program, name) != getattr(known, name):
            raise Refusal(Reason.SIZES, f"other {name}")
    results = results_with(entry, lambda symbol: number_at(symbol, sizes))
    if results != (recorded.parts, recorded.stores):
        raise Refusal(Reason.SIZES, "other results")
    strides = map_numbers(entry.facts.strides, lambda symbol: number_at(symbol, sizes))
    if entry.facts._replace(strides=strides) != recorded.facts:
        raise Refusal(Reason.SIZES, "other results")


def results_with(entry: Entry, number: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The parts of what an entry returns, and of what it stores, with something in place of their symbolic numbers."""
    stores = tuple(
        (argument, {name: with_numbers(part, number) for name, part in attributes.items()})
        for argument, attributes in entry.stores
    )
    return with_numbers(entry.parts, number), stores


def number_of(symbol: Any, sizes: Sequence[Size]) -> Number:
    """What gives a number for the tensors of a call."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    from torch.utils._sympy.printers import PythonPrinter

    names = {str(size.symbol): f"tensors[{size.place}].shape[{size.dim}]" for size in sizes}
    source = PythonPrinter().doprint(symbol.node.expr)
    source = re.sub(r"\bs\d+\b", lambda name: names[name[0]], source)
    return Number(eval(f"lambda tensors: {source}", dict(SYMPY_INTERP)))


def numbered(program: Program) -> Program:
    """The program with names for its values in the order in which they are made."""
    makes = (name for operation in program.operations for name in operation.makes if name)
    return renamed(program, {name: f"r{i}" for i, name in enumerate(dict.fromkeys(makes))})


def fits_of(fakes: Sequence[Tensor], sizes: Sequence[Size], conditions: Sequence[str]) -> Callable[..., bool]:
    """A function of what a call is given: whether its sizes are among those that a program is for."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    sources = [(size.symbol, f"x{size.place}.shape[{size.dim}]") for size in sizes]
    lines = [f"    {NAME}{i} = {symbol} = {source}" for i, (symbol, source) in enumerate(sources)]
    tests = ["True", *conditions]
    for place in dict.fromkeys(size.place for size in sizes):
        steps: Any = enumerate(zip(fakes[place].shape, fakes[place].stride(), strict=True))
        strides = {d: printer.doprint(s.node.expr) if is_symbolic(s) else s for d, (n, s) in steps if not is_one(n)}
        tests += [f"x{place}.stride({d}) == {stride}" for d, stride in strides.items()]
    for number, size in enumerate(sizes):
        tests = [test.replace(f"L['t{number}']", str(size.symbol)) for test in tests]
    names = ", ".join(f"x{place}" for place in range(max(size.place for size in sizes) + 1))
    source = "\n".join([f"def fits({names}, *_):", *lines, f"    return {' and '.join(tests)}"])
    scope: dict[str, Any] = dict(SYMPY_INTERP)
    exec(compile(source, "<fastlayers sizes>", "exec"), scope)
    return scope["fits"]  # type: ignore[no-any-return]


def dynamic_guard(real: Sequence[Tensor], sizes: Sequence[Size]) -> Any:
    """The guard on all but these sizes, and the strides of the same tensors."""
    from torch._C._dynamo.guards import TensorGuards

    dims = {(size.place, size.dim) for size in sizes}
    free = {size.place for size in sizes}
    shapes: Any = [[None if (i, d) in dims else n for d, n in enumerate(t.shape)] for i, t in enumerate(real)]
    strides: Any = [
        [None if i in free or n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
        for i, t in enumerate(real)
    ]
    return TensorGuards(*real, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
