"""Kullback-Leibler and Jensen-Shannon divergences."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import kl_div as _kl_div


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    r"""Kullback-Leibler divergence of log-probabilities, computed and reduced in one pass.

    .. math:: l = p \cdot (\log p - \text{input}), \qquad p = \text{target}
        \quad\text{or, with log\_target,}\quad p = \exp(\text{target})

    Stands for :func:`torch.nn.functional.kl_div`, with its warning at ``reduction="mean"``.

    Args:
        input: log-probabilities of any shape.
        target: probabilities, or with ``log_target`` their logarithms; the kernels take input's shape and dtype.
        size_average, reduce: torch's deprecated spelling of ``reduction``.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over all elements, or ``"batchmean"``, the sum divided by the size
            of the first dimension.
        log_target: whether the target is in log space.

    Returns:
        A tensor of input's dtype, a scalar with a reduction; float32 under autocast.

    Keeps: target; input too where target needs a gradient. As in torch, the gradient of a target that is not in log
    space is NaN where the target is 0.

    Raises:
        ValueError: reduction is not valid.
    """
    return _kl_div.kl_div(input, target, size_average, reduce, reduction, log_target)


def kl_div_logits(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    r"""Kullback-Leibler divergence of a student's distribution from a teacher's, from the logits of both in one pass.

    .. math:: L = T^2 \sum_i p_i (\log p_i - \log q_i), \qquad
        p = \mathrm{softmax}(\text{teacher} / T), \quad q = \mathrm{softmax}(\text{student} / T)

    over the last dimension of every row: the loss of knowledge distillation (Hinton et al., 2015). The factor T² keeps
    the size of the gradients when the temperature changes. An element where p is 0 (a logit of minus infinity) counts
    as 0. Stands for ``T**2 * F.kl_div(F.log_softmax(student / T, -1), F.log_softmax(teacher / T, -1),
    log_target=True)``, with the reductions below.

    Args:
        student, teacher: logits (\*, C); the kernels take one shape and one dtype.
        labels: (\*), or None. A row whose label is ``ignore_index`` has no loss and no gradient, and does not count.
        ignore_index: that label.
        temperature: T.
        reduction: ``"none"``, a loss for each row; ``"sum"`` of them; ``"batchmean"``, their mean over the rows that
            count, of all dimensions (torch's kl_div divides by the size of the first); ``"mean"``, the same divided by
            C. NaN where no row counts.

    Returns:
        A tensor of the logits' dtype, computed in float32 and rounded once: of labels' shape without a reduction, else
        a scalar. Float32 under autocast.

    Keeps: student and teacher, the labels, and for each row the maxima and log-sum-exps of both and two more numbers.

    Raises:
        ValueError: reduction is not valid, temperature is not positive, or labels has another shape.
    """
    return _kl_div.divergence(student, teacher, labels, ignore_index, 0.0, temperature, True, reduction)


def js_div_logits(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between a student's distribution and a teacher's, from the logits of both.

    .. math:: L = \beta\, \mathrm{KL}(p \,\|\, m) + (1 - \beta)\, \mathrm{KL}(q \,\|\, m), \qquad
        m = \beta p + (1 - \beta) q

    with p and q as for :func:`kl_div_logits`, and no factor of the temperature: the loss of generalised knowledge
    distillation (Agarwal et al., 2024, "On-Policy Distillation of Language Models", eq. 1), and that of TRL's
    GKDTrainer and of Liger. At the ends of beta the formula is 0. As in these libraries, a beta of 0 gives the forward
    divergence KL(p || q), and a beta of 1 the reverse one, KL(q || p), which it approaches in proportion.

    Args:
        student, teacher, labels, ignore_index, temperature, reduction: as for :func:`kl_div_logits`.
        beta: weight of the teacher's distribution in the mixture m, from 0 to 1.

    Returns:
        What :func:`kl_div_logits` returns.

    Keeps: what :func:`kl_div_logits` keeps.

    Raises:
        ValueError: beta is not between 0 and 1, or what :func:`kl_div_logits` raises.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"expected beta to be between 0 and 1, but got {beta}")
    if beta == 1.0:
        student, teacher, beta = teacher, student, 0.0
    return _kl_div.divergence(student, teacher, labels, ignore_index, beta, temperature, False, reduction)
