"""Divergences of two linear layers, without their logits in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import linear_divergence as _linear_divergence


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    target_input: Tensor,
    target_weight: Tensor | None = None,
    *,
    divergence: str = "kl",
    linear_bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    target_softcap: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float = 1.0,
    reduction: str = "batchmean",
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""A loss of distillation between two heads, or a head and given logits, without the logits in memory as a whole.

    .. math:: L = D(p, q), \qquad q = \mathrm{softmax}(s / T), \quad p = \mathrm{softmax}(t / T)

    for the scores of the student and the teacher,

    .. math:: s = \text{logit\_scale} \cdot (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}), \quad
        t = \text{target\_logit\_scale} \cdot (\text{target\_input} \cdot \text{target\_weight}^T + \text{target\_bias})

    Stands for the divergence of the whole logits in float32, such as ``kl_div_logits(F.linear(input, linear_weight),
    F.linear(target_input, target_weight))``. The chunks have no gradient of the teacher: if one of its tensors requires
    one, the composition with whole logits computes it. Pass ``target_weight.detach()`` of a teacher that is not frozen.

    Args:
        input: (..., H), hidden states of the student.
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target_input: (..., H'), hidden states of the teacher; without target_weight (..., C), logits of the teacher, or
            log-probabilities, which are logits too. Given logits may have a dtype of their own.
        target_weight: (C, H'), or None. A quantised one is dequantised as a whole, once in each pass.
        divergence: a number for each row,

            - ``"kl"``: T² KL(p || q), as :func:`kl_div_logits`.
            - ``"reverse_kl"``: T² KL(q || p).
            - ``"js"``: β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q, as :func:`js_div_logits`: with a
              beta of 0 KL(p || q), with a beta of 1 KL(q || p), and no factor T².
            - ``"tv"``: the total variation distance, ½ Σ \|p - q\|.
            - ``"cosine"``: 1 - s·t / (\|s\| \|t\|) of the scores, which no temperature changes.

        linear_bias, target_bias: (C,) or None.
        target: (...), labels as int64, or None. A row whose label is ``ignore_index`` has no loss and no gradient, does
            not count, and takes part in no product if there are many logits. Other labels have no meaning.
        ignore_index: that label.
        beta: weight of the teacher's distribution in m, from 0 to 1.
        temperature: T.
        softcap, target_softcap: scores become softcap·tanh(scores / softcap), before the temperature.
        logit_scale, target_logit_scale: numbers that multiply the logits.
        reduction: as for :func:`kl_div_logits`: ``"none"``, ``"sum"``, ``"batchmean"`` or ``"mean"``.
        low_rank: the factors of an adapter's product on the student's head, as for :func:`linear_cross_entropy`.
        chunk_size: rows of the student's logits that are in memory at a time, as for :func:`linear_cross_entropy`.
            Beside them are 256 rows of the logits of the teacher's head, or an eighth of the chunk if that is more.
        acc_dtype: as for :func:`linear_cross_entropy`.

    Returns:
        A tensor of the logits' dtype, computed in float32 and rounded once: of the shape of a row's labels without a
        reduction, else a scalar. Float32 under autocast.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    and transforms of torch.func, exports and second derivatives.

    Keeps: references to all tensors, and the gradients, which the forward computes; with ``reduction="none"`` the
    backward computes the logits again.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: divergence, reduction or acc_dtype is not valid, target has another shape, temperature, a softcap or
            chunk_size is not above 0, beta is not between 0 and 1, there is a target_bias without a target_weight, or a
            quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, a scale is not a number, or
            low_rank is not a pair of tensors.
    """
    return _linear_divergence.linear_divergence(
        input, linear_weight, linear_bias, target_input, target_weight, target_bias, target, ignore_index, divergence,
        reduction, softcap, logit_scale, target_softcap, target_logit_scale, temperature, beta, low_rank, chunk_size,
        acc_dtype,
    )  # fmt: skip
