"""act(gate)·up, of two tensors or of one packed tensor, and a linear layer of it: kernel or reference, autograd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import autocast, elementwise, guard, pairs, raw_ops, reference
from fastlayers.ops.activations import BY_CODE, activation, cpu_gelu_gains
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def gated_forward(gate: Tensor, up: Tensor, act: int) -> Tensor:
        return torch.relu(gate) * up

    @staticmethod
    def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(gate), torch.empty_like(gate)

    @staticmethod
    def gated_backward_(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> Tensor:
        return torch.empty_like(dy)

    @staticmethod
    def glu_forward(x: Tensor, dim: int, act: int, gate_first: bool) -> Tensor:
        return F.glu(x, dim)

    @staticmethod
    def glu_backward(dy: Tensor, x: Tensor, dim: int, act: int, gate_first: bool) -> Tensor:
        return torch.empty_like(x)


FAMILY = raw_ops.Family("glu", Kernels, cpu=True)

#: Where an unforced call on a CPU gets the kernels. The figures are eager's time over that of C++ with two threads, on
#: a Xeon with AVX-512, forward, and forward with backward:
#:
#: - elements: swiglu of 2^10 float32 0.6 and 0.8, 2^14 1.1 and 0.9, 2^17 1.5 and 1.4
#: - the exp of float64 is the C library's, 2^17 1.0 and 0.4
CPU_LEAST = 2**17


def _eager_is_faster(kernels: Kernels, gate: Tensor, elements: int, act: str | None) -> bool:
    if not kernels.unasked:
        return False
    return elements < CPU_LEAST or gate.dtype not in guard.CPU_DTYPES or (act == "gelu" and not cpu_gelu_gains())


def _decomposed_backward(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    entry = BY_CODE[act]
    return entry.backward(dy * up, gate), dy * entry.function(gate)


class Gated(pairs.Pair, inputs=2):
    """Keeps gate and up; backward recomputes act(gate)."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, gate: Tensor, up: Tensor, act: int) -> Any:
        return kernels.gated_forward(gate, up, act), (gate, up), (act,)

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, dy: Tensor, gate: Tensor, up: Tensor, act: int) -> Gradients:
        return kernels.gated_backward(dy, gate, up, act)

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> Gradients:
        return _decomposed_backward(*args)


def gated(gate: Tensor, up: Tensor, act: str | None) -> Tensor:
    code = activation(act).code
    kernels = FAMILY.kernels_for(gate)
    if kernels is not None:
        if _eager_is_faster(kernels, gate, gate.numel(), act):
            return reference.gated(gate, up, act)
        reason = elementwise.unsupported(gate, up, True) or guard.act_problem(act, gate)
        if reason is None:
            return Gated.run(kernels, gate, up, code)
        backends.refuse(reason)
    return guard.call_reference(reference.gated, gate, up, act)


class GatedLinear(pairs.Pair, inputs=4):
    """Keeps gate, up and weight; backward recomputes the product of the gate.

    The linear layer's own Function would keep that product, and its gradient would be a third tensor beside the
    gradients of gate and up. Here backward holds at most four tensors of gate's size, gate and up among them: the
    product is freed before the gradients are made, and gate's gradient overwrites that of the product.

    Under autocast the weight may be narrower than gate and up, as F.linear would make it and their product.
    """

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: int
    ) -> Any:
        out = F.linear(kernels.gated_forward(gate, up, act).to(weight.dtype), weight, bias)
        if needs and out._is_view():
            # torch's own result may be a view. A view that a Function returns cannot be written in place.
            out = torch.ops.aten._unsafe_view.default(out, out.shape)
        return out, (gate, up, weight), (act,)

    @staticmethod
    def raw_backward(
        kernels: Kernels | None, needs: Needs, dy: Tensor, gate: Tensor, up: Tensor, weight: Tensor, act: int
    ) -> Gradients:
        device = dy.device.type
        # Everything has the dtype that autocast gave it in forward.
        with torch.autocast(device, enabled=False) if reference.autocasts(device) else nullcontext():
            return _linear_gradients(kernels, needs, dy, gate, up, weight, act)

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> Gradients:
        return GatedLinear.raw_backward(None, needs, *args)


