"""Softmax and its logarithm, with the scale and the mask of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import softmax as _softmax


def softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""softmax(input·scale + mask) along one dimension, in one pass over the scores.

    .. math:: y_i = \frac{\exp(s_i)}{\sum_j \exp(s_j)}, \qquad s = \text{input} \cdot \text{scale} + \text{mask}

    Stands for ``F.softmax(input * scale + mask, dim, dtype=dtype)``.

    Args:
        input: scores of any shape.
        dim: the dimension that sums to one. Torch's default, an implicit choice, is deprecated there.
        scale: a number that multiplies the input, such as the 1/sqrt(d) of attention.
        mask: broadcasts against the input. Where a boolean mask is False the score is minus infinity, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`; any other mask is added. A row that is masked
            entirely is NaN.
        dtype: of the result, and of the computation where it is wider, as in :func:`torch.nn.functional.softmax`.

    Returns:
        A contiguous tensor; float32 under autocast, as in torch.

    Keeps: the result; a reference to a mask that is boolean or needs a gradient.

    Raises:
        TypeError: scale is not a number.
    """
    return _softmax.softmax(input, dim, scale, mask, dtype, False)


def log_softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""log(softmax(input·scale + mask)) along one dimension, without the softmax in memory.

    .. math:: y_i = s_i - \log \sum_j \exp(s_j), \qquad s = \text{input} \cdot \text{scale} + \text{mask}

    Stands for ``F.log_softmax(input * scale + mask, dim, dtype=dtype)``. Arguments, result and errors are those of
    :func:`softmax`, and so is what is kept.
    """
    return _softmax.softmax(input, dim, scale, mask, dtype, True)
