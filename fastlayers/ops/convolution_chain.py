"""Convolutions with their batch_norms, one after the other, under autocast: a block of a network as one Function.

A bottleneck of a ResNet, an inverted residual of an EfficientNet with its gate. The kernels are those of the steps.
What is gained is the host's time, as in :mod:`fastlayers.ops.autocast`: one node of autograd and one raw op each way,
one launch that casts all weights and one that casts their gradients. In inference, where the norms are folded into the
convolutions, one raw op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import autocast, batch_norm, dispatch
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE, NORM_CODES
from fastlayers.ops.convolution_norm import result_shape
from fastlayers.ops.dispatch import Gradients

#: What is added to the result of the last norm, as the kernels number it.
SUMS = {None: 0, "x": 1, "shortcut": 2}
#: Of a step: stride, padding and dilation, two each, groups, act.
INTS = 8
#: Of what computes a gate: those that autocast leaves in its dtype and that take no parameters.
GATE_ACTS = frozenset({"relu", "silu", "gelu", "gelu_tanh", "hardswish", "relu6", "sigmoid"})


class Gate(NamedTuple):
    """x·end(second(act(first(mean of x)))) after a step, of two 1x1 convolutions with a bias."""

    after: int
    first: Any
    act: str
    second: Any
    end: str


class Plan(NamedTuple):
    """What a chain is but for its tensors, as the raw ops take it; the steps with the shortcut's at the end."""

    ints: list[int]
    floats: list[float]
    about: list[int]

    @property
    def steps(self) -> int:
        return len(self.ints) // INTS

    @property
    def length(self) -> int:
        """Without the shortcut's."""
        return self.steps - (self.about[0] == SUMS["shortcut"])

    def act(self, step: int) -> int:
        return self.ints[INTS * step + 7]

    def anew(self, step: int) -> bool:
        """Whether the backward computes the activation's argument anew, with the norm's bias."""
        packed = self.about[0] and step == self.length - 1 and self.act(step) == batch_norm.RELU
        return self.act(step) != 0 and not packed


