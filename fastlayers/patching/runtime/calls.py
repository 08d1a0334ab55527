"""The functions that generated forwards call in addition to the fused ones. They depend on the tensors of a call.

An in-place operation keeps the dtype and the shape of the tensor that it overwrites, while the fused operation promotes
and broadcasts. A boolean mask that is *added* is not a mask. Each function here takes the fused path where both agree,
and otherwise does what the original code did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fastlayers import functional
from fastlayers.modules.batch_norm import normalize
from fastlayers.modules.group_norm import apply_instance_norm
from fastlayers.ops import autocast, bias_act, glu, post_ops, reference, squeeze_excite
from fastlayers.ops import linear as _linear
from fastlayers.ops.activations import activation
from fastlayers.ops.elementwise import GPU_LEAST
from fastlayers.ops.guard import is_plain
from fastlayers.ops.layouts import broadcasts_to
from fastlayers.ops.reference import LOW_PRECISION, autocasts
from fastlayers.ops.split import parts
from fastlayers.ops.squeeze_excite import Link
from fastlayers.patching.runtime.checks import plain
from fastlayers.patching.runtime.traits import draws, fresh

MINUS_INFINITY = float("-inf")


def stays(overwritten: Tensor, other: Tensor) -> bool:
    """Whether ``written + other`` has the dtype and shape of ``overwritten``, as ``written += other`` keeps them."""
    same = isinstance(other, Tensor) and overwritten.dtype == other.dtype and not overwritten.is_nested
    return same and overwritten.shape == other.shape


def _same_layout(x: Tensor, y: Tensor) -> bool:
    """Whether the memory format of a result does not depend on the order of the two; its dtype never does."""
    return isinstance(y, Tensor) and not x.is_nested and x.shape == y.shape and x.stride() == y.stride()


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether a result of the two has one dtype and memory format, in place or not, and in either order."""
    return _same_layout(x, y) and x.dtype == y.dtype


def _fits(overwritten: Tensor, mask: Tensor, dtype: torch.dtype) -> bool:
    """Whether an in-place operation with ``mask`` keeps the dtype and the shape of ``overwritten``."""
    return mask.dtype == dtype and broadcasts_to(mask.shape, overwritten.shape)


@fresh
def add_relu_(x: Tensor, y: Tensor) -> Tensor:
    """relu of ``x += y``, where nothing else sees x."""
    return functional.add_relu(x, y) if stays(x, y) else torch.relu(x.add_(y))


@fresh
def relu_add_(x: Tensor, y: Tensor) -> Tensor:
    """``r = relu(x); r += y``, where nothing else sees r."""
    return functional.relu_add(x, y) if stays(x, y) else torch.relu(x).add_(y)


@fresh
def add_relu_to_(y: Tensor, x: Tensor) -> Tensor:
    """``y += relu(x)``, where nothing else sees y."""
    return functional.relu_add(x, y) if stays(y, x) else y.add_(torch.relu(x))


@fresh
def softmax_scaled(
    x: Tensor, dim: int, scale: float | Tensor | None, dtype: torch.dtype | None, *, log: bool
) -> Tensor:
    """softmax of ``x * scale``, where the scale may be a tensor."""
    if isinstance(scale, Tensor):
        x, scale = x * scale, None
    return (functional.log_softmax if log else functional.softmax)(x, dim, scale=scale, dtype=dtype)


@fresh
def softmax_added(
    x: Tensor,
    mask: Tensor,
    dim: int,
    scale: float | Tensor | None,
    dtype: torch.dtype | None,
    *,
    inplace: bool,
    log: bool,
) -> Tensor:
    """softmax of ``x * scale + mask``, where a boolean mask adds ones and zeros as it does in torch."""
    if isinstance(scale, Tensor):
        x, scale = x * scale, None
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and (not inplace or _fits(x, mask, x.dtype)):
        return (functional.log_softmax if log else functional.softmax)(x, dim, scale=scale, mask=mask, dtype=dtype)
    scores = x if scale is None else x * scale
    scores = scores.add_(mask) if inplace else scores + mask
    return (F.log_softmax if log else F.softmax)(scores, dim, dtype=dtype)


