"""dropout_add and scale_add: the choice between kernel and reference, the random numbers, and autograd."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.elementwise import GPU_LEAST
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def dropout_add(x: Tensor, residual: Tensor | None, p: float, seed: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x if residual is None else residual + torch.empty_like(x), dtype=dtype)

    @staticmethod
    def scale_add(
        x: Tensor, gamma: Tensor | None, residual: Tensor | None, keep: Tensor | None, scale: float, dtype: torch.dtype
    ) -> Tensor:
        product = x if gamma is None else x * gamma
        return torch.empty_like(product if residual is None else residual + product, dtype=dtype)

    @staticmethod
    def scale_add_backward(
        dy: Tensor, x: Tensor, gamma: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(gamma)


FAMILY = raw_ops.Family("residual", Kernels, cpu=True)

#: Where an unforced call on a CPU gets the kernels. The figures are eager's time over that of C++ with two threads, on
#: a Xeon with AVX-512, forward, and forward with backward:
#:
#: - elements: dropout_add of 2^10 float32 1.4 and 0.8, 2^14 4.7 and 1.7
#: - elements: scale_add of 2^14 float32 0.6 and 0.8, 2^17 1.6 and 1.6
CPU_LEAST_DROPOUT = 2**14
CPU_LEAST = 2**17


def _eager_is_faster(kernels: Kernels, x: Tensor, cpu_least: int) -> bool:
    if kernels.unasked:
        return x.numel() < cpu_least
    return backends.get_backend() is None and x.numel() < GPU_LEAST


# ---- random numbers --------------------------------------------------------------------------------------------------
# A dropout stores only a seed, one int64 drawn on the device from torch's own generator. So its masks follow
# torch.manual_seed, checkpointing (it restores the generator) and CUDA graphs (a replay draws a new seed). Element i,
# in the memory order of the result, gets the word i % 4 of Philox4x32 with the seed as key and the counter i / 4. It is
# dropped where that word is less than p·2^32.

_LOW = 0xFFFFFFFF
_ROUNDS = 10


def draw_seed(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=x.device).random_()


def philox(seed: Tensor, counter: Tensor) -> Tensor:
    """The four words of Philox4x32-10 at each 64-bit counter, int64 of shape (counters, 4).

    Products of two words wrap around in int64; their bits are right.
    """
    key = [seed & _LOW, (seed >> 32) & _LOW]
    a, b, c, d = counter & _LOW, (counter >> 32) & _LOW, torch.zeros_like(counter), torch.zeros_like(counter)
    for _ in range(_ROUNDS):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (second >> 32 & _LOW) ^ b ^ key[0], second & _LOW
        c, d = (first >> 32 & _LOW) ^ d ^ key[1], first & _LOW
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return torch.stack((a, b, c, d), 1)


def threshold(p: float) -> int:
    """Words below it drop their element."""
    return min(math.floor(p * 2**32 + 0.5), _LOW)


def dropout_mask(seed: Tensor, shape: torch.Size, strides: tuple[int, ...], p: float) -> Tensor:
    """Which elements of a dense tensor the kernels keep, in torch ops."""
    n = math.prod(shape)
    words = philox(seed, torch.arange((n + 3) // 4, device=seed.device)).flatten()
    return (words >= threshold(p)).as_strided(shape, strides)


def draw_samples(x: Tensor, drop_path: float, count: int) -> tuple[Tensor, float]:
    """(1 or 0 for each of ``count`` samples, the factor of the samples that are kept).

    The same draw as timm's DropPath and torchvision's StochasticDepth make, so the same samples are dropped.
    """
    keep = 1.0 - drop_path
    samples = x.new_empty(count, dtype=layouts.accumulator(x)).bernoulli_(keep)
    return samples, 1.0 / keep if keep > 0 else 1.0


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(x: Tensor, residual: object) -> str | None:
    """Why no kernel adds a multiple of x to the residual, None where one does."""
    if not guard.is_plain(residual):
        return f"it takes plain tensors, and got {type(residual).__name__}"
    to, dtype = residual.dtype, x.dtype
    if dtype not in guard.FLOATING or (to != dtype and not (to == torch.float32 and dtype in reference.LOW_PRECISION)):
        return (
            f"the operands are {dtype} and {to}; kernels take one floating dtype, or 16-bit x with a float32 residual"
        )
    if x.shape != residual.shape:
        return f"the operands have shapes {tuple(x.shape)} and {tuple(residual.shape)}; the kernel takes one shape"
    if x.get_device() != residual.get_device():
        return f"the operands are on {x.device} and {residual.device}"
    if x.numel() == 0:
        return f"nothing to compute on shape {tuple(x.shape)}"
    return None


def _unsupported_gamma(x: Tensor, gamma: object, residual: Tensor) -> str | None:
    if gamma is None:
        return None
    if not guard.is_plain(gamma):
        return f"gamma is a {type(gamma).__name__}; kernels take a plain tensor"
    if (
        (gamma.dtype == x.dtype or (gamma.dtype == torch.float32 == residual.dtype))
        and gamma.get_device() == x.get_device()
        and gamma.is_contiguous()
        and layouts.broadcasts_to(gamma.shape, x.shape)
        and sum(size != 1 for size in gamma.shape) <= 1
    ):
        return None
    return (
        f"a gamma of {gamma.dtype}, shape {tuple(gamma.shape)} on {gamma.device}, for {x.dtype}, {tuple(x.shape)};"
        " kernels take a contiguous one along one dimension of x, in x's dtype or in float32 where the residual is"
    )


# ---- autograd --------------------------------------------------------------------------------------------------------


class DropoutAdd(pairs.Pair, inputs=2):
    """Keeps the seed. ``shard`` is the number of this shard of a larger tensor, or 0."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, residual: Tensor, p: float, shard: int) -> Any:
        seed = draw_seed(x)
        if shard:
            seed.add_(shard)
        out = kernels.dropout_add(x, residual, p, seed, residual.dtype)
        return out, (seed,), (p, x.dtype, out.stride())

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, seed: Tensor, p: float, dtype: torch.dtype, strides: tuple[int, ...]
    ) -> Gradients:
        dx = kernels.dropout_add(layouts.with_strides(dy, strides), None, p, seed, dtype) if needs[0] else None
        return dx, dy

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, seed: Tensor, p: float, dtype: torch.dtype, strides: tuple[int, ...]
    ) -> Gradients:
        mask = dropout_mask(seed, dy.shape, strides, p)
        return (dy * (mask.to(dy.dtype) * (1.0 / (1.0 - p)))).to(dtype), dy


