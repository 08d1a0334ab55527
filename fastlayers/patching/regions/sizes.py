"""One program for all sizes of what a call is given.

Where calls of two sizes were recorded, the forward runs once more, on tensors without memory whose sizes are torch's
symbols, and its numbers become expressions of these. It is no guess from two examples: 64 may be a head or a length.
What Python or torch decides by a size, such as a window or a broadcast, is a condition on the symbols. The program is
compared with both recordings, operation by operation, numbers included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastlayers.ops import guard
from fastlayers.patching.program.derivative import Derivative
from fastlayers.patching.program.executors import executor_class
from fastlayers.patching.program.numbers import at_sizes, is_symbolic, map_numbers, number_at, with_sizes
from fastlayers.patching.program.program import Program, renamed
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.regions.entries import Entry, Sized, described, no_regions
from fastlayers.patching.regions.readers import Reader
from fastlayers.patching.regions.recording import Recording, what_torch_refuses
from fastlayers.patching.regions.stand_ins import stand_in

__all__ = ["ManySizes"]

#: Recordings of calls that differ in sizes, after which no program for all is looked for any more.
TRIES = 3
#: What of a program is the same for all sizes.
NAMES = ("inputs", "results", "kept", "grads", "wanted", "constants")


class Size(NamedTuple):
    """A size that differs between two recordings: its symbol, the place of the tensor, the dimension, both values."""

    symbol: Any
    place: int
    dim: int
    values: tuple[int, int]


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
        self._recorded: dict[Any, list[Entry]] = defaultdict(list)

    def may_be(self, read: tuple[Reader, tuple[Any, ...], Any] | None, pattern: Any, given: Sequence[Tensor]) -> bool:
        """Whether it is to be tried once more for such calls; ``read`` is what their reader, if there is one, has
        read. One of sizes that were recorded, as of another layer in the same step, says nothing new."""
        looks = tuple(map(Sized.of, given))
        key = None if read is None else (*read[:2], pattern, *kind_of_call(looks))
        known = any(entry.geometries[: entry.count] == looks for entry in self._recorded.get(key, ()))
        return self._tries[key] < TRIES and self._tries[pattern] < TRIES and not known

    def refused(self, pattern: Any) -> None:
        """Note that a call of sizes that were not seen before could not be recorded."""
        self._tries[pattern] += 1

    def look_for(self, entry: Entry, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Look for an entry for all sizes, if a new one differs from one before in sizes alone.

        Args:
            module, inputs: the module, and what the call was given and read.
        """
        key = entry.reader, entry.values, entry.pattern
        recorded = *key, *kind_of_call(entry.geometries[: entry.count])
        self._tries[recorded] += 1
        alike = [other for other in self._recorded[recorded] if differ_in_sizes(other, entry)]
        self._recorded[recorded].append(entry)
        if not alike or self._tries[recorded] > TRIES or entry.reader.tests_numbers:
            return
        buffers = (i for i, t in enumerate(inputs) if i >= entry.count and not t.requires_grad)
        try:
            forward, written = self._present.forward, {*entry.changed, *buffers}
            found = generalised(forward, alike[-1], entry, module, inputs, written)
        except Refusal as refusal:
            self.reason = refusal.kept()
        except Exception as error:
            self.reason = Refusal(Reason.RECORDING_FAILED, self._note_error("sizes", error))
        else:
            found.late = partial(self._late_derivative, found, stand_in(module))
            self.entries.setdefault(key, []).append(found)

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


def kind_of_call(given: Iterable[Sized]) -> tuple[Any, ...]:
    """What tells calls apart that may have different programs, whatever their sizes."""
    return torch.is_grad_enabled(), *((len(each.shape), each.kind) for each in given)


def differ_in_sizes(first: Entry, second: Entry) -> bool:
    """Whether two recordings differ in sizes of what their calls are given alone."""
    if first.refusal is not None or second.refusal is not None or first is second or not first.state.check():
        return False
    pairs = [*zip(first.geometries, second.geometries, strict=True)]
    alike = all(len(a.shape) == len(b.shape) and a.kind == b.kind for a, b in pairs)
    same = (first.exact, first.attentions) == (second.exact, second.attentions)
    same = same and (first.parts, first.stores) == (second.parts, second.stores)
    same = same and all(map(torch.equal, first.constants, second.constants))
    return alike and same and all(a == b for a, b in pairs[first.count :])


