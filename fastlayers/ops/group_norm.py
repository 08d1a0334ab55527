"""group_norm and instance_norm with an activation: the choice between kernel and reference, autograd, compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import bias_act, graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.activations import BY_CODE, NORM_CODES, activation
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def group_norm_forward(
        x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: int,
        dtype: torch.dtype, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = torch.empty_like(x, dtype=dtype) if layouts.is_image(x) else x.new_empty(x.shape, dtype=dtype)
        return y, x.new_empty((2, x.shape[0] * num_groups) if keep else 0, dtype=layouts.accumulator(x))

    @staticmethod
    def group_norm_backward(
        dy: Tensor, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor, act: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = torch.empty_like(x) if layouts.is_image(x) else x.new_empty(x.shape)
        like = stats if weight is None else weight
        return dx, like.new_empty(x.shape[1]), like.new_empty(x.shape[1])


FAMILY = raw_ops.Family("group_norm", Kernels, cpu=True)


#: Elements from which an unforced call on a CPU gets the kernels, and the pixels that it has at least, contiguous and
#: channels_last. With 2 threads they gain 1.1x to 12x from here on; with few pixels they lose.
CPU_LEAST = 2**18
CPU_PLANE, CPU_PLANE_LAST = 1024, 256


def unsupported(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why no kernel takes this call, None where one does."""
    dtype = x.dtype
    if dtype not in guard.FLOATING:
        return f"no kernel for {dtype}"
    if not 2 <= x.dim() <= 5:
        return f"x has shape {tuple(x.shape)}; kernels take two to five dimensions"
    channels = (x.shape[1],)
    values = x.numel()
    if num_groups < 1 or channels[0] % num_groups or values in (0, num_groups):
        return f"nothing to normalise in {num_groups} groups of shape {tuple(x.shape)}"
    device = x.get_device()
    for parameter in (weight, bias):
        if parameter is not None:
            problem = guard.parameter_problem(parameter, device, dtype, channels)
            if problem is not None:
                return problem
    if weight is not None and bias is not None and bias.dtype != weight.dtype:
        return f"the weight is {weight.dtype}, and the bias {bias.dtype}"
    return None


def _torch_is_as_fast(x: Tensor, weight: Tensor | None, bias: Tensor | None, act: int) -> bool:
    """Whether a CPU has to be asked for these kernels.

    torch's own norm is as fast forward. What gains is the activation in the same pass, where float32 is not converted,
    and the backward of channels_last.
    """
    if x.dtype not in guard.CPU_DTYPES or x.dim() < 2 or x.numel() < CPU_LEAST:
        return True
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    fuses = act != 0 and x.dtype == torch.float32
    if x.is_contiguous():
        return pixels < CPU_PLANE or not fuses
    return pixels < CPU_PLANE_LAST or not (fuses or guard.wants_gradient(x, weight, bias))


