"""batch_norm with a residual and an activation: the choice between kernel and reference, autograd, torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import bias_act, elementwise, graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE, NORM_CODES, activation
from fastlayers.ops.pairs import Gradients, Needs

RELU = ACTIVATIONS["relu"].code

#: Elements from which an unforced call on a CPU gets the kernels. With 2 threads they gain 1.1x to 4x from here on, and
#: nothing below.
CPU_LEAST = 2**18
#: Pixels of a contiguous plane from which the kernels are faster than torch: in planes of 7 by 7 they lose a half.
CPU_PLANE = 1024


class Kernels(raw_ops.Kernels):
    @staticmethod
    def batch_norm_train(
        x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        momentum: float, eps: float, residual: Tensor | None, act: int, bits: bool,
        num_batches_tracked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(x), _empty_stats(x), _empty_bits(x, bits)

    @staticmethod
    def batch_norm_moments(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, act: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        stats = _empty_stats(x)
        return torch.empty_like(x), stats, _empty_bits(x, is_packed(residual, act)), torch.empty_like(stats)

    @staticmethod
    def batch_norm_update_(
        running_mean: Tensor, running_var: Tensor, num_batches_tracked: Tensor | None, moments: Tensor, momentum: float
    ) -> None:
        return None

    @staticmethod
    def batch_norm_eval(
        x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        residual: Tensor | None, act: int, bits: bool, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(x), _empty_stats(x, keep), _empty_bits(x, bits)

    @staticmethod
    def batch_norm_backward(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, training: bool,
        residual: Tensor | None, bits: Tensor | None, act: int, dresidual: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        like = stats if weight is None else weight
        dweight, dbias = (like.new_empty(x.shape[1]) for _ in range(2))
        return torch.empty_like(x), torch.empty_like(x) if dresidual else x.new_empty(0), dweight, dbias

    @staticmethod
    def channel_bias_act_(x: Tensor, bias: Tensor, residual: Tensor | None, act: int) -> None:
        return None


def _empty_stats(x: Tensor, keep: bool = True) -> Tensor:
    return x.new_empty((2, x.shape[1]) if keep else 0, dtype=layouts.accumulator(x))


def _empty_bits(x: Tensor, packed: bool) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8 if packed else 0, dtype=torch.uint8)


FAMILY = raw_ops.Family("batch_norm", Kernels, cpu=True, csrc_only=("batch_norm_update_",))


def is_packed(residual: Tensor | None, act: int) -> bool:
    """Whether one bit an element says where the activation was positive, so that backward needs no argument of it."""
    return residual is not None and act == RELU


def unsupported(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, residual: Tensor | None,
) -> str | None:  # fmt: skip
    """Why no kernel takes this call, None where one does."""
    dtype = x.dtype
    if dtype not in guard.FLOATING:
        return f"no kernel for {dtype}"
    if not layouts.is_image(x):
        return (
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; kernels take (N, C, *) contiguous or channels_last"
        )
    channels = (x.shape[1],)
    values = x.numel()
    if values == 0 or (training and values == channels[0]):
        return f"nothing to normalise in shape {tuple(x.shape)}"
    if eps <= 0:
        return f"eps is {eps}; kernels take a positive one"
    device = x.get_device()
    for parameter in (weight, bias, running_mean, running_var):
        if parameter is not None:
            problem = guard.parameter_problem(parameter, device, dtype, channels)
            if problem is not None:
                return problem
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return f"the weight is {weight.dtype}, and the bias {bias.dtype}"
    if running_mean is None or running_var is None:
        if not training or running_mean is not running_var:
            return "running statistics are missing"
    elif running_mean.dtype != running_var.dtype:
        return f"the running mean is {running_mean.dtype}, and the running variance {running_var.dtype}"
    if residual is None:
        return None
    if not guard.is_plain(residual) or residual.dtype != dtype or residual.device != x.device:
        return f"the residual is a {type(residual).__name__} of {residual.dtype} on {residual.device}, and x of {dtype}"
    if residual.shape != x.shape:
        return f"the residual has shape {tuple(residual.shape)}, and x {tuple(x.shape)}"
    return None


def _torch_is_as_fast(x: Tensor, training: bool, residual: Tensor | None, act: int) -> bool:
    """Whether a CPU has to be asked for these kernels. In eval a bare norm is one pass of torch as well."""
    if x.dtype not in guard.CPU_DTYPES or x.dim() < 2 or x.numel() < CPU_LEAST:
        return True
    if not training and act == 0 and residual is None:
        return True
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    if pixels == 1 or not x.is_contiguous():
        return False
    return pixels < CPU_PLANE or (x.dtype != torch.float32 and act != RELU)


class BatchNorm(pairs.Pair, inputs=4):
    """Keeps x, the weight, the mean and rstd of each channel; for an activation the bias and the residual, from which
    backward recomputes its argument, or for relu after a residual one bit an element."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, training: bool, momentum: float, eps: float, act: int,
        num_batches_tracked: Tensor | None,
    ) -> Any:  # fmt: skip
        packs = bool(needs) and is_packed(residual, act)
        if training:
            y, stats, bits = kernels.batch_norm_train(
                x, running_mean, running_var, weight, bias, momentum, eps, residual, act, packs, num_batches_tracked
            )
        else:
            assert running_mean is not None
            assert running_var is not None
            y, stats, bits = kernels.batch_norm_eval(
                x, running_mean, running_var, weight, bias, eps, residual, act, packs, bool(needs)
            )
        return y, kept(x, residual, weight, bias, stats, bits, act), (training, eps, act)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, stats: Tensor, training: bool, eps: float, act: int,
    ) -> Gradients:  # fmt: skip
        for_residual = act != 0 and needs[1]  # without an activation it is dy itself
        dx, dresidual, dweight, dbias = kernels.batch_norm_backward(
            dy, x, weight, bias, stats, training, residual, bits, act, for_residual
        )
        return dx, dresidual if act else dy, dweight, dbias

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, *args: Any) -> Gradients:
        return decomposed_backward(dy, *args)


