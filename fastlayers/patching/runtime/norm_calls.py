"""The norms that generated forwards call: in the dtype to which autocast casts, with the residual before, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.ops import layer_norm as norms
from fastlayers.ops.reference import LOW_PRECISION, autocasts
from fastlayers.patching.runtime.calls import stays
from fastlayers.patching.runtime.checks import Casts, cast_dtype
from fastlayers.patching.runtime.traits import fresh


def _low_first(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The two in the order in which kernels take a float32 and a 16-bit tensor.

    torch adds tensors in other layouts, and the first one determines the layout of the sum.
    """
    if (
        residual is not None
        and x.dtype is torch.float32
        and residual.dtype in LOW_PRECISION
        and x.shape == residual.shape
        and x.is_contiguous()
        and residual.is_contiguous()
    ):
        return residual, x
    return x, residual


def layer_norm(
    x: Tensor,
    casts: Casts,
    *,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm in the dtype to which autocast casts the result."""
    return norms.layer_norm(x, normalized_shape, weight, bias, eps, cast_dtype(casts, x, weight))


def rms_norm(x: Tensor, casts: Casts, weight: Tensor | None = None, **options: Any) -> Tensor:
    """F.rms_norm in the dtype to which autocast casts the result."""
    return functional.rms_norm(x, weight=weight, **options, dtype=cast_dtype(casts, x, weight))


def channel_layer_norm(x: Tensor, casts: Casts, weight: Tensor | None = None, **options: Any) -> Tensor:
    """layer_norm of an image over its channels, in the dtype to which autocast casts the result."""
    return functional.channel_layer_norm(x, weight, **options, dtype=cast_dtype(casts, x, weight))


@fresh
def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    inplace: bool = False,
    casts: Casts | None = None,
    *,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(F.layer_norm(s, ...), s) for s = x + residual, which overwrites x if ``inplace``; without a residual s is x."""
    rest = normalized_shape, weight, bias, eps, cast_dtype(casts, x, residual, weight)
    return _add_norm(norms.add_layer_norm, norms.layer_norm, x, residual, inplace, rest)


@fresh
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    inplace: bool = False,
    casts: Casts | None = None,
    *,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    casting: str = "torch",
) -> tuple[Tensor, Tensor]:
    """(F.rms_norm(s, ...), s) for s = x + residual, which overwrites x if ``inplace``; without a residual s is x."""
    rest = normalized_shape, weight, eps, casting, cast_dtype(casts, x, residual, weight)
    return _add_norm(norms.add_rms_norm, norms.rms_norm, x, residual, inplace, rest)


def _add_norm(
    add_norm: Callable[..., tuple[Tensor, Tensor]],
    norm: Callable[..., Tensor],
    x: Tensor,
    residual: Tensor | None,
    inplace: bool,
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    if inplace and residual is not None and not stays(x, residual):
        x = x.add_(residual)
        return norm(x, *rest), x
    return add_norm(*_low_first(x, residual), *rest)


def computes_norm(x: Any, weight: Tensor | None, *, casting: str | None, same: bool) -> bool:
    """Whether a handwritten norm equals the fused norm of its casting order for this x and weight.

    Args:
        x: the input. It is not float64, since these forwards cast to float32.
        weight: the weight, which has the last dimension only.
        casting: as for :func:`handwritten_norm`. torch's norms follow autocast, elementwise code does not.
        same: whether x and weight must have the same dtype.
    """
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, *LOW_PRECISION):
        return False
    if casting in (None, "torch") and x.dtype != torch.float32 and autocasts(x.device.type):
        return False
    return weight is None or (weight.shape == x.shape[-1:] and (not same or weight.dtype == x.dtype))


def handwritten_norm(x: Tensor, weight: Tensor | None, eps: float, casting: str | None) -> Tensor:
    """RMSNorm over the last dimension in a casting order; LayerNorm without a bias if that is None."""
    if casting is None:
        return functional.layer_norm(x, x.shape[-1:], weight, None, eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps, casting=casting)


@fresh
def add_handwritten_norm(
    layer: nn.Module,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    inplace: bool,
    casting: str | None,
    same: bool,
) -> tuple[Tensor, Tensor]:
    """(layer(s), s) for s = x + residual, where the layer is a handwritten norm; without a residual s is x."""
    if residual is None and not computes_norm(x, weight, casting=casting, same=same):
        return layer(x), x
    if residual is not None and not (
        isinstance(residual, Tensor)
        and x.shape == residual.shape
        and (x.dtype == residual.dtype if inplace or same else residual.dtype in (torch.float32, *LOW_PRECISION))
        and computes_norm(x, weight, casting=casting, same=same)
    ):
        s = x.add_(residual) if inplace else x + residual
        return layer(s), s
    shape = x.shape[-1:]
    x, residual = _low_first(x, residual)
    if casting is None:
        return functional.add_layer_norm(x, residual, shape, weight, None, eps)
    return functional.add_rms_norm(x, residual, shape, weight, eps, casting=casting)
