"""What hand-written kernels absorb of a program: casts of their results and operands, and sums with or of a gradient.

A rule sees a forward, and replaces what it knows there. What stands around the replaced call is known only after
autocast and autograd: a norm whose float32 result is cast to bfloat16 at once, a gradient that is cast to float32 for
the backward of a norm, a residual's gradient that is added after it. The kernels have arguments for all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, is_dense, is_fusable
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row, new, step
from fastlayers.patching.program.operators import argument, called, with_arguments
from fastlayers.patching.program.program import Operation, Program, Value, is_followed, with_names

__all__ = ["absorbed", "with_copies"]

#: Operations that give the elements of their only operand other places, in any dtype.
MOVES_ONE = frozenset({"clone", "contiguous", "roll", "constant_pad_nd"})
#: Kernels that have their operands in contiguous memory.
CONTIGUOUS = ("layer_norm_forward", "layer_norm_backward", "mlp_autocast_backward", "linear_autocast_backward")
CLONE = torch.ops.aten.clone.default
AS_STRIDED = torch.ops.aten.as_strided.default
#: Where the backward of a norm has its first result in 16 bits.
NARROW = 3


def is_cast(operation: Operation, program: Program) -> bool:
    """Whether an operation gives its argument another dtype and nothing else."""
    if called(operation) not in CASTS or not isinstance(operation.args[0], Value) or not operation.makes[0]:
        return False
    x, made = program.values[operation.args[0].name], program.values[operation.makes[0]]
    return made.stride() == x.stride() and made.device == x.device


def rounded(match: Match) -> Edit | None:
    """A norm that rounds its result if all that reads it are casts to one dtype of 16 bits: of it, of views, or of what
    only moves its elements."""
    program = match.program
    if argument(match.root, "dtype") is not torch.float32 or not match.out:
        return None
    wide = {match.out: match.out}  # Values of float32, with those of whose memory they are views.
    casts: dict[str, Operation] = {}
    for operation in program.operations:
        if wide.keys().isdisjoint(operation.uses):
            continue
        made = [name for name in operation.makes if name]
        source = next(name for name in operation.operands if name in wide)
        if operation.view and all(match.t(name).dtype is torch.float32 for name in made):
            wide |= dict.fromkeys(made, wide[source])
        elif is_cast(operation, program):
            casts[operation.makes[0]] = operation
        elif called(operation) in MOVES_ONE and operation.uses == {source} and is_dense(match.t(made[0])):
            wide[made[0]] = made[0]
        else:
            return None
    dtypes = {match.t(name).dtype for name in casts}
    if len(dtypes) != 1 or not dtypes.issubset(LOW_PRECISION) or not wide.keys().isdisjoint(program.needed):
        return None
    (dtype,) = dtypes
    narrow: dict[str, str] = {}
    for name, base in wide.items():
        t = match.t(name)
        own = name == base
        narrow[name] = match.new(t, dtype) if own else match.view(narrow[base], t, match.t(base))
    names = narrow | {name: narrow[cast.operands[0]] for name, cast in casts.items()}
    return Edit([(match.root, [with_arguments(match.root, dtype=dtype)]), *((o, ()) for o in casts.values())], names)


def narrowed(match: Match) -> Sequence[Operation] | None:
    """The backward of a norm that is given a tensor of 16 bits where its gradient is that, cast to float32."""
    program, (name,) = match.program, match.root.operands[:1]
    view = program.makers.get(name)
    view = view if view is not None and view.view and len(view.uses) == 1 else None
    cast = program.makers.get(view.args[0].name if view else name)
    if cast is None or not is_cast(cast, program) or not match.is_beside(cast.makes[0]):
        return None
    low, wide, t = cast.args[0], match.t(cast.makes[0]), match.t(name)
    if match.t(low).dtype not in LOW_PRECISION or not wide.dtype is t.dtype is torch.float32:
        return None
    if view is None:
        return [with_arguments(match.root, dy=low)]
    if called(view) == "as_strided":  # Its offset is one in the memory of the cast.
        return None
    made = match.view(low.name, t, wide)
    return [replace(view, args=(low, *view.args[1:]), makes=(made,)), with_arguments(match.root, dy=Value(made))]


def added(match: Match) -> Edit | None:
    """The backward of a norm that adds to its first result what is added to it later, if nothing else reads it."""
    total, program = match["sum"], match.program
    if argument(match.root, "dsum") is not None or total.kwargs or len(total.operands) != 2:
        return None
    (other,) = (name for name in total.operands if name != match.out)
    like, terms = match.t(match.out), (match.t(other), match.t(total.makes[0]))
    same = all((t.shape, t.dtype, t.stride()) == (like.shape, like.dtype, like.stride()) for t in terms)
    later = {name for operation in program.operations[match.place :] for name in operation.makes}
    if not same or program.is_written(other) or other in later or not match.is_beside(total.makes[0]):
        return None
    kernel = with_arguments(match.root, (total.makes[0], *match.root.makes[1:]), dsum=Value(other))
    return Edit([(match.root, [kernel]), (total, ())])


def repeated(match: Match) -> Edit | None:
    """The backward of a norm that writes what a cast makes of its first result, or of a view of that, for something
    that is not fused with the cast."""
    program, kernel = match.program, match.root
    if not match.out or match.t(match.out).dtype is not torch.float32 or argument(kernel, "narrow") is not None:
        return None
    if program.is_written(match.out):
        return None
    wide, end = match.t(match.out), None if match.in_backward else len(program.forward)
    for cast in program.operations[match.place + 1 : end]:
        if not is_cast(cast, program) or program.base(cast.operands[0]) != match.out:
            continue
        own, source = match.t(cast.makes[0]), match.t(cast.operands[0])
        if own.dtype not in LOW_PRECISION or not is_read_whole(cast, program):
            continue
        low, steps = cast.makes[0], list[Operation]()
        if cast.operands[0] != match.out:  # The same elements, in the shape of the view.
            if source.numel() != wide.numel():
                continue
            low = new(program, own.as_strided(wide.shape, wide.stride()))
            args = Value(low), tuple(source.shape), source.stride(), source.storage_offset()
            steps = [step(AS_STRIDED, *args, makes=cast.makes[0], view=True)]
        makes = (*kernel.makes[:NARROW], low, *kernel.makes[NARROW + 1 :])
        return Edit([(kernel, [with_arguments(kernel, makes, narrow=own.dtype)]), (cast, steps)])
    return None


def is_read_whole(cast: Operation, program: Program) -> bool:
    """Whether the result of a cast is needed, or read by something that is not fused with it."""
    name = cast.makes[0]
    readers = (o for o in program.operations if any(program.base(used) == name for used in o.uses))
    return name in program.needed or not all(
        is_fusable(o, program.values) or is_followed(o, program.values) for o in readers
    )


def summed(match: Match) -> Edit | None:
    """The gradient of an activation that is summed by its own kernel, for the bias of the linear layer before it."""
    program, kernel = match.program, match.root
    if not match.out or argument(kernel, "bias") is not None or argument(kernel, "dbias"):
        return None
    for layer in program.operations:
        if called(layer) != "linear_autocast_backward" or program.base(layer.args[0].name) != match.out:
            continue
        dy, (*others, dbias) = match.t(layer.args[0]), layer.makes
        if dbias and dy.shape[-1] == match.t(match.out).shape[-1]:
            without = with_arguments(layer, (*others, ""), dbias=False)
            joined = with_arguments(kernel, (match.out, dbias), dbias=True, dtype=match.t(dbias).dtype)
            return Edit([(layer, [without]), (kernel, [joined])])
    return None


def copied(match: Match) -> Sequence[Operation] | None:
    """A kernel that would copy an operand into contiguous memory is given the copy: what makes the operand can often
    write it so."""
    names: dict[str, str] = {}
    for name in match.root.operands:
        t = match.t(name)
        if t.dim() < 3 or t.is_contiguous() or not is_dense(t):
            continue

        def copy(name: str = name) -> Operation:
            made = match.empty(match.t(name))
            return step(CLONE, Value(name), makes=made, memory_format=torch.contiguous_format)

        names[name] = match.shared(name, copy).name
    return [with_names(match.root, names)] if names else None


absorbed = Patterns(
    Row(Op("layer_norm_forward", "add_layer_norm_forward"), rounded),
    Row(Op("layer_norm_backward"), narrowed),
    Row(Op("layer_norm_backward", read_by=Op("add.Tensor", key="sum")), added),
    Row(Op("bias_act_backward"), summed),
    Row(Op("layer_norm_backward"), repeated),
    in_turn=True,
)
with_copies = Patterns(Row(Op(*CONTIGUOUS), copied))
