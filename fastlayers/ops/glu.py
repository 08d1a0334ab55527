"""act(gate)·up, of two tensors or of the halves of one: the choice between kernel and reference, and autograd.

Under torch.compile these return their reference: Inductor fuses it with its neighbours, which no opaque op can be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, reference
from fastlayers.ops.activations import BY_CODE, activation

FAMILY = dispatch.Family("glu", ("gated_forward", "gated_backward", "glu_forward", "glu_backward"), cpu=False)


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
        "glu_forward": lambda x, dim, gate_first, act: torch.nn.functional.glu(x, dim),
        "glu_backward": lambda dy, x, dim, gate_first, act: torch.empty_like(x),
    }
)
