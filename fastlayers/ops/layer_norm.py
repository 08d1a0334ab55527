"""layer_norm, rms_norm and their forms with a residual: the choice between kernel and reference, and autograd."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import dispatch
from fastlayers.ops.reference import Shape


def layer_norm(x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return dispatch.answer("layer_norm", x, shape, weight, bias, eps)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, casting: str) -> Tensor:
    return dispatch.answer("rms_norm", x, shape, weight, eps, casting)  # type: ignore[no-any-return]


def add_layer_norm(
    x: Tensor, residual: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return dispatch.answer("add_layer_norm", x, residual, shape, weight, bias, eps)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, residual: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, casting: str
) -> tuple[Tensor, Tensor]:
    return dispatch.answer("add_rms_norm", x, residual, shape, weight, eps, casting)  # type: ignore[no-any-return]
