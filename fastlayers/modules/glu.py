"""Gates: the product of one branch with the activation of another."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers import functional


class FusedSwiGLU(nn.Module):
    """silu(gate)·up, see :func:`fastlayers.functional.swiglu`.

    Shape: gate and up broadcast against each other, as in torch.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.swiglu(gate, up)


class FusedGEGLU(nn.Module):
    """gelu(gate)·up, see :func:`fastlayers.functional.geglu`.

    Args:
        approximate: "none" or "tanh", as :class:`torch.nn.GELU` has it.

    Shape: gate and up broadcast against each other, as in torch.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class FusedReGLU(nn.Module):
    """relu(gate)·up, see :func:`fastlayers.functional.reglu`.

    Shape: gate and up broadcast against each other, as in torch.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.reglu(gate, up)


class FusedGLU(nn.GLU):
    """:class:`torch.nn.GLU` through :func:`fastlayers.functional.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.glu(input, self.dim)
