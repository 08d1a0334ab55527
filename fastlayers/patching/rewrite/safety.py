"""The proof that replacing a match changes no result, and the guards under which it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fastlayers.patching.capture.lookups import inside_function, inside_layer, same_call, same_tensor_method
from fastlayers.patching.capture.recording import Recording, add_names, bind, binder, equality, module_expression
from fastlayers.patching.ir.fingerprints import Fingerprint
from fastlayers.patching.ir.operations import Leading, Op
from fastlayers.patching.ir.spellings import FRESH_LAYERS, LAYERS, OUTSIDE, RANDOM
from fastlayers.patching.ir.view import View, is_barrier
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Match
from fastlayers.patching.runtime import checks
from fastlayers.patching.runtime.checks import hooked, is_sequential, original_class

__all__ = ["check_deeper", "layer_guards", "scale_guards"]


def check_deeper(
    view: View, match: Match, recording: Recording, excluded: frozenset[str]
) -> tuple[list[str], list[str]]:
    """:func:`check`, and if it fails for children of unknown classes, again with recordings of them."""
    try:
        return check(view, match, recording, excluded)
    except Refusal as refusal:
        if refusal.reason is not Reason.VISIBLE_MUTATION:
            raise
    return check(View(view.graph, view.root, deep=True), match, recording, excluded)


def check(view: View, match: Match, recording: Recording, excluded: frozenset[str]) -> tuple[list[str], list[str]]:
    """Prove that replacing a match changes no result.

    Returns:
        The guards under which this holds, and the children that must have no hooks.

    Raises:
        Refusal: it may change one.
    """
    nodes = {op.node for op in match.all_ops}
    for op in match.all_ops[:-1]:
        if op.node is not match.kept and not set(op.node.users) <= nodes:
            raise Refusal(Reason.USED_ELSEWHERE, str(op.node))
        if op.name != "identity":  # Its operand is read where the next operation is.
            check_operands_keep(view, op, match.root, nodes)
        check_statistics_keep(view, op, match.root, nodes)
        check_draws_keep(view, op, match.root, nodes)
    if match.kept is not None:
        for user in match.kept.users:
            if user not in nodes and view.position[user] < view.position[match.root]:
                raise Refusal(Reason.USED_BETWEEN, f"{match.kept} by {user}")
    unseen: list[str] = []
    guards: list[str] = []
    for op in match.all_ops:
        if op.inplace:
            results = {match.root} | ({match.kept} if match.kept is not None else set())
            makers, keepers = check_mutation(view, op.node, op["input"], results, nodes)
            unseen += [*makers, *keepers]
            for path in dict.fromkeys(makers):
                guards += maker_guards(view, path, recording)
    guards += [
        f"isinstance({tensor.target}, {bind(recording, torch.Tensor)})"
        for tensor in match.tensors
        if isinstance(tensor, Node) and tensor.op == "placeholder" and view.example(tensor) is None
    ]
    for op in (*match.ops, *match.absorbed):
        if op.child is not None:
            if op.child in excluded:
                raise Refusal(Reason.EXCLUDED_CHILD, op.child)
            for path in op.sequentials:
                guards += maker_guards(view, path, recording)
            guards += child_guards(view, op, recording)
            unseen += [*op.sequentials, op.child]
    for op in match.all_ops:
        guards += call_guards(op.node, recording)
    for path in unseen:
        if hooked(view.root.get_submodule(path)):
            raise Refusal(Reason.HOOKED_CHILD, path)
    return guards, unseen


def check_operands_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """The operands of ``op`` are now read at ``root``, so nothing may overwrite them in between."""
    between = [node for node in view.between(op.node, root) if node not in nodes]
    if barrier := next(filter(is_barrier, between), None):
        raise Refusal(Reason.WRITTEN_BETWEEN, f"anything, perhaps by {barrier}")
    operands = {operand: view.memory(operand) for operand in op.node.all_input_nodes if operand not in nodes}
    if isinstance(op["input"], Leading):  # The other layers of a Sequential stay at their place.
        operands = {op.node: view.memory_between(op["input"])}
    for operand, memory in operands.items():
        for writer in between:
            if view.written(writer) & memory:
                raise Refusal(Reason.WRITTEN_BETWEEN, f"{operand}, perhaps by {writer}")


def check_statistics_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """A norm now updates its running statistics at ``root``, so nothing may read or write them in between."""
    if op.name not in ("batch_norm", "instance_norm"):
        return
    if op.child is not None:
        shared = {view.root.get_submodule(op.child)}
        written: set[Any] = {f"{op.child}.{name}" for name in ("running_mean", "running_var")}
    else:
        shared, written = set(), {getattr(op[name], "target", None) for name in ("running_mean", "running_var")}
    between = set(view.between(op.node, root))
    for node in view.position:
        read = node.op in ("get_attr", "placeholder") and node.target in written and not set(node.users) <= nodes
        if read or (node in between and node.op == "call_module" and shared & set(view.child(node).modules())):
            raise Refusal(Reason.WRITTEN_BETWEEN, f"the running statistics of {op.node}, which {node} may see")


def check_draws_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """A dropout now draws at ``root``, so nothing may draw from the same generator in between."""
    for node in view.between(op.node, root) if op.name in RANDOM else ():
        if node not in nodes and view.may_draw(node):
            raise Refusal(Reason.DRAWN_BETWEEN, f"{op.node} and {root}, perhaps by {node}")


def check_mutation(
    view: View, writer: Node, target: Any, results: set[Node], nodes: set[Node]
) -> tuple[list[str], list[str]]:
    """An in-place operation goes away, so nothing else may see what it wrote.

    Returns the children that made the tensor, and those that get it: a hook on one of them could keep it.
    """
    written = view.memory(target)
    if OUTSIDE in written:
        raise Refusal(Reason.VISIBLE_MUTATION, f"{writer} writes {target}, which does not belong to this forward")
    replaced = set().union(*(descendants(result) for result in results))
    for node in view.position:
        if view.position[node] <= view.position[writer]:
            continue
        for operand in node.all_input_nodes:
            if operand not in nodes and operand not in replaced and view.memory(operand) & written:
                raise Refusal(Reason.VISIBLE_MUTATION, f"{node} sees what {writer} writes")
    makers: list[str] = []
    keeping: list[str] = []
    for node in view.position:
        if node not in nodes and any(view.memory(operand) & written for operand in node.all_input_nodes):
            keepers = view.keepers(node)
            if keepers is None and node not in replaced:
                raise Refusal(Reason.VISIBLE_MUTATION, f"{node} may have kept what {writer} writes")
            keeping += keepers or ()
    for allocation in written:
        if isinstance(allocation, Node) and allocation.op == "call_module" and allocation not in nodes:
            makers += view.makers(allocation) or ()
    return makers, keeping


def descendants(root: Node) -> set[Node]:
    found = {root}
    pending = [root]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def call_guards(node: Node, recording: Recording) -> Iterator[str]:
    """Guards that a function or a method of tensors that is fused computes what its name says."""
    if node.op == "call_function":
        yield from inside_function(node.target, binder(recording.namespace))
    elif node.op == "call_method":
        yield from same_tensor_method(str(node.target), binder(recording.namespace))


def layer_guards(path: str, layer: type[nn.Module], recording: Recording, inner: Recording | None = None) -> list[str]:
    """Guards that a child is still this layer, and that this layer is still what it was: known, or recorded."""
    expression = module_expression(path)
    guards = [f"{bind(recording, checks.plain)}({expression}, {bind(recording, layer)})"]
    if inner is None:
        return [*guards, *inside_layer(layer, expression, binder(recording.namespace))]
    for node in inner.graph.nodes:
        guards += call_guards(node, recording)
    add_names(recording.namespace, inner.namespace)
    return [*guards, *same_call(layer, binder(recording.namespace)), *inner.guards]


def child_guards(view: View, op: Op, recording: Recording) -> list[str]:
    """Guards that an absorbed child is still the same layer."""
    path = str(op.child)
    child = view.root.get_submodule(path)
    layer = original_class(child)
    expression = module_expression(path)
    guards = layer_guards(path, layer, recording, op.recording)
    if op.recording is not None:
        return guards
    if isinstance(op["fingerprint"], Fingerprint):
        return guards + scale_guards(op["fingerprint"], expression, child)
    attributes = LAYERS[layer][1] if layer in LAYERS else ()
    for attribute in (*attributes, *(("inplace",) if hasattr(child, "inplace") else ())):
        value = getattr(child, attribute)
        guards.append(equality(f"{expression}.{attribute}", value, binder(recording.namespace)))
    return guards


def scale_guards(found: Fingerprint, expression: str, module: nn.Module) -> list[str]:
    """Guards on the attribute that decides whether a handwritten norm has a weight, if it has such an attribute."""
    if found.scaled is None:
        return []
    return [f"{'' if getattr(module, found.scaled) else 'not '}{expression}.{found.scaled}"]


def maker_guards(view: View, path: str, recording: Recording) -> list[str]:
    """Guards that a child still returns a new tensor."""
    child = view.root.get_submodule(path)
    layer = original_class(child)
    expression = module_expression(path)
    inspected = view.children.get(path)
    if layer in FRESH_LAYERS:  # Another fresh layer, such as SyncBatchNorm, will do.
        guards = [f"{bind(recording, checks.plain_any)}({expression}, {bind(recording, FRESH_LAYERS, 'fresh_layers')})"]
        guards += inside_layer(layer, expression, binder(recording.namespace))
    else:
        guards = layer_guards(path, layer, recording, inspected[0] if inspected is not None else None)
    if hasattr(child, "inplace"):
        guards.append(f"{expression}.inplace is {child.inplace}")
    if is_sequential(child):
        guards.append(f"tuple({expression}._modules) == {tuple(child._modules)}")
    return guards
