"""The layers, in the form that kernels asks for: without a state, with the signature of the layer that they replace.

kernels puts only their ``forward`` into a layer of a model. There ``self`` is that layer, and ``type(self).forward`` is
its own forward, which runs where its formula is another one.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.ops.reference import autocasts
from fastlayers.patching.ir.fingerprints import fingerprint
from fastlayers.patching.ir.known_functions import is_rotary
from fastlayers.patching.runtime import norm_calls

__all__ = [
    "LAYERS",
    "FastGELU",
    "GeLU",
    "GeluTanh",
    "NewGELU",
    "QuickGELU",
    "RMSNorm",
    "RotaryEmbedding",
    "SiLU",
]


def norm_of(cls: type[nn.Module]) -> tuple[str, str, str | None, bool] | None:
    """The names of weight and epsilon, the casting order and whether it needs equal dtypes; None for other formulas."""
    found = fingerprint(cls)
    if found is None or found.weight is None or found.scaled is not None:
        return None
    return found.weight, found.eps, found.body.casting, found.body.same


def rotates_halves(cls: type[nn.Module]) -> bool:
    """Whether a layer that kernels made of a function computes what :func:`fastlayers.functional.rotary` does."""
    forward: Any = cls.forward
    return is_rotary(inspect.getclosurevars(forward).nonlocals.get("func"))


# What torch.compiler.assume_constant_result does: Dynamo calls them, and does not look into them.
norm_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
rotates_halves._dynamo_marked_constant = True  # type: ignore[attr-defined]


class RMSNorm(nn.Module):
    """Any of the handwritten norms that patch_model knows, through :func:`fastlayers.functional.rms_norm`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        found = norm_of(type(self))
        if found is not None:
            name, eps, casting, same = found
            weight = getattr(self, name)
            if norm_calls.computes_norm(hidden_states, weight, casting=casting, same=same):
                return norm_calls.handwritten_norm(hidden_states, weight, getattr(self, eps), casting)
        return type(self).forward(self, hidden_states)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys through :func:`fastlayers.functional.rotary`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        width = cos.shape[-1]
        fits = q.shape[-1] == k.shape[-1] == sin.shape[-1] == width and width % 2 == 0
        if fits and rotates_halves(type(self)):
            return functional.rotary(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
        return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)


class SiLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.silu(input)


class GeLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        if self.act is F.gelu:
            return functional.gelu(input)
        return type(self).forward(self, input)


class GeluTanh(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.act, partial):  # of F.gelu
            return functional.gelu(input, approximate="tanh")
        return type(self).forward(self, input)


class NewGELU(nn.Module):
    """The GELU of GPT-2, which writes out F.gelu with ``approximate="tanh"``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        # Autocast computes its torch.pow in float32, and then its result is float32.
        if input.dtype != torch.float32 and autocasts(input.device.type):
            return type(self).forward(self, input)
        return functional.gelu(input, approximate="tanh")


class FastGELU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        # Its constant has 10 digits. Those are the digits of float32, but not of float64.
        if input.dtype == torch.float64:
            return type(self).forward(self, input)
        return functional.gelu(input, approximate="tanh")


class QuickGELU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.quick_gelu(input)


#: By the names that models use: the first argument of ``use_kernel_forward_from_hub``.
LAYERS: dict[str, type[nn.Module]] = {
    "FastGELU": FastGELU,
    "GeLU": GeLU,
    "GeluTanh": GeluTanh,
    "NewGELU": NewGELU,
    "QuickGELU": QuickGELU,
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNorm,
    "SiLU": SiLU,
    "rotary_pos_emb": RotaryEmbedding,
}
