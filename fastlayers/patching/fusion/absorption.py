"""What hand-written kernels absorb of a program: casts of their results and operands, and sums with or of a gradient.

A rule sees a forward, and replaces what it knows there. What stands around the replaced call is known only after
autocast and autograd: a norm whose float32 result is cast to bfloat16 at once, a gradient that is cast to float32 for
the backward of a norm, a residual's gradient that is added after it. The kernels have arguments for all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, is_dense, is_fusable, spelled
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    empty_as,
    is_followed,
    renamed,
    with_names,
)

__all__ = ["absorbed", "kernel_name"]

#: Kernels that round their first, float32 result to another dtype: the place of the argument that says which.
ROUNDS = {"layer_norm_forward": 6, "add_layer_norm_forward": 7}
#: Operations that give the elements of their only operand other places, in any dtype.
MOVES_ONE = frozenset({"clone", "contiguous", "roll", "constant_pad_nd"})
#: Kernels whose first argument may have 16 bits where the others have 32.
WIDENS = frozenset({"layer_norm_backward"})
#: Kernels that have their operands in contiguous memory.
CONTIGUOUS = frozenset(
    {"layer_norm_forward", "layer_norm_backward", "mlp_autocast_backward", "linear_autocast_backward"}
)
CLONE = torch.ops.aten.clone.default
AS_STRIDED = torch.ops.aten.as_strided.default
#: Kernels that add an argument to their first result: its place.
ADDS = {"layer_norm_backward": 1}
#: Kernels that write their first, float32 result in 16 bits as well: the places of the argument that says which, and of
#: the result.
REPEATS = {"layer_norm_backward": (9, 3)}


def absorbed(program: Program) -> Program:
    """The program with fewer casts and sums around the kernels of csrc. ``values`` gains those that are new, without
    memory."""
    values, fake = program.values, program.fake
    place = 0
    while place < len(program.operations):
        name = kernel_name(program.operations[place])
        if name in ROUNDS:
            program = rounded(program, place, ROUNDS[name], values, fake)
        if name in WIDENS:
            program = narrowed(program, place, values)
        if name in ADDS:
            program = added(program, place, ADDS[name], values)
        if name == "bias_act_backward":
            program = summed(program, place, values)
        if name in REPEATS:
            program = repeated(program, place, *REPEATS[name], values)
        place += 1
    return replace(
        program,
        forward=with_copies(program.forward, "rows", values, fake),
        backward=with_copies(program.backward, "backward_rows", values, fake),
    )


def with_copies(
    operations: list[Operation], suffix: str, values: dict[str, Tensor], fake: FakeTensorMode
) -> list[Operation]:
    """The operations, where kernels that would copy an operand into contiguous memory are given the copy: what makes
    the operand can often write it so. The names of the copies end in ``suffix``."""
    copies: dict[str, str] = {}
    found: list[Operation] = []
    for operation in operations:
        if kernel_name(operation) in CONTIGUOUS:
            for name in operation.operands:
                t = values[name]
                if t.dim() < 3 or t.is_contiguous() or not is_dense(t):
                    continue
                if name not in copies:
                    copies[name] = f"{name}_{suffix}"
                    with fake:
                        values[copies[name]] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
                    options = {"memory_format": torch.contiguous_format}
                    found.append(Operation(CLONE, (Value(name),), options, (copies[name],), single=True, effect=False))
                operation = with_names(operation, {name: copies[name]})
        found.append(operation)
    return found


def kernel_name(operation: Operation) -> str:
    """The name of a kernel of csrc; empty for another operation."""
    function = operation.function
    if not isinstance(function, OpOverload) or function.namespace != "fastlayers":
        return ""
    return str(function._schema.name.split("::")[1])


def is_cast(operation: Operation, values: Mapping[str, Tensor]) -> bool:
    """Whether an operation gives its argument another dtype and nothing else."""
    if spelled(operation) not in CASTS or not isinstance(operation.args[0], Value) or not operation.makes[0]:
        return False
    x, made = values[operation.args[0].name], values[operation.makes[0]]
    return made.stride() == x.stride() and made.device == x.device


def rounded(program: Program, place: int, argument: int, values: dict[str, Tensor], fake: FakeTensorMode) -> Program:
    """The program, where a kernel rounds its result if all that reads it are casts to one dtype of 16 bits: of it, of
    views, or of what only moves its elements."""
    operations = [*program.operations]
    kernel = operations[place]
    result = kernel.makes[0]
    if kernel.args[argument] is not torch.float32 or not result:
        return program
    wide = {result: result}  # Values of float32, with those of whose memory they are views.
    casts: dict[str, str] = {}
    for operation in operations:
        if wide.keys().isdisjoint(operation.uses):
            continue
        made = [name for name in operation.makes if name]
        source = next(name for name in operation.operands if name in wide)
        if operation.view and all(values[name].dtype is torch.float32 for name in made):
            wide |= dict.fromkeys(made, wide[source])
        elif is_cast(operation, values):
            casts[operation.makes[0]] = operation.args[0].name
        elif spelled(operation) in MOVES_ONE and operation.uses == {source} and is_dense(values[made[0]]):
            wide[made[0]] = made[0]
        else:
            return program
    dtypes = {values[name].dtype for name in casts}
    if len(dtypes) != 1 or not dtypes.issubset(LOW_PRECISION) or not wide.keys().isdisjoint(program.needed):
        return program
    (dtype,) = dtypes
    narrow = {name: f"{name}_{str(dtype)[6:]}" for name in wide}
    for name, base in wide.items():
        t, whole = values[name], values[base]
        if name == base:
            with fake:
                values[narrow[name]] = empty_as(t, dtype)
        else:
            offset = t.storage_offset() - whole.storage_offset()
            values[narrow[name]] = values[narrow[base]].as_strided(t.shape, t.stride(), offset)
    args = (*kernel.args[:argument], dtype, *kernel.args[argument + 1 :])
    operations[place] = replace(kernel, args=args)
    program = program.with_operations(None if casts.keys() & set(o.makes) else o for o in operations)
    return renamed(program, narrow | {cast: narrow[source] for cast, source in casts.items()})


def narrowed(program: Program, place: int, values: dict[str, Tensor]) -> Program:
    """The program, where a kernel is given a tensor of 16 bits if its first argument is that, cast to float32."""
    operations, split = [*program.operations], len(program.forward)
    kernel = operations[place]
    makers = {name: o for o in operations[split if place >= split else 0 : place] for name in o.makes if name}
    name = kernel.args[0].name
    maker = makers.get(name)
    view = maker if maker is not None and maker.view and len(maker.uses) == 1 else None
    cast = maker if view is None else makers.get(view.args[0].name)
    if cast is None or not is_cast(cast, values):
        return program
    low = cast.args[0]
    source, wide, t = values[low.name], values[cast.makes[0]], values[name]
    if source.dtype not in LOW_PRECISION or not wide.dtype is t.dtype is torch.float32:
        return program
    more: list[Operation] = []
    if view is not None:
        if spelled(view) == "as_strided":  # Its offset is one in the memory of the cast.
            return program
        more = [replace(view, args=(low, *view.args[1:]), makes=(f"{name}_narrow",))]
        low = Value(f"{name}_narrow")
        offset = source.storage_offset() + t.storage_offset() - wide.storage_offset()
        values[low.name] = source.as_strided(t.shape, t.stride(), offset)
    operations[place : place + 1] = [*more, replace(kernel, args=(low, *kernel.args[1:]))]
    split += len(more) if place < split else 0
    return replace(program, forward=operations[:split], backward=operations[split:])


def added(program: Program, place: int, argument: int, values: Mapping[str, Tensor]) -> Program:
    """The program, where a kernel adds to its first result what is added to it later and nothing else reads it."""
    operations, split = [*program.operations], len(program.forward)
    kernel = operations[place]
    result = kernel.makes[0]
    readers = program.readers[result]
    if kernel.args[argument] is not None or len(readers) != 1 or result in program.needed:
        return program
    (reader,) = readers
    total = operations[reader]
    if spelled(total) != "add.Tensor" or total.kwargs or not all(isinstance(arg, Value) for arg in total.args):
        return program
    other = next((value.name for value in total.args if value.name != result), result)
    later = {name for operation in operations[place:] for name in operation.makes}
    like = values[result]
    same = all(
        (t.shape, t.dtype, t.stride()) == (like.shape, like.dtype, like.stride())
        for t in (values[other], values[total.makes[0]])
    )
    if (
        not same
        or program.is_written(other)
        or other == result
        or other in later
        or (place < split) != (reader < split)
    ):
        return program
    args = (*kernel.args[:argument], Value(other), *kernel.args[argument + 1 :])
    operations[place] = replace(kernel, args=args, makes=(total.makes[0], *kernel.makes[1:]))
    return program.with_operations((o for i, o in enumerate(operations) if i != reader))


def repeated(program: Program, place: int, argument: int, result: int, values: dict[str, Tensor]) -> Program:
    """The program, where a kernel writes what a cast makes of its first result, or of a view of that, for something
    that is not fused with the cast."""
    operations, split = [*program.operations], len(program.forward)
    kernel = operations[place]
    wide = values[kernel.makes[0]] if kernel.makes[0] else None
    if wide is None or wide.dtype is not torch.float32 or any(arg is not None for arg in kernel.args[argument:]):
        return program
    for i in range(place + 1, split if place < split else len(operations)):
        cast = operations[i]
        if not is_cast(cast, values) or values[cast.makes[0]].dtype not in LOW_PRECISION:
            continue
        source = cast.args[0].name
        if program.base(source) != kernel.makes[0] or program.is_written(kernel.makes[0]):
            continue
        own = cast.makes[0]
        readers = [o for o in operations[i:] if any(program.base(n) == own for n in o.uses)]
        if all(is_fusable(o, values) or is_followed(o, values) for o in readers) and own not in program.needed:
            continue
        low = own
        if source != kernel.makes[0]:  # The same elements, in the shape of the view.
            if values[source].numel() != wide.numel():
                continue
            low = f"{own}_whole"
            values[low] = values[own].as_strided(wide.shape, wide.stride())
            view = values[source]
            args = Value(low), tuple(view.shape), view.stride(), view.storage_offset()
            operations[i] = replace(cast, function=AS_STRIDED, args=args, kwargs={}, view=True)
        args = (*kernel.args, *(None for _ in range(argument - len(kernel.args))), values[low].dtype)
        makes = (*kernel.makes[:result], low, *kernel.makes[result + 1 :])
        operations[place] = replace(kernel, args=args, makes=makes)
        return program.with_operations(o for o in operations if o is not cast or low != own)
    return program


def summed(program: Program, place: int, values: Mapping[str, Tensor]) -> Program:
    """The program, where the gradient of an activation is summed by its own kernel, for the bias of the linear layer
    before it."""
    operations = [*program.operations]
    kernel = operations[place]
    dx = kernel.makes[0]
    if not dx or kernel.args[2] is not None or kernel.args[6]:
        return program
    for i, layer in enumerate(operations):
        if kernel_name(layer) != "linear_autocast_backward" or program.base(layer.args[0].name) != dx:
            continue
        dy, (*others, dbias) = values[layer.args[0].name], layer.makes
        if not dbias or dy.shape[-1] != values[dx].shape[-1]:
            continue
        operations[i] = replace(layer, args=(*layer.args[:5], False), makes=(*others, ""))
        args = (*kernel.args[:6], True, values[dbias].dtype)
        operations[place] = replace(kernel, args=args, makes=(dx, dbias))
        return program.with_operations(operations)
    return program
