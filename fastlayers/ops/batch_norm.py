"""batch_norm with a residual and an activation: the choice between kernel and reference, autograd, torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import bias_act, dispatch, elementwise, reference
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE, NORM_CODES, activation

FAMILY = dispatch.Family(
    "batch_norm",
    ("batch_norm_train", "batch_norm_eval", "batch_norm_backward", "channel_bias_act_"),
    cpu=False,
)

RELU = ACTIVATIONS["relu"].code

#: The running mean and variance, training, momentum, eps, act, the count of batches and the kernels: what has no
#: gradient goes to autograd as one argument.
Rest: TypeAlias = tuple[Tensor | None, Tensor | None, bool, float, float, int, Tensor | None, Any]


def unsupported(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
    residual: Tensor | None,
) -> str | None:
    """Why no kernel takes this call, None where one does."""
    dtype = x.dtype
    if dtype not in dispatch.FLOATING:
        return f"no kernel for {dtype}"
    if not dispatch.is_image(x):
        return (
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; kernels take (N, C, *) contiguous or channels_last"
        )
    channels = (x.shape[1],)
    values = x.numel()
    if values == 0 or (training and values == channels[0]):
        return f"nothing to normalise in shape {tuple(x.shape)}"
    if eps <= 0:
        return f"eps is {eps}; kernels take a positive one"
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return f"the weight is {weight.dtype}, and the bias {bias.dtype}"
    if running_mean is None or running_var is None:
        if not training or running_mean is not running_var:
            return "running statistics are missing"
    elif running_mean.dtype != running_var.dtype:
        return f"the running mean is {running_mean.dtype}, and the running variance {running_var.dtype}"
    device = x.get_device()
    for parameter in (weight, bias, running_mean, running_var):
        if parameter is not None:
            problem = dispatch.parameter_problem(parameter, device, dtype, channels)
            if problem is not None:
                return problem
    if residual is None:
        return None
    if not dispatch.is_plain(residual) or residual.dtype != dtype or residual.device != x.device:
        return f"the residual is a {type(residual).__name__} of {residual.dtype} on {residual.device}, and x of {dtype}"
    if residual.shape != x.shape:
        return f"the residual has shape {tuple(residual.shape)}, and x {tuple(x.shape)}"
    return None


class _BatchNorm(torch.autograd.Function):
    """Keeps x, the weight, the mean and rstd of each channel; for an activation what says where it was: the bias, and
    where a residual was added that, of relu one bit an element instead of both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, rest: Rest
    ) -> Tensor:
        running_mean, running_var, training, momentum, eps, act, batches, kernels = rest
        packed = residual is not None and act == RELU
        if training:
            y, stats, bits = kernels.batch_norm_train(
                x, residual, weight, bias, running_mean, running_var, momentum, eps, act, packed, batches
            )
        else:
            y, stats, bits = kernels.batch_norm_eval(
                x, residual, weight, bias, running_mean, running_var, eps, act, packed, True
            )
        keep(ctx, x, residual, weight, bias, stats, bits, training, eps, act)
        ctx.kernels = kernels
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if dispatch.differentiating(dy):
            grads = compose_backward(dy, *ctx.saved_tensors, *ctx.rest)
        else:
            grads = gradients(ctx, dy, ctx.kernels.batch_norm_backward)
        return (*wanted(ctx, dy, grads), None)


_record = dispatch.recorder(_BatchNorm)


def keep(
    ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    bits: Tensor, training: bool, eps: float, act: int,
) -> None:  # fmt: skip
    ctx.save_for_backward(*kept(x, residual, weight, bias, stats, bits, act))
    ctx.rest = training, eps, act


def kept(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    bits: Tensor,
    act: int,
) -> tuple[Tensor | None, ...]:
    """What the backward wants: act's argument is computed anew from x, bias and residual, unless bits say it."""
    packed = residual is not None and act == RELU
    anew = act != 0 and not packed
    return x, residual if anew else None, bits if packed else None, weight, bias if anew else None, stats


