"""Rules for DTensors of what is computed from hidden states and the weight of a head, as :mod:`fastlayers.ops.sharding`
has them for the other ops.

Rows may be sharded, and classes over one dimension of the mesh: then the ranks exchange some numbers for each row, and
the gradient of the input is Partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import (
    dtensor,
    guard,
    head,
    head_loss,
    linear_divergence,
    linear_log_prob,
    linear_topk,
    reference,
    vocab_parallel,
    vocab_parallel_head,
)
from fastlayers.ops.cross_entropy import MEAN, NONE, SUM
from fastlayers.ops.dtensor import DTensor, NoRuleError, Shards, broadcast, by_class, rows
from fastlayers.ops.linear_cross_entropy import linear_cross_entropy


def _by_classes(input: DTensor, linear_weight: DTensor) -> tuple[DTensor, DTensor]:
    """An input with all features, and a weight whose classes are sharded where its features were, as RowwiseParallel
    does it: both are smaller than the logits, of which each rank would have a part of the sum."""
    from torch.distributed.tensor import Replicate, Shard

    def moved(t: DTensor, features: int, to: Any) -> DTensor:
        placements = [to if p == Shard(features) else p for p in t.placements]
        return t if placements == [*t.placements] else t.redistribute(placements=placements)

    if type(linear_weight) is not type(input):
        return input, linear_weight
    return moved(input, input.dim() - 1, Replicate()), moved(linear_weight, 1, Shard(0))


def _problem_of_classes(shards: Shards, dim: int) -> str | None:
    """Why classes along a sharded dimension have no rule, None where they have one."""
    if len(shards.groups(dim)) != 1:
        return "the classes are sharded; expected one dimension of the mesh for them"
    if shards.least(dim) == 0:
        return f"{shards.plan.shape[dim]} classes leave a rank without any"
    return None


def _head_shards(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor | None, low_rank: Any,
    weight: DTensor | None = None,
) -> Shards:  # fmt: skip
    """Rows may be sharded, and classes. ``weight`` is one of each class."""
    if input.dim() == 0 or linear_weight.dim() != 2 or 0 in linear_weight.shape or low_rank is not None:
        raise NoRuleError("expected an input (..., H), a weight (V, H) and no adapter")
    if target is not None and target.shape != input.shape[:-1]:
        raise NoRuleError(f"expected a class for each row of {tuple(input.shape)}, but got {tuple(target.shape)}")
    given = (*_by_classes(input, linear_weight), linear_bias, target, weight)
    shards = Shards(given, (rows, by_class, by_class, rows, by_class), fill=False)
    last = input.dim() - 1
    problem = _problem_of_classes(shards, last) if shards.groups(last) else None
    if problem is not None:
        raise NoRuleError(problem)
    return shards


# ---- the loss --------------------------------------------------------------------------------------------------------


def _linear_cross_entropy(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor, weight: DTensor | None,
    ignore_index: int, reduction: int, smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low_rank: Any, *loss_of: Any,
) -> DTensor:  # fmt: skip
    """Rows may be sharded, and classes: then the gradient of the input is Partial."""
    last, shards = input.dim() - 1, _head_shards(input, linear_weight, linear_bias, target, low_rank, weight)
    own, own_weight, own_bias, own_target, own_classes = shards.tensors
    if shards.groups(last):
        return _linear_cross_entropy_across(shards, ignore_index, reduction, smoothing, softcap, z_loss, logit_scale)
    if own.numel() == 0:
        options = (ignore_index, reduction, smoothing, softcap, z_loss, logit_scale)
        loss = reference.linear_cross_entropy(own, own_weight, own_bias, own_target, own_classes, *options)
    else:
        loss = linear_cross_entropy(
            own, own_weight, own_target, own_bias, own_classes, ignore_index, reference.REDUCTIONS[reduction],
            smoothing, softcap or None, z_loss, logit_scale, None, None, None,
        )  # fmt: skip
    if reduction == NONE:
        return shards.wrap(loss, without=last)
    groups = shards.groups(*range(last))
    if reduction == SUM or not groups:
        return shards.wrap_part(loss)
    return dtensor.averaged(shards, loss, dtensor.share_of_rows(own_target, own_classes, ignore_index, groups))


def _linear_cross_entropy_across(
    shards: Shards, ignore_index: int, reduction: int, smoothing: float, softcap: float, z_loss: float,
    logit_scale: float,
) -> DTensor:  # fmt: skip
    """By a weight whose classes are sharded, as ColwiseParallel does it."""
    own, own_weight, own_bias, own_target, own_classes = shards.tensors
    last = len(shards.plan.shape) - 1
    groups, low = shards.groups(last), head.autocast_dtype(own)
    compute = head.cast(own.dtype, low)
    # All ranks have to find the same problem, those without rows, too: the others would wait for them.
    some = own if own.numel() else own.new_empty((*[1] * last, own.shape[-1]))
    of_some = own_target if own.numel() else own_target.new_empty([1] * last)
    problem = head.unsupported(some, own_weight, own_bias, of_some, None, head.Rest(compute, low, logit_scale, None))
    if own_classes is not None or not 0.0 <= smoothing <= 1.0:
        problem = "the classes are sharded; expected no weights of classes, and a label_smoothing from 0 to 1"
    elif problem is None and compute is torch.float16:
        problem = "the products are in float16; expected bfloat16 or float32, for gradients of logits that are small"
    if problem is not None:
        raise NoRuleError(problem)
    rest = head_loss.Rest(
        vocab_parallel.Options(groups[0], shards.start(last), ignore_index, smoothing, softcap, z_loss),
        head.Rest(compute, low, logit_scale, vocab_parallel_head.chunk_size(own_target.numel())),
        torch.promote_types(compute, torch.float32),
        reduction != NONE,
    )
    count = None
    if reduction == MEAN:
        count = dtensor.reduce((own_target != ignore_index).sum(), shards.groups(*range(last)))
    loss = head_loss.call(vocab_parallel_head.METHOD, head.Leaves(own, own_weight, own_bias), (own_target, count), rest)
    loss = loss.to(torch.float32 if low is not None and compute in reference.LOW_PRECISION else compute)
    if reduction == NONE:
        return shards.wrap(loss.view(own_target.shape), without=last)
    part = shards.wrap_part(loss, last)
    return part if reduction == SUM else dtensor.summed(part)


# ---- log-probabilities and the largest scores ------------------------------------------------------------------------


def _linear_log_prob(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor, ignore_index: int,
    softcap: float, logit_scale: float, low_rank: Any,
) -> tuple[DTensor, DTensor]:  # fmt: skip
    last, shards = input.dim() - 1, _head_shards(input, linear_weight, linear_bias, target, low_rank)
    own, own_weight, own_bias, own_target, _ = shards.tensors
    if shards.groups(last) and own.numel():
        found = _log_prob_across(shards, ignore_index, softcap, logit_scale)
    elif own.numel() == 0:
        options = (ignore_index, softcap, logit_scale)
        found = reference.linear_log_prob(own, own_weight, own_bias, own_target, *options)
    else:
        options = (ignore_index, softcap or None, logit_scale)  # type: ignore[assignment]
        found = linear_log_prob.linear_log_prob(own, own_weight, own_target, own_bias, *options, None, None, None)
    log_prob, entropy = (shards.wrap(t, without=last) for t in found)
    return log_prob, entropy


def _log_prob_across(shards: Shards, ignore_index: int, softcap: float, logit_scale: float) -> tuple[Tensor, Tensor]:
    """By a weight whose classes are sharded. The ranks exchange four numbers for each row, in the backward one.

    A row all of whose logits on one rank are -inf is NaN.
    """
    own, own_weight, own_bias, target, _ = shards.tensors
    last = len(shards.plan.shape) - 1
    groups = shards.groups(last)
    kept = target != ignore_index
    linear_log_prob.check_classes(target, kept, shards.plan.shape[last])
    classes = target - shards.start(last)
    is_own = kept & (classes >= 0) & (classes < own_weight.shape[0])
    # A row without a label here still has a part of the sum. Any class will do.
    local = torch.where(kept, torch.where(is_own, classes, 0), -100)
    given = (own, own_weight, local, own_bias, softcap, logit_scale)
    log_prob, entropy, levels = linear_log_prob.of_some_classes(*given)
    base, rest = (level.view(target.shape) for level in levels)
    part = _log_share(base, rest, groups)
    share = part.exp()
    of_target, mixed = torch.where(is_own, log_prob + part, 0.0), share * (entropy - part)
    of_target, mixed = dtensor.Total.apply(torch.stack((of_target, mixed)), groups)
    of_target = of_target - of_target.detach().clamp(min=0.0)  # A rounding above 0
    return torch.where(kept, of_target, 0.0), torch.where(kept, mixed, 0.0)


def _log_share(base: Tensor, rest: Tensor, groups: Sequence[Any]) -> Tensor:
    """The logarithm of the share that this rank has of a sum of exponentials, from that of its part: base + rest.

    No large score is added to a small one.
    """
    part = base.detach() - dtensor.reduce(base, groups, maximum=True) + rest
    total: Tensor = dtensor.Sum.apply(part.exp(), groups)
    return part - total.log()


def _linear_topk(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, k: int, softcap: float, logit_scale: float,
    log_prob: bool, low_rank: Any,
) -> Any:  # fmt: skip
    if guard.wants_gradient(input, linear_weight, linear_bias):
        raise NoRuleError("autograd is to record it; its gradient takes the whole logits")
    last, shards = input.dim() - 1, _head_shards(input, linear_weight, linear_bias, None, low_rank)
    own, own_weight, own_bias, *_ = shards.tensors
    if shards.groups(last) and not (isinstance(k, int) and 1 <= k <= shards.least(last)):
        raise NoRuleError(f"k is {k}; expected 1 to {shards.least(last)}, the number of classes of the last rank")
    found: tuple[Tensor, Tensor]
    if own.numel() == 0:
        found = reference.linear_topk(own, own_weight, own_bias, k, softcap, logit_scale, log_prob)
    elif shards.groups(last):
        found = _largest_across(own, shards, k, softcap, logit_scale, log_prob)
    else:
        options = (k, softcap or None, logit_scale, log_prob, None, None)
        found = linear_topk.linear_topk(own, own_weight, own_bias, *options)
    values, classes = (shards.wrap(t, without=last) for t in found)
    return torch.return_types.topk((values, classes))


def _largest_across(
    own: Tensor, shards: Shards, k: int, softcap: float, logit_scale: float, log_prob: bool
) -> tuple[Tensor, Tensor]:
    """The k largest scores of rows and their classes, by a weight whose classes are sharded.

    Each rank gets the k largest ones of all ranks.
    """
    own_weight, own_bias = shards.tensors[1:3]
    last = len(shards.plan.shape) - 1
    (group,) = shards.groups(last)
    given = (own, own_weight, own_bias, k, softcap, logit_scale, log_prob)
    values, classes, base = linear_topk.of_some_classes(*given)
    classes = dtensor.gather(classes + shards.start(last), group)
    if log_prob:
        values, base = dtensor.gather(torch.cat((values, base), -1), group).split((k, 1), -1)
        rest = torch.where(base == -math.inf, 0.0, -values[..., :1])
        # The logarithm of the part of a row's sum that each rank has.
        part = F.log_softmax(base - base.amax(0) + rest, 0)
        values = torch.where(part == -math.inf, part, values + part)
    else:
        values = dtensor.gather(values, group)
    values, classes = (t.movedim(0, -2).flatten(-2) for t in (values, classes))
    # The first class of equal ones, as in one process.
    values, place = values.max(-1, keepdim=True) if k == 1 else values.topk(k)
    return values, classes.gather(-1, place)


def _argmax(own: Tensor, shards: Shards) -> Tensor:
    own_weight, own_bias = shards.tensors[1:3]
    if own.numel() == 0:
        return reference.linear_argmax(own, own_weight, own_bias)
    if shards.groups(len(shards.plan.shape) - 1):
        return _largest_across(own, shards, 1, 0.0, 1.0, False)[1].squeeze(-1)
    return linear_topk.linear_argmax(own, own_weight, own_bias, None, None)


@torch.no_grad()
def _linear_argmax(input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, low_rank: Any) -> DTensor:
    shards = _head_shards(input, linear_weight, linear_bias, None, low_rank)
    return shards.wrap(_argmax(shards.tensors[0], shards), without=input.dim() - 1)


@torch.no_grad()
def _linear_accuracy(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor, ignore_index: int,
    low_rank: Any,
) -> DTensor:  # fmt: skip
    """The ranks exchange two numbers."""
    shards = _head_shards(input, linear_weight, linear_bias, target, low_rank)
    own, classes = shards.tensors[0], shards.tensors[3].reshape(-1)
    own = own.reshape(-1, own.shape[-1])
    labelled = head.labelled(classes, ignore_index, linear_weight.shape[0])
    if labelled is not None:
        own, classes = own[labelled], classes[labelled]
    kept = classes != ignore_index
    counts = torch.stack((((_argmax(own, shards) == classes) & kept).sum(), kept.sum()))
    right, all_kept = dtensor.reduce(counts, shards.groups(*range(input.dim() - 1)))
    return shards.wrap_part(right.to(torch.float32) / all_kept, *range(input.dim()))


# ---- divergences -----------------------------------------------------------------------------------------------------


def _linear_divergence(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target_input: DTensor,
    target_weight: DTensor | None, target_bias: DTensor | None, target: DTensor | None, *rest: Any,
) -> DTensor:  # fmt: skip
    """Rows may be sharded, and classes for Kullback-Leibler divergences: then the gradient of the input is Partial."""
    *options, low_rank = rest
    loss = linear_divergence.Loss(*options)
    if low_rank is not None or any(t is not None and t.dim() != 2 for t in (linear_weight, target_weight)):
        raise NoRuleError("expected weights (V, H) and no adapter")
    last, of_teacher = input.dim() - 1, (broadcast if target_weight is None else rows, by_class, by_class)
    wanted, shape = (*input.shape[:-1], linear_weight.shape[0]), tuple(target_input.shape)
    if target_weight is not None:
        shape = (*shape[:-1], target_weight.shape[0])
    if shape != wanted or 0 in linear_weight.shape:
        raise NoRuleError(f"the teacher's logits are {shape}, and the student's {wanted}; expected one shape")
    input, linear_weight = _by_classes(input, linear_weight)
    if target_weight is not None:
        target_input, target_weight = _by_classes(target_input, target_weight)
    given = (input, linear_weight, linear_bias, target_input, target_weight, target_bias, target)
    shards = Shards(given, (rows, by_class, by_class, *of_teacher, rows), fill=False)
    if shards.groups(last):
        problem = _problem_of_classes(shards, last)
        if loss.kind not in ("kl", "reverse_kl") and not (loss.kind == "js" and loss.beta in (0.0, 1.0)):
            problem = f"the classes are sharded; expected a divergence of kl or reverse_kl, but got {loss.kind}"
        elif guard.wants_gradient(target_input, target_weight, target_bias):
            problem = "the classes are sharded, and the teacher requires a gradient"
        if problem is not None:
            raise NoRuleError(problem)
        return _reduced_divergence(shards, *_divergence_across(shards, loss), loss)
    found = _own_divergence(shards.tensors, loss)
    if loss.reduction == "none":
        return shards.wrap(found, without=last)
    groups = shards.groups(*range(last))
    if loss.reduction == "sum" or not groups:
        return shards.wrap_part(found)
    own, *_, own_labels = shards.tensors
    if target is None:
        return dtensor.averaged(shards, found, own.numel() / max(input.numel(), 1))
    return dtensor.averaged(shards, found, dtensor.share_of_rows(own_labels, None, loss.ignore_index, groups))


def _own_divergence(tensors: Sequence[Any], loss: linear_divergence.Loss) -> Tensor:
    if tensors[0].numel() == 0:
        given: list[Any] = [*tensors, *loss]
        return reference.linear_divergence(*given)
    caps: dict[str, Any] = {"softcap": loss.softcap or None, "target_softcap": loss.target_softcap or None}
    given = [*tensors, *loss._replace(**caps), None, None, None]
    return linear_divergence.linear_divergence(*given)


def _divergence_across(shards: Shards, loss: linear_divergence.Loss) -> tuple[Tensor, torch.dtype]:
    """Kullback-Leibler divergences of rows by weights whose classes are sharded, without temperature², and the dtype of
    the loss. The ranks exchange five numbers for each row, in the backward two.

    For shares a and b that a rank has of the distributions p of the teacher and q of the student,

        KL(p || q) = sum over the ranks of a·(KL(p/a || q/b) + log a - log b)

    where p/a and q/b are the softmax of the scores of this rank. The other way p and q, and a and b, are exchanged.
    """
    own, own_weight, own_bias, *teacher, labels = shards.tensors
    reverse = loss.kind == "reverse_kl" or (loss.kind == "js" and loss.beta == 1.0)
    if own.numel() == 0:
        found = _own_divergence(shards.tensors, loss._replace(reduction="none"))
        return found, found.dtype
    groups, t = shards.groups(len(shards.plan.shape) - 1), loss.temperature
    kept = own.new_ones(own.shape[:-1], dtype=torch.bool) if labels is None else labels != loss.ignore_index
    scaled = (loss.softcap / t, loss.logit_scale / t)
    of_teacher = (loss.target_softcap / t, loss.target_logit_scale / t)
    any_class = torch.where(kept, 0, -100)
    levels = linear_log_prob.of_some_classes(own, own_weight, any_class, own_bias, *scaled)[2]
    with torch.no_grad():
        target, weight, bias = teacher
        if weight is None:
            target_levels = linear_divergence.levels_of_logits(target, *of_teacher)
        else:
            target_levels = linear_log_prob.of_some_classes(target, weight, any_class, bias, *of_teacher)[2]
    base, rest, target_base, target_rest = (level.view(kept.shape) for level in (*levels, *target_levels))
    # Where all scores of the teacher here are -inf its share is 0, and it has no distribution of its own.
    some = kept & (target_base != -math.inf)
    bases = torch.stack((torch.where(kept, base, 0.0), torch.where(kept, target_base, 0.0)))
    rests = torch.stack((torch.where(kept, rest, 0.0), torch.where(some, target_rest, 0.0)))
    log_b, log_a = _log_share(bases, rests, groups)
    log_a = log_a.detach()
    given = (own, own_weight, own_bias, target, weight, bias, torch.where(some, 0, -100))
    found, out = linear_divergence.of_some_classes(*given, reverse, loss)
    share, ratio = (log_b.exp(), log_b - log_a) if reverse else (log_a.exp(), log_a - log_b)
    found = share * (found + torch.where(share == 0, 0.0, ratio))
    return dtensor.Total.apply(torch.where(kept, found, 0.0), groups), out


def _reduced_divergence(shards: Shards, losses: Tensor, out: torch.dtype, loss: linear_divergence.Loss) -> DTensor:
    """From the divergences of rows, which the ranks that share their classes all have."""
    last, labels, factor = len(shards.plan.shape) - 1, shards.tensors[-1], loss.squared
    if loss.reduction == "none":
        return shards.wrap((losses * factor).to(out), without=last)
    total = losses.sum() * factor
    if loss.reduction == "sum":
        return shards.wrap_part(total.to(out), last)
    count: Tensor | int = math.prod(shards.plan.shape[:last])
    if labels is not None:
        count = dtensor.reduce((labels != loss.ignore_index).sum(), shards.groups(*range(last)))
    if loss.reduction == "mean":
        total = total / shards.plan.shape[last]
    return dtensor.summed(shards.wrap_part((total / count).to(out), last))


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    reference.linear_cross_entropy: _linear_cross_entropy,
    reference.linear_log_prob: _linear_log_prob,
    reference.linear_topk: _linear_topk,
    reference.linear_argmax: _linear_argmax,
    reference.linear_accuracy: _linear_accuracy,
    reference.linear_divergence: _linear_divergence,
}
