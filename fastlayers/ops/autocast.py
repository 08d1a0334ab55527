"""Linear layers, MLPs and convolutions under autocast, with low-precision inputs and float32 parameters.

torch casts each parameter and casts its gradient back: two launches and one autograd node a parameter. In ViT-B/16 that
was a quarter of the host time of a CPU-bound step. Here one launch casts the parameters of a layer, the product and the
sum write float32 gradients, and each op is one raw call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import guard, modes, pairs, raw_ops
from fastlayers.ops.activations import ACTIVATIONS, Activation
from fastlayers.ops.pairs import Gradients, Needs
from fastlayers.ops.reference import LOW_PRECISION, autocasts


class Kernels(raw_ops.Kernels):
    @staticmethod
    def linear_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty_like(weight, dtype=x.dtype)

    @staticmethod
    def linear_autocast_backward(
        dy: Tensor, x: Tensor, low: Tensor, dx: bool, dweight: bool, dbias: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.empty_like(x) if dx else x.new_empty(0),
            low.new_empty(low.shape if dweight else 0, dtype=torch.float32 if dweight else low.dtype),
            low.new_empty(low.shape[0] if dbias else 0, dtype=torch.float32 if dbias else low.dtype),
        )

    @staticmethod
    def mlp_autocast(
        x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None, act: int, first: float,
        second: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        product = x.new_empty((x.numel() // x.shape[-1], weight.shape[0]))
        low, low_bias, low2 = (torch.empty_like(t, dtype=x.dtype) for t in (weight, bias, weight2))
        return x.new_empty((*x.shape[:-1], weight2.shape[0])), product, low, low_bias, low2

    @staticmethod
    def mlp_autocast_backward(
        dy: Tensor, x: Tensor, product: Tensor, low: Tensor, low_bias: Tensor, low2: Tensor, act: int, first: float,
        second: float, dx: bool, dweight: bool, dbias: bool, dweight2: bool, dbias2: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        def empty(shape: torch.Size, needed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
            return x.new_empty(shape if needed else 0, dtype=dtype if needed else x.dtype)

        return (
            empty(x.shape, dx, x.dtype), empty(low.shape, dweight), empty(low_bias.shape, dbias),
            empty(low2.shape, dweight2), empty(low2.shape[:1], dbias2),
        )  # fmt: skip

    @staticmethod
    def convolution_autocast(
        x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
        groups: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = F.conv2d(x, weight.to(x.dtype), None, stride, padding, dilation, groups)
        return y, torch.empty_like(weight, dtype=x.dtype)

    @staticmethod
    def convolution_autocast_backward(
        dy: Tensor, x: Tensor, low: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
        groups: int, dx: bool, dweight: bool, dbias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return (
            torch.empty_like(x) if dx else x.new_empty(0),
            torch.empty_like(low, dtype=torch.float32) if dweight else low.new_empty(0),
            low.new_empty(low.shape[0] if dbias else 0, dtype=torch.float32 if dbias else low.dtype),
        )


FAMILY = raw_ops.Family("autocast", Kernels)

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled  # Takes half as long as for a device.

#: The activations of an MLP: all that autocast leaves in its own dtype.
MLP_ACTIVATIONS = frozenset(ACTIVATIONS) - {None, "softplus"}

#: Of F.conv2d: stride, padding, dilation, groups.
Options: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def dtype_of(t: Tensor) -> torch.dtype:
    """dtype in which a linear layer or a convolution takes a tensor, autocast included."""
    device = t.device.type
    if autocasts(device) and t.dtype in guard.FLOATING and t.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return t.dtype


def kernels_for(x: Tensor, *parameters: Tensor | None) -> Any:
    """The kernels, if autocast casts the float32 parameters, and x where it is float32 too; otherwise None."""
    if torch.compiler.is_compiling() or not _is_any_autocast_enabled() or modes.is_watched():
        return None
    device = x.device
    if device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device.type):
        return None
    low = torch.get_autocast_dtype(device.type)
    if low not in LOW_PRECISION or (x.dtype is not low and x.dtype is not torch.float32):
        return None
    index = x.get_device()
    for t in parameters:
        if t is not None and not (
            t.dtype is torch.float32
            and type(t) in guard.PLAIN
            and t.get_device() == index
            and (t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)))
        ):
            return None
    return FAMILY.kernels_for(x)


class Given:
    """The parameters that a Function was given, for the derivative of its backward alone.

    As saved tensors they could not be changed before any backward, although a first backward needs only their casts.
    """

    __slots__ = ("parameters", "versions")

    def __init__(self, *parameters: Tensor | None) -> None:
        self.parameters = parameters
        self.versions = [version_of(t) for t in parameters]

    def forget(self, places: Sequence[int]) -> None:
        """Let go of some, which are kept elsewhere until :meth:`remember`."""
        if places:
            self.parameters = tuple(None if i in places else t for i, t in enumerate(self.parameters))

    def remember(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Take back those that were kept elsewhere, which may be equal ones that were computed again."""
        for i, t in zip(places, tensors, strict=True):
            self.parameters = (*self.parameters[:i], t, *self.parameters[i + 1 :])
            self.versions[i] = version_of(t)

    def unchanged(self) -> Gradients:
        """The parameters.

        Raises:
            RuntimeError: one was written since.
        """
        for t, version in zip(self.parameters, self.versions, strict=True):
            if t is not None and version_of(t) != version:
                raise RuntimeError(
                    f"to differentiate the backward of a layer, its parameter of shape {tuple(t.shape)} is needed as "
                    f"it was in the forward, and it was modified in place since: it is at version {t._version}; "
                    f"expected {version}"
                )
        return self.parameters


