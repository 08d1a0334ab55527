"""What an adapter adds to the result of a layer, y + scale·(x·Aᵀ)·Bᵀ: autograd, and which calls have kernels.

Where a region records a forward, its program has the products of the layer as well: see
:mod:`fastlayers.patching.rewrite.sums_of_products`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, reference
from fastlayers.ops.dispatch import Gradients, Needs

#: Columns of the largest thin factor that there is a kernel for.
LARGEST_RANK = 128


def compose(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What peft computes."""
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(y.dtype)


class AddLowRank(dispatch.Pair, inputs=4):
    """Keeps x as it is, not its cast to the adapter's float32; x·Aᵀ, and references to A and B."""

    @staticmethod
    def forward(kernels: Any, needs: Needs, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Any:
        rows = x.view(-1, x.shape[-1])
        u = _thin(kernels, rows, a.t(), 1.0)
        out = kernels.wide_product(u, b.t(), scale, y.dtype, base=y.view(-1, y.shape[-1]))
        return out.view(y.shape), (x, u, a, b), (scale,)

    @staticmethod
    def backward(
        kernels: Any, needs: Needs, dy: Tensor, x: Tensor, u: Tensor, a: Tensor, b: Tensor, scale: float
    ) -> Gradients:
        rows, d = x.view(-1, x.shape[-1]), dy.contiguous().view(-1, dy.shape[-1])
        for_x, for_a, for_b = needs[1:]
        du = _thin(kernels, d, b, scale) if for_x or for_a else None
        dx = da = None
        if du is not None:
            dx = kernels.wide_product(du, a, 1.0, x.dtype).view(x.shape) if for_x else None
            da = _thin(kernels, du.t(), rows, 1.0) if for_a else None
        return dy, dx, da, _thin(kernels, d.t(), u, scale) if for_b else None

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, u: Tensor, a: Tensor, b: Tensor, scale: float
    ) -> Gradients:
        def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return compose(dy.new_zeros(dy.shape), x, a, b, scale)

        return dy, *dispatch.differentiate(added, (x, a, b), needs[1:], dy)


def _thin(kernels: Any, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """``factor * a @ b``, where one of the two is thin and has the dtype of the result."""
    if a.dtype is not b.dtype:
        return kernels.thin_product(a, b, factor)  # type: ignore[no-any-return]
    out = a @ b
    return out if factor == 1 else out.mul_(factor)


def _has_kernels(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> bool:
    tensors = (y, x, a, b)
    return (
        all(dispatch.is_plain(t) and t.device == y.device for t in tensors)
        and y.dtype is x.dtype
        and x.dtype in reference.LOW_PRECISION
        and a.dtype is b.dtype
        and a.dtype in (torch.float32, x.dtype)
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
        and not dispatch.must_decompose()
    )


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``y + scale * linear(linear(x, a), b)`` in the dtype of y; a is (r, in), b (out, r)."""
    if not _has_kernels(y, x, a, b):
        return compose(y, x, a, b, scale)
    from fastlayers.kernels import low_rank

    return AddLowRank.run(low_rank, y, x, a, b, scale)  # type: ignore[no-any-return]
