"""The machinery that every op shares: the guard, the kernels of a family, and one op as autograd and graphs take it.

A family declares its raw ops once, as a class of static methods (:class:`Kernels`). An op that autograd can record is a
:class:`Pair` of a forward and a backward that call raw ops. Everything else follows from these two: the autograd
Function of eager mode, the op that torch.compile puts into its graphs, and what a trace is told about shapes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fastlayers import backends
from fastlayers.ops import reference

#: dtypes that the kernels take.
FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
#: Those that unforced calls of most families take on a CPU, whose kernels have no vectors of float64's exponentials.
CPU_DTYPES = FLOATING - {torch.float64}

#: Tensor types that a kernel may be handed. Other subclasses (DTensor, FakeTensor, nested) have ways of their own.
PLAIN = (Tensor, torch.nn.Parameter)
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_is_tracing: Callable[[], bool] = torch._C._is_tracing
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
#: ``is_grads_batched`` goes through the older vmap, which those of torch.func do not see.
_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: A tensor without the functorch wrapper that it outlived; any other tensor as it is.
unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


R = TypeVar("R")

#: For each of the first arguments of an op whether it needs a gradient; empty where autograd records nothing.
Needs: TypeAlias = tuple[bool, ...]
#: What a backward returns: a gradient, or None, for each of them.
Gradients: TypeAlias = tuple[Tensor | None, ...]


# ---- the guard -------------------------------------------------------------------------------------------------------


def is_plain(t: object) -> TypeGuard[Tensor]:
    """Whether ``t`` is a tensor that a kernel may be handed."""
    return type(t) in PLAIN


def is_dtensor(t: object) -> bool:
    """Whether ``t`` is a DTensor. By its name: torch.distributed.tensor takes a second to import."""
    return type(t).__name__ == "DTensor"


#: ``answer_sharded(function, *args)``: what the rule of a reference makes of a call whose first argument is a DTensor;
#: None where the reference has to be called. :mod:`fastlayers.ops.sharding`, which knows all ops, puts it here.
answer_sharded: Callable[..., Any] = lambda function, *args: None  # noqa: E731


def must_decompose() -> bool:
    """Whether ops must consist of torch ops now: under a functorch transform, forward-mode AD or a jit trace."""
    return _transforms_active() or forward_ad._current_level >= 0 or _is_tracing()


def needs_double_backward(dy: Tensor) -> bool:
    """Whether a backward must itself consist of torch ops: under ``create_graph``, vmapped, or on a tensor subclass.

    AOTAutograd's subclass is an exception: it puts the kernels into its graphs.
    """
    return (
        torch.is_grad_enabled()
        or (type(dy) not in PLAIN and not isinstance(dy, FunctionalTensor))
        or _is_batched(dy)
        or must_decompose()
    )


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd has to record a call on these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


class KeptAsIs:
    """Hooks on saved tensors that keep them: those of a recording, which are not the ones of the call."""

    def __call__(self, t: Tensor) -> Tensor:
        return t


kept_as_is = KeptAsIs()


def hooks_decide_what_is_kept() -> bool:
    """Whether hooks on saved tensors decide what autograd keeps, as those of checkpoints do."""
    hooks = _top_saved_tensors_hooks(False)
    return hooks is not None and not isinstance(hooks[0], KeptAsIs)


@cache
def _compiled(function: Callable[..., R]) -> Callable[..., R]:
    return torch.compile(function)


def call_reference(function: Callable[..., R], *args: Any) -> R:
    """``function(*args)`` for a function of :mod:`fastlayers.ops.reference`, compiled where that backend is forced.

    DTensors get what :data:`answer_sharded` has for them.
    """
    if torch.compiler.is_compiling():
        return function(*args)
    if type(args[0]) not in PLAIN and is_dtensor(args[0]):
        found = answer_sharded(function, *args)
        if found is not None:
            return found
    if backends.get_backend() == "compile" and not must_decompose():
        return _compiled(function)(*args)
    try:
        return function(*args)
    except AttributeError as error:
        raise not_tensors(error, *args) from None


def expected_tensor(value: object) -> TypeError:
    """The error of an argument that should be a tensor."""
    return TypeError(f"argument must be Tensor, not {type(value).__name__}")


def not_tensors(error: AttributeError, *args: object) -> Exception:
    """The error of an argument that lacks an attribute since it is not a tensor; any other AttributeError as it is."""
    given = any(error.obj is value for value in args) and not isinstance(error.obj, Tensor)
    return expected_tensor(error.obj) if given else error


# ---- derivatives of a composition ------------------------------------------------------------------------------------


def differentiate(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> Gradients:
    """The gradients of ``function(*tensors)`` that are needed, under ``create_graph`` with a graph of their own."""

    def alias(t: Tensor) -> Tensor:  # an argument may itself depend on another one
        return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()

    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [alias(t) if t is not None and needed else t for t, needed in zip(tensors, needs, strict=True)]
        out = function(*aliases)
    wanted = [t for t, needed in zip(aliases, needs, strict=True) if t is not None and needed]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=create_graph))
    return tuple(next(found) if needed else None for needed in needs)


# ---- the raw ops of a family -----------------------------------------------------------------------------------------


class Kernels:
    """The raw ops of a family: what a call is handed, once the guard has chosen a backend.

    A subclass declares each raw op as a static method with the name and the signature that ``csrc/<family>.cu`` and
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
                _register_fake(f"fastlayers::{op}", fake)

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
        if type(x) not in PLAIN:
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
        return found

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
        csrc = graph_holds_csrc()
        if csrc not in self._in_graphs:
            found: Any = SimpleNamespace(backend="cuda" if csrc else "triton", unasked=False)
            for op, fake in self.ops.items():
                if op in self.triton_only:  # Graphs hold their references.
                    continue
                if csrc:
                    setattr(found, op, getattr(torch.ops.fastlayers, op).default)
                elif op not in self.csrc_only and not op.endswith("_"):  # no graph holds an op that writes its input
                    module = importlib.import_module(f"fastlayers.kernels.{self.name}")
                    setattr(found, op, opaque(f"fastlayers_triton::{op}", getattr(module, op), fake, "cuda"))
            self._in_graphs[csrc] = found
        return self._in_graphs[csrc]

    def graph_op_of(self, pair: type[Pair], name: str, returns: Any = Tensor) -> Callable[..., Any]:
        """The same as :func:`graph_op_of`, with the kernels of :meth:`in_graphs`."""
        return graph_op_of(pair, name, returns, self.in_graphs)

    def graph_op(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """``function(kernels, *args)`` as an op of graphs, see :func:`graph_op_of`."""

        def define(function: Callable[..., Any]) -> Callable[..., Any]:
            return _define_graph_op(name, _schema(function, skip=1), lambda *args: function(self.in_graphs(), *args))

        return define


#: Who is to see the calls of kernels that are no operations of torch; None where nobody is.
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_observer: Callable[..., Any] | None = None


@contextmanager
def observed(observer: Callable[..., Any]) -> Iterator[None]:
    """Let ``observer(kernel, *args)`` call the Triton kernels, which torch's dispatcher does not see."""
    global _observer
    _observer = observer
    _forget_choices()
    try:
        yield
    finally:
        _observer = None
        _forget_choices()


def is_observed() -> bool:
    """Whether a call is recorded."""
    return _observer is not None


class Mode(TorchDispatchMode):
    """A mode of fastlayers, which knows the kernels."""

    #: Whether it has to see the operations of a forward one by one.
    needs_operations = True


class QuietMode(Mode):
    """A mode in which torch compiles, and runs what it has compiled, as outside of one.

    Dynamo skips a function that is called in another mode, in torch 2.13 for all calls to come, and raises an error if
    it was to compile all of it, as flex_attention asks. Of a DTensor the mode sees the operations on this rank's shard.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # The DTensor calls operations on the shard then.
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation."""
        raise NotImplementedError


def needs_operations() -> bool:
    """Whether a mode has to see the operations of a forward one by one."""
    return bool(_dispatch_modes()) and any(
        getattr(mode, "needs_operations", True) for mode in _get_current_dispatch_mode_stack()
    )


def sees_functions() -> bool:
    """Whether a mode of ``__torch_function__`` has to see the functions of torch that a forward calls: any but torch's
    default device, unless it says otherwise."""
    modes = map(torch._C._get_function_stack_at, range(_function_modes()))
    return any(type(mode) is not DeviceContext and getattr(mode, "needs_operations", True) for mode in modes)


def is_watched() -> bool:
    """Whether a mode of somebody else sees what torch's dispatcher does: a counter of FLOPs, or the policy of a
    selective checkpoint. They know the products of torch, and no kernel that has one inside."""
    return bool(_dispatch_modes()) and not all(isinstance(mode, Mode) for mode in _get_current_dispatch_mode_stack())


def observable(kernel: Callable[..., R]) -> Callable[..., R]:
    """A Triton kernel as it is to be called now."""
    return kernel if _observer is None else partial(_observe, kernel)


def _observe(kernel: Callable[..., Any], *args: Any) -> Any:
    # A node of autograd keeps its kernels. If these kept the observer, which keeps the results of the node, none of
    # them would ever be freed: Python's collector does not see that a tensor keeps its node.
    return kernel(*args) if _observer is None else _observer(kernel, *args)


_LIBRARY = torch.library.Library("fastlayers", "FRAGMENT")


def graph_op_of(
    pair: type[Pair], name: str, returns: Any = Tensor, kernels: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """``pair.run``, with results of a type, as an op ``fastlayers::<name>`` that Dynamo puts into a graph as it is.

    AOTAutograd then runs it, so that its graphs hold the raw ops of the forward and, from the Function that autograd
    recorded, those of the backward.
    """
    schema = _schema(pair.forward, skip=2, returns=returns)
    return _define_graph_op(name, schema, lambda *args: pair.run(kernels(), *args))


def _define_graph_op(name: str, schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.fastlayers, name).default


def _schema(function: Callable[..., Any], skip: int = 0, returns: Any = None) -> str:
    """The schema of an op with this function's annotations, without the first ``skip`` parameters."""
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[skip:]

    def declared() -> None: ...

    declared.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters], return_annotation=returns or hints["return"]
    )
    return torch.library.infer_schema(declared, mutates_args=())


