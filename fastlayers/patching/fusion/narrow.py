"""What float32 values are casts of, and what reads those: products, casts back, dropouts of which a mask is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlayers.kernels.low_rank import thin_product
from fastlayers.ops.low_rank import BESIDE, LARGEST_RANK
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, FACTORS, factor_of
from fastlayers.patching.fusion.matcher import Match, new, step
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Value, storage

__all__ = [
    "Narrow",
    "is_low_rank",
    "mask_alone",
    "narrow",
    "product_of_a_multiple",
    "product_of_casts",
    "round_trip",
    "thin",
]

aten = torch.ops.aten
#: Products that write float32 from 16-bit operands.
WIDE = {"mm": aten.mm.dtype, "bmm": aten.bmm.dtype}


@dataclass(frozen=True)
class Narrow:
    """A value by which another one is known, that is larger by a factor.

    Attributes:
        steps: operations that make it.
        mask: of which elements, if the others are 0; a value in the same layout.
    """

    name: str
    factor: float = 1.0
    steps: tuple[Operation, ...] = ()
    mask: str | None = None


def narrow(match: Match, name: str, inputs: bool = False) -> Narrow | None:
    """The 16-bit value that another one is a cast of, in its layout: a float32 one, or one that is rounded after a
    dropout.

    Args:
        inputs: whether that may be an input or a result of the region.
    """
    program, wide = match.program, match.t(name)
    maker = program.makers.get(name)
    if maker is None or len(maker.uses) != 1 or program.is_written(name):
        return None
    kind, (source,) = called(maker), maker.uses
    known = match.t(source)
    same = known.stride() == wide.stride()
    if kind in CASTS and wide.dtype is torch.float32:
        # Others may write to what is given or returned, which is an error only for what autograd keeps.
        safe = not program.is_written(source) and (inputs or storage(known) not in program.shared)
        return Narrow(source) if safe and same and known.dtype in LOW_PRECISION else None
    reads = maker.view or kind in ("clone", "native_dropout") or kind in FACTORS or kind in CASTS
    inner = narrow(match, source, inputs) if reads else None
    if inner is None:
        return None
    if kind in CASTS:
        return inner if same and inner.mask is not None and match.t(inner.name).dtype is wide.dtype else None
    if kind in FACTORS:
        factor = factor_of(maker)
        same &= known.dtype is wide.dtype
        return replace(inner, factor=inner.factor * factor) if factor is not None and same else None
    if kind == "native_dropout":
        return dropped(match, maker, name, inner)
    if maker.view:
        steps = [viewed(match, maker, each) for each in (inner.name, inner.mask) if each is not None]
        made, *mask = (each.makes[0] for each in steps)
        return Narrow(made, inner.factor, (*inner.steps, *steps), mask[0] if mask else None)
    if inner.mask is not None:
        return None
    made = match.new(wide, match.t(inner.name).dtype)
    clone = replace(maker, args=(Value(inner.name), *maker.args[1:]), makes=(made,))
    return replace(inner, name=made, steps=(*inner.steps, clone))


def dropped(match: Match, dropout: Operation, name: str, inner: Narrow) -> Narrow | None:
    """What is known of the result of a dropout by what is known of its argument."""
    _, p, training = dropout.args
    out, mask = dropout.makes
    if name != out or not mask or inner.mask is not None or not training or not 0 < p < 1:
        return None
    contiguous = all(match.t(each).is_contiguous() for each in (inner.name, out, mask))
    usable = contiguous and not match.program.is_written(mask)
    return replace(inner, factor=inner.factor / (1 - p), mask=mask) if usable else None


def multiple(match: Match, name: str) -> Narrow | None:
    """What a value is a multiple of, in its dtype and layout."""
    program, t = match.program, match.t(name)
    maker = program.makers.get(name)
    if maker is None or len(maker.operands) != 1 or program.is_written(name):
        return None
    (source,) = maker.operands
    if maker.view:
        inner = multiple(match, source)
        if inner is None:
            return None
        view = viewed(match, maker, inner.name)
        return Narrow(view.makes[0], inner.factor, (*inner.steps, view))
    known, factor = match.t(source), factor_of(maker)
    # An input may be written to before the backward.
    apart = storage(known) not in program.shared and not program.is_written(source)
    same = (known.dtype, known.shape, known.stride()) == (t.dtype, t.shape, t.stride())
    return Narrow(source, factor) if factor is not None and apart and same else None


def viewed(match: Match, view: Operation, name: str) -> Operation:
    """A view of another value in the same layout as the one that is viewed."""
    known, args = match.t(view.args[0]), (Value(name), *view.args[1:])
    if called(view) == "as_strided":  # Its offset is one in the memory of what it views.
        args = (*args[:3], args[3] + match.t(name).storage_offset() - known.storage_offset())
    return replace(view, args=args, makes=(match.view(name, match.t(view.makes[0]), known),))


# -- what reads them ---------------------------------------------------------------------------------------------------


def product_of_casts(match: Match) -> Sequence[Operation] | None:
    """A product of casts, as scaled_dot_product_attention without a kernel of its own computes it, as that of what was
    cast: the product of two 16-bit numbers is exact in float32, and tensor cores add such products up in float32."""
    like = match.t(match.out)
    if like.dtype is not torch.float32:
        return None
    a, b = (narrow(match, value.name) for value in match.root.args)
    if a is None or b is None or match.t(a.name).dtype is not match.t(b.name).dtype or a.mask or b.mask:
        return None
    factor = a.factor * b.factor
    product = match.out if factor == 1 else match.new(like)
    args, function = (Value(a.name), Value(b.name), torch.float32), WIDE[called(match.root)]
    steps = [*a.steps, *b.steps, replace(match.root, function=function, args=args, makes=(product,))]
    if factor != 1:
        steps.append(step(aten.mul.Scalar, Value(product), factor, makes=match.out))
    return steps


def round_trip(match: Match) -> Sequence[Operation] | None:
    """A cast to float32 and back, as between layers of two dtypes, as what was cast."""
    program, y, (name,) = match.program, match.t(match.out), match.root.operands
    if match.t(name).dtype is not torch.float32 or y.dtype not in LOW_PRECISION:
        return None
    if match.out in (*program.results, *program.wanted) or program.is_written(match.out):
        return None
    found = narrow(match, name)
    if found is None or found.factor != 1 or found.mask is not None:
        return None
    low = match.t(found.name)
    if (low.dtype, low.stride()) != (y.dtype, y.stride()):
        return None
    program.values[match.out] = low
    return [*found.steps, step(aten.view.default, Value(found.name), tuple(y.shape), makes=match.out, view=True)]


def thin(match: Match) -> Sequence[Operation] | None:
    """A product of a cast and a thin float32 tensor, as an adapter's in a model of 16 bits, as that of what was cast.
    One of 16 bits is such a product if there is a dropout in float32 between them, as under autocast: it reads the
    mask, and what was dropped is not kept."""
    like = match.t(match.out)
    low = like.dtype in LOW_PRECISION
    if not (low or like.dtype is torch.float32):
        return None
    for side, value in enumerate(match.root.args):
        # What autograd keeps of an input is its cast. Here it is the input: a write to it before the backward is the
        # error that it is with an adapter of 16 bits.
        if match.t(match.root.args[1 - side]).dtype is not like.dtype or not is_low_rank(like.shape[side - 1]):
            continue
        found = narrow(match, value.name, inputs=True)
        if found is None or (low and found.mask is None) or 1 not in match.t(found.name).stride():
            continue
        args: list[Any] = [*match.root.args]
        masks: list[Value | None] = [None, None]
        args[side], masks[side] = Value(found.name), None if found.mask is None else Value(found.mask)
        product = replace(match.root, function=thin_product, args=(*args, found.factor, *masks), kwargs={})
        return [*found.steps, product]
    return None


def product_of_a_multiple(match: Match) -> Sequence[Operation] | None:
    """A thin product of 16 bits, as the gradients of an adapter are, as s · mm(A, B) for mm(s · A, B)."""
    like, factors = match.t(match.out), [*match.root.args]
    for side, value in enumerate(match.root.args):
        thin = like.dtype in LOW_PRECISION and is_low_rank(like.shape[side - 1])
        found = multiple(match, value.name) if thin else None
        if found is None:
            continue
        factors[side] = Value(found.name)
        if found.factor == 1:
            return [*found.steps, replace(match.root, args=tuple(factors))]
        # The matrix of one element to 0 times which the products are added.
        nothing = match.shared(("nothing", like.dtype), lambda: empty(match, (1, 1), match.out))
        product = step(aten.addmm.default, nothing, *factors, makes=match.out, beta=0, alpha=found.factor)
        return [*found.steps, product]
    return None


def mask_alone(match: Match) -> Sequence[Operation] | None:
    """A dropout of which the mask alone is read as one of 16 bits."""
    out, mask = match.root.makes
    if match.program.readers.get(out) or out in match.program.needed:
        return None
    low, t = narrow(match, out, inputs=True), match.t(mask)
    if low is None:
        return None
    memory = empty(match, (t.numel() + BESIDE,), low.name)
    view = Value(memory.makes[0]), tuple(t.shape), t.stride(), BESIDE
    like = new(match.program, match.t(view[0]).as_strided(*view[1:]))
    return [
        memory,
        step(aten.as_strided.default, *view, makes=like, view=True),
        replace(match.root, args=(Value(like), *match.root.args[1:]), makes=("", mask)),
    ]


def is_low_rank(rank: int, most: int = LARGEST_RANK) -> bool:
    """Whether a product's inner size is that of an adapter. One that differs from call to call is not."""
    return type(rank) is int and rank <= most


def empty(match: Match, shape: tuple[int, ...], like: str) -> Operation:
    """Memory in the dtype of another value and on its device."""
    made, t = match.empty(match.t(like), shape), match.t(like)
    return step(aten.empty.memory_format, [*shape], makes=made, dtype=t.dtype, device=t.device)
