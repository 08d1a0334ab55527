"""What generated forwards call besides the fused functions: checks that only the tensors of a call can answer.

An in-place operation keeps the dtype and shape of the tensor it writes, where the fused, out-of-place one promotes and
broadcasts; a boolean mask that is *added* is not a mask. Each function here takes the fused path where both agree and
otherwise does what the original code did.
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
from fastlayers.ops import autocast, bias_act, glu, reference, squeeze_excite
from fastlayers.ops import layer_norm as norms
from fastlayers.ops import linear as _linear
from fastlayers.ops.activations import activation
from fastlayers.ops.dispatch import is_plain
from fastlayers.ops.elementwise import GPU_LEAST
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.ops.split import parts
from fastlayers.ops.squeeze_excite import Link
from fastlayers.patching.runtime.checks import Casts, cast_dtype, plain
from fastlayers.patching.runtime.traits import draws, fresh

__all__ = [
    "add_handwritten_norm",
    "add_layer_norm",
    "add_relu_",
    "add_relu_to_",
    "add_rms_norm",
    "addmm",
    "batch_norm",
    "batch_norm_layer",
    "channel_layer_norm",
    "computes_norm",
    "dropout_add",
    "excite",
    "gated",
    "gated_linear",
    "handwritten_activation",
    "handwritten_norm",
    "instance_norm_layer",
    "is_pointwise",
    "join",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "mlp",
    "nll_loss_of_log_softmax",
    "permuted_scale_add",
    "relu_add_",
    "rms_norm",
    "rotary_alone",
    "scale_add",
    "softmax_added",
    "softmax_masked",
    "softmax_scaled",
    "squeeze",
    "squeeze_by_pooling",
]

MINUS_INFINITY = float("-inf")


def _stays(overwritten: Tensor, other: Tensor) -> bool:
    """Whether ``written + other`` has the dtype and shape of ``overwritten``, as ``written += other`` keeps them."""
    return isinstance(other, Tensor) and overwritten.dtype == other.dtype and overwritten.shape == other.shape


def _same_layout(x: Tensor, y: Tensor) -> bool:
    """Whether a new tensor made of the two has one memory format in either order; its dtype is the same in both."""
    return isinstance(y, Tensor) and x.shape == y.shape and x.stride() == y.stride()


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether in place or out of it, and in either order, a result of the two has one dtype and memory format."""
    return _same_layout(x, y) and x.dtype == y.dtype


def _fits(overwritten: Tensor, mask: Tensor, dtype: torch.dtype) -> bool:
    """Whether an in-place operation with ``mask`` leaves dtype and shape of ``overwritten`` as they are."""
    sizes = zip(reversed(overwritten.shape), reversed(mask.shape), strict=False)
    return mask.dtype == dtype and mask.dim() <= overwritten.dim() and all(m in (1, size) for size, m in sizes)


@fresh
def add_relu_(x: Tensor, y: Tensor) -> Tensor:
    """relu of ``x += y``, where nothing else sees x."""
    return functional.add_relu(x, y) if _stays(x, y) else torch.relu(x.add_(y))


@fresh
def relu_add_(x: Tensor, y: Tensor) -> Tensor:
    """``r = relu(x); r += y``, where nothing else sees r."""
    return functional.relu_add(x, y) if _stays(x, y) else torch.relu(x).add_(y)


@fresh
def add_relu_to_(y: Tensor, x: Tensor) -> Tensor:
    """``y += relu(x)``, where nothing else sees y."""
    return functional.relu_add(x, y) if _stays(y, x) else y.add_(torch.relu(x))


@fresh
def softmax_scaled(
    x: Tensor, dim: int, scale: float | Tensor | None, dtype: torch.dtype | None, *, log: bool
) -> Tensor:
    """softmax of ``x * scale``, where the scale may turn out to be a tensor."""
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

    ``where`` says which function masked the scores originally, ``torch.where`` or ``masked_fill``: they take other
    dtypes.
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
    """up·act(gate), where the product was written to one of the two, and nothing else sees that one.

    ``overwritten`` says to which: "gate", that is its activation, or "up"; None if to neither.
    """
    name = kernel_name(act, gate.dtype, gate.device.type)
    if name is not None and _alike(gate, up):
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
    """linear(act(gate)·up), of a product written as in :func:`gated`, or with the gate first to neither."""
    name = kernel_name(act, gate.dtype, gate.device.type)
    if name is None:
        activated = applied(act, gate)
        product = activated * up if gate_first else gated(gate, up, act, overwritten)
    elif _alike(gate, up):
        return functional.gated_linear(gate, up, weight, bias, name)
    else:
        product = glu.gated(gate, up, name) if gate_first else gated(gate, up, act, overwritten)
    return F.linear(product, weight, bias)


