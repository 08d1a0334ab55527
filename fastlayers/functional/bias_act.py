"""Activations, with the bias that precedes them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import bias_act as _bias_act


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
