"""Fused operations as functions, with signatures after :mod:`torch.nn.functional`.

Each computes what the torch composition in its docstring computes, in the same shape, dtype, memory format and
autocast behaviour, and falls back to that composition wherever no kernel applies. What an op keeps for its backward is
said under *Keeps*; double backward, ``torch.func`` transforms and ``torch.compile`` work on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from fastlayers.ops import max_pool2d as _max_pool2d
from fastlayers.ops import residual as _residual
from fastlayers.ops import rotary as _rotary
from fastlayers.ops import softmax as _softmax
from fastlayers.ops import squeeze_excite as _squeeze_excite
from fastlayers.ops import vocab_parallel as _vocab_parallel

__all__ = [
    "add_layer_norm",
    "add_relu",
    "add_rms_norm",
    "batch_norm",
    "bias_act",
    "channel_layer_norm",
    "cross_entropy",
    "dropout_add",
    "elu",
    "gated_linear",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "hardswish",
    "instance_norm",
    "js_div_logits",
    "kl_div",
    "kl_div_logits",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "max_pool2d",
    "mish",
    "mul",
    "quick_gelu",
    "reglu",
    "relu2",
    "relu_add",
    "rms_norm",
    "rotary",
    "scale_add",
    "silu",
    "softmax",
    "softplus",
    "squeeze_excite",
    "swiglu",
    "vocab_parallel_cross_entropy",
]


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""softmax(x·scale + mask) along one dimension, reading and writing the scores once.

    .. math:: y_i = \frac{\exp(s_i)}{\sum_j \exp(s_j)}, \qquad s = x \cdot \text{scale} + \text{mask}

    Stands for ``F.softmax(x * scale + mask, dim, dtype=dtype)``.

    Args:
        x: scores of any shape; kernels take float16, bfloat16, float32 and float64.
        dim: the dimension that sums to one.
        scale: a number that multiplies x, as attention's 1/sqrt(d).
        mask: broadcasts against x. Boolean: True takes part, False is minus infinity, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`. Otherwise it is added. A row with nothing left is
            NaN.
        dtype: of the result, and of the computation where wider; as :func:`torch.nn.functional.softmax` has it.

    Returns:
        A contiguous tensor. Under autocast float32, as torch gives it.

    Keeps: the result; of a boolean mask, or one that needs a gradient, a reference.

    Raises:
        TypeError: scale is not a number.
    """
    return _softmax.softmax(x, dim, scale, mask, dtype, False)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""log(softmax(x·scale + mask)) along one dimension, without the softmax in between.

    .. math:: y_i = s_i - \log \sum_j \exp(s_j), \qquad s = x \cdot \text{scale} + \text{mask}

    Stands for ``F.log_softmax(x * scale + mask, dim, dtype=dtype)``. Arguments, result, what is kept and errors are
    those of :func:`softmax`.
    """
    return _softmax.softmax(x, dim, scale, mask, dtype, True)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    r"""relu(x) + y + bias in one pass.

    .. math:: z = \max(x, 0) + y + \text{bias}

    Stands for ``torch.relu(x) + y + bias``, rounded once instead of twice.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one floating dtype.
        bias: a number, or a tensor that broadcasts against the sum; it gets its gradient.

    Keeps: one bit an element, where x needs a gradient.
    """
    return _elementwise.relu_add(x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    r"""relu(x + y) in one pass: how a residual block ends.

    .. math:: z = \max(x + y, 0)

    Stands for ``torch.relu(x + y)``.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one floating dtype.

    Keeps: one bit an element. x and y get the same gradient tensor.
    """
    return _elementwise.add_relu(x, y)


def mul(x: Tensor, y: Tensor) -> Tensor:
    r"""x·y, with both gradients from one kernel.

    .. math:: z = x \cdot y, \qquad \frac{\partial L}{\partial x} = y\, \frac{\partial L}{\partial z}, \qquad
        \frac{\partial L}{\partial y} = x\, \frac{\partial L}{\partial z}

    Stands for ``x * y``. Where y broadcasts along x (a per-channel or per-row factor, squeeze-and-excite), the sum for
    its gradient is made in the same pass, in float32.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one floating dtype.

    Keeps: x and y, as torch does.
    """
    return _elementwise.mul(x, y)


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    r"""x·gate(mean of x over space), with one gradient of x from both of its uses.

    .. math:: y_{n,c} = x_{n,c} \cdot \text{gate}(m)_{n,c}, \qquad m_{n,c} = \frac{1}{HW} \sum_{h,w} x_{n,c,h,w}

    Stands for ``x * gate(x.mean((2, 3), keepdim=True))``, squeeze-and-excite as EfficientNet has it. In the
    backward dy and x are read for the gradient of the gate, dy again and dx written: autograd would write the gradients
    of the product and of the mean, and then their sum.

    Args:
        x: (N, C, H, W); the kernels take contiguous and channels_last images.
        gate: a function of the mean, (N, C, 1, 1), that returns a factor of that shape, for the kernels in x's dtype.

    Keeps: x and the gate, and what the function itself keeps.
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

    Stands for :func:`torch.nn.functional.max_pool2d`, and takes its arguments. Of equal elements the first one of a
    window is the maximum; NaN is, wherever it stands.

    Args:
        input: (N, C, H, W) or (C, H, W); the kernels take contiguous and channels_last images, and windows of up to 254
            elements.
        kernel_size, stride, padding, dilation, ceil_mode: as torch has them.
        return_indices: return the indices of the maxima too; torch itself computes that.

    Returns:
        A tensor in the memory format that torch gives.

    Keeps: where in its window each maximum is, a byte an output; torch keeps eight, and the input.
    """
    if return_indices:
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, True)  # type: ignore[call-overload]
    return _max_pool2d.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalisation over the last dimensions, forward and backward at one reading of each tensor.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}

    Stands for :func:`torch.nn.functional.layer_norm`.

    Args:
        x: any shape that ends with ``normalized_shape``; kernels take float16, bfloat16, float32 and float64.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight, bias: of shape ``normalized_shape``, in x's dtype, or in float32 where x is float16 or bfloat16 (torch's
            CUDA kernels take that under autocast only): computed in float32, rounded once to x's dtype.
        eps: added to the variance.
        dtype: of the result, which is cast to it. What is computed in float32 is rounded once, by the same kernel: what
            a layer under autocast reads need not be written in float32 first.

    Returns:
        A contiguous tensor of x's dtype; under CUDA autocast float32, as torch gives it; or of ``dtype``.

    Keeps: x, weight, and the mean and rstd of each row.
    """
    return _layer_norm.layer_norm(x, normalized_shape, weight, bias, eps, dtype)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Root mean square normalisation over the last dimensions.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot \text{weight}

    Stands for :func:`torch.nn.functional.rms_norm`, or for the code of a model library.

    Args:
        x: any shape that ends with ``normalized_shape``; kernels take float16, bfloat16, float32 and float64.
        normalized_shape: sizes of the dimensions that are normalised together.
        weight: of shape ``normalized_shape``, in x's dtype, or in float32 where x is float16 or bfloat16.
        eps: added to the mean square. None, as in torch: the epsilon of float32, of float64 where x is.
        casting: where a float16 or bfloat16 x is rounded.

            - ``"torch"``: once, at the end.
            - ``"llama"``: x·rstd is rounded to x's dtype, and only then multiplied by weight; the result has the dtype
              that this product has, float32 for a float32 weight.
            - ``"gemma"``: x·rstd·(1 + weight), rounded once at the end.

        dtype: of the result, as for :func:`layer_norm`.

    Returns:
        A tensor of x's dtype, but for ``"llama"``, or of ``dtype``. Contiguous, where torch's function does not keep a
        channels_last x; the other casting orders, of elementwise operations, keep the order of dimensions in memory.
        Under CUDA autocast ``"torch"`` gives float32 where torch's own does: since 2.13.

    Keeps: x, weight, and the rstd of each row.

    Raises:
        ValueError: no such casting order.
    """
    return _layer_norm.rms_norm(x, normalized_shape, weight, eps, casting, dtype)


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
    r"""The sum x + residual and its layer normalisation: how a block takes up the residual stream.

    .. math:: s = x + \text{residual}, \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} \cdot
        \text{weight} + \text{bias}

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``F.layer_norm(s, ...)``. Both results carry
    gradients, and one backward kernel joins them.

    Args:
        x, residual: tensors that broadcast against each other; the kernels take one shape, and one dtype or a float32
            residual to a float16 or bfloat16 x. Without a residual s is x itself: code that uses it in the place of x
            has the gradient of that use added in the norm's backward kernel, and may not write to it.
        normalized_shape, weight, bias, eps: as for :func:`layer_norm`.
        dropout: probability with which elements of x are zeroed before the sum.
        training: whether they are.
        dtype: of layer_norm(s), as for :func:`layer_norm`.

    Returns:
        (layer_norm(s), s).

    Keeps: s, weight, and the mean and rstd of each row; with dropout its mask as well.
    """
    if training and dropout:
        x = F.dropout(x, dropout)
    return _layer_norm.add_layer_norm(x, residual, normalized_shape, weight, bias, eps, dtype)


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

    Stands for ``s = F.dropout(x, dropout, training) + residual`` and ``rms_norm(s, ...)``. Both results carry
    gradients, and one backward kernel joins them.

    Args:
        x, residual, dropout, training: as for :func:`add_layer_norm`.
        normalized_shape, weight, eps, casting: as for :func:`rms_norm`.
        dtype: of rms_norm(s), as for :func:`layer_norm`.

    Returns:
        (rms_norm(s), s).

    Keeps: s, weight, and the rstd of each row; with dropout its mask as well.

    Raises:
        ValueError: no such casting order.
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
    dimensions after the channels. As there the result is channels_last in memory, and a channels_last x is read as it
    lies.

    Args:
        x: (N, C, *).
        weight, bias: (C,), in the dtypes that :func:`layer_norm` takes.
        eps: added to the variance.
        dtype: of the result, as for :func:`layer_norm`.

    Keeps: what :func:`layer_norm` keeps.
    """
    last = x.movedim(1, -1)
    return _layer_norm.layer_norm(last, last.shape[-1:], weight, bias, eps, dtype).movedim(-1, 1)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str | None = None,
) -> Tensor:
    r"""Group normalisation, and an activation of the result in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}\right)

    Stands for ``act(F.group_norm(x, num_groups, weight, bias, eps))``.

    Args:
        x: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        num_groups: how many groups the channels fall into. Mean and variance are those of a group.
        weight, bias: (C,), in x's dtype, or in float32 where x is float16 or bfloat16.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`bias_act`. One pass with "relu", "silu", "gelu",
            "gelu_tanh", "hardswish", "relu6" and "leaky_relu"; a pass of its own, of bias_act, with the others.

    Returns:
        A tensor in the memory format that torch gives: contiguous on CUDA. Under CUDA autocast float32.

    Keeps: x, weight, bias, and the mean and rstd of each group; the backward computes act's argument anew.

    Raises:
        ValueError: no such activation, or one value in each group.
    """
    return _group_norm.group_norm(x, num_groups, weight, bias, eps, act)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str | None = None,
) -> Tensor:
    r"""Instance normalisation, :func:`group_norm` with one channel in each group, and an activation in the same pass.

    .. math:: y = \text{act}\left( \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} +
        \text{bias}\right)

    Stands for ``act(F.instance_norm(x, ...))``. Torch's function answers itself where there are running statistics.

    Args:
        x: (N, C, *).
        running_mean, running_var: (C,), or None.
        weight, bias: (C,), in x's dtype, or in float32 where x is float16 or bfloat16.
        use_input_stats: normalise with the statistics of x; otherwise with the running ones.
        momentum: share of x's statistics in the new running ones.
        eps: added to the variance.
        act: None or the name of an activation, as for :func:`group_norm`.

    Returns:
        A contiguous tensor of x's dtype.

    Keeps: what :func:`group_norm` keeps.

    Raises:
        ValueError: no such activation, or one spatial element, where x's statistics are used.
    """
    return _group_norm.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, act)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    r"""Batch normalisation, and the residual and the activation that follow it in the same pass.

    .. math:: y = \text{act}\left(
        \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot \text{weight} + \text{bias}
        + \text{residual}\right)

    Stands for ``act(F.batch_norm(x, ...) + residual)``, rounded once.

    Args:
        x: (N, C, *); the kernels take two to five dimensions, contiguous or channels_last.
        running_mean, running_var: (C,), or None. In training they are updated in place, as torch does it.
        weight, bias: (C,), in x's dtype, or in float32 where x is float16 or bfloat16; the running statistics likewise.
        training: normalise with the statistics of x, over all dimensions but C; otherwise with the running ones.
        momentum: share of x's statistics in the new running ones.
        eps: added to the variance.
        residual: added before the activation; the kernels take x's shape and dtype.
        act: None or the name of an activation, as for :func:`bias_act`. One pass with "relu", "silu", "gelu",
            "gelu_tanh", "hardswish", "relu6" and "leaky_relu"; a pass of its own, of bias_act, with the others.
        num_batches_tracked: one int64, or None. In training it grows by one, as torch's layer counts its batches.

    Returns:
        A tensor of x's dtype and memory format.

    Keeps: x, weight, bias, and the mean and rstd of each channel; the backward computes act's argument anew. With a
    residual and "relu" one bit an element as well, and with a residual and another activation the residual.

    Raises:
        ValueError: no such activation, or one value in each channel in training.
    """
    return _batch_norm.batch_norm(
        x, running_mean, running_var, weight, bias, training, momentum, eps, residual, act, num_batches_tracked
    )


