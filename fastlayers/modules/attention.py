"""Attention of one sequence to itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers.ops import guard
from fastlayers.ops.linear import linear
from fastlayers.ops.split import parts


class FusedMultiheadAttention(nn.MultiheadAttention):
    r""":class:`torch.nn.MultiheadAttention` without its copies.

    .. math:: \text{softmax}(Q K^T / \sqrt{d} + \text{mask})\, V\, W_o^T + b_o \quad\text{of each head, with}\quad
        (Q, K, V) = x W_{qkv}^T + b_{qkv}

    Torch transposes a batch of sequences, copies query, key and value into contiguous memory, and in the backward the
    gradients into one tensor. Here the kernels of :func:`torch.nn.functional.scaled_dot_product_attention` read them
    where the product wrote them, and both linear layers are :func:`fastlayers.functional.linear`.

    This is for the attention of a sequence to itself without weights as a second result: ``query``, ``key`` and
    ``value`` are one tensor of shape (N, L, E), or (L, N, E) if not ``batch_first``, and ``need_weights`` is False. Any
    ``attn_mask`` may be given, but no ``key_padding_mask``. Other calls are torch's. The result is laid out as torch's.

    Keeps: x, the result of its product, that of the attention, and what the attention keeps.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        mask = self._mask(query, attn_mask, is_causal) if query is key is value and not need_weights else NotImplemented
        if mask is NotImplemented or key_padding_mask is not None:
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return nn.MultiheadAttention.forward(self, query, key, value, *rest)
        packed = linear(query, self.in_proj_weight, self.in_proj_bias)
        heads = packed.unflatten(-1, (3, self.num_heads, self.head_dim))
        order = (2, 0, 3, 1, 4) if self.batch_first else (2, 1, 3, 0, 4)
        q, k, v = parts(torch.unbind, heads.permute(order), 0)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        rows = attended.transpose(1, 2) if self.batch_first else attended.permute(2, 0, 1, 3)
        out = linear(rows.flatten(2), self.out_proj.weight, self.out_proj.bias)
        # In torch's layout: a dropout draws in the order of memory. In a region what comes next does this copy, too.
        return out.transpose(0, 1).contiguous().transpose(0, 1) if self.batch_first else out, None

    def _mask(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Any:
        """The mask as the attention takes it; NotImplemented for calls that are torch's."""
        if (
            not guard.is_plain(x)
            or x.dim() != 3
            or x.shape[-1] != self.embed_dim
            or not self._qkv_same_embed_dim
            or self.bias_k is not None
            or self.bias_v is not None
            or self.add_zero_attn
            or (is_causal and mask is None)
        ):
            return NotImplemented
        if mask is None or is_causal:  # A hint that the mask is this one.
            return None
        batch, length = x.shape[:2] if self.batch_first else x.shape[1::-1]
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask, float("-inf"))
        if mask.shape == (length, length) and mask.is_floating_point():
            return mask
        if mask.shape == (batch * self.num_heads, length, length) and mask.is_floating_point():
            return mask.view(batch, self.num_heads, length, length)
        return NotImplemented
