"""Rotary embedding of queries and keys as model libraries write it, and in other layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Input, Op, normal
from benchmarks.implementations import liger
from fastlayers import functional


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def eager_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_every_two(q) * sin, k * cos + rotate_every_two(k) * sin


def eager_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]
    turned = eager_rotary(q[..., :width], k[..., :width], cos, sin)
    return torch.cat((turned[0], q[..., width:]), -1), torch.cat((turned[1], k[..., width:]), -1)


def fused_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    return functional.rotary(q, k, cos, sin, interleaved=True)


_liger = liger("liger_rope")


def liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return _liger(q, k, cos[None], sin[None])  # type: ignore[misc]


ROTARY = Op("rotary", "rotary", functional.rotary, eager_rotary, liger=_liger and liger_rotary)
ROTARY_INTERLEAVED = Op("rotary_interleaved", "rotary", fused_interleaved, eager_interleaved)
ROTARY_PARTIAL = Op("rotary_partial", "rotary", functional.rotary, eager_partial)


def projected(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(batch, heads, seq, dim) as a view of (batch, seq, heads, dim), which is the result of a projection."""
    batch, heads, seq, dim = shape
    return normal((batch, seq, heads, dim), dtype, device).transpose(1, 2)


#: Without Liger, which rotates in place if the sequence comes before the heads in memory: all contestants share inputs.
OUT_OF_PLACE = ("eager", "compile", "fastlayers", "triton", "cuda")


def case(
    op: Op, batch: int, heads: int, kv_heads: int, seq: int, dim: int, *, width: int | None = None,
    of_projection: bool = False, dtype: torch.dtype = torch.bfloat16, **fields: Any,
) -> Case:  # fmt: skip
    """b is the size of q; k adds its share. The tables of cos and sin are not counted."""
    make = projected if of_projection else normal
    table = Input((seq, width or dim), grad=False, parameter=True)
    keys = Input((batch, kv_heads, seq, dim), make, parameter=True)
    moved = f"{2 * (1 + kv_heads / heads):g}b"
    label = f"kv {kv_heads}" + (" of a projection" if of_projection else "")
    if of_projection:
        fields["contestants"] = OUT_OF_PLACE
    inputs = (Input((batch, heads, seq, dim), make), keys, table, table)
    return Case(op, inputs, dtype, moved, moved, label=label, **fields)


LLAMA = (4, 32, 8, 2048, 128)
BARS = {"forward": 0.90, "backward": 0.90}
HOST = {"host_forward": 1.5, "host_training": 1.3}

CASES = [
    *(case(ROTARY, *LLAMA, dtype=dtype, bars=BARS) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    case(ROTARY, *LLAMA, of_projection=True, bars=BARS),
    case(ROTARY_INTERLEAVED, *LLAMA, bars=BARS),
    case(ROTARY_INTERLEAVED, *LLAMA, of_projection=True, bars=BARS),
    case(ROTARY_PARTIAL, 4, 32, 32, 2048, 80, width=32),
    case(ROTARY, 4, 32, 1, 2048, 128, of_projection=True),
    case(ROTARY, 1, 8, 8, 64, 64),
    case(ROTARY, 8, 32, 8, 1, 128, host=True, bars=HOST),
]