class _ConvolutionChain(torch.autograd.Function):
    """Keeps x, of each step the weight as a half and what convolution and norm keep, and of a gate its products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *parameters, (plan, statistics, kernels) = rest
        steps = plan.steps
        weights, of_gate = parameters[: 3 * steps], parameters[3 * steps :]
        y, *kept = kernels.convolution_chain_autocast(x, weights, of_gate, statistics, *plan)
        norms = []
        for step in range(steps):
            norms += weights[3 * step + 1 : 3 * step + (3 if plan.anew(step) else 2)]
        ctx.save_for_backward(x, *kept, *norms)
        ctx.given, ctx.rest = autocast.Given(*parameters), (plan, kernels, len(kept))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        plan, kernels, count = ctx.rest
        x, *rest = ctx.saved_tensors
        if dispatch.needs_double_backward(dy):
            found = autocast.differentiate(partial(composed, plan), ctx.given, ctx.needs_input_grad[:-1], x, dy)
        else:
            found = kernels.convolution_chain_autocast_backward(
                dy, x, rest[:count], rest[count:], plan.ints, plan.about, ctx.needs_input_grad[0], kernels.apart
            )
        dx, *of_parameters = found
        return dx if ctx.needs_input_grad[0] else None, *of_parameters, None


_record = dispatch.record_of(_ConvolutionChain)


@autocast.FAMILY.graph_op("convolution_chain")
def _in_graph(
    raw: Any, x: Tensor, parameters: Sequence[Tensor], statistics: Sequence[Tensor], ints: Sequence[int],
    floats: Sequence[float], about: Sequence[int],
) -> Tensor:  # fmt: skip
    kernels = SimpleNamespace(
        apart=True,
        convolution_chain_autocast=partial(_functional, raw),
        convolution_chain_autocast_backward=raw.convolution_chain_autocast_backward,
    )
    return _ConvolutionChain.apply(x, *parameters, (Plan([*ints], [*floats], [*about]), statistics, kernels))


def _functional(
    kernels: Any, x: Tensor, weights: list[Tensor], of_gate: list[Tensor], statistics: list[Tensor], ints: list[int],
    floats: list[float], about: list[int],
) -> list[Tensor]:  # fmt: skip
    """The forward by ops that AOTAutograd can make functional: none that gives tensors writes others."""
    steps = len(ints) // INTS
    found = kernels.convolution_chain_moments(x, weights, of_gate, ints, floats, about)
    for step, moments in enumerate(found[-steps:]):
        mean, var, batches = statistics[3 * step : 3 * step + 3]
        torch.ops.fastlayers.batch_norm_update_(mean, var, batches, moments, floats[2 * step])
    return found[:-steps]


def composed(plan: Plan, x: Tensor, *parameters: Tensor) -> Tensor:
    """The chain in torch's operations, the convolutions in x's dtype; the running statistics stay as they are."""
    low, steps = x.dtype, plan.steps

    def step(h: Tensor, at: int, residual: Tensor | None = None) -> Tensor:
        weight, gain, shift = parameters[3 * at : 3 * at + 3]
        *sizes, groups, act = plan.ints[INTS * at : INTS * (at + 1)]
        z = F.conv2d(h, weight.to(low), None, sizes[:2], sizes[2:4], sizes[4:], groups)
        y = F.batch_norm(z.float(), None, None, gain, shift, True, 0.0, plan.floats[2 * at + 1])
        return BY_CODE[act].function(y if residual is None else y + residual.float()).to(low)

    added, gated, gate_act, gate_end = plan.about
    h = x
    for at in range(plan.length):
        residual = None
        if at == plan.length - 1 and added:
            residual = x if added == SUMS["x"] else step(x, steps - 1)
        h = step(h, at, residual)
        if at == gated:
            first, bias, second, bias2 = (t.to(low) for t in parameters[3 * steps :])
            mean = h.mean((2, 3), keepdim=True)
            inside = BY_CODE[gate_act].function(F.conv2d(mean, first, bias))
            h = h * BY_CODE[gate_end].function(F.conv2d(inside, second, bias2))
    return h


def convolution_chain(
    x: Any, layers: tuple[Any, ...], acts: tuple[str | None, ...], added: str | None, gate: Gate | None
) -> Tensor | None:
    """What a chain of Conv2d and BatchNorm2d in training gives; None where this has no kernels for it.

    Args:
        x: images.
        layers: of each step the convolution and the norm, those of a shortcut at the end.
        acts: the activation of each step.
        added: what is added before the last activation: "x", or the "shortcut" of x.
        gate: what stands between two of the steps.
    """
    if (
        not isinstance(x, Tensor)
        or x.dim() != 4
        or x.shape[0] < 2  # of one there might be one value in a channel, which is an error
        or x.numel() == 0
        or not torch.is_grad_enabled()
        or (added == "x" and x.dtype is torch.float32)  # which torch adds as it is
        or (added is not None and acts[-1 - (added == "shortcut")] not in (None, "relu"))
        or not (x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous())
    ):
        return None
    ints: list[int] = []
    floats: list[float] = []
    parameters: list[Tensor] = []
    statistics: list[Tensor] = []
    # All in one loop, for this is the host's time. Where layers do not fit each other there is an error in any case,
    # but for sums and products, which torch would broadcast.
    for place, act in enumerate(acts):
        layer, norm = layers[2 * place : 2 * place + 2]
        of_layer, of_norm, buffers = layer._parameters, norm._parameters, norm._buffers
        weight, gain, shift = of_layer.get("weight"), of_norm.get("weight"), of_norm.get("bias")
        mean, var, batches = (
            buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
        )  # fmt: skip
        options, code = autocast.options_of(layer), ACTIVATIONS[act].code
        if (
            not norm.training
            or not norm.track_running_stats
            or norm.momentum is None
            or norm.eps <= 0
            or code >= NORM_CODES
            or options is None
            or of_layer.get("bias") is not None
            or weight is None
            or gain is None
            or shift is None
            or mean is None
            or var is None
            or batches is None
            or not (weight.requires_grad and gain.requires_grad and shift.requires_grad)
            or not (type(mean) is type(var) is Tensor and mean.dtype is var.dtype is torch.float32)
            or not batch_norm.is_count(batches, x)
        ):
            return None
        stride, padding, dilation, groups = options
        ints += (*stride, *padding, *dilation, groups, code)
        floats += norm.momentum, norm.eps
        parameters += weight, gain, shift
        statistics += mean, var, batches
    about = [SUMS[added], -1, 0, 0]
    if gate is not None:
        of_gate = _parameters_of(gate, parameters[3 * gate.after].shape[0])
        if of_gate is None or not all(t.requires_grad for t in of_gate):
            return None
        parameters += of_gate
        about[1:] = gate.after, ACTIVATIONS[gate.act].code, ACTIVATIONS[gate.end].code
    if added is not None and not _adds_up(x.shape, layers, added):
        return None
    kernels = autocast.block_kernels_for(x, *parameters)
    if kernels is None:
        return None
    if torch.compiler.is_compiling():
        return _in_graph(x.to(autocast.dtype_of(x)), parameters, statistics, ints, floats, about)
    rest = Plan(ints, floats, about), statistics, kernels
    return _record(autocast.autocast_input(x), *map(dispatch.unwrap, parameters), rest)


def folded_chain(
    x: Tensor, layers: tuple[Any, ...], acts: list[str | None], residual: Tensor | None, gate: Gate | None,
    weights_of: Callable[[Any, Any, torch.dtype], tuple[Tensor, Tensor]],
) -> Tensor | None:  # fmt: skip
    """Conv2d with norms that are folded into them, where nothing is recorded; None where this has no kernels for it.

    Args:
        x: images.
        layers: of each step the convolution and the norm.
        acts: the activation of each step.
        residual: what is added before the last one.
        gate: what stands between two of the steps.
        weights_of: gives of a step the folded weight, in a dtype, and the bias.
    """
    if (
        torch.compiler.is_compiling()
        or x.dim() != 4
        or x.numel() == 0
        or not (x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous())
        or (residual is not None and acts[-1] not in (None, "relu"))
    ):
        return None
    ints: list[int] = []
    for layer, act in zip(layers[::2], acts, strict=True):
        options, code = autocast.options_of(layer), ACTIVATIONS[act].code
        if code >= NORM_CODES or options is None:
            return None
        if layer.weight.dtype is not torch.float32 or not dispatch.is_plain(layer.weight):
            return None
        stride, padding, dilation, groups = options
        ints += (*stride, *padding, *dilation, groups, code)
    about, of_gate = [SUMS[None if residual is None else "x"], -1, 0, 0], list[Tensor]()
    if gate is not None:
        found = _parameters_of(gate, layers[2 * gate.after].out_channels)
        if found is None:
            return None
        about[1:] = gate.after, ACTIVATIONS[gate.act].code, ACTIVATIONS[gate.end].code
        of_gate = [*map(dispatch.unwrap, found)]
    low = torch.get_autocast_dtype(x.device.type)
    if dispatch.wants_gradient(x, residual, *of_gate) or not (residual is None or _is_sum(residual, x, layers, low)):
        return None
    kernels = autocast.block_kernels_for(x, *of_gate)
    if kernels is None:
        return None
    weights = [t for pair in zip(layers[::2], layers[1::2], strict=True) for t in weights_of(*pair, low)]
    return kernels.convolution_chain_folded(autocast.autocast_input(x), weights, of_gate, residual, ints, about)


def _is_sum(residual: Tensor, x: Tensor, layers: tuple[Any, ...], low: torch.dtype) -> bool:
    """Whether a residual is as the result of these layers, so that torch would give the sum its dtype and layout."""
    if not (dispatch.is_plain(residual) and residual.dtype is low and residual.device == x.device):
        return False
    if not all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, residual)):
        return False
    return _shape_behind(layers, x.shape) == residual.shape


def _parameters_of(gate: Gate, channels: int) -> list[Tensor] | None:
    """Those of the layers of a gate, where they are products of the channels."""
    found: list[Tensor] = []
    for layer in (gate.first, gate.second):
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if (
            weight is None
            or bias is None
            or layer.groups != 1
            or layer.kernel_size != (1, 1)
            or layer.stride != (1, 1)
            or layer.padding not in ((0, 0), "valid", "same")
            or layer.padding_mode != "zeros"
        ):
            return None
        found += weight, bias
    return found if len(bias) == channels and gate.act in GATE_ACTS and gate.end in GATE_ACTS else None


def _adds_up(given: tuple[int, ...], layers: tuple[Any, ...], added: str) -> bool:
    """Whether what is added has the shape of what it is added to."""
    if added == "shortcut":
        *layers, layer, _ = layers  # type: ignore[assignment]
        return _shape_behind(layers, given) == result_shape(layer, given)
    return _shape_behind(layers, given) == given


def _shape_behind(layers: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of what steps give for images of this one."""
    for layer in layers[::2]:
        shape = result_shape(layer, shape)
    return shape


