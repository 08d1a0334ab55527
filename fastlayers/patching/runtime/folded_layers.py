"""Folded layers: in eval, a BatchNorm and the convolution before it as one convolution.

A BatchNorm in eval multiplies each channel by a number and adds one. The weight and the bias of the convolution can do
this instead. Nothing of the model is overwritten: parameters, buffers and state-dict keys stay as they are. The folded
weights are stored next to the model, and recomputed when one of their sources changes. The folded forward runs in eval
and where no gradient of the folded parameters is needed. In training the model computes as if it were not folded.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from fastlayers.ops.reference import autocasts
from fastlayers.patching.runtime.calls import join
from fastlayers.patching.runtime.checks import no_hooks
from fastlayers.patching.runtime.convolution import adds_bias, convolve, layer_and_more
from fastlayers.patching.runtime.traits import fresh

__all__ = ["folded", "folded_and_more", "folded_layer", "folded_sum", "folded_tensors", "forget", "may_fold", "sources"]

#: Children of a norm that its kernel may stand for, by the name of the activation.
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}

#: weight and bias of the layer, then of the norm, its running mean and variance, and the count that training raises:
#: a tensor, or None if it is missing.
Sources: TypeAlias = tuple[Any, ...]


def sources(layer: nn.Module, norm: _BatchNorm) -> Sources:
    """The tensors that the folded weights are made of, or whose change means that those have changed."""
    ours, theirs, statistics = layer._parameters, norm._parameters, norm._buffers
    try:  # every call asks, and as attributes of modules they take ten times as long
        return (
            ours["weight"], ours["bias"], theirs["weight"], theirs["bias"],
            statistics["running_mean"], statistics["running_var"], statistics["num_batches_tracked"],
        )  # fmt: skip
    except KeyError:  # FSDP, say, keeps plain tensors there
        kept = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        return layer.weight, layer.bias, norm.weight, norm.bias, *kept


def may_fold(*layers: nn.Module) -> bool:
    """Whether pairs of a layer and its norm can use folded weights: all are in eval, and need no gradients.

    Every pair is tested, since one in training forgets its weights: training may update running statistics without
    incrementing their version counters.
    """
    return None not in [foldable_sources(layer, norm) for layer, norm in zip(layers[::2], layers[1::2], strict=True)]


def foldable_sources(layer: Any, norm: Any) -> Sources | None:
    """The :func:`sources` of a pair that can use folded weights; None if it cannot."""
    given = sources(layer, norm)
    weight, _, _, _, mean, variance, _ = given
    if norm.training or mean is None or variance is None:
        if not torch.compiler.is_compiling():  # Compiled code increments the counters.
            forget(norm)
        return None
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return None
    groups = layer.groups if isinstance(layer, _ConvTransposeNd) else 0
    return given if (weight.shape[1] * groups if groups else weight.shape[0]) == norm.num_features else None


@fresh
def folded(
    layer: Any,
    norm: Any,
    x: Tensor,
    residual: Tensor | None = None,
    act: str | None = None,
    overwritten: str | None = None,
) -> Tensor:
    """act(norm(layer(x)) + residual), in eval, as one layer.

    Args:
        layer, norm: a pair for which :func:`may_fold` is True.
        x: the input.
        residual, act, overwritten: as for :func:`layer_and_more`.
    """
    if x.dim() != layer.weight.dim():  # BatchNorm would take other channels.
        return join(norm(layer(x)), residual, act, overwritten)
    weight, bias = folded_weights(layer, norm)
    return layer_and_more(layer, x, weight, bias, residual, act, overwritten)


def folded_and_more(
    layer: Any,
    norm: Any,
    after: tuple[nn.Module, ...],
    x: Tensor,
    residual: Tensor | None = None,
    act: str | None = None,
    overwritten: str | None = None,
) -> Tensor:
    """:func:`folded` for a norm that calls children of its own on its result, such as an activation."""
    if x.dim() != layer.weight.dim():
        return join(norm(layer(x)), residual, act, overwritten)
    own = activations(after)
    if own == []:
        return folded(layer, norm, x, residual, act, overwritten)
    if own is not None and len(own) == 1:
        return join(folded(layer, norm, x, act=own[0]), residual, act, overwritten)
    y = folded(layer, norm, x)
    for child in after:
        y = child(y)
    return join(y, residual, act, overwritten)


@fresh
def folded_sum(
    layer: Any,
    norm: Any,
    x: Tensor,
    other_layer: Any,
    other_norm: Any,
    other_x: Tensor,
    act: str | None = None,
    overwritten: str | None = None,
) -> Tensor:
    """act(norm(layer(x)) + other_norm(other_layer(other_x))), in eval: where a kernel adds the biases, it adds both."""
    weight, bias = folded_weights(layer, norm)
    other_weight, other_bias = folded_weights(other_layer, other_norm)
    if adds_bias(layer, x, weight, bias) and adds_bias(other_layer, other_x, other_weight, other_bias):
        residual = convolve(other_layer, other_x, other_weight, None)
        return layer_and_more(layer, x, weight, bias + other_bias, residual, act, overwritten)
    residual = folded(other_layer, other_norm, other_x)
    return folded(layer, norm, x, residual, act, overwritten)


def activations(children: tuple[nn.Module, ...]) -> list[str] | None:
    """The activations that these children compute in turn, by name; None if one of them is unknown."""
    kinds = [type(child) for child in children if type(child) is not nn.Identity]
    known = all(kind in ACTIVATIONS for kind in kinds) and not any("forward" in vars(child) for child in children)
    return [ACTIVATIONS[kind] for kind in kinds] if known and no_hooks(*children) else None


def computing_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a layer uses its weight.

    Autocast would cast a folded weight in every call, since it only caches the casts of leaves that require a gradient.
    """
    kind = weight.device.type
    if torch.compiler.is_compiling() or weight.dtype is torch.float64 or not autocasts(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Folded:
    """Folded weights by their dtype, and the tensors they were computed from.

    The aliases keep the memory of the sources alive. So a new address shows that ``tensor.data`` was assigned, which no
    version counter shows.
    """

    layer: ReferenceType[nn.Module]
    eps: float
    sources: Sources
    aliases: Sources
    states: list[tuple[int, int, torch.dtype]]
    weights: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def fits(self, layer: nn.Module, norm: _BatchNorm, given: Sources) -> bool:
        same = self.layer() is layer and self.eps == norm.eps and all(map(operator.is_, given, self.sources))
        return same and self.states == states(given)


def states(given: Sources) -> list[tuple[int, int, torch.dtype]]:
    """The version counter, the address and the dtype of each source that is there."""
    return [(t._version, t.data_ptr(), t.dtype) for t in given if t is not None]


_folded: WeakKeyDictionary[nn.Module, Folded] = WeakKeyDictionary()
#: Layers inside of modules that FSDP2 shards.
_gathered: WeakSet[nn.Module] = WeakSet()


def is_gathered(layer: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of a layer for each forward: their version counters do not show it, and on a
    GPU they often come to the same address again."""
    if layer not in _gathered:
        states: Any = sys.modules.get("torch.distributed._composable_state")
        for module in [*getattr(states, "_module_state_mapping", ())]:
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                _gathered.update(module.modules())
    return layer in _gathered


def forget(norm: nn.Module) -> None:
    """Free the folded weights of a norm."""
    _folded.pop(norm, None)


def folded_layer(norm: nn.Module) -> nn.Module | None:
    """The layer that there are folded weights of this norm for."""
    kept = _folded.get(norm)
    return None if kept is None else kept.layer()


def folded_tensors(*layers: Any) -> list[Tensor] | None:
    """Weight and bias of each pair of a layer and its norm, outside of traces and transforms; None where
    :func:`may_fold` is False, and where a norm follows another layer: the guard of one block is asked about others,
    which may have the same names in another order."""
    pairs = list(zip(layers[::2], layers[1::2], strict=True))
    found: list[Any] = [foldable_sources(layer, norm) for layer, norm in pairs]
    if None in found:
        return None
    tensors: list[Tensor] = []
    for (layer, norm), given in zip(pairs, found, strict=True):
        kept = _folded.get(norm)
        if kept is not None and kept.layer() is not layer:
            return None
        tensors += kept_weights(layer, norm, given, kept)
    return tensors


def folded_weights(layer: Any, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The weight, as the layer uses it, and the bias of the folded layer."""
    given = sources(layer, norm)
    if traced():
        return fold(layer, norm, computing_dtype(given[0]))
    return kept_weights(layer, norm, given, _folded.get(norm))


def kept_weights(layer: Any, norm: _BatchNorm, given: Sources, kept: Folded | None) -> tuple[Tensor, Tensor]:
    """:func:`folded_weights`, recomputed when a source has changed."""
    dtype = computing_dtype(given[0])
    if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return fold_outside(layer, norm, dtype)  # A replay follows the parameters.
    if kept is None or not kept.fits(layer, norm, given):
        if any(tensor is not None and tensor.is_inference() for tensor in given):  # They have no version counters.
            return fold(layer, norm, dtype)
        if is_gathered(layer):
            forget(norm)
            return fold_outside(layer, norm, dtype)
        with torch.no_grad(), torch.inference_mode(False):
            aliases = tuple(tensor.detach() if tensor is not None else None for tensor in given)
        kept = _folded[norm] = Folded(ref(layer), norm.eps, given, aliases, states(given))
    if dtype not in kept.weights:
        kept.weights[dtype] = fold_outside(layer, norm, dtype)
    return kept.weights[dtype]


def traced() -> bool:
    """Whether this call is traced or transformed, so that its tensors must not outlive it."""
    return bool(torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active())


def fold_outside(layer: nn.Module, norm: _BatchNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`fold` outside of inference mode: a region takes no other tensors than those that it was recorded with."""
    with torch.no_grad(), torch.inference_mode(False):
        return fold(layer, norm, dtype)


def fold(layer: nn.Module, norm: _BatchNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The folded weight, in that dtype, and bias, computed in float32 or wider and rounded once."""
    weight, bias, gain, shift, mean, variance, _ = sources(layer, norm)
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(variance.to(wide) + norm.eps)
    if gain is not None:
        scale = scale * gain.to(wide)
    kernel = [1] * (weight.dim() - 2)
    if isinstance(layer, _ConvTransposeNd):  # (in, out / groups, *kernel), the groups in the first one
        by_group = weight.to(wide).unflatten(0, (layer.groups, -1))
        scaled = (by_group * scale.view(layer.groups, 1, -1, *kernel)).flatten(0, 1)
    else:
        scaled = weight.to(wide) * scale.view(-1, 1, *kernel)
    offset = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    offset = offset * scale
    if shift is not None:
        offset = offset + shift.to(wide)
    return scaled.to(dtype), offset.to(weight.dtype)