# ---- activations and gates -------------------------------------------------------------------------------------------


def bias_act(x: Tensor, bias: Tensor | None, act: str | None, **parameters: float) -> Tensor:
    r"""act(x + bias) in one pass, and in the backward the bias' gradient in the same pass as x's.

    .. math:: y = \text{act}(x + \text{bias})

    Stands for ``act(x + bias)``, rounded once instead of twice. What follows a matrix product: that of a linear layer
    whose bias is left out, and added here.

    Args:
        x: any shape; kernels take float16, bfloat16, float32 and float64.
        bias: None, or a tensor that broadcasts against x; the kernels take x's dtype and one value for each index of
            x's last dimension.
        act: None, "relu", "silu", "gelu", "gelu_tanh", "hardswish", "relu6", "leaky_relu", "quick_gelu"
            (x·sigmoid(1.702·x)), "relu2" (relu(x)²), "mish", "sigmoid", "tanh", "elu" or "softplus".
        parameters: of the activation, by torch's names and with torch's defaults: ``negative_slope`` of leaky_relu,
            ``alpha`` of elu, ``beta`` and ``threshold`` of softplus.

    Returns:
        A tensor of the memory format that torch gives. Of softplus under CUDA autocast float32; "relu2" is relu(x)
        times itself, and stays in x's dtype where autocast would widen ``torch.square``.

    Without a bias torch's own kernels serve all but "gelu", "gelu_tanh", "mish", "quick_gelu" and "relu2": they are at
    the limit of the memory already.

    Keeps: x and the bias; of "relu" the result.

    Raises:
        ValueError: no such activation.
        TypeError: a parameter that the activation does not have.
    """
    return _bias_act.bias_act(x, bias, act, parameters)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    r""":func:`torch.nn.functional.gelu`, see :func:`bias_act`.

    .. math:: y = x \cdot \Phi(x)

    Keeps: the input.
    """
    if approximate not in ("none", "tanh"):
        return F.gelu(input, approximate=approximate)  # which says what it expected
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
    r""":func:`torch.nn.functional.mish`, which answers itself in place; see :func:`bias_act`.

    .. math:: y = x \cdot \tanh(\log(1 + \exp(x)))

    Keeps: the input.
    """
    return _bias_act.in_place(F.mish, input) if inplace else _bias_act.bias_act(input, None, "mish", {})


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.silu`, whose own kernels serve where no backend is forced; see :func:`bias_act`.

    .. math:: y = \frac{x}{1 + \exp(-x)}

    Keeps: the input.
    """
    return _bias_act.in_place(F.silu, input) if inplace else _bias_act.bias_act(input, None, "silu", {})


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.hardswish`, served as :func:`silu` is.

    .. math:: y = x \cdot \frac{\min(\max(x + 3, 0), 6)}{6}

    Keeps: the input.
    """
    return _bias_act.in_place(F.hardswish, input) if inplace else _bias_act.bias_act(input, None, "hardswish", {})


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.leaky_relu`, served as :func:`silu` is.

    .. math:: y = \max(x, 0) + \text{negative\_slope} \cdot \min(x, 0)

    Keeps: the input.
    """
    if inplace:
        return _bias_act.in_place(F.leaky_relu, input, negative_slope)
    return _bias_act.bias_act(input, None, "leaky_relu", {"negative_slope": negative_slope})


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    r""":func:`torch.nn.functional.elu`, served as :func:`silu` is.

    .. math:: y = \max(x, 0) + \min(\alpha\, (\exp(x) - 1), 0)

    Keeps: the input.
    """
    return (
        _bias_act.in_place(F.elu, input, alpha) if inplace else _bias_act.bias_act(input, None, "elu", {"alpha": alpha})
    )


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    r""":func:`torch.nn.functional.softplus`, served as :func:`silu` is.

    .. math:: y = \frac{1}{\beta} \log(1 + \exp(\beta x))

    Keeps: the input.
    """
    return _bias_act.bias_act(input, None, "softplus", {"beta": beta, "threshold": threshold})


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""silu(gate)·up, the gate of Llama's MLP, in one pass forward and one backward.

    .. math:: y = \frac{\text{gate}}{1 + \exp(-\text{gate})} \cdot \text{up}

    Stands for ``F.silu(gate) * up``, rounded once instead of twice.

    Args:
        gate, up: tensors that broadcast against each other; the kernels take one shape and one floating dtype. They may
            be halves of one tensor, which are not copied; for their gradients to be written into one tensor as well,
            see :func:`glu`.

    Keeps: gate and up; the backward computes silu(gate) anew.
    """
    return _glu.gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    r"""gelu(gate)·up in one pass forward and one backward.

    .. math:: y = \text{gelu}(\text{gate}) \cdot \text{up}

    Stands for ``F.gelu(gate, approximate=approximate) * up``. Arguments and what is kept are those of :func:`swiglu`.
    """
    if approximate not in ("none", "tanh"):
        F.gelu(gate, approximate=approximate)  # which says what it expected
    return _glu.gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""relu(gate)·up in one pass forward and one backward.

    .. math:: y = \max(\text{gate}, 0) \cdot \text{up}

    Stands for ``F.relu(gate) * up``. Arguments and what is kept are those of :func:`swiglu`.
    """
    return _glu.gated(gate, up, "relu")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""A linear layer, in whose backward a kernel sums the gradient of the bias at the speed of the memory.

    .. math:: y = x W^T + b

    Stands for :func:`torch.nn.functional.linear`, which computes it, and the gradients of ``input`` and ``weight``:
    these are torch's own to the bit. Only the sum over the rows of the incoming gradient is other than torch's, which
    reads that at a fifth to a quarter of the memory bandwidth.

    Under autocast, of float32 parameters, the result is torch's to the bit as well, and all of it one node of autograd.
    The gradients of the parameters come in float32 from the product and the sum; torch rounds them to 16 bits on their
    way.

    Args:
        input: (..., in_features). The kernel takes the gradients of contiguous ones with two dimensions or more, but
            not of float32, of which torch's own sum has the smaller error.
        weight: (out_features, in_features).
        bias: (out_features,), or None.

    Returns:
        (..., out_features). Without autocast and below 2**19 elements torch's sum is as fast, and an unforced call is
        torch's throughout.

    Keeps: what torch does, input and weight; under autocast, as torch does, their casts.

    Raises:
        RuntimeError: under autocast, a backward that is to be differentiated itself, where a parameter was written
            since the forward.
    """
    return _linear.linear(input, weight, bias)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, act: str | None = "silu"
) -> Tensor:
    r"""The linear layer of act(gate)·up, without that product in memory between forward and backward.

    .. math:: y = (\text{act}(gate) \cdot up)\, W^T + b

    Stands for ``F.linear(act(gate) * up, weight, bias)``: the second half of a gated MLP, ``weight`` and ``bias`` being
    those of its down projection. The matrix products are torch's own.

    Args:
        gate, up: (..., in_features), as for :func:`swiglu`.
        weight: (out_features, in_features). The kernels take a plain tensor of gate's dtype, or of any floating dtype
            that autocast casts to the one of the product; likewise the bias.
        bias: (out_features,), or None.
        act: None or the name of an activation, as for :func:`bias_act`, with torch's parameters where it has some.

    Returns:
        (..., out_features).

    Keeps: gate, up and weight. :func:`swiglu` followed by :func:`torch.nn.functional.linear` keeps their product too,
    for the gradient of the weight; here the backward computes it anew, only if the weight wants its gradient, and
    writes the gradient of gate over that of the product. At most four tensors of gate's size are then in memory, gate
    and up among them, instead of six. Derivatives of that backward are those of the composition.

    Raises:
        ValueError: no such activation.
    """
    return _glu.gated_linear(gate, up, weight, bias, act)


def glu(x: Tensor, act: str | None = "sigmoid", dim: int = -1, *, gate_first: bool = False) -> Tensor:
    r"""a·act(b) for the halves a and b of a tensor along one dimension, or act(a)·b, without copies of them.

    .. math:: y = a \cdot \text{act}(b), \qquad (a, b) = x

    Stands for :func:`torch.nn.functional.glu` with any activation: ``a, b = x.chunk(2, dim); a * act(b)``.

    Args:
        x: of an even size along ``dim``; kernels take float16, bfloat16, float32 and float64.
        act: name of an activation as for :func:`bias_act`, with torch's parameters where it has some; None for a·b.
        dim: the dimension that is halved.
        gate_first: the activation is that of the first half, as in models that pack ``gate`` and ``up`` in this order.

    Returns:
        A tensor of half the size of x along ``dim``.

    Keeps: x; the backward computes the activation anew, and writes one gradient.

    Raises:
        ValueError: no such activation.
        RuntimeError: an odd size.
    """
    return _glu.glu(x, act, dim, gate_first)


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

    for each pair of elements of the last dimension, a and b being half of the rotated part apart. Stands for
    ``q * cos + rotate_half(q) * sin``, ``rotate_half(x)`` being ``torch.cat((-x2, x1), -1)`` of the halves of x, and
    the same of k, rounded once. This is how Llama has it; GPT-J and Cohere are ``interleaved``.

    Args:
        q, k: queries and keys, (batch, heads, seq, head_dim) or (batch, seq, heads, head_dim) or any of their views,
            the heads of k as many as they are; or k is None. The kernels take up to four dimensions and one floating
            dtype.
        cos, sin: tables that broadcast against q and k as in torch: (seq, d) or (batch, 1, seq, d) for heads before
            the sequence, (seq, 1, d) or (batch, seq, 1, d) for heads behind it. Tables of (batch, seq, d), as model
            libraries hand them around, take ``cos.unsqueeze(1)`` or ``cos.unsqueeze(2)`` first. The kernels take q's
            dtype, or float32 where q is float16 or bfloat16, and no table that needs a gradient.
        interleaved: pairs are neighbours, ``x[..., ::2]`` and ``x[..., 1::2]``.
        rotary_dim: how many elements of a head rotate, from the first; the others pass through. Default: as many as the
            tables have columns. Twice as many where these have one column for each pair, as flash-attn's and GPT-J's.
        dtype: of the results, for code that rotates ``q.float()`` and casts the result: q and k count as float32 where
            they are narrower. Default: what ``q * cos`` has, which is float32 for a half with float32 tables.

    Returns:
        (rotated q, rotated k), in the memory order that the torch composition gives them; None for a k of None.

    Keeps: cos and sin.

    Raises:
        ValueError: rotary_dim is neither the number of columns of the tables nor twice that.
    """
    return _rotary.rotary(q, k, cos, sin, interleaved, rotary_dim, dtype)


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    r"""residual + dropout(x) in one pass: how a sublayer of a transformer joins the residual stream.

    .. math:: y = \text{residual} + \frac{x \cdot m}{1 - p}, \qquad m_i = 0 \text{ with probability } p, \text{ else } 1

    Stands for ``residual + F.dropout(x, p, training)``, rounded once instead of twice.

    Args:
        x, residual: tensors that broadcast against each other; the kernels take one shape, and one floating dtype or a
            float32 residual to a float16 or bfloat16 x.
        p: probability with which elements of x are zeroed.
        training: whether they are.

    The kernels draw one seed from torch's generator of the device and derive the mask from it (Philox), element by
    element in the memory order of the result: the same whatever the dtypes and the layout of the gradient, and on every
    backend that has kernels. It follows :func:`torch.manual_seed`, activation checkpointing and CUDA graphs, of which
    each replay draws anew; it is not the mask that ``F.dropout`` draws from the same generator.

    Keeps: the seed, 8 bytes.

    Raises:
        ValueError: p is not a probability.
    """
    return _residual.dropout_add(x, residual, p, training)


