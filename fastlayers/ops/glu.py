"""act(gate)·up, of two tensors or of the halves of one, and a linear layer of it: kernel or reference, and autograd.

Under torch.compile these return their reference: Inductor fuses it with its neighbours, which no opaque op can be.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import autocast, dispatch, elementwise, reference
from fastlayers.ops.activations import BY_CODE, activation

FAMILY = dispatch.Family(
    "glu", ("gated_forward", "gated_backward", "gated_backward_", "glu_forward", "glu_backward"), cpu=False
)


def _compose_backward(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """The backward kernel in torch ops, for whoever differentiates it again."""
    entry = BY_CODE[act]
    return entry.backward(dy * up, gate), dy * entry.function(gate)


class _Gated(torch.autograd.Function):
    """Keeps gate and up, and computes act(gate) anew."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: int, kernels: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act, ctx.kernels = act, kernels
        return kernels.gated_forward(gate, up, act)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        for_gate, for_up = ctx.needs_input_grad[:2]
        if dispatch.differentiating(dy):
            dgate, dup = _compose_backward(dy, gate, up, ctx.act)
        else:
            dgate, dup = ctx.kernels.gated_backward(dy, gate, up, ctx.act)
        return dgate if for_gate else None, dup if for_up else None, None, None


_record_gated = dispatch.recorder(_Gated)


def gated(gate: Tensor, up: Tensor, act: str | None) -> Tensor:
    code = activation(act).code
    if torch.compiler.is_compiling():
        return reference.gated(gate, up, act)
    kernels = FAMILY.serving(gate)
    if kernels is not None:
        reason = elementwise.unsupported(gate, up, True) or dispatch.act_problem(act, gate)
        if reason is None:
            if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
                return _record_gated(dispatch.unwrap(gate), dispatch.unwrap(up), code, kernels)  # type: ignore[no-any-return]
            return kernels.gated_forward(gate, up, code)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("gated", gate, up, act)  # type: ignore[no-any-return]


class _GatedLinear(torch.autograd.Function):
    """Keeps gate, up and weight, and computes the product of the gate anew.

    The linear layer's own Function would keep that product, and what it sends back would be a third tensor beside the
    two gradients of the gate. Here backward holds at most four tensors of gate's size, gate and up among them: the
    product is gone before the gradients are made, and that of gate lies where the gradient of the product did.

    Under autocast the weight may be narrower than gate and up, as F.linear would make it and their product.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: int, kernels: Any
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.act, ctx.kernels = act, kernels
        out = F.linear(kernels.gated_forward(gate, up, act).to(weight.dtype), weight, bias)
        # torch's own result may be a view of another tensor. Autograd lets nobody write to one that a Function returns.
        return torch.ops.aten._unsafe_view.default(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        device = dy.device.type
        # Everything has the dtype that autocast gave it in forward.
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            return (*_linear_gradients(ctx, dy), None, None)


def _linear_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Those of gate, up, weight and bias, as far as they are wanted."""
    gate, up, weight = ctx.saved_tensors
    for_gate, for_up, for_weight, for_bias = ctx.needs_input_grad[:4]
    act, kernels = ctx.act, None if dispatch.differentiating(dy) else ctx.kernels
    rows = dy.reshape(-1, dy.shape[-1])
    dgate = dup = dweight = None
    if for_weight:
        h = BY_CODE[act].function(gate) * up if kernels is None else kernels.gated_forward(gate, up, act)
        dweight = rows.mT @ h.to(weight.dtype).reshape(-1, weight.shape[1])
        del h
    if for_gate or for_up:
        dh = (rows @ weight).to(gate.dtype).reshape(gate.shape)
        if kernels is None:
            dgate, dup = _compose_backward(dh, gate, up, act)
        else:
            dgate, dup = dh, kernels.gated_backward_(dh, gate, up, act)
    dbias = rows.sum(0) if for_bias else None
    return dgate if for_gate else None, dup if for_up else None, dweight, dbias


_record_linear = dispatch.recorder(_GatedLinear)


