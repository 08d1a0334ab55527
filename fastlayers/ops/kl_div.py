"""Divergences between distributions: the choice between kernel and reference, autograd, torch.compile.

Under torch.compile kl_div returns its reference, which Inductor fuses. The divergences between logits stay kernels:
Inductor reads a long row several times for its log-softmax.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as legacy

from fastlayers import backends
from fastlayers.ops import elementwise, graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs

#: What the kernels keep of a row: two maxima, two logarithms of sums of exponentials, two sums of products.
NUMBERS = 6

#: Elements from which unforced calls on a CPU get the kernels. A target in log space takes torch no logarithm, which is
#: most of what the kernel saves.
CPU_LEAST, CPU_LEAST_LOG = 2**17, 2**20

REDUCTIONS = ("none", "mean", "batchmean", "sum")
# The warning of torch.nn.functional.kl_div; the kernels do not call that.
_MEAN_WARNING = (
    "reduction: 'mean' divides the total loss by both the batch size and the support size."
    "'batchmean' divides only by the batch size, and aligns with the KL div math definition."
    "'mean' will be changed to behave the same as 'batchmean' in the next major release."
)


class Kernels(raw_ops.Kernels):
    @staticmethod
    def kl_div_sum(input: Tensor, target: Tensor, log_target: bool) -> Tensor:
        return input.new_empty((), dtype=layouts.accumulator(input))

    @staticmethod
    def kl_div_elements(input: Tensor, target: Tensor, log_target: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(torch.xlogy(target, target) - target * input, dtype=dtype)

    @staticmethod
    def kl_div_backward(
        dy: Tensor, input: Tensor | None, target: Tensor, log_target: bool, dinput: bool, dtarget: bool
    ) -> tuple[Tensor, Tensor]:
        like_input, like_target = (
            torch.empty_like(target) if wanted else target.new_empty((0,)) for wanted in (dinput, dtarget)
        )
        return like_input, like_target

    @staticmethod
    def divergence_forward(
        student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float, temperature: float
    ) -> tuple[Tensor, Tensor]:
        rows, wide = student.shape[0], layouts.accumulator(student)
        return student.new_empty((rows,), dtype=wide), student.new_empty((rows, NUMBERS), dtype=wide)

    @staticmethod
    def divergence_backward(
        dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float,
        temperature: float, stats: Tensor, dstudent: bool, dteacher: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        to_student, to_teacher = (student.new_empty(student.shape if wanted else 0) for wanted in (dstudent, dteacher))
        return to_student, to_teacher


FAMILY = raw_ops.Family("kl_div", Kernels, cpu=True)


def _gains(kernels: Kernels, x: Tensor, least: int) -> bool:
    """Whether a call that nobody forced gains by the kernels."""
    return not kernels.unasked or (x.numel() >= least and x.dtype in guard.CPU_DTYPES)


# ---- kl_div of log-probabilities -------------------------------------------------------------------------------------


class KLDiv(pairs.Pair, inputs=2):
    """The sum in the accumulation dtype, or the elements. Keeps the target, and the input for the target's gradient."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, input: Tensor, target: Tensor, log_target: bool, dtype: torch.dtype | None
    ) -> Any:
        if dtype is None:
            out = kernels.kl_div_sum(input, target, log_target)
        else:
            out = kernels.kl_div_elements(input, target, log_target, dtype)
        return out, (input if needs and needs[1] else None, target), (log_target,)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, input: Tensor | None, target: Tensor, log_target: bool
    ) -> Gradients:
        return kernels.kl_div_backward(dy, input, target, log_target, *needs)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, input: Tensor | None, target: Tensor, log_target: bool
    ) -> Gradients:
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
    input: Tensor, target: Tensor, size_average: bool | None, reduce: bool | None, reduction: str, log_target: bool
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = legacy.legacy_get_string(size_average, reduce)
    kernels = FAMILY.kernels_for(input)
    if kernels is not None and _gains(kernels, input, CPU_LEAST_LOG if log_target else CPU_LEAST):
        reason = elementwise.unsupported(input, target, True)
        if reason is None and reduction not in REDUCTIONS:
            reason = f"there is no reduction {reduction!r}"
        if reason is None:
            return _kl_div(input, target, reduction, log_target, kernels)
        backends.refuse(reason)
    return guard.call_reference(reference.kl_div, input, target, reduction, log_target)


