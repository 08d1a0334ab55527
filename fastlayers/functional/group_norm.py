"""Norms of groups of channels."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import group_norm as _group_norm


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str | None = None,
) -> Tensor:
    r"""Group normalisation, and an activation of the result in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}\right)

    Stands for ``act(F.group_norm(input, num_groups, weight, bias, eps))``.

    Args:
        input: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        num_groups: number of groups of channels. Each group has a mean and a variance.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`bias_act`. The kernel applies "relu", "silu", "gelu",
            "gelu_tanh", "hardswish", "relu6" and "leaky_relu"; the others take a second pass.

    Returns:
        A tensor in torch's memory format, on CUDA contiguous; float32 under CUDA autocast.

    Keeps: input, weight, bias, and the mean and rstd of each group. The backward recomputes the argument of act.

    Raises:
        ValueError: act is not the name of an activation, or a group has one value.
    """
    return _group_norm.group_norm(input, num_groups, weight, bias, eps, act)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str | None = None,
) -> Tensor:
    r"""Instance normalisation and an activation in the same pass: :func:`group_norm` with one channel in each group.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}\right)

    Stands for ``act(F.instance_norm(input, ...))``. Torch computes calls with running statistics.

    Args:
        input: (N, C, *).
        running_mean, running_var: (C,), or None.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits.
        use_input_stats: whether to normalise with the statistics of the input, or with the running ones.
        momentum: weight of the input's statistics in the new running ones.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`group_norm`.

    Returns:
        A contiguous tensor of the input's dtype.

    Keeps: what :func:`group_norm` keeps.

    Raises:
        ValueError: act is not the name of an activation, or ``use_input_stats`` meets a channel of one value.
    """
    return _group_norm.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, act
    )
