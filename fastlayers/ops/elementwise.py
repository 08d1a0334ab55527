"""relu_add, add_relu and mul: the choice between kernel and reference, and autograd.

Under torch.compile these return their reference: Inductor fuses it with its neighbours, which no opaque op can be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, reference

FAMILY = dispatch.Family(
    "elementwise",
    (
        "relu_add",
        "relu_add_train",
        "relu_add_backward",
        "add_relu",
        "add_relu_train",
        "relu_backward",
        "mul",
        "mul_backward",
        "scale_",
    ),
    cpu=True,
)


#: Where an unforced call gets the kernels; elsewhere torch's own ops are as fast or faster. On CPU, the figures being
#: C++ time over eager's with one thread and with two, on an EPYC 9004 with AVX2:
#:
#: - elements: one call into csrc costs 2 us more than two of torch's. relu_add of 2^12 float32 1.5, 2^14 1.2, 2^15 1.0,
#:   2^16 0.9, 2^18 0.7
#: - with autograd: a Python Function costs 13 us. Forward and backward of 2^16 float32 1.2, 2^18 0.9 to 1.1, 2^19 0.7
#:   to 0.9, 2^20 0.5 to 0.9, bfloat16 0.8 to 0.9. More threads share the passes and not the 13 us, hence not 2^18
#: - float16: every x86-64 has to be served, and conversion without F16C is slow: 12
#: - other layouts than these two: operands are copied first. Slices of rows 1.3 to 1.5, mixed layouts 0.8 to 1.2
#: - mul, not in this rule: one pass either way. Forward of 2^19 float32 1.2, bfloat16 2.4, and 2^24 1.0 with backward
#:
#: On a GPU, the figures being GPU time over that of torch's kernels on an H100, bfloat16: relu_add of 2^12 1.1 forward
#: and 1.9 backward, of 2^16 0.7 and 1.1; mul of 2^12 2.0 and 1.5, of 2^16 1.4 and 0.7. mul of one shape is at the limit
#: by torch's own kernel, and gains by the one pass for both gradients.
GPU_LEAST = 2**16
CPU_DTYPES = frozenset({torch.bfloat16, torch.float32, torch.float64})
CPU_LEAST = 2**16
CPU_LEAST_TRAINING = 2**20


def _eager_is_faster(x: Tensor, y: object) -> bool:
    """Whether torch answers for this pair although the kernels could. Asked first: tiny calls are many."""
    if backends.get_backend() is not None:
        return False
    n = x.numel()
    if x.is_cuda:
        return n < GPU_LEAST
    if n < CPU_LEAST or x.dtype not in CPU_DTYPES or not isinstance(y, Tensor):
        return True
    if n < CPU_LEAST_TRAINING and torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return True
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return not dense or x.stride() != y.stride()


def unsupported(x: Tensor, y: object, same_shape: bool) -> str | None:
    """Why no kernel takes this pair, None where one does."""
    if not dispatch.is_plain(y):
        return f"it takes plain tensors, and got {type(y).__name__}"
    assert isinstance(y, Tensor)
    if x.dtype != y.dtype or x.dtype not in dispatch.FLOATING:
        return f"the operands are {x.dtype} and {y.dtype}; kernels take one floating dtype"
    if x.device != y.device:
        return f"the operands are on {x.device} and {y.device}"
    if same_shape and x.shape != y.shape:
        return f"the operands have shapes {tuple(x.shape)} and {tuple(y.shape)}; the kernel takes one shape"
    if x.numel() == 0 or y.numel() == 0:
        return f"nothing to compute on shapes {tuple(x.shape)} and {tuple(y.shape)}"
    return None


def _unsupported_bias(x: Tensor, bias: object, backend: str) -> str | None:
    if isinstance(bias, float | int):
        return None
    if not dispatch.is_plain(bias):
        return f"the bias is a {type(bias).__name__}; kernels take a number or a plain tensor"
    assert isinstance(bias, Tensor)
    if backend == "cpu":
        return "the bias is a tensor; the C++ kernel takes a number"
    if bias.dtype != x.dtype or bias.device != x.device or not dispatch.broadcasts_to(bias.shape, x.shape):
        given = f"{bias.dtype}, shape {tuple(bias.shape)} on {bias.device}"
        return f"a bias of {given}, for {x.dtype}, {tuple(x.shape)} on {x.device}"
    return None


def unpack_bits(bits: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The boolean mask that ``bits`` holds, bit j of byte i for element 8·i + j in the memory order of ``strides``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).bool().flatten().as_strided(shape, strides)


class _ReLU(torch.autograd.Function):
    """relu(x) + y + bias + alpha, or relu(x + y) without bias and alpha.

    Keeps one bit an element, where x's gradient is wanted.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bias: Tensor | None, alpha: float | None, kernels: Any) -> Tensor:
        ctx.sum_first = alpha is None
        args = (x, y) if ctx.sum_first else (x, y, bias, alpha)
        bits = None
        if ctx.sum_first or ctx.needs_input_grad[0]:
            out, bits = (kernels.add_relu_train if ctx.sum_first else kernels.relu_add_train)(*args)
        else:
            out = kernels.relu_add(*args)
        ctx.save_for_backward(bits)
        ctx.strides, ctx.kernels = out.stride(), kernels
        ctx.bias_shape = None if bias is None else bias.shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        gated = dbias = None
        for_bias = ctx.needs_input_grad[2]
        if bits is not None:
            if dispatch.differentiating(dy):
                gated = torch.where(unpack_bits(bits, dy.shape, ctx.strides), dy, 0.0)
            elif for_bias:
                dense = dispatch.with_strides(dy, ctx.strides)
                gated, dbias = ctx.kernels.relu_add_backward(dense, bits, ctx.bias_shape)
            else:
                gated = ctx.kernels.relu_backward(dispatch.with_strides(dy, ctx.strides), bits)
        if for_bias and dbias is None:
            dbias = dy.sum_to_size(ctx.bias_shape)
        to_x = gated if ctx.needs_input_grad[0] else None
        to_y = (gated if ctx.sum_first else dy) if ctx.needs_input_grad[1] else None
        return to_x, to_y, dbias, None, None


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.relu_add(x, y, bias)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        if _eager_is_faster(x, y):
            return reference.relu_add(x, y, bias)
        reason = unsupported(x, y, True) or _unsupported_bias(x, bias, kernels.backend)
        if reason is None:
            vector, alpha = (bias, 0.0) if isinstance(bias, Tensor) else (None, float(bias))
            if torch.is_grad_enabled() and (
                x.requires_grad or y.requires_grad or (vector is not None and vector.requires_grad)
            ):
                return _ReLU.apply(x, y, vector, alpha, kernels)  # type: ignore[no-any-return]
            return kernels.relu_add(x, y, vector, alpha)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("relu_add", x, y, bias)  # type: ignore[no-any-return]


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.add_relu(x, y)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        if _eager_is_faster(x, y):
            return reference.add_relu(x, y)
        reason = unsupported(x, y, True)
        if reason is None:
            if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
                return _ReLU.apply(x, y, None, None, kernels)  # type: ignore[no-any-return]
            return kernels.add_relu(x, y)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("add_relu", x, y)  # type: ignore[no-any-return]


