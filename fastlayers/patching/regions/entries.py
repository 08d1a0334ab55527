"""What the calls of one signature do, and how they are differentiated where the recorded backward does not do."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fastlayers.ops import layouts
from fastlayers.ops.autocast import Given, version_of
from fastlayers.patching.program.cost import Cost
from fastlayers.patching.program.derivative import Derivative
from fastlayers.patching.program.executors import (
    KEYS,
    Executor,
    Facts,
    below_modes,
    excluding,
    executor_class,
)
from fastlayers.patching.program.program import Program
from fastlayers.patching.program.shapes import in_order
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.regions.agreement import NOISE, largest_of
from fastlayers.patching.regions.partial_backward import Geometry, without_gradients
from fastlayers.patching.regions.readers import Reader
from fastlayers.patching.regions.results import Argument, put_together

__all__ = [
    "NO_AUTOCAST",
    "Again",
    "Autocast",
    "Entry",
    "Sized",
    "alias",
    "autocast_as",
    "autocast_state",
    "described",
    "drawing",
    "no_regions",
    "note_derivative",
    "op_by_op",
    "random_state",
    "restore_random_state",
]


class _Thread(threading.local):
    """Whether the forwards of this thread run op by op: inside of a recording, or since someone asked for it."""

    op_by_op = False


_thread = _Thread()


def op_by_op() -> bool:
    return _thread.op_by_op


@contextmanager
def no_regions() -> Iterator[None]:
    """Let forwards run op by op, in this thread."""
    before, _thread.op_by_op = _thread.op_by_op, True
    try:
        yield
    finally:
        _thread.op_by_op = before


# -- modes of torch ----------------------------------------------------------------------------------------------------

#: For each type of device whether operations cast, and to which dtype.
Autocast: TypeAlias = Mapping[str, tuple[bool, torch.dtype | None]]
NO_AUTOCAST: Autocast = {"cpu": (False, None), "cuda": (False, None)}


def autocast_state() -> Autocast:
    return {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in NO_AUTOCAST}


def described(module: nn.Module, given: Sequence[Tensor | Sized]) -> str:
    """A signature in words: shapes, dtypes, modes."""
    shapes = ", ".join(f"{'x'.join(map(str, t.shape)) or 'scalar'} {short(t.dtype)}" for t in given)
    modes = ["training" if module.training else "eval"]
    modes += [] if torch.is_grad_enabled() else ["inference_mode" if torch.is_inference_mode_enabled() else "no_grad"]
    modes += [f"autocast {short(dtype)}" for enabled, dtype in autocast_state().values() if enabled]
    return f"{shapes}; {', '.join(modes)}"


def short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Cast as this state says, whatever is cast outside."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in state.items():
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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


#: The places of all inputs.
ALL = range(2**31)


# -- one signature -----------------------------------------------------------------------------------------------------


class Sized(NamedTuple):
    """How a tensor looks."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: tuple[torch.dtype, torch.device, bool]

    @classmethod
    def of(cls, t: Tensor) -> Sized:
        return cls(tuple(t.shape), t.stride(), (t.dtype, t.device, t.requires_grad))

    @property
    def dtype(self) -> torch.dtype:
        return self.kind[0]

    def is_contiguous(self) -> bool:
        return in_order(self.shape, self.strides)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]