def _fake(
    x: Tensor, weights: list[Tensor], of_gate: list[Tensor], statistics: list[Tensor], ints: list[int],
    floats: list[float], about: list[int],
) -> list[Tensor]:  # fmt: skip
    plan = Plan(ints, floats, about)
    steps, length = plan.steps, plan.length
    kept: list[Tensor] = []
    results: list[Tensor] = []
    gate: list[Tensor] = []
    packs = about[0] != 0 and plan.act(length - 1) == batch_norm.RELU
    bits = x.new_empty(0)
    h = x
    for step in range(steps):
        *sizes, groups, _ = ints[INTS * step : INTS * (step + 1)]
        low = torch.empty_like(weights[3 * step], dtype=x.dtype)
        z = F.conv2d(x if step == length else h, low, None, sizes[:2], sizes[2:4], sizes[4:], groups)
        gain, shift = weights[3 * step + 1 : 3 * step + 3]
        y, stats, packed = batch_norm.Kernels.batch_norm_train(
            z, None, None, gain, shift, 0.0, 0.0, None, 0, packs and step == length - 1
        )
        kept += low, z, stats
        if step < length:
            h = y
            bits = packed if packs else bits
        if step < length - 1:
            results.append(y)
        if step == about[1]:
            gate = [torch.empty_like(t, dtype=x.dtype) for t in of_gate]
            images, channels = y.shape[:2]
            mean = y.new_empty((images, channels, 1, 1))
            inner = y.new_empty((images, of_gate[0].shape[0]))
            gate += mean, inner, y.new_empty((images, channels)), torch.empty_like(mean)
    return [h, *kept, *results, bits, *gate]


