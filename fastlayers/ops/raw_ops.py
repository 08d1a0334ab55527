"""The raw ops of a family: declared once, as a class of static methods, and found by device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard
from fastlayers.ops.guard import expected_tensor, is_dtensor, must_decompose
from fastlayers.ops.pairs import Pair

R = TypeVar("R")


class Kernels:
    """The raw ops of a family: what a call is handed, once the guard has chosen a backend.

    A subclass declares each raw op as a static method with the name and the signature that ``csrc/<family>*.cu`` and
    ``fastlayers/kernels/<family>.py`` implement. The body describes the result to a trace: new tensors with the right
    shapes, dtypes and strides, without values.

    Attributes:
        backend: which implementation this is: "cuda", "triton" or "cpu".
        unasked: whether these are kernels for CPU tensors that nobody has asked for by name. An op then calls them
            only where they are measured faster than torch's.
    """

    backend: str
    unasked: bool


K = TypeVar("K", bound=Kernels)
_families: list[Family[Any]] = []


def _forget_choices() -> None:
    for family in _families:
        family._by_device.clear()


backends.on_change(_forget_choices)


class Family(Generic[K]):
    """The kernels of one family of ops, by device.

    Args:
        name: name of the family, the same in every room.
        declared: the class that declares the raw ops.
        cpu: whether ``csrc`` has the family for CPU tensors.
        csrc_only: names of raw ops without a Triton kernel. Their callers ask for the backend "cuda".
        triton_only: names of raw ops that csrc does not have. Those of Triton serve the backend "cuda" as well.
    """

    def __init__(
        self,
        name: str,
        declared: type[K],
        *,
        cpu: bool = False,
        csrc_only: tuple[str, ...] = (),
        triton_only: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.ops: dict[str, Callable[..., Any]] = {}
        self._cpu = cpu
        self.csrc_only, self.triton_only = csrc_only, triton_only
        self._by_device: dict[torch.device, K | None] = {}
        self._in_graphs: dict[bool, K] = {}
        _families.append(self)
        self.declare(declared)

    def declare(self, declared: type[Kernels]) -> None:
        """Add raw ops that another file declares for this family."""
        fakes = {op: fake.__func__ for op, fake in vars(declared).items() if isinstance(fake, staticmethod)}
        self.ops |= fakes
        self._by_device.clear()
        self._in_graphs.clear()
        for op, fake in fakes.items():
            if hasattr(torch.ops.fastlayers, op):  # csrc was built
                graph_ops.register_fake(f"fastlayers::{op}", fake)

    def kernels_for(self, x: object) -> K | None:
        """The kernels for calls on ``x``, or None where the reference has to answer.

        So it does under torch.compile: Inductor can fuse it with its neighbours, but not an opaque op. An op whose
        kernels graphs hold has to ask before.

        Raises:
            BackendError: a kernel backend is forced and cannot serve.
            TypeError: x is neither a tensor nor a number.
        """
        if torch.compiler.is_compiling():
            return None
        if type(x) not in guard.PLAIN:
            if not isinstance(x, Tensor | int | float | complex):
                raise expected_tensor(x)
            if not is_dtensor(x):  # the rules for these come with the reference
                backends.refuse(f"it takes plain tensors, and got {type(x).__name__}")
            return None
        if must_decompose():
            backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
            return None
        try:
            found = self._by_device[x.device]  # type: ignore[attr-defined]
        except KeyError:
            found = self._find(x.device)  # type: ignore[attr-defined]
        if found is not None and x.is_nested:  # type: ignore[attr-defined]
            backends.refuse("it takes no nested tensors")
            return None
        if found is not None and type(x) is FakeTensor and _on_fakes is not None:
            return self._named(found, _on_fakes)
        return found

    def _named(self, kernels: K, call: Callable[..., Any]) -> K:
        """Kernels of ``csrc`` that give their calls to another function, with what says how their results look."""
        found: Any = SimpleNamespace(backend=kernels.backend, unasked=kernels.unasked)
        for op, fake in self.ops.items():
            if hasattr(kernels, op) and op not in self.triton_only and kernels.backend != "triton":
                setattr(found, op, partial(call, getattr(torch.ops.fastlayers, op).default, fake))
        return found  # type: ignore[no-any-return]

    def triton_kernels_for(self, x: object) -> K | None:
        """:meth:`kernels_for` for the raw ops that csrc does not have; None where there is no Triton either."""
        kernels = self.kernels_for(x)
        if kernels is None or kernels.backend == "triton":
            return kernels
        backends.refuse(f"csrc has no kernels named {', '.join(self.triton_only)}")
        return kernels if hasattr(kernels, self.triton_only[0]) else None

    def _find(self, device: torch.device) -> K | None:
        backend = backends.choose(device)
        unasked = backend == "cpu" and backends.get_backend() is None
        kernels: Any = None
        if backend == "triton":
            found = self._of_triton(set(self.ops).difference(self.csrc_only))
            kernels = SimpleNamespace(backend=backend, unasked=False, **found)
        elif backend == "cuda" or (backend == "cpu" and self._cpu):
            # What an OpOverload calls, without the Python call around it: 0.3 us.
            in_csrc = set(self.ops).difference(self.triton_only)
            packets = {op: getattr(torch.ops.fastlayers, op).default._op for op in in_csrc}
            if self.triton_only and backends.problem("triton", device) is None:
                packets |= self._of_triton(self.triton_only)
            kernels = SimpleNamespace(backend=backend, unasked=unasked, **packets)
        elif backend == "cpu":
            backends.refuse(f"csrc has no {self.name} for CPU tensors; torch's own serves them")
        self._by_device[device] = kernels
        return kernels

    def _of_triton(self, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
        module = importlib.import_module(f"fastlayers.kernels.{self.name}")
        return {op: observable(getattr(module, op)) for op in names}

    def in_graphs(self) -> K:
        """The raw ops as graphs of torch.compile hold them: those of ``csrc``, or opaque ops of Triton kernels."""
        csrc = graph_ops.graph_holds_csrc()
        if csrc not in self._in_graphs:
            found: Any = SimpleNamespace(backend="cuda" if csrc else "triton", unasked=False)
            for op, fake in self.ops.items():
                if op in self.triton_only:  # Graphs hold their references.
                    continue
                if csrc:
                    setattr(found, op, getattr(torch.ops.fastlayers, op).default)
                elif op not in self.csrc_only and not op.endswith("_"):  # no graph holds an op that writes its input
                    module = importlib.import_module(f"fastlayers.kernels.{self.name}")
                    setattr(found, op, graph_ops.opaque(f"fastlayers_triton::{op}", getattr(module, op), fake, "cuda"))
            self._in_graphs[csrc] = found
        return self._in_graphs[csrc]

    def graph_op_of(self, pair: type[Pair], name: str, returns: Any = Tensor) -> Callable[..., Any]:
        """The same as :func:`fastlayers.ops.graph_ops.graph_op_of`, with the kernels of :meth:`in_graphs`."""
        return graph_ops.graph_op_of(pair, name, returns, self.in_graphs)

    def graph_op(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """``function(kernels, *args)`` as an op of graphs, see :func:`fastlayers.ops.graph_ops.graph_op_of`."""

        def define(function: Callable[..., Any]) -> Callable[..., Any]:
            return graph_ops.define_graph_op(
                name, graph_ops.schema_of(function, skip=1), lambda *args: function(self.in_graphs(), *args)
            )

        return define


#: Who is to see the calls of kernels that are no operations of torch; None where nobody is.
_observer: Callable[..., Any] | None = None
_on_fakes: Callable[..., Any] | None = None


@contextmanager
def observed(observer: Callable[..., Any], on_fakes: Callable[..., Any] | None = None) -> Iterator[None]:
    """Let ``observer(kernel, *args)`` call the Triton kernels, which torch's dispatcher does not see.

    ``on_fakes(op, fake, *args)`` is given those of ``csrc`` for fake tensors, which become plain ones: the dispatcher
    would make numbers of symbolic sizes. ``fake(*args)`` is what says how the results look.
    """
    global _observer, _on_fakes
    _observer, _on_fakes = observer, on_fakes
    _forget_choices()
    try:
        with nullcontext() if on_fakes is None else guard.fakes_as_plain():
            yield
    finally:
        _observer = _on_fakes = None
        _forget_choices()


def is_observed() -> bool:
    """Whether a call is recorded."""
    return _observer is not None


def observable(kernel: Callable[..., R]) -> Callable[..., R]:
    """A Triton kernel as it is to be called now."""
    return kernel if _observer is None else partial(_observe, kernel)


def _observe(kernel: Callable[..., Any], *args: Any) -> Any:
    # A node of autograd keeps its kernels. If these kept the observer, which keeps the results of the node, none of
    # them would ever be freed: Python's collector does not see that a tensor keeps its node.
    return kernel(*args) if _observer is None else _observer(kernel, *args)
