"""Linear layers, MLPs and convolutions under autocast: of a half and float32 parameters, a Function each.

torch casts each parameter, and the gradient of each cast back: two launches a parameter and a node of autograd, which
for ViT-B/16 was a quarter of the host's time of a step, and that bounds the step. Here a layer's parameters are cast in
one launch, their gradients come in float32 from the product and from the sum, and each Function calls one raw op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import dispatch
from fastlayers.ops.activations import ACTIVATIONS, Activation
from fastlayers.ops.reference import HALF

FAMILY = dispatch.Family(
    "autocast",
    (
        "linear_autocast",
        "linear_autocast_backward",
        "mlp_autocast",
        "mlp_autocast_backward",
        "convolution_autocast",
        "convolution_autocast_backward",
        "convolution_norm_autocast",
        "convolution_norm_autocast_backward",
        "convnext_block_autocast",
        "convnext_block_autocast_backward",
    ),
    cpu=False,
    csrc_only=(
        "convolution_chain_autocast",
        "convolution_chain_moments",
        "convolution_chain_autocast_backward",
        "convolution_chain_folded",
        "transformer_block_autocast_open",
        "transformer_block_autocast_close",
        "transformer_block_autocast_close_backward",
        "transformer_block_autocast_open_backward",
    ),
)

#: Those of an MLP: all that autocast leaves in its dtype.
MLP_ACTIVATIONS = frozenset(ACTIVATIONS) - {None, "softplus"}

#: Of F.conv2d: stride, padding, dilation, groups.
Options: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def dtype_of(t: Tensor) -> torch.dtype:
    """dtype in which a linear layer or a convolution takes a tensor, autocast included."""
    device = t.device.type
    if t.dtype in dispatch.FLOATING and t.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return t.dtype


def kernels_for(x: Tensor, *parameters: Tensor | None) -> Any:
    """The kernels where autocast casts these from float32 to a half, of x only what is not there yet; else None."""
    if torch.compiler.is_compiling() or not _are_cast(x, *parameters):
        return None
    return FAMILY.serving(x)


def block_kernels_for(x: Tensor, *parameters: Tensor | None) -> Any:
    """The same for a whole block, which csrc alone has kernels for, and which graphs of torch.compile may hold.

    Of a graph no more than that it has some: what is put into it asks for them itself.
    """
    if torch.compiler.is_compiling():
        held = dispatch.graph_keeps_kernel(x) and dispatch.graph_holds_functions() and _are_cast(x, *parameters)
        return True if held else None
    kernels = kernels_for(x, *parameters)
    return kernels if kernels is not None and kernels.backend == "cuda" else None


def _are_cast(x: Tensor, *parameters: Tensor | None) -> bool:
    device = x.device
    if device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device.type):
        return False
    low = torch.get_autocast_dtype(device.type)
    if low not in HALF or (x.dtype is not low and x.dtype is not torch.float32):
        return False
    index = x.get_device()
    for t in parameters:
        if t is not None and not (
            t.dtype is torch.float32
            and type(t) in dispatch.PLAIN
            and t.get_device() == index
            and (t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)))
        ):
            return False
    return True


class Given:
    """The parameters that a Function was given, for the derivative of its backward alone.

    Kept as saved tensors they could not be changed before any backward, which needs no more than their casts.
    """

    __slots__ = ("parameters", "versions")

    def __init__(self, *parameters: Tensor | None) -> None:
        self.parameters = parameters
        self.versions = [0 if t is None else t._version for t in parameters]

    def unchanged(self) -> tuple[Tensor | None, ...]:
        """The parameters.

        Raises:
            RuntimeError: one was written since.
        """
        for t, version in zip(self.parameters, self.versions, strict=True):
            if t is not None and t._version != version:
                raise RuntimeError(
                    f"to differentiate the backward of a layer, its parameter of shape {tuple(t.shape)} is needed as "
                    f"it was in the forward, and it was modified in place since: it is at version {t._version}; "
                    f"expected {version}"
                )
        return self.parameters


def derivable(function: Callable[..., Tensor], ctx: Any, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    """The gradients of ``function(x, *parameters)`` that are wanted, through what autograd records of it."""
    given = (x, *ctx.given.unchanged())
    needs = ctx.needs_input_grad[: len(given)]
    with torch.enable_grad():
        # Of aliases: what is given may itself depend on what is given beside it.
        aliases = [t if t is None else t.view_as(t) for t in given]
        out = function(*aliases)
    wanted = [t for t, needed in zip(aliases, needs, strict=True) if t is not None and needed]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=True))
    return [next(found) if needed else None for needed in needs]


# -- a linear layer ----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Of rows in a half. Keeps them and the weight's cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: Any) -> Tensor:
        y, low = kernels.linear_autocast(x, weight, bias)
        ctx.save_for_backward(x, low)
        ctx.given, ctx.kernels = Given(weight, bias), kernels
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        if dispatch.differentiating(dy):
            return *derivable(_linear, ctx, x, dy), None
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dx, dweight, dbias = ctx.kernels.linear_autocast_backward(dy, x, low, for_x, for_weight, for_bias)
        return dx if for_x else None, dweight if for_weight else None, dbias if for_bias else None, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


_record_linear = dispatch.recorder(_Linear)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """F.linear(x, weight, bias) under autocast; None where this has no kernels for it."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    kernels = kernels_for(x, weight, bias)
    if kernels is None or not _are_rows(x, weight, bias):
        return None
    bias = bias if bias is None else dispatch.unwrap(bias)
    return _record_linear(lowered(x), dispatch.unwrap(weight), bias, kernels)  # type: ignore[no-any-return]