class BatchNormInGraph(pairs.Pair, inputs=4):
    """BatchNorm in training, with the moments of x as a result: an op in a graph may not write its arguments."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        eps: float, act: int,
    ) -> Any:  # fmt: skip
        y, stats, bits, moments = kernels.batch_norm_moments(x, weight, bias, eps, residual, act)
        return (y, moments), kept(x, residual, weight, bias, stats, bits, act), (True, eps, act)

    @staticmethod
    def constant(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        return results[1:]

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, dy: Tensor, _: None, *args: Any) -> Gradients:
        return BatchNorm.raw_backward(kernels, needs, dy, *args)

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, _: None, *args: Any) -> Gradients:
        return BatchNorm.differentiable_backward(needs, dy, *args)


# A graph that trains keeps the kernels, whose two passes Inductor does not reach, and updates the running statistics
# with the moments. In eval the norm is elementwise, and Inductor fuses it with its neighbours.
_in_graph = FAMILY.graph_op_of(BatchNormInGraph, "batch_norm", tuple[Tensor, Tensor])


def _update(
    running_mean: Tensor | None, running_var: Tensor | None, num_batches_tracked: Tensor | None, moments: Tensor,
    momentum: float,
) -> None:  # fmt: skip
    """Update the running statistics after a norm in a graph."""
    if running_mean is None or running_var is None:
        return count(num_batches_tracked, True)
    with torch.no_grad():
        if graph_ops.graph_holds_csrc() and is_count(num_batches_tracked, moments):  # one launch instead of three
            torch.ops.fastlayers.batch_norm_update_(running_mean, running_var, num_batches_tracked, moments, momentum)
            return None
        count(num_batches_tracked, True)
        for running, moment in ((running_mean, moments[0]), (running_var, moments[1])):
            running.copy_((1 - momentum) * running.to(moment.dtype) + momentum * moment)


def kept(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, stats: Tensor, bits: Tensor,
    act: int,
) -> Gradients:  # fmt: skip
    """What backward needs, in the order of ``batch_norm_backward``."""
    packed = is_packed(residual, act)
    recomputes = act != 0 and not packed
    return x, residual if recomputes else None, bits if packed else None, weight, bias if recomputes else None, stats


def decomposed_backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, training: bool, eps: float, act: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, residual, weight and bias in torch ops, in training with the statistics recomputed."""
    over = [d for d in range(x.dim()) if d != 1]
    channel = [-1 if d == 1 else 1 for d in range(x.dim())]

    def compose(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide, (mean, rstd) = x.to(stats.dtype), (t.view(channel) for t in stats)
        if training:
            mean = wide.mean(over, keepdim=True)
            rstd = torch.rsqrt((wide - mean).square().mean(over, keepdim=True) + eps)
        scale, shift = (t.to(stats.dtype).view(channel) for t in (weight, bias))
        z = (wide - mean) * rstd * scale + shift + residual
        if bits is not None:
            return torch.where(elementwise.unpack_bits(bits, x.shape, x.stride()), z, 0.0)
        return BY_CODE[act].function(z)

    weight = stats.new_ones(x.shape[1]) if weight is None else weight
    bias = torch.zeros_like(weight) if bias is None else bias
    residual = torch.zeros_like(x) if residual is None else residual
    tensors = (x, residual, weight, bias)
    return pairs.differentiate(compose, tensors, (True,) * 4, dy.to(stats.dtype))  # type: ignore[return-value]


def count(num_batches_tracked: Tensor | None, training: bool) -> None:
    """One batch more, where no kernel counts it."""
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)


