"""rotary: the choice between kernel and reference, and autograd.

Under torch.compile it returns its reference, which Inductor fuses with its neighbours. Otherwise a call of any
size gets the kernel: torch launches ten kernels for this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode_temporarily

from fastlayers import backends
from fastlayers.ops import guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.layer_norm import rms_norm
from fastlayers.ops.pairs import Gradients, Needs

Sizes: TypeAlias = tuple[int, ...]
#: Shape, strides and dtype of a tensor.
Layout: TypeAlias = tuple[Sizes, Sizes, torch.dtype]


class Kernels(raw_ops.Kernels):
    @staticmethod
    def rotary(
        q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int, backward: bool,
        dtype: torch.dtype, head: int, q_strides: Sequence[int], k_strides: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k_shape = (0,) if k is None else k.shape
        return (
            torch.empty_strided(q.shape, q_strides, dtype=dtype, device=q.device),
            torch.empty_strided(k_shape, k_strides, dtype=dtype, device=q.device),
        )


FAMILY = raw_ops.Family("rotary", Kernels, cpu=True)

#: Dimensions that the kernels walk: two positions, the heads, and that which rotates.
MOST_DIMS = 4
#: Plans that are kept; there is one for each combination of layouts.
KEPT = 4096


@dataclass(frozen=True)
class Plan:
    """What a call needs to know beyond its tensors, or why no kernel takes it."""

    reason: str | None
    head: int = -1  # the dimension along which the tables repeat, and q and k may differ
    dtype: torch.dtype = torch.float32  # of the results
    q_strides: Sizes = ()  # of the results
    k_strides: Sizes = (1,)
    q_grad_strides: Sizes = ()
    k_grad_strides: Sizes = (1,)


def _layout(t: Tensor) -> Layout:
    return t.shape, t.stride(), t.dtype


def _repeats(table: Layout, dims: int) -> list[bool]:
    """For each dimension of q but the last whether all its indices have one entry of the table."""
    sizes, strides, _ = table
    new = [True] * (dims - 1 - len(sizes[:-1]))
    in_place = strides[-1] == 1  # others are copied, and then repeat in memory
    return new + [
        size == 1 or (stride == 0 and in_place) for size, stride in zip(sizes[:-1], strides[:-1], strict=True)
    ]


def _head(q: Layout, k: Layout | None, cos: Layout, sin: Layout) -> int | None:
    """The dimension of the heads, -1 where no dimension is one; None where the tables make that impossible."""
    sizes = q[0]
    repeated = [a and b for a, b in zip(_repeats(cos, len(sizes)), _repeats(sin, len(sizes)), strict=True)]
    if k is not None:
        different = [d for d in range(len(sizes) - 1) if sizes[d] != k[0][d]]
        if different:
            return different[0] if len(different) == 1 and repeated[different[0]] else None
    long = [d for d, is_repeated in enumerate(repeated) if is_repeated and sizes[d] > 1]
    head = long[-1] if long else -1
    positions = sum(size > 1 for d, size in enumerate(sizes[:-1]) if d != head)
    return head if positions <= MOST_DIMS - 2 else None


def _unsupported(
    q: Layout, k: Layout | None, cos: Layout, sin: Layout, rotary_dim: int, dtype: torch.dtype
) -> str | None:
    """Why no kernel takes these, None where one does."""
    given = q[2]
    if given not in guard.FLOATING or (k is not None and k[2] != given):
        return f"q and k are {given} and {None if k is None else k[2]}; kernels take one floating dtype"
    table = cos[2]
    narrow = given in reference.LOW_PRECISION and table == torch.float32
    if sin[2] != table or not (table == given or narrow):
        return f"cos and sin are {table} and {sin[2]}; kernels take {given}, or float32 with low precision"
    if dtype != given and not (narrow and dtype == torch.float32):
        return f"no kernel gives {dtype} for {given} and tables of {table}"
    sizes = q[0]
    if not 1 <= len(sizes) <= MOST_DIMS:
        return f"q has {len(sizes)} dimensions; kernels take up to {MOST_DIMS}"
    if rotary_dim % 2 or not 0 < rotary_dim <= sizes[-1]:
        return f"{rotary_dim} of {sizes[-1]} elements rotate; kernels take an even part"
    if sin[0][-1] != cos[0][-1] or 0 in sizes or (k is not None and 0 in k[0]):
        return f"nothing to rotate by {tuple(cos[0])} and {tuple(sin[0])} in q of {tuple(sizes)}"
    for x in (q, k):
        if x is None:
            continue
        if len(x[0]) != len(sizes) or x[0][-1] != sizes[-1]:
            return f"q and k have shapes {tuple(sizes)} and {tuple(x[0])}; kernels take one size of heads"
        if not all(layouts.broadcasts_to(table[0][:-1], x[0][:-1]) for table in (cos, sin)):  # type: ignore[arg-type]
            return f"tables of {tuple(cos[0])} and {tuple(sin[0])} do not broadcast to {tuple(x[0])}"
    if _head(q, k, cos, sin) is None:
        return f"tables of {tuple(cos[0])} differ from head to head of {tuple(sizes)}"
    return None


def _meta(layout: Layout) -> Tensor:
    return torch.empty_strided(*layout[:2], dtype=layout[2], device="meta")


def plan(
    q: Layout, k: Layout | None, cos: Layout, sin: Layout, interleaved: bool, rotary_dim: int, dtype: torch.dtype | None
) -> Plan:
    """The plan of a call. The torch composition, run on meta tensors, decides the layouts of the results."""
    result = torch.promote_types(q[2], cos[2]) if dtype is None else dtype
    reason = _unsupported(q, k, cos, sin, rotary_dim, result)
    if reason is not None:
        return Plan(reason)
    return _measured(q, k, cos, sin, interleaved, rotary_dim, dtype, result)


@lru_cache(KEPT)
def known_plan(*call: Any) -> Plan:
    with _disable_current_modes():  # Whoever records operations would find some that only a first call has.
        return plan(*call)


def _measured(
    q: Layout, k: Layout | None, cos: Layout, sin: Layout, interleaved: bool, rotary_dim: int,
    dtype: torch.dtype | None, result: torch.dtype,
) -> Plan:  # fmt: skip
    meta_q, meta_k = _meta(q), None if k is None else _meta(k)
    outs = reference.rotary(meta_q, meta_k, _meta(cos), _meta(sin), interleaved, rotary_dim, dtype)
    strides: list[Sizes] = [(1,), (1,)]
    grad_strides: list[Sizes] = [(1,), (1,)]
    for i, (x, out) in enumerate(zip((meta_q, meta_k), outs, strict=True)):
        if x is None or out is None:
            continue
        if out.stride(-1) != 1:
            return Plan(f"torch's result has strides {out.stride()}; kernels write rows")
        like = torch.empty_like(x).stride()  # what reshaped q for the forward can reshape its gradient without a copy
        found = out.stride(), like if like[-1] == 1 else out.stride()
        # Of dimensions with one element those of x, where torch's descriptions of sizes that differ have others.
        strides[i], grad_strides[i] = (
            tuple(own if size == 1 else stride for size, own, stride in zip(x.shape, x.stride(), each, strict=True))
            for each in found
        )
    head = _head(q, k, cos, sin)
    assert head is not None
    return Plan(None, head, result, *strides, *grad_strides)


def _decomposed_backward(
    dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int, dtype: torch.dtype
) -> Tensor:
    if rotary_dim != cos.shape[-1]:
        cos, sin = reference.full_table(cos, interleaved), reference.full_table(sin, interleaved)
    part = dy[..., :rotary_dim] if rotary_dim < dy.shape[-1] else dy
    turned = part * cos - reference.rotate(part * sin, interleaved)
    if part is not dy:
        turned = torch.cat((turned, dy[..., rotary_dim:]), -1)
    return turned.to(dtype)


class Rotary(pairs.Pair, inputs=2):
    """Keeps cos and sin."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool,
        rotary_dim: int, plan: Plan,
    ) -> Any:  # fmt: skip
        q_out, k_out = kernels.rotary(
            q, k, cos, sin, interleaved, rotary_dim, False, plan.dtype, plan.head, plan.q_strides, plan.k_strides
        )
        return (q_out, None if k is None else k_out), (cos, sin), (interleaved, rotary_dim, plan, q.dtype)

    @staticmethod
    def constant(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        return tuple(t for t, needed in zip(results, needs, strict=True) if t is not None and not needed)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor,
        interleaved: bool, rotary_dim: int, plan: Plan, dtype: torch.dtype,
    ) -> Gradients:  # fmt: skip
        found: list[Tensor | None] = [None, None]
        wanted = [
            (i, dy, strides)
            for i, (dy, strides) in enumerate(((dq, plan.q_grad_strides), (dk, plan.k_grad_strides)))
            if dy is not None and needs[i]
        ]
        if wanted:
            (i, first, first_strides), *others = wanted
            j, second, second_strides = others[0] if others else (1 - i, None, (1,))
            found[i], turned = kernels.rotary(
                first, second, cos, sin, interleaved, rotary_dim, True, dtype, plan.head, first_strides, second_strides
            )
            found[j] = None if second is None else turned
        return tuple(found)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool,
        rotary_dim: int, plan: Plan, dtype: torch.dtype,
    ) -> Gradients:  # fmt: skip
        return tuple(
            _decomposed_backward(dy, cos, sin, interleaved, rotary_dim, dtype) if dy is not None and needed else None
            for dy, needed in zip((dq, dk), needs, strict=True)
        )


