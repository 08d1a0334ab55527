"""linear_cross_entropy: chunks, accumulation dtypes, autograd, and the op that torch.compile sees.

The rows of hidden are processed in chunks; only one chunk has its logits in memory. If the loss is a sum over the rows,
the same pass computes the gradients by three matrix products a chunk,

    logits = hidden·weightᵀ + bias     (the chunk's kernel takes the losses, and puts dlogits in the logits' place)
    dhidden = dlogits·weight
    dweight += dlogitsᵀ·hidden

and the backward multiplies them with the incoming gradient, in place. Without a reduction the incoming gradient is a
number for each row that the forward cannot know: the backward then goes through the chunks again. So does a second
backward of the same graph, because the first one returned the gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, reference
from fastlayers.ops.cross_entropy import MEAN, NONE, cross_entropy, cross_entropy_chunk_
from fastlayers.ops.dispatch import Needs

#: Elements of the logits from which a call that is left alone is chunked. Below, memory is no concern, and of three
#: products in the forward two are in vain where no backward follows. On a CPU 2**21 gain little: 256 x 8192 bfloat16
#: took as long as torch's own.
GPU_LEAST = 2**20
CPU_LEAST = 2**23

#: Elements of the logits from which a GPU is waited for: only then can the rows without a label be left out of the
#: products. The wait costs the launches that were ahead, some 100 us. 8192 x 4096 to 131072 classes with half of the
#: rows unlabelled take .48 of the time of all rows (H100, bfloat16, forward and backward).
GPU_LEAST_WAITED = 2**27

#: Chunks of a call. Nine of equal size keep the peak within an eighth of the logits, small tensors included. More would
#: cost accuracy: a dweight in half precision is rounded once a chunk.
CHUNKS = 9
#: Rows that a chunk has at least, where the call has them: the products read linear_weight, and read and write dweight,
#: once a chunk; with fewer rows the arithmetic would not hide that traffic.
LEAST_ROWS = 896
#: Chunks start at multiples of this many rows, so that the products have whole tiles.
ROW_TILE = 64
#: Row length of a chunk, in elements: an odd vocabulary is padded to it. Every row then is aligned as the tensor cores
#: and the kernel's vectors want it; the linear_weight is not copied.
COLUMN_TILE = 64

#: A vocabulary that is no multiple of this has rows of linear_weight that begin where tensor cores read no words, and
#: cuBLAS then has products at an eighth of the speed (50257 classes by 4096, 960 rows, H100: 4238 us and not 510). The
#: columns after the last whole tile of such a vocabulary are multiplied by a padded copy of the rows of these.
ALIGNED = 8

#: In float16 dlogits are multiplied by the first, since the softmax of a large vocabulary is below the least normal
#: number, and the gradients come out multiplied by the second, between underflow and overflow. Powers of two: exact.
FLOAT16_DLOGITS, FLOAT16_GRADIENTS = 2.0**8, 2.0**-4


class Loss(NamedTuple):
    """The loss but for its tensors, as the reference takes it. No softcap is 0."""

    ignore_index: int
    reduction: int
    label_smoothing: float
    softcap: float
    z_loss: float
    logit_scale: float


class Rest(NamedTuple):
    """The arguments that are not tensors, for autograd.

    Attributes:
        compute: dtype of the products.
        out: dtype of the loss.
        low: dtype of autocast, None where that is off.
        chunk_size: rows of a chunk, as the caller wants it.
    """

    loss: Loss
    compute: torch.dtype
    out: torch.dtype
    low: torch.dtype | None
    chunk_size: int | None


# ---- chunks ----------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Where chunks begin and end, and whether a low-precision dweight is summed in float32."""

    edges: list[int]
    wide: bool

    @property
    def most(self) -> int:
        return max(end - start for start, end in pairwise(self.edges))