@fresh
def softmax_masked(
    x: Tensor,
    mask: Tensor,
    dim: int,
    scale: float | Tensor | None,
    dtype: torch.dtype | None,
    *,
    fill: bool,
    where: bool,
    inplace: bool,
    log: bool,
) -> Tensor:
    """softmax of ``x * scale`` with minus infinity where a mask is True (``fill``) or False.

    ``where`` tells whether ``torch.where`` or ``masked_fill`` masked the scores originally: they differ in dtypes.
    """
    if isinstance(scale, Tensor):
        x, scale = x * scale, None
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and (not inplace or _fits(x, mask, torch.bool)):
        keep = ~mask if fill else mask
        return (functional.log_softmax if log else functional.softmax)(x, dim, scale=scale, mask=keep, dtype=dtype)
    scores = x if scale is None else x * scale
    if where:
        scores = torch.where(mask, MINUS_INFINITY, scores) if fill else torch.where(mask, scores, MINUS_INFINITY)
    else:
        filled = mask if fill else ~mask
        scores = (scores.masked_fill_ if inplace else scores.masked_fill)(filled, MINUS_INFINITY)
    return (F.log_softmax if log else F.softmax)(scores, dim, dtype=dtype)


# -- gates ------------------------------------------------------------------------------------------------------------


@fresh
def gated(gate: Tensor, up: Tensor, act: str, overwritten: str | None) -> Tensor:
    """up·act(gate). The product overwrote the ``overwritten`` operand, "gate" (its activation) or "up", or neither
    (None).

    Nothing else sees that operand.
    """
    name = kernel_name(act, gate.dtype, gate.device.type)
    if name is not None and alike(gate, up):
        return glu.gated(gate, up, name)
    activated = applied(act, gate)
    if overwritten is None:
        return up * activated
    return activated.mul_(up) if overwritten == "gate" else up.mul_(activated)


@fresh
def gated_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    *,
    gate_first: bool,
    overwritten: str | None,
) -> Tensor:
    """linear(act(gate)·up), with ``overwritten`` as for :func:`gated`; ``gate_first`` is the order of a new product."""
    name = kernel_name(act, gate.dtype, gate.device.type)
    if name is None:
        activated = applied(act, gate)
        product = activated * up if gate_first else gated(gate, up, act, overwritten)
    elif alike(gate, up):
        return functional.gated_linear(gate, up, weight, bias, name)
    else:
        product = glu.gated(gate, up, name) if gate_first else gated(gate, up, act, overwritten)
    return F.linear(product, weight, bias)


# -- squeeze and excite -----------------------------------------------------------------------------------------------


@fresh
def squeeze(x: Tensor, dims: Any) -> tuple[Tensor, Tensor | Link]:
    """``(x.mean(dims, keepdim=True), x)`` for the last two of four dimensions.

    Without dims the mean is by torch's pooling layer, which takes unbatched images too.
    """
    if dims is None:
        return squeeze_excite.squeeze(x, lambda x: F.adaptive_avg_pool2d(x, 1))
    return squeeze_excite.squeeze(x, lambda x: x.mean(dims, keepdim=True))


#: The product with a gate between 0 and 1 that was computed from the mean.
excite = fresh(squeeze_excite.excite)

# -- linear layers ----------------------------------------------------------------------------------------------------


addmm = fresh(_linear.addmm)


def bias_in_act(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether bias_act has a kernel for act(linear(x)) that is faster than torch."""
    kernels = None if bias is None or torch.compiler.is_compiling() else bias_act.FAMILY.kernels_for(x)
    if bias is None or kernels is None or kernels.unasked:  # a CPU adds the bias in the product
        return False
    if autocast.dtype_of(bias) is not autocast.dtype_of(x):
        return False
    return x.numel() // weight.shape[-1] * len(bias) >= GPU_LEAST


@fresh
def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(linear(x)). If a kernel for the bias and the activation is faster, torch computes only the product.

    Autocast casts the bias of a linear layer. This does too, and autograd records the cast, so that the gradient has
    the dtype of the bias.
    """
    name = kernel_name(act, autocast.dtype_of(x), x.device.type)
    if name is not None:
        y = post_ops.linear(x, weight, bias, name)
        if y is not None:
            return y
        if bias_in_act(x, weight, bias):
            assert bias is not None
            product = _linear.product(x, weight)
            return functional.bias_act(product, bias.to(product.dtype), name)
    return applied(act, F.linear(x, weight, bias))


@fresh
def mlp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    weight2: Tensor,
    bias2: Tensor | None,
    p: float = 0.0,
    training: bool = False,
) -> Tensor:
    """linear(dropout(act(linear(x))))."""
    drops = training and p > 0
    if not drops and bias is not None:
        name = kernel_name(act, autocast.dtype_of(x), x.device.type) if act in HANDWRITTEN else act
        y = autocast.mlp(x, weight, bias, name, weight2, bias2) if name is not None else None
        if y is not None:
            return y
    activated = linear_act(x, weight, bias, act)
    return functional.linear(F.dropout(activated, p) if drops else activated, weight2, bias2)


