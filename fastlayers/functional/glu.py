"""Gated units, and the linear layer of one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import glu as _glu


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


def glu(input: Tensor, dim: int = -1, *, act: str | None = "sigmoid", gate_first: bool = False) -> Tensor:
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
    return _glu.glu(input, dim, act, gate_first)
