"""Log-probabilities of a linear layer, without its logits in memory."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from fastlayers.ops import linear_log_prob as _linear_log_prob


@overload
def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = ..., ignore_index: int = ...,
    softcap: float | None = ..., logit_scale: float = ..., low_rank: tuple[Tensor, Tensor] | None = ...,
    entropy: Literal[False] = ..., chunk_size: int | None = ..., acc_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = ..., ignore_index: int = ...,
    softcap: float | None = ..., logit_scale: float = ..., low_rank: tuple[Tensor, Tensor] | None = ...,
    entropy: Literal[True], chunk_size: int | None = ..., acc_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The log-probabilities of classes by a linear layer's logits, which are never in memory as a whole.

    .. math:: \log p_t, \qquad p = \text{softmax}(\text{logit\_scale} \cdot
        (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}))

    What losses of preferences and of reinforcement are made of (:func:`dpo_loss`, :func:`grpo_loss`), one number for
    each token. Stands for ``log_softmax(F.linear(input, linear_weight, linear_bias).float() * logit_scale, -1)``, of
    which it picks the targets.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target: (...), classes as int64. Rows with ``ignore_index`` take part in no product if there are many logits.
        linear_bias: (C,) or None.
        softcap, low_rank, chunk_size, acc_dtype: as for :func:`linear_cross_entropy`.
        logit_scale: a number that multiplies the logits: one over the temperature.
        entropy: whether to return the entropies :math:`-\sum_j p_j \log p_j` as well, which have a gradient, too.

    Returns:
        The log-probabilities in the shape of the target, never above 0, and 0 where the target is ``ignore_index``; or
        the pair of these and the entropies. In float32, float64 for float64.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    and transforms of torch.func, exports and second derivatives.

    Keeps: references to all tensors, and three numbers for each row. The backward computes the logits again.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: softcap or chunk_size is not above 0, acc_dtype is not valid, or a quantised weight lacks its
            scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, logit_scale is not a number,
            or low_rank is not a pair of tensors.
    """
    found = _linear_log_prob.linear_log_prob(
        input, linear_weight, target, linear_bias, ignore_index, softcap, logit_scale, low_rank, chunk_size, acc_dtype
    )
    return found if entropy else found[0]
