"""What a folded forward calls: in eval, a BatchNorm and the convolution before it as one convolution.

A BatchNorm in eval multiplies each channel by a number and adds one, which the weight and bias of the convolution can
do as well. Nothing of the model is overwritten: parameters, buffers and state-dict keys stay as they are, and the
folded weights are kept beside it, made anew when something they come from has changed. As with :func:`patch_model` only
classes change, and the folded forward answers where it is right: in eval, where no gradient of the folded parameters is
wanted. A folded model that is trained trains as if it were not folded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

__all__ = ["folded", "folded_and_more", "forget", "may_fold"]

TRANSPOSED: dict[int, Callable[..., Tensor]] = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}

#: weight and bias of the layer, then of the norm, its running mean and variance, and the count that training raises.
Sources: TypeAlias = tuple[Tensor | None, ...]


def sources(layer: nn.Module, norm: _BatchNorm) -> Sources:
    """The tensors that the folded weights are made of, or whose change means that those have changed."""
    statistics = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return layer.weight, layer.bias, norm.weight, norm.bias, *statistics  # type: ignore[return-value]


def may_fold(*layers: nn.Module) -> bool:
    """Whether folded weights answer for pairs of a layer and its norm: all in eval, and no gradient of theirs wanted.

    All pairs are asked: one in training forgets its weights, since training writes running statistics in ways that
    their version counters do not notice.
    """
    answers = [pair_may_fold(layer, norm) for layer, norm in zip(layers[::2], layers[1::2], strict=True)]
    return all(answers)


def pair_may_fold(layer: Any, norm: Any) -> bool:
    if norm.training or norm.running_mean is None or norm.running_var is None:
        if not torch.compiler.is_compiling():  # compiled code writes buffers in ways that they do notice
            forget(norm)
        return False
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in sources(layer, norm)):
        return False
    groups = layer.groups if isinstance(layer, _ConvTransposeNd) else 0
    return bool((layer.weight.shape[1] * groups if groups else layer.weight.shape[0]) == norm.num_features)


def folded(layer: Any, norm: Any, x: Tensor) -> Tensor:
    """norm(layer(x)), in eval, as one layer."""
    if x.dim() != layer.weight.dim():  # without a batch, or a sequence to a linear layer: not what BatchNorm would do
        return norm(layer(x))  # type: ignore[no-any-return]
    weight, bias = folded_weights(layer, norm)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(layer, _ConvTransposeNd):
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return TRANSPOSED[x.dim()](x, weight, bias, *options)
    return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]


def folded_and_more(layer: Any, norm: Any, x: Tensor, *after: nn.Module) -> Tensor:
    """norm(layer(x)), in eval, for a norm that hands its result to children of its own: an activation, say."""
    if x.dim() != layer.weight.dim():
        return norm(layer(x))  # type: ignore[no-any-return]
    y = folded(layer, norm, x)
    for child in after:
        y = child(y)
    return y


@dataclass(frozen=True)
class Folded:
    """Folded weights, and what they were made of.

    The aliases share the memory of the sources: while they hold it, a tensor at another address is another one even
    where somebody assigned ``tensor.data``, which no version counter sees.
    """

    layer: ReferenceType[nn.Module]
    eps: float
    sources: Sources
    aliases: Sources
    versions: tuple[int, ...]
    weights: tuple[Tensor, Tensor]

    def fits(self, layer: nn.Module, norm: _BatchNorm) -> bool:
        if self.layer() is not layer or self.eps != norm.eps:
            return False
        for tensor, source, alias, version in zip(
            sources(layer, norm), self.sources, self.aliases, self.versions, strict=True
        ):
            if tensor is not source:
                return False
            if tensor is None or alias is None:
                continue
            if tensor._version != version or tensor.data_ptr() != alias.data_ptr() or tensor.dtype != alias.dtype:
                return False
        return True


_folded: WeakKeyDictionary[nn.Module, Folded] = WeakKeyDictionary()


def forget(norm: nn.Module) -> None:
    """Give the memory of folded weights back."""
    _folded.pop(norm, None)


def folded_weights(layer: nn.Module, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The weight and bias of the folded layer, made anew where a tensor that they come from has changed."""
    given = sources(layer, norm)
    if not keepable(given):
        return fold(layer, norm)
    kept = _folded.get(norm)
    if kept is None or not kept.fits(layer, norm):
        with torch.no_grad(), torch.inference_mode(False):
            aliases = tuple(tensor.detach() if tensor is not None else None for tensor in given)
            versions = tuple(tensor._version if tensor is not None else 0 for tensor in given)
            kept = Folded(ref(layer), norm.eps, given, aliases, versions, fold(layer, norm))
        _folded[norm] = kept
    return kept.weights


def keepable(given: Sources) -> bool:
    """Whether folded weights may outlive the call: not while something traces, transforms or captures it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if any(tensor is not None and tensor.is_inference() for tensor in given):  # they do not count their versions
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def fold(layer: nn.Module, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the one layer that computes both; in float32 at least, rounded once."""
    weight, bias, gain, shift, mean, variance, _ = sources(layer, norm)
    assert weight is not None
    assert mean is not None
    assert variance is not None  # may_fold says so
    dtype = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(variance.to(dtype) + norm.eps)
    if gain is not None:
        scale = scale * gain.to(dtype)
    kernel = [1] * (weight.dim() - 2)
    if isinstance(layer, _ConvTransposeNd):  # (in, out / groups, *kernel): the groups lie along the first dimension
        by_group = weight.to(dtype).unflatten(0, (layer.groups, -1))
        scaled = (by_group * scale.view(layer.groups, 1, -1, *kernel)).flatten(0, 1)
    else:
        scaled = weight.to(dtype) * scale.view(-1, 1, *kernel)
    offset = -mean.to(dtype) if bias is None else bias.to(dtype) - mean.to(dtype)
    offset = offset * scale
    if shift is not None:
        offset = offset + shift.to(dtype)
    return scaled.to(weight.dtype), offset.to(weight.dtype)