def opaque(name: str, function: Callable[..., Any], fake: Callable[..., Any], device: str | None = None) -> Any:
    """``function`` as an op that no trace looks into; ``fake`` has its signature and describes its results."""
    op = torch.library.custom_op(name, function, mutates_args=(), device_types=device, schema=_schema(fake))
    _register_fake(op, fake)
    return op


def _register_fake(op: Any, fake: Callable[..., Any]) -> None:
    def describe(*args: Any, **kwargs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            show_to_inductor()
        return fake(*args, **kwargs)

    torch.library.register_fake(op, describe)


@cache
def show_to_inductor() -> None:
    """Register our ops with Inductor's lowerings before it meets one in a graph.

    It does so by itself in any case. But before torch 2.13 it then writes down, for a log, what each argument of the
    op is computed from, recursively: the time doubles with every block before the op. For the norm after the 12 blocks
    of a ViT that took more than minutes, or overflowed the stack.
    """
    if torch.__version__ >= "2.13":
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op_name = name.partition("::")
        # No graph that Inductor meets holds a composite op: AOTAutograd has looked into it.
        if namespace.startswith("fastlayers") and not _has_kernel(name, "CompositeImplicitAutograd"):
            op = getattr(getattr(torch.ops, namespace), op_name).default
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
            lowering.make_fallback(op, layout_constraint=constraint)


def _has_gpu_kernels() -> bool:
    return backends.choose(torch.device("cuda")) in ("cuda", "triton")


def graph_holds_csrc() -> bool:
    """Whether the kernels in graphs are those of ``csrc``."""
    return backends.choose(torch.device("cuda")) == "cuda"


# What torch.compiler.assume_constant_result does, without importing Dynamo (and Triton) for it: seconds of an import.
_has_gpu_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]
graph_holds_csrc._dynamo_marked_constant = True  # type: ignore[attr-defined]