def version_of(t: Tensor | None) -> int:
    """How often a tensor was written; -1 for one of inference mode, of which torch does not know it."""
    return -1 if t is None or t.is_inference() else t._version


def differentiate(function: Callable[..., Tensor], given: Given, needs: Needs, x: Tensor, dy: Tensor) -> Gradients:
    """The gradients of ``function(x, *parameters)`` that are needed."""
    return pairs.differentiate(function, (x, *given.unchanged()), needs, dy)


# -- a linear layer ----------------------------------------------------------------------------------------------------


class Linear(pairs.Pair, inputs=3):
    """Of rows in low precision. Keeps them and the weight's cast."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        y, low = kernels.linear_autocast(x, weight, bias)
        return y, (x, low), (Given(weight, bias),)

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, low: Tensor, given: Given) -> Gradients:
        return kernels.linear_autocast_backward(dy, x, low, *needs)

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, x: Tensor, low: Tensor, given: Given) -> Gradients:
        return differentiate(_linear, given, needs, x, dy)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """F.linear(x, weight, bias) under autocast; None where this has no kernels for it."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    kernels = kernels_for(x, weight, bias)
    if kernels is None or not _are_rows(x, weight, bias):
        return None
    return Linear.run(kernels, autocast_input(x), weight, bias)


