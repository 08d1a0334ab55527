"""What torch's attention does by itself, of what stands around it: copies of its operands, and their scale.

Models write ``q.transpose(1, 2).contiguous()``, but torch's attention reads any strides in which the elements of a head
are next to each other, and gives its result and its gradients the layout of what it was given. Without the copies they
come in the order of tokens, as the projections before and after write and read them, and need no copy either.

Models write ``q * scale``, too, a pass over memory for what attention does in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastlayers.patching.fusion.fusable import is_dense, spelled
from fastlayers.patching.fusion.specialised import factor_of
from fastlayers.patching.program.executors import KEYS, excluding
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    keeping,
    operands_like,
    renamed,
    storage,
    with_names,
    with_tensors,
)

__all__ = ["with_given_layouts", "with_scales"]

ATTENTIONS = frozenset(
    f"_scaled_dot_product_{kind}" for kind in
    ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)  # fmt: skip
CLONE = torch.ops.aten.clone.default
#: Elements of a 16-byte access of 16 bits: torch's attention has slower kernels for strides of other multiples.
ALIGNED = 8


def with_given_layouts(program: Program) -> Program:
    """The program without the copies. ``values`` gains the results in other layouts, without memory."""
    for operation in program.forward:
        if spelled(operation) in ATTENTIONS:
            program = without_copies(program, operation) or program
    return program


def without_copies(program: Program, attention: Operation) -> Program | None:
    """The program with one attention on what its operands are copies of; None if there are none, or more would change
    than layouts."""
    values, sources = program.values, sources_of(program, attention)
    if not sources:
        return None
    changed: dict[str, str] = {}  # Results in another layout.
    parts: list[list[Operation]] = []
    for part in (program.forward, program.backward):
        made: list[Operation] = []
        for operation in part:
            is_backward = spelled(operation) == f"{spelled(attention)}_backward"
            if operation is not attention and not (is_backward and attention.makes[0] in operation.uses):
                made.append(operation)
                continue
            if not is_as_recorded(operation, program):
                return None
            moved = with_names(operation, sources | changed)
            results = results_of(moved, program)
            makes, copies = [], []
            for name, t in zip(operation.makes, results, strict=True):
                like = values.get(name)
                if not name or like is None or t.stride() == like.stride():
                    makes.append(name)
                    continue
                if not like.is_contiguous():
                    return None
                changed[name] = f"{name}_moved"
                values[changed[name]] = t
                options = {"memory_format": torch.contiguous_format}
                copies.append(Operation(CLONE, (Value(changed[name]),), options, (name,), single=True, effect=False))
                makes.append(changed[name])
            made += [replace(moved, makes=tuple(makes)), *copies]
        parts.append(made)
    return program.settled(*parts)


def sources_of(program: Program, attention: Operation) -> dict[str, str]:
    """What the operands of an attention are copies of, which nobody else can write to."""
    values = program.values
    others = {storage(values[name]) for name in (*program.inputs, *program.results)} | program.writers.keys()
    found: dict[str, str] = {}
    for name in attention.operands[:3]:
        copy = program.makers.get(name)
        if copy is None or spelled(copy) != "clone":
            continue
        (source,) = copy.operands
        t = values[source]
        safe = others.isdisjoint(map(storage, (t, values[name])))
        aligned = t.stride(-1) == 1 and all(n % ALIGNED == 0 for n in (*t.stride()[:-1], t.storage_offset()))
        if safe and aligned and is_dense(t):
            found[name] = source
    return found


def results_of(operation: Operation, program: Program) -> Sequence[Tensor]:
    """The results of an operation, without memory."""
    with program.fake, torch.no_grad(), excluding(KEYS):
        args, kwargs = with_tensors(operation, operands_like(operation, program.values))
        out = operation.function(*args, **kwargs)
    return out if isinstance(out, tuple | list) else (out,)


def is_as_recorded(operation: Operation, program: Program) -> bool:
    """Whether torch says of an operation without memory what it did with the recorded values."""
    return all(
        t.stride() == program.values[name].stride()
        for name, t in zip(operation.makes, results_of(operation, program), strict=True)
        if name and name in program.values
    )


# -- scales ------------------------------------------------------------------------------------------------------------


def with_scales(program: Program) -> Program:
    """The program, where attention has the factors of its queries and keys."""
    for attention in program.forward:
        for place in (0, 1) if spelled(attention) in ATTENTIONS else ():
            program = with_scale(program, attention.makes[0], place) or program
    return program


def with_scale(program: Program, result: str, place: int) -> Program | None:
    """The program with the attention of this result, which multiplies an operand itself; None if the operand is no
    product, or if that or its gradient is used elsewhere."""
    operations, values = program.operations, program.values
    attention = program.makers[result]
    backward = [o for o in operations if spelled(o) == f"{spelled(attention)}_backward" and result in o.uses]
    product = program.makers.get(program.base(attention.operands[place]))
    factor = None if product is None else factor_alike(product, values)
    if product is None or factor is None or len(backward) > 1:
        return None
    dropped = [product]
    outside = replace(program, kept=()).needed
    if readers_of(operations, product.makes[0], outside) != [attention, *backward]:
        return None
    for operation in backward:
        readers = readers_of(operations, operation.makes[place], outside)
        if readers is None or len(readers) != 1 or factor_alike(readers[0], values) != factor:
            return None
        dropped += readers
    same = {operation.makes[0]: operation.args[0].name for operation in dropped}
    old = attention.kwargs.get("scale")
    scale = factor * (values[attention.operands[place]].shape[-1] ** -0.5 if old is None else old)

    def changed(part: Sequence[Operation]) -> list[Operation]:
        return [
            replace(o, kwargs=o.kwargs | {"scale": scale}) if o is attention or o in backward else o
            for o in part if all(o is not other for other in dropped)
        ]  # fmt: skip

    program = replace(program, forward=changed(program.forward), backward=changed(program.backward))
    return keeping(renamed(program, same))


def factor_alike(operation: Operation, values: Mapping[str, Tensor]) -> float | None:
    """The number by which an operation multiplies its only operand, if its result lies as that does; None otherwise."""
    factor = factor_of(operation)
    if factor is None:
        return None
    x, y = values[operation.operands[0]], values[operation.makes[0]]
    same = (x.dtype, x.stride(), x.storage_offset()) == (y.dtype, y.stride(), y.storage_offset())
    return factor if same else None


def readers_of(operations: Sequence[Operation], name: str, outside: frozenset[str]) -> list[Operation] | None:
    """The operations that read a value, through views and copies, which are no readers themselves; None if one of these
    is needed outside."""
    names, found = {name}, list[Operation]()
    for operation in operations:
        if names.isdisjoint(operation.uses):
            continue
        if operation.view or spelled(operation) == "clone":
            names.update(operation.makes)
        else:
            found.append(operation)
    return found if names.isdisjoint(outside) else None
