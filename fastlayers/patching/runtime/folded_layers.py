"""What a folded forward calls: in eval, a BatchNorm and the convolution before it as one convolution.

A BatchNorm in eval multiplies each channel by a number and adds one, which the weight and bias of the convolution can
do as well. Nothing of the model is overwritten: parameters, buffers and state-dict keys stay as they are, and the
folded weights are kept beside it, made anew when something they come from has changed. As with :func:`patch_model` only
classes change, and the folded forward answers where it is right: in eval, where no gradient of the folded parameters is
wanted. A folded model that is trained trains as if it were not folded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from fastlayers.ops import convolution_chain as chains
from fastlayers.ops.convolution_chain import Gate
from fastlayers.patching.runtime.calls import join
from fastlayers.patching.runtime.checks import no_hooks
from fastlayers.patching.runtime.convolution import adds_bias, convolve, layer_and_more
from fastlayers.patching.runtime.convolution_chain import parted
from fastlayers.patching.runtime.traits import fresh
from fastlayers.patching.runtime.transformer_block import runs_under_autocast

__all__ = ["folded", "folded_and_more", "folded_chain", "folded_sum", "forget", "may_fold"]

#: Children of a norm that its kernel may stand for, by the name of the activation.
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}

#: weight and bias of the layer, then of the norm, its running mean and variance, and the count that training raises.
Sources: TypeAlias = tuple[Tensor | None, ...]


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
        return layer.weight, layer.bias, norm.weight, norm.bias, *kept  # type: ignore[return-value]


def may_fold(*layers: nn.Module) -> bool:
    """Whether folded weights answer for pairs of a layer and its norm: all in eval, and no gradient of theirs wanted.

    All pairs are asked: one in training forgets its weights, since training writes running statistics in ways that
    their version counters do not notice.
    """
    answers = [pair_may_fold(layer, norm) for layer, norm in zip(layers[::2], layers[1::2], strict=True)]
    return all(answers)


def pair_may_fold(layer: Any, norm: Any) -> bool:
    given = sources(layer, norm)
    weight, _, _, _, mean, variance, _ = given
    if norm.training or mean is None or variance is None:
        if not torch.compiler.is_compiling():  # compiled code writes buffers in ways that they do notice
            forget(norm)
        return False
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return False
    assert weight is not None
    groups = layer.groups if isinstance(layer, _ConvTransposeNd) else 0
    return bool((weight.shape[1] * groups if groups else weight.shape[0]) == norm.num_features)


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
        layer, norm: a pair that :func:`may_fold` approves of.
        x: what the layer is called with.
        residual, act, written: as :func:`layer_and_more` has them.
    """
    if x.dim() != layer.weight.dim():  # without a batch, or a sequence to a linear layer: not what BatchNorm would do
        return join(norm(layer(x)), residual, act, overwritten)
    weight, bias = folded_weights(layer, norm, computing_dtype(layer.weight))
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
    """:func:`folded`, of a norm that hands its result to children of its own: an activation, say."""
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
    weights = [
        folded_weights(*pair, computing_dtype(pair[0].weight)) for pair in ((layer, norm), (other_layer, other_norm))
    ]
    (weight, bias), (other_weight, other_bias) = weights
    if adds_bias(layer, x, weight, bias) and adds_bias(other_layer, other_x, other_weight, other_bias):
        residual = convolve(other_layer, other_x, other_weight, None)
        return layer_and_more(layer, x, weight, bias + other_bias, residual, act, overwritten)
    residual = folded(other_layer, other_norm, other_x)
    return folded(layer, norm, x, residual, act, overwritten)


def folded_chain(
    x: Tensor,
    *layers: Any,
    acts: tuple[str | None, ...],
    after: tuple[tuple[nn.Module, ...], ...],
    residual: Tensor | None = None,
    overwritten: str | None = None,
    gate: tuple[int, str, str] | None = None,
) -> Tensor:
    """Pairs that :func:`may_fold` approves of, one after the other, each a Conv2d and its norm.

    Args:
        layers: the pairs; and of a gate the module, and the two convolutions in it.
        acts: the activation behind each of them.
        after: the children that each norm hands its result to.
        residual, written: as :func:`folded` has them, of the last pair.
        gate: after which pair it stands, and its activations.
    """
    layers, of_gate, found = parted(layers, acts, gate)
    y = in_one(x, layers, acts, after, residual, found)
    if y is not None:
        return y
    for place, (layer, norm, act, children) in enumerate(zip(layers[::2], layers[1::2], acts, after, strict=True), 1):
        added = (residual, act, overwritten) if place == len(acts) else (None, act)
        x = folded_and_more(layer, norm, children, x, *added)
        if gate is not None and place == gate[0] + 1:
            x = of_gate[0](x)
    return x


