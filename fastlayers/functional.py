"""Fused operations as functions. Those that bear the name of a torch function take its arguments.

Each function computes what the torch composition in its docstring computes, in the same shape, dtype, memory format and
autocast behaviour. Where no kernel applies, that composition runs. *Keeps* lists what is kept for the backward. Double
backward, ``torch.func`` transforms and ``torch.compile`` work on all functions. Kernels take float16, bfloat16, float32
and float64. An argument that should be a tensor and is not raises a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from fastlayers.ops import batch_norm as _batch_norm
from fastlayers.ops import bias_act as _bias_act
from fastlayers.ops import cross_entropy as _cross_entropy
from fastlayers.ops import elementwise as _elementwise
from fastlayers.ops import glu as _glu
from fastlayers.ops import group_norm as _group_norm
from fastlayers.ops import kl_div as _kl_div
from fastlayers.ops import layer_norm as _layer_norm
from fastlayers.ops import linear as _linear
from fastlayers.ops import linear_cross_entropy as _linear_cross_entropy
from fastlayers.ops import linear_divergence as _linear_divergence
from fastlayers.ops import linear_log_prob as _linear_log_prob
from fastlayers.ops import linear_topk as _linear_topk
from fastlayers.ops import max_pool2d as _max_pool2d
from fastlayers.ops import preference as _preference
from fastlayers.ops import residual as _residual
from fastlayers.ops import response_norm as _response_norm
from fastlayers.ops import rotary as _rotary
from fastlayers.ops import sharding as _sharding  # noqa: F401  (its rules answer calls on DTensors)
from fastlayers.ops import softmax as _softmax
from fastlayers.ops import squeeze_excite as _squeeze_excite
from fastlayers.ops import vocab_parallel as _vocab_parallel
from fastlayers.renamed import REQUIRED, formerly, renamed

__all__ = [
    "ada_layer_norm",
    "add_layer_norm",
    "add_relu",
    "add_rms_norm",
    "batch_norm",
    "bias_act",
    "channel_layer_norm",
    "cpo_loss",
    "cross_entropy",
    "dpo_loss",
    "dropout_add",
    "elu",
    "gated_linear",
    "geglu",
    "gelu",
    "global_response_norm",
    "glu",
    "group_norm",
    "grpo_loss",
    "hardswish",
    "instance_norm",
    "js_div_logits",
    "kl_div",
    "kl_div_logits",
    "kto_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_accuracy",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_prob",
    "linear_topk",
    "log_softmax",
    "max_pool2d",
    "mish",
    "mul",
    "orpo_loss",
    "qk_norm_rotary",
    "quick_gelu",
    "reglu",
    "relu2",
    "relu_add",
    "rms_norm",
    "rotary",
    "scale_add",
    "silu",
    "simpo_loss",
    "softmax",
    "softplus",
    "squeeze_excite",
    "swiglu",
    "vocab_parallel_cross_entropy",
]


@formerly("x", required=1)
def softmax(
    input: Tensor = REQUIRED,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""softmax(input·scale + mask) along one dimension, in one pass over the scores.

    .. math:: y_i = \frac{\exp(s_i)}{\sum_j \exp(s_j)}, \qquad s = \text{input} \cdot \text{scale} + \text{mask}

    Stands for ``F.softmax(input * scale + mask, dim, dtype=dtype)``.

    Args:
        input: scores of any shape.
        dim: the dimension that sums to one. Torch's default, an implicit choice, is deprecated there.
        scale: a number that multiplies the input, such as the 1/sqrt(d) of attention.
        mask: broadcasts against the input. Where a boolean mask is False the score is minus infinity, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`; any other mask is added. A row that is masked
            entirely is NaN.
        dtype: of the result, and of the computation where it is wider, as in :func:`torch.nn.functional.softmax`.

    Returns:
        A contiguous tensor; float32 under autocast, as in torch.

    Keeps: the result; a reference to a mask that is boolean or needs a gradient.

    Raises:
        TypeError: scale is not a number.
    """
    if x is not None:
        input = renamed("softmax", "x", "input", x, input)
    return _softmax.softmax(input, dim, scale, mask, dtype, False)


