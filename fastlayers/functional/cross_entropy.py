"""Cross-entropy of logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import _reduction

from fastlayers.ops import cross_entropy as _cross_entropy


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Cross-entropy of logits and classes: the forward reads the logits once, the backward reads and writes them once.

    .. math:: l_i = w_t \left(\log \sum_c \exp(s_c) - s_t\right) + \text{z\_loss} \left(\log \sum_c \exp(s_c)\right)^2,
        \qquad s = \text{softcap} \cdot \tanh(\text{input} / \text{softcap})

    Stands for :func:`torch.nn.functional.cross_entropy` of ``softcap * torch.tanh(input / softcap)``, plus PaLM's
    z-loss. Computed in float32 and rounded once.

    Args:
        input: logits, of shape (C,), (N, C) or (N, C, d1, ...).
        target: classes, of input's shape without C. One that is out of range raises an IndexError on a CPU and is a
            device-side assert on a GPU, as in torch. Or probabilities in input's shape, where torch computes the call.
        weight: (C,), a factor for each class; without a gradient, as in torch.
        size_average, reduce: deprecated in torch, too.
        ignore_index: a target without a loss. Its row is not read, and has a gradient of 0 whatever it holds.
        reduction: "none", "mean" (weighted by ``weight``, NaN where all rows are ignored) or "sum".
        label_smoothing: from 0 to 1, the share of the uniform distribution in the target.
        softcap: a number above 0 that bounds the logits, or None.
        z_loss: factor of the squared log-sum-exp of each row that is not ignored. As in Liger, ``weight`` does not
            multiply it; "mean" divides it by what it divides the loss by, the sum of the weights of the targets or,
            without a weight, their number.
        inplace_backward: allows the backward to write the gradient over the logits, which saves half of the memory.
            Logits that are a leaf are refused. A second backward raises, and so does that of another operation that
            kept the logits. No effect where no kernel applies, where the logits are not contiguous, under
            ``create_graph`` and under ``torch.compile``.

    Returns:
        A tensor of input's dtype; float32 under autocast, as in torch.

    Keeps: input, target, weight, and two numbers of each row that add up to its log-sum-exp.

    Raises:
        ValueError: reduction is not valid, softcap is not above 0, or inplace_backward is True for a leaf.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _cross_entropy.cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
    )