def _are_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are contiguous rows, and the parameters of a linear layer that takes them."""
    return (
        x.is_contiguous()
        and x.dim() >= 2
        and x.numel() > 0
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def lowered(x: Tensor) -> Tensor:
    """x as autocast hands it to a product or a convolution."""
    x = dispatch.unwrap(x)
    return x.to(dtype_of(x)) if x.dtype is torch.float32 else x


# -- two of them -------------------------------------------------------------------------------------------------------


class _Mlp(torch.autograd.Function):
    """linear(act(linear(x))). Keeps x, the first product without its bias, and the casts of the other parameters.

    The result of the activation is computed anew: it is as large as the product.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None, act: Activation,
        kernels: Any,
    ) -> Tensor:  # fmt: skip
        y, *kept = kernels.mlp_autocast(x, weight, bias, weight2, bias2, act.code, *act.defaults)
        ctx.save_for_backward(x, *kept)
        ctx.given, ctx.act, ctx.kernels = Given(weight, bias, weight2, bias2), act, kernels
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        act: Activation = ctx.act
        x, *kept = ctx.saved_tensors
        if dispatch.differentiating(dy):
            return *derivable(partial(mlp_of, act), ctx, x, dy), None, None
        needs = ctx.needs_input_grad[:5]
        found = ctx.kernels.mlp_autocast_backward(dy, x, *kept, act.code, *act.defaults, *needs)
        return *[gradient if needed else None for gradient, needed in zip(found, needs, strict=True)], None, None


def mlp_of(act: Activation, x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """linear(act(linear(x))) in torch's operations, in x's dtype."""
    return _linear(act.function(_linear(x, weight, bias)), weight2, bias2)


_record_mlp = dispatch.recorder(_Mlp)


def mlp(x: Tensor, weight: Tensor, bias: Tensor, act: str, weight2: Tensor, bias2: Tensor | None) -> Tensor | None:
    """linear(act(linear(x, weight, bias)), weight2, bias2) under autocast; None where this has no kernels for it."""
    kernels = kernels_for(x, weight, bias, weight2, bias2)
    if (
        kernels is None
        or act not in MLP_ACTIVATIONS
        or not dispatch.wants_gradient(x, weight, bias, weight2, bias2)
        or not _are_rows(x, weight, bias)
        or weight2.shape[1:] != bias.shape
        or (bias2 is not None and bias2.shape != weight2.shape[:1])
    ):
        return None
    weight, bias, weight2 = dispatch.unwrap(weight), dispatch.unwrap(bias), dispatch.unwrap(weight2)
    bias2 = bias2 if bias2 is None else dispatch.unwrap(bias2)
    return _record_mlp(lowered(x), weight, bias, weight2, bias2, ACTIVATIONS[act], kernels)  # type: ignore[no-any-return]


# -- a convolution -----------------------------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """Of images in a half. Keeps them and the weight's cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, options: Options, kernels: Any) -> Tensor:
        y, low = kernels.convolution_autocast(x, weight, bias, *options)
        ctx.save_for_backward(x, low)
        ctx.given, ctx.options, ctx.kernels = Given(weight, bias), options, kernels
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        if dispatch.differentiating(dy):
            return *derivable(partial(_convolution, ctx.options), ctx, x, dy), None, None
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        summed = for_bias and dy.is_contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = ctx.kernels.convolution_autocast_backward(
            dy, x, low, *ctx.options, for_x, for_weight, summed
        )
        if for_bias and not summed:
            dbias = dy.sum((0, 2, 3), dtype=torch.float32)
        return dx if for_x else None, dweight if for_weight else None, dbias if for_bias else None, None, None


def _convolution(options: Options, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), *options)