@dataclass
class Entry:
    """What a call with one signature does.

    Attributes:
        tensors: the guard on the given tensors and on those that the forward reads.
        state: the guard on the modes and flags of torch.
        autocast: what is cast, and to which dtype, by the type of a device.
        dtype: torch's default.
        reader, values: what reads the state of the module that Python decides by, and what it read.
        exact: what tells equal values apart; None if nothing does.
        pattern: of the arguments.
        count: the number of tensors among them. The other inputs are read from the module.
        attentions: which attentions torch may choose; None if it chooses none.
        refusal: why such calls run op by op; None if there is code for them.
        order: brings the inputs into the order of the code, those that need a gradient first.
        facts: what the code has to know about a call.
        code: what runs such calls.
        plain: the same without generated kernels.
        program: what ``plain`` runs.
        fused: what ``code`` runs, with generated kernels; None if ``code`` is ``plain``.
        costs: those of these programs.
        what: the signature in words.
        calls: how many calls ran as a region.
        geometry: of the values in the backward of the program, if several results get gradients.
        parts: the result, taken apart, of the inputs and the results of the code; None if it is the only one of these.
        stores: where the arguments hold what a cache has for a layer, and the attributes that a call assigns there.
        geometries: of the tensors that the call is given and reads.
        fits: whether the sizes of such tensors are among those that the code is for; None if it is for one.
        late: gives the derivative for what a call was given, if the code is for many sizes.
        strides: of the results, where generated kernels may choose them.
        constants: further inputs, the same in every call.
        changed: the places of buffers that the code changes,
        read: and of those among them whose value before the call the results depend on.
        draws: whether the code draws random numbers.
        derivative: autograd's graph of the forward, or the reason why there is none.
        differentiated: whether a backward of such a call was differentiated. From then on they run op by op.
        apart: whether such calls run op by op since some result got no gradient, which generated kernels do not serve.
    """

    tensors: Any
    state: Any
    reader: Reader
    values: tuple[Any, ...]
    pattern: Any
    count: int
    exact: Any = None
    autocast: Autocast = field(default_factory=autocast_state)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    attentions: tuple[bool, ...] | None = None
    refusal: Refusal | None = None
    order: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple
    facts: Facts = field(default_factory=Facts)
    code: Executor | None = None
    plain: Executor | None = None
    program: Program | None = None
    fused: Program | None = None
    costs: list[Cost] = field(default_factory=list)
    what: str = ""
    calls: int = 0
    geometry: Mapping[str, Geometry] = field(default_factory=dict)
    parts: Any = None
    stores: tuple[tuple[Argument, Mapping[str, Any]], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    constants: tuple[Tensor, ...] = ()
    changed: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    draws: bool = False
    geometries: tuple[Sized, ...] = ()
    fits: Callable[..., bool] | None = None
    late: Callable[[tuple[Tensor, ...]], Derivative | Refusal] | None = None
    derivative: Derivative | Refusal | None = None
    differentiated: bool = False
    apart: bool = False
    _partial: dict[frozenset[int], tuple[Executor, list[int]] | None] = field(default_factory=dict)

    def set_derivative(self, derivative: Derivative | Refusal, *codes: Executor | None) -> None:
        """Set it, and tell the code which inputs have values that it reads."""
        self.derivative = derivative
        if isinstance(derivative, Derivative):
            assert self.program is not None
            places = self.order(range(len(self.program.inputs)))
            read = [number for number, place in enumerate(places) if place in derivative.read]
            for code in codes:
                if code is not None:
                    code.set_read(read)

    def result(self, tensors: Sequence[Tensor], arguments: Any, results: Sequence[Tensor]) -> Any:
        """What a call gives, of the results of its code. It assigns what the forward assigned to a cache."""
        every = (*tensors, *results) if self.stores or self.parts is not None else ()
        for argument, attributes in self.stores:
            held = vars(argument.of(arguments).layer)
            held.update({name: put_together(part, every, arguments) for name, part in attributes.items()})
        return results[0] if self.parts is None else put_together(self.parts, every, arguments)

    def without(self, grads: Sequence[Tensor | None]) -> tuple[Executor, list[int]] | None:
        """What runs the backward of the plain code without those gradients of active results that are None, and the
        places of what it needs in what the plain code keeps; None if nothing does."""
        if self.fits is not None:  # What is left out has the geometry of one size.
            return None
        missing = frozenset(i for i, _ in enumerate(self.facts.active) if grads[i] is None)
        if missing not in self._partial:
            whole = self.program
            assert whole is not None
            program = without_gradients(whole, {whole.grads[i] for i in missing}, self.geometry)
            if program is None:
                self._partial[missing] = None
            else:
                places = [whole.kept.index(name) for name in program.kept]
                self._partial[missing] = executor_class()(program, Facts()), places
        return self._partial[missing]


class Again(NamedTuple):
    """What a call keeps for backwards that its code does not give: derivatives of it, and those of some results.

    Attributes:
        plain: whether it ran the code without generated kernels.
        random: the state of the generators before the call, if it draws.
        old: the values before the call of the buffers in ``entry.read``.
    """

    entry: Entry
    plain: bool
    random: list[Tensor] | None
    old: tuple[Tensor, ...]

    def needed(self, grads: Sequence[Tensor | None], derived: bool) -> list[int]:
        found = None if derived or self.aside(grads) else self.entry.without(grads)
        return found[1] if found is not None and self.plain else self.own()

    def aside(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether results have gradients that usually get none."""
        return any(dy is not None for dy in grads[len(self.entry.facts.active) :])

    def own(self) -> list[int]:
        """The places of what the code has computed in what it keeps."""
        program = self.entry.program if self.plain else self.entry.fused or self.entry.program
        assert program is not None
        return [i for i, name in enumerate(program.kept) if name not in program.inputs]

    def some(
        self, given: Given, kept: list[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The gradients of a region's inputs where some of its results have none."""
        entry = self.entry
        found = None if self.aside(grads) else entry.without(grads)
        if found is None:
            return self.differentiate(given, kept, grads, needs)
        code, places = found
        if not self.plain:
            entry.apart = True
            self.check(given, kept)
            every = self.kept_by(entry.plain, self.inputs(given))
            kept = [every[i] for i in places]
        laid_out = zip(grads, entry.facts.strides, strict=False)
        dys = [layouts.with_strides(dy, strides) for dy, strides in laid_out if dy is not None and strides is not None]
        with excluding(KEYS):
            gradients = code.backward(dys, kept)
        return [dx if needed else None for dx, needed in zip(gradients, needs, strict=True)]

    def kept_by(self, code: Executor | None, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this code keeps of the call."""
        assert code is not None
        with torch.no_grad(), drawing(self.random, inputs), below_modes():
            return code.forward(*self.entry.order((*inputs, *self.entry.constants)))[1]

    def check(self, given: Given, kept: Sequence[Tensor], read: Container[int] = ALL) -> None:
        """Compare what the code computes now with what it kept.

        Raises:
            RuntimeError: that differs. No version tells of a write through ``.data``.
        """
        now = self.kept_by(self.entry.plain if self.plain else self.entry.code, self.inputs(given, read))
        if not all(alike(now[i], t) for i, t in zip(self.own(), kept, strict=True)):
            raise RuntimeError(
                "to differentiate the backward of a patched forward, what it computed is computed again from its inputs"
                ", which gave something else: one of these, or what was kept, was written through `.data` since. Write "
                "after the backward, or call it with fastlayers.unpatch_model(model)"
            )

    def inputs(self, given: Given, read: Container[int] = ALL) -> list[Tensor]:
        """What the call was given, in the order of the call. Of a buffer that it changes a copy: of the value before
        the call, if the results depend on that.

        Raises:
            RuntimeError: another one of those at the places ``read`` was written since.
        """
        entry = self.entry
        total = len(given.parameters)
        places = entry.order(range(total))
        for number, place in enumerate(places):
            if place in entry.changed or place not in read:
                given.versions[number] = version_of(given.parameters[number])
        ordered = given.unchanged()
        inputs: Any = [t for _, t in sorted(zip(places, ordered, strict=True), key=operator.itemgetter(0))]
        old = dict(zip(entry.read, self.old, strict=True))
        for i in entry.changed:
            inputs[i] = old.get(i, inputs[i]).detach().clone()
        return inputs[: total - len(entry.constants)]  # type: ignore[no-any-return]

    def differentiate(
        self, given: Given, kept: list[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of a region's inputs, with a graph of their own where grad mode is on.

        Raises:
            RuntimeError: an input was written since, or there is no such derivative.
        """
        entry = self.entry
        entry.differentiated |= torch.is_grad_enabled()
        derivative = entry.derivative
        if isinstance(derivative, Derivative):
            self.check(given, kept, derivative.read)
            inputs = self.inputs(given, derivative.read)
            if entry.late is not None:
                derivative = entry.late(tuple(inputs))
        if not isinstance(derivative, Derivative):
            raise RuntimeError(
                f"this backward of a patched forward cannot be differentiated, nor computed without a gradient of each "
                f"result: {derivative}. Call it with fastlayers.unpatch_model(model)"
            )
        with default_dtype(entry.dtype), drawing(self.random, inputs), torch.no_grad(), below_modes():
            values = derivative.values(inputs)
        wanted = entry.order(range(len(inputs) + len(entry.constants)))[: entry.facts.wanted]
        # Of aliases: an argument may itself depend on another one.
        return derivative.gradients(values, [alias(inputs[i]) for i in wanted], needs[: len(wanted)], grads)


def alias(t: Tensor) -> Tensor:
    """A view of a tensor that needed a gradient in a call, also of a parameter that was frozen since."""
    if t.requires_grad:
        return t.view_as(t)
    t.requires_grad_(True)
    try:
        return t.view_as(t)
    finally:
        t.requires_grad_(False)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two runs of the same code gave this, but for sums in another order."""
    if not b.is_floating_point() or b.numel() == 0:
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0, atol=NOISE * torch.finfo(b.dtype).eps * largest_of(b), equal_nan=True)


def note_derivative(entry: Entry, grads: Sequence[Tensor | None]) -> None:
    """A hook on the backward of a recorded call, which sees whether it is differentiated."""
    entry.differentiated |= torch.is_grad_enabled()
