"""x·gate where the gate is computed from the mean of x over space: kernel or reference, and autograd.

x gets two gradients, dy·gate from the product and dmean / (H·W) from the mean, and autograd would write both and then
their sum. Here the two Functions work together: the product passes dy itself and the gate to the mean, which writes
dx = dy·gate + dmean / (H·W) at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import elementwise, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients


class Kernels(raw_ops.Kernels):
    @staticmethod
    def spatial_sum(x: Tensor, y: Tensor | None, factor: float) -> Tensor:
        return reference.spatial_mean(x)

    @staticmethod
    def scale_shift(x: Tensor, scale: Tensor, shift: Tensor, factor: float) -> Tensor:
        return torch.empty_like(x)


FAMILY = raw_ops.Family("squeeze_excite", Kernels, cpu=True)


#: Elements from which an unforced call on a CPU gets the kernels, and the pixels that a contiguous plane has at least.
#: With 2 threads a forward and backward gains 1.8x to 4x from here on; in planes of 14 by 14 it loses.
CPU_LEAST = 2**18
CPU_PLANE = 1024


def _torch_is_as_fast(x: Tensor) -> bool:
    """Whether a CPU has to be asked for these kernels. They gain in the backward, and forward in bfloat16."""
    if x.dtype not in guard.CPU_DTYPES or x.numel() < CPU_LEAST:
        return True
    if x.is_contiguous() and x.shape[2] * x.shape[3] < CPU_PLANE:
        return True
    return x.dtype == torch.float32 and not guard.wants_gradient(x)


@dataclass(eq=False, slots=True)
class _Shared:
    """What the product and the mean of one x share.

    Attributes:
        taken: whether a product uses the link.
        gate: set by the product during a backward, for the mean: what dy is to be scaled by.
    """

    taken: bool = False
    gate: Tensor | None = None


class Link(NamedTuple):
    """x as :func:`squeeze` saw it, for :func:`excite`.

    Attributes:
        x: the image.
        version: how often x had been written when its mean was taken.
        stand_in: stands for x in the autograd graph. Only the product is given it: the gradient that comes back is dy
            where ``shared.gate`` is set, and otherwise that of x.
    """

    x: Tensor
    version: int
    stand_in: Tensor
    shared: _Shared


class _Squeeze(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: _Shared, kernels: Kernels) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.shared, ctx.kernels = x.shape, shared, kernels
        return _mean(x, kernels), x.detach()

    @staticmethod
    def backward(ctx: Any, dmean: Tensor | None, dx: Tensor | None) -> Gradients:
        gate, ctx.shared.gate = ctx.shared.gate, None
        pixels = ctx.shape[2] * ctx.shape[3]
        if gate is None or dx is None:
            spread = None if dmean is None else (dmean / pixels).expand(ctx.shape)
            both = dx if spread is None else spread if dx is None else dx + spread
        elif dmean is None:
            both = dx * gate
        elif guard.needs_double_backward(dmean):
            both = dx * gate + dmean / pixels
        else:
            both = ctx.kernels.scale_shift(dx, gate, dmean, 1 / pixels)
        return both, None, None


class _Excite(torch.autograd.Function):
    """Keeps x and gate. ``stand_in`` is that of the link."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor, gate: Tensor, shared: _Shared, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.shared, ctx.kernels = shared, kernels
        return _product(x, gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, gate = ctx.saved_tensors
        for_gate = ctx.needs_input_grad[2]
        if guard.needs_double_backward(dy):
            ctx.shared.gate = None
            return dy * gate, None, (dy * x).sum((2, 3), keepdim=True) if for_gate else None, None, None
        dy = layouts.with_strides(dy, x.stride())
        ctx.shared.gate = gate
        return dy, None, ctx.kernels.spatial_sum(dy, x, 1.0) if for_gate else None, None, None


def _times(x: Tensor, gate: Tensor) -> Tensor:
    """x·gate as autograd records it. On a CPU torch's own is one pass over memory, where the kernel takes one shape."""
    kernels = FAMILY.kernels_for(x)
    return elementwise.mul(x, gate) if kernels is None or kernels.backend != "cpu" else x * gate


def _product(x: Tensor, gate: Tensor) -> Tensor:
    kernels = elementwise.FAMILY.kernels_for(x)
    assert kernels is not None
    return x * gate if kernels.backend == "cpu" else kernels.mul(x, gate)


def _mean(x: Tensor, kernels: Kernels) -> Tensor:
    return kernels.spatial_sum(x, None, 1 / (x.shape[2] * x.shape[3]))


def _unsupported(x: Tensor) -> str | None:
    if x.dtype not in guard.FLOATING:
        return f"no kernel for {x.dtype}"
    if x.dim() != 4 or x.numel() == 0 or not layouts.is_image(x):
        return f"it takes contiguous or channels_last images, and got shape {tuple(x.shape)}, strides {x.stride()}"
    return None


def squeeze(x: Tensor, mean: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | Link]:
    """``(mean(x), x)`` for a ``mean`` over space, (N, C, 1, 1); x as a link where :func:`excite` gains by it."""
    kernels = FAMILY.kernels_for(x)
    if kernels is None:
        if guard.is_dtensor(x):
            backends.refuse("it takes plain tensors, and got a DTensor")
        return mean(x), x
    reason = _unsupported(x)
    if reason is not None:
        backends.refuse(reason)
        return mean(x), x
    if (
        _torch_is_as_fast(x)
        if kernels.unasked
        else backends.get_backend() is None and x.numel() < elementwise.GPU_LEAST
    ):
        return mean(x), x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _mean(x, kernels), x
    x, shared = pairs.unwrap(x), _Shared()
    out, stand_in = _Squeeze.apply(x, shared, kernels)
    return out, Link(x, x._version, stand_in, shared)


def excite(squeezed: Tensor | Link, gate: Tensor) -> Tensor:
    """x·gate, for the x that :func:`squeeze` returned."""
    if not isinstance(squeezed, Link):
        return _times(squeezed, gate)
    x, version, stand_in, shared = squeezed
    kernels = FAMILY.kernels_for(x)
    if (
        kernels is None
        or shared.taken
        or version != x._version
        or not torch.is_grad_enabled()
        or not guard.is_plain(gate)
        or gate.shape != (*x.shape[:2], 1, 1)
        or gate.dtype is not x.dtype
        or gate.device != x.device
    ):
        return _times(x, gate)
    shared.taken = True
    return _Excite.apply(stand_in, x, pairs.unwrap(gate), shared, kernels)


def convolution_of_product(layer: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
    """``layer(product)``, a convolution. Where :func:`excite` made the product, backward recomputes it.

    Autograd keeps the input of a convolution, beside the x and gate that the product keeps: one tensor of that size is
    enough. Where other saved-tensor hooks decide what is kept, as checkpoints do, it is left to them.
    """
    if torch.compiler.is_compiling():
        return layer(product)
    node: Any = product.grad_fn if isinstance(product, Tensor) else None
    if (
        not isinstance(node, _Excite._backward_cls)  # type: ignore[attr-defined]
        or product._version != 0
        or guard.must_decompose()
        or guard.hooks_decide_what_is_kept()
    ):
        return layer(product)
    factors = tuple((t, t._version) for t in node.saved_tensors)
    recomputed: list[Tensor] = [product]  # emptied after the forward: the hooks live as long as the graph

    def pack(kept: Tensor) -> Tensor | None:
        return None if any(map(kept.is_set_to, recomputed)) else kept

    def unpack(kept: Tensor | None) -> Tensor:
        if kept is not None:
            return kept
        for t, version in factors:
            if t._version != version:
                raise RuntimeError(
                    f"a factor of a convolution's input, shape {tuple(t.shape)}, is needed for the gradient and has "
                    f"been modified by an inplace operation: it is at version {t._version}; expected {version}"
                )
        with torch.no_grad():
            return _product(*(t for t, _ in factors))

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = layer(product)
    recomputed.clear()
    return out


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    mean, squeezed = squeeze(x, reference.spatial_mean)
    return excite(squeezed, gate(mean))