def _unsupported_linear(gate: Tensor, weight: object, bias: object) -> str | None:
    """Why no kernel takes a linear layer of these on the product of a gate, None where one does."""
    if not (dispatch.is_plain(weight) and (bias is None or dispatch.is_plain(bias))):
        return f"weight and bias are {type(weight).__name__} and {type(bias).__name__}; it takes plain tensors"
    assert isinstance(weight, Tensor)
    shape, dtype = weight.shape, autocast.dtype_of(gate)
    if gate.dim() == 0 or len(shape) != 2 or shape[1] != gate.shape[-1] or shape[0] == 0:
        return f"a weight of shape {tuple(shape)} for {tuple(gate.shape)}"
    if weight.layout is not torch.strided or autocast.dtype_of(weight) is not dtype or weight.device != gate.device:
        return f"a weight of {weight.dtype}, {weight.layout} on {weight.device}, for {dtype} on {gate.device}"
    if bias is not None:
        assert isinstance(bias, Tensor)
        if bias.shape != shape[:1] or autocast.dtype_of(bias) is not dtype or bias.device != gate.device:
            return f"a bias of {bias.dtype}, shape {tuple(bias.shape)} on {bias.device}, for {dtype}, {tuple(shape)}"
    return None


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    code = activation(act).code
    if torch.compiler.is_compiling():
        return reference.gated_linear(gate, up, weight, bias, act)
    kernels = FAMILY.serving(gate)
    if kernels is None:
        return dispatch.answer("gated_linear", gate, up, weight, bias, act)  # type: ignore[no-any-return]
    reason = (
        elementwise.unsupported(gate, up, True)
        or dispatch.act_problem(act, gate)
        or _unsupported_linear(gate, weight, bias)
    )
    if reason is not None:
        backends.refuse(reason)
        return F.linear(gated(gate, up, act), weight, bias)
    dtype = autocast.dtype_of(gate)
    # Recorded by autograd, as what autocast does is: a float32 weight gets a float32 gradient.
    weight = dispatch.unwrap(weight).to(dtype)
    bias = bias if bias is None else dispatch.unwrap(bias).to(dtype)
    if dispatch.wants_gradient(gate, up, weight, bias):
        return _record_linear(dispatch.unwrap(gate), dispatch.unwrap(up), weight, bias, code, kernels)  # type: ignore[no-any-return]
    return F.linear(kernels.gated_forward(gate, up, code).to(dtype), weight, bias)


class _GLU(torch.autograd.Function):
    """Keeps x, and computes the activation of its half anew. The gradient is one tensor, as x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, gate_first: bool, act: int, kernels: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = dim, gate_first, act
        ctx.kernels = kernels
        return kernels.glu_forward(x, dim, gate_first, act)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dim, gate_first, act = ctx.rest
        if dispatch.differentiating(dy):
            first, second = x.chunk(2, dim)
            if gate_first:
                dx = torch.cat(_compose_backward(dy, first, second, act), dim)
            else:
                dx = torch.cat(_compose_backward(dy, second, first, act)[::-1], dim)
        else:
            dx = ctx.kernels.glu_backward(dy, x, dim, gate_first, act)
        return dx, None, None, None, None


_record_glu = dispatch.recorder(_GLU)


def _unsupported_packed(x: Tensor, dim: int, act: str | None) -> str | None:
    if x.dtype not in dispatch.FLOATING:
        return f"no kernel for {x.dtype}"
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % 2 or x.numel() == 0:
        return f"no halves of dimension {dim} in shape {tuple(x.shape)}"
    return dispatch.act_problem(act, x)


def glu(x: Tensor, act: str | None, dim: int, gate_first: bool) -> Tensor:
    code = activation(act).code
    if torch.compiler.is_compiling():
        return reference.glu(x, act, dim, gate_first)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        if act == "sigmoid" and not gate_first and x.numel() < elementwise.GPU_LEAST and backends.get_backend() is None:
            return reference.glu(x, act, dim, gate_first)  # one kernel of torch's too
        reason = _unsupported_packed(x, dim, act)
        if reason is None:
            if torch.is_grad_enabled() and x.requires_grad:
                return _record_glu(dispatch.unwrap(x), dim, gate_first, code, kernels)  # type: ignore[no-any-return]
            return kernels.glu_forward(x, dim, gate_first, code)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("glu", x, act, dim, gate_first)  # type: ignore[no-any-return]


dispatch.register_fakes(
    {
        "gated_forward": lambda gate, up, act: torch.relu(gate) * up,
        "gated_backward": lambda dy, gate, up, act: (torch.empty_like(gate), torch.empty_like(gate)),
        "gated_backward_": lambda dy, gate, up, act: torch.empty_like(dy),
        "glu_forward": lambda x, dim, gate_first, act: torch.nn.functional.glu(x, dim),
        "glu_backward": lambda dy, x, dim, gate_first, act: torch.empty_like(x),
    }
)
