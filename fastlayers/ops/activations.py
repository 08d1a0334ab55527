"""The activations that a fused layer can end with: what they compute, how they derive, how the kernels number them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


def _silu_backward(dy: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)  # aten's silu_backward has no derivative
    return dy * s * (1 + z * (1 - s))


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        code: its number in ``csrc/activations.cuh`` and in the Triton kernels.
        function: it, on a tensor.
        backward: the gradient of z from (gradient of act(z), z), in torch ops that can be derived again.
    """

    code: int
    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


#: By the name that the functions and layers take as ``act``.
ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(0, lambda z: z, lambda dy, z: dy),
    "relu": Activation(1, F.relu, lambda dy, z: _aten.threshold_backward(dy, z, 0)),
    "silu": Activation(2, F.silu, _silu_backward),
    "gelu": Activation(3, F.gelu, lambda dy, z: _aten.gelu_backward(dy, z, approximate="none")),
    "gelu_tanh": Activation(
        4,
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: _aten.gelu_backward(dy, z, approximate="tanh"),
    ),
    "hardswish": Activation(5, F.hardswish, lambda dy, z: _aten.hardswish_backward(dy, z)),
    "relu6": Activation(6, F.relu6, lambda dy, z: _aten.hardtanh_backward(dy, z, 0, 6)),
    "leaky_relu": Activation(
        7,
        lambda z: F.leaky_relu(z, 0.01),
        lambda dy, z: _aten.leaky_relu_backward(dy, z, 0.01, False),
    ),
}


def activation(name: str | None) -> Activation:
    """The row of the table.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"unknown activation {name!r}; expected one of {known}") from None
