"""The machinery that every op shares: the guard, the kernels of a backend, the answer where no kernel applies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, cached_property, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from fastlayers import backends
from fastlayers.ops import reference

#: dtypes that the kernels take.
FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: What kernels are handed: subclasses have ways of their own.
PLAIN = (Tensor, torch.nn.Parameter)
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_is_tracing: Callable[[], bool] = torch._C._is_tracing
#: ``is_grads_batched`` goes through the older vmap, which those of torch.func do not see.
_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_plain(t: object) -> bool:
    """A tensor that a kernel may be handed: subclasses (DTensor, FakeTensor, nested) have ways of their own."""
    return type(t) in PLAIN


def composing() -> bool:
    """Whether the ops must consist of torch ops now: a functorch transform, forward-mode AD or a jit trace looks on."""
    return _transforms_active() or forward_ad._current_level >= 0 or _is_tracing()


def differentiating(dy: Tensor) -> bool:
    """Whether a backward must itself be made of torch ops: under ``create_graph``, vmapped, or on a tensor subclass.

    Not on that of AOTAutograd, which puts the kernels into its graphs.
    """
    return (
        torch.is_grad_enabled()
        or (type(dy) not in PLAIN and not isinstance(dy, FunctionalTensor))
        or _is_batched(dy)
        or composing()
    )


#: A tensor that outlived the functorch transform which wrapped it, without the wrapper; any other as it is.
unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` ends with, for calls that :meth:`Family.serving` let through.

    Before torch 2.14 ``apply`` is Python: it looks for a ``setup_context`` and an active transform, which is known
    here, and goes through all arguments for tensors to :data:`unwrap`, which the caller does with those that may be
    some. That is 3 us of a call.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class Family:
    """The kernels of one family of ops, by device.

    A backend offers a family as a set of functions with the same names and signatures: overloads of the ops in ``csrc``
    for "cuda" and "cpu", and the module ``fastlayers.kernels.<family>`` for "triton".

    Args:
        name: name of the family, the same in every room.
        ops: names of its raw ops.
        cpu: whether ``csrc`` has the family for CPU tensors.
        csrc_only: names of raw ops that no Triton kernel stands beside. Who calls them asks for the backend "cuda".
    """

    def __init__(self, name: str, ops: tuple[str, ...], *, cpu: bool, csrc_only: tuple[str, ...] = ()) -> None:
        self.name = name
        self._ops = ops
        self._csrc_only = csrc_only
        self._cpu = cpu
        self._by_device: dict[torch.device, Any] = {}
        backends.on_change(self._by_device.clear)

    def serving(self, x: object) -> Any:
        """The kernels for calls on ``x``, or None where the reference has to answer.

        Raises:
            BackendError: a kernel backend is forced and cannot serve.
        """
        if type(x) not in PLAIN:
            return backends.refuse(f"it takes plain tensors, and got {type(x).__name__}")
        if composing():
            return backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        try:
            return self._by_device[x.device]  # type: ignore[attr-defined]
        except KeyError:
            return self._find(x.device)  # type: ignore[attr-defined]

    def _find(self, device: torch.device) -> Any:
        backend = backends.choose(device)
        kernels = None
        if backend == "triton":
            module = importlib.import_module(f"fastlayers.kernels.{self.name}")
            kernels = SimpleNamespace(backend=backend, apart=False, **{op: getattr(module, op) for op in self._ops})
        elif backend == "cuda" or (backend == "cpu" and self._cpu):
            # What an OpOverload calls, without the Python call around it: 0.3 us.
            packets = {op: getattr(torch.ops.fastlayers, op).default._op for op in (*self._ops, *self._csrc_only)}
            kernels = SimpleNamespace(backend=backend, apart=False, **packets)
        elif backend == "cpu":
            backends.refuse(f"csrc has no {self.name} for CPU tensors; torch's own serves them")
        self._by_device[device] = kernels
        return kernels

    @cached_property
    def in_graphs(self) -> SimpleNamespace:
        """The raw ops of ``csrc``, as what :func:`in_graph` marks calls them.

        Those of blocks ask for ``apart``: whether each tensor that they give has memory of its own, as graphs want it.
        In eager mode small ones share some, for each allocation costs the host half of a launch.
        """
        packets = {op: getattr(torch.ops.fastlayers, op).default for op in (*self._ops, *self._csrc_only)}
        return SimpleNamespace(apart=True, **packets)


@cache
def _compiled(op: str) -> Callable[..., Tensor]:
    return torch.compile(getattr(reference, op))


def answer(op: str, *args: Any) -> Any:
    """The op by its plain-PyTorch definition, compiled where that backend is forced."""
    if backends.get_backend() == "compile" and not composing():
        return _compiled(op)(*args)
    return getattr(reference, op)(*args)


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of ``shape`` expands to ``target`` without ``target`` growing."""
    if len(shape) > len(target):
        return False
    return all(own in (1, size) for own, size in zip(reversed(shape), reversed(target), strict=False))