def plan(rows: int, columns: int, features: int, itemsize: int, chunk_size: int | None, free: int | None) -> Chunks:
    """The chunks of a call: from its sizes, so that equal calls give equal bits; smaller ones only short of memory.

    Args:
        features: columns of the weight, if a low-precision dweight is summed; otherwise 0.
        itemsize: bytes of a logit.
        free: bytes that may be allocated, None where that is not known.
    """
    if chunk_size is not None:
        edges = [*range(0, rows, chunk_size), rows]
        return Chunks(edges, len(edges) - 1 > CHUNKS)
    row = _padded(columns) * itemsize
    count = max(1, min(CHUNKS, rows // LEAST_ROWS))
    # A float32 dweight where that and a chunk keep within the eighth together.
    left = (rows * columns * itemsize // 8 - 4 * columns * features) // row - ROW_TILE
    wide = left >= LEAST_ROWS
    if wide:
        count = max(count, -(-rows // left))
    if free is not None and free < -(-rows // count) * row:
        count, wide = max(count, min(-(-rows * row // max(free, 1)), -(-rows // ROW_TILE))), False
    tiles = -(-rows // ROW_TILE)
    return Chunks([min(rows, ROW_TILE * (i * tiles // count)) for i in range(count + 1)], wide)


def _padded(columns: int) -> int:
    return -(-columns // COLUMN_TILE) * COLUMN_TILE


@cache
def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _free_bytes(device: torch.device) -> int | None:
    """What torch may still allocate, by its own count: asking the driver would wait for it."""
    return _total_bytes(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else None


# ---- the sweep through the chunks ------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """The gradients of input, linear_weight and linear_bias, each None where it is not needed."""

    input: Tensor | None
    linear_weight: Tensor | None
    linear_bias: Tensor | None

    def like(self, *leaves: Tensor | None) -> Gradients:
        """In the shapes and dtypes of what they are gradients of."""
        return Gradients(
            *(g if g is None or t is None else g.view(t.shape).to(t.dtype) for g, t in zip(self, leaves, strict=True))
        )


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool, alpha: float) -> None:
    """out = alpha·a@b, or out += that, summed in float32, rounded once. ``out`` of 16-bit factors may be float32."""
    beta = int(add)
    if out.dtype is a.dtype:
        out.addmm_(a, b, beta=beta, alpha=alpha)
    elif out.is_cuda:
        torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    else:  # torch has products with a wider result on GPUs only
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha)


class _Tail(NamedTuple):
    """The last columns of an odd vocabulary, for all rows at once: they are few.

    Attributes:
        logits: those of the columns after the last whole tile, padded to one, and in their place the gradient.
        weight: a copy of their rows of the weight, padded with zeros.
    """

    logits: Tensor
    linear_weight: Tensor

    @classmethod
    def of(cls, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, scale: float) -> _Tail:
        count = linear_weight.shape[0]
        padded = linear_weight.new_zeros((COLUMN_TILE, linear_weight.shape[1]))
        padded[:count] = linear_weight
        logits = input.new_zeros((input.shape[0], COLUMN_TILE))
        if linear_bias is not None:
            logits[:, :count] = linear_bias[-count:]
        logits.addmm_(input, padded.t(), beta=scale, alpha=scale)
        return cls(logits, padded)


def _matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` in a dtype and in a layout that matrix products take as it is."""
    t = t.detach().to(dtype)
    return t if 1 in t.stride() else t.contiguous()


def _sweep_rows(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    grad_scale: Tensor | None, alpha: float, wanted: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    loss, compute = rest.loss, rest.compute
    columns, features = linear_weight.shape
    for_input, for_weight, for_bias = wanted
    free = _free_bytes(input.device)
    if free is not None:
        free -= for_input * input.nbytes + for_weight * linear_weight.nbytes
    h, w = _matrix(input.reshape(-1, features), compute), _matrix(linear_weight, compute)
    b = None if linear_bias is None else linear_bias.detach().to(compute)
    rows, classes = h.shape[0], target.reshape(-1).contiguous()
    # Where dweight is float32 anyway, or not wanted, its sum takes no memory.
    summed = features if for_weight and linear_weight.dtype in reference.LOW_PRECISION else 0
    chunks = plan(rows, columns, summed, compute.itemsize, rest.chunk_size, free)
    wide = torch.promote_types(compute, torch.float32)

    def buffer(leaf: Tensor, shape: tuple[int, ...], sum_wide: bool) -> Tensor:
        dtype = leaf.dtype if leaf.dtype is compute and not sum_wide else wide
        return torch.empty(shape, dtype=dtype, device=h.device)

    dh = buffer(input, (rows, features), False) if for_input else None
    dw = buffer(linear_weight, (columns, features), chunks.wide) if for_weight else None
    db = torch.zeros(columns, dtype=wide, device=h.device) if for_bias else None
    losses = torch.empty(rows, dtype=wide, device=h.device)
    memory = torch.empty((chunks.most, _padded(columns)), dtype=compute, device=h.device)
    options = (loss.ignore_index, loss.label_smoothing, loss.softcap or None, loss.z_loss)
    scale = loss.logit_scale
    main = columns if columns % ALIGNED == 0 else columns - columns % COLUMN_TILE
    tail = _Tail.of(h, w[main:], b, scale) if main < columns else None
    w, dw_main = w[:main], None if dw is None else dw[:main]
    for start, end in pairwise(chunks.edges):
        part = h[start:end]
        padded = memory[: end - start]
        logits = padded[:, :main]
        if b is not None:
            logits.copy_(b[:main])
        logits.addmm_(part, w.t(), beta=0 if b is None else scale, alpha=scale)
        if tail is not None:
            padded[:, main:].copy_(tail.logits[start:end])
        each = grad_scale is not None and grad_scale.numel() > 1
        factor = grad_scale[start:end] if each else grad_scale  # type: ignore[index]
        losses[start:end] = cross_entropy_chunk_(
            padded, classes[start:end], weight, *options, factor, any(wanted), columns
        )
        if tail is not None and any(wanted):
            tail.logits[start:end].copy_(padded[:, main:])
        if dh is not None:
            if tail is not None:  # first, for the sum is rounded to what the larger part is rounded to
                _multiply(tail.logits[start:end], tail.linear_weight, dh[start:end], False, alpha * scale)
            _multiply(logits, w, dh[start:end], tail is not None, alpha * scale)
        if dw_main is not None:
            _multiply(logits.t(), part, dw_main, start > 0, alpha * scale)
        if db is not None:
            db += padded[:, :columns].sum(0, dtype=wide)
    if tail is not None and dw is not None:
        _multiply(tail.logits[:, : columns - main].t(), h, dw[main:], False, alpha * scale)
    if db is not None:
        db *= alpha * scale
    del memory, padded, logits  # before a dweight that was summed in float32 is copied
    return losses, Gradients(dh, dw, db).like(input, linear_weight, linear_bias)


def _labelled(target: Tensor, ignore_index: int, columns: int) -> Tensor | None:
    """The rows with a label, None where all have one, or where it is not worth to find out."""
    if target.is_cuda and (target.numel() * columns < GPU_LEAST_WAITED or torch.cuda.is_current_stream_capturing()):
        return None
    found = (target.reshape(-1) != ignore_index).nonzero().squeeze(1)
    if found.numel() == target.numel():
        return None
    return found if found.numel() else found.new_zeros(1)  # a row that counts nothing, for the kernel


def sweep(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    grad_scale: Tensor | None, alpha: float, wanted: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    labelled = _labelled(target, rest.loss.ignore_index, linear_weight.shape[0])
    if labelled is None:
        return _sweep_rows(input, linear_weight, linear_bias, target, weight, rest, grad_scale, alpha, wanted)
    if grad_scale is not None and grad_scale.numel() > 1:
        grad_scale = grad_scale[labelled]
    rows = input.detach().reshape(-1, input.shape[-1])
    some = (rows[labelled], linear_weight, linear_bias, target.reshape(-1)[labelled], weight)
    losses, found = _sweep_rows(*some, rest, grad_scale, alpha, wanted)
    dh = found.input
    if dh is not None:
        dh = torch.zeros_like(rows).index_copy_(0, labelled, dh).view(input.shape)
    return losses.new_zeros(target.numel()).index_copy_(0, labelled, losses), found._replace(input=dh)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by, still on its device: the weights of the classes that take part, or their number."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)].to(dtype), 0.0).sum()


def evaluate(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Gradients]:  # fmt: skip
    """The loss, gradients of it, and what is left to multiply these with besides the incoming gradient."""
    reduction = rest.loss.reduction
    wide = torch.promote_types(rest.compute, torch.float32)
    denominator, factor = None, None
    if reduction == MEAN:
        denominator = _denominator(target, weight, rest.loss.ignore_index, wide)
        # Where all rows are ignored the loss is NaN, and the gradients are 0 as torch's.
        kept = (target != rest.loss.ignore_index).any()
        factor = torch.where(kept, denominator.reciprocal(), 0.0)
    left, alpha = None, 1.0
    if any(wanted) and rest.compute is torch.float16:
        # In float16 neither the softmax nor a quotient by thousands of rows is a normal number. The incoming gradient,
        # which a GradScaler scales, comes too late.
        largest = torch.ones((), dtype=wide, device=target.device) if weight is None else weight.abs().max()
        left = (largest.to(wide) if factor is None else largest * factor) / FLOAT16_GRADIENTS
        factor, alpha = FLOAT16_DLOGITS / largest.to(wide), FLOAT16_GRADIENTS / FLOAT16_DLOGITS
    tensors = (input, linear_weight, linear_bias, target, weight)
    device = input.device.type
    with torch.no_grad(), nullcontext() if rest.low is None else torch.autocast(device, enabled=False):
        losses, gradients = sweep(*tensors, rest, factor, alpha, wanted)
    if reduction == NONE:
        return losses.view(target.shape).to(rest.out), left, gradients
    total = losses.sum()
    return (total if denominator is None else total / denominator).to(rest.out), left, gradients


def _scale_(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """In place: no one else holds the gradient."""
    if gradient is None:
        return None
    kernels = elementwise.FAMILY.kernels_for(gradient) if gradient.is_cuda else None
    if kernels is not None and gradient.numel() > 0:
        kernels.scale_(gradient, factor.to(torch.promote_types(gradient.dtype, torch.float32)))
        return gradient
    if factor.dtype is gradient.dtype:
        return gradient.mul_(factor)
    # With one dimension the factor is not rounded to the gradient's dtype before it is multiplied with.
    return torch.mul(gradient, factor.view(1), out=gradient)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps references to its inputs, and the gradients of a summed loss, which the first backward returns."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        weight: Tensor | None, rest: Rest,
    ) -> Tensor:  # fmt: skip
        wanted = ctx.needs_input_grad[:3] if rest.loss.reduction != NONE else (False, False, False)
        tensors = (input, linear_weight, linear_bias, target, weight)
        loss, left, gradients = evaluate(*tensors, rest, wanted)
        ctx.save_for_backward(*tensors, left, *gradients)
        ctx.rest, ctx.returned = rest, False
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias, target, weight, left, *ready = ctx.saved_tensors
        tensors, rest, wanted = (input, linear_weight, linear_bias, target, weight), ctx.rest, ctx.needs_input_grad[:3]
        if dispatch.needs_double_backward(dy):
            found = _decomposed_backward(dy, *tensors, rest, wanted)
        elif rest.loss.reduction == NONE:
            found = _gradients_of_rows(dy, *tensors, rest, wanted)
        else:
            if ctx.returned:
                _, left, gradients = evaluate(*tensors, rest, wanted)
            else:
                # Without the version counter: to autograd what it saved for a second backward stays as it was.
                gradients = Gradients(*(g if g is None else g.data for g in ready))
                ctx.returned = True
            factor = dy if left is None else dy * left
            found = Gradients(*(_scale_(g, factor) for g in gradients))
        return *found, None, None, None


def _gradients_of_rows(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    rest: Rest, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """The backward without a reduction: once more through the chunks."""
    scale = dy.detach().reshape(-1).to(torch.promote_types(rest.compute, torch.float32)).contiguous()
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        return sweep(input, linear_weight, linear_bias, target, weight, rest, scale, 1.0, wanted)[1]


def _decomposed_backward(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    rest: Rest, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """The backward in torch ops, with whole logits, for second derivatives."""

    def compose(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
        return reference.linear_cross_entropy(input, linear_weight, linear_bias, target, weight, *rest.loss)

    with torch.autocast(input.device.type, rest.low, enabled=rest.low is not None):
        return Gradients(*dispatch.differentiate(compose, (input, linear_weight, linear_bias), wanted, dy))


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest
) -> str | None:
    """Why a call cannot be chunked, None where it can."""
    tensors = {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
        "target": target,
        "weight": weight,
    }
    for name, t in tensors.items():
        if t is not None and not dispatch.is_plain(t):
            return f"it takes plain tensors, and {name} is a {type(t).__name__}"
        if t is not None and t.device != input.device:
            return f"{name} is on {t.device}, and input on {input.device}"
    given = [t.dtype for t in (input, linear_weight, linear_bias) if t is not None]
    if any(dtype not in dispatch.FLOATING or _cast(dtype, rest.low) is not rest.compute for dtype in given):
        return f"input, linear_weight and linear_bias are {', '.join(map(str, given))}; chunks take one floating dtype"
    if target.dtype is not torch.int64:
        return f"the target is {target.dtype}; chunks take classes as int64"
    if input.dim() == 0 or linear_weight.dim() != 2 or input.shape[-1] != linear_weight.shape[1]:
        shapes = tuple(input.shape), tuple(linear_weight.shape)
        return f"input is {shapes[0]}, and linear_weight {shapes[1]}; expected (..., H) and (V, H)"
    if target.shape != input.shape[:-1]:
        return f"the target is {tuple(target.shape)}, and input {tuple(input.shape)}; expected a class for each row"
    columns = linear_weight.shape[0]
    if any(t is not None and t.shape != (columns,) for t in (linear_bias, weight)):
        return f"linear_bias and weight have to be of shape ({columns},)"
    if weight is not None and (weight.requires_grad or weight.dtype not in dispatch.FLOATING):
        return f"weight is {weight.dtype}, or wants a gradient"
    if weight is not None and rest.low is None and weight.dtype is not rest.compute:
        return f"weight is {weight.dtype}, and the logits are {rest.compute}"
    if input.numel() == 0 or linear_weight.numel() == 0:
        return (
            f"nothing to compute on input of shape {tuple(input.shape)}, linear_weight of {tuple(linear_weight.shape)}"
        )
    if not 0.0 <= rest.loss.label_smoothing <= 1.0:
        return f"label_smoothing is {rest.loss.label_smoothing}"
    return None


def _cast(dtype: torch.dtype, low: torch.dtype | None) -> torch.dtype:
    """What autocast makes of an operand of a linear layer."""
    return dtype if low is None or dtype is torch.float64 else low


def _is_sharded(linear_weight: object) -> bool:
    return type(linear_weight).__name__ == "DTensor"


def is_large(input: Tensor, linear_weight: Tensor) -> bool:
    if input.dim() == 0 or linear_weight.dim() == 0:
        return False
    logits = input.numel() // max(input.shape[-1], 1) * linear_weight.shape[0]
    return logits >= (GPU_LEAST if input.is_cuda else CPU_LEAST)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None, z_loss: float, logit_scale: float,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy(): expected a softcap above 0 or None, but got {softcap}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"linear_cross_entropy(): expected a chunk_size of at least 1 row or None, but got {chunk_size}"
        )
    if not isinstance(logit_scale, float | int):
        raise TypeError(
            f"linear_cross_entropy(): expected logit_scale to be a number, but got {type(logit_scale).__name__}"
        )
    for t in (linear_weight, target):
        if not isinstance(t, Tensor):
            raise dispatch.expected_tensor(t)
    code = _reduction.get_enum(reduction)
    loss = Loss(ignore_index, code, label_smoothing, softcap or 0.0, z_loss, logit_scale)
    if _is_sharded(linear_weight) and not _is_sharded(input):
        raise TypeError(
            "linear_cross_entropy(): expected linear_weight to be a whole tensor, but got a DTensor. Call it inside of"
            " the forward of the module that fully_shard wraps, where parameters are whole, or pass"
            " linear_weight.full_tensor();"
            " logits that are sharded over the vocabulary have vocab_parallel_cross_entropy"
        )
    if torch.compiler.is_compiling():
        return _linear_cross_entropy_compiling(input, linear_weight, linear_bias, target, weight, loss, chunk_size)
    forced = backends.get_backend()
    if forced not in ("eager", "compile"):
        if dispatch.must_decompose():
            backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        elif not dispatch.is_plain(input):
            backends.refuse(f"it takes plain tensors, and input is a {type(input).__name__}")
        elif forced is not None or chunk_size is not None or is_large(input, linear_weight):
            rest = _rest(input, loss, _autocast_dtype(input), chunk_size)
            reason = unsupported(input, linear_weight, linear_bias, target, weight, rest)
            if reason is None:
                if dispatch.wants_gradient(input, linear_weight, linear_bias):
                    return _LinearCrossEntropy.apply(input, linear_weight, linear_bias, target, weight, rest)
                return evaluate(input, linear_weight, linear_bias, target, weight, rest, (False, False, False))[0]
            backends.refuse(reason)
    given = (input, linear_weight, linear_bias, target, weight, *loss)
    if forced is None:  # the loss of logits may still have a kernel
        return dispatch.call_reference(reference.linear_cross_entropy, *given, _loss_of_logits)
    return dispatch.call_reference(reference.linear_cross_entropy, *given)


def _loss_of_logits(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    softcap: float, z_loss: float,
) -> Tensor:  # fmt: skip
    named = reference.REDUCTIONS[reduction]
    return cross_entropy(
        logits, target, weight, ignore_index, named, label_smoothing, softcap or None, z_loss, inplace=False
    )


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _rest(input: Tensor, loss: Loss, low: torch.dtype | None, chunk_size: int | None) -> Rest:
    compute = _cast(input.dtype, low)
    out = torch.float32 if low is not None and compute in reference.LOW_PRECISION else compute
    return Rest(loss, compute, out, low, chunk_size)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
# A compiled graph keeps the chunks, as one op with a fake implementation: Inductor would have the logits whole. Its
# backward multiplies out of place, which Inductor may undo.


def _run_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, what is left to multiply the gradients with, and these; empty where there is none."""
    loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
    wanted = (for_input, for_weight, for_bias) if reduction != NONE else (False, False, False)
    rest = _rest(input, loss, low, chunk_size)
    found, left, gradients = evaluate(input, linear_weight, linear_bias, target, weight, rest, wanted)
    left, dh, dw, db = (input.new_empty(0) if t is None else t for t in (left, *gradients))
    return found, left, dh, dw, db


def _describe_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rest = _rest(input, Loss(0, reduction, 0.0, 0.0, 0.0, 1.0), low, chunk_size)
    found = input.new_empty(target.shape if reduction == NONE else (), dtype=rest.out)
    wanted = (for_input, for_weight, for_bias)
    made, scaled = reduction != NONE, rest.compute is torch.float16 and any(wanted)
    left = input.new_empty((), dtype=torch.float32) if made and scaled else input.new_empty(0)
    return (
        found,
        left,
        *_describe_gradients((input, linear_weight, linear_bias), wanted if made else (False, False, False)),
    )


def _run_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of a loss without a reduction; empty where one is not needed."""
    loss = Loss(ignore_index, NONE, label_smoothing, softcap, z_loss, logit_scale)
    rest = _rest(input, loss, low, chunk_size)
    wanted = (for_input, for_weight, for_bias)
    gradients = _gradients_of_rows(dy, input, linear_weight, linear_bias, target, weight, rest, wanted)
    dh, dw, db = (input.new_empty(0) if t is None else t for t in gradients)
    return dh, dw, db


def _describe_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _describe_gradients((input, linear_weight, linear_bias), (for_input, for_weight, for_bias))


def _describe_gradients(
    leaves: tuple[Tensor, Tensor, Tensor | None], wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    dh, dw, db = (
        leaves[0].new_empty(0) if t is None or not wants else t.new_empty(t.shape)
        for t, wants in zip(leaves, wanted, strict=True)
    )
    return dh, dw, db


_forward_op = dispatch.opaque("fastlayers::linear_cross_entropy_forward", _run_chunks, _describe_chunks)
_backward_op = dispatch.opaque("fastlayers::linear_cross_entropy_backward", _run_chunks_again, _describe_chunks_again)


class LinearCrossEntropyInGraph(dispatch.Pair, inputs=3):
    """Keeps its inputs, and the gradients of a summed loss, which backward multiplies with the incoming one."""

    @staticmethod
    def forward(
        kernels: None, needs: Needs, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float, softcap: float,
        z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    ) -> Any:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, target, weight)
        loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
        found, *ready = _forward_op(*tensors, *loss, low, chunk_size, *(needs or (False, False, False)))
        return found, (*tensors, *ready), (loss, low, chunk_size)

    @staticmethod
    def backward(kernels: None, needs: Needs, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        *tensors, left, dh, dw, db, loss, low, chunk_size = args
        if loss.reduction == NONE:
            found = _backward_op(dy, *tensors, loss.ignore_index, *loss[2:], low, chunk_size, *needs)
        else:
            factor = dy * left if left.dim() == 0 else dy
            found = [_scaled(g, factor) if needed else g for g, needed in zip((dh, dw, db), needs, strict=True)]
        return tuple(found)

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "fastlayers::linear_cross_entropy has no second derivative, which create_graph=True asks for; outside of"
            " torch.compile functional.linear_cross_entropy has one"
        )


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient * factor if factor.dtype is gradient.dtype else (gradient * factor.view(1)).to(gradient.dtype)


_in_graph = dispatch.graph_op_of(LinearCrossEntropyInGraph, "linear_cross_entropy")


def _linear_cross_entropy_compiling(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, loss: Loss,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    if input.is_cuda:
        keeps = dispatch.graph_keeps_kernel(input)
    else:
        keeps = not torch.compiler._is_exporting_flag and backends.get_backend() is None
    if keeps and (chunk_size is not None or is_large(input, linear_weight)):
        low = _autocast_dtype(input)
        rest = _rest(input, loss, low, chunk_size)
        if unsupported(input, linear_weight, linear_bias, target, weight, rest) is None:
            return _in_graph(input, linear_weight, linear_bias, target, weight, *loss, low, chunk_size)
    return reference.linear_cross_entropy(input, linear_weight, linear_bias, target, weight, *loss)