class _Mul(torch.autograd.Function):
    """Keeps its inputs. Both gradients come from one kernel, the sum over a broadcast operand's repeats included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, kernels: Any) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.kernels = kernels
        if x.shape == y.shape and backends.get_backend() is None:
            return x * y
        return kernels.mul(x, y)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        for_x, for_y, _ = ctx.needs_input_grad
        if for_x and for_y and not dispatch.differentiating(dy):
            return *ctx.kernels.mul_backward(dy, x, y), None
        to_x = (dy * y).sum_to_size(x.shape) if for_x else None
        to_y = (dy * x).sum_to_size(y.shape) if for_y else None
        return to_x, to_y, None


def _mul_gains_nothing(x: Tensor, y: object, kernels: Any) -> bool:
    if kernels.backend == "cpu" or not isinstance(y, Tensor) or max(x.numel(), y.numel()) < GPU_LEAST:
        return True
    differentiable = torch.is_grad_enabled() and x.requires_grad and y.requires_grad  # both: the shared pass
    return x.shape == y.shape and not differentiable


def mul(x: Tensor, y: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.mul(x, y)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        if backends.get_backend() is None and _mul_gains_nothing(x, y, kernels):
            return reference.mul(x, y)
        reason = unsupported(x, y, kernels.backend == "cpu")
        if reason is None:
            if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
                return _Mul.apply(x, y, kernels)  # type: ignore[no-any-return]
            return kernels.mul(x, y)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("mul", x, y)  # type: ignore[no-any-return]


def _with_bits(out: Tensor) -> tuple[Tensor, Tensor]:
    return out, out.new_empty((out.numel() + 7) // 8, dtype=torch.uint8)


dispatch.register_fakes(
    {
        "relu_add": lambda x, y, bias, alpha: reference.relu_add(x, y, 0.0 if bias is None else bias),
        "relu_add_train": lambda x, y, bias, alpha: _with_bits(reference.relu_add(x, y, 0.0 if bias is None else bias)),
        "add_relu": reference.add_relu,
        "add_relu_train": lambda x, y: _with_bits(reference.add_relu(x, y)),
        "relu_add_backward": lambda dy, bits, shape: (torch.empty_like(dy), dy.new_empty(shape)),
        "relu_backward": lambda dy, bits: torch.empty_like(dy),
        "mul": reference.mul,
        "mul_backward": lambda dy, x, y: (torch.empty_like(x), torch.empty_like(y)),
        "scale_": lambda x, factor: None,
    }
)
