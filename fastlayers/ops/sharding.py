"""Rules for DTensors: which shards an op computes as they are, and how its results and gradients are placed.

Where rows do not depend on each other, each rank computes its shard by itself, with the kernels that a plain tensor of
that size gets. A rule says how the dimensions of the operands correspond to those of the result, and which of these the
op needs whole. The rest follows, for each dimension of the mesh:

- A dimension of the result may be sharded, unless the op needs it whole. An operand that has this dimension is sharded
  along it, or replicated and then sliced, which needs no communication.
- An operand without this dimension, such as a weight where the rows are sharded, is replicated. Each rank computes a
  part of its gradient, whose placement is Partial, as torch's own is.

Softmax and the norms over a sharded dimension and the losses of sharded classes exchange some numbers for each row. Any
other call gets torch's composition, as one without a rule does, and :func:`fallbacks` counts it.

What the rules are made of is in :mod:`fastlayers.ops.dtensor`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import (
    dispatch,
    dtensor,
    head,
    head_loss,
    linear_divergence,
    linear_log_prob,
    linear_topk,
    reference,
    residual,
    vocab_parallel,
    vocab_parallel_head,
)
from fastlayers.ops.activations import activation
from fastlayers.ops.batch_norm import batch_norm
from fastlayers.ops.bias_act import FASTER_BARE, bias_act
from fastlayers.ops.cross_entropy import MEAN, NONE, SUM, cross_entropy
from fastlayers.ops.dtensor import (
    Alignment,
    DTensor,
    NoRuleError,
    Shards,
    broadcast,
    by_class,
    channels,
    is_divided,
    positions,
    rows,
    samples,
)
from fastlayers.ops.elementwise import GPU_LEAST, add_relu, mul, relu_add
from fastlayers.ops.glu import gated, gated_linear, glu
from fastlayers.ops.group_norm import group_norm, instance_norm
from fastlayers.ops.kl_div import divergence, kl_div
from fastlayers.ops.layer_norm import ada_layer_norm, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fastlayers.ops.linear_cross_entropy import linear_cross_entropy
from fastlayers.ops.max_pool2d import max_pool2d
from fastlayers.ops.response_norm import global_response_norm
from fastlayers.ops.rotary import rotary
from fastlayers.ops.softmax import result_dtype, softmax
from fastlayers.ops.sync_batch_norm import sync_batch_norm

_fallbacks: Counter[tuple[str, str]] = Counter()


def fallbacks(reset: bool = False) -> dict[tuple[str, str], int]:
    """How many calls on DTensors got torch's composition, by the name of the op and the reason."""
    found = dict(_fallbacks)
    if reset:
        _fallbacks.clear()
    return found


# ---- over sharded dimensions -----------------------------------------------------------------------------------------


def _softmax_across(shards: Shards, log: bool, dim: int, scale: float | None, dtype: torch.dtype | None) -> Tensor:
    """Softmax over a sharded dimension: the ranks exchange the maximum and the sum of each row.

    torch's composition would gather the rows. The backward exchanges one number for each row.
    """
    x, mask = shards.tensors
    given = result_dtype(x, mask, dtype)
    x = reference.scores(x, scale, mask)
    x = x.to(torch.promote_types(given, torch.float32))
    groups = shards.groups(dim)
    least = float("-inf")
    top = x.detach().amax(dim, keepdim=True) if x.shape[dim] else x.new_full(_reduced(x, dim), least).detach()
    top = dtensor.reduce(top, groups, maximum=True)
    z = x - top
    e = z.exp()
    total: Tensor = dtensor.Sum.apply(e.sum(dim, keepdim=True), groups)
    return (z - total.log() if log else e / total).to(given)


def _reduced(x: Tensor, *dims: int) -> list[int]:
    return [1 if d in dims else size for d, size in enumerate(x.shape)]