def _fake_backward(
    dy: Tensor, x: Tensor, kept: list[Tensor], norms: list[Tensor], ints: list[int], about: list[int], dx: bool,
    apart: bool,
) -> list[Tensor]:  # fmt: skip
    plan = Plan(ints, [], about)
    found = [torch.empty_like(x) if dx else x.new_empty(0)]
    last = x.is_contiguous(memory_format=torch.channels_last)
    for step in range(plan.steps):
        low = kept[3 * step]
        wide = torch.empty_like(low, dtype=torch.float32)
        found.append(wide.contiguous(memory_format=torch.channels_last) if last else wide)  # as torch lays them out
        found += (low.new_empty(low.shape[0], dtype=torch.float32) for _ in range(2))
    if about[1] >= 0:
        found += (torch.empty_like(t, dtype=torch.float32) for t in kept[-8:-4])
    return found


def _fake_moments(
    x: Tensor, weights: list[Tensor], of_gate: list[Tensor], ints: list[int], floats: list[float], about: list[int]
) -> list[Tensor]:
    kept = _fake(x, weights, of_gate, [], ints, floats, about)
    return [*kept, *(torch.empty_like(kept[3 + 3 * step]) for step in range(len(ints) // INTS))]  # as the norms' stats


def _fake_folded(x: Tensor, weights: list[Tensor], *args: Any) -> Tensor:
    raise NotImplementedError("no graph holds a folded chain")


class Kernels(dispatch.Kernels):
    convolution_chain_autocast = staticmethod(_fake)
    convolution_chain_moments = staticmethod(_fake_moments)
    convolution_chain_autocast_backward = staticmethod(_fake_backward)
    convolution_chain_folded = staticmethod(_fake_folded)


autocast.FAMILY.declare(Kernels, csrc_only=tuple(vars(Kernels)))