def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """torch.unbind, with a backward that writes the gradients of all parts into one tensor."""
    return parts(torch.unbind, x, dim)  # type: ignore[no-any-return]


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """torch.chunk, like :func:`unbind`."""
    return parts(torch.chunk, x, chunks, dim)  # type: ignore[no-any-return]


def split(x: Tensor, split_size: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """torch.split, like :func:`unbind`."""
    return parts(torch.split, x, split_size, dim)  # type: ignore[no-any-return]


# -- convolutions -----------------------------------------------------------------------------------------------------


def is_pointwise(layer: Any) -> bool:
    """Whether a convolution is a matrix product of the channels of each pixel."""
    return (
        plain(layer, nn.Conv2d)
        and layer.kernel_size == layer.stride == (1, 1)
        and layer.padding in ((0, 0), "valid", "same")
        and layer.groups == 1
        and layer.bias is None
    )


# -- handwritten activations ------------------------------------------------------------------------------------------

HANDWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pow": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_mul": lambda x: 0.5 * x * (1.0 + torch.tanh(x * math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def kernel_name(act: str, dtype: torch.dtype, kind: str) -> str | None:
    """The kernels' name of an activation, which may be one of :data:`HANDWRITTEN`.

    None if handwritten code changes the dtype: for integers, and for pow under autocast.
    """
    if act not in HANDWRITTEN:
        return act
    wide = act == "gelu_pow" and dtype in LOW_PRECISION and autocasts(kind)
    if dtype not in (torch.float32, *LOW_PRECISION) or wide:
        return None
    return "quick_gelu" if act == "quick_gelu" else "gelu_tanh"


@fresh
def handwritten_activation(x: Tensor, form: str) -> Tensor:
    """An activation of :data:`HANDWRITTEN`."""
    name = kernel_name(form, x.dtype, x.device.type)
    if name is None:
        return HANDWRITTEN[form](x)
    return functional.quick_gelu(x) if name == "quick_gelu" else functional.gelu(x, approximate="tanh")


def applied(act: str, x: Tensor) -> Tensor:
    """An activation by its name, or one of :data:`HANDWRITTEN`."""
    return handwritten_activation(x, act) if act in HANDWRITTEN else activation(act).function(x)


# -- residuals --------------------------------------------------------------------------------------------------------


@draws
@fresh
def dropout_add(x: Tensor, residual: Tensor, p: float, training: bool, *, overwritten: str | None) -> Tensor:
    """dropout(x) + residual. The sum overwrote the ``overwritten`` operand: "x" (dropped), "residual" or neither."""
    if (_same_layout if overwritten is None else alike)(x, residual):
        return functional.dropout_add(x, residual, p, training)
    dropped = F.dropout(x, p, training)
    return dropped + residual if overwritten is None else _add_to(overwritten, dropped, residual)


def _add_to(overwritten: str, x: Tensor, residual: Tensor) -> Tensor:
    return x.add_(residual) if overwritten == "x" else residual.add_(x)


@draws
@fresh
def scale_add(
    x: Tensor,
    gamma: Tensor | None,
    residual: Tensor,
    drop_path: float = 0.0,
    training: bool = False,
    *,
    overwritten: str | None,
    scaled: bool,
) -> Tensor:
    """drop_path(gamma·x) + residual, with ``overwritten`` as for :func:`dropout_add`.

    ``scaled`` tells whether the product overwrote x.
    """
    if overwritten is None and not scaled:  # Nothing was overwritten, so torch promotes.
        fits = _same_layout(x, residual) and (gamma is None or _fits(x, gamma, gamma.dtype))
    else:
        fits = alike(x, residual) and (gamma is None or _fits(x, gamma, x.dtype))
    if fits:
        return functional.scale_add(x, gamma, residual, drop_path, training)
    y = x if gamma is None else x.mul_(gamma) if scaled else x * gamma
    y = reference.drop_path(y, drop_path, training)
    return y + residual if overwritten is None else _add_to(overwritten, y, residual)


@draws
@fresh
def permuted_scale_add(
    x: Tensor,
    gamma: Tensor,
    residual: Tensor,
    dims: tuple[int, ...],
    drop_path: float = 0.0,
    training: bool = False,
    *,
    first: bool,
) -> Tensor:
    """residual + drop_path((gamma·x).permute(dims)), where gamma scales the last dimension of x.

    ``first`` tells whether x was the first operand of the sum.
    """
    y = x.permute(dims)
    if gamma.dim() == 1 and (alike(y, residual) if first else isinstance(residual, Tensor)):
        shape = [-1 if dim == len(dims) - 1 else 1 for dim in dims]
        return functional.scale_add(y, gamma.view(shape), residual, drop_path, training)
    y = reference.drop_path((x * gamma).permute(dims), drop_path, training)
    return y + residual if first else residual + y


# -- rotary embedding -------------------------------------------------------------------------------------------------


@fresh
def rotary_alone(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotary embedding of x alone."""
    return functional.rotary(x, None, cos, sin, interleaved)[0]


# -- norms ------------------------------------------------------------------------------------------------------------


def join(normed: Tensor, residual: Tensor | None, act: str | None, overwritten: str | None) -> Tensor:
    """act(normed + residual). An in-place sum overwrote the ``overwritten`` one, "norm" or "residual"."""
    if residual is None:
        return activation(act).function(normed)
    target, other = (residual, normed) if overwritten == "residual" else (normed, residual)
    if act == "relu" and (overwritten is None or stays(target, other)):
        return functional.add_relu(target, other)
    return activation(act).function(target + other if overwritten is None else target.add_(other))


@fresh
def batch_norm(
    x: Tensor, residual: Tensor, act: str | None = None, overwritten: str | None = None, **options: Any
) -> Tensor:
    """act(F.batch_norm(x, ...) + residual), with ``overwritten`` as for :func:`join`."""
    if overwritten is not None and not stays(x, residual):
        return join(functional.batch_norm(x, **options), residual, act, overwritten)
    return functional.batch_norm(x, **options, residual=residual, act=act)


@fresh
def batch_norm_layer(
    layer: _BatchNorm, x: Tensor, residual: Tensor | None = None, act: str | None = None, overwritten: str | None = None
) -> Tensor:
    """act(layer(x) + residual), with the updates that a BatchNorm layer makes to its running statistics."""
    if overwritten is not None and residual is not None and not stays(x, residual):
        return join(normalize(layer, x), residual, act, overwritten)
    return normalize(layer, x, residual, act)


@fresh
def instance_norm_layer(layer: _InstanceNorm, x: Tensor, act: str) -> Tensor:
    """act(layer(x)). The layer itself runs if x is unbatched or has another number of channels."""
    if x.dim() == layer._get_no_batch_dim() + 1 and x.shape[1] == layer.num_features:
        return apply_instance_norm(layer, x, act)
    return activation(act).function(layer(x))


# -- losses -----------------------------------------------------------------------------------------------------------


@fresh
def nll_loss_of_log_softmax(x: Tensor, target: Tensor, dim: int, **options: Any) -> Tensor:
    """F.nll_loss(F.log_softmax(x, dim), target), fused if dim is the dimension of the classes."""
    classes = 0 if x.dim() == 1 else 1
    if dim in (classes, classes - x.dim()) and not target.is_floating_point():
        return functional.cross_entropy(x, target, **options)
    return F.nll_loss(F.log_softmax(x, dim), target, **options)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    shape: str,
    columns: int | None,
    flat_target: bool,
) -> Tensor:
    """F.cross_entropy(F.linear(x, weight, bias), target), without the whole logits in memory.

    Args:
        x, weight, bias: of the linear layer.
        target, class_weight, size_average, ignore_index, reduce, reduction, label_smoothing: of F.cross_entropy.
        shape: the shape of the logits in the loss: "same" as the linear layer returns; "rows", with all dimensions but
            the last merged; "merged", with the first two merged; or "classes second", with the last two exchanged.
        columns: the size of the last dimension in a reshape to rows; None for the number of classes.
        flat_target: whether the target is flattened first.
    """
    rank = {"same": 2, "merged": 3, "classes second": 3}.get(shape, x.dim())
    tensors = (x, weight, target) if bias is None else (x, weight, target, bias)
    fits = x.dim() == rank and columns in (None, len(weight)) and all(map(is_plain, tensors))
    if (
        fits
        and size_average is None
        and reduce is None
        and weight.device == x.device
        and not target.is_floating_point()
    ):
        target = target.reshape(-1) if flat_target else target
        rows = x.reshape(-1, x.shape[-1]) if shape in ("rows", "merged") else x
        return functional.linear_cross_entropy(
            rows, weight, target, linear_bias=bias, weight=class_weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip
    logits = functional.linear(x, weight, bias)
    if shape == "rows":
        logits = logits.reshape(-1, logits.shape[-1] if columns is None else columns)
    elif shape == "merged":
        logits = logits.flatten(0, 1)
    elif shape == "classes second":
        logits = logits.transpose(1, 2)
    return functional.cross_entropy(
        logits, target.reshape(-1) if flat_target else target, class_weight, size_average, ignore_index, reduce,
        reduction, label_smoothing,
    )  # fmt: skip
