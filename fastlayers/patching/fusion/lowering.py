"""Kernels as torch's simple operations, where a generated kernel for them and their neighbours moves less memory.

A hand-written kernel wins by itself. But one that reads what a sum, a scale or a cast has just written, or writes what
the next operation reads once, costs a pass over memory that a kernel for both does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlayers.ops.activations import ACTIVATIONS, BY_CODE
from fastlayers.ops.layer_norm import LAYER, RMS
from fastlayers.patching.fusion.fusable import COPIES, WHOLE, is_fusable
from fastlayers.patching.fusion.matcher import Match, Op, Patterns, Row, new
from fastlayers.patching.program.executors import KEYS, excluding
from fastlayers.patching.program.operators import argument, called
from fastlayers.patching.program.program import Operation, Program, alive, operands_like, with_names, with_tensors
from fastlayers.patching.program.tape import Tape

__all__ = ["DERIVATIVES", "IN_PLACE", "LOWERINGS", "lowered"]


def layer_norm_forward(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int, dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    row = tuple(range(-dims, 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(row, keepdim=True) if kind == LAYER else None
    centered = wide if mean is None else wide - mean
    rstd = torch.rsqrt((centered * centered).mean(row, keepdim=True) + eps)
    y = centered * rstd
    if weight is not None:
        if kind == RMS["llama"]:
            y = y.to(x.dtype).to(wide.dtype)
        y = y * (1 + weight.to(wide.dtype) if kind == RMS["gemma"] else weight.to(wide.dtype))
        if kind == RMS["llama"] and weight.dtype is x.dtype:
            y = y.to(x.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    stats = torch.stack([t.flatten() for t in (mean, rstd) if t is not None]) if keep else None
    return y.to(dtype).contiguous(), stats


def add_layer_norm_forward(
    x: Tensor, residual: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int,
    dtype: torch.dtype, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    s = (x + residual).to(residual.dtype)
    y, stats = layer_norm_forward(s, dims, weight, bias, eps, kind, dtype, keep)
    return y, s, stats


def layer_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, dims: int, weight: Tensor | None, stats: Tensor, kind: int,
    dweight: bool, dbias: bool, narrow: torch.dtype | None = None,
) -> tuple[Tensor, None, None, Tensor | None]:  # fmt: skip
    if weight is not None:  # The kernel of the norm sums the gradients of its parameters while it has the rows.
        raise NotImplementedError
    row = tuple(range(-dims, 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    of_rows = stats.view(-1, *x.shape[:-dims], *(1 for _ in row))
    y = (x.to(wide) - of_rows[0] if kind == LAYER else x.to(wide)) * of_rows[-1]
    d = dy.to(wide)
    dx = d - y * (d * y).mean(row, keepdim=True)
    dx = (dx - d.mean(row, keepdim=True) if kind == LAYER else dx) * of_rows[-1]
    dx = (dx if dsum is None else dx + dsum.to(wide)).to(x.dtype).contiguous()
    return dx, None, None, None if narrow is None else dx.to(narrow)


def batch_norm_eval(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    residual: Tensor | None, act: int, bits: bool, keep: bool,
) -> tuple[Tensor, None, None]:  # fmt: skip
    channels = (-1, *(1 for _ in x.shape[2:]))
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = torch.rsqrt(var.to(wide) + eps)
    factor = factor if weight is None else factor * weight.to(wide)
    y = (x.to(wide) - mean.to(wide).view(channels)) * factor.view(channels)
    y = y if bias is None else y + bias.to(wide).view(channels)
    y = y if residual is None else y + residual.to(wide)
    return BY_CODE[act].function(y).to(x.dtype), None, None


def channel_bias_act(x: Tensor, bias: Tensor, residual: Tensor | None, act: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) + bias.to(wide).view(-1, *(1 for _ in x.shape[2:]))
    y = y if residual is None else y + residual.to(wide)
    return BY_CODE[act].function(y).to(x.dtype)


def softmax_forward(x: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool) -> Tensor:
    if log or (mask is not None and mask.dtype is torch.bool):
        raise NotImplementedError
    scores = x.to(torch.promote_types(x.dtype, torch.float32))
    scores = scores if scale == 1 else scores * scale
    scores = scores if mask is None else scores + mask.to(scores.dtype)
    return torch._softmax(scores, dim, False).to(dtype)


def softmax_backward(
    dy: Tensor, y: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool
) -> Tensor:
    if log or mask is not None:
        raise NotImplementedError
    wide = torch.promote_types(y.dtype, torch.float32)
    dx = torch._softmax_backward_data(dy.to(wide), y.to(wide), dim, wide)
    return (dx if scale == 1 else dx * scale).to(dtype)


def scale_add(
    x: Tensor, gamma: Tensor | None, residual: Tensor | None, keep: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if gamma is not None:
        y = y * gamma.to(wide)
    if keep is not None:
        y = y * (keep.view(-1, *(1 for _ in x.shape[1:])) * scale)
    elif scale != 1:
        y = y * scale
    return (y if residual is None else y + residual.to(wide)).to(dtype)


def bias_act_forward(x: Tensor, bias: Tensor | None, act: int, first: float, second: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    kind = BY_CODE[act]
    return kind.function(z, *(first, second)[: len(kind.parameters)]).to(x.dtype)


def bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: int, first: float, second: float, dbias: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if act not in DERIVATIVES:
        raise NotImplementedError
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    dx = DERIVATIVES[act](dy.to(wide), z).to(x.dtype)
    if not dbias:
        return dx, None
    return dx, dx.sum(tuple(range(x.dim() - 1)), dtype=wide).to(dtype or x.dtype)


def gated_forward(gate: Tensor, up: Tensor, act: int) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (BY_CODE[act].function(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    row = tuple(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(row, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(row, keepdim=True) + eps)
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight.to(wide.dtype)
    y = y if bias is None else y + bias.to(wide.dtype)
    return y.to(x.dtype), mean, rstd


def var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = tuple(range(x.dim())) if dim is None else tuple(dim)
    count = math.prod(x.shape[d] for d in dims)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise NotImplementedError
    mean = wide.mean(dims, keepdim=True)
    # The mean of what is left is added, as a sum over a count may be a rounding beside elements that are all alike. The
    # gradient of their standard deviation is 0 where that is 0, and not where it is 1e-8.
    mean = mean + (wide - mean).mean(dims, keepdim=True)
    found = (wide - mean).square().sum(dims, keepdim=keepdim) * (1 / divisor)
    return found.to(x.dtype), mean.to(x.dtype) if keepdim else mean.reshape(found.shape).to(x.dtype)


aten = torch.ops.aten
#: What multiplies a gradient, for the activations of which torch has that as an operation. That of relu is given its
#: result.
DERIVATIVES: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    ACTIVATIONS["relu"].code: lambda dy, y: aten.threshold_backward(dy, y, 0),
    ACTIVATIONS["silu"].code: aten.silu_backward,
    ACTIVATIONS["gelu"].code: aten.gelu_backward,
    ACTIVATIONS["gelu_tanh"].code: lambda dy, z: aten.gelu_backward(dy, z, approximate="tanh"),
}
#: Kernels and reductions in torch's pointwise operations and sums, with the arguments of the operation.
LOWERINGS: dict[str, Callable[..., Any]] = {
    "layer_norm_forward": layer_norm_forward,
    "add_layer_norm_forward": add_layer_norm_forward,
    "layer_norm_backward": layer_norm_backward,
    "batch_norm_eval": batch_norm_eval,
    "channel_bias_act_": channel_bias_act,
    "softmax_forward": softmax_forward,
    "softmax_backward": softmax_backward,
    "scale_add": scale_add,
    "bias_act_forward": bias_act_forward,
    "bias_act_backward": bias_act_backward,
    "gated_forward": gated_forward,
    "native_layer_norm": native_layer_norm,
    "var.correction": lambda *args, **kwargs: var(*args, **kwargs)[0],
    "std.correction": lambda *args, **kwargs: var(*args, **kwargs)[0].sqrt(),
    "var_mean.correction": var,
}
#: Those that write over their first argument; their lowerings return a tensor.
IN_PLACE = frozenset({"channel_bias_act_"})


def lowered(program: Program, refused: frozenset[str]) -> tuple[Program, dict[str, str]]:
    """The program with kernels as operations of torch where these have neighbours to be fused with.

    Also returns, for each value that such an operation makes, the first result of the kernel that it stands for.
    Kernels with a first result in ``refused`` stay.
    """
    origins: dict[str, str] = {}
    needed = program.needed.union(*(operation.uses for operation in program.operations))
    made, read = set[str](), (set[str](), set[str]())  # by what may become part of a kernel; read in each direction
    for place, operation in enumerate(program.operations):
        if is_fusable(operation, program.values) or has_lowering(operation, refused):
            made.update(operation.makes)
            read[place >= len(program.forward)].update(map(program.base, operation.uses))

    def in_torch(match: Match) -> Sequence[Operation] | None:
        before = {name for name in map(program.base, match.root.operands) if match.is_beside(name)}
        alone = made.isdisjoint(before) and read[match.in_backward].isdisjoint(match.root.makes)
        if alone or not has_lowering(match.root, refused):
            return None
        steps = steps_of(match, needed)
        first = first_result(match.root)  # What the others need besides may be in other kernels.
        origins.update((name, first) for step in alive(steps or (), [first]) for name in step.makes)
        return steps

    return Patterns(Row(Op(*LOWERINGS), in_torch))(program), origins


def has_lowering(operation: Operation, refused: frozenset[str]) -> bool:
    return called(operation) in LOWERINGS and first_result(operation) not in ("", *refused)


def first_result(operation: Operation) -> str:
    return next((name for name in operation.makes if name), "")


def steps_of(match: Match, needed: Container[str]) -> list[Operation] | None:
    """The operations of torch that a kernel stands for; None if they would give another layout."""
    with match.program.fake:
        known = operands_like(match.root, match.program.values)
    args, kwargs = with_tensors(match.root, known)
    tape = Tape(list(known.values()), ())
    try:
        with torch.no_grad(), excluding(KEYS), tape:
            out = LOWERINGS[called(match.root)](*args, **kwargs)
    except NotImplementedError:
        return None
    results = out if isinstance(out, tuple) else (out,)
    names = dict(zip(tape.inputs, known, strict=True))
    wanted = [(name, t) for name, t in zip(match.root.makes, results, strict=True) if name in needed]
    for name, t in wanted:
        if t is None or t.stride() != match.t(name).stride() or t.dtype is not match.t(name).dtype:
            return None
        if tape.name(t) in names:  # A result that is an input, or two that are one.
            return None
        names[tape.name(t)] = name
    names |= {own: new(match.program, t) for own, t in tape.values.items() if own not in names}
    steps = alive(tape.operations, [tape.name(t) for _, t in wanted])
    whole = name_of_steps(match.root, steps)
    return [
        replace(
            with_names(step, names),
            makes=tuple(names.get(name, name) for name in step.makes),
            step_of="" if called(step) in COPIES else whole,
        )
        for step in steps
    ]


def name_of_steps(operation: Operation, steps: Sequence[Operation]) -> str:
    """What a generated kernel calls the steps of a norm; empty for those of an activation, say, which say more than its
    name."""
    if not any(called(step) in WHOLE for step in steps):
        return ""
    name = called(operation).removeprefix("native_").removesuffix("_forward")
    return name if argument(operation, "kind", LAYER) == LAYER else name.replace("layer", "rms")
