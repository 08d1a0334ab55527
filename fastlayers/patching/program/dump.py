"""A program as Python that runs, for readers: its kernels, its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fastlayers.patching.capture.recording import has_literal
from fastlayers.patching.program.executors import call_source, items, named
from fastlayers.patching.program.program import Operation, Program, Value

__all__ = ["source_of"]


def source_of(program: Program, inputs: Sequence[str]) -> str:
    """The source of a program. Above an operation is the line that it comes from, where the tape noted it.

    Args:
        program: without its values.
        inputs: what is said of each of its inputs.
    """
    scope: dict[str, Any] = {}
    given = (f"    {name},  # {text}" for name, text in zip(program.inputs, inputs, strict=True))
    lines = ["def forward(", *given, "):", *body(program.forward, scope)]
    lines.append(f"    return {items(program.results)}, {items(program.kept)}")
    if program.grads:
        lines += [
            "",
            "",
            f"def backward({', '.join((*program.grads, *program.kept))}):",
            *body(program.backward, scope),
        ]
        lines.append(f"    return {items(map(str, program.wanted))}")
    return "\n".join([*needed_by(scope), "", "", *lines])


def body(operations: Sequence[Operation], scope: dict[str, Any]) -> Iterator[str]:
    above: str | None = None
    for operation in operations:
        if operation.source not in (None, above):
            yield from (f"    # {line}" for line in str(operation.source).splitlines())
        above = operation.source
        yield f"    {call_source(operation, function_source(operation.function, scope), argument_source)}"


def function_source(function: Any, scope: dict[str, Any]) -> str:
    if isinstance(function, OpOverload):
        return f"torch.ops.{function}"
    if hasattr(function, "machine_code"):
        return named(function, f"run_{function.__name__}", scope)
    return path_of(function, scope)


def path_of(function: Any, scope: dict[str, Any]) -> str:
    scope[function.__module__] = None
    return f"{function.__module__}.{function.__name__}"


def argument_source(value: Any) -> str:
    if isinstance(value, Value):
        return value.name
    if isinstance(value, tuple | list):
        parts = ", ".join(map(argument_source, value))
        return f"[{parts}]" if type(value) is list else f"({parts},)" if value else "()"
    if isinstance(value, float) and not has_literal(value):
        return f'float("{value}")'
    return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)


# -- what the two functions call ---------------------------------------------------------------------------------------


def needed_by(scope: dict[str, Any]) -> Iterator[str]:
    """Imports, and the kernels with their launches."""
    launches = {name: function for name, function in scope.items() if function is not None}
    modules = {name for name, function in scope.items() if function is None}
    yield "import torch"
    made: list[str] = []
    kernels: dict[str, Any] = {}
    for name, run in launches.items():
        made += launch_source(name, run, kernels, modules)
    yield from (f"import {module}" for module in sorted(modules))
    if launches:
        from fastlayers.kernels.generated import IMPORTS  # needs Triton

        yield from IMPORTS.splitlines()
        yield "from fastlayers.kernels.launch import Launch, Producer, Result"
    yield from made


def launch_source(name: str, run: Any, kernels: dict[str, Any], modules: set[str]) -> Iterator[str]:
    """The source of a launch, and before it that of its kernel, if this was generated."""
    launch = run.launch
    if hasattr(run, "source"):
        known = run.source in kernels.values()
        kernel = named(run.source, run.__name__, kernels)
        if not known:
            yield from ["", "", run.source.replace(run.__name__, kernel, 1).rstrip(), ""]
    else:
        kernel = f"{launch.function.__module__}.{launch.function.__name__}"
        modules.add(launch.function.__module__)
    constants = items(triton_source(value, modules) for value in launch.constants)
    facts = f"{kernel}, {launch.programs}, {launch.scalars}, {constants}, {launch.num_warps}, exact={launch.exact}"
    made = f"{list(run.results)}, torch.{run.device!r}, {run.absent}"
    yield f"{name} = Producer({run.__name__!r}, Launch({facts}), {made})"


def triton_source(value: Any, modules: set[str]) -> str:
    """A constant of a kernel: a number, a type of Triton, or a function that the kernel calls."""
    kind = type(value).__module__
    if not kind.startswith("triton."):
        return repr(value)
    if hasattr(value, "__module__") and hasattr(value, "fn"):
        modules.add(value.__module__)
        return f"{value.__module__}.{value.__name__}"
    import triton.language as tl

    return "tl." + next(name for name, known in vars(tl).items() if type(known) is type(value) and known == value)
