"""The engine: applies rules to a recording, where each match is proven safe, and rewrites its graph."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from fastlayers.patching.capture.recording import Recording, bind, module_expression
from fastlayers.patching.ir.casting import Casts
from fastlayers.patching.ir.operations import Attribute, Leading
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rewrite.cleanup import clean_up
from fastlayers.patching.rewrite.safety import check_deeper
from fastlayers.patching.rules.base import Deferred, GraphRule, Match
from fastlayers.patching.runtime import checks

__all__ = ["Fused", "apply_rules"]


@dataclass
class Fused:
    """The outcome for one module or graph: its generated class, what was fused, and what looked fusable and was not.

    Attributes:
        cls: the generated class; None where there is none.
        rules: the number of fused places by rule.
        made: the fused calls in a graph, with the names of their rules.
        size: the number of operations that they replace.
        left: refusals of what looked fusable.
        absorbed: paths of children whose work is done without calling them.
    """

    cls: type[nn.Module] | None
    rules: Counter[str] = field(default_factory=Counter)
    made: dict[Node, str] = field(default_factory=dict)
    size: int = 0
    left: list[Refusal] = field(default_factory=list)
    absorbed: frozenset[str] = frozenset()


def apply_rules(
    recording: Recording, module: nn.Module, excluded: frozenset[str], rules: tuple[GraphRule, ...]
) -> Fused:
    """Rewrite the graph of a recording in place, and add the guards that this needs."""
    view = View(recording.graph, module)
    view.thread_inplace()
    outcome = Fused(None)
    made: dict[Node, str] = {}
    counts: dict[Node, int] = {}  # of places in a node, with those of its rule that it merged
    unseen: dict[str, None] = {}
    absorbed: set[str] = set()
    conditions: dict[Callable[..., bool], dict[tuple[str, ...], None]] = {}
    for rule in rules:
        pending = list(recording.graph.nodes)
        while pending:
            node = pending.pop()
            refusals: list[Refusal] = []
            for found in rule.find(view, node):
                try:
                    if isinstance(found, Refusal):
                        raise found
                    guards, children = check_deeper(view, found, recording, excluded)
                except Refusal as refusal:
                    refusal.node = node
                    refusals.append(refusal.kept())
                    continue
                recording.guards.update(dict.fromkeys(guards))
                unseen.update(dict.fromkeys(children))
                if found.condition is not None:
                    function, *paths = found.condition
                    conditions.setdefault(function, {})[tuple(paths)] = None
                fused = replace(recording, found)
                view.refresh()
                pending = [other for other in view.position if view.position[other] < view.position[fused]]
                merged = [op.node for op in found.all_ops if made.get(op.node) == rule.name]
                made[fused], counts[fused] = rule.name, sum(map(counts.__getitem__, merged)) or 1
                outcome.size += len(found.ops)
                absorbed.update(op.child for op in (*found.ops, *found.absorbed) if op.child is not None)
                break
            outcome.left.extend(refusals)
    outcome.made = {node: made[node] for node in view.position if node in made}
    for node, name in outcome.made.items():
        outcome.rules[name] += counts[node]
    if outcome.rules:
        unseen.update(dict.fromkeys(clean_up(view, recording, excluded)))
    called = {str(node.target) for node in recording.graph.nodes if node.op == "call_module"}
    outcome.absorbed = frozenset(absorbed - called)
    if rest := join_tests(recording, unseen):
        conditions[checks.no_hooks] = {tuple(rest): None}
    for function, given in conditions.items():
        modules = ", ".join(map(module_expression, itertools.chain.from_iterable(given)))
        recording.guards[f"{bind(recording, function)}({modules})"] = None
    if outcome.rules:
        recording.guards = {**dict.fromkeys(proxy_guards(view, recording)), **recording.guards}
    return outcome


def join_tests(recording: Recording, unseen: Iterable[str]) -> list[str]:
    """Join the tests of a child's class and of its hooks, so that each child is looked up once.

    Returns the paths of children whose class has no such test.
    """
    plain = bind(recording, checks.plain)
    tested: dict[str, str] = {}
    rest: list[str] = []
    for path in unseen:
        start = f"{plain}({module_expression(path)}, "
        guard = next((guard for guard in recording.guards if guard.startswith(start)), None)
        if guard is None:
            rest.append(path)
        else:
            tested[guard] = f"({module_expression(path)}, {guard.removeprefix(start)}"
    if tested:
        together = f"{bind(recording, checks.untouched)}({', '.join(tested.values())})"
        recording.guards = dict.fromkeys(together if guard in tested else guard for guard in recording.guards)
    return rest


def proxy_guards(view: View, recording: Recording) -> Iterator[str]:
    """Guards against proxies of torch.fx, which lack the shapes and dtypes that fused functions need."""
    for node in view.position:
        if node.op == "placeholder" and node.users and view.example(node) is None:
            tensor = f"isinstance({node.target}, {bind(recording, torch.Tensor)})"
            if tensor not in recording.guards:
                yield f"not isinstance({node.target}, {bind(recording, fx.Proxy)})"


def replace(recording: Recording, match: Match) -> Node:
    """Replace the operations of a match by its call, and return that."""
    root, graph = match.root, recording.graph
    with graph.inserting_before(root):
        args = tuple(argument(recording, arg) for arg in match.args)
        kwargs = {name: argument(recording, arg) for name, arg in match.kwargs.items()}
        result = fused = graph.call_function(match.target, args, kwargs)
        if match.kept is not None:
            if set(match.kept.users) - {op.node for op in match.all_ops}:
                kept = graph.call_function(operator.getitem, (fused, 1))
                kept.meta = match.kept.meta.copy()
                match.kept.replace_all_uses_with(kept)
            result = graph.call_function(operator.getitem, (fused, 0))
        if match.forked:
            again = graph.call_function(operator.getitem, (fused, 1))
            again.meta = match.tensors[0].meta.copy()
            match.tensors[0].replace_all_uses_with(again, match.forked.__contains__)
            result = graph.call_function(operator.getitem, (fused, 0))
    result.meta = root.meta.copy()
    fused.meta = call_meta(match)
    root.replace_all_uses_with(result)
    for node in reversed(dict.fromkeys(op.node for op in match.all_ops)):
        graph.erase_node(node)
    return fused


def call_meta(match: Match) -> dict[str, Any]:
    """The metadata that Dynamo would have recorded of the fused call: its value, and the modules around it."""
    meta = match.root.meta.copy()
    second = match.tensors[0] if match.forked else match.kept
    if second is not None and "example_value" in meta:
        meta["example_value"] = (meta["example_value"], second.meta["example_value"])
    if "nn_module_stack" in meta:
        stacks = [op.node.meta.get("nn_module_stack", {}) for op in match.ops]
        common = itertools.takewhile(lambda key: all(key in stack for stack in stacks), stacks[-1])
        meta["nn_module_stack"] = {key: stacks[-1][key] for key in common}
    return meta


def argument(recording: Recording, value: Any) -> Any:
    """An argument of a fused call as the graph takes it."""
    graph = recording.graph
    if isinstance(value, Attribute):
        return graph.get_attr(value.path)
    if isinstance(value, Casts):
        return value.argument(recording)
    if isinstance(value, Leading):
        with graph.inserting_before(value.node):  # At their original place, since they may draw random numbers.
            x = value.node.args[0]
            for path in value.paths:
                x = graph.call_module(path, (x,))
        return x
    return value.make(graph) if isinstance(value, Deferred) else value
