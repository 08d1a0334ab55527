"""Which calls a kernel may serve, and who serves the others: the guard that every op has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from fastlayers import backends
from fastlayers.ops import reference

#: dtypes that the kernels take.
FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
#: Those that unforced calls of most families take on a CPU, whose kernels have no vectors of float64's exponentials.
CPU_DTYPES = FLOATING - {torch.float64}

#: Tensor types that a kernel may be handed. Other subclasses (DTensor, FakeTensor, nested) have ways of their own.
PLAIN: tuple[type, ...] = (Tensor, torch.nn.Parameter)

_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_is_tracing: Callable[[], bool] = torch._C._is_tracing
_top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
#: ``is_grads_batched`` goes through the older vmap, which those of torch.func do not see.
_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

R = TypeVar("R")


def is_plain(t: object) -> TypeGuard[Tensor]:
    """Whether ``t`` is a tensor that a kernel may be handed."""
    return type(t) in PLAIN


@contextmanager
def fakes_as_plain() -> Iterator[None]:
    """Within, fake tensors are taken for plain ones, so that ops choose what they choose for these."""
    global PLAIN
    before, PLAIN = PLAIN, (*PLAIN, FakeTensor)
    try:
        yield
    finally:
        PLAIN = before


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
