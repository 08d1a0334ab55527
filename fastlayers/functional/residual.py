"""The ends of residual branches."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import residual as _residual


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
