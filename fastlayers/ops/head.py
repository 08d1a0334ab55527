"""The head of a model: what is computed from the logits of a linear layer, which are never in memory as a whole.

The rows of the input are processed in chunks; only one chunk has its logits in memory. A callback takes what it wants
of the logits of a chunk, and may put a gradient in their place, of which the chunk's other two products are made:

    logits = scale·(input·linear_weightᵀ + linear_bias)
    dinput = dlogits·linear_weight
    dlinear_weight += dlogitsᵀ·input

A head with an adapter has a second, thin product, low_rank_input·low_rank_weightᵀ, beside that of the frozen weight. It
is added before the logits are scaled, and has the same two products for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, reference
from fastlayers.ops.quantized import Quantized, quantized, without_quantized

#: Elements of the logits from which a call that is left alone is chunked. Below, memory is no concern, and of three
#: products in the forward two are in vain where no backward follows. On a CPU 2**21 gain little: 256 x 8192 bfloat16
#: took as long as torch's own.
GPU_LEAST = 2**20
CPU_LEAST = 2**23

#: Elements of the logits from which a GPU is waited for: only then can the rows without a label be left out of the
#: products. The wait costs the launches that were ahead, some 100 us. 8192 x 4096 to 131072 classes with half of the
#: rows unlabelled take .48 of the time of all rows (H100, bfloat16, forward and backward).
GPU_LEAST_WAITED = 2**27

#: A chunk takes less than one in so many of the logits, small tensors included.
PART = 8
#: Chunks of which a dweight in half precision is the sum: it is rounded once a chunk.
CHUNKS = PART + 1
#: Rows that a chunk has at least, where the call has them: the products read linear_weight, and read and write dweight,
#: once a chunk; with fewer rows the arithmetic would not hide that traffic.
LEAST_ROWS = 896
#: Rows of a chunk are a multiple of so many, so that the products have whole tiles: as many as there is room for, and
#: the rest in a last chunk. 8192 x 4096 to 131072 classes take 43.4 ms in chunks of 960 rows, and 44.3 to 46.1 ms in
#: nine of nearly equal size (H100, bfloat16, forward and backward). 1016 rows, which are no whole tiles, take 44.5 ms.
ROW_TILE = 64
#: Row length of a chunk, in elements: an odd vocabulary is padded to it. Every row then is aligned as the tensor cores
#: and the kernel's vectors want it; the linear_weight is not copied.
COLUMN_TILE = 64

#: Parts of a 16-bit factor that a CPU casts one after the other for a float32 result: it may be a chunk of the logits.
CPU_PARTS = 8

#: A vocabulary that is no multiple of this has rows of linear_weight that begin where tensor cores read no words, and
#: cuBLAS then has products at an eighth of the speed (50257 classes by 4096, 960 rows, H100: 4238 us and not 510). The
#: columns after the last whole tile of such a vocabulary are multiplied by a padded copy of the rows of these.
ALIGNED = 8


class Rest(NamedTuple):
    """The arguments that are not tensors.

    Attributes:
        compute: dtype of the products.
        low: dtype of autocast, None where that is off.
        scale: a number that multiplies the logits.
        chunk_size: rows of a chunk, as the caller wants it.
        acc_dtype: float32 if the caller wants dlinear_weight to be summed in it.
    """

    compute: torch.dtype
    low: torch.dtype | None
    scale: float
    chunk_size: int | None
    acc_dtype: torch.dtype | None = None

    @property
    def options(self) -> tuple[torch.dtype | None, int | None, torch.dtype | None]:
        """What an op needs of these beside its tensors and the scale."""
        return self.low, self.chunk_size, self.acc_dtype


#: What is called with a chunk of the logits, whose rows are padded at their end, and with its first row and the one
#: after its last. If gradients are wanted, it puts that of the logits in their place, with 0 in the padding.
Chunk: TypeAlias = Callable[[Tensor, int, int], None]

#: The factors of the second product, low_rank_input (..., R) and low_rank_weight (V, R).
LowRank: TypeAlias = tuple[Tensor, Tensor]
#: The gradients of the leaves as the results of an op, empty where one is not needed.
FlatGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


# ---- chunks ----------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Where chunks begin and end, and whether a low-precision dweight is summed in float32."""

    edges: list[int]
    wide: bool

    @property
    def most(self) -> int:
        return max(end - start for start, end in pairwise(self.edges))


