"""Divergences between distributions: the choice between kernel and reference, autograd, what torch.compile sees.

Under torch.compile kl_div returns its reference: elementwise and a sum, which Inductor fuses. The divergences between
logits stay kernels there: log-softmaxes of long rows are what Inductor reads several times.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as legacy

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, reference

FAMILY = dispatch.Family(
    "kl_div",
    ("kl_div_sum", "kl_div_elements", "kl_div_backward", "divergence_forward", "divergence_backward"),
    cpu=False,
)

#: What the kernels keep of a row: two maxima, two logarithms of sums of exponentials, two sums of products.
NUMBERS = 6

REDUCTIONS = ("none", "mean", "batchmean", "sum")
# Of torch.nn.functional.kl_div, which the kernels do not call.
_MEAN_WARNING = (
    "reduction: 'mean' divides the total loss by both the batch size and the support size."
    "'batchmean' divides only by the batch size, and aligns with the KL div math definition."
    "'mean' will be changed to behave the same as 'batchmean' in the next major release."
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which a kernel computes."""
    return torch.float32 if dtype in reference.HALF else dtype


def _loss_dtype(x: Tensor) -> torch.dtype:
    """dtype of a loss: autocast runs torch's kl_div in float32."""
    return torch.float32 if x.dtype in reference.HALF and torch.is_autocast_enabled(x.device.type) else x.dtype


# ---- kl_div of log-probabilities -------------------------------------------------------------------------------------


class _KLDiv(torch.autograd.Function):
    """The sum in the type of the computation, or the elements. Keeps the target, and the input for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, target: Tensor, log_target: bool, dtype: torch.dtype | None, kernels: Any
    ) -> Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, target)
        ctx.log_target, ctx.kernels = log_target, kernels
        return _forward(input, target, log_target, dtype, kernels)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        input, target = ctx.saved_tensors
        for_input, for_target = ctx.needs_input_grad[:2]
        if dispatch.differentiating(dy):
            dinput, dtarget = _compose_kl_div_backward(dy, input, target, ctx.log_target)
        else:
            dinput, dtarget = ctx.kernels.kl_div_backward(dy, input, target, ctx.log_target, for_input, for_target)
        return dinput if for_input else None, dtarget if for_target else None, None, None, None


def _forward(input: Tensor, target: Tensor, log_target: bool, dtype: torch.dtype | None, kernels: Any) -> Tensor:
    if dtype is None:
        return kernels.kl_div_sum(input, target, log_target)  # type: ignore[no-any-return]
    return kernels.kl_div_elements(input, target, log_target, dtype)  # type: ignore[no-any-return]


def _compose_kl_div_backward(
    dy: Tensor, input: Tensor | None, target: Tensor, log_target: bool
) -> tuple[Tensor, Tensor | None]:
    """The backward kernel in torch ops, for whoever differentiates it again."""
    weighted = dy * (target.exp() if log_target else target)
    dtarget = None
    if input is not None:
        if log_target:
            dtarget = weighted * (target - input + 1.0)
        else:
            dtarget = torch.xlogy(dy, target) + weighted / target - dy * input
        dtarget = dtarget.to(target.dtype)
    return -weighted.to(target.dtype), dtarget


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None,
    reduce: bool | None,
    reduction: str,
    log_target: bool,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = legacy.legacy_get_string(size_average, reduce)
    if torch.compiler.is_compiling():
        return reference.kl_div(input, target, reduction, log_target)
    kernels = FAMILY.serving(input)
    if kernels is not None:
        reason = elementwise.unsupported(input, target, True)
        if reason is None and reduction not in REDUCTIONS:
            reason = f"there is no reduction {reduction!r}"
        if reason is None:
            return _kl_div(input, target, reduction, log_target, kernels)
        backends.refuse(reason)
    return dispatch.answer("kl_div", input, target, reduction, log_target)  # type: ignore[no-any-return]


def _kl_div(input: Tensor, target: Tensor, reduction: str, log_target: bool, kernels: Any) -> Tensor:
    if reduction == "mean":
        warnings.warn(_MEAN_WARNING, stacklevel=4)
    dtype = _loss_dtype(input)
    args = (input, target, log_target, dtype if reduction == "none" else None, kernels)
    wanted = torch.is_grad_enabled() and (input.requires_grad or target.requires_grad)
    out: Tensor = _KLDiv.apply(*args) if wanted else _forward(*args)
    if reduction == "none":
        return out
    if reduction == "mean":
        out = out / input.numel()
    elif reduction == "batchmean" and input.dim() != 0:
        out = out / input.shape[0]
    return out.to(dtype)


# ---- divergences between logits --------------------------------------------------------------------------------------


class _Divergence(torch.autograd.Function):
    """Of each row of two matrices. Keeps both, the labels, and six numbers a row."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float,
        temperature: float, kernels: Any,
    ) -> Tensor:  # fmt: skip
        losses, stats = kernels.divergence_forward(student, teacher, labels, ignore_index, beta, temperature)
        ctx.save_for_backward(student, teacher, labels, stats)
        ctx.rest = ignore_index, beta, temperature
        ctx.kernels = kernels
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, labels, stats = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if dispatch.differentiating(dlosses):
            grads = _compose_divergence_backward(dlosses, student, teacher, labels, *ctx.rest)
        else:
            grads = ctx.kernels.divergence_backward(
                dlosses, student, teacher, labels, *ctx.rest, stats, wanted[0], wanted[1]
            )
        return *(grad if wants else None for grad, wants in zip(grads, wanted, strict=True)), *(None,) * 5


