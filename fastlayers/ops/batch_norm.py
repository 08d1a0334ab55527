"""batch_norm with a residual and an activation: the choice between kernel and reference, and autograd."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import dispatch


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    act: str | None,
) -> Tensor:
    return dispatch.answer(  # type: ignore[no-any-return]
        "batch_norm", x, running_mean, running_var, weight, bias, training, momentum, eps, residual, act
    )
