"""relu_add, add_relu and mul: the choice between kernel and reference, and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def relu_add(x: Tensor, y: Tensor, bias: Tensor | None, alpha: float) -> Tensor:
        return reference.relu_add(x, y, 0.0 if bias is None else bias)

    @staticmethod
    def relu_add_train(x: Tensor, y: Tensor, bias: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
        return _with_bits(reference.relu_add(x, y, 0.0 if bias is None else bias))

    @staticmethod
    def relu_add_backward(dy: Tensor, bits: Tensor, bias_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.empty_like(dy), dy.new_empty(bias_shape)

    @staticmethod
    def add_relu(x: Tensor, y: Tensor) -> Tensor:
        return reference.add_relu(x, y)

    @staticmethod
    def add_relu_train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return _with_bits(reference.add_relu(x, y))

    @staticmethod
    def relu_backward(dy: Tensor, bits: Tensor) -> Tensor:
        return torch.empty_like(dy)

    @staticmethod
    def mul(x: Tensor, y: Tensor) -> Tensor:
        return reference.mul(x, y)

    @staticmethod
    def mul_backward(dy: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(y)

    @staticmethod
    def scale_(x: Tensor, factor: Tensor) -> None:
        return None


def _with_bits(out: Tensor) -> tuple[Tensor, Tensor]:
    return out, out.new_empty((out.numel() + 7) // 8, dtype=torch.uint8)


FAMILY = raw_ops.Family("elementwise", Kernels, cpu=True)

#: Where an unforced call gets the kernels; elsewhere torch's own ops are as fast or faster. On CPU, the figures being
#: C++ time over eager's with one thread and with two, on an EPYC 9004 with AVX2:
#:
#: - elements: one call into csrc costs 2 us more than two of torch's. relu_add of 2^12 float32 1.5, 2^14 1.2, 2^15 1.0,
#:   2^16 0.9, 2^18 0.7
#: - with autograd: a Python Function costs 13 us. Forward and backward of 2^16 float32 1.2, 2^18 0.9 to 1.1, 2^19 0.7
#:   to 0.9, 2^20 0.5 to 0.9, bfloat16 0.8 to 0.9. More threads share the passes and not the 13 us, hence not 2^18
#: - other layouts than these two: operands are copied first. Slices of rows 1.3 to 1.5, mixed layouts 0.8 to 1.2
#: - mul, not in this rule: one pass either way. Forward of 2^19 float32 1.2, bfloat16 2.4, and 2^24 1.0 with backward
#:
#: On a GPU, the figures being GPU time over that of torch's kernels on an H100, bfloat16: relu_add of 2^12 1.1 forward
#: and 1.9 backward, of 2^16 0.7 and 1.1; mul of 2^12 2.0 and 1.5, of 2^16 1.4 and 0.7. mul of one shape is at the limit
#: by torch's own kernel, and gains by the one pass for both gradients.
GPU_LEAST = 2**16
CPU_LEAST = 2**16
CPU_LEAST_TRAINING = 2**20


def _eager_is_faster(x: Tensor, y: object) -> bool:
    """Whether torch answers for this pair although the kernels could. Asked first: tiny calls are many."""
    if backends.get_backend() is not None:
        return False
    n = x.numel()
    if x.is_cuda:
        return n < GPU_LEAST
    if n < CPU_LEAST or x.dtype not in guard.FLOATING or not isinstance(y, Tensor):
        return True
    if n < CPU_LEAST_TRAINING and torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return True
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return not dense or x.stride() != y.stride()


def unsupported(x: Tensor, y: object, same_shape: bool) -> str | None:
    """Why no kernel takes this pair, None where one does."""
    if not guard.is_plain(y):
        return f"it takes plain tensors, and got {type(y).__name__}"
    if x.dtype != y.dtype or x.dtype not in guard.FLOATING:
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
    if not guard.is_plain(bias):
        return f"the bias is a {type(bias).__name__}; kernels take a number or a plain tensor"
    if backend == "cpu":
        return "the bias is a tensor; the C++ kernel takes a number"
    if bias.dtype != x.dtype or bias.device != x.device or not layouts.broadcasts_to(bias.shape, x.shape):
        given = f"{bias.dtype}, shape {tuple(bias.shape)} on {bias.device}"
        return f"a bias of {given}, for {x.dtype}, {tuple(x.shape)} on {x.device}"
    return None


def unpack_bits(bits: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The boolean mask that ``bits`` holds, bit j of byte i for element 8·i + j in the memory order of ``strides``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).bool().flatten().as_strided(shape, strides)


class ReLUAdd(pairs.Pair, inputs=3):
    """relu(x) + y + bias + alpha, or relu(x + y) where alpha is None.

    Keeps one bit an element, where x needs a gradient.
    """

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, y: Tensor, bias: Tensor | None, alpha: float | None
    ) -> Any:
        bits = None
        if alpha is None:
            if needs:
                out, bits = kernels.add_relu_train(x, y)
            else:
                out = kernels.add_relu(x, y)
        elif needs and needs[0]:
            out, bits = kernels.relu_add_train(x, y, bias, alpha)
        else:
            out = kernels.relu_add(x, y, bias, alpha)
        return out, (bits,), (out.stride(), alpha is None, None if bias is None else bias.shape)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, bits: Tensor | None, strides: tuple[int, ...], sum_first: bool,
        bias_shape: torch.Size | None,
    ) -> Gradients:  # fmt: skip
        gated = dbias = None
        if bits is not None:
            dense = layouts.with_strides(dy, strides)
            if needs[2]:
                gated, dbias = kernels.relu_add_backward(dense, bits, bias_shape)  # type: ignore[arg-type]
            else:
                gated = kernels.relu_backward(dense, bits)
        return _relu_gradients(needs, dy, gated, dbias, sum_first, bias_shape)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, bits: Tensor | None, strides: tuple[int, ...], sum_first: bool,
        bias_shape: torch.Size | None,
    ) -> Gradients:  # fmt: skip
        gated = None if bits is None else torch.where(unpack_bits(bits, dy.shape, strides), dy, 0.0)
        return _relu_gradients(needs, dy, gated, None, sum_first, bias_shape)


def _relu_gradients(
    needs: Needs, dy: Tensor, gated: Tensor | None, dbias: Tensor | None, sum_first: bool, bias_shape: torch.Size | None
) -> Gradients:
    if needs[2] and dbias is None:
        assert bias_shape is not None
        dbias = dy.sum_to_size(bias_shape)
    return gated, gated if sum_first else dy, dbias


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor) -> Tensor:
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if _eager_is_faster(x, y):
            return reference.relu_add(x, y, bias)
        reason = unsupported(x, y, True) or _unsupported_bias(x, bias, kernels.backend)
        if reason is None:
            vector, alpha = (bias, 0.0) if isinstance(bias, Tensor) else (None, float(bias))
            return ReLUAdd.run(kernels, x, y, vector, alpha)
        backends.refuse(reason)
    return guard.call_reference(reference.relu_add, x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if _eager_is_faster(x, y):
            return reference.add_relu(x, y)
        reason = unsupported(x, y, True)
        if reason is None:
            return ReLUAdd.run(kernels, x, y, None, None)
        backends.refuse(reason)
    return guard.call_reference(reference.add_relu, x, y)


class Mul(pairs.Pair, inputs=2):
    """Keeps its inputs. Both gradients come from one kernel, with the sum over a broadcast operand's repeats."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, y: Tensor) -> Any:
        # Forward alone, torch's kernel is as fast for operands of one shape.
        is_torch = needs and x.shape == y.shape and backends.get_backend() is None
        return x * y if is_torch else kernels.mul(x, y), (x, y), ()

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, y: Tensor) -> Gradients:
        return kernels.mul_backward(dy, x, y) if all(needs) else Mul.differentiable_backward(needs, dy, x, y)

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, x: Tensor, y: Tensor) -> Gradients:
        dx = (dy * y).sum_to_size(x.shape) if needs[0] else None
        return dx, (dy * x).sum_to_size(y.shape) if needs[1] else None


def _mul_gains_nothing(x: Tensor, y: object, kernels: Any) -> bool:
    if kernels.backend == "cpu" or not isinstance(y, Tensor) or max(x.numel(), y.numel()) < GPU_LEAST:
        return True
    differentiable = torch.is_grad_enabled() and x.requires_grad and y.requires_grad  # both: the shared pass
    return x.shape == y.shape and not differentiable


def mul(x: Tensor, y: Tensor) -> Tensor:
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if backends.get_backend() is None and _mul_gains_nothing(x, y, kernels):
            return reference.mul(x, y)
        reason = unsupported(x, y, kernels.backend == "cpu")
        if reason is None:
            return Mul.run(kernels, x, y)
        backends.refuse(reason)
    return guard.call_reference(reference.mul, x, y)