def _compose_divergence_backward(
    dlosses: Tensor,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    ignore_index: int,
    beta: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The backward kernel in torch ops, for whoever differentiates it again."""
    g = dlosses.unsqueeze(-1) / temperature
    if labels is not None:
        counts = (labels != ignore_index).unsqueeze(-1)
        g = torch.where(counts, g, 0.0)
        student, teacher = torch.where(counts, student, 0.0), torch.where(counts, teacher, 0.0)
    log_q, log_p = (reference.log_softmax_at(t, temperature) for t in (student, teacher))
    q, p = log_q.exp(), log_p.exp()

    def gradient(share: float, probability: Tensor, difference: Tensor) -> Tensor:
        difference = torch.where(probability > 0, difference, 0.0)
        centred = difference - (probability * difference).sum(-1, keepdim=True)
        return share * g * (probability * centred)

    if beta == 0.0:
        dstudent, dteacher = g * (q - p), gradient(1.0, p, log_p - log_q)
    else:
        log_m = reference.log_mixture(p, q, beta)
        dstudent, dteacher = gradient(1.0 - beta, q, log_q - log_m), gradient(beta, p, log_p - log_m)
    return dstudent.to(student.dtype), dteacher.to(teacher.dtype)


def _unsupported(student: Tensor, teacher: object, labels: object) -> str | None:
    """Why no kernel takes this call, None where one does."""
    reason = elementwise.unsupported(student, teacher, True)
    if reason is not None:
        return reason
    if labels is None:
        return None
    if not dispatch.is_plain(labels):
        return f"it takes plain tensors, and got labels of {type(labels).__name__}"
    assert isinstance(labels, Tensor)
    if labels.dtype != torch.int64 or labels.device != student.device:
        return f"the labels are {labels.dtype} on {labels.device}; the kernels take int64 on {student.device}"
    return None


def divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    ignore_index: int,
    beta: float,
    temperature: float,
    square: bool,
    reduction: str,
) -> Tensor:
    """KL(teacher || student), or the Jensen-Shannon divergence with beta between 0 and 1."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction to be one of {', '.join(REDUCTIONS)}, but got {reduction!r}")
    if not (isinstance(temperature, float | int) and temperature > 0):
        raise ValueError(f"expected temperature to be a positive number, but got {temperature!r}")
    if student.dim() == 0:
        raise ValueError("expected rows of logits, but got one number")
    if labels is not None and labels.shape != student.shape[:-1]:
        raise ValueError(
            f"expected labels of shape {tuple(student.shape[:-1])}, one for each row of logits, "
            f"but got {tuple(labels.shape)}"
        )
    compiling = torch.compiler.is_compiling()
    if compiling:
        kernels = None
        serves = dispatch.graph_keeps_kernel(student) and _unsupported(student, teacher, labels) is None
    else:
        kernels = FAMILY.serving(student)
        reason = None if kernels is None else _unsupported(student, teacher, labels)
        serves = kernels is not None and reason is None
        if reason is not None:
            backends.refuse(reason)
    if not serves:
        args = (student, teacher, labels, ignore_index, beta, temperature, square, reduction)
        return reference.divergence(*args) if compiling else dispatch.answer("divergence", *args)
    classes = student.shape[-1]
    matrices = (student.reshape(-1, classes), teacher.reshape(-1, classes))
    flat = None if labels is None else labels.reshape(-1).contiguous()
    options = (flat, ignore_index, float(beta), float(temperature))
    if compiling:
        losses, _ = divergence_op(*matrices, *options)
    elif dispatch.wants_gradient(student, teacher):
        losses = _Divergence.apply(*matrices, *options, kernels)
    else:
        assert kernels is not None
        losses, _ = kernels.divergence_forward(*matrices, *options)
    if reduction == "none":
        losses = losses.view(student.shape[:-1])
    dtype = _loss_dtype(student)
    return reference.reduced_rows(losses, labels, ignore_index, classes, temperature, square, reduction, dtype)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def _fake_forward(student: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, wide = student.shape[0], _wide(student.dtype)
    return student.new_empty((rows,), dtype=wide), student.new_empty((rows, NUMBERS), dtype=wide)


def _fake_backward(
    dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float,
    temperature: float, stats: Tensor, dstudent: bool, dteacher: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return tuple(student.new_empty(student.shape if wanted else (0,)) for wanted in (dstudent, dteacher))  # type: ignore[return-value]


@torch.library.custom_op("fastlayers::divergence", mutates_args=(), device_types="cuda")
def divergence_op(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    kernels = FAMILY.serving(student)
    return kernels.divergence_forward(student, teacher, labels, ignore_index, beta, temperature)  # type: ignore[no-any-return]


@torch.library.custom_op("fastlayers::divergence_grad", mutates_args=(), device_types="cuda")
def divergence_grad_op(
    dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float,
    temperature: float, stats: Tensor, dstudent: bool, dteacher: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kernels = FAMILY.serving(student)
    return kernels.divergence_backward(  # type: ignore[no-any-return]
        dlosses, student, teacher, labels, ignore_index, beta, temperature, stats, dstudent, dteacher
    )


dispatch.register_fake(divergence_op, _fake_forward)
dispatch.register_fake(divergence_grad_op, _fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    student, teacher, labels, *ctx.rest = inputs
    ctx.save_for_backward(student, teacher, labels, output[1])


def _op_backward(ctx: Any, dlosses: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    student, teacher, labels, stats = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    grads = divergence_grad_op(dlosses, student, teacher, labels, *ctx.rest, stats, wanted[0], wanted[1])
    return *(grad if wants else None for grad, wants in zip(grads, wanted, strict=True)), *(None,) * 4


divergence_op.register_autograd(_op_backward, setup_context=_setup_context)

dispatch.register_fakes(
    {
        "kl_div_sum": lambda input, target, log_target: input.new_empty((), dtype=_wide(input.dtype)),
        "kl_div_elements": lambda input, target, log_target, dtype: torch.empty_like(
            torch.xlogy(target, target) - target * input, dtype=dtype
        ),
        "kl_div_backward": lambda dy, input, target, log_target, dinput, dtarget: tuple(
            torch.empty_like(target) if wanted else target.new_empty((0,)) for wanted in (dinput, dtarget)
        ),
        "divergence_forward": _fake_forward,
        "divergence_backward": _fake_backward,
    }
)
