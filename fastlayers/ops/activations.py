"""The table of activations: function, derivative, code in the kernels, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


def _silu_backward(dy: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)  # aten's silu_backward has no derivative
    return dy * s * (1 + z * (1 - s))


def _quick_gelu_backward(dy: Tensor, z: Tensor) -> Tensor:
    scaled = 1.702 * z
    s = torch.sigmoid(scaled)
    return dy * s * (1 + scaled * (1 - s))


def _relu2(z: Tensor) -> Tensor:
    r = torch.relu(z)
    return r * r


def _mish_backward(dy: Tensor, z: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(z))
    return dy * (t + z * torch.sigmoid(z) * (1 - t * t))


def _sigmoid_backward(dy: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return dy * (1 - s) * s


def _tanh_backward(dy: Tensor, z: Tensor) -> Tensor:
    t = torch.tanh(z)
    return dy * (1 - t * t)


def as_two(parameters: tuple[float, ...]) -> tuple[float, float]:
    """The parameters of an activation as the kernels take them: two, whichever it has."""
    first, second = (*parameters, 0.0, 0.0)[:2]
    return first, second


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        code: its number in ``csrc/common/activations.cuh`` and in the Triton kernels.
        function: it, on a tensor; its parameters follow, or are the defaults.
        backward: the gradient of z from (gradient of act(z), z, *parameters), in torch ops that can be derived again.
        parameters: its parameters by torch's names and in torch's order, with torch's defaults; two at most.
    """

    code: int
    function: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def defaults(self) -> tuple[float, float]:
        """Its parameters as the kernels take them."""
        return as_two(tuple(self.parameters.values()))


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
        lambda z, negative_slope=0.01: F.leaky_relu(z, negative_slope),
        lambda dy, z, negative_slope=0.01: _aten.leaky_relu_backward(dy, z, negative_slope, False),
        {"negative_slope": 0.01},
    ),
    "quick_gelu": Activation(8, lambda z: z * torch.sigmoid(1.702 * z), _quick_gelu_backward),
    "relu2": Activation(9, _relu2, lambda dy, z: _aten.threshold_backward(2 * dy * z, z, 0)),
    "mish": Activation(10, F.mish, _mish_backward),
    "sigmoid": Activation(11, torch.sigmoid, _sigmoid_backward),
    "tanh": Activation(12, torch.tanh, _tanh_backward),
    "elu": Activation(
        13,
        lambda z, alpha=1.0: F.elu(z, alpha),
        lambda dy, z, alpha=1.0: _aten.elu_backward(dy, alpha, 1, 1, False, z),
        {"alpha": 1.0},
    ),
    "softplus": Activation(
        14,
        lambda z, beta=1.0, threshold=20.0: F.softplus(z, beta, threshold),
        lambda dy, z, beta=1.0, threshold=20.0: _aten.softplus_backward(dy, z, beta, threshold),
        {"beta": 1.0, "threshold": 20.0},
    ),
}
#: By the number that the kernels know.
BY_CODE = {entry.code: entry for entry in ACTIVATIONS.values()}

#: The kernels of norms apply only activations below this code: the others need more registers. For those the norm runs
#: without an activation, and bias_act follows.
NORM_CODES = 8


def activation(name: str | None) -> Activation:
    """The row of the table.

    Raises:
        ValueError: no activation has that name.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"unknown activation {name!r}; expected one of {known}") from None


def parameters_of(name: str | None, given: Mapping[str, float]) -> tuple[float, ...]:
    """The parameters of an activation in order, with torch's defaults for those that were not given.

    Raises:
        ValueError: there is no activation of that name.
        TypeError: it has no such parameter.
    """
    known = activation(name).parameters
    if given.keys() <= known.keys():
        return tuple(given.get(parameter, default) for parameter, default in known.items())
    expected = ", ".join(known) or "none"
    raise TypeError(f"activation {name!r} got parameters {', '.join(given)}; expected of {expected}")