def parameter_problem(parameter: Tensor, device: int, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Why the norm kernels do not take this weight or bias, None where they do.

    ``device`` is x.get_device(), which costs less than a torch.device, and ``dtype`` what x counts as.
    """
    own = parameter.dtype
    if (
        (own is dtype or (own is torch.float32 and dtype in reference.HALF))
        and type(parameter) in PLAIN
        and parameter.shape == shape
        and parameter.get_device() == device
        and parameter.is_contiguous()
    ):
        return None
    given = f"{type(parameter).__name__} of {own}, shape {tuple(parameter.shape)} on {parameter.device}"
    return (
        f"a parameter is a {given}; kernels take contiguous plain tensors of {shape}, in {dtype} or float32 to a half"
    )


def act_problem(act: str | None, x: Tensor) -> str | None:
    """Why no kernel applies this activation to x, None where one does."""
    if act == "softplus" and reference.norm_dtype("softplus", x) is not x.dtype:
        return "autocast runs softplus in float32"
    return None


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd has to record a call on these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def suggests_channels_last(x: Tensor) -> bool:
    """Whether torch would lay out results for x as channels_last, which not only dense tensors do."""
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


def with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``t`` in a given dense layout, copied where it has another."""
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _is_gpu_backend(device: str) -> bool:
    return backends.choose(torch.device(device)) in ("cuda", "triton")


def graph_holds_csrc() -> bool:
    """Whether the kernels in graphs are those of ``csrc``."""
    return backends.choose(torch.device("cuda")) == "cuda"


_in_graphs: list[Callable[..., Any]] = []


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo put calls of a function into its graphs as they are; AOTAutograd then looks into it.

    So a Function of eager mode serves graphs, too: they hold the raw ops of its forward and of its backward. Dynamo is
    told by :func:`graph_holds_functions`.
    """
    _in_graphs.append(function)
    return function


def graph_holds_functions() -> bool:
    """Whether graphs hold what :func:`in_graph` marks, which Dynamo knows from then on."""
    for function in _in_graphs:
        torch.compiler.allow_in_graph(function)
    return graph_holds_csrc()


# What torch.compiler.assume_constant_result does, without importing Dynamo (and Triton) for it: seconds of an import.
_is_gpu_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
graph_holds_csrc._dynamo_marked_constant = True  # type: ignore[attr-defined]
graph_holds_functions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def graph_keeps_kernel(x: Tensor) -> bool:
    """Whether a graph that torch.compile makes may hold a kernel as an opaque op. An exported one may not."""
    # The flag itself: within Dynamo, torch 2.11 answers is_exporting() with True under torch.compile as well.
    return x.is_cuda and not torch.compiler._is_exporting_flag and _is_gpu_backend("cuda")


def register_fakes(fakes: dict[str, Callable[..., Any]]) -> None:
    """Tell torch the shapes, dtypes and strides that raw ops of ``csrc`` give, for whoever traces them."""
    for op, fake in fakes.items():
        if hasattr(torch.ops.fastlayers, op):  # csrc was built
            register_fake(f"fastlayers::{op}", fake)


def register_fake(op: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The same of one op, a custom one or a raw one."""

    @wraps(fake)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            _show_to_inductor()
        return fake(*args, **kwargs)

    torch.library.register_fake(op, traced)
    return fake


@cache
def _show_to_inductor() -> None:
    """Have Inductor, which is there, call our ops as they are before it meets one in a graph.

    It does so in any case. But before torch 2.13 it then writes down, for a log, what each argument of the op is
    computed from and what that is computed from, over and over: in time that doubles with every block in front of it.
    The norm behind the 12 blocks of a ViT took it more than minutes, or its stack.
    """
    if torch.__version__ >= "2.13":
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("fastlayers::"):
            op = getattr(torch.ops.fastlayers, name.removeprefix("fastlayers::")).default
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
            lowering.make_fallback(op, layout_constraint=constraint)


def hold_raw(raw_ops: dict[Any, str]) -> None:
    """Let graphs that torch.compile makes hold raw ops of ``csrc`` in the place of custom ops, by these names.

    autograd has asked the custom op for its gradient before this looks. What remains of one in a graph is three calls
    of Python each time it runs, of which the raw op, with the same arguments and results, needs none.
    """

    def holding(raw: str) -> Callable[..., Any]:
        def trace(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
            if not graph_holds_csrc():
                return mode.__torch_dispatch__(func, types, args, kwargs or {})
            with mode:
                return getattr(torch.ops.fastlayers, raw).default(*args, **(kwargs or {}))

        return trace

    for op, raw in raw_ops.items():
        op.register_torch_dispatch(torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode, holding(raw))
