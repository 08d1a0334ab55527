"""Linear layers and convolutions on a CPU with what follows them, by oneDNN, whose kernels compute it as they write.

torch has no autograd for these, so they serve where nothing needs a gradient. Their results have torch's bits but for
the order of a sum in linear layers. A result that is written once also gets memory once: fresh pages cost a CPU more
than the arithmetic of an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers import backends
from fastlayers.ops import guard, modes
from fastlayers.ops.convolution_norm import result_shape

#: What oneDNN calls the activations that it computes, with their parameters and algorithm.
ATTRIBUTES: dict[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "hardswish": ("hardswish", [], ""),
    "leaky_relu": ("leaky_relu", [0.01], ""),
    "tanh": ("tanh", [], ""),
}
#: The activations that torch computes, in place, on what oneDNN wrote. Some of oneDNN's kernels make 0 of NaN: those of
#: relu on every CPU, those of sigmoid in grouped convolutions on a CPU without AVX-512 (torch 2.13).
IN_PLACE: dict[str | None, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "relu6": lambda y: F.relu6(y, inplace=True),
    "sigmoid": torch.sigmoid_,
}
#: And after a convolution: where torch has NaN, the gelu of an infinity, oneDNN's kernels for channels_last and AVX-512
#: have a number.
AFTER_CONVOLUTION = IN_PLACE | {"gelu": torch._C._nn.gelu_}  # type: ignore[attr-defined]
#: Rows from which a linear layer gains: 768x3072 with a GELU takes 2.25 ms for 2.46 with 128 of them, 81 for 91 with
#: 4096, .17 for .19 with 16, and .23 for .22 with 1 (2 cores with AVX-512, torch 2.13).
ROWS = 16
#: How many elements a convolution gives for each of its weight where a BatchNorm is multiplied into that.
FOLDS = 2
#: torch gives oneDNN a convolution of a small image, or by a pixel in a single thread, only where that gains.
#: MobileNetV3 with one image took 1.10 of stock's time where all went to oneDNN, and takes .99.
_backend_of: Callable[..., Any] = torch._C._select_conv_backend  # type: ignore[attr-defined]
_ONEDNN = torch._C._ConvBackend.Mkldnn  # type: ignore[attr-defined]


def _serves(*tensors: Tensor | None) -> bool:
    """Whether oneDNN may have these tensors: of float32 or bfloat16, with nobody who would miss torch's operations."""
    dtype = tensors[0].dtype if tensors[0] is not None else None
    if (
        torch.compiler.is_compiling()
        or backends.get_backend() is not None
        or not torch._C._get_mkldnn_enabled()
        or not torch.backends.mkldnn.is_available()
        or torch.is_autocast_enabled("cpu")
        or not (dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    ):
        return False
    present = [t for t in tensors if t is not None]
    return (
        all(guard.is_plain(t) and t.device.type == "cpu" and t.dtype is dtype for t in present)
        and not guard.wants_gradient(*present)
        and not guard.must_decompose()
        and not modes.is_watched()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor | None:
    """act(linear(x)), None where torch has to compute it."""
    if not _serves(x, weight, bias) or x.dim() < 2 or not x.is_contiguous():
        return None
    features, width = weight.shape if weight.dim() == 2 else (0, 0)
    rows = x.numel() // width if width else 0
    if rows < ROWS or features == 0 or x.shape[-1] != width or not weight.is_contiguous():
        return None
    if bias is not None and bias.shape != (features,):
        return None
    if act in IN_PLACE:
        return IN_PLACE[act](F.linear(x, weight, bias))
    if act not in ATTRIBUTES:
        return None
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *ATTRIBUTES[act])
    return y


def convolution(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str | None
) -> Tensor | None:
    """act(layer(x) + residual) for a Conv2d with these parameters, None where torch has to compute it."""
    if _takes(layer, x, weight, residual, act) and _serves(x, weight, bias, residual) and _is_onednns(layer, x):
        return _convolved(layer, x, weight, bias, residual, act)
    return None


def convolution_norm(layer: Any, x: Tensor, norm: Any, residual: Tensor | None, act: str | None) -> Tensor | None:
    """act(norm(layer(x)) + residual) for a Conv2d and a BatchNorm2d in eval, whose scale is multiplied into the weight
    in every call: that costs a pass over the weight, and saves one or more over the result."""
    weight, mean, variance = layer.weight, norm.running_mean, norm.running_var
    if norm.training or mean is None or variance is None or not _takes(layer, x, weight, residual, act):
        return None
    if FOLDS * weight.numel() > prod(result_shape(layer, x.shape)) or weight.dtype is not torch.float32:
        return None
    given = (layer.bias, norm.weight, norm.bias, mean, variance)
    if any(t is not None and t.shape != weight.shape[:1] for t in given):
        return None
    if not _serves(x, weight, residual, *given) or not _is_onednns(layer, x):
        return None
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean if layer.bias is None else layer.bias - mean
    shift = shift * scale if norm.bias is None else torch.addcmul(norm.bias, shift, scale)
    return _convolved(layer, x, weight * scale.view(-1, 1, 1, 1), shift, residual, act)


def _convolved(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str | None
) -> Tensor:
    after = AFTER_CONVOLUTION.get(act)
    options = (layer.padding, layer.stride, layer.dilation, layer.groups)
    y: Tensor
    if residual is None:
        attributes = ATTRIBUTES[None if after is not None else act]
        y = torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *options, *attributes)
    else:
        y = torch.ops.mkldnn._convolution_pointwise.binary(
            x, residual, weight, bias, *options, "add", 1.0, None, [], ""
        )
    return y if after is None else after(y)


def _is_onednns(layer: Any, x: Tensor) -> bool:
    """Whether torch has oneDNN compute the convolution."""
    options = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
    return bool(_backend_of(x, layer.weight, layer.bias, *options) == _ONEDNN)


def _takes(layer: Any, x: Tensor, weight: Tensor, residual: Tensor | None, act: str | None) -> bool:
    """Whether this is a Conv2d that oneDNN computes with this weight, together with what follows."""
    if (
        not isinstance(layer, nn.Conv2d)
        or layer.padding_mode != "zeros"
        or isinstance(layer.padding, str)
        or weight.shape != (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
        or x.dim() != 4
        or x.shape[1] != layer.in_channels
        or x.numel() == 0
    ):
        return False
    if residual is None:
        return act in IN_PLACE or act in ATTRIBUTES
    return (
        (act is None or act in IN_PLACE)
        and residual.shape == result_shape(layer, x.shape)
        and _layout(x) is not None
        and _layout(residual) is _layout(x)
    )


def _layout(x: Tensor) -> torch.memory_format | None:
    """How x lies in memory: the result of a convolution and its sum with a residual then lie so, too."""
    return next((f for f in (torch.contiguous_format, torch.channels_last) if x.is_contiguous(memory_format=f)), None)