_record_convolution = dispatch.recorder(_Convolution)


def options_of(layer: Any) -> Options | None:
    """Those of a convolution that pads with zeros, where all are pairs, which somebody may have changed; else None."""
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
        or not dispatch.wants_gradient(weight, bias)
    ):
        return None
    kernels = kernels_for(x, weight, bias)
    if kernels is None:
        return None
    parameters = dispatch.unwrap(weight), dispatch.unwrap(bias)
    return _record_convolution(lowered(x), *parameters, options, kernels)  # type: ignore[no-any-return]


# -- what it is given is used again ------------------------------------------------------------------------------------


class _CastFork(torch.autograd.Function):
    """(x in a half, x), whose gradients are added in one pass. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a result that nothing uses has no gradient, not one of zeros
        return x.to(dtype), x

    @staticmethod
    def backward(ctx: Any, dlow: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, None]:
        if dlow is None or dx is None:
            return dx if dlow is None else dlow.float(), None
        return dx + dlow, None


_record_fork = dispatch.recorder(_CastFork)


def cast_fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x as a linear layer or a convolution takes it, x); autograd lets nobody write to the second one."""
    if x.dtype is torch.float32 and torch.is_grad_enabled() and x.requires_grad and kernels_for(x) is not None:
        return _record_fork(dispatch.unwrap(x), dtype_of(x))  # type: ignore[no-any-return]
    return x, x


dispatch.register_fakes(
    {
        "linear_autocast": lambda x, weight, bias: (
            x.new_empty((*x.shape[:-1], weight.shape[0])),
            torch.empty_like(weight, dtype=x.dtype),
        ),
        "linear_autocast_backward": lambda dy, x, low, dx, dweight, dbias: (
            torch.empty_like(x) if dx else x.new_empty(0),
            low.new_empty(low.shape if dweight else 0, dtype=torch.float32 if dweight else low.dtype),
            low.new_empty(low.shape[0] if dbias else 0, dtype=torch.float32 if dbias else low.dtype),
        ),
        "mlp_autocast": lambda x, weight, bias, weight2, bias2, act, first, second: (
            x.new_empty((*x.shape[:-1], weight2.shape[0])),
            x.new_empty((x.numel() // x.shape[-1], weight.shape[0])),
            *(torch.empty_like(t, dtype=x.dtype) for t in (weight, bias, weight2)),
        ),
        "mlp_autocast_backward": lambda dy, x, product, low, low_bias, low2, act, first, second, *wanted: tuple(
            x.new_empty(shape if needed else 0, dtype=torch.float32 if place and needed else x.dtype)
            for place, (shape, needed) in enumerate(
                zip((x.shape, low.shape, low_bias.shape, low2.shape, low2.shape[:1]), wanted, strict=True)
            )
        ),
        "convolution_autocast": lambda x, weight, bias, stride, padding, dilation, groups: (
            F.conv2d(x, weight.to(x.dtype), None, stride, padding, dilation, groups),
            torch.empty_like(weight, dtype=x.dtype),
        ),
        "convolution_autocast_backward": lambda dy, x, low, stride, padding, dilation, groups, dx, dweight, dbias: (
            torch.empty_like(x) if dx else x.new_empty(0),
            torch.empty_like(low, dtype=torch.float32) if dweight else low.new_empty(0),
            low.new_empty(low.shape[0] if dbias else 0, dtype=torch.float32 if dbias else low.dtype),
        ),
    }
)
