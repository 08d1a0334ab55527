"""A backend for torch.compile: the graph rules over the whole graphs that Dynamo captures.

``torch.compile(model, backend="fastlayers")`` reaches code that no per-module trace does, and fuses across modules. The
rewritten graph is run as it is, operation by operation and with torch's own autograd: nothing else is compiled, so what
:func:`fastlayers.patch_model` calls, kernels included, is called here too.

There are no guards to write down: Dynamo has them, and recompiles where they fail. Graphs with dynamic shapes are
rewritten like others.
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

#: Tensor methods that give their tensor another shape; what Dynamo recorded of it before changes with it.
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

#: The rows of what Dynamo was given and holds.
_rows: WeakKeyDictionary[Callable[..., Any], tuple[Row, ...]] = WeakKeyDictionary()


def dynamo_backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """What ``torch.compile(..., backend="fastlayers")`` calls with each graph that it captures.

    Where fastlayers is not installed but only importable, its name is not known to torch: give this function itself,
    ``backend=fastlayers.patching.dynamo_backend``.

    Returns:
        The rewritten graph, to be called as Dynamo calls it.
    """
    outcomes = [fuse_graph(graph) for graph in graphs(graph_module)]
    run = partial(graph_module.forward)  # a graph module is in cycles, and would live on after Dynamo dropped it
    _rows[run] = rows_of(graph_module, outcomes)
    return run


#: What torch.compiler.reset() calls of a backend. Most graphs are gone then, but not all: Dynamo leaves some behind.
dynamo_backend.reset = _rows.clear  # type: ignore[attr-defined]


def graphs(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """A captured graph and the bodies of the activation checkpoints in it; makes the calls of these real checkpoints.

    Those with a policy of their own (selective checkpointing) say which operations to keep, and stay as they are.
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
        if node.op == "call_module":  # a guard on the module (its class, its hooks) would have to be Dynamo's
            return Fused(None, left=[Refusal(Reason.CALLS_MODULES, str(node.target))])
        if node.target in RESHAPING or getattr(node.target, "__name__", "") in RESHAPING:
            return Fused(None, left=[Refusal(Reason.RESHAPED_IN_PLACE, str(node))])
    outcome = apply_rules(Recording(graph_module.graph), graph_module, frozenset(), graph_rules(all_calls=True))
    graph_module.recompile()
    return outcome


# -- the report -------------------------------------------------------------------------------------------------------


def rows_of(graph_module: fx.GraphModule, outcomes: list[Fused]) -> tuple[Row, ...]:
    """A row for each module of whose code something was fused or, though it looked fusable, left."""
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
    """The name of the innermost module whose code a node is of, as Dynamo has it, and its class.

    Without ``layer`` it is the one that calls a layer of torch, not the layer.
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
    """What the backend made of the graphs that Dynamo holds now, in the order in which it captured them.

    Returns:
        A report with a row for each module of whose code something was fused, and the graph that has it, by the number
        that Dynamo's own logs give it. ``torch.compiler.reset()`` empties it.
    """
    rows = tuple(row for rows in _rows.values() for row in rows)
    return PatchReport(rows, "torch.compile")
