"""Rows of the table of ops: rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastlayers
from fastlayers import functional
from tests.table.layer_norm import rms_norm, row_statistics
from tests.table.sample import (
    Input,
    Layer,
    Op,
    Sample,
    channels_last,
    contiguous,
    expanded,
    misaligned,
    nbytes,
    normal,
    one_value,
    row_slice,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import HALF, KERNELS


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, rotary_dim: Any = None,
    dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if rotary_dim == 2 * cos.shape[-1]:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        wide = x if dtype is None or x.dtype == torch.float64 else x.float()
        turning, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
        turning = turning * cos + (rotate_every_two if interleaved else rotate_half)(turning) * sin
        out = torch.cat((turning, rest), -1) if rest.shape[-1] else turning
        return out if dtype is None else out.to(dtype)

    return rotated(q), rotated(k)


def heads_last_in_memory(t: Tensor) -> Tensor:
    """(batch, heads, seq, dim) as a projection gives it: the transposed view of (batch, seq, heads, dim)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def packed(t: Tensor) -> Tensor:
    """The same for a projection that gives queries, keys and values in one tensor."""
    return torch.stack((t, t, t), 1).transpose(2, 3).contiguous().transpose(2, 3)[:, 1]


def rotations() -> tuple[Sample, ...]:
    """Calls of rotary. The tables have two independent factors for each pair."""

    def sample(
        name: str, q: tuple[int, ...] = (2, 3, 5, 8), *, kv_heads: int | None = None, layout: Any = contiguous,
        values: Any = normal, tables: Any = ..., k: Any = None, interleaved: bool = False, kwargs: Any = None,
        **options: Any,
    ) -> Sample:  # fmt: skip
        of_k = q if kv_heads is None else (q[0], kv_heads, *q[2:])
        table = (
            Input(q[-2:], grad=False)
            if tables is ...
            else tables
            if isinstance(tables, Input)
            else Input(tables, grad=False)
        )
        args = (Input(q, layout, values), k or Input(of_k, layout, values), table, table)
        return Sample(name, (*args, True) if interleaved else args, kwargs or {}, **options)

    both = [(False, ""), (True, ", interleaved")]
    of_interleaved = ("heads last in memory", "row slice", "misaligned")
    layouts: dict[str, Any] = {
        "heads last in memory": heads_last_in_memory,
        "packed": packed,
        "row slice": row_slice,
        "strided": strided,
        "misaligned": misaligned,
        "expanded batch": expanded(0),
        "expanded heads": expanded(1),
        "expanded along the row": expanded(3),
        "one value": one_value,
    }
    return (
        sample("heads first", smooth=True),
        sample("neighbours", smooth=True, interleaved=True),
        sample("half tables", tables=(5, 4), kwargs={"rotary_dim": 8}, smooth=True),
        sample("half tables, neighbours", tables=(5, 4), kwargs={"rotary_dim": 8}, smooth=True, interleaved=True),
        sample("part", tables=(5, 4), smooth=True),
        sample("part, neighbours", tables=(5, 4), smooth=True, interleaved=True),
        *(
            made
            for interleaved, suffix in both
            for made in (
                *(sample(f"head_dim {n}{suffix}", (2, 3, 5, n), interleaved=interleaved)
                  for n in (2, 6, 16, 20, 72, 128, 1030)),
                *(sample(f"{part} of {n}{suffix}", (2, 3, 5, n), tables=(5, part), interleaved=interleaved)
                  for part, n in ((4, 7), (16, 17), (16, 24), (20, 80), (32, 1500))),
                sample(f"half tables of a part{suffix}", (2, 3, 5, 48), tables=(5, 16), interleaved=interleaved,
                       kwargs={"rotary_dim": 32}),
                *(sample(f"{h} heads, {kv} of keys{suffix}", (2, h, 5, 32), kv_heads=kv, interleaved=interleaved)
                  for h, kv in ((8, 2), (9, 3), (1, 4))),
                *(sample(f"{name}{suffix}", (2, 6, 5, 32), kv_heads=None if name.startswith("expanded") else 2,
                         layout=layout, interleaved=interleaved)
                  for name, layout in layouts.items() if not interleaved or name in of_interleaved),
                sample(f"heads last{suffix}", (2, 5, 6, 32), tables=(5, 1, 32), interleaved=interleaved,
                       k=Input((2, 5, 2, 32))),
                sample(f"several blocks{suffix}", (2, 8, 301, 64), kv_heads=2, interleaved=interleaved),
                sample(f"float32 tables{suffix}", (2, 6, 5, 32), interleaved=interleaved, dtypes=HALF,
                       tables=Input((5, 32), grad=False, dtype=torch.float32)),
                sample(f"float32 tables of a part{suffix}", (2, 6, 5, 32), interleaved=interleaved, dtypes=HALF,
                       tables=Input((5, 20), grad=False, dtype=torch.float32)),
                *(sample(f"float32 tables, to {str(to)[6:]}{suffix}", (2, 6, 5, 32), interleaved=interleaved,
                         tables=Input((5, 32), grad=False, dtype=torch.float32), dtypes=(to,), kwargs={"dtype": to})
                  for to in HALF),
                sample(f"NaN{suffix}", (2, 6, 5, 32), values=with_nan, interleaved=interleaved),
                sample(f"infinities{suffix}", (2, 6, 5, 32), values=with_infinities, tables=(5, 24),
                       interleaved=interleaved),
            )
        ),
        sample("to bfloat16", kwargs={"dtype": torch.bfloat16}, dtypes=(torch.bfloat16,)),
        sample("tables of a batch", (2, 6, 5, 32), kv_heads=2, tables=(2, 1, 5, 32), layout=heads_last_in_memory),
        sample("tables of a batch, heads last", (2, 5, 6, 32), tables=(2, 5, 1, 32)),
        sample("tables of a batch of one", (2, 6, 5, 32), tables=(1, 5, 32)),
        sample("sequence first", (5, 2, 6, 32), tables=(5, 1, 1, 32),
               layout=lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        sample("tables that differ from head to head", (2, 6, 5, 32), tables=(6, 5, 32)),
        sample("tables expanded over the heads", (2, 3, 5, 16), tables=Input((2, 3, 5, 16), expanded(1), grad=False)),
        sample("tables expanded over the sequence", (2, 3, 5, 16), tables=Input((5, 16), expanded(0), grad=False)),
        sample("one table for all", (2, 3, 5, 16), tables=(16,)),
        *(sample(f"{name} tables", (2, 3, 5, 16), tables=Input((5, 16), layout, grad=False))
          for name, layout in (("strided", strided), ("misaligned", misaligned), ("sliced", row_slice),
                               ("transposed", transposed), ("one value", one_value))),
        sample("three dims", (5, 6, 16), tables=(5, 1, 16), k=Input((5, 2, 16))),
        sample("two dims", (6, 16)),
        sample("one dim", (16,), tables=(16,)),
        sample("one token", (2, 8, 1, 64), kv_heads=2),
        sample("keys without gradient", k=Input((2, 3, 5, 8), grad=False)),
        sample("misaligned keys", (2, 3, 5, 16), k=Input((2, 3, 5, 16), misaligned)),
        sample("keys with heads last in memory", (2, 3, 5, 16), k=Input((2, 3, 5, 16), heads_last_in_memory)),
        # What follows no kernel takes.
        sample("empty", (0, 3, 5, 8), refused=KERNELS),
        sample("no tokens", (2, 3, 0, 8), refused=KERNELS),
        sample("tables with a gradient", tables=Input((5, 8)), refused=KERNELS),
        sample("tables of every head of a batch", tables=(2, 3, 5, 8), refused=KERNELS),
        sample("tables that widen", tables=(4, 1, 1, 5, 8), refused=KERNELS),
        sample("tables of a batch that q has not", (1, 3, 5, 8), tables=(2, 1, 5, 8), refused=KERNELS),
        sample("odd part", tables=(5, 3), refused=KERNELS),
        sample("five dims", (2, 3, 2, 5, 8), refused=KERNELS),
        sample("keys of a longer sequence", tables=(8,), k=Input((2, 4, 7, 8)), refused=KERNELS),
        sample("keys of float32", k=Input((2, 3, 5, 8), dtype=torch.float32), refused=KERNELS, dtypes=HALF),
        sample("float32 tables of float64 heads", tables=Input((5, 8), grad=False, dtype=torch.float32),
               refused=KERNELS, dtypes=(torch.float64,)),
        sample("transposed", layout=transposed, refused=KERNELS),
        sample("channels_last", layout=channels_last, refused=KERNELS),
    )  # fmt: skip


ROTATIONS = rotations()


ROTARY_MISTAKES = (
    Sample("tables of another sequence", (*(Input((2, 3, 5, 8)),) * 2, *(Input((4, 8), grad=False),) * 2)),
    Sample("tables wider than a head", (*(Input((2, 3, 5, 8)),) * 2, *(Input((5, 16), grad=False),) * 2)),
    Sample("sin of another width", (*(Input((2, 3, 5, 8)),) * 2, Input((5, 8)), Input((5, 4)))),
    Sample("no tables", (*(Input((2, 3, 5, 8)),) * 2, None, None)),
)


ROTARY = Op(
    "rotary",
    functional.rotary,
    rotary,
    kernels=KERNELS,
    samples=ROTATIONS,
    saved_bytes=lambda call, out: nbytes(call.args[2]) + nbytes(call.args[3]),
    mistakes=ROTARY_MISTAKES,
    layers=(
        Layer(fastlayers.FusedRotary(), ROTATIONS[0], 4),
        Layer(fastlayers.FusedRotary(interleaved=True), ROTATIONS[1], 4),
        Layer(fastlayers.FusedRotary(rotary_dim=8), ROTATIONS[2], 4),
    ),
    matrix=None,
)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float | None = 1e-6, interleaved: bool = False, *, casting: str = "torch", **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = (rms_norm(x, x.shape[-1:], w, eps, casting=casting) for x, w in ((q, q_weight), (k, k_weight)))
    return rotary(q, k, cos, sin, interleaved, **kwargs)


def normed_rotations() -> tuple[Sample, ...]:
    """Calls with heads before the sequence, or after it as a projection gives them."""

    def sample(
        name: str, q: tuple[int, ...] = (2, 5, 3, 8), *, kv_heads: int | None = None, layout: Any = contiguous,
        table: Any = ..., weight: Any = ..., kwargs: Any = None, **options: Any,
    ) -> Sample:  # fmt: skip
        given = Input((q[-1],)) if weight is ... else weight
        tables = Input((q[1], 1, q[-1]), grad=False) if table is ... else table
        keys = Input((*q[:2], kv_heads or q[2], q[-1]), layout)
        return Sample(name, (Input(q, layout), keys, given, given, tables, tables), kwargs or {}, **options)

    return (
        sample("heads last", smooth=True),
        sample("neighbours", kwargs={"interleaved": True}),
        sample("part", table=Input((5, 1, 4), grad=False)),
        sample("half tables", table=Input((5, 1, 4), grad=False), kwargs={"rotary_dim": 8}),
        sample("no weights", weight=None),
        *(sample(f"head_dim {n}", (2, 5, 4, n), kv_heads=2) for n in (2, 20, 64, 128)),
        sample("many tokens", (2, 300, 4, 64), kv_heads=1),
        sample("float32 weights", (2, 5, 4, 32), weight=Input((32,), dtype=torch.float32), dtypes=HALF),
        sample("gemma", (2, 5, 4, 32), kwargs={"casting": "gemma"}),
        sample("llama", (2, 5, 4, 32), kwargs={"casting": "llama"}),
        sample("heads first in shape", (2, 3, 5, 8), layout=heads_last_in_memory,
               table=Input((5, 8), grad=False)),
        sample("row slice", (2, 5, 4, 32), layout=row_slice),
        sample("misaligned", (2, 5, 4, 32), layout=misaligned),
        sample("expanded batch", (2, 5, 4, 32), layout=expanded(0)),
    )  # fmt: skip


NORMED_ROTATIONS = normed_rotations()


QK_NORM_ROTARY = Op(
    "qk_norm_rotary",
    functional.qk_norm_rotary,
    qk_norm_rotary,
    kernels=KERNELS,
    samples=NORMED_ROTATIONS,
    saved_bytes=lambda call, out: (
        sum(map(nbytes, call.tensors())) + sum(row_statistics(call, x.shape, 1, 1) for x in call.args[:2])
    ),
    mistakes=(
        Sample("tables of another sequence",
               (*(Input((2, 5, 3, 8)),) * 2, None, None, *(Input((4, 1, 8), grad=False),) * 2)),
        Sample("weight of another size",
               (*(Input((2, 5, 3, 8)),) * 2, Input((4,)), None, *(Input((5, 1, 8), grad=False),) * 2)),
    ),
    layers=(Layer(fastlayers.FusedQKNormRotary(8), NORMED_ROTATIONS[4], (0, 1, 4, 5)),),  # without weights
    matrix=None,
)  # fmt: skip
