"""Ops that the graphs of torch.compile hold, and what a trace is told about their results."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag

from fastlayers import backends
from fastlayers.ops.guard import is_dtensor
from fastlayers.ops.pairs import Pair

_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
_LIBRARY = torch.library.Library("fastlayers", "FRAGMENT")


def graph_op_of(
    pair: type[Pair], name: str, returns: Any = Tensor, kernels: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """``pair.run``, with results of a type, as an op ``fastlayers::<name>`` that Dynamo puts into a graph as it is.

    AOTAutograd then runs it, so that its graphs hold the raw ops of the forward and, from the Function that autograd
    recorded, those of the backward.
    """
    schema = schema_of(pair.raw_forward, skip=2, returns=returns)
    return define_graph_op(name, schema, lambda *args: pair.run(kernels(), *args))


def define_graph_op(name: str, schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which consists of other ops, as an op ``fastlayers::<name>``."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.fastlayers, name).default


def schema_of(function: Callable[..., Any], skip: int = 0, returns: Any = None) -> str:
    """The schema of an op with this function's annotations, without the first ``skip`` parameters."""
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[skip:]

    def declared() -> None: ...

    declared.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters], return_annotation=returns or hints["return"]
    )
    return torch.library.infer_schema(declared, mutates_args=())


def opaque(name: str, function: Callable[..., Any], fake: Callable[..., Any], device: str | None = None) -> Any:
    """``function`` as an op that no trace looks into; ``fake`` has its signature and describes its results."""
    op = torch.library.custom_op(name, function, mutates_args=(), device_types=device, schema=schema_of(fake))
    register_fake(op, fake)
    return op


def register_fake(op: Any, fake: Callable[..., Any]) -> None:
    """Let ``fake`` describe the results of an op to a trace."""

    def describe(*args: Any, **kwargs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            show_to_inductor()
        return fake(*args, **kwargs)

    torch.library.register_fake(op, describe)


@cache
def show_to_inductor() -> None:
    """Register our ops with Inductor's lowerings before it meets one in a graph.

    It does so by itself in any case. But before torch 2.13 it then writes down, for a log, what each argument of the
    op is computed from, recursively: the time doubles with every block before the op. For the norm after the 12 blocks
    of a ViT that took more than minutes, or overflowed the stack.
    """
    if torch.__version__ >= "2.13":
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op_name = name.partition("::")
        # No graph that Inductor meets holds a composite op: AOTAutograd has looked into it.
        if namespace.startswith("fastlayers") and not _has_kernel(name, "CompositeImplicitAutograd"):
            op = getattr(getattr(torch.ops, namespace), op_name).default
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
            lowering.make_fallback(op, layout_constraint=constraint)


def _has_gpu_kernels() -> bool:
    return backends.choose(torch.device("cuda")) in ("cuda", "triton")


def graph_holds_csrc() -> bool:
    """Whether the kernels in graphs are those of ``csrc``."""
    return backends.choose(torch.device("cuda")) == "cuda"


# What torch.compiler.assume_constant_result does, without importing Dynamo (and Triton) for it: seconds of an import.
_has_gpu_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]
graph_holds_csrc._dynamo_marked_constant = True  # type: ignore[attr-defined]


def graph_keeps_kernel(x: Tensor) -> bool:
    """Whether a graph that torch.compile makes may hold a kernel as an opaque op. An exported one may not."""
    # The flag itself: within Dynamo, torch 2.11 answers is_exporting() with True under torch.compile as well.
    return x.is_cuda and not torch.compiler._is_exporting_flag and not is_dtensor(x) and _has_gpu_kernels()