def generalised(
    forward: Callable[..., Any],
    first: Entry,
    second: Entry,
    module: nn.Module,
    real: Sequence[Tensor],
    written: Container[int],
) -> Entry:
    """The entry of all calls that differ from two recorded ones in sizes.

    Args:
        forward: of the class whose calls were recorded.
        module, real: the module, and what the second call was given and read.
        written: the places of what the forward may write.

    Raises:
        Refusal: there is none.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import symbolic_shapes

    environment = symbolic_shapes.ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # Nothing comes twice here, and to look takes a quarter of the time.

    def gradient(t: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    with as_recorded(), what_torch_refuses():
        fakes, sizes = symbolic_inputs(mode, first, second, real)
        symbols: Any = [fakes[size.place].shape[size.dim] for size in sizes]
        entry = replace(second, calls=0, _partial={}, geometry={}, stores=(), parts=None)
        copy = stand_in(module)
        with mode, enable_python_dispatcher(), entry.reader.replaced(copy, fakes[entry.count :]):
            state = [t for i, t in enumerate(fakes) if i in written]
            recording = Recording(entry, forward, copy, tuple(fakes), state, gradient=gradient)
        program = recording.describe(entry)
        conditions = environment.produce_guards_expression(symbols)
    for which, recorded in enumerate((first, second)):
        check_same(program, entry, recorded, {size.symbol: size.values[which] for size in sizes})
    fits = fits_of(fakes, sizes, conditions)
    if not all(fits(*recorded.geometries) for recorded in (first, second)):
        raise Refusal(Reason.SIZES, f"needs {conditions}")
    numbers = with_sizes(program, (size.symbol for size in sizes), entry.facts.strides)
    entry.facts = second.facts._replace(strides=(None,) * len(second.facts.strides))
    entry.program = replace(numbers, values={})
    entry.code = entry.plain = executor_class()(numbers, entry.facts)
    entry.fused, entry.costs, entry.order, entry.constants = None, second.costs[:1], second.order, second.constants
    entry.parts, entry.stores, entry.attentions = second.parts, second.stores, second.attentions
    entry.fits, entry.tensors = fits, dynamic_guard(real, sizes)
    entry.what = described(module, [any_size(second.geometries[i], i, sizes) for i in range(second.count)])
    return entry


@contextmanager
def as_recorded() -> Iterator[None]:
    """Let torch decompose operations on symbols as it decomposes others, as far as it can."""
    from torch.fx.experimental import symbolic_shapes

    dropout: Any = torch.ops.aten.dropout.default
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    with (
        ExitStack() as stack,
        mock.patch.dict(dropout.py_kernels, clear=True),
        mock.patch.dict(dropout._dispatch_cache, clear=True),
        # Else the first symbol imports Inductor, to know whose lines are not the user's.
        mock.patch.object(symbolic_shapes, "uninteresting_files", frozenset),
    ):
        stack.callback(torch.set_autocast_cache_enabled, cached)
        yield


def symbolic_inputs(mode: Any, first: Entry, second: Entry, real: Sequence[Tensor]) -> tuple[list[Tensor], list[Size]]:
    """Tensors without memory in place of those of the second call, and the sizes of these that are symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    fakes: list[Tensor] = []
    sizes: list[Size] = []
    for place, t in enumerate(real):
        pairs = [*zip(first.geometries[place].shape, second.geometries[place].shape, strict=True)]
        kinds = [DimDynamic.STATIC if a == b else DimDynamic.DYNAMIC for a, b in pairs]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(t.detach(), symbolic_context=context, source=ConstantSource(f"x{place}"))
        fakes.append(fake.requires_grad_(t.requires_grad))
        shape: tuple[Any, ...] = fake.shape
        for dim, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
            if is_symbolic(size):
                sizes.append(Size(size.node.expr, place, dim, pair))
    if not sizes:
        raise Refusal(Reason.SIZES, "no size differs")
    return fakes, sizes


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
    for name in NAMES:
        if getattr(program, name) != getattr(known, name):
            raise Refusal(Reason.SIZES, f"other {name}")
    for ours, theirs in ((program.forward, known.forward), (program.backward, known.backward)):
        if len(ours) != len(theirs):
            raise Refusal(Reason.SIZES, f"{len(ours)} operations instead of {len(theirs)}")
        for a, b in zip(at_sizes(ours, sizes), at_sizes(theirs, {}), strict=True):
            if a != b:
                raise Refusal(Reason.SIZES, f"{a} instead of {b}")
    strides = map_numbers(entry.facts.strides, lambda symbol: number_at(symbol, sizes))
    if entry.facts._replace(strides=strides) != recorded.facts:
        raise Refusal(Reason.SIZES, "other results")


def numbered(program: Program) -> Program:
    """The program with names for its values in the order in which they are made."""
    makes = (name for operation in program.operations for name in operation.makes if name)
    return renamed(program, {name: f"r{i}" for i, name in enumerate(dict.fromkeys(makes))})


def fits_of(fakes: Sequence[Tensor], sizes: Sequence[Size], conditions: str | None) -> Callable[..., bool]:
    """A function of what a call is given: whether its sizes are among those that a program is for."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    lines = [f"    {size.symbol} = x{size.place}.shape[{size.dim}]" for size in sizes]
    tests = [conditions or "True"]
    for place in dict.fromkeys(size.place for size in sizes):
        given: tuple[Any, ...] = fakes[place].stride()
        strides = [printer.doprint(s.node.expr) if is_symbolic(s) else s for s in given]
        tests.append(f"x{place}.stride() == ({''.join(f'{each}, ' for each in strides)})")
    for number, size in enumerate(sizes):
        tests[0] = tests[0].replace(f"L['t{number}']", str(size.symbol))
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
    strides: Any = [[None] * t.dim() if i in free else [*t.stride()] for i, t in enumerate(real)]
    return TensorGuards(*real, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