def _kl_div(input: Tensor, target: Tensor, reduction: str, log_target: bool, kernels: Any) -> Tensor:
    if reduction == "mean":
        warnings.warn(_MEAN_WARNING, stacklevel=4)
    dtype = reference.loss_dtype(input)
    out: Tensor = KLDiv.run(kernels, input, target, log_target, dtype if reduction == "none" else None)
    if reduction == "none":
        return out
    if reduction == "mean":
        out = out / input.numel()
    elif reduction == "batchmean" and input.dim() != 0:
        out = out / input.shape[0]
    return out.to(dtype)


# ---- divergences between logits --------------------------------------------------------------------------------------


class Divergence(pairs.Pair, inputs=2):
    """Of each row of two matrices. Keeps both, the labels, and six numbers a row."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int,
        beta: float, temperature: float,
    ) -> Any:  # fmt: skip
        losses, stats = kernels.divergence_forward(student, teacher, labels, ignore_index, beta, temperature)
        return losses, (student, teacher, labels, stats), (ignore_index, beta, temperature)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None,
        stats: Tensor, ignore_index: int, beta: float, temperature: float,
    ) -> Gradients:  # fmt: skip
        options = (ignore_index, beta, temperature)
        return kernels.divergence_backward(dlosses, student, teacher, labels, *options, stats, *needs)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dlosses: Tensor, student: Tensor, teacher: Tensor, labels: Tensor | None, stats: Tensor,
        ignore_index: int, beta: float, temperature: float,
    ) -> Gradients:  # fmt: skip
        def compose(student: Tensor, teacher: Tensor) -> Tensor:
            q, p = student.to(dlosses.dtype), teacher.to(dlosses.dtype)
            return reference.divergence(q, p, labels, ignore_index, beta, temperature, False, "none")

        return pairs.differentiate(compose, (student, teacher), needs, dlosses)


_in_graph = FAMILY.graph_op_of(Divergence, "divergence")


def _unsupported(student: Tensor, teacher: object, labels: object) -> str | None:
    """Why no kernel takes this call, None where one does."""
    reason = elementwise.unsupported(student, teacher, True)
    if reason is not None:
        return reason
    if labels is None:
        return None
    if not guard.is_plain(labels):
        return f"it takes plain tensors, and got labels of {type(labels).__name__}"
    if labels.dtype != torch.int64 or labels.device != student.device:
        return f"the labels are {labels.dtype} on {labels.device}; the kernels take int64 on {student.device}"
    return None


def divergence(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float, temperature: float,
    square: bool, reduction: str,
) -> Tensor:  # fmt: skip
    """KL(teacher || student), or the Jensen-Shannon divergence with beta between 0 and 1."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction to be one of {', '.join(REDUCTIONS)}, but got {reduction!r}")
    if not (isinstance(temperature, float | int) and temperature > 0):
        raise ValueError(f"expected temperature to be a positive number, but got {temperature!r}")
    if not isinstance(student, Tensor):
        raise guard.expected_tensor(student)
    if student.dim() == 0:
        raise ValueError("expected rows of logits, but got one number")
    if labels is not None and labels.shape != student.shape[:-1]:
        raise ValueError(
            f"expected labels of shape {tuple(student.shape[:-1])}, one for each row of logits, "
            f"but got {tuple(labels.shape)}"
        )
    kernels = FAMILY.kernels_for(student)
    if kernels is not None and not _gains(kernels, student, CPU_LEAST):
        kernels = None
    in_graph = torch.compiler.is_compiling() and graph_ops.graph_keeps_kernel(student)
    reason = _unsupported(student, teacher, labels) if in_graph or kernels is not None else None
    if reason is not None and not in_graph:
        backends.refuse(reason)
    if reason is not None or not (in_graph or kernels is not None):
        options = (labels, ignore_index, beta, temperature, square, reduction)
        return guard.call_reference(reference.divergence, student, teacher, *options)
    classes = student.shape[-1]
    matrices = (student.reshape(-1, classes), teacher.reshape(-1, classes))
    flat = None if labels is None else labels.reshape(-1).contiguous()
    numbers = (ignore_index, float(beta), float(temperature))
    losses = _in_graph(*matrices, flat, *numbers) if in_graph else Divergence.run(kernels, *matrices, flat, *numbers)
    if reduction == "none":
        losses = losses.view(student.shape[:-1])
    dtype = reference.loss_dtype(student)
    return reference.reduced_rows(losses, labels, ignore_index, classes, temperature, square, reduction, dtype)