def _linear_gradients(
    kernels: Kernels | None, needs: Needs, dy: Tensor, gate: Tensor, up: Tensor, weight: Tensor, act: int
) -> Gradients:
    """The gradients of gate, up, weight and bias; by torch ops where there are no kernels."""
    rows = dy.reshape(-1, dy.shape[-1])
    dgate = dup = dweight = None
    if needs[2]:
        h = BY_CODE[act].function(gate) * up if kernels is None else kernels.gated_forward(gate, up, act)
        dweight = rows.mT @ h.to(weight.dtype).reshape(-1, weight.shape[1])
        del h
    if needs[0] or needs[1]:
        dh = (rows @ weight).to(gate.dtype).reshape(gate.shape)
        if kernels is None:
            dgate, dup = _decomposed_backward(dh, gate, up, act)
        else:
            dgate, dup = dh, kernels.gated_backward_(dh, gate, up, act)
    return dgate, dup, dweight, rows.sum(0) if needs[3] else None


def _unsupported_linear(gate: Tensor, weight: object, bias: object) -> str | None:
    """Why no kernel takes a linear layer of these on the product of a gate, None where one does."""
    if not (guard.is_plain(weight) and (bias is None or guard.is_plain(bias))):
        return f"weight and bias are {type(weight).__name__} and {type(bias).__name__}; it takes plain tensors"
    shape, dtype = weight.shape, autocast.dtype_of(gate)
    if gate.dim() == 0 or len(shape) != 2 or shape[1] != gate.shape[-1] or shape[0] == 0:
        return f"a weight of shape {tuple(shape)} for {tuple(gate.shape)}"
    if weight.layout is not torch.strided or autocast.dtype_of(weight) is not dtype or weight.device != gate.device:
        return f"a weight of {weight.dtype}, {weight.layout} on {weight.device}, for {dtype} on {gate.device}"
    if bias is None or (bias.shape == shape[:1] and autocast.dtype_of(bias) is dtype and bias.device == gate.device):
        return None
    return f"a bias of {bias.dtype}, shape {tuple(bias.shape)} on {bias.device}, for {dtype}, {tuple(shape)}"


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    code = activation(act).code
    kernels = FAMILY.kernels_for(gate)
    if kernels is None or _eager_is_faster(kernels, gate, gate.numel(), act):
        return guard.call_reference(reference.gated_linear, gate, up, weight, bias, act)
    reason = (
        elementwise.unsupported(gate, up, True)
        or guard.act_problem(act, gate)
        or _unsupported_linear(gate, weight, bias)
    )
    if reason is not None:
        backends.refuse(reason)
        return F.linear(gated(gate, up, act), weight, bias)
    dtype = autocast.dtype_of(gate)
    # Recorded by autograd, as what autocast does is: a float32 weight gets a float32 gradient.
    weight = pairs.unwrap(weight).to(dtype)
    bias = bias if bias is None else pairs.unwrap(bias).to(dtype)
    return GatedLinear.run(kernels, gate, up, weight, bias, code)


class GLU(pairs.Pair, inputs=1):
    """Keeps x; backward recomputes the activation of its gate. The gradient is one tensor, as x is."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, dim: int, act: int, gate_first: bool) -> Any:
        return kernels.glu_forward(x, dim, act, gate_first), (x,), (dim, act, gate_first)

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, *args: Any) -> Gradients:
        return (kernels.glu_backward(*args),)

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, x: Tensor, dim: int, act: int, gate_first: bool) -> Gradients:
        first, second = x.chunk(2, dim)
        if gate_first:
            return (torch.cat(_decomposed_backward(dy, first, second, act), dim),)
        return (torch.cat(_decomposed_backward(dy, second, first, act)[::-1], dim),)


def _unsupported_packed(x: Tensor, dim: int, act: str | None) -> str | None:
    if x.dtype not in guard.FLOATING:
        return f"no kernel for {x.dtype}"
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % 2 or x.numel() == 0:
        return f"no halves of dimension {dim} in shape {tuple(x.shape)}"
    return guard.act_problem(act, x)


def glu(x: Tensor, dim: int, act: str | None, gate_first: bool) -> Tensor:
    code = activation(act).code
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if _eager_is_faster(kernels, x, x.numel() // 2, act):
            return reference.glu(x, dim, act, gate_first)
        if act == "sigmoid" and not gate_first and x.numel() < elementwise.GPU_LEAST and backends.get_backend() is None:
            return reference.glu(x, dim, act, gate_first)  # one kernel of torch's too
        reason = _unsupported_packed(x, dim, act)
        if reason is None:
            return GLU.run(kernels, x, dim, code, gate_first)
        backends.refuse(reason)
    return guard.call_reference(reference.glu, x, dim, act, gate_first)