def scale_add(
    x: Tensor,
    gamma: Tensor | None,
    residual: Tensor,
    drop_path: float = 0.0,
    training: bool = False,
) -> Tensor:
    r"""residual + drop_path(gamma·x) in one pass: LayerScale, stochastic depth and the residual.

    .. math:: y = \text{residual} + \frac{\text{gamma} \cdot x \cdot m}{1 - \text{drop\_path}}

    Stands for ``residual + drop_path(x * gamma)``, as timm's models and torchvision's (``StochasticDepth(p, "row")``)
    have it, rounded once. The gradients of x and gamma come from one kernel.

    Args:
        x, residual: tensors that broadcast against each other; the kernels take one shape, and one floating dtype or a
            float32 residual to a float16 or bfloat16 x.
        gamma: broadcasts to x, or None for no scale. The kernels take a vector along one dimension: (C,) along the last
            one, (C, 1, 1) along the channels of (N, C, H, W) in either memory format; in x's dtype, or in float32 where
            the residual is.
        drop_path: probability with which whole samples (indices of dimension 0) of x·gamma are zeroed; those that stay
            are divided by 1 - drop_path.
        training: whether they are. The draw is timm's and torchvision's: after the same ``torch.manual_seed`` the same
            samples are dropped.

    Keeps: x if gamma needs a gradient, a reference to gamma, and in training with drop_path a number for each sample.

    Raises:
        ValueError: drop_path is not a probability.
    """
    return _residual.scale_add(x, gamma, residual, drop_path, training)


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
    r"""Cross-entropy of logits and classes: the logits are read once forward, and read and written once backward.

    .. math:: l_i = w_t \left(\log \sum_c \exp(s_c) - s_t\right) + \text{z\_loss} \left(\log \sum_c \exp(s_c)\right)^2,
        \qquad s = \text{softcap} \cdot \tanh(\text{input} / \text{softcap})

    Stands for :func:`torch.nn.functional.cross_entropy` of ``softcap * torch.tanh(input / softcap)``, plus PaLM's
    z-loss. Computed in float32 and rounded once.

    Args:
        input: logits, of shape (C,), (N, C) or (N, C, d1, ...); kernels take float16, bfloat16, float32 and float64.
        target: classes, of input's shape without C. One that is not a class raises an IndexError on a CPU and is a
            device-side assert on a GPU, as in torch. Or probabilities in input's shape, which torch's function serves.
        weight: (C,), a factor for each class; without a gradient, as in torch.
        size_average, reduce: torch's deprecated ones.
        ignore_index: a target that takes no part. Such a row is not read: its gradient is 0 whatever it holds.
        reduction: "none", "mean" (weighted by ``weight``, NaN where all rows are ignored) or "sum".
        label_smoothing: from 0 to 1, the share of the uniform distribution in the target.
        softcap: a number above 0 that bounds the logits, or None.
        z_loss: factor of the squared log-sum-exp of each row that is not ignored. It is not multiplied by ``weight``,
            as it is not in Liger; for "mean" it is divided by what the loss is divided by, the sum of the weights of
            the targets or, without a weight, their number.
        inplace_backward: allows the backward to put the gradient in the place of the logits, which then are lost: half
            of the memory. Logits that are a leaf are refused. A second backward, or one of another operation that kept
            the logits, raises. Without effect where no kernel serves, where the logits are not contiguous, under
            ``create_graph`` and under ``torch.compile``.

    Returns:
        A tensor of input's dtype; under autocast float32, as torch gives it.

    Keeps: input, target, weight, and two numbers of each row that add up to its log-sum-exp.

    Raises:
        ValueError: reduction or softcap is none, or inplace_backward is True for a leaf.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _cross_entropy.cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""The cross-entropy of a linear layer's logits, which are never whole in memory.

    .. math:: \text{cross\_entropy}(\text{logits}, \text{target}), \qquad
        \text{logits} = \text{logit\_scale} \cdot (\text{hidden} \cdot \text{weight}^T + \text{bias})

    Stands for ``cross_entropy(F.linear(hidden, weight, bias) * logit_scale, target)``, at the end of a language model.
    The rows of hidden are worked off in chunks. For "mean" and "sum" the gradients are computed in the same pass, by
    three matrix products a chunk and nothing twice, and the backward multiplies them with the incoming gradient. So
    call it under :func:`torch.no_grad` where no backward follows: then it computes the loss alone.

    Args:
        hidden: (..., H), in float16, bfloat16, float32 or float64.
        weight: (V, H), in hidden's dtype; under autocast in any. It may be tied, as to an embedding. One that is
            sharded (a DTensor, as FSDP2 has it outside of the forward that it wraps) is refused.
        target: (...), classes as int64. One out of range raises an IndexError on a CPU and is a device-side assert on a
            GPU, as in torch. Probabilities, (..., V), are served with the logits in memory, as they are in memory.
        bias: (V,), or None.
        class_weight, ignore_index, reduction, label_smoothing: ``weight`` and so on of
            :func:`torch.nn.functional.cross_entropy`.
        softcap, z_loss: a bound on the logits, softcap·tanh(logits/softcap), and the factor of the squared log-sum-exp
            of each row that is not ignored, which class_weight does not weight.
        logit_scale: a number that multiplies the logits, as in Cohere's models (Granite's divide by one).
        chunk_size: rows of a chunk. Default: an eighth of the rows or less, but 896 or more; on a GPU short of memory
            less. A half dweight is summed over up to nine such chunks in its own dtype, rounded once for each; in
            float32 if there is room for that in an eighth of the logits, or if the chunk_size asks for more chunks.

    Returns:
        A scalar, or for "none" the losses in target's shape. In hidden's dtype; under autocast float32.

    Calls whose logits would have fewer than 2^20 elements on a GPU or 2^26 on a CPU, and no chunk_size, are answered by
    the composition; so are transforms of torch.func, exports and second derivatives, which have the logits whole.

    Keeps: references to hidden, weight, bias, target and class_weight; for "mean" and "sum" the gradients, as they will
    be handed out. For "none" the backward computes the logits once more, four products in all; so does a second
    backward through a retained graph.

    Raises:
        ValueError: reduction, softcap or chunk_size is none, or target is not of hidden's shape.
        TypeError: weight is a DTensor and hidden is none, or logit_scale is no number.
    """
    return _linear_cross_entropy.linear_cross_entropy(
        hidden, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, softcap, z_loss,
        logit_scale, chunk_size,
    )  # fmt: skip


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
    r"""Cross-entropy of logits whose classes are spread over the ranks of a process group, with two all-reduces.

    .. math:: l_i = \log \sum_c \exp(s_c) - s_t, \qquad c \text{ in the shards of all ranks}

    Stands for ``cross_entropy(torch.cat(shards, -1), target)``: every rank of the group calls it with its own shard of
    the logits, as a linear layer whose weight is sharded over the vocabulary gives it, and with the same target, and
    gets the same loss. What is reduced are three numbers a row, five with label smoothing.

    Args:
        logits: (..., V of this rank), the classes from ``vocab_start`` on.
        target: (...), classes of the whole vocabulary as int64.
        group: a :class:`torch.distributed.ProcessGroup`; default, as there, all ranks.
        vocab_start: the first class of this shard. Default: rank in the group times V of this rank, for shards that are
            all equally wide.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as :func:`linear_cross_entropy` takes them.

    Returns:
        A scalar, or for "none" the losses in target's shape. In logits' dtype; under autocast float32.

    The gradient is that of this rank's loss by its own logits, without communication: whoever computes the loss on each
    rank, as tensor parallelism does, does not add it up over the ranks. It has no second derivative, and raises.

    Keeps: logits, target, and the log-sum-exp of each row.

    Raises:
        ValueError: target is not of int64 in logits' shape without the classes, an option has no meaning, or shards of
            unequal width come without vocab_start (on a GPU a device-side assert).
        IndexError: a class is in none of the shards, or in several; on a GPU a device-side assert.
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
    r"""Kullback-Leibler divergence of log-probabilities, element by element and reduced in one pass.

    .. math:: l = p \cdot (\log p - \text{input}), \qquad p = \text{target}
        \quad\text{or, with log\_target,}\quad p = \exp(\text{target})

    Stands for :func:`torch.nn.functional.kl_div`, with its warning at ``reduction="mean"``.

    Args:
        input: log-probabilities of any shape; kernels take float16, bfloat16, float32 and float64.
        target: probabilities, or with ``log_target`` their logarithms; the kernels take input's shape and dtype.
        size_average, reduce: torch's deprecated spelling of ``reduction``.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over all elements, or ``"batchmean"``, the sum divided by the size
            of the first dimension.
        log_target: whether the target is in log space.

    Returns:
        A tensor of input's dtype: of its shape without a reduction, else of no dimensions. Under autocast float32.

    Keeps: target; input too where target needs a gradient. As with torch the target's gradient is NaN where a target
    that is not in log space is 0.

    Raises:
        ValueError: no such reduction.
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

    over the last dimension, of every row: the loss of knowledge distillation (Hinton et al., 2015), whose factor
    T² keeps the size of the gradients when the temperature changes. Where p is 0 (a logit of minus infinity) it counts
    as 0. Stands for ``T**2 * F.kl_div(F.log_softmax(student / T, -1), F.log_softmax(teacher / T, -1),
    log_target=True)``, with the reductions below.

    Args:
        student, teacher: logits (\*, C); the kernels take one shape and one floating dtype.
        labels: (\*), or None. Rows whose label is ``ignore_index`` give 0, get no gradient, and do not count.
        ignore_index: that label.
        temperature: T.
        reduction: ``"none"``, a loss for each row; ``"sum"`` of them; ``"batchmean"``, their mean over the rows that
            count, however many dimensions these have (torch's kl_div divides by the first one's size); ``"mean"``, the
            same divided by C. NaN where no row counts.

    Returns:
        A tensor of the logits' dtype, computed in float32 and rounded once: of labels' shape without a reduction, else
        of no dimensions. Under autocast float32.

    Keeps: student and teacher, the labels, and for each row the maxima and log-sum-exps of both and two more numbers.

    Raises:
        ValueError: no such reduction, a temperature that is not positive, or labels of another shape.
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
    distillation (Agarwal et al., 2024, "On-Policy Distillation of Language Models", eq. 1; also that of TRL's
    GKDTrainer and of Liger). As there the ends of beta, where it would vanish, stand for the divergences that it
    approaches in proportion: 0 for KL(p || q), which is forward KL, 1 for KL(q || p), which is reverse KL.

    Args:
        student, teacher, labels, ignore_index, temperature, reduction: as for :func:`kl_div_logits`.
        beta: share of the teacher's distribution in the mixture m, from 0 to 1.

    Returns:
        What :func:`kl_div_logits` returns. At 0 probability a logarithm counts as its product with it, 0.

    Keeps: what :func:`kl_div_logits` keeps.

    Raises:
        ValueError: beta is not between 0 and 1, or what :func:`kl_div_logits` raises.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"expected beta to be between 0 and 1, but got {beta}")
    if beta == 1.0:
        student, teacher, beta = teacher, student, 0.0
    return _kl_div.divergence(student, teacher, labels, ignore_index, beta, temperature, False, reduction)
