"""The largest logits of a linear layer, without all of them in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import linear_topk as _linear_topk


def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    log_prob: bool = False,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> torch.return_types.topk:
    r"""The k largest logits of a linear layer with their classes; the logits are never in memory as a whole.

    .. math:: \text{topk}(\text{logit\_scale} \cdot
        (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}), k)

    Stands for ``torch.topk(F.linear(input, linear_weight, linear_bias) * logit_scale, k)``, for example of the logits
    of a teacher. Call it under :func:`torch.no_grad`: a call whose values need a gradient has the logits whole.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        k: how many, at most C.
        linear_bias: (C,) or None.
        softcap: a bound on the logits, as for :func:`linear_cross_entropy`.
        logit_scale: a number that multiplies the logits. A negative one reverses their order.
        log_prob: whether to return log-probabilities instead of the logits: those of all C classes, not of the k.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        A ``torch.return_types.topk`` of values and indices, both (..., k), the largest first. The values are in the
        input's dtype, under autocast in autocast's; log-probabilities are in float32, float64 for float64. The indices
        are int64. NaN counts as the largest. Which of equal logits are returned is not specified, as in torch.

    For the gradient of the log-probabilities of given classes, one for each row, use :func:`linear_log_prob`. The
    composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    transforms of torch.func, exports, and calls whose values need a gradient.

    Keeps: nothing; what the composition keeps if the values need a gradient.

    Raises:
        RuntimeError: the shapes do not fit, or there are fewer than k classes.
        ValueError: softcap is not above 0, chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, logit_scale is not a number, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_topk(
        input, linear_weight, linear_bias, k, softcap, logit_scale, log_prob, low_rank, chunk_size
    )


def linear_argmax(
    input: Tensor,
    linear_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""The class of the largest logit of a linear layer; the logits are never in memory as a whole.

    .. math:: \text{argmax}(\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias})

    Stands for ``F.linear(input, linear_weight, linear_bias).argmax(-1)``. Greedy decoding and metrics need no more of
    the logits.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        linear_bias: (C,) or None.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        (...) of int64, without a gradient. Of equal logits the first counts, and NaN as the largest.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    transforms of torch.func and exports.

    Keeps: nothing.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_argmax(input, linear_weight, linear_bias, low_rank, chunk_size)


def linear_accuracy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""The share of labels with the largest logit of a linear layer; the logits are never in memory as a whole.

    .. math:: \frac{1}{n} \sum_{i = 1}^{n} [\text{argmax}(z_i) = t_i], \qquad
        z = \text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}

    The token accuracy of a language model: the mean of ``F.linear(input, linear_weight, linear_bias).argmax(-1) ==
    target`` over the rows whose target is not ``ignore_index``.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target: (...), classes as int64. Rows with ``ignore_index`` take part in no product if there are many logits. A
            target that is no class is not an error; nothing equals it.
        linear_bias: (C,) or None.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        A scalar of float32, without a gradient; NaN if no row has a label. Of equal logits the first counts.

    The composition serves the same calls as for :func:`linear_argmax`.

    Keeps: nothing.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_accuracy(input, linear_weight, target, linear_bias, ignore_index, low_rank, chunk_size)