@formerly("x", required=1)
def log_softmax(
    input: Tensor = REQUIRED,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""log(softmax(input·scale + mask)) along one dimension, without the softmax in memory.

    .. math:: y_i = s_i - \log \sum_j \exp(s_j), \qquad s = \text{input} \cdot \text{scale} + \text{mask}

    Stands for ``F.log_softmax(input * scale + mask, dim, dtype=dtype)``. Arguments, result and errors are those of
    :func:`softmax`, and so is what is kept.
    """
    if x is not None:
        input = renamed("log_softmax", "x", "input", x, input)
    return _softmax.softmax(input, dim, scale, mask, dtype, True)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    r"""relu(x) + y + bias in one pass.

    .. math:: z = \max(x, 0) + y + \text{bias}

    Stands for ``torch.relu(x) + y + bias``, rounded once instead of twice.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one dtype.
        bias: a number, or a tensor that broadcasts against the sum and may need a gradient.

    Keeps: one bit an element, where x needs a gradient.
    """
    return _elementwise.relu_add(x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    r"""relu(x + y) in one pass: the end of a residual block.

    .. math:: z = \max(x + y, 0)

    Stands for ``torch.relu(x + y)``. Takes the tensors that :func:`relu_add` takes.

    Keeps: one bit an element. x and y get the same gradient tensor.
    """
    return _elementwise.add_relu(x, y)


@formerly("x", "y", required=2)
def mul(
    input: Tensor = REQUIRED,
    other: Tensor | float = REQUIRED,
    *,
    out: Tensor | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
) -> Tensor:
    r"""input·other, with both gradients from one kernel.

    .. math:: z = \text{input} \cdot \text{other}, \qquad
        \frac{\partial L}{\partial\, \text{input}} = \text{other}\, \frac{\partial L}{\partial z}, \qquad
        \frac{\partial L}{\partial\, \text{other}} = \text{input}\, \frac{\partial L}{\partial z}

    Stands for :func:`torch.mul`. Where an operand broadcasts (a factor of each channel or row, as in
    squeeze-and-excite), the same pass sums its gradient, in float32.

    Args:
        input, other: tensors that broadcast against each other, other also a number; the kernels take one dtype.
        out: a tensor for the result, which torch then computes.

    Keeps: input and other, as torch does.
    """
    if x is not None:
        input = renamed("mul", "x", "input", x, input)
    if y is not None:
        other = renamed("mul", "y", "other", y, other)
    if out is not None:
        return torch.mul(input, other, out=out)
    return _elementwise.mul(input, other)  # type: ignore[arg-type]


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    r"""x·gate(mean of x over space), with one gradient of x from both of its uses.

    .. math:: y_{n,c} = x_{n,c} \cdot \text{gate}(m)_{n,c}, \qquad m_{n,c} = \frac{1}{HW} \sum_{h,w} x_{n,c,h,w}

    Stands for ``x * gate(x.mean((2, 3), keepdim=True))``, the squeeze-and-excite of EfficientNet. The backward reads dy
    and x for the gradient of the gate, then reads dy again and writes dx. Autograd writes the gradients of the product
    and of the mean, and then their sum.

    Args:
        x: (N, C, H, W); the kernels take contiguous and channels_last images.
        gate: maps the mean, (N, C, 1, 1), to a factor of that shape; the kernels take a factor of x's dtype.

    Keeps: x, the factor, and what ``gate`` keeps.
    """
    return _squeeze_excite.squeeze_excite(x, gate)


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    r"""The maximum of each window of an image, and a backward that writes each gradient once.

    .. math:: y_{c,i,j} = \max_{u,v}\; x_{c,\; s i + d u - p,\; s j + d v - p}

    Stands for :func:`torch.nn.functional.max_pool2d`: the maximum is the first one of equal elements, and NaN where the
    window holds one.

    Args:
        input: (N, C, H, W) or (C, H, W); the kernels take contiguous and channels_last images, and windows of up to 254
            elements.
        kernel_size, stride, padding, dilation, ceil_mode: as in torch.
        return_indices: whether to return the indices of the maxima, too. Torch computes these calls.

    Returns:
        A tensor in torch's memory format.

    Keeps: the place of each maximum in its window, one byte an output. Torch keeps eight, and the input.
    """
    if return_indices:
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, True)  # type: ignore[call-overload]
    return _max_pool2d.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)


# ---- norms -----------------------------------------------------------------------------------------------------------


@formerly("x", required=2)
def layer_norm(
    input: Tensor = REQUIRED,
    normalized_shape: Sequence[int] = REQUIRED,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""Layer normalisation over the last dimensions; forward and backward read each tensor once.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}

    Stands for :func:`torch.nn.functional.layer_norm`.

    Args:
        input: any shape that ends with ``normalized_shape``.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight, bias: of shape ``normalized_shape``, in the input's dtype, or in float32 where the input has 16 bits
            (torch's CUDA kernels take that under autocast only). The computation is in float32, rounded once.
        eps: added to the variance.
        dtype: of the result. The kernel rounds to it once, so that under autocast the result for a 16-bit layer is
            never written in float32.

    Returns:
        A contiguous tensor of ``dtype``; by default of the input's dtype, float32 under CUDA autocast, as in torch.

    Keeps: input, weight, and the mean and rstd of each row.
    """
    if x is not None:
        input = renamed("layer_norm", "x", "input", x, input)
    return _layer_norm.layer_norm(input, normalized_shape, weight, bias, eps, dtype)


@formerly("x", required=2)
def rms_norm(
    input: Tensor = REQUIRED,
    normalized_shape: Sequence[int] = REQUIRED,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dtype: torch.dtype | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""Root mean square normalisation over the last dimensions.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot \text{weight}

    Stands for :func:`torch.nn.functional.rms_norm`, or for the code of a model library.

    Args:
        input: any shape that ends with ``normalized_shape``.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight: of shape ``normalized_shape``, in the input's dtype, or in float32 where the input has 16 bits.
        eps: added to the mean square. None is the epsilon of float32, of float64 for a float64 input, as in torch.
        casting: where a 16-bit input is rounded.

            - ``"torch"``: once, at the end.
            - ``"llama"``: x·rstd is rounded to the input's dtype and then multiplied by weight. The result has the
              dtype of this product, float32 for a float32 weight.
            - ``"gemma"``: x·rstd·(1 + weight), rounded once at the end.

        dtype: of the result, as for :func:`layer_norm`.

    Returns:
        A tensor of ``dtype``; by default of the input's dtype, but for ``"llama"``, and float32 under CUDA autocast
        where torch's own gives it (from 2.13 on). It is contiguous for ``"torch"`` unless torch keeps a channels_last
        input so. The other casting orders keep the order of the dimensions in memory, as elementwise operations do.

    Keeps: input, weight, and the rstd of each row.

    Raises:
        ValueError: casting is not one of the three orders.
    """
    if x is not None:
        input = renamed("rms_norm", "x", "input", x, input)
    return _layer_norm.rms_norm(input, normalized_shape, weight, eps, casting, dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The sum x + residual and its layer normalisation: the start of a transformer block.

    .. math:: s = x + \text{residual}, \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} \cdot
        \text{weight} + \text{bias}

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``F.layer_norm(s, ...)``. Both results have
    gradients, which one backward kernel adds.

    Args:
        x, residual: tensors that broadcast against each other. The kernels take one shape and one dtype, or a float32
            residual with a 16-bit x. Without a residual s is x itself: the backward kernel of the norm then adds the
            gradient of its uses, and code may not write to it.
        normalized_shape, weight, bias, eps: as for :func:`layer_norm`.
        dropout: probability with which elements of x are zeroed before the sum.
        training: whether dropout applies.
        dtype: of layer_norm(s), as for :func:`layer_norm`.

    Returns:
        (layer_norm(s), s).

    Keeps: s, weight, and the mean and rstd of each row; the mask of dropout.
    """
    if training and dropout:
        x = F.dropout(x, dropout)
    return _layer_norm.add_layer_norm(x, residual, normalized_shape, weight, bias, eps, dtype)


def ada_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalisation modulated for each sample (AdaLN): the start of a block of a diffusion transformer.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot (1 + \text{scale}) + \text{shift}

    Stands for ``F.layer_norm(input, normalized_shape, eps=eps) * (1 + scale) + shift``, rounded once. See "Scalable
    Diffusion Models with Transformers" (Peebles and Xie, 2023).

    Args:
        input: any shape that ends with ``normalized_shape``: (N, T, C) with tokens.
        normalized_shape: sizes of the dimensions that are normalised together. The kernel takes rows of at most 8192
            elements, 2048 of float64.
        scale, shift: broadcast against the input. The kernel takes one row for each index of the leading dimensions:
            (N, 1, C), or slices of a projection, ``projection(c).unsqueeze(1).chunk(6, -1)``; in one dtype.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the dtype that the composition has.

    Keeps: input, scale, and the mean and rstd of each row. The backward is one kernel, which adds up the gradients of
    scale and shift on the way.
    """
    return _layer_norm.ada_layer_norm(input, normalized_shape, scale, shift, eps)


def global_response_norm(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, channels_last: bool = True
) -> Tensor:
    r"""Global response normalisation (GRN) of ConvNeXt V2: channels compete by their norms over space.

    .. math:: y = x + \text{weight} \cdot x \cdot \frac{\lVert x \rVert_2}{\mathrm{E}_c[\lVert x \rVert_2] +
        \epsilon} + \text{bias}

    with a norm for each channel of each sample. Stands for timm's ``GlobalResponseNorm``, rounded once. See "ConvNeXt
    V2: Co-designing and Scaling ConvNets with Masked Autoencoders" (Woo et al., 2023).

    Args:
        input: (N, H, W, C), or (N, C, H, W) without ``channels_last``, which may be channels_last in memory; with any
            number of dimensions of space. The kernel takes dense inputs of at most 8192 channels.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits.
        eps: added to the mean of the norms.
        channels_last: whether the channels are the last dimension.

    Returns:
        A tensor in the input's layout, of the dtype that the composition has.

    Keeps: input, weight, and the norm of each channel of each sample.

    Raises:
        ValueError: the input has fewer than three dimensions.
    """
    return _response_norm.global_response_norm(input, weight, bias, eps, channels_last)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dropout: float = 0.0,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The sum x + residual and its root mean square normalisation.

    .. math:: s = x + \text{residual}, \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} \cdot \text{weight}

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``rms_norm(s, ...)``. Returns (rms_norm(s), s).
    x, residual, dropout, training and dtype are those of :func:`add_layer_norm`, the others those of :func:`rms_norm`.

    Keeps: s, weight, and the rstd of each row; the mask of dropout.

    Raises:
        ValueError: casting is not one of the three orders.
    """
    if training and dropout:
        x = F.dropout(x, dropout)
    return _layer_norm.add_rms_norm(x, residual, normalized_shape, weight, eps, casting, dtype)


def channel_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalisation over dimension 1, the channels of an image (N, C, H, W), at each pixel.

    .. math:: y_{n,c} = \frac{x_{n,c} - \mathrm{E}_c[x_n]}{\sqrt{\mathrm{Var}_c[x_n] + \epsilon}} \cdot
        \text{weight}_c + \text{bias}_c

    Stands for ``F.layer_norm(x.permute(0, 2, 3, 1), (C,), weight, bias, eps).permute(0, 3, 1, 2)``, for any number of
    dimensions after the channels. The result is channels_last in memory, and a channels_last x is not copied.

    Args:
        x: (N, C, *).
        weight, bias: (C,), in the dtypes that :func:`layer_norm` takes.
        eps, dtype: as for :func:`layer_norm`.

    Keeps: what :func:`layer_norm` keeps.
    """
    rows = torch.movedim(x, 1, -1)
    return _layer_norm.layer_norm(rows, rows.shape[-1:], weight, bias, eps, dtype).movedim(-1, 1)


@formerly("x", required=2)
def group_norm(
    input: Tensor = REQUIRED,
    num_groups: int = REQUIRED,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""Group normalisation, and an activation of the result in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}\right)

    Stands for ``act(F.group_norm(input, num_groups, weight, bias, eps))``.

    Args:
        input: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        num_groups: number of groups of channels. Each group has a mean and a variance.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`bias_act`. The kernel applies "relu", "silu", "gelu",
            "gelu_tanh", "hardswish", "relu6" and "leaky_relu"; the others take a second pass.

    Returns:
        A tensor in torch's memory format, on CUDA contiguous; float32 under CUDA autocast.

    Keeps: input, weight, bias, and the mean and rstd of each group. The backward recomputes the argument of act.

    Raises:
        ValueError: act is not the name of an activation, or a group has one value.
    """
    if x is not None:
        input = renamed("group_norm", "x", "input", x, input)
    return _group_norm.group_norm(input, num_groups, weight, bias, eps, act)


@formerly("x", required=1)
def instance_norm(
    input: Tensor = REQUIRED,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""Instance normalisation and an activation in the same pass: :func:`group_norm` with one channel in each group.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}\right)

    Stands for ``act(F.instance_norm(input, ...))``. Torch computes calls with running statistics.

    Args:
        input: (N, C, *).
        running_mean, running_var: (C,), or None.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits.
        use_input_stats: whether to normalise with the statistics of the input, or with the running ones.
        momentum: weight of the input's statistics in the new running ones.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`group_norm`.

    Returns:
        A contiguous tensor of the input's dtype.

    Keeps: what :func:`group_norm` keeps.

    Raises:
        ValueError: act is not the name of an activation, or ``use_input_stats`` meets a channel of one value.
    """
    if x is not None:
        input = renamed("instance_norm", "x", "input", x, input)
    return _group_norm.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, act
    )


@formerly("x", required=3)
def batch_norm(
    input: Tensor = REQUIRED,
    running_mean: Tensor | None = REQUIRED,
    running_var: Tensor | None = REQUIRED,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    num_batches_tracked: Tensor | None = None,
    x: Tensor | None = None,
) -> Tensor:
    r"""Batch normalisation, and the residual and the activation that follow it in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}
        + \text{residual}\right)

    Stands for ``act(F.batch_norm(input, ...) + residual)``, rounded once.

    Args:
        input: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        running_mean, running_var: (C,), or None. Training updates them in place, as in torch.
        weight, bias: (C,), in the input's dtype, or in float32 where the input has 16 bits; the running statistics
            likewise.
        training: whether to normalise with the statistics of the input, or with the running ones.
        momentum: weight of the input's statistics in the new running ones.
        eps: added to the variance.
        residual: added before the activation; the kernels take the input's shape and dtype.
        act: None or the name of an activation, as for :func:`group_norm`.
        num_batches_tracked: one int64 that training increments, as torch's layer counts its batches; or None.

    Returns:
        A tensor of the input's dtype and memory format.

    Keeps: input, weight, bias, and the mean and rstd of each channel. The backward recomputes the argument of act. With
    a residual, "relu" keeps one bit an element, and another activation the residual.

    Raises:
        ValueError: act is not the name of an activation, or training meets a channel of one value.
    """
    if x is not None:
        input = renamed("batch_norm", "x", "input", x, input)
    return _batch_norm.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, residual, act, num_batches_tracked
    )


# ---- activations and gates -------------------------------------------------------------------------------------------


def bias_act(x: Tensor, bias: Tensor | None, act: str | None, **parameters: float) -> Tensor:
    r"""act(x + bias) in one pass, and in the backward the gradient of the bias in the same pass as that of x.

    .. math:: y = \text{act}(x + \text{bias})

    Stands for ``act(x + bias)``, rounded once instead of twice: what follows a linear layer without its bias.

    Args:
        x: any shape.
        bias: None, or a tensor that broadcasts against x; the kernels take x's dtype and the shape of its last
            dimension.
        act: None, "relu", "silu", "gelu", "gelu_tanh", "hardswish", "relu6", "leaky_relu", "quick_gelu"
            (x·sigmoid(1.702·x)), "relu2" (relu(x)²), "mish", "sigmoid", "tanh", "elu" or "softplus".
        parameters: of the activation, with torch's names and defaults: ``negative_slope`` of leaky_relu, ``alpha`` of
            elu, ``beta`` and ``threshold`` of softplus.

    Returns:
        A tensor in torch's memory format. Under CUDA autocast softplus gives float32; "relu2" is relu(x) times itself
        and stays in x's dtype, where autocast would run ``torch.square`` in float32.

    Without a bias, torch's kernels compute all but "gelu", "gelu_tanh", "mish", "quick_gelu" and "relu2": they reach
    the memory bandwidth already.

    Keeps: x and the bias; of "relu" the result.

    Raises:
        ValueError: act is not the name of an activation.
        TypeError: the activation does not have such a parameter.
    """
    return _bias_act.bias_act(x, bias, act, parameters)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    r""":func:`torch.nn.functional.gelu`, see :func:`bias_act`.

    .. math:: y = x \cdot \Phi(x)

    Keeps: the input.
    """
    if approximate not in ("none", "tanh"):
        return F.gelu(input, approximate=approximate)  # raises torch's error
    return _bias_act.bias_act(input, None, "gelu" if approximate == "none" else "gelu_tanh", {})


def quick_gelu(input: Tensor) -> Tensor:
    r"""x·sigmoid(1.702·x), the GELU of CLIP, in one pass; see :func:`bias_act`.

    .. math:: y = \frac{x}{1 + \exp(-1.702\, x)}

    Keeps: the input.
    """
    return _bias_act.bias_act(input, None, "quick_gelu", {})


def relu2(input: Tensor) -> Tensor:
    r"""relu(x)², the activation of Primer, in one pass; see :func:`bias_act`.

    .. math:: y = \max(x, 0)^2

    Keeps: the input.
    """
    return _bias_act.bias_act(input, None, "relu2", {})


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.mish`, which computes in-place calls; see :func:`bias_act`.

    .. math:: y = x \cdot \tanh(\log(1 + \exp(x)))

    Keeps: the input.
    """
    return _bias_act.in_place(F.mish, input) if inplace else _bias_act.bias_act(input, None, "mish", {})


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.silu`, through torch's kernel unless a backend is forced; see :func:`bias_act`.

    .. math:: y = \frac{x}{1 + \exp(-x)}

    Keeps: the input.
    """
    return _bias_act.in_place(F.silu, input) if inplace else _bias_act.bias_act(input, None, "silu", {})


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.hardswish`, through torch's kernel as :func:`silu`.

    .. math:: y = x \cdot \frac{\min(\max(x + 3, 0), 6)}{6}

    Keeps: the input.
    """
    return _bias_act.in_place(F.hardswish, input) if inplace else _bias_act.bias_act(input, None, "hardswish", {})


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.leaky_relu`, through torch's kernel as :func:`silu`.

    .. math:: y = \max(x, 0) + \text{negative\_slope} \cdot \min(x, 0)

    Keeps: the input.
    """
    if inplace:
        return _bias_act.in_place(F.leaky_relu, input, negative_slope)
    return _bias_act.bias_act(input, None, "leaky_relu", {"negative_slope": negative_slope})


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.elu`, through torch's kernel as :func:`silu`.

    .. math:: y = \max(x, 0) + \min(\alpha\, (\exp(x) - 1), 0)

    Keeps: the input.
    """
    if inplace:
        return _bias_act.in_place(F.elu, input, alpha)
    return _bias_act.bias_act(input, None, "elu", {"alpha": alpha})


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    r""":func:`torch.nn.functional.softplus`, through torch's kernel as :func:`silu`.

    .. math:: y = \frac{1}{\beta} \log(1 + \exp(\beta x))

    Keeps: the input.
    """
    return _bias_act.bias_act(input, None, "softplus", {"beta": beta, "threshold": threshold})


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""silu(gate)·up, the gate of Llama's MLP, in one pass forward and one backward.

    .. math:: y = \frac{\text{gate}}{1 + \exp(-\text{gate})} \cdot \text{up}

    Stands for ``F.silu(gate) * up``, rounded once instead of twice.

    Args:
        gate, up: tensors that broadcast against each other; the kernels take one shape and one dtype. The two chunks of
            a packed tensor are read in place; :func:`glu` also writes their gradients into one tensor.

    Keeps: gate and up. The backward recomputes silu(gate).
    """
    return _glu.gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    r"""gelu(gate)·up in one pass forward and one backward.

    .. math:: y = \text{gelu}(\text{gate}) \cdot \text{up}

    Stands for ``F.gelu(gate, approximate=approximate) * up``. Arguments and what is kept are those of :func:`swiglu`.
    """
    if approximate not in ("none", "tanh"):
        F.gelu(gate, approximate=approximate)  # raises torch's error
    return _glu.gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""relu(gate)·up in one pass forward and one backward.

    .. math:: y = \max(\text{gate}, 0) \cdot \text{up}

    Stands for ``F.relu(gate) * up``. Arguments and what is kept are those of :func:`swiglu`.
    """
    return _glu.gated(gate, up, "relu")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""A linear layer whose backward sums the gradient of the bias at the memory bandwidth.

    .. math:: y = x W^T + b

    Stands for :func:`torch.nn.functional.linear`. Torch computes the result and the gradients of ``input`` and
    ``weight``, which are the same to the bit. The kernel replaces the sum over the rows of the incoming gradient, which
    torch reads at a fifth to a quarter of the memory bandwidth.

    Under autocast with float32 parameters the result is torch's to the bit, too, and the layer is one node of autograd.
    The gradients of the parameters leave the product and the sum in float32, where torch rounds them to 16 bits.

    The rows of a 16-bit result with a vocabulary like 50257 do not all begin at a multiple of 16 bytes, for which
    cuBLAS has only slow kernels. From 4096 features and some hundred rows on, the result is then a product for each
    kind of row, of the columns that are aligned there, and one of the few columns at the ends. The backward makes a
    copy of the gradient in aligned rows, which is as large as the result.

    Args:
        input: (..., in_features). The kernel takes contiguous gradients of two dimensions or more, but not of float32,
            where torch's sum has the smaller error.
        weight: (out_features, in_features).
        bias: (out_features,), or None.

    Returns:
        (..., out_features). Without autocast and below 2**19 elements torch's sum is as fast, and an unforced call is
        torch's throughout.

    Keeps: input and weight, as torch does; under autocast their casts.

    Raises:
        RuntimeError: under autocast, the backward is to be differentiated, and a parameter changed after the forward.
    """
    return _linear.linear(input, weight, bias)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, act: str | None = "silu"
) -> Tensor:
    r"""The linear layer of act(gate)·up, without this product in memory between forward and backward.

    .. math:: y = (\text{act}(gate) \cdot up)\, W^T + b

    Stands for ``F.linear(act(gate) * up, weight, bias)``: the second half of a gated MLP, with ``weight`` and ``bias``
    of its down projection. Torch computes the matrix products.

    Args:
        gate, up: (..., in_features), as for :func:`swiglu`.
        weight: (out_features, in_features). The kernels take a plain tensor of gate's dtype, or of any floating dtype
            that autocast casts to the one of the product.
        bias: (out_features,) in a dtype that the weight may have, or None.
        act: None or the name of an activation, as for :func:`bias_act`, with torch's default parameters.

    Returns:
        (..., out_features).

    Keeps: gate, up and weight. The backward recomputes the product where weight needs a gradient, and then overwrites
    it with the gradient of gate: at most four tensors of gate's size are in memory, gate and up among them, where
    :func:`swiglu` and :func:`torch.nn.functional.linear` have six. The backward of this backward is the composition's.

    Raises:
        ValueError: act is not the name of an activation.
    """
    return _glu.gated_linear(gate, up, weight, bias, act)


@formerly("x", required=1)
def glu(
    input: Tensor = REQUIRED,
    dim: int = -1,
    *,
    act: str | None = "sigmoid",
    gate_first: bool = False,
    x: Tensor | None = None,
) -> Tensor:
    r"""a·act(b) for the chunks a and b of a tensor along one dimension, or act(a)·b, without copies of them.

    .. math:: y = a \cdot \text{act}(b), \qquad (a, b) = \text{input}

    Stands for :func:`torch.nn.functional.glu` with any activation: ``a, b = input.chunk(2, dim); a * act(b)``.

    Args:
        input: of an even size along ``dim``.
        dim: the dimension that is halved.
        act: name of an activation as for :func:`bias_act`, with torch's default parameters; None for a·b.
        gate_first: whether act applies to the first chunk, as in models that pack ``gate`` before ``up``.

    Returns:
        A tensor of half the size along ``dim``.

    Keeps: the input. The backward recomputes the activation, and writes one gradient.

    Raises:
        ValueError: act is not the name of an activation.
        RuntimeError: the size along ``dim`` is odd.
    """
    if x is not None:
        input = renamed("glu", "x", "input", x, input)
    second: object = dim
    if isinstance(second, str):  # act came before dim
        act, dim = renamed("glu", "the second argument", "act", second, None), -1
    return _glu.glu(input, dim, act, gate_first)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    *,
    rotary_dim: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Rotary position embedding of queries and keys in one kernel.

    .. math:: (a, b) \mapsto (a \cos_a - b \sin_a,\; b \cos_b + a \sin_b)

    for each pair of elements of the last dimension; a and b are half of the rotated part apart. Stands for
    ``q * cos + rotate_half(q) * sin``, with ``torch.cat((-x2, x1), -1)`` of the two chunks of x as ``rotate_half(x)``,
    and the same of k, rounded once. Llama pairs elements so; GPT-J and Cohere are ``interleaved``.

    Args:
        q, k: queries and keys, (batch, heads, seq, head_dim) or (batch, seq, heads, head_dim) or any of their views,
            each with any number of heads; k may be None. The kernels take up to four dimensions and one dtype.
        cos, sin: tables that broadcast against q and k: (seq, d) or (batch, 1, seq, d) where the heads come before the
            sequence, (seq, 1, d) or (batch, seq, 1, d) where they come after it. For the (batch, seq, d) of model
            libraries pass ``cos.unsqueeze(1)`` or ``cos.unsqueeze(2)``. The kernels take q's dtype, or float32 with a
            16-bit q, and no table that needs a gradient.
        interleaved: whether pairs are neighbours, ``x[..., ::2]`` and ``x[..., 1::2]``.
        rotary_dim: how many elements of a head rotate, from the first; the others pass through. Default: the number of
            columns of the tables. Twice that number where the tables have one column for each pair, as in flash-attn
            and GPT-J.
        dtype: of the results, for code that rotates ``q.float()`` and casts the result: q and k count as float32 where
            they are narrower. Default: the dtype of ``q * cos``, which is float32 for a 16-bit q with float32 tables.

    Returns:
        (rotated q, rotated k), in the memory order of the torch composition; None for a k of None.

    Keeps: cos and sin.

    Raises:
        ValueError: rotary_dim is neither the number of columns of the tables nor twice that.
    """
    return _rotary.rotary(q, k, cos, sin, interleaved, rotary_dim, dtype)


def qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float | None = 1e-6,
    interleaved: bool = False,
    *,
    casting: str = "torch",
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Rotary position embedding of queries and keys whose heads are normalised before: Qwen3, Gemma 3, FLUX.

    .. math:: q \mapsto \operatorname{rotary}\left(\frac{q}{\sqrt{\mathrm{E}[q^2] + \epsilon}} \cdot
        \text{q\_weight}\right)

    and the same of k. Stands for ``rms_norm`` of each, over the elements of a head, and the composition of
    :func:`rotary`: a kernel for each norm, and one for each rotation.

    Args:
        q, k, cos, sin, interleaved, rotary_dim: as for :func:`rotary`.
        q_weight, k_weight: (head_dim,), or None.
        eps, casting: as for :func:`rms_norm`.

    Returns:
        (q, k), in the memory order of the torch composition. A norm copies what is not contiguous, as torch does: pass
        (batch, seq, heads, head_dim), before the transposition.

    Keeps: q, k, the weights, an rstd for each head of each token; cos and sin.
    """
    return _rotary.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps, interleaved, casting, rotary_dim)


# ---- residuals -------------------------------------------------------------------------------------------------------


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    r"""residual + dropout(x) in one pass: the end of a sublayer of a transformer.

    .. math:: y = \text{residual} + \frac{x \cdot m}{1 - p}, \qquad m_i = 0 \text{ with probability } p, \text{ else } 1

    Stands for ``residual + F.dropout(x, p, training)``, rounded once instead of twice.

    Args:
        x, residual: tensors that broadcast against each other. The kernels take one shape and one dtype, or a float32
            residual with a 16-bit x.
        p: probability with which elements of x are zeroed.
        training: whether dropout applies.

    The kernels draw one seed from torch's generator of the device and derive the mask from it (Philox), element by
    element in the memory order of the result. The mask does not depend on dtypes, the layout of the gradient or the
    backend. It follows :func:`torch.manual_seed` and activation checkpointing, and each replay of a CUDA graph draws a
    new one. It differs from the mask that ``F.dropout`` draws from the same generator.

    Keeps: the seed, 8 bytes.

    Raises:
        ValueError: p is not between 0 and 1.
    """
    return _residual.dropout_add(x, residual, p, training)


def scale_add(
    x: Tensor, gamma: Tensor | None, residual: Tensor, drop_path: float = 0.0, training: bool = False
) -> Tensor:
    r"""residual + drop_path(gamma·x) in one pass: LayerScale, stochastic depth and the residual.

    .. math:: y = \text{residual} + \frac{\text{gamma} \cdot x \cdot m}{1 - \text{drop\_path}}

    Stands for ``residual + drop_path(x * gamma)``, with the ``drop_path`` of timm and torchvision
    (``StochasticDepth(p, "row")``), rounded once. One kernel computes the gradients of x and gamma.

    Args:
        x, residual: as for :func:`dropout_add`.
        gamma: broadcasts to x, or None for no scale. The kernels take a vector along one dimension: (C,) along the last
            one, (C, 1, 1) along the channels of (N, C, H, W) in either memory format; in x's dtype, or in float32 where
            the residual is.
        drop_path: probability with which whole samples (indices of dimension 0) of x·gamma are zeroed; the others are
            divided by 1 - drop_path.
        training: whether drop_path applies. After the same ``torch.manual_seed``, timm and torchvision drop the same
            samples.

    Keeps: x if gamma needs a gradient, a reference to gamma, and in training with drop_path a number for each sample.

    Raises:
        ValueError: drop_path is not between 0 and 1.
    """
    return _residual.scale_add(x, gamma, residual, drop_path, training)


# ---- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Cross-entropy of logits and classes: the forward reads the logits once, the backward reads and writes them once.

    .. math:: l_i = w_t \left(\log \sum_c \exp(s_c) - s_t\right) + \text{z\_loss} \left(\log \sum_c \exp(s_c)\right)^2,
        \qquad s = \text{softcap} \cdot \tanh(\text{input} / \text{softcap})

    Stands for :func:`torch.nn.functional.cross_entropy` of ``softcap * torch.tanh(input / softcap)``, plus PaLM's
    z-loss. Computed in float32 and rounded once.

    Args:
        input: logits, of shape (C,), (N, C) or (N, C, d1, ...).
        target: classes, of input's shape without C. One that is out of range raises an IndexError on a CPU and is a
            device-side assert on a GPU, as in torch. Or probabilities in input's shape, where torch computes the call.
        weight: (C,), a factor for each class; without a gradient, as in torch.
        size_average, reduce: deprecated in torch, too.
        ignore_index: a target without a loss. Its row is not read, and has a gradient of 0 whatever it holds.
        reduction: "none", "mean" (weighted by ``weight``, NaN where all rows are ignored) or "sum".
        label_smoothing: from 0 to 1, the share of the uniform distribution in the target.
        softcap: a number above 0 that bounds the logits, or None.
        z_loss: factor of the squared log-sum-exp of each row that is not ignored. As in Liger, ``weight`` does not
            multiply it; "mean" divides it by what it divides the loss by, the sum of the weights of the targets or,
            without a weight, their number.
        inplace_backward: allows the backward to write the gradient over the logits, which saves half of the memory.
            Logits that are a leaf are refused. A second backward raises, and so does that of another operation that
            kept the logits. No effect where no kernel applies, where the logits are not contiguous, under
            ``create_graph`` and under ``torch.compile``.

    Returns:
        A tensor of input's dtype; float32 under autocast, as in torch.

    Keeps: input, target, weight, and two numbers of each row that add up to its log-sum-exp.

    Raises:
        ValueError: reduction is not valid, softcap is not above 0, or inplace_backward is True for a leaf.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _cross_entropy.cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
    )


@formerly("hidden", "bias", "class_weight", required=3)
def linear_cross_entropy(
    input: Tensor = REQUIRED,
    linear_weight: Tensor = REQUIRED,
    target: Tensor = REQUIRED,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    r"""The cross-entropy of a linear layer's logits, which are never in memory as a whole.

    .. math:: \text{cross\_entropy}(\text{logits}, \text{target}), \qquad
        \text{logits} = \text{logit\_scale} \cdot (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias})

    Stands for ``cross_entropy(F.linear(input, linear_weight, linear_bias) * logit_scale, target)`` at the end of a
    language model, and for ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 and later. It processes the rows
    of the input in chunks. For "mean" and "sum" the forward computes the gradients as well, by three matrix products a
    chunk, and the backward multiplies them by the incoming gradient. Call it under :func:`torch.no_grad` where no
    backward follows: it then computes the loss alone.

    Args:
        input: (H,) or (N, H), as in torch, or (..., H).
        linear_weight: (C, H) in the input's dtype, under autocast in any. It may be tied, for example to an embedding.
            A sharded one (a DTensor, as FSDP2 has it outside of the forward that it wraps) is refused beside a plain
            input. For a K-dimensional loss (C, d1, ..., dK, H), with an input of (N, H) and the whole logits in memory.
            A frozen one may be quantised: bitsandbytes' ``Params4bit`` or ``Int8Params``, or any tensor with a
            ``dequantize()`` like torchao's. The products are those of the dequantised weight, whatever else its library
            does to an input. An eighth of the classes at a time is dequantised, twice a chunk; all of them at once
            under torch.compile, in the composition, and of a type that has no slices of rows.
        target: (...), classes as int64; (N, d1, ..., dK) for a K-dimensional loss. One that is out of range raises an
            IndexError on a CPU and is a device-side assert on a GPU, as in torch. Or probabilities, (..., C) or
            (N, C, d1, ..., dK), with the logits in memory as the probabilities are.
        linear_bias: (C,), for a K-dimensional loss (C, d1, ..., dK); or None.
        weight, reduction, ignore_index, label_smoothing: as for :func:`cross_entropy`. An ``ignore_index`` of None is
            -100; with probabilities, only None is valid.
        options: torch's ``LinearCrossEntropyOptions``. Its ``batch_chunk_size`` is the default of ``chunk_size``, and
            an ``acc_dtype`` of float32 that of ``acc_dtype``; the others have no effect, since every call is chunked
            and a retained graph always works.
        softcap, z_loss: a bound on the logits, softcap·tanh(logits/softcap), and the factor of the squared log-sum-exp
            of each row that is not ignored, which ``weight`` does not multiply.
        logit_scale: a number that multiplies the logits, as in Cohere's models (Granite's divide by one).
        low_rank: the factors of an adapter's product, (..., R) and (C, R), which is added to the layer's result before
            anything else: logits = logit_scale·(input·linear_weightᵀ + linear_bias + low_rank[0]·low_rank[1]ᵀ). For
            LoRA pass ``scaling * lora_A(dropout(input))`` and ``lora_B.weight``; several adapters are one pair,
            concatenated along R. Both are in the input's dtype, or both float32 beside a 16-bit input, and then are
            cast for their products; their gradients come in their own dtype. A linear_weight that needs no gradient
            has no product for one.
        chunk_size: rows of a chunk. Default: an eighth of the rows or less, but 896 or more; on a GPU short of memory
            less. Up to nine such chunks add to a 16-bit gradient of the weight in its own dtype, rounded once for each.
            They add in float32 if there is room for that in an eighth of the logits, or if there are more chunks.
        acc_dtype: float32, to sum a 16-bit gradient of the weight over the chunks in that in any case and round it
            once: 4 bytes of memory for each element of the weight. Not for DTensors.

    Returns:
        A scalar, or for "none" the losses in the shape of the target. In the input's dtype; float32 under autocast,
        which torch ignores where it chunks by ``options``, and so does this.

    The composition, which has the logits whole, computes calls whose logits have fewer than 2^20 elements on a GPU or
    2^23 on a CPU, unless a chunk_size is given or the weight is quantised. It also serves transforms of torch.func,
    exports and second derivatives.

    Keeps: references to all tensors; for "mean" and "sum" the gradients. For "none" the backward computes the logits
    again, by four products in all; so does a second backward through a retained graph.

    Raises:
        RuntimeError: the shapes do not fit, or an ignore_index is given with probabilities.
        ValueError: reduction or acc_dtype is not valid, softcap or chunk_size is not above 0, or a quantised weight
            lacks its scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, logit_scale is not a number,
            or low_rank is not a pair of tensors.
    """
    if hidden is not None:
        input = renamed("linear_cross_entropy", "hidden", "input", hidden, input)
    if weight is not None and linear_weight is REQUIRED:
        linear_weight, weight = renamed("linear_cross_entropy", "weight", "linear_weight", weight, None), None
    if bias is not None:
        linear_bias = renamed("linear_cross_entropy", "bias", "linear_bias", bias, linear_bias)
    if class_weight is not None:
        weight = renamed("linear_cross_entropy", "class_weight", "weight", class_weight, weight)
    if options is not None and chunk_size is None:
        chunk_size = options.batch_chunk_size
    if options is not None and options.acc_dtype is torch.float32 and acc_dtype is None:
        acc_dtype = torch.float32
    if ignore_index is None:
        ignore_index = -100
    elif torch.is_floating_point(target):
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    alone = options is not None and _linear_cross_entropy.ignores_autocast(
        input, linear_weight, target, linear_bias, reduction, label_smoothing
    )
    with torch.autocast(input.device.type, enabled=False) if alone else nullcontext():
        return _linear_cross_entropy.linear_cross_entropy(
            input, linear_weight, target, linear_bias, weight, ignore_index, reduction, label_smoothing, softcap,
            z_loss, logit_scale, low_rank, chunk_size, acc_dtype,
        )  # fmt: skip


@overload
def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = ..., ignore_index: int = ...,
    softcap: float | None = ..., logit_scale: float = ..., low_rank: tuple[Tensor, Tensor] | None = ...,
    entropy: Literal[False] = ..., chunk_size: int | None = ..., acc_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = ..., ignore_index: int = ...,
    softcap: float | None = ..., logit_scale: float = ..., low_rank: tuple[Tensor, Tensor] | None = ...,
    entropy: Literal[True], chunk_size: int | None = ..., acc_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The log-probabilities of classes by a linear layer's logits, which are never in memory as a whole.

    .. math:: \log p_t, \qquad p = \text{softmax}(\text{logit\_scale} \cdot
        (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}))

    What losses of preferences and of reinforcement are made of (:func:`dpo_loss`, :func:`grpo_loss`), one number for
    each token. Stands for ``log_softmax(F.linear(input, linear_weight, linear_bias).float() * logit_scale, -1)``, of
    which it picks the targets.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target: (...), classes as int64. Rows with ``ignore_index`` take part in no product if there are many logits.
        linear_bias: (C,) or None.
        softcap, low_rank, chunk_size, acc_dtype: as for :func:`linear_cross_entropy`.
        logit_scale: a number that multiplies the logits: one over the temperature.
        entropy: whether to return the entropies :math:`-\sum_j p_j \log p_j` as well, which have a gradient, too.

    Returns:
        The log-probabilities in the shape of the target, never above 0, and 0 where the target is ``ignore_index``; or
        the pair of these and the entropies. In float32, float64 for float64.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    and transforms of torch.func, exports and second derivatives.

    Keeps: references to all tensors, and three numbers for each row. The backward computes the logits again.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: softcap or chunk_size is not above 0, acc_dtype is not valid, or a quantised weight lacks its
            scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, logit_scale is not a number,
            or low_rank is not a pair of tensors.
    """
    found = _linear_log_prob.linear_log_prob(
        input, linear_weight, target, linear_bias, ignore_index, softcap, logit_scale, low_rank, chunk_size, acc_dtype
    )
    return found if entropy else found[0]


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    target_input: Tensor,
    target_weight: Tensor | None = None,
    *,
    divergence: str = "kl",
    linear_bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    target_softcap: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float = 1.0,
    reduction: str = "batchmean",
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""A loss of distillation between two heads, or a head and given logits, without the logits in memory as a whole.

    .. math:: L = D(p, q), \qquad q = \mathrm{softmax}(s / T), \quad p = \mathrm{softmax}(t / T)

    for the scores of the student and the teacher,

    .. math:: s = \text{logit\_scale} \cdot (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}), \quad
        t = \text{target\_logit\_scale} \cdot (\text{target\_input} \cdot \text{target\_weight}^T + \text{target\_bias})

    Stands for the divergence of the whole logits in float32, such as ``kl_div_logits(F.linear(input, linear_weight),
    F.linear(target_input, target_weight))``. The chunks have no gradient of the teacher: if one of its tensors requires
    one, the composition with whole logits computes it. Pass ``target_weight.detach()`` of a teacher that is not frozen.

    Args:
        input: (..., H), hidden states of the student.
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target_input: (..., H'), hidden states of the teacher; without target_weight (..., C), logits of the teacher, or
            log-probabilities, which are logits too. Given logits may have a dtype of their own.
        target_weight: (C, H'), or None. A quantised one is dequantised as a whole, once in each pass.
        divergence: a number for each row,

            - ``"kl"``: T² KL(p || q), as :func:`kl_div_logits`.
            - ``"reverse_kl"``: T² KL(q || p).
            - ``"js"``: β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q, as :func:`js_div_logits`: with a
              beta of 0 KL(p || q), with a beta of 1 KL(q || p), and no factor T².
            - ``"tv"``: the total variation distance, ½ Σ \|p - q\|.
            - ``"cosine"``: 1 - s·t / (\|s\| \|t\|) of the scores, which no temperature changes.

        linear_bias, target_bias: (C,) or None.
        target: (...), labels as int64, or None. A row whose label is ``ignore_index`` has no loss and no gradient, does
            not count, and takes part in no product if there are many logits. Other labels have no meaning.
        ignore_index: that label.
        beta: weight of the teacher's distribution in m, from 0 to 1.
        temperature: T.
        softcap, target_softcap: scores become softcap·tanh(scores / softcap), before the temperature.
        logit_scale, target_logit_scale: numbers that multiply the logits.
        reduction: as for :func:`kl_div_logits`: ``"none"``, ``"sum"``, ``"batchmean"`` or ``"mean"``.
        low_rank: the factors of an adapter's product on the student's head, as for :func:`linear_cross_entropy`.
        chunk_size: rows of the student's logits that are in memory at a time, as for :func:`linear_cross_entropy`.
            Beside them are 256 rows of the logits of the teacher's head, or an eighth of the chunk if that is more.
        acc_dtype: as for :func:`linear_cross_entropy`.

    Returns:
        A tensor of the logits' dtype, computed in float32 and rounded once: of the shape of a row's labels without a
        reduction, else a scalar. Float32 under autocast.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    and transforms of torch.func, exports and second derivatives.

    Keeps: references to all tensors, and the gradients, which the forward computes; with ``reduction="none"`` the
    backward computes the logits again.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: divergence, reduction or acc_dtype is not valid, target has another shape, temperature, a softcap or
            chunk_size is not above 0, beta is not between 0 and 1, there is a target_bias without a target_weight, or a
            quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, there is an acc_dtype beside DTensors, a scale is not a number, or
            low_rank is not a pair of tensors.
    """
    return _linear_divergence.linear_divergence(
        input, linear_weight, linear_bias, target_input, target_weight, target_bias, target, ignore_index, divergence,
        reduction, softcap, logit_scale, target_softcap, target_logit_scale, temperature, beta, low_rank, chunk_size,
        acc_dtype,
    )  # fmt: skip


def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    log_prob: bool = False,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> torch.return_types.topk:
    r"""The k largest logits of a linear layer with their classes; the logits are never in memory as a whole.

    .. math:: \text{topk}(\text{logit\_scale} \cdot
        (\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}), k)

    Stands for ``torch.topk(F.linear(input, linear_weight, linear_bias) * logit_scale, k)``, for example of the logits
    of a teacher. Call it under :func:`torch.no_grad`: a call whose values need a gradient has the logits whole.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        k: how many, at most C.
        linear_bias: (C,) or None.
        softcap: a bound on the logits, as for :func:`linear_cross_entropy`.
        logit_scale: a number that multiplies the logits. A negative one reverses their order.
        log_prob: whether to return log-probabilities instead of the logits: those of all C classes, not of the k.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        A ``torch.return_types.topk`` of values and indices, both (..., k), the largest first. The values are in the
        input's dtype, under autocast in autocast's; log-probabilities are in float32, float64 for float64. The indices
        are int64. NaN counts as the largest. Which of equal logits are returned is not specified, as in torch.

    For the gradient of the log-probabilities of given classes, one for each row, use :func:`linear_log_prob`. The
    composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    transforms of torch.func, exports, and calls whose values need a gradient.

    Keeps: nothing; what the composition keeps if the values need a gradient.

    Raises:
        RuntimeError: the shapes do not fit, or there are fewer than k classes.
        ValueError: softcap is not above 0, chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, logit_scale is not a number, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_topk(
        input, linear_weight, linear_bias, k, softcap, logit_scale, log_prob, low_rank, chunk_size
    )


def linear_argmax(
    input: Tensor,
    linear_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""The class of the largest logit of a linear layer; the logits are never in memory as a whole.

    .. math:: \text{argmax}(\text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias})

    Stands for ``F.linear(input, linear_weight, linear_bias).argmax(-1)``. Greedy decoding and metrics need no more of
    the logits.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        linear_bias: (C,) or None.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        (...) of int64, without a gradient. Of equal logits the first counts, and NaN as the largest.

    The composition, which has the logits whole, computes calls with few logits, as for :func:`linear_cross_entropy`,
    transforms of torch.func and exports.

    Keeps: nothing.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_argmax(input, linear_weight, linear_bias, low_rank, chunk_size)


def linear_accuracy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""The share of labels with the largest logit of a linear layer; the logits are never in memory as a whole.

    .. math:: \frac{1}{n} \sum_{i = 1}^{n} [\text{argmax}(z_i) = t_i], \qquad
        z = \text{input} \cdot \text{linear\_weight}^T + \text{linear\_bias}

    The token accuracy of a language model: the mean of ``F.linear(input, linear_weight, linear_bias).argmax(-1) ==
    target`` over the rows whose target is not ``ignore_index``.

    Args:
        input: (..., H).
        linear_weight: (C, H), as for :func:`linear_cross_entropy`.
        target: (...), classes as int64. Rows with ``ignore_index`` take part in no product if there are many logits. A
            target that is no class is not an error; nothing equals it.
        linear_bias: (C,) or None.
        low_rank, chunk_size: as for :func:`linear_cross_entropy`.

    Returns:
        A scalar of float32, without a gradient; NaN if no row has a label. Of equal logits the first counts.

    The composition serves the same calls as for :func:`linear_argmax`.

    Keeps: nothing.

    Raises:
        RuntimeError: the shapes do not fit.
        ValueError: chunk_size is not above 0, or a quantised weight lacks its scales.
        TypeError: linear_weight alone is a DTensor, or low_rank is not a pair of tensors.
    """
    return _linear_topk.linear_accuracy(input, linear_weight, target, linear_bias, ignore_index, low_rank, chunk_size)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Any = None,
    *,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of logits whose classes are sharded over the ranks of a process group, with two all-reduces.

    .. math:: l_i = \log \sum_c \exp(s_c) - s_t, \qquad c \text{ in the shards of all ranks}

    Stands for ``cross_entropy(torch.cat(shards, -1), target)``. Every rank of the group calls it with its shard of the
    logits, the result of a linear layer whose weight is sharded over the vocabulary, and with the same target. Every
    rank gets the same loss. The ranks reduce three numbers a row, five with label smoothing.

    Args:
        logits: (..., V of this rank), the classes from ``vocab_start`` on.
        target: (...), classes of the whole vocabulary as int64.
        group: a :class:`torch.distributed.ProcessGroup`; default, as there, all ranks.
        vocab_start: the first class of this shard. Default, for shards of equal width: rank in the group times V of
            this rank.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as for :func:`linear_cross_entropy`.

    Returns:
        A scalar, or for "none" the losses in target's shape. In logits' dtype; float32 under autocast.

    The gradient is that of this rank's loss by its own logits, without communication. Code that computes the loss on
    each rank, as tensor parallelism does, does not sum it over the ranks. A second derivative raises.

    Keeps: logits, target, and the log-sum-exp of each row.

    Raises:
        ValueError: target is not of int64 in logits' shape without the classes, an option is not valid, or shards of
            unequal width come without vocab_start (on a GPU a device-side assert).
        IndexError: a class is in no shard, or in several; on a GPU a device-side assert.
    """
    return _vocab_parallel.vocab_parallel_cross_entropy(
        logits, target, group, vocab_start, ignore_index, reduction, label_smoothing, softcap, z_loss
    )


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    r"""Kullback-Leibler divergence of log-probabilities, computed and reduced in one pass.

    .. math:: l = p \cdot (\log p - \text{input}), \qquad p = \text{target}
        \quad\text{or, with log\_target,}\quad p = \exp(\text{target})

    Stands for :func:`torch.nn.functional.kl_div`, with its warning at ``reduction="mean"``.

    Args:
        input: log-probabilities of any shape.
        target: probabilities, or with ``log_target`` their logarithms; the kernels take input's shape and dtype.
        size_average, reduce: torch's deprecated spelling of ``reduction``.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over all elements, or ``"batchmean"``, the sum divided by the size
            of the first dimension.
        log_target: whether the target is in log space.

    Returns:
        A tensor of input's dtype, a scalar with a reduction; float32 under autocast.

    Keeps: target; input too where target needs a gradient. As in torch, the gradient of a target that is not in log
    space is NaN where the target is 0.

    Raises:
        ValueError: reduction is not valid.
    """
    return _kl_div.kl_div(input, target, size_average, reduce, reduction, log_target)


def kl_div_logits(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    r"""Kullback-Leibler divergence of a student's distribution from a teacher's, from the logits of both in one pass.

    .. math:: L = T^2 \sum_i p_i (\log p_i - \log q_i), \qquad
        p = \mathrm{softmax}(\text{teacher} / T), \quad q = \mathrm{softmax}(\text{student} / T)

    over the last dimension of every row: the loss of knowledge distillation (Hinton et al., 2015). The factor T² keeps
    the size of the gradients when the temperature changes. An element where p is 0 (a logit of minus infinity) counts
    as 0. Stands for ``T**2 * F.kl_div(F.log_softmax(student / T, -1), F.log_softmax(teacher / T, -1),
    log_target=True)``, with the reductions below.

    Args:
        student, teacher: logits (\*, C); the kernels take one shape and one dtype.
        labels: (\*), or None. A row whose label is ``ignore_index`` has no loss and no gradient, and does not count.
        ignore_index: that label.
        temperature: T.
        reduction: ``"none"``, a loss for each row; ``"sum"`` of them; ``"batchmean"``, their mean over the rows that
            count, of all dimensions (torch's kl_div divides by the size of the first); ``"mean"``, the same divided by
            C. NaN where no row counts.

    Returns:
        A tensor of the logits' dtype, computed in float32 and rounded once: of labels' shape without a reduction, else
        a scalar. Float32 under autocast.

    Keeps: student and teacher, the labels, and for each row the maxima and log-sum-exps of both and two more numbers.

    Raises:
        ValueError: reduction is not valid, temperature is not positive, or labels has another shape.
    """
    return _kl_div.divergence(student, teacher, labels, ignore_index, 0.0, temperature, True, reduction)


def js_div_logits(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between a student's distribution and a teacher's, from the logits of both.

    .. math:: L = \beta\, \mathrm{KL}(p \,\|\, m) + (1 - \beta)\, \mathrm{KL}(q \,\|\, m), \qquad
        m = \beta p + (1 - \beta) q

    with p and q as for :func:`kl_div_logits`, and no factor of the temperature: the loss of generalised knowledge
    distillation (Agarwal et al., 2024, "On-Policy Distillation of Language Models", eq. 1), and that of TRL's
    GKDTrainer and of Liger. At the ends of beta the formula is 0. As in these libraries, a beta of 0 gives the forward
    divergence KL(p || q), and a beta of 1 the reverse one, KL(q || p), which it approaches in proportion.

    Args:
        student, teacher, labels, ignore_index, temperature, reduction: as for :func:`kl_div_logits`.
        beta: weight of the teacher's distribution in the mixture m, from 0 to 1.

    Returns:
        What :func:`kl_div_logits` returns.

    Keeps: what :func:`kl_div_logits` keeps.

    Raises:
        ValueError: beta is not between 0 and 1, or what :func:`kl_div_logits` raises.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"expected beta to be between 0 and 1, but got {beta}")
    if beta == 1.0:
        student, teacher, beta = teacher, student, 0.0
    return _kl_div.divergence(student, teacher, labels, ignore_index, beta, temperature, False, reduction)


# ---- losses of preference and reinforcement learning -----------------------------------------------------------------


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Direct preference optimisation (DPO) and its variants, from the log-probabilities of pairs of completions.

    .. math:: L = -\log \sigma(\beta (u - v)), \qquad
        u = \log \frac{\pi(\text{chosen})}{\pi_{\text{ref}}(\text{chosen})}, \quad
        v = \log \frac{\pi(\text{rejected})}{\pi_{\text{ref}}(\text{rejected})}

    for each pair, or another loss of u and v. Stands for the loss of TRL's DPOTrainer, with its defaults.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions by the policy, summed over the tokens.
        ref_chosen, ref_rejected: (B,), those by the reference.
        beta: the weight of the divergence from the reference.
        loss_type: in the formulas h = β(u - v), and ε is ``label_smoothing``.

            - ``"sigmoid"``: -log σ(h), DPO <https://arxiv.org/abs/2305.18290>.
            - ``"hinge"``: max(1 - h, 0), SLiC <https://arxiv.org/abs/2305.10425>.
            - ``"ipo"``: (u/chosen_length - v/rejected_length - 1/(2β))² <https://arxiv.org/abs/2310.12036>.
            - ``"exo_pair"``: q log(q/(1 - ε)) + (1 - q) log((1 - q)/ε), with q = σ(h)
              <https://arxiv.org/abs/2402.00856>, which recommends an ε of 0.001.
            - ``"nca_pair"``: -log σ(βu) - ½ log σ(-βu) - ½ log σ(-βv) <https://arxiv.org/abs/2402.05369>.
            - ``"robust"``: (-(1 - ε) log σ(h) + ε log σ(-h)) / (1 - 2ε) <https://arxiv.org/abs/2403.00409>.
            - ``"bco_pair"``: -log σ(βu) - log σ(-βv) <https://arxiv.org/abs/2404.04656>.
            - ``"sppo_hard"``: (u - 1/(2β))² + (v + 1/(2β))² <https://arxiv.org/abs/2405.00675>.
            - ``"aot"``: -(1 - ε) log σ(βd) - ε log σ(-βd), with d the difference of chosen - rejected and of
              ref_chosen - ref_rejected, each sorted over the batch <https://arxiv.org/abs/2406.05882>.
            - ``"aot_unpaired"``: the same, with d the difference of u and v, each sorted.
            - ``"apo_zero"``: σ(-βu) + σ(βv), and ``"apo_down"``: σ(βu) + σ(-h) <https://arxiv.org/abs/2408.06266>.
            - ``"discopop"``: -(1 - m) log σ(h) + m exp(-h), with m = σ(h/τ) <https://arxiv.org/abs/2406.08414>.
            - ``"sft"``: the mean negative log-probability of all chosen tokens, for each pair the same.
            - ``"sigmoid_norm"``: -log σ(β(u/chosen_length - v/rejected_length)), DPO of Tülu 3
              <https://arxiv.org/abs/2411.15124>.

        label_smoothing: for "exo_pair", "robust", "aot" and "aot_unpaired". Others ignore it.
        divergence: what beta weighs <https://arxiv.org/abs/2309.16240>. It replaces u and v in the losses of h, and in
            "ipo" and "sigmoid_norm", by: u itself for ``"reverse_kl"``, 1 - exp(-u) for ``"forward_kl"``,
            log 2 + log σ(u) for ``"js_divergence"``, and (exp((α - 1)u) - 1)/(α - 1) for ``"alpha_divergence"``. The
            other losses take "reverse_kl" only.
        alpha: α of "alpha_divergence". At 1 it is "reverse_kl".
        tau: τ of "discopop".
        chosen_length, rejected_length: (B,), the numbers of tokens of the completions. "ipo" and "sigmoid_norm" need
            both, "sft" needs chosen_length.
        weight: (B,), factors of the losses, such as those of WPO <https://arxiv.org/abs/2406.11827>. TRL computes them
            without a gradient. "aot" and "aot_unpaired" take none.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,). The losses of "aot" and "aot_unpaired" are not in the order of the pairs.

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: loss_type, divergence or reduction is not valid, or the divergence or weight does not go with the
            loss type. Shapes differ, a length is missing, or label_smoothing is outside of [0, 0.5) for "robust" or
            outside of (0, 1) for "exo_pair".
    """
    return _preference.dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta, loss_type, label_smoothing, divergence, alpha, tau,
        chosen_length, rejected_length, weight, reduction,
    )  # fmt: skip


def kto_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    label: Tensor,
    kl: float | Tensor | None,
    *,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Kahneman-Tversky optimisation (KTO), from the log-probabilities of completions that are desirable or not.

    .. math:: L = \begin{cases} w_d\, \sigma(\beta (\text{kl} - u)) & \text{label} \\
        w_u\, \sigma(\beta (u - \text{kl})) & \text{otherwise} \end{cases}, \qquad
        u = \log \frac{\pi(y)}{\pi_{\text{ref}}(y)}

    <https://arxiv.org/abs/2402.01306>. Stands for the loss of TRL's KTOTrainer, with its defaults.

    Args:
        log_prob: (B,), log-probabilities of the completions by the policy, summed over the tokens.
        ref_log_prob: (B,), those by the reference.
        label: (B,) of torch.bool, True where the completion is desirable.
        kl: an estimate of the divergence of the policy from the reference: a number, or a tensor of one element, which
            gets no gradient. A negative one counts as 0, and so does None.
        beta: the weight of the divergence from the reference.
        loss_type: ``"kto"``, or ``"apo_zero_unpaired"``, which ignores kl <https://arxiv.org/abs/2408.06266>.
        desirable_weight, undesirable_weight: the factors of the losses.
        reduction: "none", "mean" or "sum". As in TRL, losses that are NaN do not count in the mean.

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each completion.

    Raises:
        ValueError: loss_type or reduction is not valid, shapes differ, label is not of torch.bool, or kl has several
            elements.
    """
    return _preference.kto_loss(
        log_prob, ref_log_prob, label, kl, beta, loss_type, desirable_weight, undesirable_weight, reduction
    )


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, reduction: str = "mean") -> Tensor:
    r"""The odds ratio term of ORPO, from the mean log-probabilities of pairs of completions.

    .. math:: L = -\beta \log \sigma\left(\log \frac{p_c}{1 - p_c} - \log \frac{p_r}{1 - p_r}\right), \qquad
        p_c = \exp(\text{chosen}), \quad p_r = \exp(\text{rejected})

    <https://arxiv.org/abs/2403.07691>. The loss of TRL's ORPOTrainer is ``nll + orpo_loss(chosen, rejected)``, with the
    cross-entropy of the chosen sequences as ``nll``.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, averaged over the tokens.
        beta: the weight of this term, λ in the paper.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,); float32 for 16-bit inputs, as in TRL. A log-probability of exactly 0 has infinite
        odds, and a gradient that is not finite.

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: reduction is not valid, or the shapes differ.
    """
    return _preference.orpo_loss(chosen, rejected, beta, reduction)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Contrastive preference optimisation (CPO) and its variants: DPO without a reference.

    .. math:: L = -(1 - \epsilon) \log \sigma(h) - \epsilon \log \sigma(-h), \qquad
        h = \beta (\text{chosen} - \text{rejected})

    <https://arxiv.org/abs/2401.08417>, with ε for ``label_smoothing``. Stands for ``CPOTrainer.cpo_loss`` of TRL, with
    its defaults. The trainer adds the cross-entropy of the chosen sequences.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, summed over the tokens. TRL averages them for
            "ipo" and "simpo".
        beta: the factor of the margin.
        loss_type: with d = chosen - rejected

            - ``"sigmoid"``: the formula above.
            - ``"hinge"``: max(1 - h, 0) <https://arxiv.org/abs/2305.10425>.
            - ``"ipo"``: (d - 1/(2β))² <https://arxiv.org/abs/2310.12036>.
            - ``"simpo"``: "sigmoid" with h - γ for h <https://arxiv.org/abs/2405.14734>.

        label_smoothing: for "sigmoid" and "simpo". Others ignore it.
        gamma: γ, the margin that "simpo" aims at.
        alpha: α of AlphaPO <https://arxiv.org/abs/2501.03884>. Other than 0 it replaces each log-probability log p by
            (1 - p^-α)/α.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: loss_type or reduction is not valid, or the shapes differ.
    """
    return _preference.cpo_loss(chosen, rejected, beta, loss_type, label_smoothing, gamma, alpha, reduction)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Simple preference optimisation (SimPO), from the mean log-probabilities of pairs of completions.

    .. math:: L = -\log \sigma(\beta (\text{chosen} - \text{rejected}) - \gamma)

    <https://arxiv.org/abs/2405.14734>. Stands for :func:`cpo_loss` with ``loss_type="simpo"``. The defaults are the
    paper's for Llama 3 8B; those of TRL are a beta of 0.1 and a gamma of 0.5.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, averaged over the tokens.
        beta, gamma, label_smoothing, reduction: as for :func:`cpo_loss`.

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: reduction is not valid, or the shapes differ.
    """
    return _preference.cpo_loss(chosen, rejected, beta, "simpo", label_smoothing, gamma, 0.0, reduction)


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "grpo",
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    ref_log_prob: Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    max_length: int | None = None,
    num_items: float | Tensor | None = None,
    sampling_log_prob: Tensor | None = None,
    off_policy_mask_threshold: float | None = None,
    sampling_ratio: Tensor | None = None,
    weight: Tensor | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_k: tuple[float, float] = (2.0, 3.0),
    vespo_lambda: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    r"""Group relative policy optimisation (GRPO) and its variants, from the log-probabilities of sampled tokens.

    .. math:: L = \frac{1}{B} \sum_i \frac{1}{\sum_t m_{it}} \sum_t m_{it} \left(-\min(r_{it} A_i,\;
        \mathrm{clip}(r_{it}, 1 - \epsilon, 1 + \epsilon_{\text{high}}) A_i) + \beta\, \mathrm{KL}_{it}\right),
        \qquad r_{it} = \frac{\pi(y_{it})}{\pi_{\text{old}}(y_{it})}

    <https://arxiv.org/abs/2402.03300>. Stands for the loss of TRL's GRPOTrainer, with its defaults except for
    ``loss_type``, which is "dapo" there. Gradient accumulation and the entropy bonus are left to the caller.

    Args:
        log_prob: (B, T), log-probabilities of the tokens by the policy.
        old_log_prob: (B, T), those by the policy that the tokens are from, or None for ``log_prob.detach()``.
        advantages: A, (B,) or (B, T).
        mask: m, (B, T) of any dtype. Where it is 0, the log-probabilities may hold anything.
        loss_type: the loss of a token, and what the sum over all tokens is divided by.

            - ``"grpo"``: the formula above.
            - ``"bnpo"``: the same loss of a token, divided by the number of tokens, the sum of the mask.
            - ``"dr_grpo"``: divided by B·max_length <https://arxiv.org/abs/2503.20783>.
            - ``"dapo"``: divided by num_items <https://arxiv.org/abs/2503.14476>.
            - ``"luspo"``: divided by B, meant for level "sequence" <https://arxiv.org/abs/2602.05261>.
            - ``"cispo"``: -min(r, epsilon_high)·A·log_prob, without a gradient by r, divided by num_items
              <https://arxiv.org/abs/2506.13585>. The bound is epsilon_high itself, for which
              <https://arxiv.org/abs/2510.13786> recommends 5.
            - ``"sapo"``: -4/τ·σ(τ(r - 1))·A, divided as for "grpo" <https://arxiv.org/abs/2511.20347>.
            - ``"vespo"``: -φ·A·log_prob with φ = w^k exp(λ(1 - w)), without a gradient, for the ratio w of the whole
              sequence, divided by num_items <https://arxiv.org/abs/2602.10693>.

        level: ``"token"``, or ``"sequence"``, where each token has the geometric mean of the ratios of its sequence:
            GSPO <https://arxiv.org/abs/2507.18071>.
        epsilon, epsilon_high: ε and ε_high. An epsilon_high of None is epsilon.
        delta: an upper bound on r before the minimum, or None <https://arxiv.org/abs/2505.07291>.
        ref_log_prob: (B, T), log-probabilities by the reference, where beta is not 0.
        beta: the factor of KL = exp(d) - d - 1 with d = ref_log_prob - log_prob.
        use_bias_correction_kl: whether r multiplies this KL <https://arxiv.org/abs/2512.02556>.
        max_length: the bound on the length of a completion, for "dr_grpo".
        num_items: the divisor of "cispo", "dapo" and "vespo", a number or a tensor of one: the tokens of all batches
            that are accumulated. Less than 1 counts as 1. Default: the sum of the mask.
        sampling_log_prob: (B, T), log-probabilities by the engine that sampled the tokens, with NaN where it gave none.
            Default: old_log_prob.
        off_policy_mask_threshold: a bound on the mean of sampling_log_prob - log_prob over a sequence. Beyond it a
            negative advantage has no loss but the KL <https://arxiv.org/abs/2512.02556>. Default: no bound.
        sampling_ratio: (B,) or (B, T), the truncated or masked ratio of old policy and sampling engine. It multiplies
            the loss of a token, and for "vespo" w instead: there it is 1 at padding, as TRL has it.
        weight: (B,) or (B, T), a factor of the loss of a token, such as a mask of tokens with a high entropy
            <https://arxiv.org/abs/2506.01939>. It does not multiply the KL.
        sapo_temperatures: τ for positive advantages, and for others.
        vespo_k, vespo_lambda: k and λ for advantages that are not negative, and for negative ones.

    Returns:
        A scalar.

    Keeps: what the torch operations keep, some numbers for each token.

    Raises:
        ValueError: loss_type or level is not valid, shapes do not fit, beta comes without ref_log_prob, or "dr_grpo"
            without max_length.
    """
    options = _preference.GRPOOptions(
        epsilon, epsilon if epsilon_high is None else epsilon_high, delta, sapo_temperatures, vespo_k, vespo_lambda,
        max_length, num_items,
    )  # fmt: skip
    return _preference.grpo_loss(
        log_prob, old_log_prob, advantages, mask, loss_type, level, beta, ref_log_prob, use_bias_correction_kl,
        off_policy_mask_threshold, sampling_log_prob, sampling_ratio, weight, options,
    )  # fmt: skip