class ScaleAdd(pairs.Pair, inputs=3):
    """Keeps gamma, a number for each sample that may be dropped, and x where gamma needs a gradient."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, gamma: Tensor | None, residual: Tensor, keep: Tensor | None,
        scale: float,
    ) -> Any:  # fmt: skip
        out = kernels.scale_add(x, gamma, residual, keep, scale, residual.dtype)
        if not needs:
            return out, (), ()
        for_x, for_gamma, _ = needs
        return out, (x if for_gamma else None, gamma if for_x or for_gamma else None, keep), (scale, x.dtype)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor | None, gamma: Tensor | None, keep: Tensor | None,
        scale: float, dtype: torch.dtype,
    ) -> Gradients:  # fmt: skip
        dx = dgamma = None
        if needs[1]:
            assert x is not None
            assert gamma is not None
            dx, dgamma = kernels.scale_add_backward(dy, x, gamma, keep, scale)
        elif needs[0]:
            dx = kernels.scale_add(dy, gamma, None, keep, scale, dtype)
        return dx, dgamma, dy

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor | None, gamma: Tensor | None, keep: Tensor | None, scale: float,
        dtype: torch.dtype,
    ) -> Gradients:  # fmt: skip
        d = dy * scale
        if keep is not None:
            d = d * keep.to(dy.dtype).view(-1, *[1] * (dy.dim() - 1))
        dgamma = None
        if needs[1]:
            assert x is not None
            assert gamma is not None
            dgamma = (d * x).sum_to_size(gamma.shape).to(gamma.dtype)
        return (d if gamma is None else d * gamma).to(dtype), dgamma, dy


def dropout_add_of_shard(kernels: Kernels, x: Tensor, residual: Tensor, p: float, shard: int) -> Tensor:
    """dropout_add of one of the shards of a tensor. The masks of shards with different numbers are independent."""
    out: Tensor = DropoutAdd.run(kernels, x, residual, p, shard)
    return out


def scale_add_of_kept(x: Tensor, gamma: Tensor | None, residual: Tensor, keep: Tensor, scale: float) -> Tensor:
    """scale_add of samples that are kept where ``keep`` is 1, and then multiplied by ``scale``."""
    kernels = FAMILY.kernels_for(x)
    if kernels is not None and not _eager_is_faster(kernels, x, CPU_LEAST):
        reason = unsupported(x, residual) or _unsupported_gamma(x, gamma, residual)
        if reason is None:
            out: Tensor = ScaleAdd.run(kernels, x, gamma, residual, keep, scale)
            return out
        backends.refuse(reason)
    factor = (keep * scale).to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    return residual + (x if gamma is None else x * gamma) * factor


#: Whether dropout_add draws torch's own masks, by torch's own kernel.
_masks_of_torch = False


@contextmanager
def masks_of_torch() -> Iterator[None]:
    """Let dropout_add draw torch's own masks, to compare with a run of torch from the same seed."""
    global _masks_of_torch
    before, _masks_of_torch = _masks_of_torch, True
    backends.changed()
    try:
        yield
    finally:
        _masks_of_torch = before
        backends.changed()


def dropout_add(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    if _masks_of_torch:
        return reference.dropout_add(x, residual, p, training)
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        random = training and 0.0 < p < 1.0
        if (backends.get_backend() is None and not random) or _eager_is_faster(kernels, x, CPU_LEAST_DROPOUT):
            return reference.dropout_add(x, residual, p, training)
        reason = unsupported(x, residual)
        if reason is None and 0.0 <= p <= 1.0:
            if not random:  # a sum, of zeros where p is 1
                return ScaleAdd.run(kernels, x, None, residual, None, 0.0 if training and p == 1.0 else 1.0)
            return DropoutAdd.run(kernels, x, residual, p, 0)
        if reason is not None:
            backends.refuse(reason)
    return guard.call_reference(reference.dropout_add, x, residual, p, training)


def scale_add(x: Tensor, gamma: Tensor | None, residual: Tensor, drop_path: float, training: bool) -> Tensor:
    if not 0.0 <= drop_path <= 1.0:
        raise ValueError(f"drop_path is a probability, from 0 to 1, but got {drop_path}")
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        drops = training and drop_path > 0.0
        unscaled = gamma is None and not drops
        if (backends.get_backend() is None and unscaled) or _eager_is_faster(kernels, x, CPU_LEAST):
            return reference.scale_add(x, gamma, residual, drop_path, training)
        reason = unsupported(x, residual) or _unsupported_gamma(x, gamma, residual)
        if reason is None and drops and x.dim() == 0:
            reason = "x has no dimension of samples to drop"
        if reason is None:
            keep, scale = draw_samples(x, drop_path, x.shape[0]) if drops else (None, 1.0)
            return ScaleAdd.run(kernels, x, gamma, residual, keep, scale)
        backends.refuse(reason)
    return guard.call_reference(reference.scale_add, x, gamma, residual, drop_path, training)