def _problem(q: Tensor, k: object, cos: object, sin: object) -> str | None:
    """Why the kernels do not take these tensors, whatever their layout."""
    for t in (cos, sin) if k is None else (k, cos, sin):
        if not guard.is_plain(t):
            return f"it takes plain tensors, and got {type(t).__name__}"
        if t.device != q.device:
            return f"the operands are on {q.device} and {t.device}"
    assert isinstance(cos, Tensor)
    assert isinstance(sin, Tensor)
    if cos.dim() == 0 or sin.dim() == 0:
        return "a table has no dimension"
    if guard.wants_gradient(cos, sin):
        return "cos or sin needs a gradient, which the kernel does not make"
    return None


def _rotary_dim(cos: object, rotary_dim: int | None) -> int:
    if not isinstance(cos, Tensor) or cos.dim() == 0:  # torch itself says what is wrong
        return 0
    width = cos.shape[-1]
    if rotary_dim is None:
        return width
    if rotary_dim not in (width, 2 * width):
        raise ValueError(
            f"rotary_dim={rotary_dim} with cos of shape {tuple(cos.shape)}; expected {width}, or {2 * width} where the "
            "tables have one column for each pair"
        )
    return rotary_dim


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    rotated = _rotary_dim(cos, rotary_dim)
    kernels = FAMILY.kernels_for(q)
    if kernels is not None:
        reason = _problem(q, k, cos, sin)
        if reason is None:
            of_k = None if k is None else _layout(k)
            layouts_of = _layout(q), of_k, _layout(cos), _layout(sin)
            if type(q) is FakeTensor:  # whose sizes may be symbols, which no cache knows
                with _pop_mode_temporarily():
                    chosen = plan(*layouts_of, interleaved, rotated, dtype)
            else:
                chosen = known_plan(*layouts_of, interleaved, rotated, dtype)
            reason = chosen.reason
            if reason is None:
                return Rotary.run(kernels, q, k, cos, sin, interleaved, rotated, chosen)
        backends.refuse(reason)
    return guard.call_reference(reference.rotary, q, k, cos, sin, interleaved, rotated, dtype)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float | None, interleaved: bool, casting: str, rotary_dim: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for x in (q, k):
        if not isinstance(x, Tensor):
            raise guard.expected_tensor(x)
    q = rms_norm(q, q.shape[-1:], q_weight, eps, casting)
    k = rms_norm(k, k.shape[-1:], k_weight, eps, casting)
    q, rotated = rotary(q, k, cos, sin, interleaved, rotary_dim, None)
    assert rotated is not None
    return q, rotated