def graph_keeps_kernel(x: Tensor) -> bool:
    """Whether a graph that torch.compile makes may hold a kernel as an opaque op. An exported one may not."""
    # The flag itself: within Dynamo, torch 2.11 answers is_exporting() with True under torch.compile as well.
    return x.is_cuda and not torch.compiler._is_exporting_flag and not is_dtensor(x) and _has_gpu_kernels()


# ---- an op as autograd, graphs and regions take it -------------------------------------------------------------------


class Pair:
    """A raw forward and a raw backward, with what is kept between the two. The docstring of a subclass says what.

    A subclass has three static methods, which contain no choice of backend and no autograd:

    - ``forward(kernels, needs, *args)`` returns ``(results, kept, rest)``: the tensors that backward needs, None where
      one is missing, and everything else that it needs.
    - ``backward(kernels, needs, *grads, *kept, *rest)`` returns a gradient, or None, for each of the first ``inputs``
      arguments; anything for those that need none.
    - ``differentiable_backward(needs, *grads, *kept, *rest)`` returns the same by torch ops, for a second derivative.

    ``needs`` says which of the first ``inputs`` arguments need a gradient; it is empty where nothing is recorded.

    Class keywords:
        inputs: number of arguments, the first ones, that are tensors and may need a gradient.
        materialize: whether a result without a gradient gets one of zeros; otherwise backward is given None.
    """

    forward: ClassVar[Callable[..., tuple[Any, tuple[Tensor | None, ...], tuple[Any, ...]]]]
    backward: ClassVar[Callable[..., Gradients]]
    differentiable_backward: ClassVar[Callable[..., Gradients]]

    #: The autograd Function of the pair.
    node: ClassVar[type[torch.autograd.Function]]
    #: ``run(kernels, *args)``: the results of the forward, recorded by autograd where an input needs a gradient.
    run: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, *, inputs: int, materialize: bool = True) -> None:
        _generate(cls, inputs, materialize)

    @staticmethod
    def non_differentiable(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        """The results that have no gradient although an input needs one."""
        return ()


def record_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` ends with, for calls that :meth:`Family.kernels_for` let through.

    Before torch 2.14 ``apply`` is Python and costs 3 us: it looks for a ``setup_context`` and an active transform, and
    goes through all arguments for tensors to :data:`unwrap`. The guard does the former, and the caller the latter.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


#: What :func:`_generate` makes of a pair, written out for its arguments: loops over them cost the host 2 us a call.
_TEMPLATE = """
def run(kernels, {args}):
    if is_grad_enabled() and ({wants_gradient}):
        return record({unwrapped}, (kernels, {rest}))
    return pair.forward(kernels, (), {args})[0]

def forward(ctx, {inputs}, rest):
    ctx.kernels, {rest} = rest
    results, kept, ctx.rest = pair.forward(ctx.kernels, ctx.needs_input_grad[:-1], {args})
    ctx.save_for_backward(*kept)
    return results

def forward_without_materialized_grads(ctx, {inputs}, rest):
    results = forward(ctx, {inputs}, rest)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*pair.non_differentiable(ctx.needs_input_grad[:-1], results))
    return results

def backward(ctx, *grads):
    needs = ctx.needs_input_grad[:-1]
    for dy in grads:
        if dy is not None and needs_double_backward(dy):
            {inputs}, = pair.differentiable_backward(needs, *grads, *ctx.saved_tensors, *ctx.rest)
            break
    else:
        {inputs}, = pair.backward(ctx.kernels, needs, *grads, *ctx.saved_tensors, *ctx.rest)
    return {needed}, None
"""


def _generate(pair: type[Pair], inputs: int, materialize: bool) -> None:
    """Give a pair its autograd Function and its ``run``."""
    _, _, *parameters = inspect.signature(pair.forward).parameters.values()
    names = [p.name for p in parameters]
    optional = {p.name for p in parameters if "None" in p.annotation}
    wants = [
        f"({t} is not None and {t}.requires_grad)" if t in optional else f"{t}.requires_grad" for t in names[:inputs]
    ]
    needed = [f"{t} if needs[{i}] else None" for i, t in enumerate(names[:inputs])]
    unwrapped = [f"None if {t} is None else unwrap({t})" if t in optional else f"unwrap({t})" for t in names[:inputs]]
    source = _TEMPLATE.format(
        args=", ".join(names),
        inputs=", ".join(names[:inputs]),
        rest=", ".join([*names[inputs:], ""]),
        wants_gradient=" or ".join(wants),
        unwrapped=", ".join(unwrapped),
        needed=", ".join(needed),
    )
    made: dict[str, Any] = {
        "pair": pair,
        "is_grad_enabled": torch.is_grad_enabled,
        "unwrap": unwrap,
        "needs_double_backward": needs_double_backward,
    }
    exec(compile(source, f"<fastlayers {pair.__name__}>", "exec"), made)
    forward = made["forward" if materialize else "forward_without_materialized_grads"]
    methods = {"__doc__": pair.__doc__, "forward": staticmethod(forward), "backward": staticmethod(made["backward"])}
    pair.node = type(pair.__name__, (torch.autograd.Function,), methods)
    made["record"] = record_of(pair.node)
    pair.run = staticmethod(made["run"])


# ---- shapes, layouts and parameters ----------------------------------------------------------------------------------


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of ``shape`` expands to ``target`` without ``target`` growing."""
    if len(shape) > len(target):
        return False
    return all(own in (1, size) for own, size in zip(reversed(shape), reversed(target), strict=False))


def parameter_problem(parameter: Tensor, device: int, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Why the norm kernels do not take this weight or bias, None where they do.

    ``device`` is x.get_device(), an int that costs less than a torch.device; ``dtype`` is the dtype that x counts as.
    """
    if (
        type(parameter) in PLAIN
        and ((own := parameter.dtype) is dtype or (own is torch.float32 and dtype in reference.LOW_PRECISION))
        and parameter.shape == shape
        and parameter.get_device() == device
        and parameter.is_contiguous()
    ):
        return None
    if not isinstance(parameter, Tensor):
        raise expected_tensor(parameter)
    given = f"{type(parameter).__name__} of {parameter.dtype}, shape {tuple(parameter.shape)} on {parameter.device}"
    return (
        f"a parameter is a {given}; kernels take contiguous plain tensors of {shape}, in {dtype}, or in float32 beside"
        " 16-bit inputs"
    )


def act_problem(act: str | None, x: Tensor) -> str | None:
    """Why no kernel applies this activation to x, None where one does."""
    if act == "softplus" and reference.norm_dtype("softplus", x) is not x.dtype:
        return "autocast runs softplus in float32"
    return None


def suggests_channels_last(x: Tensor) -> bool:
    """Whether torch lays out results for x as channels_last. Not only dense tensors make it do so."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(x) is not torch.contiguous_format


def is_image(x: Tensor) -> bool:
    """Whether x is (N, C, *) with dimensions and a layout that the norms over channels take."""
    dims = x.dim()
    return 2 <= dims <= 5 and (
        x.is_contiguous()
        or (dims == 4 and x.is_contiguous(memory_format=torch.channels_last))
        or (dims == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    )


def accumulator(x: Tensor) -> torch.dtype:
    """dtype in which the kernels accumulate, and in which they keep statistics."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``t`` in a given dense layout, copied where it has another."""
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
