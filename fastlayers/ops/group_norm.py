"""group_norm with an activation, and instance_norm: the choice between kernel and reference, and autograd."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import dispatch


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str | None
) -> Tensor:
    return dispatch.answer("group_norm", x, groups, weight, bias, eps, act)  # type: ignore[no-any-return]


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    return dispatch.answer(  # type: ignore[no-any-return]
        "instance_norm", x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
