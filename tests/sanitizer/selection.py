"""What runs under compute-sanitizer: calls of the table of ops, and of what the table has no row for.

A row of ``CLAIMED`` says which kernels of csrc its calls launch. test_sanitizer.py compares it with csrc, and
``python -m tests.sanitizer --list`` with what a GPU launches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastlayers
from fastlayers import backends, functional
from fastlayers.ops import vocab_parallel
from fastlayers.ops.low_rank import add_low_rank
from tests.harness import elements, gradients_of, outputs
from tests.table import OPS
from tests.table.batch_norm import batches, grouped
from tests.table.elementwise import few_values
from tests.table.sample import (
    Call,
    Input,
    Op,
    Sample,
    channels_last,
    contiguous,
    large,
    misaligned,
    one_value,
    shifted,
    strided,
    transposed,
    with_infinities,
    with_nan,
)

#: Samples that differ from others in their values launch the same kernels.
SPECIAL_VALUES = (with_nan, with_infinities, large, shifted, few_values)
#: Elements of the largest argument: rows of 2^20 elements take other kernels than shorter ones.
MOST = 2**22
DTYPES = (torch.float32, torch.bfloat16)
#: Triton compiles a kernel for each dtype and kind of shape, in half a second: it gets every so many samples, and those
#: whose names begin so.
EVERY = 5
OF_TRITON = ("length 262145", "length 1048579", "one long row", "long dim 0", "more rows than")
LAYOUTS = (one_value, transposed, strided, misaligned)
#: The row of calls that the table of ops does not have.
MORE = "more"
#: The row of norms that leave no threads of layer_norm_backward_rows without a row.
WHOLE_BLOCKS = "whole blocks"

#: Rows, and cases of that one, whose kernels read products of matrices.
WITH_PRODUCTS = (
    "linear", "gated_linear", "linear_cross_entropy", "linear_log_prob", "linear_divergence", "topk", "a patched block",
    "autocast", "pointwise",
)  # fmt: skip

#: For each row, the kernels of csrc that its calls launch.
CLAIMED: dict[str, tuple[str, ...]] = {
    "softmax": (
        "softmax_forward_rows", "softmax_forward_held", "softmax_forward_pieces", "softmax_forward_columns",
        "softmax_backward_rows", "softmax_backward_held", "softmax_backward_pieces", "softmax_backward_columns",
    ),
    "relu_add": ("relu_forward", "relu_backward_flat", "repeated_backward_columns"),
    "mul": (
        "mul_flat", "mul_repeated", "mul_broadcast", "mul_backward_flat", "repeated_backward_columns",
        "repeated_backward_rows", "add_pieces",
    ),
    "squeeze_excite": ("sum_rows", "sum_columns", "scale_shift_words", "scale_shift_elements"),
    "max_pool2d": ("pool_forward", "pool_backward", "pool_backward_any"),
    "scale_add": ("scale_flat", "scale_backward_columns", "scale_backward_rows"),
    "layer_norm": (
        "layer_norm_forward_rows", "layer_norm_split_moments", "layer_norm_split_apply", "layer_norm_backward_rows",
        "layer_norm_sum_partials", "layer_norm_split_sums", "layer_norm_split_dx", "layer_norm_split_columns",
    ),
    "group_norm": (
        "group_norm_forward_block", "group_norm_forward_team", "group_norm_split_moments", "group_norm_merge_moments",
        "group_norm_split_forward", "group_norm_pixels_moments", "group_norm_pixels_forward",
        "group_norm_backward_items", "group_norm_merge_sums", "group_norm_split_sums", "group_norm_split_backward",
        "group_norm_pixels_sums", "group_norm_pixels_backward",
    ),
    "batch_norm": (
        "batch_norm_forward", "batch_norm_statistics", "batch_norm_merge", "batch_norm_apply",
        "batch_norm_backward_kernel",
    ),
    "bias_act": ("bias_act_forward", "act_backward", "bias_act_backward_columns"),
    "swiglu": ("gated_forward", "gated_backward"),
    "linear": ("column_sum",),
    "rotary": ("rotate",),
    "cross_entropy": (
        "cross_entropy_rows", "merge_pieces", "cross_entropy_backward_rows", "cross_entropy_columns",
        "cross_entropy_backward_columns", "sum_losses", "sum_partials", "sum_weights",
    ),
    "linear_cross_entropy": ("cross_entropy_held",),
    "kl_div": ("kl_div_sum", "kl_div_elements", "kl_div_backward"),
    "kl_div_logits": ("divergence_forward", "divergence_backward"),
    MORE: ("cast", "dropout_flat", "gather_backward", "scale_in_place", "update_running"),
}  # fmt: skip

#: Samples that the table of ops does not have, and their dtypes.
EXTRA_SAMPLES: dict[str, list[tuple[Sample, torch.dtype]]] = {
    # No blocks hold a group of float64 together: several kernels share its channels.
    "group_norm": [(grouped("long group of float64", (1, 2, 257, 260), groups=1, act="silu"), torch.float64)],
    # More than the 28 MiB that stay in the L2 cache: the statistics are a kernel of their own.
    "batch_norm": [
        (batches(training=True)(f"large, {layout.__name__}", (8, 64, 128, 129), layout), torch.float32)
        for layout in (contiguous, channels_last)
    ],
}


@dataclass(frozen=True)
class Case:
    """A call in one dtype on one backend, None for the backend that fastlayers chooses."""

    row: str
    name: str
    dtype: torch.dtype
    backend: str | None
    run: Callable[[str], None]  # on a device

    @property
    def has_16_bit_product(self) -> bool:
        """Whether a kernel reads what cuBLAS made of 16-bit matrices."""
        low = self.dtype is not torch.float32 or self.name == "autocast"
        return low and (self.row in WITH_PRODUCTS or self.name in WITH_PRODUCTS)

    def __str__(self) -> str:
        return f"{self.row}: {self.name}, {str(self.dtype)[6:]}, {self.backend or 'chosen'}"

    def __call__(self, device: str = "cuda") -> None:
        with backends.backend(self.backend):
            self.run(device)


def on_device(t: Tensor, device: str) -> Tensor:
    """A copy in the same layout. What lies between its elements is copied too: a kernel may read it with them."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)