def is_count(num_batches_tracked: Tensor | None, x: Tensor) -> bool:
    """Whether a kernel can count the batch."""
    return num_batches_tracked is None or (
        num_batches_tracked.dtype is torch.int64
        and num_batches_tracked.numel() == 1
        and guard.is_plain(num_batches_tracked)
        and num_batches_tracked.get_device() == x.get_device()
    )


def batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float, residual: Tensor | None, act: str | None,
    num_batches_tracked: Tensor | None,
) -> Tensor:  # fmt: skip
    code = activation(act).code
    if code >= NORM_CODES:
        z = batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, eps, residual, None, num_batches_tracked
        )
        return bias_act.bias_act(z, None, act, {})
    kernels = FAMILY.kernels_for(x)
    if kernels is not None and not (kernels.unasked and _torch_is_as_fast(x, training, residual, code)):
        reason = unsupported(x, running_mean, running_var, weight, bias, training, eps, residual)
        if reason is None:
            if not is_count(num_batches_tracked, x):
                count(num_batches_tracked, training)
                num_batches_tracked = None
            return BatchNorm.run(
                kernels, x, residual, weight, bias, running_mean, running_var, training, momentum, eps, code,
                num_batches_tracked,
            )  # fmt: skip
        backends.refuse(reason)
    elif (
        training
        and torch.compiler.is_compiling()
        and graph_ops.graph_keeps_kernel(x)
        and guard.wants_gradient(x, weight, bias, residual)
        and unsupported(x, running_mean, running_var, weight, bias, training, eps, residual) is None
    ):
        y, moments = _in_graph(x, residual, weight, bias, eps, code)
        _update(running_mean, running_var, num_batches_tracked, moments, momentum)
        return y
    count(num_batches_tracked, training)
    arguments = (x, running_mean, running_var, weight, bias, training)
    alone = backends.get_backend() is None and guard.is_plain(x) and not torch.compiler.is_compiling()
    if act == "relu" and residual is not None and alone:
        # torch's norm and one pass for the rest, by the kernel that add_relu has.
        z = reference.batch_norm(*arguments, momentum, eps, None, None)
        return elementwise.add_relu(z, residual)
    return guard.call_reference(reference.batch_norm, *arguments, momentum, eps, residual, act)
