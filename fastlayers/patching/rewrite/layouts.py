"""The order of tensors in memory: attention that is given its operands as they lie, and results of rows.

Models write ``q.transpose(1, 2).contiguous()``, but torch's attention reads any strides in which the elements of a head
are next to each other, and gives its result and its gradients the layout of what it was given. Without the copies they
come in the order of tokens, as the projections before and after write and read them, and need no copy either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastlayers.patching.rewrite.executors import KEYS, excluding
from fastlayers.patching.rewrite.fusable import is_dense, spelled, written_by
from fastlayers.patching.rewrite.tape import (
    Operation,
    Program,
    Tape,
    Value,
    alive,
    is_kernel,
    keeping,
    operands_like,
    storage,
    with_names,
    with_tensors,
)

__all__ = ["in_rows", "with_given_layouts"]

ATTENTIONS = frozenset(
    f"_scaled_dot_product_{kind}" for kind in
    ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)  # fmt: skip
CLONE = torch.ops.aten.clone.default
#: Elements of a 16-byte access of 16 bits: torch's attention has slower kernels for strides of other multiples.
ALIGNED = 8


def with_given_layouts(program: Program, values: dict[str, Tensor], fake: FakeTensorMode) -> Program:
    """The program without the copies. ``values`` gains the results in other layouts, without memory."""
    for operation in program.forward:
        if spelled(operation) in ATTENTIONS:
            program = without_copies(program, operation, values, fake) or program
    return program


def without_copies(
    program: Program, attention: Operation, values: dict[str, Tensor], fake: FakeTensorMode
) -> Program | None:
    """The program with one attention on what its operands are copies of; None if there are none, or more would change
    than layouts."""
    sources = sources_of(program, attention, values)
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
            if not is_as_recorded(operation, values, fake):
                return None
            moved = with_names(operation, sources | changed)
            results = results_of(moved, values, fake)
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
    backward = alive(parts[1], [name for name in program.wanted if name])
    program = keeping(replace(program, forward=parts[0], backward=backward))
    return replace(program, forward=alive(parts[0], [*program.results, *program.kept]))


def sources_of(program: Program, attention: Operation, values: dict[str, Tensor]) -> dict[str, str]:
    """What the operands of an attention are copies of, which nobody else can write to."""
    makers = {name: operation for operation in program.forward for name in operation.makes}
    written = written_by((*program.forward, *program.backward), values)
    others = {storage(values[name]) for name in (*program.inputs, *program.results)} | written.keys()
    found: dict[str, str] = {}
    for name in attention.operands[:3]:
        copy = makers.get(name)
        if copy is None or spelled(copy) != "clone":
            continue
        (source,) = copy.operands
        t = values[source]
        safe = others.isdisjoint(map(storage, (t, values[name])))
        aligned = t.stride(-1) == 1 and all(n % ALIGNED == 0 for n in (*t.stride()[:-1], t.storage_offset()))
        if safe and aligned and is_dense(t):
            found[name] = source
    return found


def results_of(operation: Operation, values: dict[str, Tensor], fake: FakeTensorMode) -> Sequence[Tensor]:
    """The results of an operation, without memory."""
    with fake, torch.no_grad(), excluding(KEYS):
        args, kwargs = with_tensors(operation, operands_like(operation, values))
        out = operation.function(*args, **kwargs)
    return out if isinstance(out, tuple | list) else (out,)


def is_as_recorded(operation: Operation, values: dict[str, Tensor], fake: FakeTensorMode) -> bool:
    """Whether torch says of an operation without memory what it did with the recorded values."""
    return all(
        t.stride() == values[name].stride()
        for name, t in zip(operation.makes, results_of(operation, values, fake), strict=True)
        if name and name in values
    )


def in_rows(tape: Tape, t: Tensor) -> Tensor:
    """A result of tokens in contiguous memory, if torch had to choose between the layouts of two operands.

    Tokens that are made of an image or a sound, as in ``conv(x).flatten(2).mT + positions``, lie channel by channel,
    and torch lets every sum with them lie so, in all layers that follow: each norm and each sum reads across the rows.
    """
    if t.dim() != 3 or t.is_contiguous() or not is_dense(t):
        return t
    name = tape.name(t)
    maker = next((operation for operation in reversed(tape.operations) if name in operation.makes), None)
    if maker is None or maker.view or maker.effect:
        return t
    pointwise = is_kernel(maker.function) or torch.Tag.pointwise in getattr(maker.function, "tags", ())
    operands = [tape.values[operand] for operand in maker.operands]
    differ = any(u.dim() > 1 and u.shape[-2:] == t.shape[-2:] and u.is_contiguous() for u in operands)
    return t.contiguous() if pointwise and differ else t
