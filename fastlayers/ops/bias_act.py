"""act(x + bias), or act(x): the choice between kernel and reference, and autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, pairs, raw_ops, reference
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE, as_two, cpu_gelu_gains, parameters_of
from fastlayers.ops.elementwise import GPU_LEAST
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def bias_act_forward(x: Tensor, bias: Tensor | None, act: int, first: float, second: float) -> Tensor:
        return torch.empty_like(x if bias is None else x + bias)

    @staticmethod
    def bias_act_backward(
        dy: Tensor, x: Tensor, bias: Tensor | None, act: int, first: float, second: float, dbias: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(x), x.new_empty(x.shape[-1] if dbias else 0, dtype=dtype or x.dtype)


FAMILY = raw_ops.Family("bias_act", Kernels, cpu=True)

#: The activations that an unforced call runs in a kernel even without a bias: torch has no kernel for quick_gelu and
#: relu2, and its kernels for gelu, mish, elu and softplus are limited by arithmetic (.91, .70, .81 and .67 of the copy
#: bandwidth for 16384x4096 in bfloat16). torch's other kernels are at the memory limit.
FASTER_BARE = frozenset({"gelu", "mish", "quick_gelu", "relu2", "elu", "softplus"})

#: Where an unforced call on a CPU gets the kernels. The figures are eager's time over that of C++ with two threads, on
#: a Xeon with AVX-512, forward, and forward with backward:
#:
#: - elements: silu of 2^10 float32 0.4 and 0.7, 2^14 0.9 and 0.8, 2^17 1.3 and 1.1; relu of 2^14 0.6 and 0.7, 2^17 1.5
#:   and 1.0
#: - forward of gelu in float32, which torch has in oneDNN: 2^17 0.9, 2^20 1.1, 2^23 1.7 (see cpu_gelu_gains, too)
#: - without a bias, 2^20 float32: gelu_tanh 3.9 and 2.8, quick_gelu 2.7 and 5.0, relu2 1.9 and 3.4, mish 6.8 and 6.1,
#:   elu 2.4 and 1.8; softplus 1.5 and 1.1, but 2^17 1.1 and 0.8; gelu 0.6, tanh 0.6, silu 1.1 and 0.9
CPU_LEAST = 2**17
CPU_LEAST_GELU = 2**21
CPU_FASTER_BARE = frozenset({"gelu_tanh", "mish", "quick_gelu", "relu2", "elu"})

_RELU = ACTIVATIONS["relu"].code


def unsupported(x: Tensor, bias: object, act: str | None) -> str | None:
    """Why no kernel takes this call, None where one does."""
    dtype = x.dtype
    if dtype not in guard.FLOATING:
        return f"no kernel for {dtype}"
    if act is None:
        return "no activation; a sum alone is torch's own"
    if x.numel() == 0:
        return f"nothing to compute on shape {tuple(x.shape)}"
    if bias is not None:
        if not guard.is_plain(bias):
            return f"the bias is a {type(bias).__name__}; kernels take a plain tensor"
        if bias.dtype != dtype or bias.get_device() != x.get_device() or bias.shape != x.shape[-1:] or x.dim() == 0:
            given = f"{bias.dtype}, shape {tuple(bias.shape)} on {bias.device}"
            return f"a bias of {given}, for {dtype}, {tuple(x.shape)} on {x.device}; kernels take one over the last dim"
    return None


class BiasAct(pairs.Pair, inputs=2):
    """Keeps x and the bias, whose sum backward recomputes; for relu the result, which the next layer may keep too."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, bias: Tensor | None, act: int, parameters: tuple[float, ...]
    ) -> Any:
        out = kernels.bias_act_forward(x, bias, act, *as_two(parameters))
        return out, (out, None) if act == _RELU else (x, bias), (act, parameters)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, bias: Tensor | None, act: int,
        parameters: tuple[float, ...],
    ) -> Gradients:  # fmt: skip
        return kernels.bias_act_backward(dy, x, bias, act, *as_two(parameters), needs[1])

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, bias: Tensor | None, act: int, parameters: tuple[float, ...]
    ) -> Gradients:
        dx = BY_CODE[act].backward(dy, x if bias is None else x + bias, *parameters)
        return dx, dx.sum_to_size(x.shape[-1:]) if needs[1] else None


def _gains_nothing(kernels: Kernels, x: Tensor, bias: object, act: str | None) -> bool:
    elements = x.numel()
    if not kernels.unasked:
        return bias is None and (elements < GPU_LEAST or act not in FASTER_BARE)
    if elements < CPU_LEAST or x.dtype not in guard.CPU_DTYPES or (act == "gelu" and not cpu_gelu_gains()):
        return True
    if bias is None:
        return act not in CPU_FASTER_BARE
    if act != "gelu" or x.dtype != torch.float32 or elements >= CPU_LEAST_GELU:
        return False
    return not (guard.is_plain(bias) and guard.wants_gradient(x, bias))


def bias_act(x: Tensor, bias: Tensor | None, act: str | None, given: Mapping[str, float]) -> Tensor:
    parameters = parameters_of(act, given)
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if act == "softplus":
            x = x.to(reference.norm_dtype("softplus", x))  # in float32 under autocast, as torch has it
        if backends.get_backend() is None and _gains_nothing(kernels, x, bias, act):
            return reference.bias_act(x, bias, act, parameters)
        reason = unsupported(x, bias, act)
        if reason is None:
            code = ACTIVATIONS[act].code
            return BiasAct.run(kernels, x, bias, code, parameters)
        backends.refuse(reason)
    return guard.call_reference(reference.bias_act, x, bias, act, parameters)


def in_place(function: Callable[..., Tensor], x: Tensor, *parameters: float) -> Tensor:
    """torch's own activation with ``inplace=True``: no kernel writes its input."""
    backends.refuse("it answers with a new tensor, and was called in place")
    return function(x, *parameters, inplace=True)
