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

What the rules are made of is in :mod:`fastlayers.ops.dtensor`, those of a head in :mod:`fastlayers.ops.head_sharding`.
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
from fastlayers.ops import dtensor, guard, head_sharding, reference, residual, vocab_parallel
from fastlayers.ops.activations import activation
from fastlayers.ops.batch_norm import batch_norm
from fastlayers.ops.bias_act import FASTER_BARE, bias_act
from fastlayers.ops.cross_entropy import NONE, SUM, cross_entropy
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


def _placed_target(target: Tensor, x: DTensor, dim: int) -> Tensor:
    """A target as a DTensor. Of logits that are sharded by class alone a plain one is that of all ranks, as in torch's
    ``loss_parallel``."""
    if type(target) not in guard.PLAIN or any(p.is_shard() and p.dim != dim for p in x.placements):
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
        return dtensor.averaged(shards, loss(), own.numel() / max(x.numel(), 1))
    return dtensor.averaged(shards, loss(), dtensor.share_of_rows(own_target, own_weight, ignore_index, groups))


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
    return dtensor.summed(shards.wrap_part((total / count).to(out), dim))


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
        return dtensor.averaged(shards, found, own.numel() / max(x.numel(), 1))
    return dtensor.averaged(shards, found, own.shape[0] / max(x.shape[0], 1) if own.numel() else 0.0)


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
        return dtensor.averaged(shards, found, own.numel() / max(student.numel(), 1))
    return dtensor.averaged(shards, found, dtensor.share_of_rows(own_labels, None, ignore_index, groups))


_SCALE_ADD = Rule(residual.scale_add, {0: broadcast, 1: broadcast, 2: broadcast})

#: By channels_last.
_RESPONSE_NORMS = {
    last: Rule(global_response_norm, {0: broadcast, 1: align, 2: align}, _all_but_samples)
    for last, align in ((False, channels), (True, broadcast))
}
_NORM_OPERANDS = {0: broadcast, 2: broadcast, 3: broadcast}

#: By what an op hands to :func:`guard.call_reference`, or by the op itself.
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
    reference.kl_div: _kl_div,
    reference.divergence: _divergence,
    **head_sharding.RULES,
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
        if guard.must_decompose():
            raise NoRuleError("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        return rule(*args)
    except NoRuleError as error:
        reason = str(error)
    _fallbacks[function.__name__, reason] += 1
    backends.refuse(f"{function.__name__} of DTensors: {reason}")
    return None


guard.answer_sharded = answer
