"""Rotary position embedding, with the norms that precede it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import rotary as _rotary


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
