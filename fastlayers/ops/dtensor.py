"""What a rank has of DTensors: its shards, how they correspond to each other, and DTensors made of results.

The rules are in :mod:`fastlayers.ops.sharding`. Communication is torch's. torch.distributed.tensor is imported by calls
on DTensors only.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fastlayers.ops import guard

#: Plans that are kept; there is one for each combination of shapes and placements.
KEPT = 4096

#: A DTensor. torch.distributed.tensor is not imported here: without it there are none.
DTensor: TypeAlias = Any
Placements: TypeAlias = tuple[Any, ...]
#: For each dimension of the result that of an operand, None where it has none.
Dims: TypeAlias = tuple["int | None", ...]
#: The dimensions of an operand, from their number and from that of the result.
Alignment: TypeAlias = Callable[[int, int], Dims]


class NoRuleError(Exception):
    """No rule takes this call; the message says what is given and what is expected."""


# ---- plans -----------------------------------------------------------------------------------------------------------


def broadcast(own: int, dims: int) -> Dims:
    """As torch broadcasts: the last dimensions are the same."""
    return (*[None] * (dims - own), *range(own))


def channels(own: int, dims: int) -> Dims:
    """A number for each channel, the second dimension."""
    return (None, 0, *[None] * (dims - 2))


def samples(own: int, dims: int) -> Dims:
    """A number for each sample, the first dimension."""
    return (0, *[None] * (dims - 1))


def rows(own: int, dims: int) -> Dims:
    """A number or a vector for each row: the same dimensions but for the last one."""
    return (*range(dims - 1), None)


def positions(own: int, dims: int) -> Dims:
    """The same dimensions but for that of the classes, which is the second one, or the only one."""
    return (None,) if dims == 1 else (0, None, *range(1, dims - 1))


def by_class(own: int, dims: int) -> Dims:
    """Rows of a weight, or a vector, for the last dimension of the result."""
    return (*[None] * (dims - 1), 0)


class Plan(NamedTuple):
    """What becomes of a call.

    Attributes:
        shape: the shape that the operands broadcast to.
        placements: how that is sharded, by dimension of the mesh.
        operands: how each operand is to be placed.
        gradients: how the gradients of the operands are placed.
        dims: the dimensions of each operand, by dimension of the result.
        even: whether all ranks have shards of one size.
    """

    shape: tuple[int, ...]
    placements: Placements
    operands: tuple[Placements, ...]
    gradients: tuple[Placements, ...]
    dims: tuple[Dims, ...]
    even: bool


def _correspond(shapes: Sequence[tuple[int, ...]], alignments: Sequence[Alignment]) -> tuple[list[int], list[Dims]]:
    """The shape that the operands broadcast to, and the dimensions of each.

    Raises:
        NoRuleError: they do not broadcast. torch's composition then says so.
    """
    dims = max(len(s) for i, s in enumerate(shapes) if i == 0 or alignments[i] is broadcast)
    owns = [align(len(s), dims) for s, align in zip(shapes, alignments, strict=True)]
    sizes = [1] * dims
    for s, own, align in zip(shapes, owns, alignments, strict=True):
        mapped = [k for k in own if k is not None]
        inner = align in (rows, by_class)  # they may have dimensions that the result does not have
        if len(own) != dims or (max(mapped, default=-1) >= len(s) if inner else mapped != [*range(len(s))]):
            raise NoRuleError(f"an operand of shape {tuple(s)} does not go with {dims} dimensions")
        for d, k in enumerate(own):
            if k is not None and s[k] != 1:
                if sizes[d] not in (1, s[k]):
                    raise NoRuleError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast")
                sizes[d] = s[k]
    return sizes, owns


def is_divided(x: DTensor, dims: Collection[int]) -> bool:
    """Whether one of these dimensions is sharded over several ranks."""
    return any(p.is_shard() and p.dim in dims and n > 1 for p, n in zip(x.placements, x.device_mesh.shape, strict=True))


@lru_cache(KEPT)
def plan(
    layouts: tuple[tuple[tuple[int, ...], Placements], ...], alignments: tuple[Alignment, ...], whole: frozenset[int],
    mesh: tuple[int, ...],
) -> Plan | str:  # fmt: skip
    """The plan of a call, or why there is none.

    Args:
        layouts: shape and placements of each operand.
        alignments: how the dimensions of each correspond to those of the result.
        whole: dimensions of the result that the op needs whole.
        mesh: the shape of the mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    try:
        sizes, owns = _correspond([shape for shape, _ in layouts], alignments)
    except NoRuleError as error:
        return str(error)
    result: list[Any] = []
    operands, gradients = ([list(placements) for _, placements in layouts] for _ in range(2))
    left, even = list(sizes), True
    for i, ranks in enumerate(mesh):
        sharded = None
        for (shape, placements), own in zip(layouts, owns, strict=True):
            placement = placements[i]
            if type(placement) is Replicate:
                continue
            if type(placement) is not Shard:
                return f"an operand is {placement!r}; expected Shard or Replicate"
            if placement.dim not in own:
                return f"an operand of shape {tuple(shape)} is {placement!r}; expected Replicate"
            d = own.index(placement.dim)
            if sharded not in (None, d):
                return (
                    f"operands are sharded along dimensions {sharded} and {d} of {tuple(sizes)}; expected one of them"
                )
            sharded = d
        if sharded is None:
            result.append(Replicate())
            continue
        if sharded in whole and ranks > 1:
            return f"dimension {sharded} of {tuple(sizes)} is sharded; expected it on each rank as a whole"
        result.append(Shard(sharded))
        even &= left[sharded] % ranks == 0
        left[sharded] //= ranks
        for t, ((shape, placements), own) in enumerate(zip(layouts, owns, strict=True)):
            k = own[sharded]
            if k is None or shape[k] != sizes[sharded]:
                if type(placements[i]) is Shard:
                    return f"an operand of shape {tuple(shape)} is sharded along dimension {k}, which is broadcast"
                gradients[t][i] = Partial()
            elif type(placements[i]) is Replicate:
                if Shard(k) in placements[i + 1 :]:
                    return f"operands are sharded along dimension {sharded} in different orders of the mesh"
                operands[t][i] = gradients[t][i] = Shard(k)
    sharded_operands, sharded_gradients = (tuple(map(tuple, every)) for every in (operands, gradients))
    return Plan(tuple(sizes), tuple(result), sharded_operands, sharded_gradients, tuple(owns), even)


