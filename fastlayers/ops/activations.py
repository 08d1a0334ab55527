"""The table of activations: function, code in the kernels, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


def _relu2(z: Tensor) -> Tensor:
    r = torch.relu(z)
    return r * r


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
        parameters: its parameters by torch's names and in torch's order, with torch's defaults; two at most.
    """

    code: int
    function: Callable[..., Tensor]
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def defaults(self) -> tuple[float, float]:
        """Its parameters as the kernels take them."""
        return as_two(tuple(self.parameters.values()))

    def backward(self, dy: Tensor, z: Tensor, *parameters: float) -> Tensor:
        """The gradient of z from that of act(z), under ``create_graph`` with a graph of its own."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # An alias: z may be a view that was taken without a graph, and has an edge of its own for each use.
            z = z.view_as(z) if z.requires_grad else z.detach().requires_grad_()
            return torch.autograd.grad(self.function(z, *parameters), z, dy, create_graph=create_graph)[0]


#: By the name that the functions and layers take as ``act``.
ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(0, lambda z: z),
    "relu": Activation(1, F.relu),
    "silu": Activation(2, F.silu),
    "gelu": Activation(3, F.gelu),
    "gelu_tanh": Activation(4, lambda z: F.gelu(z, approximate="tanh")),
    "hardswish": Activation(5, F.hardswish),
    "relu6": Activation(6, F.relu6),
    "leaky_relu": Activation(7, F.leaky_relu, {"negative_slope": 0.01}),
    "quick_gelu": Activation(8, lambda z: z * torch.sigmoid(1.702 * z)),
    "relu2": Activation(9, _relu2),
    "mish": Activation(10, F.mish),
    "sigmoid": Activation(11, torch.sigmoid),
    "tanh": Activation(12, torch.tanh),
    "elu": Activation(13, F.elu, {"alpha": 1.0}),
    "softplus": Activation(14, F.softplus, {"beta": 1.0, "threshold": 20.0}),
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


def cpu_gelu_gains() -> bool:
    """Whether the CPU kernels' gelu is faster than torch's on this machine.

    Its polynomial keeps digits of the tail that 1 + erf loses, and costs as much as torch's. Eager's time over that of
    C++ for bias + gelu, forward, and forward with backward: AVX-512 1.8 and 1.8, AVX2 0.9 and 1.1, SSE2 0.6 and 0.7.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