class GroupNorm(pairs.Pair, inputs=3):
    """Keeps x, the weight, for an activation the bias, and the mean and rstd of each group."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
        eps: float, act: int, dtype: torch.dtype, layout: torch.memory_format | None,
    ) -> Any:  # fmt: skip
        y, stats = kernels.group_norm_forward(x, num_groups, weight, bias, eps, act, dtype, bool(needs))
        y = y if layout is None else y.contiguous(memory_format=layout)
        return y, (x, stats, weight, bias if act else None), (num_groups, eps, act)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, stats: Tensor, weight: Tensor | None,
        bias: Tensor | None, num_groups: int, eps: float, act: int,
    ) -> Gradients:  # fmt: skip
        return kernels.group_norm_backward(dy, x, num_groups, weight, bias, stats, act)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
        eps: float, act: int,
    ) -> Gradients:  # fmt: skip
        groups = (x.shape[0], num_groups, x.shape[1] // num_groups, -1)

        def compose(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = x.to(stats.dtype).reshape(groups)
            centered = wide - wide.mean((2, 3), keepdim=True)
            normalized = centered * torch.rsqrt(centered.square().mean((2, 3), keepdim=True) + eps)
            scale, shift = (t.to(stats.dtype).view(1, *groups[1:3], 1) for t in (weight, bias))
            return BY_CODE[act].function(normalized * scale + shift).reshape(x.shape)

        weight = stats.new_ones(x.shape[1]) if weight is None else weight
        bias = torch.zeros_like(weight) if bias is None else bias
        return pairs.differentiate(compose, (x, weight, bias), needs, dy.to(stats.dtype))


def _layout(x: Tensor) -> torch.memory_format | None:
    """The memory format of torch's group_norm, None where it is the kernel's anyhow: on CUDA always contiguous."""
    if x.is_contiguous():
        return None
    if not x.is_cuda and layouts.suggests_channels_last(x):
        return torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return torch.contiguous_format


@FAMILY.graph_op("group_norm")
def _in_graph(
    kernels: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, act: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    # Inductor's group_norm reaches 0.6 to 0.8 of the memory limit forward and 0.35 backward, so a graph keeps the
    # kernels. The result is contiguous, as torch's is on CUDA.
    return GroupNorm.run(kernels, x, weight, bias, num_groups, eps, act, dtype, torch.contiguous_format)


def _graph_keeps_kernel(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and graph_ops.graph_keeps_kernel(x) and layouts.is_image(x)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str | None
) -> Tensor:
    code = activation(act).code
    if code >= NORM_CODES:
        return bias_act.bias_act(group_norm(x, num_groups, weight, bias, eps, None), None, act, {})
    kernels = FAMILY.kernels_for(x)
    if kernels is not None and not (kernels.unasked and _torch_is_as_fast(x, weight, bias, code)):
        reason = unsupported(x, num_groups, weight, bias)
        if reason is None:
            dtype = x.dtype
            if dtype in reference.LOW_PRECISION:
                dtype = reference.norm_dtype("group_norm", x)
            return GroupNorm.run(kernels, x, weight, bias, num_groups, eps, code, dtype, _layout(x))
        backends.refuse(reason)
    elif _graph_keeps_kernel(x) and unsupported(x, num_groups, weight, bias) is None:
        return _in_graph(x, weight, bias, num_groups, eps, code, reference.norm_dtype("group_norm", x))
    return guard.call_reference(reference.group_norm, x, num_groups, weight, bias, eps, act)


def _torch_is_as_fast_for_instances(x: Tensor) -> bool:
    """The same for an instance_norm, which torch computes as a contiguous batch_norm in training."""
    pixels = x.numel() // max(1, x.shape[0] * x.shape[1]) if x.dim() > 2 else 0
    return x.dtype != torch.float32 or x.numel() < CPU_LEAST or pixels < CPU_PLANE or not x.is_contiguous()


def _instance_unsupported(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    use_input_stats: bool,
) -> str | None:  # fmt: skip
    if running_mean is not None or running_var is not None or not use_input_stats:
        return "running statistics; the kernel takes those of x"
    if x.dim() < 3 or x.numel() == x.shape[0] * x.shape[1]:
        return f"nothing to normalise in shape {tuple(x.shape)}"
    return unsupported(x, x.shape[1], weight, bias)


def instance_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, act: str | None,
) -> Tensor:  # fmt: skip
    code = activation(act).code
    if code >= NORM_CODES:
        z = instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, None)
        return bias_act.bias_act(z, None, act, {})
    kernels = FAMILY.kernels_for(x)
    if kernels is not None and not (kernels.unasked and _torch_is_as_fast_for_instances(x)):
        reason = _instance_unsupported(x, running_mean, running_var, weight, bias, use_input_stats)
        if reason is None:
            layout = None if x.is_contiguous() else torch.contiguous_format
            return GroupNorm.run(kernels, x, weight, bias, x.shape[1], eps, code, x.dtype, layout)
        backends.refuse(reason)
    elif (
        _graph_keeps_kernel(x)
        and _instance_unsupported(x, running_mean, running_var, weight, bias, use_input_stats) is None
    ):
        return _in_graph(x, weight, bias, x.shape[1], eps, code, x.dtype)
    return guard.call_reference(
        reference.instance_norm, x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, act
    )