def _norm_across(
    shards: Shards, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, dims: int, eps: float | None,
    kind: str,
) -> Tensor:  # fmt: skip
    """A norm over sharded dimensions: the ranks exchange a sum of squares for each row, and for a layer_norm the sum.

    The mean comes first: a variance from the sum of squares alone would cancel where the mean is large.
    """
    own = tuple(range(x.dim() - dims, x.dim()))
    groups, count = shards.groups(*own), math.prod(shards.plan.shape[x.dim() - dims :])
    dtype = x.dtype
    if kind in ("layer_norm", "torch"):
        dtype = reference.norm_dtype("rms_norm" if kind == "torch" else kind, x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "layer_norm":
        wide = wide - dtensor.Sum.apply(wide.sum(own, keepdim=True), groups) / count
    if eps is None:
        eps = torch.finfo(wide.dtype).eps
    normalized = wide * torch.rsqrt(dtensor.Sum.apply(wide.square().sum(own, keepdim=True), groups) / count + eps)
    if kind == "llama":
        normalized = normalized.to(x.dtype)
        return normalized if weight is None else weight * normalized
    if kind == "gemma":
        return (normalized if weight is None else normalized * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    if weight is not None:
        normalized = normalized * weight
    return (normalized if bias is None else normalized + bias).to(dtype)


def _add_norm_across(
    shards: Shards, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None = None, *, dims: int,
    eps: float | None, kind: str, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    s = x if y is None else x + y
    normalized = _norm_across(shards, s, weight, bias, dims=dims, eps=eps, kind=kind)
    return normalized if dtype is None else normalized.to(dtype), s


# ---- the rules -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        op: what computes a shard. Its arguments are those of the reference.
        operands: the arguments that are tensors, by position, and how their dimensions correspond to the result's.
        whole: the dimensions of the result that the op needs whole, from the arguments.
        across: what computes a shard where one of these is sharded, from the shards and the arguments; None where
            nothing does.
        problem: why a call has no rule, from the arguments; None where it has.
        torch_suffices: whether no kernel gains, from the arguments. torch's composition is one operation then, which
            DTensors call in less time than it takes to take shards out and to put results back.
    """

    op: Callable[..., Any]
    operands: Mapping[int, Alignment]
    whole: Callable[..., Iterable[int]] = lambda *args: ()
    across: Callable[..., Any] | None = None
    problem: Callable[..., str | None] = lambda *args: None
    torch_suffices: Callable[..., bool] = lambda *args: False

    def __call__(self, *args: Any) -> Any:
        """The results of a call, as DTensors; None where torch's composition is as good.

        Raises:
            NoRuleError: torch's composition has to be called.
        """
        problem = self.problem(*args)
        if problem is not None:
            raise NoRuleError(problem)
        operands = {i: align for i, align in self.operands.items() if not isinstance(args[i], float | int)}
        tensors, alignments, whole = [args[i] for i in operands], [*operands.values()], frozenset(self.whole(*args))
        if self.across is not None and is_divided(args[0], whole):
            shards = Shards(tensors, alignments, fill=False)
            found = self.across(shards, *args)
        elif backends.get_backend() is None and self.torch_suffices(*args):
            return None
        else:
            shards = Shards(tensors, alignments, whole)
            own = list(args)
            for i, t in zip(operands, shards.tensors, strict=True):
                own[i] = t
            found = self.op(*own)
        return tuple(map(shards.wrap, found)) if isinstance(found, tuple) else shards.wrap(found)


def _last(x: Tensor, shape: Sequence[int]) -> range:
    return range(x.dim() - len(shape), x.dim())


def _one(x: Tensor, dim: int) -> tuple[int, ...]:
    return (dim % x.dim(),) if -x.dim() <= dim < x.dim() else ()


def _is_small(x: DTensor) -> bool:
    """By what all ranks see."""
    return bool(x.numel() < GPU_LEAST * x.device_mesh.size())


def _is_small_softmax(x: DTensor, dim: int, scale: float | None, mask: DTensor | None, *dtype: Any) -> bool:
    return scale is None and mask is None and _is_small(x)


def _is_small_product(x: DTensor, y: DTensor | float) -> bool:
    """The kernel gains by the one pass for both gradients."""
    return _is_small(x) or not (torch.is_grad_enabled() and x.requires_grad and getattr(y, "requires_grad", False))


def _all_but_samples(x: Tensor, *args: Any) -> range:
    return range(1, x.dim())


def _gated_linear(gate: DTensor, up: DTensor, weight: DTensor, bias: DTensor | None, act: str | None) -> DTensor:
    """Rows and the features of the result may be sharded. A product over sharded features is torch's."""
    if is_divided(gate, (gate.dim() - 1,)):
        return F.linear(gated(gate, up, act), weight, bias)
    found: DTensor = _GATED_LINEAR(gate, up, weight, bias, act)
    return found


_GATED_LINEAR = Rule(gated_linear, {0: rows, 1: rows, 2: by_class, 3: by_class})


def _rotary(q: DTensor, k: DTensor | None, cos: DTensor, sin: DTensor, *options: Any) -> tuple[DTensor, DTensor | None]:
    """q and k may differ in their number of heads, and so in their shards."""
    last = q.dim() - 1
    of_q = Shards((q, cos, sin), (broadcast,) * 3, (last,))
    if of_q.plan.shape != q.shape:
        raise NoRuleError("the tables are larger than q")
    if k is None:
        return of_q.wrap(_rotated(of_q, options)), None
    of_k = Shards((k, cos, sin), (broadcast,) * 3, (last,))
    if of_k.plan.shape != k.shape:
        raise NoRuleError("the tables are larger than k")
    if of_q.plan.placements == of_k.plan.placements and of_q.filled == of_k.filled:  # as in most models
        turned_q, turned_k = rotary(of_q.tensors[0], of_k.tensors[0], *of_q.tensors[1:], *options)
        assert turned_k is not None
        return of_q.wrap(turned_q), of_k.wrap(turned_k)
    return of_q.wrap(_rotated(of_q, options)), of_k.wrap(_rotated(of_k, options))


def _rotated(shards: Shards, options: Sequence[Any]) -> Tensor:
    x, cos, sin = shards.tensors
    return rotary(x, None, cos, sin, *options)[0]


def _dropout_add(x: DTensor, other: DTensor, p: float, training: bool) -> DTensor:
    """Each shard has a mask of its own, and ranks with the same shard have the same one: all draw one seed from their
    generators, which DTensors need in the same state, and add the number of the shard."""
    shards = Shards((x, other), (broadcast, broadcast))
    own, own_other = shards.tensors
    if not (training and 0.0 < p < 1.0):
        return shards.wrap(residual.dropout_add(own, own_other, p, training))
    kernels = residual.FAMILY.kernels_for(own)
    if kernels is None or x.shape != other.shape or residual.unsupported(own, own_other):
        raise NoRuleError("no kernel adds these shards, and torch's dropout has random numbers for DTensors of its own")
    return shards.wrap(residual.dropout_add_of_shard(kernels, own, own_other, p, shards.index()))


def _scale_add(x: DTensor, gamma: DTensor | None, other: DTensor, drop_path: float, training: bool) -> DTensor:
    """All ranks draw which samples of the whole batch are dropped."""
    if not (training and drop_path > 0.0 and x.dim() > 0):
        return _SCALE_ADD(x, gamma, other, drop_path, training)
    drawn, scale = residual.draw_samples(x.to_local(), drop_path, x.shape[0])
    keep = type(x).from_local(drawn, x.device_mesh)
    shards = Shards((x, gamma, other, keep), (broadcast, broadcast, broadcast, samples))
    own, own_gamma, own_other, kept = shards.tensors
    return shards.wrap(residual.scale_add_of_kept(own, own_gamma, own_other, kept, scale))


def _batch_norm(
    x: DTensor, running_mean: DTensor | None, running_var: DTensor | None, weight: DTensor | None,
    bias: DTensor | None, training: bool, momentum: float, eps: float, other: DTensor | None, act: str | None,
) -> DTensor:  # fmt: skip
    """In training the statistics are those of all ranks, which a synchronised norm exchanges."""
    if x.dim() < 2:
        raise NoRuleError(f"x has {x.dim()} dimensions; expected samples and channels")
    alignments = (broadcast, channels, channels, channels, channels, broadcast)
    shards = Shards((x, running_mean, running_var, weight, bias, other), alignments, fill=not training)
    own, mean, var, own_weight, own_bias, own_other = shards.tensors
    groups = shards.groups(*(d for d in range(x.dim()) if d != 1)) if training else []
    if len(groups) > 1:
        raise NoRuleError("the statistics are over several dimensions of the mesh; expected one")
    if training and own.shape[1] == 0:  # No channels, as on all ranks of the group. The sums are for autograd.
        found = sum((t.sum() for t in (own_weight, own_bias, own_other) if t is not None), own)
    elif groups:
        group: str = groups[0].group_name
        found = sync_batch_norm(own, mean, var, own_weight, own_bias, momentum, eps, own_other, act, group)
    else:
        found = batch_norm(own, mean, var, own_weight, own_bias, training, momentum, eps, own_other, act, None)
    return shards.wrap(found)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _averaged(shards: Shards, mean: Tensor, share: Tensor | float) -> DTensor:
    """The mean over all ranks, of which this one has the mean of its part, and the share of that part.

    A sum of 16-bit losses could overflow where their mean does not.
    """
    wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
    nothing = share == 0 if isinstance(share, Tensor) else wide.new_full((), share == 0, dtype=torch.bool)
    # The mean of nothing is NaN, and does not count. Where all ranks have nothing the share is NaN.
    wide = torch.where(nothing, 0.0, wide) * share
    return _summed(shards.wrap_part(wide.to(mean.dtype)))


def _summed(t: DTensor) -> DTensor:
    """What torch makes of a mean: all ranks have it."""
    return t.redistribute(placements=dtensor.of_gradient(t.placements))


def _placed_target(target: Tensor, x: DTensor, dim: int) -> Tensor:
    """A target as a DTensor. Of logits that are sharded by class alone a plain one is that of all ranks, as in torch's
    ``loss_parallel``."""
    if type(target) not in dispatch.PLAIN or any(p.is_shard() and p.dim != dim for p in x.placements):
        return target
    placed: Tensor = type(x).from_local(target, x.device_mesh)
    return placed


def _cross_entropy(
    x: DTensor, target: Tensor, weight: DTensor | None, ignore_index: int, reduction: int, *options: Any
) -> DTensor:
    """Each rank has the loss of its rows. The mean needs their number, or the weight of their classes."""
    dim = 0 if x.dim() == 1 else 1
    if is_divided(x, (dim,)):
        return _cross_entropy_across(x, target, weight, ignore_index, reduction, dim, *options)
    classes = not target.is_floating_point()
    shards = Shards(
        (x, target, weight),
        (broadcast, positions if classes else broadcast, broadcast if x.dim() == 1 else channels),
        (dim,),
        fill=reduction == NONE,
    )
    own, own_target, own_weight = shards.tensors

    def loss() -> Tensor:
        if own.numel() == 0:
            return reference.cross_entropy(own, own_target, own_weight, ignore_index, reduction, *options)
        smoothing, softcap, z_loss = options
        name = reference.REDUCTIONS[reduction]
        return cross_entropy(
            own, own_target, own_weight, ignore_index, name, smoothing, softcap or None, z_loss, inplace=False
        )

    if reduction == NONE:
        return shards.wrap(loss(), without=dim)
    groups = shards.groups(*range(x.dim()))
    if reduction == SUM or not groups:
        return shards.wrap_part(loss())
    if not classes:
        return _averaged(shards, loss(), own.numel() / max(x.numel(), 1))
    return _averaged(shards, loss(), _share(own_target, own_weight, ignore_index, groups))


def _share(target: Tensor, weight: Tensor | None, ignore_index: int, groups: Sequence[Any]) -> Tensor:
    """The share that the rows of this rank have in a mean over all ranks."""
    kept = target != ignore_index
    if weight is None:
        count = kept.sum().double()
    else:
        count = torch.where(kept, weight.detach().double()[torch.where(kept, target, 0)], 0.0).sum()
    return count / dtensor.reduce(count, groups)


def _cross_entropy_across(
    x: DTensor, target: Tensor, weight: DTensor | None, ignore_index: int, reduction: int, dim: int, smoothing: float,
    softcap: float, z_loss: float,
) -> DTensor:  # fmt: skip
    """Of logits sharded by class: two all-reduces of some numbers a row, as in :mod:`fastlayers.ops.vocab_parallel`."""
    if weight is not None or target.dtype != torch.int64 or not 0.0 <= smoothing <= 1.0:
        raise NoRuleError("the classes are sharded; expected a target of int64 and no weights of classes")
    shards = Shards((x, _placed_target(target, x, dim)), (broadcast, positions), fill=False)
    groups = shards.groups(dim)
    if len(groups) != 1:
        raise NoRuleError(
            f"classes are sharded over {len(groups)} dimensions of the mesh with several ranks; expected one"
        )
    own, own_target = shards.tensors
    start = shards.start(dim)
    options = vocab_parallel.Options(groups[0], start, ignore_index, smoothing, softcap, z_loss)
    losses: Tensor = vocab_parallel.losses_of_rows(own if x.dim() < 3 else own.movedim(1, -1), own_target, options)
    out = reference.loss_dtype(own)
    if reduction == NONE:
        return shards.wrap(losses.view(own_target.shape).to(out), without=dim)
    total = losses.sum()
    if reduction == SUM:
        return shards.wrap_part(total.to(out), dim)
    count = dtensor.reduce((own_target != ignore_index).sum(), shards.groups(*(d for d in range(x.dim()) if d != dim)))
    return _summed(shards.wrap_part((total / count).to(out), dim))


def _linear_cross_entropy(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor, weight: DTensor | None,
    ignore_index: int, reduction: int, smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low_rank: Any, *loss_of: Any,
) -> DTensor:  # fmt: skip
    """Rows may be sharded, and classes: then the gradient of the input is Partial."""
    if linear_weight.dim() != 2 or input.dim() == 0 or target.shape != input.shape[:-1] or low_rank is not None:
        raise NoRuleError("expected an input (..., H), a weight (V, H), a class for each row and no adapter")
    given = (input, linear_weight, linear_bias, target, weight)
    shards = Shards(given, (rows, by_class, by_class, rows, by_class), fill=False)
    last = input.dim() - 1
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
    return _averaged(shards, loss, _share(own_target, own_classes, ignore_index, groups))


def _linear_cross_entropy_across(
    shards: Shards, ignore_index: int, reduction: int, smoothing: float, softcap: float, z_loss: float,
    logit_scale: float,
) -> DTensor:  # fmt: skip
    """By a weight whose classes are sharded, as ColwiseParallel does it."""
    own, own_weight, own_bias, own_target, own_classes = shards.tensors
    last = len(shards.plan.shape) - 1
    groups, low = shards.groups(last), head.autocast_dtype(own)
    compute = head.cast(own.dtype, low)
    problem = head.unsupported(own, own_weight, own_bias, own_target, None, head.Rest(compute, low, logit_scale, None))
    if own_classes is not None or not 0.0 <= smoothing <= 1.0:
        problem = "the classes are sharded; expected no weights of classes, and a label_smoothing from 0 to 1"
    elif (of_classes := _problem_of_classes(shards, last)) is not None:
        problem = of_classes
    elif compute is torch.float16:
        problem = "the products are in float16; expected bfloat16 or float32, for gradients of logits that are small"
    if problem is not None and (own.numel() or len(groups) != 1):
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
    return part if reduction == SUM else _summed(part)


def _problem_of_classes(shards: Shards, dim: int) -> str | None:
    """Why classes along a sharded dimension have no rule, None where they have one."""
    if len(shards.groups(dim)) != 1:
        return "the classes are sharded; expected one dimension of the mesh for them"
    if shards.least(dim) == 0:
        return f"{shards.plan.shape[dim]} classes leave a rank without any"
    return None


# ---- other functions of a head ---------------------------------------------------------------------------------------


def _head_shards(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor | None, low_rank: Any
) -> Shards:
    """Rows may be sharded, and classes."""
    if input.dim() == 0 or linear_weight.dim() != 2 or 0 in linear_weight.shape or low_rank is not None:
        raise NoRuleError("expected an input (..., H), a weight (V, H) and no adapter")
    if target is not None and target.shape != input.shape[:-1]:
        raise NoRuleError(f"expected a class for each row of {tuple(input.shape)}, but got {tuple(target.shape)}")
    shards = Shards((input, linear_weight, linear_bias, target), (rows, by_class, by_class, rows), fill=False)
    last = input.dim() - 1
    problem = _problem_of_classes(shards, last) if shards.groups(last) else None
    if problem is not None:
        raise NoRuleError(problem)
    return shards


def _linear_log_prob(
    input: DTensor, linear_weight: DTensor, linear_bias: DTensor | None, target: DTensor, ignore_index: int,
    softcap: float, logit_scale: float, low_rank: Any,
) -> tuple[DTensor, DTensor]:  # fmt: skip
    last, shards = input.dim() - 1, _head_shards(input, linear_weight, linear_bias, target, low_rank)
    own, own_weight, own_bias, own_target = shards.tensors
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
    own, own_weight, own_bias, target = shards.tensors
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
    if dispatch.wants_gradient(input, linear_weight, linear_bias):
        raise NoRuleError("autograd is to record it; its gradient takes the whole logits")
    last, shards = input.dim() - 1, _head_shards(input, linear_weight, linear_bias, None, low_rank)
    own, own_weight, own_bias, _ = shards.tensors
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


def _kl_div(x: DTensor, target: DTensor, reduction: str, log_target: bool) -> DTensor:
    shards = Shards((x, target), (broadcast, broadcast), fill=reduction == "none")
    if x.shape != target.shape:
        raise NoRuleError(f"input and target have shapes {tuple(x.shape)} and {tuple(target.shape)}; expected one")
    own, own_target = shards.tensors
    if own.numel() == 0:
        found = reference.kl_div(own, own_target, reduction, log_target)
    else:
        found = kl_div(own, own_target, None, None, reduction, log_target)
    if reduction == "none":
        return shards.wrap(found)
    if reduction == "sum" or not shards.groups(*range(x.dim())):
        return shards.wrap_part(found)
    if reduction == "mean":
        return _averaged(shards, found, own.numel() / max(x.numel(), 1))
    return _averaged(shards, found, own.shape[0] / max(x.shape[0], 1) if own.numel() else 0.0)


def _divergence(
    student: DTensor, teacher: DTensor, labels: DTensor | None, ignore_index: int, beta: float, temperature: float,
    square: bool, reduction: str,
) -> DTensor:  # fmt: skip
    last = student.dim() - 1
    shards = Shards((student, teacher, labels), (broadcast, broadcast, rows), (last,), fill=reduction == "none")
    own, own_teacher, own_labels = shards.tensors
    function = divergence if own.numel() else reference.divergence
    found = function(own, own_teacher, own_labels, ignore_index, beta, temperature, square, reduction)
    if reduction == "none":
        return shards.wrap(found, without=last)
    groups = shards.groups(*range(last))
    if reduction == "sum" or not groups:
        return shards.wrap_part(found)
    if labels is None:
        return _averaged(shards, found, own.numel() / max(student.numel(), 1))
    return _averaged(shards, found, _share(own_labels, None, ignore_index, groups))


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
    given = (input, linear_weight, linear_bias, target_input, target_weight, target_bias, target)
    shards = Shards(given, (rows, by_class, by_class, *of_teacher, rows), fill=False)
    if shards.groups(last):
        problem = _problem_of_classes(shards, last)
        if loss.kind not in ("kl", "reverse_kl") and not (loss.kind == "js" and loss.beta in (0.0, 1.0)):
            problem = f"the classes are sharded; expected a divergence of kl or reverse_kl, but got {loss.kind}"
        elif dispatch.wants_gradient(target_input, target_weight, target_bias):
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
        return _averaged(shards, found, own.numel() / max(input.numel(), 1))
    return _averaged(shards, found, _share(own_labels, None, loss.ignore_index, groups))


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
    return _summed(shards.wrap_part((total / count).to(out), last))


_SCALE_ADD = Rule(residual.scale_add, {0: broadcast, 1: broadcast, 2: broadcast})

#: By channels_last.
_RESPONSE_NORMS = {
    last: Rule(global_response_norm, {0: broadcast, 1: align, 2: align}, _all_but_samples)
    for last, align in ((False, channels), (True, broadcast))
}
_NORM_OPERANDS = {0: broadcast, 2: broadcast, 3: broadcast}

#: By what an op hands to :func:`dispatch.call_reference`, or by the op itself.
RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    reference.softmax: Rule(
        lambda x, dim, scale, mask, dtype: softmax(x, dim, scale, mask, dtype, False),
        {0: broadcast, 3: broadcast},
        lambda x, dim, *options: _one(x, dim),
        lambda shards, x, dim, scale, mask, dtype: _softmax_across(shards, False, dim % x.dim(), scale, dtype),
        torch_suffices=_is_small_softmax,
    ),
    reference.log_softmax: Rule(
        lambda x, dim, scale, mask, dtype: softmax(x, dim, scale, mask, dtype, True),
        {0: broadcast, 3: broadcast},
        lambda x, dim, *options: _one(x, dim),
        lambda shards, x, dim, scale, mask, dtype: _softmax_across(shards, True, dim % x.dim(), scale, dtype),
        torch_suffices=_is_small_softmax,
    ),
    reference.relu_add: Rule(relu_add, {0: broadcast, 1: broadcast, 2: broadcast}),
    reference.add_relu: Rule(add_relu, {0: broadcast, 1: broadcast}),
    reference.mul: Rule(mul, {0: broadcast, 1: broadcast}, torch_suffices=_is_small_product),
    reference.bias_act: Rule(
        lambda x, bias, act, given: bias_act(x, bias, act, dict(zip(activation(act).parameters, given, strict=True))),
        {0: broadcast, 1: broadcast},
        torch_suffices=lambda x, bias, act, given: bias is None and act not in FASTER_BARE,
    ),
    reference.gated: Rule(gated, {0: broadcast, 1: broadcast}),
    reference.glu: Rule(glu, {0: broadcast}, lambda x, dim, *options: _one(x, dim)),
    reference.layer_norm: Rule(
        layer_norm,
        _NORM_OPERANDS,
        lambda x, shape, *options: _last(x, shape),
        lambda shards, x, shape, weight, bias, eps: _norm_across(
            shards, *shards.tensors, dims=len(shape), eps=eps, kind="layer_norm"
        ),
    ),
    reference.rms_norm: Rule(
        rms_norm,
        {0: broadcast, 2: broadcast},
        lambda x, shape, *options: _last(x, shape),
        lambda shards, x, shape, weight, eps, casting: _norm_across(
            shards, *shards.tensors, dims=len(shape), eps=eps, kind=casting
        ),
    ),
    reference.add_layer_norm: Rule(
        add_layer_norm,
        {0: broadcast, 1: broadcast, 3: broadcast, 4: broadcast},
        lambda x, y, shape, *options: _last(x, shape),
        lambda shards, x, y, shape, weight, bias, eps, dtype: _add_norm_across(
            shards, *shards.tensors, dims=len(shape), eps=eps, kind="layer_norm", dtype=dtype
        ),
    ),
    reference.add_rms_norm: Rule(
        add_rms_norm,
        {0: broadcast, 1: broadcast, 3: broadcast},
        lambda x, y, shape, *options: _last(x, shape),
        lambda shards, x, y, shape, weight, eps, casting, dtype: _add_norm_across(
            shards, *shards.tensors, dims=len(shape), eps=eps, kind=casting, dtype=dtype
        ),
    ),
    reference.ada_layer_norm: Rule(ada_layer_norm, _NORM_OPERANDS, lambda x, shape, *options: _last(x, shape)),
    reference.global_response_norm: lambda x, weight, bias, eps, channels_last: _RESPONSE_NORMS[channels_last](
        x, weight, bias, eps, channels_last
    ),
    reference.group_norm: Rule(group_norm, {0: broadcast, 2: channels, 3: channels}, _all_but_samples),
    reference.instance_norm: Rule(
        instance_norm,
        {0: broadcast, 3: channels, 4: channels},
        _all_but_samples,
        problem=lambda x, mean, var, *options: (
            None if mean is None and var is None else "running statistics are those of the whole batch"
        ),
    ),
    reference.batch_norm: _batch_norm,
    reference.max_pool2d: Rule(max_pool2d, {0: broadcast}, lambda x, *options: range(x.dim() - 2, x.dim())),
    reference.gated_linear: _gated_linear,
    reference.linear: reference.linear,  # torch's own products are sharded
    reference.rotary: _rotary,
    reference.dropout_add: _dropout_add,
    reference.scale_add: _scale_add,
    reference.cross_entropy: _cross_entropy,
    reference.linear_cross_entropy: _linear_cross_entropy,
    reference.linear_log_prob: _linear_log_prob,
    reference.linear_topk: _linear_topk,
    reference.linear_argmax: _linear_argmax,
    reference.linear_accuracy: _linear_accuracy,
    reference.kl_div: _kl_div,
    reference.divergence: _divergence,
    reference.linear_divergence: _linear_divergence,
}


def answer(function: Callable[..., Any], *args: Any) -> Any:
    """What a rule makes of a call whose first argument is a DTensor; None where torch's composition has to be called.

    Raises:
        BackendError: a kernel backend is forced, and no rule takes the call.
    """
    if backends.get_backend() in ("eager", "compile"):
        return None
    try:
        rule = RULES.get(function)
        if rule is None:
            raise NoRuleError("it has no rule for DTensors")
        if dispatch.must_decompose():
            raise NoRuleError("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        return rule(*args)
    except NoRuleError as error:
        reason = str(error)
    _fallbacks[function.__name__, reason] += 1
    backends.refuse(f"{function.__name__} of DTensors: {reason}")
    return None


dispatch.answer_sharded = answer
