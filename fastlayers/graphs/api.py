"""The public functions: capture the calls of a model, report on them, and take it back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fastlayers.graphs.module import graph_module, graphs_of, is_graphed, release_module
from fastlayers.graphs.report import GraphReport, GraphRow
from fastlayers.patching.reasons import PatchError, Refusal
from fastlayers.patching.rewrite.classes import without_sharding
from fastlayers.patching.runtime.checks import original_class

__all__ = ["graph_model", "graph_report", "ungraph_model"]


def graph_model(model: nn.Module, *, warmup: int = 3, max_graphs: int = 8) -> nn.Module:
    """Replay the forward and the backward of a model as CUDA graphs, in place.

    A CUDA graph launches all kernels of a call at once, so that a step takes the time of the GPU, not that of Python.
    Graphs are captured per signature of the call: shapes, strides, dtypes and devices of the tensors, other arguments
    by value, training flags, grad mode, autocast. The first calls of each run as they are, then forward and backward
    are captured, and all further calls replay them. Where the whole model cannot be captured, its largest submodules
    that can be are. Calls that cannot be captured run as they are; :func:`graph_report` says why.

    Works with or without :func:`fastlayers.patch_model`; patch first. Only classes change: parameters, hooks, names and
    the state dict stay as they are, and :func:`ungraph_model` undoes it. What is seen between calls: replaced or moved
    parameters, other modules, attributes, hooks, training flags. What is not: a global function that is replaced, and
    whatever else Python would do in a call, such as printing.

    Uncaptured are, among others, calls that wait for the GPU (``.item()``), draw random numbers on the CPU, change
    attributes of modules, communicate with other processes otherwise than by torch's tensor parallelism, have hooks on
    modules or arguments other than tensors and plain values, and those inside of ``torch.func`` transforms or of a
    checkpoint that keeps what autograd saves.

    Args:
        model: any module.
        warmup: so many calls of each signature run as they are; at least 1. A backward belongs to its forward.
        max_graphs: the number of captured calls of one module. A graph keeps the memory of its activations.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``warmup`` or ``max_graphs`` is less than 1.
        PatchError: the class of the model cannot be swapped: it is scripted, wrapped (capture what is inside of
            DistributedDataParallel), sharded by FSDP2, or its forward was replaced on the instance.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    ungraph_model(model)
    try:
        graph_module(model, warmup, max_graphs)
    except Refusal as refusal:
        raise PatchError(f"cannot capture calls of {type(model).__name__}: {refusal}") from None
    return model


def ungraph_model(model: nn.Module) -> nn.Module:
    """Undo :func:`graph_model`, and free the memory of its graphs. A patched model stays patched.

    Returns:
        The same model. Nothing happens to a model without graphs.

    Raises:
        TypeError: ``model`` is not a module.
        PatchError: a wrapper around a forward calls the present one: undo that first.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    with without_sharding(model.modules()):
        for name, module in model.named_modules():
            if not release_module(module):
                raise PatchError(f"a wrapper was put around the forward of {name or 'the model'} after graph_model")
    return model


def graph_report(model: nn.Module) -> GraphReport:
    """Report which calls of a model are replayed, and why the others are not.

    Returns:
        A report with a row for each module and signature. Print it.
    """
    with without_sharding(model.modules()):
        return GraphReport(tuple(rows_of(model)), original_class(model).__name__)


def rows_of(model: nn.Module) -> Iterator[GraphRow]:
    """A row for each signature of a graphed module, and one for each reason that holds for calls of any signature."""
    for name, module in model.named_modules():
        graphs = graphs_of(module) if is_graphed(module) else None
        if graphs is None:
            continue
        was = original_class(module).__name__
        for signature in graphs.signatures.values():
            state = "uncaptured" if signature.reason else "captured" if signature.captures else "warming up"
            yield GraphRow(
                name, was, signature.what, state, len(signature.captures), signature.replays, signature.memory,
                signature.reason,
            )  # fmt: skip
        for reason, count in graphs.refused.items():
            yield GraphRow(name, was, f"{count} calls", "uncaptured", 0, 0, 0, reason)
