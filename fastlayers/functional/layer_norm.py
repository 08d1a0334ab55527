"""Norms of rows, with what precedes them: a residual, a modulation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import layer_norm as _layer_norm


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalisation over the last dimensions; forward and backward read each tensor once.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}

    Stands for :func:`torch.nn.functional.layer_norm`.

    Args:
        input: any shape that ends with ``normalized_shape``.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight, bias: of shape ``normalized_shape``, in the input's dtype, or in float32 where the input has 16 bits
            (torch's CUDA kernels take that under autocast only). The computation is in float32, rounded once.
        eps: added to the variance.
        dtype: of the result. The kernel rounds to it once, so that under autocast the result for a 16-bit layer is
            never written in float32.

    Returns:
        A contiguous tensor of ``dtype``; by default of the input's dtype, float32 under CUDA autocast, as in torch.

    Keeps: input, weight, and the mean and rstd of each row.
    """
    return _layer_norm.layer_norm(input, normalized_shape, weight, bias, eps, dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Root mean square normalisation over the last dimensions.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot \text{weight}

    Stands for :func:`torch.nn.functional.rms_norm`, or for the code of a model library.

    Args:
        input: any shape that ends with ``normalized_shape``.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight: of shape ``normalized_shape``, in the input's dtype, or in float32 where the input has 16 bits.
        eps: added to the mean square. None is the epsilon of float32, of float64 for a float64 input, as in torch.
        casting: where a 16-bit input is rounded.

            - ``"torch"``: once, at the end.
            - ``"llama"``: x·rstd is rounded to the input's dtype and then multiplied by weight. The result has the
              dtype of this product, float32 for a float32 weight.
            - ``"gemma"``: x·rstd·(1 + weight), rounded once at the end.

        dtype: of the result, as for :func:`layer_norm`.

    Returns:
        A tensor of ``dtype``; by default of the input's dtype, but for ``"llama"``, and float32 under CUDA autocast
        where torch's own gives it (from 2.13 on). It is contiguous for ``"torch"`` unless torch keeps a channels_last
        input so. The other casting orders keep the order of the dimensions in memory, as elementwise operations do.

    Keeps: input, weight, and the rstd of each row.

    Raises:
        ValueError: casting is not one of the three orders.
    """
    return _layer_norm.rms_norm(input, normalized_shape, weight, eps, casting, dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The sum x + residual and its layer normalisation: the start of a transformer block.

    .. math:: s = x + \text{residual}, \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} \cdot
        \text{weight} + \text{bias}

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``F.layer_norm(s, ...)``. Both results have
    gradients, which one backward kernel adds.

    Args:
        x, residual: tensors that broadcast against each other. The kernels take one shape and one dtype, or a float32
            residual with a 16-bit x. Without a residual s is x itself: the backward kernel of the norm then adds the
            gradient of its uses, and code may not write to it.
        normalized_shape, weight, bias, eps: as for :func:`layer_norm`.
        dropout: probability with which elements of x are zeroed before the sum.
        training: whether dropout applies.
        dtype: of layer_norm(s), as for :func:`layer_norm`.

    Returns:
        (layer_norm(s), s).

    Keeps: s, weight, and the mean and rstd of each row; the mask of dropout.
    """
    if training and dropout:
        x = F.dropout(x, dropout)
    return _layer_norm.add_layer_norm(x, residual, normalized_shape, weight, bias, eps, dtype)


def ada_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalisation modulated for each sample (AdaLN): the start of a block of a diffusion transformer.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot (1 + \text{scale}) + \text{shift}

    Stands for ``F.layer_norm(input, normalized_shape, eps=eps) * (1 + scale) + shift``, rounded once. See "Scalable
    Diffusion Models with Transformers" (Peebles and Xie, 2023).

    Args:
        input: any shape that ends with ``normalized_shape``: (N, T, C) with tokens.
        normalized_shape: sizes of the dimensions that are normalised together. The kernel takes rows of at most 8192
            elements, 2048 of float64.
        scale, shift: broadcast against the input. The kernel takes one row for each index of the leading dimensions:
            (N, 1, C), or slices of a projection, ``projection(c).unsqueeze(1).chunk(6, -1)``; in one dtype.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the dtype that the composition has.

    Keeps: input, scale, and the mean and rstd of each row. The backward is one kernel, which adds up the gradients of
    scale and shift on the way.
    """
    return _layer_norm.ada_layer_norm(input, normalized_shape, scale, shift, eps)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dropout: float = 0.0,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The sum x + residual and its root mean square normalisation.

    .. math:: s = x + \text{residual}, \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} \cdot \text{weight}

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``rms_norm(s, ...)``. Returns (rms_norm(s), s).
    x, residual, dropout, training and dtype are those of :func:`add_layer_norm`, the others those of :func:`rms_norm`.

    Keeps: s, weight, and the rstd of each row; the mask of dropout.

    Raises:
        ValueError: casting is not one of the three orders.
    """
    if training and dropout:
        x = F.dropout(x, dropout)
    return _layer_norm.add_rms_norm(x, residual, normalized_shape, weight, eps, casting, dtype)


def channel_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalisation over dimension 1, the channels of an image (N, C, H, W), at each pixel.

    .. math:: y_{n,c} = \frac{x_{n,c} - \mathrm{E}_c[x_n]}{\sqrt{\mathrm{Var}_c[x_n] + \epsilon}} \cdot
        \text{weight}_c + \text{bias}_c

    Stands for ``F.layer_norm(x.permute(0, 2, 3, 1), (C,), weight, bias, eps).permute(0, 3, 1, 2)``, for any number of
    dimensions after the channels. The result is channels_last in memory, and a channels_last x is not copied.

    Args:
        x: (N, C, *).
        weight, bias: (C,), in the dtypes that :func:`layer_norm` takes.
        eps, dtype: as for :func:`layer_norm`.

    Keeps: what :func:`layer_norm` keeps.
    """
    rows = torch.movedim(x, 1, -1)
    return _layer_norm.layer_norm(rows, rows.shape[-1:], weight, bias, eps, dtype).movedim(-1, 1)
