"""A backend for torch.compile: the graph rules over the whole graphs that Dynamo captures.

``torch.compile(model, backend="fastlayers")`` reaches code that no per-module trace reaches, and fuses across modules.
The rewritten graph runs operation by operation with torch's own autograd: nothing is compiled further, so it calls the
same functions and kernels as a model after :func:`fastlayers.patch_model`.

Guards are Dynamo's: it recompiles where they fail. Graphs with dynamic shapes are rewritten like others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx import Node

from fastlayers.patching.capture.recording import Recording
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.report import PatchReport, Row
from fastlayers.patching.rewrite.engine import Fused, apply_rules
from fastlayers.patching.rules import graph_rules
from fastlayers.patching.runtime import python

__all__ = ["compile_report", "dynamo_backend"]

#: Methods that change the shape of their tensor in place. The shape that Dynamo recorded before then is wrong.
RESHAPING = frozenset(
    {
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "squeeze_",
        "unsqueeze_",
        "resize_",
        "resize_as_",
        "as_strided_",
        "set_",
    }
)

#: The report rows of each compiled graph that Dynamo still has.
_rows: WeakKeyDictionary[Callable[..., Any], tuple[Row, ...]] = WeakKeyDictionary()


def dynamo_backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The backend behind ``torch.compile(..., backend="fastlayers")``: rewrite one captured graph.

    torch knows the name only if fastlayers is installed. If it is merely importable, pass this function itself:
    ``backend=fastlayers.patching.dynamo_backend``.

    Returns:
        A callable that runs the rewritten graph.
    """
    outcomes = [fuse_graph(graph) for graph in graphs(graph_module)]
    run = partial(graph_module.forward)  # A graph module is part of reference cycles, and would outlive its use.
    _rows[run] = rows_of(outcomes)
    return run


# torch.compiler.reset() calls this. Dynamo frees most graphs then, but not all of them.
dynamo_backend.reset = _rows.clear  # type: ignore[attr-defined]


def graphs(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """A captured graph and the bodies of its activation checkpoints, whose calls become calls of torch's checkpoint.

    Selective checkpoints have a policy of which operations to save, and stay as they are.
    """
    found = {graph_module: None}
    for owner in [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]:
        for node in owner.graph.nodes:
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                body: Any = owner.get_submodule(str(node.args[0].target))
                if "_checkpoint_context_fn" not in body.meta:
                    node.target = python.checkpointed
                    found[body] = None
                    owner.recompile()
    return list(found)


def fuse_graph(graph_module: fx.GraphModule) -> Fused:
    """Rewrite one captured graph in place."""
    for node in graph_module.graph.nodes:
        if node.op == "call_module":  # Dynamo has no guard on the class and the hooks of the module.
            return Fused(None, left=[Refusal(Reason.CALLS_MODULES, str(node.target))])
        if node.target in RESHAPING or getattr(node.target, "__name__", "") in RESHAPING:
            return Fused(None, left=[Refusal(Reason.RESHAPED_IN_PLACE, str(node))])
    outcome = apply_rules(Recording(graph_module.graph), graph_module, frozenset(), graph_rules())
    graph_module.recompile()
    return outcome


# -- the report -------------------------------------------------------------------------------------------------------


def rows_of(outcomes: list[Fused]) -> tuple[Row, ...]:
    """A row for each module with a fused place in its code, or with one that looked fusable."""
    graph = f"graph {torch._guards.CompileContext.current_compile_id()}"
    fused: dict[tuple[str, str], Counter[str]] = {}
    left: dict[tuple[str, str], dict[tuple[Reason, str], None]] = {}
    for outcome in outcomes:
        for node, rule in outcome.made.items():
            fused.setdefault(module_of(node), Counter())[rule] += 1
        for refusal in outcome.left:
            left.setdefault(module_of(refusal.node, layer=False), {})[refusal.reason, refusal.detail] = None
    rows = []
    for module in dict.fromkeys((*fused, *left)):
        (path, was), notes = module, tuple(left.get(module, ()))
        if module in fused:
            rows.append(Row(path, was, graph, tuple(fused[module].items()), left=notes))
        else:
            rows.append(Row(path, was, reason=notes[0][0], detail=notes[0][1], left=notes[1:]))
    return tuple(rows) or (Row(graph, "", reason=Reason.NOTHING_TO_FUSE),)


def module_of(node: Node | None, *, layer: bool = True) -> tuple[str, str]:
    """The name and the class of the innermost module whose code contains a node.

    With ``layer=False`` it is the module that calls a layer of torch, not the layer.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values()) if node is not None else []
    if not layer and len(stack) > 1 and getattr(stack[-1][1], "__module__", "").startswith("torch.nn."):
        stack.pop()
    if not stack:
        return "", ""
    path, cls = stack[-1]
    kind = cls if isinstance(cls, str) else cls.__name__
    return re.sub(r"^L\['\w+'\]\.?", "", path), kind.rpartition(".")[2]


def compile_report() -> PatchReport:
    """Report what the backend fused in the graphs that Dynamo has now, in the order of their capture.

    Returns:
        A report with a row for each module with a fused place. Its ``became`` is the graph, numbered as in Dynamo's
        logs. ``torch.compiler.reset()`` empties the report.
    """
    rows = tuple(row for rows in _rows.values() for row in rows)
    return PatchReport(rows, "torch.compile")
