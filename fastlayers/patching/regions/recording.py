"""The recording of a call: one run under a tape, forward and backward, and what its entry has of it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from fastlayers import backends
from fastlayers.ops import guard, raw_ops
from fastlayers.patching.capture.caches import Arguments, with_caches
from fastlayers.patching.capture.run import is_ours, refusal_of
from fastlayers.patching.program.cost import cost_of
from fastlayers.patching.program.executors import KEYS, Executor, Facts, excluding
from fastlayers.patching.program.program import Program, depends_on, plain_name, storage
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.regions.agreement import agree, in_backward, some_gradient
from fastlayers.patching.regions.entries import NO_AUTOCAST, Entry, autocast_as, random_state, restore_random_state
from fastlayers.patching.regions.partial_backward import geometries
from fastlayers.patching.regions.patterns import Flat, held_by_caches, unflatten
from fastlayers.patching.regions.results import OpaqueError, Place, Taken, take_apart, take_changes

__all__ = [
    "Before",
    "Recorded",
    "Recording",
    "attentions",
    "place_of",
    "what_may_be_written",
    "what_torch_refuses",
    "without_plans",
]


@contextmanager
def what_torch_refuses() -> Iterator[None]:
    """An error of the forward itself, or torch's for calls that it does not support in a mode, is a refusal."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        if is_ours(error) and not isinstance(error, RuntimeError):
            raise
        raise refusal_of(error) from None


def attentions() -> tuple[bool, ...]:
    """Which attentions torch may choose."""
    return (
        torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )  # fmt: skip


@contextmanager
def without_plans() -> Iterator[None]:
    """Let torch choose attentions that serve any size at once: that of cuDNN makes a plan for each, which takes 137 ms,
    where the kernels of bfloat16, 4 x 16 heads of 400 tokens, forward and backward, take .4 ms (H200, torch 2.11)."""
    flash, efficient, _, cudnn = attentions()
    torch._C._set_sdp_use_cudnn(cudnn and not (flash or efficient))
    try:
        yield
    finally:
        torch._C._set_sdp_use_cudnn(cudnn)


def place_of(cls: type[nn.Module]) -> str:
    """The file and the line of the forward of a class, ``block.py:88``; empty for one of torch's and one without a
    file."""
    forward: Any = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__.startswith("torch.") or not code.co_filename.endswith(".py"):
        return ""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