def in_one(
    x: Any,
    layers: tuple[Any, ...],
    acts: tuple[str | None, ...],
    after: tuple[tuple[nn.Module, ...], ...],
    residual: Tensor | None,
    gate: Gate | None,
) -> Tensor | None:
    """The chain as one op; None where there is none for it."""
    if torch.compiler.is_compiling() or not runs_under_autocast(x):
        return None
    found: list[str | None] = []
    for children, act in zip(after, acts, strict=True):
        own = activations(children)
        if own is None or len(own) + (act is not None) > 1:
            return None
        found.append(own[0] if own else act)
    if own and residual is not None:  # the last norm activates before the sum
        return None
    return chains.folded_chain(x, layers, found, residual, gate, folded_weights)


def activations(children: tuple[nn.Module, ...]) -> list[str] | None:
    """The names of what these children compute one after the other; None where one has to be called for it."""
    kinds = [type(child) for child in children if type(child) is not nn.Identity]
    known = all(kind in ACTIVATIONS for kind in kinds) and not any("forward" in vars(child) for child in children)
    return [ACTIVATIONS[kind] for kind in kinds] if known and no_hooks(*children) else None


def computing_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the weight is cast to when a layer uses it.

    Autocast would cast a folded weight anew in every call: it keeps the casts of leaves that require a gradient alone.
    """
    kind = weight.device.type
    if torch.compiler.is_compiling() or weight.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Folded:
    """Folded weights by the dtype of the weight, and what they were made of.

    The aliases share the memory of the sources: while they hold it, a tensor at another address is another one even
    where somebody assigned ``tensor.data``, which no version counter sees.
    """

    layer: ReferenceType[nn.Module]
    eps: float
    sources: Sources
    aliases: Sources
    #: Of each source its version counter, its address and its dtype.
    states: tuple[tuple[int, int, torch.dtype] | None, ...]
    weights: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def fits(self, layer: nn.Module, norm: _BatchNorm, given: Sources) -> bool:
        if self.layer() is not layer or self.eps != norm.eps:
            return False
        for tensor, source, known in zip(given, self.sources, self.states, strict=True):
            if tensor is not source:
                return False
            if tensor is not None and (tensor._version, tensor.data_ptr(), tensor.dtype) != known:
                return False
        return True


_folded: WeakKeyDictionary[nn.Module, Folded] = WeakKeyDictionary()


def forget(norm: nn.Module) -> None:
    """Give the memory of folded weights back."""
    _folded.pop(norm, None)


def folded_weights(layer: nn.Module, norm: _BatchNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight, in that dtype, and bias of the folded layer; made anew where what they come from has changed."""
    given = sources(layer, norm)
    if observed(given):
        return fold(layer, norm, dtype)
    kept = _folded.get(norm)
    if kept is None or not kept.fits(layer, norm, given):
        if any(tensor is not None and tensor.is_inference() for tensor in given):  # they do not count their versions
            return fold(layer, norm, dtype)
        with torch.no_grad(), torch.inference_mode(False):
            aliases = tuple(tensor.detach() if tensor is not None else None for tensor in given)
        states = tuple((t._version, t.data_ptr(), t.dtype) if t is not None else None for t in given)
        kept = _folded[norm] = Folded(ref(layer), norm.eps, given, aliases, states)
    if dtype not in kept.weights:
        with torch.no_grad(), torch.inference_mode(False):
            kept.weights[dtype] = fold(layer, norm, dtype)
    return kept.weights[dtype]


def observed(given: Sources) -> bool:
    """Whether something traces, transforms or captures this call: what it sees must not outlive the call."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    return given[0].is_cuda and torch.cuda.is_current_stream_capturing()  # type: ignore[union-attr]


def fold(layer: nn.Module, norm: _BatchNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight, in that dtype, and bias of the one layer that computes both; in float32 at least, rounded once."""
    weight, bias, gain, shift, mean, variance, _ = sources(layer, norm)
    assert weight is not None
    assert mean is not None
    assert variance is not None  # may_fold says so
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(variance.to(wide) + norm.eps)
    if gain is not None:
        scale = scale * gain.to(wide)
    kernel = [1] * (weight.dim() - 2)
    if isinstance(layer, _ConvTransposeNd):  # (in, out / groups, *kernel): the groups lie along the first dimension
        by_group = weight.to(wide).unflatten(0, (layer.groups, -1))
        scaled = (by_group * scale.view(layer.groups, 1, -1, *kernel)).flatten(0, 1)
    else:
        scaled = weight.to(wide) * scale.view(-1, 1, *kernel)
    offset = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    offset = offset * scale
    if shift is not None:
        offset = offset + shift.to(wide)
    return scaled.to(dtype), offset.to(weight.dtype)
