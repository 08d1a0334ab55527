"""Linear layers, MLPs and convolutions under autocast, in torch's operations; Triton has the sums and the activation.

A launch of Triton costs the host more than one of torch's casts: these gain what the sums do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.kernels.batch_norm import batch_norm_backward, batch_norm_train
from fastlayers.kernels.bias_act import bias_act_backward, bias_act_forward
from fastlayers.kernels.linear import column_sum


def _product(x: Tensor, low: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of any batch, as a tensor of its own: no view, which nobody could write to."""
    rows = x.view(-1, x.shape[-1])
    y = torch.mm(rows, low.t()) if bias is None else torch.addmm(bias, rows, low.t())
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], low.shape[0]))  # type: ignore[no-any-return]


def _weight_gradient(dy: Tensor, x: Tensor, wanted: bool) -> Tensor:
    return torch.mm(dy.t(), x, out_dtype=torch.float32) if wanted else x.new_empty(0)


def _bias_gradient(dy: Tensor, wanted: bool) -> Tensor:
    return column_sum(dy, torch.float32) if wanted else dy.new_empty(0)


def linear_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """F.linear(x, weight, bias), and the weight's cast."""
    low = weight.to(x.dtype)
    return _product(x, low, None if bias is None else bias.to(x.dtype)), low


def linear_autocast_backward(
    dy: Tensor, x: Tensor, low: Tensor, dx: bool, dweight: bool, dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are wanted, and for the others tensors without elements."""
    rows, flat = x.view(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).contiguous()
    return (
        torch.mm(flat, low).view(x.shape) if dx else x.new_empty(0),
        _weight_gradient(flat, rows, dweight),
        _bias_gradient(flat, dbias),
    )


def mlp_autocast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    weight2: Tensor,
    bias2: Tensor | None,
    act: int,
    first: float,
    second: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """linear(act(linear(x))), the first product without its bias, and the casts of weight, bias and weight2."""
    low, low_bias, low2 = (t.to(x.dtype) for t in (weight, bias, weight2))
    product = torch.mm(x.view(-1, x.shape[-1]), low.t())
    activated = bias_act_forward(product, low_bias, act, first, second)
    y = _product(activated.view(*x.shape[:-1], -1), low2, None if bias2 is None else bias2.to(x.dtype))
    return y, product, low, low_bias, low2


def mlp_autocast_backward(
    dy: Tensor, x: Tensor, product: Tensor, low: Tensor, low_bias: Tensor, low2: Tensor, act: int, first: float,
    second: float, dx: bool, dweight: bool, dbias: bool, dweight2: bool, dbias2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients that are wanted, and for the others tensors without elements."""
    rows, flat = x.view(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).contiguous()
    found2 = x.new_empty(0)
    if dweight2:
        found2 = _weight_gradient(flat, bias_act_forward(product, low_bias, act, first, second), True)
    dproduct, found_bias = bias_act_backward(
        torch.mm(flat, low2), product, low_bias, act, first, second, dbias, torch.float32
    )
    return (
        torch.mm(dproduct, low).view(x.shape) if dx else x.new_empty(0),
        _weight_gradient(dproduct, rows, dweight),
        found_bias,
        found2,
        _bias_gradient(flat, dbias2),
    )


def convolution_autocast(
    x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> tuple[Tensor, Tensor]:
    """F.conv2d(x, weight, bias, ...), and the weight's cast."""
    low = weight.to(x.dtype)
    return F.conv2d(x, low, bias.to(x.dtype), stride, padding, dilation, groups), low  # type: ignore[arg-type]


def convolution_autocast_backward(
    dy: Tensor, x: Tensor, low: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    dx: bool, dweight: bool, dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients that are wanted, of the bias only of a dy that is channels_last."""
    found, found_weight, _ = torch.ops.aten.convolution_backward(
        dy, x, low, None, stride, padding, dilation, False, [0, 0], groups, [dx, dweight, False]
    )
    return (
        found if dx else x.new_empty(0),
        found_weight.float() if dweight else x.new_empty(0),
        column_sum(dy.permute(0, 2, 3, 1).view(-1, dy.shape[1]), torch.float32) if dbias else x.new_empty(0),
    )


def convolution_norm_autocast(
    x: Tensor, weight: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor, running_mean: Tensor,
    running_var: Tensor, momentum: float, eps: float, act: int, bits: bool, num_batches_tracked: Tensor | None,
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """act(batch_norm(convolution(x)) + residual), the weight's cast, the convolution's result, what batch_norm kept."""
    low = weight.to(x.dtype)
    z = F.conv2d(x, low, None, stride, padding, dilation, groups)  # type: ignore[arg-type]
    y, stats, packed = batch_norm_train(
        z, running_mean, running_var, norm_weight, norm_bias, momentum, eps, residual, act, bits, num_batches_tracked
    )
    return y, low, z, stats, packed


def convolution_norm_autocast_backward(
    dy: Tensor, x: Tensor, low: Tensor, z: Tensor, residual: Tensor | None, bits: Tensor | None, norm_weight: Tensor,
    norm_bias: Tensor | None, stats: Tensor, act: int, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, dx: bool, dweight: bool, dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight, residual, norm_weight and norm_bias; of the first three those that are wanted."""
    dz, found_residual, dnorm_weight, dnorm_bias = batch_norm_backward(
        dy, z, norm_weight, norm_bias, stats, True, residual, bits, act, dresidual
    )
    found, found_weight, _ = convolution_autocast_backward(
        dz, x, low, stride, padding, dilation, groups, dx, dweight, False
    )
    return found, found_weight, found_residual, dnorm_weight, dnorm_bias