def gradients(ctx: Any, dy: Tensor, backward: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight and dbias by the kernel, or the op that holds it in a compiled graph."""
    training, _, act = ctx.rest
    return backward(dy, *ctx.saved_tensors, training, act, act != 0 and ctx.needs_input_grad[1])  # type: ignore[no-any-return]


def wanted(ctx: Any, dy: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Of these gradients those that are wanted. Without an activation the residual's is dy itself."""
    dx, dresidual, dweight, dbias = grads
    _, for_residual, for_weight, for_bias = ctx.needs_input_grad[:4]
    to_residual = (dresidual if ctx.rest[2] else dy) if for_residual else None
    return dx, to_residual, dweight if for_weight else None, dbias if for_bias else None


def compose_backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, training: bool, eps: float, act: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward kernel in torch ops, in training the statistics too, for whoever differentiates it again."""
    over = [d for d in range(x.dim()) if d != 1]
    channel = [-1 if d == 1 else 1 for d in range(x.dim())]
    wide, dz = x.to(stats.dtype), dy.to(stats.dtype)
    if training:
        centered = wide - wide.mean(over, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(over, keepdim=True) + eps)
    else:
        centered = wide - stats[0].view(channel)
        rstd = stats[1].view(channel)
    normalized = centered * rstd
    scale = 1.0 if weight is None else weight.to(stats.dtype).view(channel)
    if bits is not None:
        dz = torch.where(elementwise.unpack_bits(bits, x.shape, x.stride()), dz, 0.0)
    elif act:
        z = normalized * scale
        if bias is not None:
            z = z + bias.view(channel)
        if residual is not None:
            z = z + residual
        dz = BY_CODE[act].backward(dz, z)
    d = dz * scale
    if training:
        d = d - d.mean(over, keepdim=True) - normalized * (d * normalized).mean(over, keepdim=True)
    dtype = stats.dtype if weight is None else weight.dtype
    dweight, dbias = (dz * normalized).sum(over).to(dtype), dz.sum(over).to(dtype)
    return (d * rstd).to(x.dtype), dz.to(x.dtype), dweight, dbias


def count(batches: Tensor | None, training: bool) -> None:
    """One batch more, where no kernel counts it."""
    if training and batches is not None:
        batches.add_(1)


def is_count(batches: Tensor | None, x: Tensor) -> bool:
    """Whether a kernel can count the batch."""
    return batches is None or (
        batches.dtype is torch.int64
        and batches.numel() == 1
        and type(batches) is Tensor
        and batches.get_device() == x.get_device()
    )


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    act: str | None,
    batches: Tensor | None,
) -> Tensor:
    code = activation(act).code
    if code >= NORM_CODES:
        z = batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, residual, None, batches)
        return bias_act.bias_act(z, None, act, {})
    if torch.compiler.is_compiling():
        if _graph_keeps_kernel(x, running_mean, running_var, weight, bias, training, eps, residual):
            return _train_compiling(x, running_mean, running_var, weight, bias, momentum, eps, residual, code, batches)
        count(batches, training)
        return reference.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, residual, act)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        reason = unsupported(x, running_mean, running_var, weight, bias, training, eps, residual)
        if reason is None:
            if not is_count(batches, x):
                count(batches, training)
                batches = None
            if torch.is_grad_enabled() and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (bias is not None and bias.requires_grad)
                or (residual is not None and residual.requires_grad)
            ):
                residual = residual if residual is None else dispatch.unwrap(residual)
                weight = weight if weight is None else dispatch.unwrap(weight)
                bias = bias if bias is None else dispatch.unwrap(bias)
                rest = running_mean, running_var, training, momentum, eps, code, batches, kernels
                return _record(dispatch.unwrap(x), residual, weight, bias, rest)  # type: ignore[no-any-return]
            if training:
                return kernels.batch_norm_train(  # type: ignore[no-any-return]
                    x, residual, weight, bias, running_mean, running_var, momentum, eps, code, False, batches
                )[0]
            return kernels.batch_norm_eval(  # type: ignore[no-any-return]
                x, residual, weight, bias, running_mean, running_var, eps, code, False, False
            )[0]
        backends.refuse(reason)
    count(batches, training)
    if act == "relu" and residual is not None and backends.get_backend() is None:
        # torch's norm and one pass for the rest: add_relu has a C++ kernel on CPU, where batch_norm has none.
        z = reference.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, None, None)
        return elementwise.add_relu(z, residual)
    return dispatch.answer(  # type: ignore[no-any-return]
        "batch_norm", x, running_mean, running_var, weight, bias, training, momentum, eps, residual, act
    )


# ---- torch.compile ---------------------------------------------------------------------------------------------------
# A graph that trains keeps the kernels, whose two passes Inductor does not reach. An op that autograd knows may not
# write its arguments: it gives the moments of x, and the graph updates the running statistics with them. In eval the
# norm is elementwise, and Inductor fuses it with its neighbours.


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("fastlayers::batch_norm", mutates_args=(), device_types="cuda")
def batch_norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, act: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, stats, bits, moments): the latter mean and unbiased variance of each channel, as (2, C)."""
    moments = x.new_zeros((2, x.shape[1]), dtype=_accumulator(x))
    packed = residual is not None and act == RELU
    y, stats, bits = FAMILY.serving(x).batch_norm_train(
        x, residual, weight, bias, moments[0], moments[1], 1.0, eps, act, packed
    )
    return y, stats, bits, moments


@partial(dispatch.register_fake, batch_norm_op)
def _fake_moments(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, act: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed = residual is not None and act == RELU
    stats = _fake_stats(x)
    return torch.empty_like(x), stats, _fake_bits(x, packed), torch.empty_like(stats)


def _fake_stats(x: Tensor, keep: bool = True) -> Tensor:
    return x.new_empty((2, x.shape[1]) if keep else 0, dtype=_accumulator(x))


def _fake_bits(x: Tensor, packed: bool) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8 if packed else 0, dtype=torch.uint8)


def fake_backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, training: bool, act: int, dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = stats if weight is None else weight
    parameters = [like.new_empty(x.shape[1]) for _ in range(2)]
    return torch.empty_like(x), torch.empty_like(x) if dresidual else x.new_empty(0), parameters[0], parameters[1]


@torch.library.custom_op("fastlayers::batch_norm_grad", mutates_args=(), device_types="cuda")
def batch_norm_grad_op(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, training: bool, act: int, dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = FAMILY.serving(x)
    return kernels.batch_norm_backward(dy, x, residual, bits, weight, bias, stats, training, act, dresidual)  # type: ignore[no-any-return]


dispatch.register_fake(batch_norm_grad_op, fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, eps, act = inputs
    keep(ctx, x, residual, weight, bias, output[1], output[2], True, eps, act)


def _op_backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*wanted(ctx, dy, gradients(ctx, dy, batch_norm_grad_op)), None, None)


batch_norm_op.register_autograd(_op_backward, setup_context=_setup_context)
dispatch.hold_raw({batch_norm_op: "batch_norm_moments", batch_norm_grad_op: "batch_norm_backward"})


def _graph_keeps_kernel(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
    residual: Tensor | None,
) -> bool:
    return (
        training
        and dispatch.graph_keeps_kernel(x)
        and dispatch.wants_gradient(x, weight, bias, residual)
        and unsupported(x, running_mean, running_var, weight, bias, training, eps, residual) is None
    )


def _train_compiling(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    act: int,
    batches: Tensor | None,
) -> Tensor:
    y, _, _, moments = batch_norm_op(x, residual, weight, bias, eps, act)
    if running_mean is None or running_var is None:
        count(batches, True)
        return y
    with torch.no_grad():
        if dispatch.graph_holds_csrc() and is_count(batches, x):  # one launch instead of three
            torch.ops.fastlayers.batch_norm_update_(running_mean, running_var, batches, moments, momentum)
        else:
            count(batches, True)
            for running, moment in ((running_mean, moments[0]), (running_var, moments[1])):
                running.copy_((1 - momentum) * running.to(moment.dtype) + momentum * moment)
    return y


def fake_train(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float, act: int, bits: bool, batches: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x), _fake_stats(x), _fake_bits(x, bits)


dispatch.register_fakes(
    {
        "batch_norm_train": fake_train,
        "batch_norm_eval": lambda x, residual, weight, bias, running_mean, running_var, eps, act, bits, keep: (
            torch.empty_like(x),
            _fake_stats(x, keep),
            _fake_bits(x, bits),
        ),
        "batch_norm_moments": _fake_moments,
        "batch_norm_update_": lambda running_mean, running_var, batches, moments, momentum: None,
        "batch_norm_backward": fake_backward,
        "channel_bias_act_": lambda x, bias, residual, act: None,
    }
)