def plan(
    rows: int, columns: int, features: int, itemsize: int, chunk_size: int | None, free: int | None,
    always_wide: bool = False,
) -> Chunks:  # fmt: skip
    """The chunks of a call: from its sizes, so that equal calls give equal bits; smaller ones only short of memory.

    Args:
        features: columns of the weight, if a low-precision dweight is summed; otherwise 0.
        itemsize: bytes of a logit.
        free: bytes that may be allocated, None where that is not known.
        always_wide: whether the caller wants that sum in float32, however much memory it takes.
    """
    if chunk_size is not None:
        edges = [*range(0, rows, chunk_size), rows]
        return Chunks(edges, always_wide or len(edges) - 1 > CHUNKS)
    row = row_length(columns) * itemsize
    room = rows * columns * itemsize // PART - 16 * rows  # without the losses and what they are made of

    def tiles(memory: int) -> int:
        return memory // row // ROW_TILE * ROW_TILE

    # A float32 dweight where that and a chunk keep within the room together.
    size = tiles(room - 4 * columns * features)
    wide = size >= LEAST_ROWS
    if not wide:
        size = tiles(room)
    if size < LEAST_ROWS:
        size = -(-rows // max(1, rows // LEAST_ROWS) // ROW_TILE) * ROW_TILE
    if free is not None and free < min(size, rows) * row:
        size, wide = max(tiles(free), ROW_TILE), False
    return Chunks([*range(0, rows, size), rows], always_wide or wide)


def row_length(columns: int) -> int:
    """Elements of a row of a chunk."""
    return -(-columns // COLUMN_TILE) * COLUMN_TILE


@cache
def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _free_bytes(device: torch.device) -> int | None:
    """What torch may still allocate, by its own count: asking the driver would wait for it."""
    return _total_bytes(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else None


# ---- the sweep through the chunks ------------------------------------------------------------------------------------


class Leaves(NamedTuple):
    """The tensors of a head that may want a gradient. A quantised weight never does."""

    input: Tensor
    linear_weight: Tensor | Quantized
    linear_bias: Tensor | None
    low_rank_input: Tensor | None = None
    low_rank_weight: Tensor | None = None

    @classmethod
    def of(
        cls, input: Tensor, linear_weight: Tensor | Quantized, linear_bias: Tensor | None,
        low_rank: LowRank | None = None,
    ) -> Leaves:  # fmt: skip
        return cls(input, linear_weight, linear_bias, *(low_rank or ()))

    @classmethod
    def kept(cls, quantized: Quantized | None, *tensors: Any) -> Leaves:
        """Those of :attr:`tensors`, which autograd kept, and of the quantised weight beside them."""
        leaves = cls(*tensors)
        return leaves if quantized is None else leaves._replace(linear_weight=quantized)

    @property
    def quantized(self) -> Quantized | None:
        return self.linear_weight if isinstance(self.linear_weight, Quantized) else None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return without_quantized(self)

    @classmethod
    def of_call(
        cls, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank: LowRank | None
    ) -> Leaves:
        """Those of a call, with its weight as :class:`Quantized` if it is quantised; dequantised in a graph."""
        leaves = cls.of(input, quantized(linear_weight) or linear_weight, linear_bias, low_rank)
        return cls.of(*leaves.dequantized(), low_rank) if torch.compiler.is_compiling() else leaves

    def dequantized(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first three as torch ops take them."""
        weight = self.linear_weight
        whole = weight if isinstance(weight, Tensor) else weight.whole(self.input.dtype)
        return self.input, whole, self.linear_bias

    @property
    def low_rank(self) -> LowRank | None:
        if self.low_rank_input is None or self.low_rank_weight is None:
            return None
        return self.low_rank_input, self.low_rank_weight

    def rows(self, index: Tensor) -> Leaves:
        """Some rows of the inputs, which are detached."""

        def some(t: Tensor) -> Tensor:
            return t.detach().reshape(-1, t.shape[-1])[index]

        low = self.low_rank_input
        return self._replace(input=some(self.input), low_rank_input=None if low is None else some(low))


#: How many they are: the first arguments of an op.
LEAVES = len(Leaves._fields)


class Gradients(NamedTuple):
    """The gradients of the :class:`Leaves`, each None where it is not needed."""

    input: Tensor | None
    linear_weight: Tensor | None
    linear_bias: Tensor | None
    low_rank_input: Tensor | None = None
    low_rank_weight: Tensor | None = None

    def like(self, leaves: Leaves) -> Gradients:
        """In the shapes and dtypes of what they are gradients of."""
        return Gradients(
            *(None if g is None else g.view(t.shape).to(t.dtype) for g, t in zip(self, leaves, strict=True))  # type: ignore[union-attr]
        )

    def of_all_rows(self, index: Tensor, leaves: Leaves) -> Gradients:
        """Those of the inputs, of which :meth:`Leaves.rows` took some rows, in the shape of all: 0 in the others."""

        def spread(g: Tensor | None, leaf: Tensor | None) -> Tensor | None:
            if g is None or leaf is None:
                return None
            rows = g.new_zeros((leaf.numel() // max(leaf.shape[-1], 1), leaf.shape[-1]))
            return rows.index_copy_(0, index, g).view(leaf.shape)

        low = spread(self.low_rank_input, leaves.low_rank_input)
        return self._replace(input=spread(self.input, leaves.input), low_rank_input=low)


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool, alpha: float) -> None:
    """out = alpha·a@b, or out += that, summed in float32, rounded once. ``out`` of 16-bit factors may be float32."""
    beta = int(add)
    if out.dtype is a.dtype:
        out.addmm_(a, b, beta=beta, alpha=alpha)
    elif out.is_cuda:
        torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    else:  # torch has products with a wider result on GPUs only
        b, part = b.to(out.dtype), -(-a.shape[0] // CPU_PARTS)
        for some, rows in zip(out.split(part), a.split(part), strict=True):
            some.addmm_(rows.to(out.dtype), b, beta=beta, alpha=alpha)


class _Product(NamedTuple):
    """One of the products whose sum the logits are, and the memory of its gradients, None where one is not wanted."""

    input: Tensor
    weight: Tensor | Quantized
    dinput: Tensor | None
    dweight: Tensor | None

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor | Quantized, compute: torch.dtype, for_x: bool, for_weight: bool, sum_wide: bool
    ) -> _Product:
        """``sum_wide``: whether the gradient of the weight is summed in float32."""
        columns, width = weight.shape
        wide = torch.promote_types(compute, torch.float32)
        dx_dtype = x.dtype if x.dtype is compute else wide
        dx = torch.empty((x.numel() // width, width), dtype=dx_dtype, device=x.device) if for_x else None
        x = matrix(x.reshape(-1, width), compute)
        if not isinstance(weight, Tensor):
            return cls(x, weight, dx, None)
        dw_dtype = weight.dtype if weight.dtype is compute and not sum_wide else wide
        dw = torch.empty((columns, width), dtype=dw_dtype, device=x.device) if for_weight else None
        return cls(x, matrix(weight, compute), dx, dw)

    def rows(self, start: int, end: int) -> Tensor:
        """The rows of the weight of some classes."""
        weight = self.weight
        return weight[start:end] if isinstance(weight, Tensor) else weight.rows(start, end, self.input.dtype)

    def blocks(self, end: int) -> Iterable[tuple[slice, Tensor]]:
        """The rows of the first classes: at once, or of a quantised weight a block at a time."""
        weight = self.weight
        if isinstance(weight, Tensor):
            return [(slice(end), weight[:end])]
        return weight.blocks(end, self.input.dtype)

    def backward(self, dlogits: Tensor, start: int, end: int, alpha: float, tail: tuple[Tensor, Tensor] | None) -> None:
        """The gradients of a chunk, whose ``dlogits`` are those of the first columns. ``tail``: those of the others,
        with the rows of the weight."""
        main = dlogits.shape[1]
        if self.dinput is not None:
            dinput = self.dinput[start:end]
            # Of a quantised weight it is a sum over blocks of classes, which 16 bits would round once for each.
            wide = torch.promote_types(dinput.dtype, torch.float32)
            total = dinput if isinstance(self.weight, Tensor) else dinput.new_empty(dinput.shape, dtype=wide)
            if tail is not None:  # first, for the sum is rounded to what the larger part is rounded to
                _multiply(*tail, total, False, alpha)
            for classes, weight in self.blocks(main):
                _multiply(dlogits[:, classes], weight, total, tail is not None or bool(classes.start), alpha)
            if total is not dinput:
                dinput.copy_(total)
        if self.dweight is not None:
            _multiply(dlogits.t(), self.input[start:end], self.dweight[:main], start > 0, alpha)


class _Tail(NamedTuple):
    """The last columns of an odd vocabulary, for all rows at once: they are few.

    Attributes:
        logits: those of the columns after the last whole tile, padded to one, and in their place the gradient.
        weights: for each product a copy of their rows of the weight, padded with zeros.
    """

    logits: Tensor
    weights: list[Tensor]

    @classmethod
    def of(cls, products: list[_Product], main: int, linear_bias: Tensor | None, scale: float) -> _Tail:
        input = products[0].input
        logits = input.new_zeros((input.shape[0], COLUMN_TILE))
        if linear_bias is not None:
            logits[:, : linear_bias.shape[0] - main] = linear_bias[main:]
        weights, beta = [], scale
        for product in products:
            rows = product.rows(main, product.weight.shape[0])
            padded = rows.new_zeros((COLUMN_TILE, rows.shape[1]))
            padded[: rows.shape[0]] = rows
            logits.addmm_(product.input, padded.t(), beta=beta, alpha=scale)
            weights.append(padded)
            beta = 1.0
        return cls(logits, weights)


def matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` in a dtype and in a layout that matrix products take as it is."""
    t = t.detach().to(dtype)
    return t if 1 in t.stride() else t.contiguous()


def _chunks_for(leaves: Leaves, rest: Rest, wanted: tuple[bool, ...]) -> Chunks:
    """The chunks of a sweep that leaves the wanted gradients."""
    input, linear_weight = leaves.input, leaves.linear_weight
    columns, features = linear_weight.shape
    free = _free_bytes(input.device)
    if free is not None:
        free -= sum(wants * t.nbytes for wants, t in zip(wanted, leaves, strict=False) if isinstance(t, Tensor))
    # Where dweight is float32 anyway, or not wanted, its sum takes no memory.
    low_precision = isinstance(linear_weight, Tensor) and linear_weight.dtype in reference.LOW_PRECISION
    summed = features if wanted[1] and low_precision else 0
    always_wide = rest.acc_dtype is not None
    return plan(input.numel() // features, columns, summed, rest.compute.itemsize, rest.chunk_size, free, always_wide)


def sweep(
    input: Tensor, linear_weight: Tensor | Quantized, linear_bias: Tensor | None, rest: Rest, chunk: Chunk,
    alpha: float, wanted: tuple[bool, ...], low_rank: LowRank | None = None,
) -> Gradients:  # fmt: skip
    """Call ``chunk`` for all logits. Returns the wanted gradients, ``alpha`` times those that it left.

    ``wanted`` says so for the first leaves, or for all.
    """
    compute, scale = rest.compute, rest.scale
    leaves = Leaves.of(input, linear_weight, linear_bias, low_rank)
    columns = linear_weight.shape[0]
    for_input, for_weight, for_bias, *for_low_rank = wanted
    chunks = _chunks_for(leaves, rest, wanted)
    wide = torch.promote_types(compute, torch.float32)
    products = [_Product.of(input, linear_weight, compute, for_input, for_weight, chunks.wide)]
    if low_rank is not None:
        # The smaller part comes first: the sum is rounded once to what the larger part is rounded to. The gradient of a
        # thin weight is small, so that it always is summed in float32.
        for_x, for_thin_weight = for_low_rank or (False, False)
        products.insert(0, _Product.of(*low_rank, compute, for_x, for_thin_weight, True))
    b = None if linear_bias is None else linear_bias.detach().to(compute)
    db = torch.zeros(columns, dtype=wide, device=input.device) if for_bias else None
    memory = torch.empty((chunks.most, row_length(columns)), dtype=compute, device=input.device)
    main = columns if columns % ALIGNED == 0 else columns - columns % COLUMN_TILE
    tail = _Tail.of(products, main, b, scale) if main < columns else None
    for start, end in pairwise(chunks.edges):
        padded = memory[: end - start]
        logits = padded[:, :main]
        if b is not None:
            logits.copy_(b[:main])
        beta = 0.0 if b is None else scale
        for each in products:
            for classes, w in each.blocks(main):
                logits[:, classes].addmm_(each.input[start:end], w.t(), beta=beta, alpha=scale)
            beta = 1.0
        if tail is not None:
            padded[:, main:].copy_(tail.logits[start:end])
        chunk(padded, start, end)
        if tail is not None and any(wanted):
            tail.logits[start:end].copy_(padded[:, main:])
        for i, each in enumerate(products):
            last = None if tail is None else (tail.logits[start:end], tail.weights[i])
            each.backward(logits, start, end, alpha * scale, last)
        if db is not None:
            db += padded[:, :columns].sum(0, dtype=wide)
    for each in products:
        if tail is not None and each.dweight is not None:
            dlogits = tail.logits[:, : columns - main]
            _multiply(dlogits.t(), each.input, each.dweight[main:], False, alpha * scale)
    if db is not None:
        db *= alpha * scale
    del memory, padded, logits  # before a dweight that was summed in float32 is copied
    *thin, (_, _, dinput, dweight) = products
    low_rank_gradients = (thin[0].dinput, thin[0].dweight) if thin else ()
    return Gradients(dinput, dweight, db, *low_rank_gradients).like(leaves)


def labelled(target: Tensor, ignore_index: int, columns: int) -> Tensor | None:
    """The rows with a label, None where all have one, or where it is not worth to find out."""
    if target.is_cuda and (target.numel() * columns < GPU_LEAST_WAITED or torch.cuda.is_current_stream_capturing()):
        return None
    found = (target.reshape(-1) != ignore_index).nonzero().squeeze(1)
    if found.numel() == target.numel():
        return None
    return found if found.numel() else found.new_zeros(1)  # a row that counts nothing, for the kernel


def describe_gradients(leaves: Leaves, wanted: tuple[bool, ...]) -> FlatGradients:
    """The gradients of the wanted leaves, and empty tensors for the others, for an op that no trace looks into."""
    dh, dw, db, dlow, dlow_weight = (
        t.new_empty(t.shape) if isinstance(t, Tensor) and wants else leaves.input.new_empty(0)
        for t, wants in zip(leaves, wanted, strict=True)
    )
    return dh, dw, db, dlow, dlow_weight


def flatten_gradients(gradients: Gradients, like: Tensor) -> FlatGradients:
    """:func:`describe_gradients` with values."""
    dh, dw, db, dlow, dlow_weight = (like.new_empty(0) if t is None else t for t in gradients)
    return dh, dw, db, dlow, dlow_weight


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(
    input: Tensor, linear_weight: Tensor | Quantized, linear_bias: Tensor | None, target: Tensor | None,
    weight: Tensor | None, rest: Rest, low_rank: LowRank | None = None,
) -> str | None:  # fmt: skip
    """Why a call cannot be chunked, None where it can. ``weight`` is one of each class."""
    low_rank_input, low_rank_weight = low_rank or (None, None)
    tensors = {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
        "target": target,
        "weight": weight,
        "the input of low_rank": low_rank_input,
        "the weight of low_rank": low_rank_weight,
    }
    for name, t in tensors.items():
        if t is not None and not guard.is_plain(t) and not isinstance(t, Quantized):
            return f"it takes plain tensors, and {name} is a {type(t).__name__}"
        if t is not None and t.device != input.device:
            return f"{name} is on {t.device}, and input on {input.device}"
    given = [t.dtype for t in (input, linear_weight, linear_bias) if isinstance(t, Tensor)]
    if any(dtype not in guard.FLOATING or cast(dtype, rest.low) is not rest.compute for dtype in given):
        return f"input, linear_weight and linear_bias are {', '.join(map(str, given))}; chunks take one floating dtype"
    if low_rank is not None and not _takes_low_rank(low_rank, rest):
        given = [t.dtype for t in low_rank]
        return (
            f"low_rank is {', '.join(map(str, given))}, and the logits are {rest.compute}; chunks take that dtype, and"
            " float32 beside 16 bits"
        )
    if target is not None and target.dtype is not torch.int64:
        return f"the target is {target.dtype}; chunks take classes as int64"
    if input.dim() == 0 or len(linear_weight.shape) != 2 or input.shape[-1] != linear_weight.shape[1]:
        shapes = tuple(input.shape), tuple(linear_weight.shape)
        return f"input is {shapes[0]}, and linear_weight {shapes[1]}; expected (..., H) and (V, H)"
    if target is not None and target.shape != input.shape[:-1]:
        return f"the target is {tuple(target.shape)}, and input {tuple(input.shape)}; expected a class for each row"
    columns = linear_weight.shape[0]
    if any(t is not None and t.shape != (columns,) for t in (linear_bias, weight)):
        return f"linear_bias and weight have to be of shape ({columns},)"
    if low_rank is not None and reference.low_rank_problem(input.shape, linear_weight.shape, low_rank) is not None:
        return "low_rank has other shapes"
    if weight is not None and (weight.requires_grad or weight.dtype not in guard.FLOATING):
        return f"weight is {weight.dtype}, or wants a gradient"
    if weight is not None and rest.low is None and weight.dtype is not rest.compute:
        return f"weight is {weight.dtype}, and the logits are {rest.compute}"
    if input.numel() == 0 or linear_weight.shape.numel() == 0 or (low_rank is not None and low_rank[1].numel() == 0):
        return (
            f"nothing to compute on input of shape {tuple(input.shape)}, linear_weight of {tuple(linear_weight.shape)}"
        )
    return None


def _takes_low_rank(low_rank: LowRank, rest: Rest) -> bool:
    """Whether both factors are in the dtype of the logits, or both in float32 beside 16 bits, as peft has them."""
    dtypes = {cast(t.dtype, rest.low) for t in low_rank}
    return dtypes == {rest.compute} or (dtypes == {torch.float32} and rest.compute in reference.LOW_PRECISION)


def is_chunked(leaves: Leaves, target: Tensor | None, rest: Rest, weight: Tensor | None = None) -> bool:
    """Whether a call goes through chunks; otherwise the composition serves it. ``weight`` is one of each class.

    Raises:
        BackendError: a kernel backend is forced and cannot serve.
    """
    compiling, forced, input = torch.compiler.is_compiling(), backends.get_backend(), leaves.input
    if not compiling:
        if forced in ("eager", "compile") or guard.is_dtensor(input):  # the rules for these come with the reference
            return False
        if guard.must_decompose():
            backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
            return False
    elif not (
        graph_ops.graph_keeps_kernel(input)
        if input.is_cuda
        else not torch.compiler._is_exporting_flag and forced is None
    ):
        return False
    asked = rest.chunk_size is not None or (forced is not None and not compiling)
    if not asked and not (guard.is_plain(input) and is_large(input, leaves.linear_weight)):
        return False
    reason = unsupported(*leaves[:3], target, weight, rest, leaves.low_rank)
    if reason is not None and not compiling:
        backends.refuse(reason)
    return reason is None


def cast(dtype: torch.dtype, low: torch.dtype | None) -> torch.dtype:
    """What autocast makes of an operand of a linear layer."""
    return dtype if low is None or dtype is torch.float64 else low


def check(
    name: str, input: Tensor, linear_weight: Tensor, target: Tensor, softcap: float | None, logit_scale: float,
    chunk_size: int | None, acc_dtype: torch.dtype | None = None, low_rank: object = None,
) -> None:  # fmt: skip
    """Raise if an argument of a function of that name is not valid. One without a target passes input in its place."""
    if low_rank is not None and not (
        isinstance(low_rank, tuple | list) and len(low_rank) == 2 and all(isinstance(t, Tensor) for t in low_rank)
    ):
        raise TypeError(
            f"{name}(): expected low_rank to be a pair of tensors or None, but got {type(low_rank).__name__}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name}(): expected a softcap above 0 or None, but got {softcap}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}(): expected a chunk_size of at least 1 row or None, but got {chunk_size}")
    if acc_dtype not in (None, torch.float32):
        raise ValueError(f"{name}(): expected acc_dtype to be torch.float32 or None, but got {acc_dtype}")
    if acc_dtype is not None and guard.is_dtensor(input):
        raise TypeError(f"{name}(): expected no acc_dtype beside DTensors, but got {acc_dtype}")
    if not isinstance(logit_scale, float | int):
        raise TypeError(f"{name}(): expected logit_scale to be a number, but got {type(logit_scale).__name__}")
    for t in (input, linear_weight, target):
        if not isinstance(t, Tensor):
            raise guard.expected_tensor(t)
    if guard.is_dtensor(linear_weight) and not guard.is_dtensor(input):
        raise TypeError(
            f"{name}(): expected linear_weight to be a whole tensor, but got a DTensor. Call it inside of"
            " the forward of the module that fully_shard wraps, where parameters are whole, or pass"
            " linear_weight.full_tensor();"
            " logits that are sharded over the vocabulary have vocab_parallel_cross_entropy"
        )


def is_large(input: Tensor, linear_weight: Tensor | Quantized) -> bool:
    """Whether a call that is left alone is chunked. On a quantised weight it always is, since torch ops would need that
    as a whole."""
    if isinstance(linear_weight, Quantized):
        return True
    if input.dim() == 0 or linear_weight.dim() == 0:
        return False
    logits = input.numel() // max(input.shape[-1], 1) * linear_weight.shape[0]
    return logits >= (GPU_LEAST if input.is_cuda else CPU_LEAST)


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    device = input.device.type
    return torch.get_autocast_dtype(device) if reference.autocasts(device) else None