def run_sample(op: Op, sample: Sample, dtype: torch.dtype, layout: Callable[[Tensor], Tensor], device: str) -> None:
    """Forward and backward, with incoming gradients in a layout."""
    call = sample.make("cpu", dtype)

    def moved(value: Any) -> Any:
        return (
            on_device(value.detach().requires_grad_(value.requires_grad), device)
            if isinstance(value, Tensor)
            else value
        )

    call = Call(tuple(map(moved, call.args)), {name: moved(value) for name, value in call.kwargs.items()})
    outs = [out for out in outputs(op.fused(*call.args, **call.kwargs)) if out.requires_grad]
    if outs:
        dys = gradients_of(tuple(out.detach().cpu() for out in outs), layout)
        torch.autograd.grad(outs, call.leaves(), [on_device(dy, device) for dy in dys])


def of_op(op: Op) -> Iterator[Case]:
    """Its samples on the backends that have kernels for them."""

    def case(sample: Sample, dtype: torch.dtype, backend: str, layout: Callable[[Tensor], Tensor] = contiguous) -> Case:
        name = sample.name if layout is contiguous else f"{sample.name}, gradient {layout.__name__}"
        return Case(op.name, name, dtype, backend, lambda device: run_sample(op, sample, dtype, layout, device))

    samples = [sample for sample in op.samples if elements(sample) <= MOST and not has_special_values(sample)]
    for i, sample in enumerate(samples):
        dtypes = [dtype for dtype in DTYPES if dtype in op.dtypes and dtype in sample.dtypes]
        if "cuda" in op.kernels and "cuda" not in sample.refused:
            yield from (case(sample, dtype, "cuda") for dtype in dtypes)
        chosen = i % EVERY == 0 or sample.name.startswith(OF_TRITON)
        if "triton" in op.kernels and "triton" not in sample.refused and dtypes and chosen:
            yield case(sample, dtypes[i // EVERY % len(dtypes)], "triton")
    for sample, dtype in EXTRA_SAMPLES.get(op.name, []):
        yield case(sample, dtype, "cuda")
    for layout in LAYOUTS:
        yield from (case(op.samples[0], op.dtypes[1], backend, layout) for backend in ("cuda", "triton")
                    if backend in op.kernels)  # fmt: skip


def has_special_values(sample: Sample) -> bool:
    return any(value.values in SPECIAL_VALUES for value in sample.args if isinstance(value, Input))


# ---- what is no row of the table -------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def run_dropout(dtype: torch.dtype, device: str) -> None:
    for n in (37, 64, 10007):
        x, residual = (randn(3, n, dtype=dtype, device=device).requires_grad_() for _ in range(2))
        functional.dropout_add(x, residual, 0.5).sum().backward()


def run_gather(dtype: torch.dtype, device: str) -> None:
    for rows, length, columns in ((3, 33, 9), (40, 700, 2048), (17, 129, 512)):
        dy = randn(rows, length, dtype=dtype, device=device)
        torch.ops.fastlayers.gather_backward(dy, torch.arange(length).expand(rows, -1).to(device) % columns, columns)


def run_statistics(dtype: torch.dtype, device: str) -> None:
    """What a graph holds in place of batch_norm_train: statistics of their own, and their update."""
    ops = torch.ops.fastlayers
    for channels in (5, 200):
        x, weight = randn(4, channels, 6, 7, dtype=dtype, device=device), randn(channels, dtype=dtype, device=device)
        mean, var = torch.zeros(channels).to(weight), torch.ones(channels).to(weight)
        *_, moments = ops.batch_norm_moments(x, weight, weight, 1e-5, None, 1)
        ops.batch_norm_update_(mean, var, torch.tensor(0).to(device), moments, 0.1)
        ops.channel_bias_act_(x, weight, None, 1)


def run_under_autocast(dtype: torch.dtype, device: str) -> None:
    """The casts of a layer's parameters."""
    ops, low = torch.ops.fastlayers, torch.bfloat16
    for features in (24, 33):
        x = randn(6, features, dtype=low, device=device)
        weight, bias = randn(40, features, dtype=dtype, device=device), randn(40, dtype=dtype, device=device)
        weight2, bias2 = randn(7, 40, dtype=dtype, device=device), randn(7, dtype=dtype, device=device)
        y, kept = ops.linear_autocast(x, weight, bias)
        ops.linear_autocast_backward(torch.ones_like(y), x, kept, True, True, True)
        y, *kept = ops.mlp_autocast(x, weight, bias, weight2, bias2, 1, 0.0, 0.0)
        ops.mlp_autocast_backward(torch.ones_like(y), x, *kept, 1, 0.0, 0.0, *(True,) * 5)


def run_scale(dtype: torch.dtype, device: str, backend: str) -> None:
    """What linear_cross_entropy does to its gradients."""
    if backend == "cuda":
        scale_: Callable[[Tensor, Tensor], None] = torch.ops.fastlayers.scale_
    else:
        from fastlayers.kernels.elementwise import scale_
    for n in (37, 64, 10007):
        scale_(randn(n, dtype=dtype, device=device), torch.tensor(0.5).to(device))


def run_pointwise(dtype: torch.dtype, device: str) -> None:
    from fastlayers.kernels.convolution import pointwise_backward

    for wanted, channels in ((64, 64), (24, 40)):
        dy, other = (channels_last(randn(2, c, 7, 9, dtype=dtype, device=device)) for c in (wanted, channels))
        pointwise_backward(dy, randn(wanted, channels, 1, 1, dtype=dtype, device=device), other)


class Block(nn.Module):
    """A block whose forward, as a region, needs generated kernels: pointwise, and sums over rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(40), nn.Linear(40, 64), nn.Linear(32, 40)
        self.gamma = nn.Parameter(torch.rand(40))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.wide(self.norm(x)).chunk(2, -1)
        y = self.narrow(torch.tanh(first) * second.sigmoid() + first.abs())
        return x + self.gamma * y / (1 + y.square().mean(-1, keepdim=True)).sqrt()


def run_sync_batch_norm(dtype: torch.dtype, device: str) -> None:
    """What a process does between the collectives of FusedSyncBatchNormAct: channels that fill no block."""
    from fastlayers.kernels import sync_batch_norm as kernels

    for channels, processes in ((5, 3), (70, 1)):
        x, residual, dy = (randn(4, channels, 6, 7, dtype=dtype, device=device) for _ in range(3))
        weight = randn(channels, dtype=torch.float32, device=device)
        sent = kernels.sync_batch_norm_statistics(x)
        moments, count = kernels.sync_batch_norm_merge(sent.expand(processes, -1).contiguous())
        mean, var, _ = moments
        kernels.sync_batch_norm_update_(weight.clone(), weight.clone(), moments, count, 0.1)
        _, stats, bits = kernels.sync_batch_norm_normalize(x, mean, var, weight, weight, 1e-5, residual, 1, True)
        means, _, _ = kernels.sync_batch_norm_sums(dy, x, weight, weight, stats, None, bits, 1)
        kernels.sync_batch_norm_gradient(dy, x, weight, weight, stats, means, None, bits, 1, True)


def run_patched(dtype: torch.dtype, device: str) -> None:
    """A patched block; its first call is recorded, and the others run its region."""
    torch.manual_seed(0)
    model = fastlayers.patch_model(nn.Sequential(Block(), Block()).to(device, dtype))
    for _ in range(3):
        model(randn(3, 17, 40, dtype=dtype, device=device).requires_grad_()).sum().backward()


def run_adapter(dtype: torch.dtype, device: str) -> None:
    """Of float32, beside 16 bits: rows, columns and ranks that fill no block, with masks of dropouts and without."""
    from fastlayers.kernels import low_rank

    x, y = (randn(3, 35, n, dtype=dtype, device=device).requires_grad_() for n in (130, 197))
    a, b = (randn(*shape, dtype=torch.float32, device=device).requires_grad_() for shape in ((5, 130), (197, 5)))
    for dropout in (0.0, 0.3):
        out = add_low_rank(y, x, a, b, 0.5, dropout)
        torch.autograd.grad(out, (x, y, a, b), torch.ones_like(out))
    u, mask = randn(105, 5, dtype=torch.float32, device=device), randn(105, 130, dtype=dtype, device=device) > 0
    low_rank.wide_product(torch.cat([u] * 3, 1), torch.cat([a.detach()] * 3), 2.0, dtype, masks=[mask] * 3)
    low_rank.thin_products(x.detach().view(-1, 130), [a.detach().t()] * 3, 2.0, [mask] * 3, True)


def run_topk(dtype: torch.dtype, device: str) -> None:
    """Rows that fill no block, and k that fills no power of two."""
    for columns, k, options in ((37, 1, {}), (4099, 5, {"log_prob": True}), (9001, 16, {"softcap": 3.0})):
        x, weight = randn(19, 16, dtype=dtype, device=device), randn(columns, 16, dtype=dtype, device=device)
        functional.linear_topk(x, weight, k, chunk_size=8, **options)


def run_shard(dtype: torch.dtype, device: str) -> None:
    """Of a vocabulary that is spread over ranks; rows that fill no block."""
    for columns, smoothing in ((37, 0.0), (9001, 0.1)):
        x, target = randn(5, columns, dtype=dtype, device=device), torch.arange(0, 5 * columns, columns, device=device)
        lse, _, share = vocab_parallel._shard(x, target, columns, 2.0, smoothing > 0)
        options = vocab_parallel.Options(None, columns, 0, smoothing, 2.0, 1e-3)
        vocab_parallel._shard_backward(lse, x, target, lse, share, columns, options)


#: What is no row: its name, the backend, None for the one that is chosen, the dtypes, and the call.
CALLS: tuple[tuple[str, str | None, tuple[torch.dtype, ...], Callable[..., None]], ...] = (
    ("dropout", "cuda", DTYPES, run_dropout),
    ("dropout", "triton", DTYPES[1:], run_dropout),
    ("scale", "cuda", DTYPES, functools.partial(run_scale, backend="cuda")),
    ("scale", "triton", DTYPES[1:], functools.partial(run_scale, backend="triton")),
    ("gather", "cuda", DTYPES, run_gather),
    ("statistics", "cuda", DTYPES, run_statistics),
    ("a patched block", None, DTYPES, run_patched),
    ("autocast", "cuda", DTYPES[:1], run_under_autocast),
    ("pointwise", "triton", DTYPES[1:], run_pointwise),
    ("topk", "triton", DTYPES, run_topk),
    ("shard", "triton", DTYPES, run_shard),
    ("sync_batch_norm", "triton", DTYPES, run_sync_batch_norm),
    ("an adapter", "triton", (torch.float16, torch.bfloat16), run_adapter),
)


def more() -> Iterator[Case]:
    for name, backend, dtypes, run in CALLS:
        for dtype in dtypes:
            yield Case(MORE, name, dtype, backend, functools.partial(run, dtype))


def whole_blocks() -> Iterator[Case]:
    """Norms of as many rows as the groups of threads of any block divide, in lengths for which a group has several
    warps: of whole and of ragged words, and with all that the kernel of the backward adds or writes besides."""

    def run(op: Callable[..., Any], length: int, residual: bool, dtype: torch.dtype, device: str) -> None:
        x, more, weight = (randn(*shape, length, dtype=dtype, device=device) for shape in ((120,), (120,), ()))
        given = [x, more] if residual else [x]
        leaves = [t.requires_grad_() for t in (*given, weight)]
        outs = outputs(op(*given, (length,), weight))
        torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])

    norms = [
        (getattr(functional, f"{add}{name}"), bool(add)) for name in ("layer_norm", "rms_norm") for add in ("", "add_")
    ]
    for (op, residual), length, dtype in itertools.product(norms, (640, 2048, 2049, 4096, 4097, 8190), DTYPES):
        yield Case(
            WHOLE_BLOCKS, f"{op.__name__} of {length}", dtype, "cuda",
            functools.partial(run, op, length, residual, dtype),
        )  # fmt: skip


def cases(rows: Iterable[str] = ()) -> list[Case]:
    """Every case of these rows, or of all.

    Raises:
        ValueError: there is no such row.
    """
    known = {**{op.name: lambda op=op: of_op(op) for op in OPS}, MORE: more, WHOLE_BLOCKS: whole_blocks}
    chosen = list(rows) or list(known)
    if unknown := [row for row in chosen if row not in known]:
        raise ValueError(f"no op is called {', '.join(unknown)}; expected some of {', '.join(known)}")
    return [case for row in chosen for case in known[row]()]
