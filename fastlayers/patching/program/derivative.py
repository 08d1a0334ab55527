"""Derivatives that the recorded backward of a program does not give: second ones, and those of some results.

Autograd's own graph of a forward says how each of its results is differentiated, with what ``detach``, ``no_grad`` and
an ``autograd.Function`` make of that. It is made once, of tensors without memory, when a call is recorded, and keeps
names in place of tensors. For a call the recorded operations compute what these names stand for from what the call was
given, and autograd differentiates the graph. So no code of the module runs after the call has returned, but for the
backwards of its Functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fastlayers.ops.guard import KeptAsIs
from fastlayers.patching.program.program import alive, storage, with_tensors
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.reasons import Reason, Refusal

__all__ = ["Derivative", "nodes_of"]

_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class Place:
    """A tensor in the memory of a value.

    Attributes:
        geometry: shape, strides and the offset from that of the value; None for the value itself.
    """

    name: str
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        value = values[self.name]
        if self.geometry is None:
            return value
        shape, strides, offset = self.geometry
        return value.as_strided(shape, strides, value.storage_offset() + offset)


class Names(KeptAsIs):
    """The hook that gives autograd a :class:`Place` to keep in place of a tensor."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.used = tape, set[str]()

    def __call__(self, t: Tensor) -> Any:
        name, geometry = self.tape.known(t), None
        if name is None:
            name = next((name for name, value in self.tape.values.items() if storage(value) == storage(t)), None)
            if name is None or self.tape.values[name].dtype is not t.dtype:
                raise Refusal(Reason.UNKNOWN_CALL, f"autograd keeps a tensor of shape {tuple(t.shape)} from elsewhere")
            offset = int(t.storage_offset() - self.tape.values[name].storage_offset())
            geometry = tuple(t.shape), t.stride(), offset
        self.used.add(name)
        return Place(name, geometry)


class Values:
    """The tensors that names stand for at present. Autograd's graph refers to this, and not to a :class:`Derivative`,
    which would keep itself alive."""

    def __init__(self) -> None:
        self.present: Mapping[str, Tensor] = {}

    def __call__(self, place: Place) -> Tensor:
        return place.of(self.present)


class Watched(Tape):
    """A tape that refuses what keeps tensors in ways of its own, such as a checkpoint."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # A tensor without memory is asked for its device.
            return func(*args, **kwargs or {})
        hooks = _top_hooks(True)
        if hooks is None or not isinstance(hooks[0], Names):
            raise Refusal(Reason.UNKNOWN_CALL, "hooks on saved tensors")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Derivative:
    """Autograd's graph of a forward, with names in place of tensors.

    Args:
        forward: of tensors; gives the results that need a gradient.
        inputs: what it may be given. Of these only geometry, and whether they need a gradient, is used.
        wanted: the places of those that need one.

    Raises:
        Refusal: there is no such graph.
    """

    def __init__(
        self, forward: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor], wanted: Sequence[int]
    ) -> None:
        self._lock = threading.RLock()
        self._values = Values()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            self.leaves = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        for i in wanted:
            self.leaves[i].requires_grad_()
        tape = Watched(self.leaves, [t for t in self.leaves if not t.requires_grad])
        names = Names(tape)
        with mode, tape, saved_tensors_hooks(names, self._values), torch.enable_grad():
            self.results = list(forward(self.leaves))
        self.wanted = [self.leaves[i] for i in wanted]
        self._attributes = [*attributes_of(self.results, names)]
        self._inputs, self._constants = tape.inputs, tuple(tape.constants)
        self._operations = alive(tape.operations, names.used)
        self._used = frozenset(names.used)
        read = self._used.union(*(operation.uses for operation in self._operations))
        #: The places of the inputs whose values matter.
        self.read = frozenset(i for i, name in enumerate(tape.inputs) if name in read)
        del names.tape  # Autograd keeps the hook.

    def values(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """What autograd keeps of a call that is given these inputs. Operations run as the dispatch keys have it."""
        found = dict(zip(self._inputs, (*inputs, *self._constants), strict=True))
        last = {name: operation for operation in self._operations for name in (*operation.uses, *operation.makes)}
        for operation in self._operations:
            args, kwargs = with_tensors(operation, found)
            out = operation.function(*args, **kwargs)
            made = (out,) if operation.single else out
            found |= {name: t for name, t in zip(operation.makes, made, strict=True) if name}
            for name in {*operation.uses, *operation.makes}:
                if last[name] is operation and name not in self._used:
                    found.pop(name, None)
        return {name: found[name] for name in self._used}

    def gradients(
        self, values: Mapping[str, Tensor], tensors: Sequence[Tensor], asked: Sequence[bool], dys: Sequence[Any]
    ) -> list[Tensor | None]:
        """The gradients that are ``asked`` for of a call's ``tensors``, which are the inputs that need one. Where grad
        mode is on, they are functions of all of these and of ``dys``, the gradients of the results."""
        return differentiate(OfCall(self, values, self.results, self.wanted), tensors, asked, dys)

    @contextmanager
    def of(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the graph be that of a call. Within another one of the same thread, too: autograd's thread may begin a
        backward while it waits for the end of one."""
        with self._lock:
            before = self._values.present
            self._hold(values)
            try:
                yield
            finally:
                self._hold(before)

    def _hold(self, values: Mapping[str, Tensor]) -> None:
        self._values.present = values
        for node, name, places in self._attributes:
            held = pytree.tree_map_only(Place, lambda place: place.of(values), places) if values else None
            setattr(node, name, held)


