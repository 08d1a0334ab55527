"""Global response normalisation."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import response_norm as _response_norm


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
