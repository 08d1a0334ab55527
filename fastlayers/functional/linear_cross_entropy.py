"""Cross-entropy of a linear layer, without its logits in memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastlayers.ops import linear_cross_entropy as _linear_cross_entropy


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The cross-entropy of a linear layer's logits, which are never in memory as a whole.

    .. math:: \text{cross\_entropy}(\text{logits}, \text{target}), \qquad
        \text{logits} = \text{logit\_scale} \cdot (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias})

    Stands for ``cross_entropy(F.linear(input, linear_weight, linear_bias) * logit_scale, target)`` at the end of a
    language model, and for ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 and later. It processes the rows
    of the input in chunks. For "mean" and "sum" the forward computes the gradients as well, by three matrix products a
    chunk, and the backward multiplies them by the incoming gradient. Call it under :func:`torch.no_grad` where no
    backward follows: it then computes the loss alone.

    Args:
        input: (H,) or (N, H), as in torch, or (..., H).
        linear_weight: (C, H) in the input's dtype, under autocast in any. It may be tied, for example to an embedding.
            A sharded one (a DTensor, as FSDP2 has it outside of the forward that it wraps) is refused beside a plain
            input. For a K-dimensional loss (C, d1, ..., dK, H), with an input of (N, H) and the whole logits in memory.
            A frozen one may be quantised: bitsandbytes' ``Params4bit`` or ``Int8Params``, or any tensor with a
            ``dequantize()`` like torchao's. The products are those of the dequantised weight, whatever else its library
            does to an input. An eighth of the classes at a time is dequantised, twice a chunk; all of them at once
            under torch.compile, in the composition, and of a type that has no slices of rows.
        target: (...), classes as int64; (N, d1, ..., dK) for a K-dimensional loss. One that is out of range raises an
            IndexError on a CPU and is a device-side assert on a GPU, as in torch. Or probabilities, (..., C) or
            (N, C, d1, ..., dK), with the logits in memory as the probabilities are.
        linear_bias: (C,), for a K-dimensional loss (C, d1, ..., dK); or None.
        weight, reduction, ignore_index, label_smoothing: as for :func:`cross_entropy`. An ``ignore_index`` of None is
            -100; with probabilities, only None is valid.
        options: torch's ``LinearCrossEntropyOptions``. Its ``batch_chunk_size`` is the default of ``chunk_size``, and
            an ``acc_dtype`` of float32 that of ``acc_dtype``; the others have no effect, since every call is chunked
            and a retained graph always works.
        softcap, z_loss: a bound on the logits, softcap·tanh(logits/softcap), and the factor of the squared log-sum-exp
            of each row that is not ignored, which ``weight`` does not multiply.
        logit_scale: a number that multiplies the logits, as in Cohere's models (Granite's divide by one).
        low_rank: the factors of an adapter's product, (..., R) and (C, R), which is added to the layer's result before
            anything else: logits = logit_scale·(input·linear_weightᵀ + linear_bias + low_rank[0]·low_rank[1]ᵀ). For
            LoRA pass ``scaling * lora_A(dropout(input))`` and ``lora_B.weight``; several adapters are one pair,
            concatenated along R. Both are in the input's dtype, or both float32 beside a 16-bit input, and then are
            cast for their products; their gradients come in their own dtype. A linear_weight that needs no gradient
            has no product for one.
        chunk_size: rows of a chunk. Default: an eighth of the rows or less, but 896 or more; on a GPU short of memory
            less. Up to nine such chunks add to a 16-bit gradient of the weight in its own dtype, rounded once for each.
            They add in float32 if there is room for that in an eighth of the logits, or if there are more chunks.
        acc_dtype: float32, to sum a 16-bit gradient of the weight over the chunks in that in any case and round it
            once: 4 bytes of memory for each element of the weight. Not for DTensors.

    Returns:
        A scalar, or for "none" the losses in the shape of the target. In the input's dtype; float32 under autocast,
        which torch ignores where it chunks by ``options``, and so does this.

    The composition, which has the logits whole, computes calls whose logits have fewer than 2^20 elements on a GPU or
    2^23 on a CPU, unless a chunk_size is given or the weight is quantised. It also serves transforms of torch.func,
    exports and second derivatives.

    Keeps: references to all tensors; for "mean" and "sum" the gradients. For "none" the backward computes the logits
    again, by four products in all; so does a second backward through a retained graph.

    Raises:
        RuntimeError: the shapes do not fit, or an ignore_index is given with probabilities.
        ValueError: reduction or acc_dtype is not valid, softcap or chunk_size is not above 0, or a quantised weight
            lacks its scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, logit_scale is not a number,
            or low_rank is not a pair of tensors.
    """
    if options is not None and chunk_size is None:
        chunk_size = options.batch_chunk_size
    if options is not None and options.acc_dtype is torch.float32 and acc_dtype is None:
        acc_dtype = torch.float32
    if ignore_index is None:
        ignore_index = -100
    elif torch.is_floating_point(target):
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    alone = options is not None and _linear_cross_entropy.ignores_autocast(
        input, linear_weight, target, linear_bias, reduction, label_smoothing
    )
    with torch.autocast(input.device.type, enabled=False) if alone else nullcontext():
        return _linear_cross_entropy.linear_cross_entropy(
            input, linear_weight, target, linear_bias, weight, ignore_index, reduction, label_smoothing, softcap,
            z_loss, logit_scale, low_rank, chunk_size, acc_dtype,
        )  # fmt: skip