# ---- between DTensors and shards -------------------------------------------------------------------------------------
# What ``to_local`` and ``from_local`` do, for all operands of a call in one node of autograd, and with the description
# of a DTensor made once for all calls that are alike: that costs torch as much as five small operations.


@lru_cache(KEPT)
def _spec(
    kind: Any, mesh: Any, mesh_id: int, placements: Placements, shape: tuple[int, ...], strides: tuple[int, ...],
    own: tuple[int, ...], dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The description that torch makes of a DTensor. Meshes of process groups that ended are equal to later ones."""
    local = torch.empty(own, dtype=dtype, device="meta")
    if not shape:  # which from_local would take for a missing one
        return kind.from_local(local, mesh, placements)._spec
    return kind.from_local(local, mesh, placements, shape=torch.Size(shape), stride=strides)._spec


def _described(local: Tensor, kind: Any, mesh: Any, placements: Placements, shape: tuple[int, ...]) -> DTensor:
    """A DTensor without a graph."""
    strides = _dense_strides(local, shape)
    spec = _spec(kind, mesh, id(mesh), placements, shape, strides, local.shape, local.dtype)
    return kind(local, copy.copy(spec), requires_grad=False)


def _own(t: DTensor) -> Tensor:
    """The shard of this rank, once an asynchronous collective that makes it has ended."""
    local = t.to_local()
    if type(local) not in guard.PLAIN and type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    found: Tensor = local
    return found


class _ToLocal(torch.autograd.Function):
    """The shards of DTensors."""

    @staticmethod
    def forward(ctx: Any, found: Plan, *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.shapes = found, [tuple(t.shape) for t in tensors]
        ctx.kind, ctx.mesh = type(tensors[0]), tensors[0].device_mesh
        ctx.set_materialize_grads(False)
        shards = tuple(_own(t).detach() for t in tensors)
        ctx.mark_non_differentiable(*(s for s, t in zip(shards, tensors, strict=True) if not t.requires_grad))
        return shards

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        recorded = torch.is_grad_enabled()
        found: list[DTensor | None] = []
        for g, shape, placements in zip(gradients, ctx.shapes, ctx.plan.gradients, strict=True):
            if g is None:
                found.append(None)
                continue
            if recorded and not (ctx.plan.even or g.requires_grad):
                # Of uneven shards some may be computed by a kernel and some by torch's composition, and one of these
                # may record where the other does not. Ranks with different graphs would wait for each other.
                g = g.detach().requires_grad_()
            convert = _FromLocal.apply if recorded and g.requires_grad else _described
            found.append(convert(g, ctx.kind, ctx.mesh, placements, shape))
        return None, *found


class _FromLocal(torch.autograd.Function):
    """The DTensor of which this rank has a shard."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, *rest: Any) -> DTensor:
        kind, mesh, placements, shape = rest
        ctx.placements = of_gradient(placements)
        ctx.set_materialize_grads(False)
        return _described(local.detach(), kind, mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        local = gradient.to_local() if torch.is_grad_enabled() else _own(gradient)
        return local, None, None, None, None


def handlers() -> list[dict[Any, Any]]:
    """The operations that DTensors compute otherwise than torch's rules say, which ``loss_parallel`` changes."""
    module = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    found = getattr(dispatcher, "_custom_op_handlers", None)
    return [found] if isinstance(found, dict) else []


def shard_of(t: Tensor) -> Tensor:
    """What this rank has of a tensor, without a graph: all of a plain one."""
    if not guard.is_dtensor(t):
        return t
    with torch.no_grad():
        return _own(t)


def memory_of(t: Tensor) -> Tensor:
    """:func:`shard_of` for a parameter or a buffer, to be looked at only: 20 times as fast, and no tensor is made."""
    return t._local_tensor if guard.is_dtensor(t) else t  # type: ignore[attr-defined,no-any-return]


def differentiable_shard_of(t: Tensor) -> Tensor:
    """What this rank has of a tensor, whose gradient is placed as that of a result is: all of a plain one."""
    if not guard.is_dtensor(t):
        return t
    found: Tensor = t.to_local(grad_placements=of_gradient(t.placements))  # type: ignore[attr-defined]
    return found


class Whole(NamedTuple):
    """What a DTensor is, apart from the shard of this rank."""

    kind: Any
    mesh: Any
    placements: Placements
    shape: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> Whole | None:
        """None of a plain tensor."""
        return cls(type(t), t.device_mesh, t.placements, tuple(t.shape)) if guard.is_dtensor(t) else None  # type: ignore

    def of_shard(self, local: Tensor) -> DTensor:
        """The DTensor of which this rank has the shard."""
        return (_FromLocal.apply if local.requires_grad else _described)(local, *self)


def _dense_strides(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape, in the order of dimensions that ``local`` has in memory."""
    order = range(len(shape))
    if not local.is_contiguous():
        strides = local.stride()
        order = sorted(order, key=lambda d: -strides[d])  # type: ignore[assignment]
    found, step = [1] * len(shape), 1
    for d in reversed(order):
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)


def _row(t: Tensor, dim: int) -> Tensor:
    """One index of ``dim`` for a tensor without any, with values of which no norm or softmax is NaN."""
    shape = [1 if d == dim else size for d, size in enumerate(t.shape)]
    if not t.is_floating_point():
        return t.new_ones(shape) if t.dtype == torch.bool else t.new_zeros(shape)
    values = (torch.arange(math.prod(shape), device=t.device) % 7 + 1).to(t.dtype).view(shape)
    return values + t.sum(dim, keepdim=True)  # 0, for autograd


# ---- shards of a call ------------------------------------------------------------------------------------------------


class Shards:
    """What this rank has of the operands of a call, and what makes DTensors of its results.

    Args:
        tensors: the operands; the first one is a DTensor. None where one is missing.
        alignments: how their dimensions correspond to those of the result.
        whole: dimensions of the result that the op needs whole.
        fill: whether a rank without any rows computes one.

    Raises:
        NoRuleError: the op cannot be computed shard by shard.
    """

    def __init__(
        self, tensors: Sequence[Any], alignments: Sequence[Alignment], whole: Iterable[int] = (), fill: bool = True
    ) -> None:
        first = tensors[0]
        kind, mesh = type(first), first.device_mesh
        given, aligned = [], []
        for t, alignment in zip(tensors, alignments, strict=True):
            if t is None:
                continue
            if type(t) is not kind:
                raise NoRuleError(f"an operand is a {type(t).__name__} beside a {kind.__name__}")
            if t.device_mesh is not mesh and t.device_mesh != mesh:
                raise NoRuleError(f"operands are on the meshes {mesh} and {t.device_mesh}")
            given.append(t)
            aligned.append(alignment)
        if mesh.get_coordinate() is None:
            raise NoRuleError("this rank is not in the mesh")
        found = plan(tuple([(t.shape, t.placements) for t in given]), tuple(aligned), frozenset(whole), mesh.shape)
        if isinstance(found, str):
            raise NoRuleError(found)
        self.kind, self.mesh, self.plan = kind, mesh, found
        given = [
            t if t.placements == placements else t.redistribute(placements=placements)
            for t, placements in zip(given, found.operands, strict=True)
        ]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            own = list(_ToLocal.apply(found, *given))
        else:
            with torch.no_grad():
                own = [_own(t) for t in given]
        self.filled: list[int] = []
        if fill and not found.even:
            own = self._fill(own)
        remaining = iter(own)
        self.tensors: list[Any] = [None if t is None else next(remaining) for t in tensors]

    def _fill(self, tensors: list[Tensor]) -> list[Tensor]:
        """Give a rank without rows, as happens where they are fewer than the ranks, one that nobody sees.

        No kernel takes a tensor without elements. By the composition this rank would have another graph than others.
        """
        for tensor, dims in zip(tensors, self.plan.dims, strict=True):
            self.filled += [
                d for d, k in enumerate(dims) if k is not None and tensor.shape[k] == 0 != self.plan.shape[d]
            ]
        for i, dims in enumerate(self.plan.dims):
            for d in {*self.filled}:
                k = dims[d]
                if k is not None and tensors[i].shape[k] == 0:
                    tensors[i] = _row(tensors[i], k)
        return tensors

    def wrap(self, local: Tensor, without: int | None = None) -> DTensor:
        """The DTensor of which this rank computed ``local``: the result.

        Args:
            without: a dimension that the result has lost by a reduction. Ranks that shared it have the same values.
        """
        for d in {*self.filled}:
            local = local.narrow(d if without is None or d < without else d - 1, 0, 0)
        if without is None:
            return self._from_local(local, self.plan.placements, self.plan.shape)
        return self._from_local(
            local,
            _reduced_placements(self.plan.placements, without),
            self.plan.shape[:without] + self.plan.shape[without + 1 :],
        )

    def wrap_part(self, local: Tensor, *dims: int) -> DTensor:
        """The DTensor of a sum over all dimensions, from that of this rank. Along ``dims`` it has summed all ranks'."""
        return self._from_local(local, _summed_placements(self.plan.placements, dims), ())

    def _from_local(self, local: Tensor, placements: Placements, sizes: Sequence[int]) -> DTensor:
        """``sizes`` are those along sharded dimensions."""
        shape = list(local.shape)
        for placement in placements:
            if placement.is_shard():
                shape[placement.dim] = sizes[placement.dim]
        if torch.is_grad_enabled() and local.requires_grad:
            return _FromLocal.apply(local, self.kind, self.mesh, placements, tuple(shape))
        return _described(local, self.kind, self.mesh, placements, tuple(shape))

    def mesh_dims(self, *dims: int) -> list[int]:
        """The dimensions of the mesh along which one of these dimensions of the result is sharded."""
        return [i for i, p in enumerate(self.plan.placements) if p.is_shard() and p.dim in dims]

    def groups(self, *dims: int) -> list[Any]:
        """The process groups among which these dimensions of the result are sharded."""
        return [self.mesh.get_group(i) for i in self.mesh_dims(*dims) if self.mesh.size(i) > 1]

    def start(self, dim: int) -> int:
        """The first index along ``dim``, which is sharded over one dimension of the mesh with several ranks."""
        (i,) = [i for i in self.mesh_dims(dim) if self.mesh.size(i) > 1]
        size = self.plan.shape[dim]
        return min(size, self.mesh.get_local_rank(i) * -(-size // self.mesh.size(i)))

    def least(self, dim: int) -> int:
        """What the last rank has of ``dim``, which is sharded over one dimension of the mesh with several ranks."""
        (i,) = [i for i in self.mesh_dims(dim) if self.mesh.size(i) > 1]
        size, ranks = self.plan.shape[dim], self.mesh.size(i)
        return max(0, size - (ranks - 1) * -(-size // ranks))

    def index(self) -> int:
        """The number of this shard among all of them. Ranks with the same shard have the same one."""
        found = 0
        for i, placement in enumerate(self.plan.placements):
            if placement.is_shard():
                found = found * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return found


@cache
def _reduced_placements(placements: Placements, dim: int) -> Placements:
    from torch.distributed.tensor import Replicate, Shard

    def place(p: Any) -> Any:
        if not p.is_shard() or p.dim < dim:
            return p
        return Replicate() if p.dim == dim else Shard(p.dim - 1)

    return tuple(map(place, placements))


@cache
def _summed_placements(placements: Placements, dims: tuple[int, ...]) -> Placements:
    from torch.distributed.tensor import Partial, Replicate

    return tuple(Partial() if p.is_shard() and p.dim not in dims else Replicate() for p in placements)


@cache
def of_gradient(placements: Placements) -> Placements:
    """How the gradient of a result is placed: each rank needs all of that of a sum."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if p.is_partial() else p for p in placements)


# ---- between ranks ---------------------------------------------------------------------------------------------------


class Sum(torch.autograd.Function):
    """The sum over the ranks of groups. Each rank uses it for a shard of its own: so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, groups: Sequence[Any]) -> Tensor:
        ctx.groups = groups
        return reduce(t, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(dy, ctx.groups), None


class Total(torch.autograd.Function):
    """The sum over the ranks of groups, as a result that all of them have: the gradient, too, is the same on each."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, groups: Sequence[Any]) -> Tensor:
        return reduce(t, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def reduce(t: Tensor, groups: Sequence[Any], maximum: bool = False) -> Tensor:
    """The sum of ``t`` over the ranks of groups, or the maximum. No autograd."""
    out = t.detach().clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(out, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group)
    return out


def gather(t: Tensor, group: Any) -> Tensor:
    """What the ranks of a group have, along a new first dimension. No autograd."""
    ranks = dist.get_world_size(group)
    found = t.new_empty(ranks * t.numel())
    dist.all_gather_into_tensor(found, t.detach().flatten(), group)
    return found.view(ranks, *t.shape)


# ---- means over ranks ------------------------------------------------------------------------------------------------


def averaged(shards: Shards, mean: Tensor, share: Tensor | float) -> DTensor:
    """The mean over all ranks, of which this one has the mean of its part, and the share of that part.

    A sum of 16-bit losses could overflow where their mean does not.
    """
    wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
    nothing = share == 0 if isinstance(share, Tensor) else wide.new_full((), share == 0, dtype=torch.bool)
    # The mean of nothing is NaN, and does not count. Where all ranks have nothing the share is NaN.
    wide = torch.where(nothing, 0.0, wide) * share
    return summed(shards.wrap_part(wide.to(mean.dtype)))


def summed(t: DTensor) -> DTensor:
    """What torch makes of a mean: all ranks have it."""
    return t.redistribute(placements=of_gradient(t.placements))


def share_of_rows(target: Tensor, weight: Tensor | None, ignore_index: int, groups: Sequence[Any]) -> Tensor:
    """The share that the rows of this rank have in a mean over all ranks."""
    kept = target != ignore_index
    if weight is None:
        count = kept.sum().double()
    else:
        count = torch.where(kept, weight.detach().double()[torch.where(kept, target, 0)], 0.0).sum()
    return count / reduce(count, groups)
