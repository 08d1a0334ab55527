"""Operations of torch in a program, where another one gives the same in less time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops.activations import ACTIVATIONS
from fastlayers.ops.gather import COLUMNS
from fastlayers.ops.low_rank import draws_the_same
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, FILLED, in_new_memory, is_dense, is_fusable
from fastlayers.patching.fusion.lowering import LOWERINGS
from fastlayers.patching.fusion.matcher import Match, Op, Patterns, Row, new, step
from fastlayers.patching.fusion.narrow import mask_alone, product_of_a_multiple, product_of_casts, round_trip, thin
from fastlayers.patching.program.cost import nbytes
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Program, Value

__all__ = ["specialised", "with_masks_alone"]

aten = torch.ops.aten
#: Activations by their operation, and which approximation that is given.
ACTS = {("gelu", "none"): "gelu", ("gelu", "tanh"): "gelu_tanh", ("silu", "none"): "silu"}
#: Bytes of a result to which a kernel of ours adds a bias in less time than torch's, which takes element by element.
LARGE = 2**22
#: Zeros, of every kind.
ZEROS = [name for name, value in FILLED.items() if value == 0]


def is_served(t: Tensor) -> bool:
    """Whether csrc has kernels for a tensor. Where it has, torch has products that write float32 from 16 bits."""
    return backends.choose(t.device) == "cuda"


def served(match: Match) -> bool:
    return is_served(match.t(match.out))


def generates(match: Match) -> bool:
    return backends.generates_kernels(match.t(match.out).device)


def draws_as_before(match: Match) -> bool:
    """Whether torch draws the same numbers for a dropout of 16 bits."""
    return draws_the_same(match.t(match.root.makes[1]).device)


def gathered(match: Match) -> Sequence[Operation] | None:
    """The gradient of a gather along the last dimension by a kernel, where torch has a scatter_add of atomics."""
    _, dim, index, dy = match.root.args
    out, of_index, of_dy = match.t(match.out), match.t(index), match.t(dy)
    fits = out.dim() > 0 and dim % out.dim() == out.dim() - 1 and out.shape[-1] <= COLUMNS
    alike = fits and out.shape[:-1] == of_dy.shape[:-1] and of_dy.shape == of_index.shape
    if not alike or not out.is_floating_point() or not out.is_contiguous():
        return None
    kernel = torch.ops.fastlayers.gather_backward.default
    return [replace(match.root, function=kernel, args=(dy, index, out.shape[-1]))]


def copied(match: Match) -> Sequence[Operation]:
    """A product with an identity matrix, by which peft multiplies the factors of DoRA, as a copy."""
    return [step(aten.clone.default, match.root.args[1], makes=match.out, memory_format=torch.contiguous_format)]


def without_bias(match: Match) -> Sequence[Operation] | None:
    """A convolution, and the sum of its result and its bias, which torch adds in a kernel of its own: it can be fused
    with what follows. None where torch has a kernel for both, and where a sum would gain nothing."""
    (out, *others), (x, weight, bias, *options) = match.root.makes, match.root.args
    if bias is None or match.root.kwargs or not out or not gains(match, options[-1]):
        return None
    y = match.t(out)
    steps: list[Operation] = []
    if others:  # Under autocast, it returns the weight that it cast.
        low, low_bias = others[0] or match.new(match.t(weight), y.dtype), match.new(match.t(bias), y.dtype)
        for t, made in ((weight, low), (bias, low_bias)):
            steps.append(step(aten.to.dtype, t, y.dtype, makes=made))
        weight, bias = Value(low), Value(low_bias)
        options = [*options[:3], False, [0] * (y.dim() - 2), options[3]]
    sizes = (-1, *(1 for _ in y.shape[2:]))
    product, channels = match.new(y), new(match.program, match.t(bias).view(sizes))
    return [
        *steps,
        step(aten.convolution.default, x, weight, None, *options, makes=product),
        step(aten.view.default, bias, sizes, makes=channels, view=True),
        step(aten.add.Tensor, Value(product), Value(channels), makes=out),
    ]


def gains(match: Match, groups: int) -> bool:
    """Whether a convolution's result and its bias are better added by a kernel of their own."""
    y = match.t(match.out)
    if not is_dense(y) or (groups > 1 and y.is_contiguous()):
        return False  # torch convolves each channel with kernels of its own where these are not innermost.
    return nbytes(y) >= LARGE or joins(match.out, match.program)


def joins(name: str, program: Program) -> bool:
    """Whether something that reads a value, or a view of it, can be part of a generated kernel."""
    return any(
        name in map(program.base, o.uses)
        and (called(o) in LOWERINGS or is_fusable(o, program.values) or in_new_memory(o) is not None)
        for o in program.operations
    )


def activation(match: Match) -> Sequence[Operation] | None:
    """The kernel of an activation or its gradient, which sums the gradient of a bias before it as well; None where
    torch's is as fast, and where it can be fused with what stands around it."""
    program, operation = match.program, match.root
    base, _, suffix = called(operation).partition("_")
    act = ACTS.get((base, operation.kwargs.get("approximate", "none")))
    if act is None or len(operation.operands) != len(operation.args):
        return None
    given = [match.t(name) for name in operation.operands]
    like = given[0]
    same = all((t.shape, t.dtype) == (like.shape, like.dtype) and t.is_contiguous() for t in given)
    if not same or like.dtype not in LOW_PRECISION or nbytes(like) < LARGE or joins(match.out, program):
        return None
    makers = [program.makers.get(program.base(name)) for name in operation.operands]
    if any(o is not None and is_fusable(o, program.values) for o in makers):
        return None
    kernels, entry = torch.ops.fastlayers, ACTIVATIONS[act]
    args = (*operation.args, None, entry.code, *entry.defaults)
    if not suffix:
        return [replace(operation, function=kernels.bias_act_forward.default, args=args, kwargs={})]
    function, makes = kernels.bias_act_backward.default, (*operation.makes, "")
    return [replace(operation, function=function, args=(*args, False), kwargs={}, makes=makes, single=False)]


specialised = Patterns(
    Row(Op("scatter_add", of=(Op(*ZEROS, unwritten=True),)), gathered, when=served),
    Row(Op("mm", of=(Op("eye", unwritten=True),)), copied),
    Row(Op("mm", "bmm"), product_of_casts, when=served),
    Row(Op("mm"), thin, when=generates),
    Row(Op("mm"), product_of_a_multiple, when=generates),
    Row(Op(*CASTS), round_trip),
    Row(Op("convolution", "convolution_autocast"), without_bias, when=served),
    Row(Op("gelu", "gelu_backward", "silu", "silu_backward"), activation, when=served),
)
with_masks_alone = Patterns(Row(Op("native_dropout"), mask_alone, "forward", when=draws_as_before))
