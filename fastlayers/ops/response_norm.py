"""global_response_norm: the choice between kernel and reference, and autograd.

Under torch.compile this returns its reference, which Inductor fuses with its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def response_norm_forward(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float, channels_last: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        norm = x.new_empty((x.shape[0], weight.shape[0]), dtype=layouts.accumulator(x))
        return torch.empty_like(x, dtype=dtype), norm

    @staticmethod
    def response_norm_backward(
        dy: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float, channels_last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


FAMILY = raw_ops.Family("response_norm", Kernels, triton_only=("response_norm_forward", "response_norm_backward"))

#: Channels that a program holds in registers.
MOST_CHANNELS = 8192


class ResponseNorm(pairs.Pair, inputs=3):
    """Keeps x, the weight, and the norm of each channel of each sample."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, eps: float, channels_last: bool,
        dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        y, norm = kernels.response_norm_forward(x, weight, bias, eps, channels_last, dtype)
        return y, (x, weight, norm), (eps, channels_last)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float,
        channels_last: bool,
    ) -> Gradients:  # fmt: skip
        return kernels.response_norm_backward(dy, x, weight, norm, eps, channels_last)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float, channels_last: bool
    ) -> Gradients:
        def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = [t.to(layouts.accumulator(x)) for t in (x, weight, bias)]
            return reference.global_response_norm(wide[0], wide[1], wide[2], eps, channels_last)

        return pairs.differentiate(normed, (x, weight, torch.zeros_like(weight)), needs, dy.to(norm.dtype))


def _unsupported(x: Tensor, weight: Tensor, bias: Tensor, channels_last: bool) -> str | None:
    """Why no kernel takes this call, None where one does."""
    if x.dtype not in guard.FLOATING:
        return f"no kernel for {x.dtype}"
    if x.dim() < 3 or x.numel() == 0:
        return f"no sample with space and channels in shape {tuple(x.shape)}"
    if not x.is_contiguous() and (channels_last or not layouts.is_image(x)):
        return f"an input with strides {x.stride()}; the kernel takes dense ones"
    channels = x.shape[-1 if channels_last else 1]
    if channels > MOST_CHANNELS:
        return f"{channels} channels; the kernel takes up to {MOST_CHANNELS}"
    for parameter in (weight, bias):
        problem = guard.parameter_problem(parameter, x.get_device(), x.dtype, (channels,))
        if problem is not None:
            return problem
    return None if bias.dtype == weight.dtype else f"the weight is {weight.dtype}, and the bias {bias.dtype}"


def global_response_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, channels_last: bool) -> Tensor:
    if isinstance(x, Tensor) and x.dim() < 3:
        raise ValueError(
            f"input has shape {tuple(x.shape)}; expected samples, channels and at least one dimension of space"
        )
    kernels = FAMILY.triton_kernels_for(x)
    if kernels is not None:
        problem = _unsupported(x, weight, bias, channels_last)
        if problem is None:
            moves = not channels_last and not x.is_contiguous()  # channels_last in memory
            if moves:
                x, channels_last = x.movedim(1, -1), True
            flat = x.flatten(1, -2) if channels_last else x.flatten(2)
            dtype = torch.promote_types(reference.norm_dtype("linalg_vector_norm", x), weight.dtype)
            y = ResponseNorm.run(kernels, flat, weight, bias, eps, channels_last, dtype).view(x.shape)
            return y.movedim(-1, 1) if moves else y
        backends.refuse(problem)
    return guard.call_reference(reference.global_response_norm, x, weight, bias, eps, channels_last)
