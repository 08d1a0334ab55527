"""x·gate where the gate is computed from the mean of x over space: kernel or reference, and autograd.

x gets two gradients, dy·gate of the product and dmean / (H·W) of the mean, and autograd would write both and then their
sum. Here the two Functions work together: that of the product sends dy itself to that of the mean, with the gate, and
that one writes dx = dy·gate + dmean / (H·W) at once.

Under torch.compile the reference answers: Inductor fuses it with its neighbours, which no opaque op can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, reference

FAMILY = dispatch.Family("squeeze_excite", ("spatial_sum", "scale_shift"), cpu=False)

_top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


class _Handed:
    """What :class:`_Excite` hands to :class:`_Squeeze` in a backward beside dy: the gate that dy is to be scaled by."""

    __slots__ = ("gate",)

    def __init__(self) -> None:
        self.gate: Tensor | None = None


class _Link(NamedTuple):
    """From the mean of x to the product with its gates.

    ``stand_in`` stands for x in the autograd graph, and nobody but :class:`_Excite` is given it: what comes back as its
    gradient is dy alone where a gate was handed on, and else the gradient.
    """

    x: Tensor
    version: int
    stand_in: Tensor
    handed: _Handed


class _Squeeze(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handed: _Handed, kernels: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.handed, ctx.kernels = x.shape, handed, kernels
        return _mean(x, kernels), x.detach()

    @staticmethod
    def backward(ctx: Any, dmean: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        gate, ctx.handed.gate = ctx.handed.gate, None
        pixels = ctx.shape[2] * ctx.shape[3]
        if gate is None or dx is None:
            spread = None if dmean is None else (dmean / pixels).expand(ctx.shape)
            both = dx if spread is None else spread if dx is None else dx + spread
        elif dmean is None:
            both = dx * gate
        elif dispatch.differentiating(dmean):
            both = dx * gate + dmean / pixels
        else:
            both = ctx.kernels.scale_shift(dx, gate, dmean, 1 / pixels)
        return both, None, None


class _Excite(torch.autograd.Function):
    """Keeps x and gate. ``stand_in`` is that of the link."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor, gate: Tensor, handed: _Handed, kernels: Any) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.handed, ctx.kernels = handed, kernels
        return _product(x, gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate = ctx.saved_tensors
        for_gate = ctx.needs_input_grad[2]
        if dispatch.differentiating(dy):
            ctx.handed.gate = None
            return dy * gate, None, (dy * x).sum((2, 3), keepdim=True) if for_gate else None, None, None
        dy = dispatch.with_strides(dy, x.stride())
        ctx.handed.gate = gate
        return dy, None, ctx.kernels.spatial_sum(dy, x, 1.0) if for_gate else None, None, None


def _product(x: Tensor, gate: Tensor) -> Tensor:
    return elementwise.FAMILY.serving(x).mul(x, gate)  # type: ignore[no-any-return]


def _mean(x: Tensor, kernels: Any) -> Tensor:
    return kernels.spatial_sum(x, None, 1 / (x.shape[2] * x.shape[3]))  # type: ignore[no-any-return]


def _unsupported(x: Tensor) -> str | None:
    if x.dtype not in dispatch.FLOATING:
        return f"no kernel for {x.dtype}"
    if x.dim() != 4 or x.numel() == 0 or not dispatch.is_image(x):
        return f"it takes contiguous or channels_last images, and got shape {tuple(x.shape)}, strides {x.stride()}"
    return None


def squeeze(x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """``mean(x)``, which is the mean over space, (N, C, 1, 1). :func:`excite` finds the link to x on the result."""
    if torch.compiler.is_compiling():
        return mean(x)
    kernels = FAMILY.serving(x)
    if kernels is None:
        return mean(x)
    reason = _unsupported(x)
    if reason is not None:
        backends.refuse(reason)
        return mean(x)
    if backends.get_backend() is None and x.numel() < elementwise.GPU_LEAST:
        return mean(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _mean(x, kernels)
    x, handed = dispatch.unwrap(x), _Handed()
    out, stand_in = _Squeeze.apply(x, handed, kernels)
    out.fastlayers_link = _Link(x, x._version, stand_in, handed)
    return out  # type: ignore[no-any-return]


def excite(x: Tensor, gate: Tensor, mean: Tensor) -> Tensor:
    """x·gate, for a mean that :func:`squeeze` gave, of x as it is now or of anything else."""
    if torch.compiler.is_compiling():
        return elementwise.mul(x, gate)
    link = mean.__dict__.pop("fastlayers_link", None) if isinstance(mean, Tensor) else None
    kernels = FAMILY.serving(x) if link is not None else None
    if (
        kernels is None
        or link.x is not x
        or link.version != x._version
        or not torch.is_grad_enabled()
        or not dispatch.is_plain(gate)
        or gate.shape != (*x.shape[:2], 1, 1)
        or gate.dtype is not x.dtype
        or gate.device != x.device
    ):
        return elementwise.mul(x, gate)
    return _Excite.apply(link.stand_in, x, dispatch.unwrap(gate), link.handed, kernels)  # type: ignore[no-any-return]


def convolution_of_product(layer: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
    """``layer(product)``, a convolution. Where :func:`excite` made the product, it is computed anew for the backward.

    autograd keeps what a convolution is given, beside the x and gate that the product keeps: one tensor of that size
    is enough. Where somebody else decides what is kept, as checkpoints do, it is left to them.
    """
    if torch.compiler.is_compiling():
        return layer(product)
    node: Any = product.grad_fn if isinstance(product, Tensor) else None
    if (
        not isinstance(node, _Excite._backward_cls)  # type: ignore[attr-defined]
        or product._version != 0
        or dispatch.composing()
        or _top_saved_tensors_hooks(False) is not None
    ):
        return layer(product)
    place = product.data_ptr(), product.shape, product.dtype
    factors = tuple((t, t._version) for t in node.saved_tensors)

    def pack(kept: Tensor) -> Tensor | None:
        return None if (kept.data_ptr(), kept.shape, kept.dtype) == place else kept

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
        return layer(product)


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.squeeze_excite(x, gate)
    mean = squeeze(x, reference.spatial_mean)
    return excite(x, gate(mean), mean)


dispatch.register_fakes(
    {
        "spatial_sum": lambda x, y, factor: reference.spatial_mean(x),
        "scale_shift": lambda x, scale, shift, factor: torch.empty_like(x),
    }
)