def _are_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are contiguous rows, and the parameters of a linear layer that takes them."""
    return (
        x.is_contiguous()
        and x.dim() >= 2
        and x.numel() > 0
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def autocast_input(x: Tensor) -> Tensor:
    """x as autocast gives it to a product or a convolution."""
    x = pairs.unwrap(x)
    return x.to(dtype_of(x)) if x.dtype is torch.float32 else x


# -- two of them -------------------------------------------------------------------------------------------------------


class Mlp(pairs.Pair, inputs=5):
    """linear(act(linear(x))). Keeps x, the first product without its bias, and the casts of the other parameters.

    Backward recomputes the result of the activation, which is as large as the product.
    """

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None,
        act: Activation,
    ) -> Any:  # fmt: skip
        y, *kept = kernels.mlp_autocast(x, weight, bias, weight2, bias2, act.code, *act.defaults)
        return y, (x, *kept), (Given(weight, bias, weight2, bias2), act)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, product: Tensor, low: Tensor, low_bias: Tensor,
        low2: Tensor, given: Given, act: Activation,
    ) -> Gradients:  # fmt: skip
        return kernels.mlp_autocast_backward(dy, x, product, low, low_bias, low2, act.code, *act.defaults, *needs)

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, x: Tensor, *args: Any) -> Gradients:
        *_, given, act = args
        return differentiate(partial(_mlp, act), given, needs, x, dy)


def _mlp(act: Activation, x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """linear(act(linear(x))) in torch's operations, in x's dtype."""
    return _linear(act.function(_linear(x, weight, bias)), weight2, bias2)


def mlp(x: Tensor, weight: Tensor, bias: Tensor, act: str, weight2: Tensor, bias2: Tensor | None) -> Tensor | None:
    """linear(act(linear(x, weight, bias)), weight2, bias2) under autocast; None where this has no kernels for it."""
    kernels = kernels_for(x, weight, bias, weight2, bias2)
    if (
        kernels is None
        or act not in MLP_ACTIVATIONS
        or not guard.wants_gradient(x, weight, bias, weight2, bias2)
        or not _are_rows(x, weight, bias)
        or weight2.shape[1:] != bias.shape
        or (bias2 is not None and bias2.shape != weight2.shape[:1])
    ):
        return None
    return Mlp.run(kernels, autocast_input(x), weight, bias, weight2, bias2, ACTIVATIONS[act])


# -- a convolution -----------------------------------------------------------------------------------------------------


class Convolution(pairs.Pair, inputs=3):
    """Of images in low precision. Keeps them and the weight's cast."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, options: Options) -> Any:
        y, low = kernels.convolution_autocast(x, weight, bias, *options)
        return y, (x, low), (Given(weight, bias), options)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, low: Tensor, given: Given, options: Options
    ) -> Gradients:
        for_x, for_weight, for_bias = needs
        summed = for_bias and dy.is_contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = kernels.convolution_autocast_backward(dy, x, low, *options, for_x, for_weight, summed)
        if for_bias and not summed:
            dbias = dy.sum((0, 2, 3), dtype=torch.float32)
        return dx, dweight, dbias

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, low: Tensor, given: Given, options: Options
    ) -> Gradients:
        return differentiate(partial(_convolution, options), given, needs, x, dy)


def _convolution(options: Options, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), *options)


def options_of(layer: Any) -> Options | None:
    """The options of a convolution that pads with zeros, None where one of them is not a pair."""
    stride, padding, dilation = layer.stride, layer.padding, layer.dilation
    if not (
        type(stride) is type(padding) is type(dilation) is tuple and len(stride) == len(padding) == len(dilation) == 2
    ):
        return None
    return (stride, padding, dilation, layer.groups) if layer.padding_mode == "zeros" else None


def convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor | None:
    """A Conv2d with this weight and bias, under autocast; None where this has no kernels for it."""
    options = options_of(layer)
    if (
        options is None
        or layer.transposed
        or x.dim() != 4
        or weight.dim() != 4
        or x.numel() == 0
        or bias.shape != weight.shape[:1]
        or not guard.wants_gradient(weight, bias)
    ):
        return None
    kernels = kernels_for(x, weight, bias)
    if kernels is None:
        return None
    return Convolution.run(kernels, autocast_input(x), weight, bias, options)


# -- what it is given is used again ------------------------------------------------------------------------------------


class _CastFork(torch.autograd.Function):
    """(x in low precision, x); one pass adds their gradients. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a result that nothing uses has no gradient, not one of zeros
        return x.to(dtype), x

    @staticmethod
    def backward(ctx: Any, dlow: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, None]:
        if dlow is None or dx is None:
            return dx if dlow is None else dlow.float(), None
        return dx + dlow, None


_record_fork = pairs.record_of(_CastFork)


def cast_fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x as a linear layer or a convolution takes it, x). The second result must not be written in place."""
    if x.dtype is torch.float32 and torch.is_grad_enabled() and x.requires_grad and kernels_for(x) is not None:
        return _record_fork(pairs.unwrap(x), dtype_of(x))
    return x, x
