"""The rotary function of an attention, and what stands for it where its forward calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers import functional
from fastlayers.patching.ir.known_functions import canonical, source_of

__all__ = ["fused_rotary", "is_rotary"]

HALVES = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
ROTATE_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


def is_rotary(function: Any) -> bool:
    """Whether a function is Llama's apply_rotary_pos_emb, whatever its name."""
    if source_of(function) != canonical(HALVES) or function.__defaults__ != (1,):
        return False
    scope = function.__globals__
    return source_of(scope.get("rotate_half")) == canonical(ROTATE_HALF) and scope.get("torch") is torch


def fused_rotary(scope: dict[str, Any], name: str, original: Any) -> Any:
    """What stands for a rotary function; the global itself where it is no longer the one that was read."""
    halves = original.__globals__["rotate_half"]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        present = scope[name]
        same = present is original and original.__globals__["rotate_half"] is halves
        if not same or not q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]:
            return present(q, k, cos, sin, unsqueeze_dim)
        return functional.rotary(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    return rotary