class Before:
    """What a recording changes, as it was before.

    Args:
        state: tensors that it may write.
        inputs: tensors on the devices whose random numbers it may draw.
    """

    def __init__(self, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._state, self._inputs = [(t, t.clone()) for t in state], inputs
        self._random = random_state(inputs)

    def changed(self) -> list[Tensor]:
        return [t for t, old in self._state if not torch.equal(t, old)]

    def has_drawn(self) -> bool:
        return any(not torch.equal(a, b) for a, b in zip(self._random, random_state(self._inputs), strict=True))

    def restore(self) -> None:
        with torch.no_grad():
            for t, old in self._state:
                if not torch.equal(t, old):
                    t.data.copy_(old)  # Graphs made before may have kept it: its version stays.
        restore_random_state(self._random, self._inputs)


def what_may_be_written(entry: Entry, real: Sequence[Tensor]) -> list[Tensor]:
    """Of what a call is given and reads what it may write.

    Raises:
        Refusal: no region takes these tensors.
    """
    tensors = real[entry.count :]
    known = all(type(t) in guard.PLAIN and t.layout is torch.strided for t in real)
    if not known or any(t.device.type not in ("cpu", "cuda") for t in real):
        raise Refusal(Reason.READS_STATE, "a tensor of another type or layout, or on another device")
    if any(t._backward_hooks for t in tensors):  # The gradients of a recording are none.
        raise Refusal(Reason.READS_STATE, "a parameter with a hook")
    # Without grad mode: a cache that requires gradients from then on would need them of what it was before, too.
    held = [] if torch.is_grad_enabled() else held_by_caches(entry.pattern, real)
    return [t for t in (*held, *tensors) if not t.requires_grad]


class Recorded(NamedTuple):
    """What a program for other sizes is compared with, as long as a recording is there.

    Attributes:
        tape: what was recorded on.
        agrees: whether code gives what was recorded.
    """

    tape: Tape
    agrees: Callable[[Executor], bool]


class Recording:
    """A run of a call on a tape.

    Args:
        entry: of its signature.
        forward: of the class whose calls are recorded.
        module, real: the module, and what the call is given and reads.
        state: of these what it may write.
        sources: whether to note the lines that operations come from.
        gradient: gives one for a result.
        like: as of :class:`Tape`.

    Attributes:
        results: of the forward,
        grads: the gradients of those that have one,
        gradients: and those of the inputs that need one.
        split: the number of operations of the forward.

    Raises:
        Refusal: such calls cannot be a region.
    """

    def __init__(
        self,
        entry: Entry,
        forward: Callable[..., Any],
        module: nn.Module,
        real: tuple[Tensor, ...],
        state: Sequence[Tensor],
        sources: bool = False,
        gradient: Callable[[Tensor], Tensor] = some_gradient,
        like: Tape | None = None,
    ) -> None:
        count, self._records, self._gradient = entry.count, torch.is_grad_enabled(), gradient
        with torch.enable_grad():
            aliases = [t.detach().requires_grad_(t.requires_grad) for t in real[:count]]
        self._inputs = (*aliases, *real[count:])
        self._wanted = [i for i, t in enumerate(self._inputs) if self._records and t.requires_grad]
        self._places = [*self._wanted, *(i for i in range(len(self._inputs)) if i not in self._wanted)]
        self.tape = tape = Tape([self._inputs[i] for i in self._places], state, sources, like)
        if len(set(tape.inputs)) < len(tape.inputs):
            raise Refusal(Reason.READS_STATE, "two inputs are one tensor")
        self.generates = backends.generates_kernels(self._inputs[0].device)
        self.grads: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()
        self._dys: list[str] = []

        def kernel_call(kernel: Callable[..., Any], *call: Any) -> Any:
            return tape.kernel(kernel, *call) if _get_current_dispatch_mode() is tape else kernel(*call)

        flat = Flat(aliases)
        args, kwargs = (unflatten(part, flat) for part in entry.pattern)
        arguments = args, kwargs or {}
        given = with_caches(*arguments)

        def on_fakes(op: Any, fake: Callable[..., Any], *call: Any) -> Any:
            if _get_current_dispatch_mode() is not tape:
                return fake(*call)
            with _pop_mode_temporarily():
                return tape.record(op, fake, call, {})

        symbolic = type(self._inputs[0]) is FakeTensor
        with raw_ops.observed(kernel_call, on_fakes if symbolic else None), tape:
            with what_torch_refuses():
                out = forward(module, *given[0], **given[1])
            self._take_results(out, arguments)
            if self.active:
                self._run_backward()

    def _take_results(self, out: Any, arguments: Arguments) -> None:
        taken, count = Taken(self._inputs, arguments), len(self._inputs)
        try:
            self._parts = take_apart(out, taken)
            own = len(taken) - count  # The rest is for caches.
            self._stores = tuple(take_changes(arguments, taken))
        except OpaqueError as error:
            raise Refusal(Reason.READS_STATE, str(error)) from None
        if taken.lazy and self._records:  # Their source would be a result without a gradient.
            raise Refusal(Reason.LOGITS_USED, "computed when somebody uses them")
        results: list[Tensor] = taken[count:]
        if self.generates:
            from fastlayers.patching.fusion.layouts import in_rows  # needs Triton

            viewed = {number - count for number, _ in taken.views}
            results = [t if i in viewed or i >= own else in_rows(self.tape, t) for i, t in enumerate(results)]
        self.results, self.split = results, len(self.tape.operations)
        memory = {storage(t) for t in results}
        if len(memory) < len(results) or not memory.isdisjoint(map(storage, (*self._inputs, *self.tape.constants))):
            raise Refusal(Reason.VISIBLE_MUTATION, "a result shares memory with another tensor")
        if not results:
            raise Refusal(Reason.READS_STATE, "it returns no tensor of its own")
        self.tape.check_read(results)
        active = [i for i, t in enumerate(results) if self._records and t.requires_grad]
        self.active, self._aside = [i for i in active if i < own], [i for i in active if i >= own]
        if self._aside and not self.active:
            raise Refusal(Reason.READS_STATE, "only what a cache keeps needs a gradient")

    def _run_backward(self) -> None:
        results = [self.results[i] for i in self.active]
        with _disable_current_modes():
            self.grads = tuple(map(self._gradient, results))
        self._dys = [self.tape.protect(dy, f"g{i}") for i, dy in zip(self.active, self.grads, strict=True)]
        # A backward has the dtypes of its forward; it runs outside of the context.
        with autocast_as(NO_AUTOCAST), what_torch_refuses():
            wanted = [self._inputs[i] for i in self._wanted]
            self.gradients = torch.autograd.grad(results, wanted, self.grads, allow_unused=True)

    def complete(self, entry: Entry, execute: Callable[[Program, Facts], Executor], place: str) -> Program:
        """Give the entry its facts, and the plain code. Returns the program, whose values keep memory."""
        program = self.describe(entry)
        program.place = place
        entry.program, entry.costs = replace(program, values={}), [cost_of(program)]
        entry.plain = execute(program, entry.facts)
        entry.geometry = geometries(program, self.tape.values) if len(self.active) > 1 else {}
        entry.strides = tuple(t.stride() for t in self.results) if self.generates else ()
        return program

    def describe(self, entry: Entry) -> Program:
        """Give the entry the facts of its calls. Returns the program, whose values keep memory."""
        tape, active, places = self.tape, self.active, self._places
        names = [tape.name(t) for t in self.results]
        gradients = [None if t is None else tape.name(t) for t in self.gradients]
        program = tape.program(self.split, names, self._dys, gradients)
        attends = any("attention" in plain_name(operation.function) for operation in tape.operations)
        entry.attentions = attentions() if attends else None
        entry.constants = tuple(tape.constants)
        places += range(len(self._inputs), len(tape.inputs))
        entry.order = operator.itemgetter(*places) if len(places) > 1 else tuple
        every = (*self._inputs, *entry.constants)
        written = {id(t) for t in tape.written if not t.is_inference()}  # Those have no version.
        entry.facts = Facts(
            wanted=len(self._wanted) if active else 0,
            written=tuple(k for k, i in enumerate(places) if id(every[i]) in written),
            active=tuple(active),
            aside=tuple(self._aside),
            constant=tuple(i for i in range(len(self.results)) if i not in (*active, *self._aside)),
            strides=tuple(self.results[i].stride() for i in active),
        )
        entry.stores = self._stores
        entry.parts = None if self._parts == Place(len(self._inputs)) else self._parts
        return program

    def depends(self) -> set[int]:
        """The places of the inputs that the results with gradients depend on."""
        names = [self.tape.name(self.results[i]) for i in (*self.active, *self._aside)]
        found = depends_on(self.tape.operations[: self.split], self.tape.values, names)
        return {place for place, name in zip(self._places, self.tape.inputs, strict=True) if name in found}

    def is_given_by(self, code: Executor, inputs: Sequence[Tensor], kinks: bool) -> bool:
        """Whether a run of this code gives the same; ``kinks`` as in :func:`agree`."""
        dtypes = {t.dtype for t in self.tape.values.values() if t.is_floating_point()}
        rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        gradients: Sequence[Tensor | None] = ()
        with torch.no_grad(), excluding(KEYS):
            results, kept = code.forward(*inputs)
            if self.grads:
                gradients = in_backward(partial(code.backward, self.grads, list(kept)), self.grads[0].device)
            same = agree(results, self.results, rounding)
            return same & agree(gradients, self.gradients, rounding, self.grads, kinks)
