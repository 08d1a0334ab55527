"""Batch normalisation, with the residual and the activation that follow it."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import batch_norm as _batch_norm


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    r"""Batch normalisation, and the residual and the activation that follow it in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}
        + \text{residual}\right)

    Stands for ``act(F.batch_norm(input, ...) + residual)``, rounded once.

    Args:
        input: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        running_mean, running_var: (C,), or None. Training updates them in place, as in torch.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits; the running statistics
            likewise.
        training: whether to normalise with the statistics of the input, or with the running ones.
        momentum: weight of the input's statistics in the new running ones.
        eps: added to the variance.
        residual: added before the activation; the kernels take the input's shape and dtype.
        act: None or the name of an activation, as for :func:`group_norm`.
        num_batches_tracked: one int64 that training increments, as torch's layer counts its batches; or None.

    Returns:
        A tensor of the input's dtype and memory format.

    Keeps: input, weight, bias, and the mean and rstd of each channel. The backward recomputes the argument of act. With
    a residual, "relu" keeps one bit an element, and another activation the residual.

    Raises:
        ValueError: act is not the name of an activation, or training meets a channel of one value.
    """
    return _batch_norm.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, residual, act, num_batches_tracked
    )
