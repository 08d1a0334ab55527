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

from fastlayers.patching.fusion.fusable import factor_of, is_dense
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row, new, step
from fastlayers.patching.program.executors import KEYS, excluding
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    operands_like,
    storage,
    with_names,
    with_tensors,
)

__all__ = ["with_given_layouts", "with_scales"]

ATTENTIONS = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
]
CLONE = torch.ops.aten.clone.default
#: Elements of a 16-byte access of 16 bits: torch's attention has slower kernels for strides of other multiples.
ALIGNED = 8


def without_copies(match: Match) -> Edit | None:
    """One attention, and its backward, on what its operands are copies of; None if there are none, or more would
    change than layouts. Its results and gradients have other layouts then, and are copied where they are used."""
    program, sources = match.program, sources_of(match)
    names: dict[str, str] = {}  # Results in another layout.
    steps: list[tuple[Operation, Sequence[Operation]]] = []
    for operation in (match.root, *backwards_of(match)) if sources else ():
        if not is_as_recorded(operation, program):
            return None
        moved = with_names(operation, sources | names)
        copies, makes = [], list(operation.makes)
        for i, (name, t) in enumerate(zip(operation.makes, results_of(moved, program), strict=True)):
            like = program.values.get(name)
            if not name or like is None or t.stride() == like.stride():
                continue
            if not like.is_contiguous():
                return None
            names[name] = makes[i] = new(program, t)
            copies.append(step(CLONE, Value(makes[i]), makes=name, memory_format=torch.contiguous_format))
        steps.append((operation, [replace(moved, makes=tuple(makes)), *copies]))
    return Edit(steps) if steps else None


def backwards_of(match: Match) -> list[Operation]:
    """The backwards of an attention."""
    name = f"{called(match.root)}_backward"
    return [o for o in match.program.operations if called(o) == name and match.out in o.uses]


def sources_of(match: Match) -> dict[str, str]:
    """What the operands of an attention are copies of, which nobody else can write to."""
    program, values = match.program, match.program.values
    others = {storage(values[name]) for name in (*program.inputs, *program.results)} | program.writers.keys()
    found: dict[str, str] = {}
    for name in match.root.operands[:3]:
        copy = program.makers.get(name)
        if copy is None or called(copy) != "clone":
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


def scaled(match: Match) -> Edit | None:
    """An attention that multiplies its queries or keys itself; None if these are no products, or if those or their
    gradients are used elsewhere."""
    for place, name in enumerate(match.root.operands[:2]):
        product = match.program.makers.get(match.program.base(name))
        factor = None if product is None else factor_alike(product, match.program.values)
        edit = None if product is None or factor is None else without_product(match, place, product, factor)
        if edit is not None:
            return edit
    return None


def without_product(match: Match, place: int, product: Operation, factor: float) -> Edit | None:
    attention, backward, values = match.root, backwards_of(match), match.program.values
    dropped = [product]
    if len(backward) > 1 or readers_of(match.program, product.makes[0]) != [attention, *backward]:
        return None
    for operation in backward:
        readers = readers_of(match.program, operation.makes[place])
        if readers is None or len(readers) != 1 or factor_alike(readers[0], values) != factor:
            return None
        dropped += readers
    old = attention.kwargs.get("scale")
    scale = factor * (values[attention.operands[place]].shape[-1] ** -0.5 if old is None else old)
    changed = [(o, [replace(o, kwargs=o.kwargs | {"scale": scale})]) for o in (attention, *backward)]
    names = {operation.makes[0]: operation.args[0].name for operation in dropped}
    return Edit([*changed, *((operation, ()) for operation in dropped)], names)


def factor_alike(operation: Operation, values: Mapping[str, Tensor]) -> float | None:
    """The number by which an operation multiplies its only operand, if its result lies as that does; None otherwise."""
    factor = factor_of(operation)
    if factor is None:
        return None
    x, y = values[operation.operands[0]], values[operation.makes[0]]
    same = (x.dtype, x.stride(), x.storage_offset()) == (y.dtype, y.stride(), y.storage_offset())
    return factor if same else None


def readers_of(program: Program, name: str) -> list[Operation] | None:
    """The operations that read a value, through views and copies, which are no readers themselves; None if one of these
    is a result or a gradient."""
    names, found = {name}, list[Operation]()
    for operation in program.operations:
        if names.isdisjoint(operation.uses):
            continue
        if operation.view or called(operation) == "clone":
            names.update(operation.makes)
        else:
            found.append(operation)
    return found if names.isdisjoint((*program.results, *program.wanted)) else None


with_given_layouts = Patterns(Row(Op(*ATTENTIONS), without_copies, "forward"), in_turn=True)
with_scales = Patterns(Row(Op(*ATTENTIONS), scaled, "forward"), in_turn=True)