def attributes_of(results: Sequence[Tensor], names: Names) -> Iterator[tuple[Any, str, Any]]:
    """The attributes of the Functions of a graph that hold tensors: the node, the name, the value with a
    :class:`Place` for each tensor."""
    for node in nodes_of(results):
        for name, value in vars(node).items() if isinstance(node, BackwardCFunction) else ():
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                yield node, name, pytree.tree_map_only(Tensor, names, value)


def nodes_of(results: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph of some results, each once."""
    pending = [t.grad_fn for t in results]
    seen = {None, *pending}
    while pending:
        node = pending.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)


class OfCall(NamedTuple):
    """Results on the graph of a :class:`Derivative`, for what it keeps of one call, and the leaves of that graph."""

    derivative: Derivative
    values: Mapping[str, Tensor]
    results: Sequence[Tensor]
    leaves: Sequence[Tensor]


def differentiate(
    call: OfCall, tensors: Sequence[Tensor], asked: Sequence[bool], dys: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients that are ``asked`` for of the leaves, which stand for ``tensors``; where grad mode is on, as
    functions of these and of ``dys``."""
    derive = torch.is_grad_enabled()
    there = [(t, dy) for t, dy in zip(call.results, dys, strict=True) if dy is not None]
    if not there:
        return [None] * len(asked)
    given = [dy.detach().requires_grad_() if derive else dy for _, dy in there]
    leaves = [leaf for leaf, needed in zip(call.leaves, asked, strict=True) if needed]
    with call.derivative.of(call.values):
        found = torch.autograd.grad(
            [t for t, _ in there], leaves, given, retain_graph=True, create_graph=derive, allow_unused=True
        )
    active = [t for t in found if t is not None and t.requires_grad]
    if active:
        of_gradients = call._replace(results=active, leaves=(*call.leaves, *given))
        derived = iter(Derived.apply(of_gradients, *tensors, *(dy for _, dy in there)))
        found = tuple(next(derived) if t is not None and t.requires_grad else t for t in found)
    gradients = iter(found)
    return [next(gradients) if needed else None for needed in asked]


class Derived(torch.autograd.Function):
    """Gradients that autograd has computed on the graph of a :class:`Derivative`, as functions of a call's tensors."""

    @staticmethod
    def forward(ctx: Any, call: OfCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        return tuple(t.detach() for t in call.results)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        return None, *differentiate(ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:], dys)