# -- squeeze and excite -----------------------------------------------------------------------------------------------


@fresh
def squeeze(x: Tensor, dims: Any) -> tuple[Tensor, Tensor | Link]:
    """``(x.mean(dims, keepdim=True), x)`` for the last two of four dimensions."""
    return squeeze_excite.squeeze(x, lambda x: x.mean(dims, keepdim=True))


@fresh
def squeeze_by_pooling(x: Tensor) -> tuple[Tensor, Tensor | Link]:
    """The same by torch's layer, which takes images without a batch too."""
    return squeeze_excite.squeeze(x, lambda x: F.adaptive_avg_pool2d(x, 1))


#: The product with a gate between 0 and 1, of a mean that is used too.
excite = fresh(squeeze_excite.excite)

# -- linear layers ----------------------------------------------------------------------------------------------------


addmm = fresh(_linear.addmm)


def bias_in_act(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether bias_act has a kernel for act(linear(x)), and gains by it."""
    if bias is None or torch.compiler.is_compiling() or bias_act.FAMILY.kernels_for(x) is None:
        return False
    if autocast.dtype_of(bias) is not autocast.dtype_of(x):
        return False
    return x.numel() // weight.shape[-1] * len(bias) >= GPU_LEAST


@fresh
def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(linear(x)): the product by torch, the bias with the activation where that has a kernel and gains by it.

    Autocast casts the bias of a linear layer. So does this, and autograd records it: the gradient has its dtype.
    """
    if bias_in_act(x, weight, bias):
        assert bias is not None
        name = kernel_name(act, autocast.dtype_of(x), x.device.type)
        if name is not None:
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
    """torch.unbind, whose parts' gradients are written into one tensor."""
    return parts(torch.unbind, x, dim)  # type: ignore[no-any-return]


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """torch.chunk, as :func:`unbind`."""
    return parts(torch.chunk, x, chunks, dim)  # type: ignore[no-any-return]


def split(x: Tensor, split_size: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """torch.split, as :func:`unbind`."""
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


# -- activations that a library wrote out -----------------------------------------------------------------------------

HANDWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pow": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_mul": lambda x: 0.5 * x * (1.0 + torch.tanh(x * math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def kernel_name(act: str, dtype: torch.dtype, kind: str) -> str | None:
    """The name of an activation, which may be one of :data:`HANDWRITTEN`, among those that kernels have.

    None where what is written out gives another dtype than it is given: of integers, and with pow under autocast.
    """
    if act not in HANDWRITTEN:
        return act
    wide = act == "gelu_pow" and dtype in LOW_PRECISION and torch.is_autocast_enabled(kind)
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
    """dropout(x) + residual, where the sum was written to one of the two: "x", that is its dropout, or "residual"."""
    if (_same_layout if overwritten is None else _alike)(x, residual):
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
    """drop_path(gamma·x) + residual, where the sum was written to one of the two as in :func:`dropout_add`.

    ``scaled`` says that the product was written to x.
    """
    if overwritten is None and not scaled:  # nothing of which the dtype would have to stay: torch promotes
        fits = _same_layout(x, residual) and (gamma is None or _fits(x, gamma, gamma.dtype))
    else:
        fits = _alike(x, residual) and (gamma is None or _fits(x, gamma, x.dtype))
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

    ``first`` says that the sum had x before the residual.
    """
    y = x.permute(dims)
    if gamma.dim() == 1 and (_alike(y, residual) if first else isinstance(residual, Tensor)):
        shape = [-1 if dim == len(dims) - 1 else 1 for dim in dims]
        return functional.scale_add(y, gamma.view(shape), residual, drop_path, training)
    y = reference.drop_path((x * gamma).permute(dims), drop_path, training)
    return y + residual if first else residual + y


# -- rotary embedding -------------------------------------------------------------------------------------------------


@fresh
def rotary_alone(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotary embedding of x where that of its partner is computed elsewhere."""
    return functional.rotary(x, None, cos, sin, interleaved)[0]


# -- norms ------------------------------------------------------------------------------------------------------------


def join(normed: Tensor, residual: Tensor | None, act: str | None, overwritten: str | None) -> Tensor:
    """act(normed + residual). An in-place sum overwrote the ``overwritten`` one, "norm" or "residual"."""
    if residual is None:
        return activation(act).function(normed)
    target, other = (residual, normed) if overwritten == "residual" else (normed, residual)
    if act == "relu" and (overwritten is None or _stays(target, other)):
        return functional.add_relu(target, other)
    return activation(act).function(target + other if overwritten is None else target.add_(other))


@fresh
def batch_norm(
    x: Tensor, residual: Tensor, act: str | None = None, overwritten: str | None = None, **options: Any
) -> Tensor:
    """act(F.batch_norm(x, ...) + residual). ``overwritten`` says which operand an in-place sum was written to."""
    if overwritten is not None and not _stays(x, residual):
        return join(functional.batch_norm(x, **options), residual, act, overwritten)
    return functional.batch_norm(x, **options, residual=residual, act=act)


@fresh
def batch_norm_layer(
    layer: _BatchNorm, x: Tensor, residual: Tensor | None = None, act: str | None = None, overwritten: str | None = None
) -> Tensor:
    """act(layer(x) + residual), with all that a BatchNorm layer does to its running statistics."""
    if overwritten is not None and residual is not None and not _stays(x, residual):
        return join(normalize(layer, x), residual, act, overwritten)
    return normalize(layer, x, residual, act)


@fresh
def instance_norm_layer(layer: _InstanceNorm, x: Tensor, act: str) -> Tensor:
    """act(layer(x)), with what the layer itself does where x is no batch or has other channels than it was made for."""
    if x.dim() == layer._get_no_batch_dim() + 1 and x.shape[1] == layer.num_features:
        return apply_instance_norm(layer, x, act)
    return activation(act).function(layer(x))


def _low_first(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The two in the order in which kernels take a float32 and a 16-bit tensor.

    Of tensors in other layouts, which are torch's to add, the first one decides on that of the sum.
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
    """F.layer_norm, in the dtype to which autocast casts the result."""
    return norms.layer_norm(x, normalized_shape, weight, bias, eps, cast_dtype(casts, x, weight))


def rms_norm(x: Tensor, casts: Casts, weight: Tensor | None = None, **options: Any) -> Tensor:
    """F.rms_norm, in the dtype to which autocast casts the result."""
    return functional.rms_norm(x, weight=weight, **options, dtype=cast_dtype(casts, x, weight))


def channel_layer_norm(x: Tensor, casts: Casts, weight: Tensor | None = None, **options: Any) -> Tensor:
    """The layer_norm of an image over its channels, in the dtype to which autocast casts the result."""
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
    """(F.layer_norm(s, ...), s) for s = x + residual, written to x where ``inplace``; without a residual s is x."""
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
    """(F.rms_norm(s, ...), s) for s = x + residual, written to x where ``inplace``; without a residual s is x."""
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
    if inplace and residual is not None and not _stays(x, residual):
        x = x.add_(residual)
        return norm(x, *rest), x
    return add_norm(*_low_first(x, residual), *rest)


# -- losses -----------------------------------------------------------------------------------------------------------


@fresh
def nll_loss_of_log_softmax(x: Tensor, target: Tensor, dim: int, **options: Any) -> Tensor:
    """F.nll_loss(F.log_softmax(x, dim), target), fused where dim is that of the classes, and the target of classes."""
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
    """F.cross_entropy(F.linear(x, weight, bias), target) of logits in some shape, which are never whole in memory.

    Args:
        class_weight, size_average, ignore_index, reduce, reduction, label_smoothing: as F.cross_entropy has them.
        shape: "same", as the linear layer gives them, "rows", all but the last dimension merged, "merged", the first
            two dimensions merged, or "classes second", the last of three dimensions in second place.
        columns: how many classes the rows have; None where it is their own number.
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


# -- norms that a library wrote out: fingerprints.py -------------------------------------------------------------------


def computes_norm(x: Any, weight: Tensor | None, *, casting: str | None, same: bool) -> bool:
    """Whether a written-out norm computes what its casting order says, for this x and weight.

    Args:
        x: what it is called with; these forwards cast it to float32, so not float64.
        weight: its weight, of the last dimension alone.
        casting: as :func:`handwritten_norm` has it. Those of torch heed autocast, which elementwise code does not.
        same: whether they must have one dtype.
    """
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, *LOW_PRECISION):
        return False
    if casting in (None, "torch") and x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    return weight is None or (weight.shape == x.shape[-1:] and (not same or weight.dtype == x.dtype))


def handwritten_norm(x: Tensor, weight: Tensor | None, eps: float, casting: str | None) -> Tensor:
    """RMSNorm over the last dimension in a casting order; LayerNorm without a bias where that is None."""
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
    """(layer(s), s) for s = x + residual, x itself without one, where the layer is a norm that a library wrote out."""
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
