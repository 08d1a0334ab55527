"""What an adapter adds to the result of a layer, y + scale·(dropout(x)·Aᵀ)·Bᵀ: autograd, and which calls have kernels.

Where a region records a forward, its program has the products of the layer as well: see
:mod:`fastlayers.patching.fusion.sums_of_products`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, pairs, reference
from fastlayers.ops.pairs import Gradients, Needs

#: Columns of the largest thin factor that there is a kernel for.
LARGEST_RANK = 128
#: Elements of 16 bits before those for which numbers are drawn as for float32: see :func:`draws_the_same`.
BESIDE = 4
#: Elements for which it compares masks: more than a kernel's threads take at once, in fours, in twos and one by one.
COMPARED = (2**22, 2**21 + 2, 2**20 + 1)


@cache
def draws_the_same(device: torch.device) -> bool:
    """Whether a dropout of 16 bits that begins BESIDE elements after an aligned address draws the mask that one of
    float32 does.

    torch's kernel takes as many elements at once as have 16 bytes and are aligned, and by that deals its numbers out:
    four of float32, and four of 16 bits where eight are not aligned. It is compared, not known.
    """
    for count in COMPARED:
        masks = []
        for start, dtype in ((0, torch.float32), (BESIDE, torch.bfloat16)):
            like = torch.empty(start + count, dtype=dtype, device=device)[start:]
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                masks.append(torch.native_dropout(like, 0.5, True)[1])
        if not torch.equal(*masks):
            return False
    return True


def compose(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """What peft computes."""
    x = x.to(a.dtype)
    return (y + F.linear(F.linear(F.dropout(x, dropout) if dropout else x, a), b) * scale).to(y.dtype)


def drawn_mask(x: Tensor, dropout: float) -> Tensor:
    """The mask that a dropout of a float32 copy of x draws, for a contiguous x of 16 bits."""
    with torch.no_grad():
        if draws_the_same(x.device):
            like = x.new_empty(x.numel() + BESIDE).as_strided(x.shape, x.stride(), BESIDE)
        else:
            like = x.float()
        return torch.native_dropout(like, dropout, True)[1]


class AddLowRank(pairs.Pair, inputs=4):
    """Keeps x as it is, not its cast to the adapter's float32, nor what a dropout leaves of that but its mask; x·Aᵀ,
    and references to A and B."""

    @staticmethod
    def raw_forward(
        kernels: Any, needs: Needs, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float,
        mask: Tensor | None,
    ) -> Any:  # fmt: skip
        rows = x.view(-1, x.shape[-1])
        u = _thin(kernels, rows, a.t(), 1 / (1 - dropout), _rows(mask))
        out = kernels.wide_product(u, b.t(), scale, y.dtype, base=y.view(-1, y.shape[-1]))
        return out.view(y.shape), (x, u, a, b, mask), (scale, dropout)

    @staticmethod
    def raw_backward(
        kernels: Any, needs: Needs, dy: Tensor, x: Tensor, u: Tensor, a: Tensor, b: Tensor, mask: Tensor | None,
        scale: float, dropout: float,
    ) -> Gradients:  # fmt: skip
        rows, d = x.view(-1, x.shape[-1]), dy.contiguous().view(-1, dy.shape[-1])
        for_x, for_a, for_b = needs[1:]
        du = _thin(kernels, d, b, scale) if for_x or for_a else None
        dx = da = None
        kept, masks = 1 / (1 - dropout), () if mask is None else (mask,)
        if du is not None:
            dx = kernels.wide_product(du, a, kept, x.dtype, masks=masks).view(x.shape) if for_x else None
            da = _thin(kernels, du.t(), rows, kept, None, _rows(mask)) if for_a else None
        return dy, dx, da, _thin(kernels, d.t(), u, scale) if for_b else None

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, u: Tensor, a: Tensor, b: Tensor, mask: Tensor | None, scale: float,
        dropout: float,
    ) -> Gradients:  # fmt: skip
        def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            kept = x if mask is None else x.to(a.dtype) * mask / (1 - dropout)
            return compose(dy.new_zeros(dy.shape), kept, a, b, scale)

        return dy, *pairs.differentiate(added, (x, a, b), needs[1:], dy)


def _rows(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(-1, mask.shape[-1])


def _thin(kernels: Any, a: Tensor, b: Tensor, factor: float, *masks: Tensor | None) -> Tensor:
    """``factor * a @ b``, where one of the two is thin and has the dtype of the result. There are masks of a and of b
    only beside an adapter of float32."""
    if a.dtype is not b.dtype:
        return kernels.thin_product(a, b, factor, *masks)  # type: ignore[no-any-return]
    out = a @ b
    return out if factor == 1 else out.mul_(factor)


def _has_kernels(y: Tensor, x: Tensor, a: Tensor, b: Tensor, dropout: float) -> bool:
    tensors = (y, x, a, b)
    return (
        all(guard.is_plain(t) and t.device == y.device for t in tensors)
        and y.dtype is x.dtype
        and x.dtype in reference.LOW_PRECISION
        and a.dtype is b.dtype
        and (a.dtype is torch.float32 or (a.dtype is x.dtype and dropout == 0))
        and 0 <= dropout < 1
        and a.shape[0] <= LARGEST_RANK
        and a.shape == (b.shape[1], x.shape[-1])
        and y.shape == (*x.shape[:-1], b.shape[0])
        and x.dim() > 1
        and all(t.numel() > 0 for t in tensors)
        and all(t.is_contiguous() for t in (y, x))
        and 1 in a.stride()
        and 1 in b.stride()
        and backends.generates_kernels(y.device)
        and not torch.compiler.is_compiling()
        and not guard.must_decompose()
    )


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """``y + scale * linear(linear(dropout(x), a), b)`` in the dtype of y; a is (r, in), b (out, r)."""
    if not _has_kernels(y, x, a, b, dropout):
        return compose(y, x, a, b, scale, dropout)
    from fastlayers.kernels import low_rank

    mask = drawn_mask(x, dropout) if dropout else None
    return AddLowRank.run(low_rank, y, x, a, b, scale, dropout, mask)  # type: ignore[no-any-return]
