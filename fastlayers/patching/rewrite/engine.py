"""From a recorded forward to a generated class: apply the rules, check that each match is safe, write the source.

The generated class subclasses the module's own and has one method, ``forward``: for every recording a test of its
guards and the rewritten body; and at the end the original forward, for every call that no recording stands for.
"""

from __future__ import annotations

import abc
import ast
import copy
import copyreg
import functools
import inspect
import itertools
import operator
import re
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from fastlayers.patching.capture.rebuild import show_source
from fastlayers.patching.capture.trace import (
    CHECKPOINTING,
    Name,
    Recording,
    add_names,
    bind,
    equality,
    module_expression,
    optional_parameters,
    plain_forward,
    record,
)
from fastlayers.patching.ir.casting import Casts
from fastlayers.patching.ir.fingerprints import Fingerprint, fingerprint, looks_like_a_norm
from fastlayers.patching.ir.operations import Attribute, Leading, Op
from fastlayers.patching.ir.spellings import FRESH_LAYERS, LAYERS, OUTSIDE, RANDOM
from fastlayers.patching.ir.view import View, hooked, is_barrier, is_sequential, original_class
from fastlayers.patching.libraries.attention_masks import fuse_masks
from fastlayers.patching.libraries.language_models import FusedModel, fuse_losses, pretrained_model
from fastlayers.patching.reasons import PatchError, Reason, Refusal
from fastlayers.patching.rewrite.cleanup import tidy
from fastlayers.patching.rules import Deferred, GraphRule, Match, ModuleRule, graph_rules
from fastlayers.patching.runtime import calls

__all__ = [
    "GUARD_BUILTINS",
    "Fused",
    "apply_rules",
    "become",
    "body_source",
    "called_by_class",
    "check_subclassing",
    "fuse",
    "guards_source",
    "is_folded",
    "is_patched",
    "seal",
    "shown_name",
    "swap_class",
]

#: With more optional tensors than this, a forward is recorded with none, each alone and all of them.
ALL_COMBINATIONS = 2

#: The functions that pickle rebuilds a plain object with, for the newer protocols and for the older ones.
NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]
RECONSTRUCT: Any = copyreg._reconstructor  # type: ignore[attr-defined]

#: What a generated forward calls the answer of its guards.
HOLDS = "_fastlayers_holds"

#: A child of ``self``, as :func:`module_expression` writes it.
CHILD = re.compile(r"self(\._modules\['[^'\\]*'\])+")

#: What guards call; a parameter of that name would hide it.
GUARD_BUILTINS = frozenset(
    {"type", "isinstance", "len", "tuple", "list", "dict", "int", "float", "str", "super", "getattr", "hasattr"}
)


@dataclass
class Fused:
    """The outcome for one module: its generated class, what was fused, and what looked fusable and was left.

    ``made`` has the fused calls in a graph by the names of their rules; ``size`` counts the operations they replace.
    """

    cls: type[nn.Module] | None
    rules: Counter[str] = field(default_factory=Counter)
    made: dict[Node, str] = field(default_factory=dict)
    size: int = 0
    left: list[Refusal] = field(default_factory=list)


# -- applying rules to one recording ------------------------------------------------------------------------------


def apply_rules(
    recording: Recording, module: nn.Module, excluded: frozenset[str], rules: tuple[GraphRule, ...]
) -> Fused:
    """Rewrite the graph of a recording in place; adds the guards that the rewritten steps need."""
    view = View(recording.graph, module)
    view.thread_inplace()
    outcome = Fused(None)
    made: dict[Node, str] = {}
    counts: dict[Node, int] = {}  # of places that a node stands for: those of its rule that went into it, too
    unseen: dict[str, None] = {}
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
                    refusals.append(refusal)
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
                break
            if made.get(node) != rule.name:  # else it has what this rule is for, if not in one with others
                outcome.left.extend(refusals)
    outcome.made = {node: made[node] for node in view.position if node in made}
    for node, name in outcome.made.items():
        outcome.rules[name] += counts[node]
    if outcome.rules:
        unseen.update(dict.fromkeys(tidy(view, recording, excluded)))
    if rest := join_tests(recording, unseen):
        conditions[calls.no_hooks] = {tuple(rest): None}
    for function, given in conditions.items():
        modules = ", ".join(map(module_expression, itertools.chain.from_iterable(given)))
        recording.guards[f"{bind(recording, function)}({modules})"] = None
    if outcome.rules:
        recording.guards = {**dict.fromkeys(proxy_guards(view, recording)), **recording.guards}
    return outcome


def join_tests(recording: Recording, unseen: Iterable[str]) -> list[str]:
    """Test the classes of children that must have no hooks together with that, so that each is looked up once.

    Returns the paths of those whose class is tested otherwise.
    """
    plain = bind(recording, calls.plain)
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
        together = f"{bind(recording, calls.untouched)}({', '.join(tested.values())})"
        recording.guards = dict.fromkeys(together if guard in tested else guard for guard in recording.guards)
    return rest


def proxy_guards(view: View, recording: Recording) -> Iterator[str]:
    """torch.fx follows the original forward: the fused functions need the shapes and dtypes that its proxies lack."""
    for node in view.position:
        if node.op == "placeholder" and node.users and view.example(node) is None:
            tensor = f"isinstance({node.target}, {bind(recording, torch.Tensor)})"
            if tensor not in recording.guards:
                yield f"not isinstance({node.target}, {bind(recording, fx.Proxy)})"


def check_deeper(
    view: View, match: Match, recording: Recording, excluded: frozenset[str]
) -> tuple[list[str], list[str]]:
    """:func:`check`, and where it needs to know what children of unknown classes do, again with a look at them."""
    try:
        return check(view, match, recording, excluded)
    except Refusal as refusal:
        if refusal.reason is not Reason.VISIBLE_MUTATION:
            raise
    return check(View(view.graph, view.root, deep=True), match, recording, excluded)


def check(view: View, match: Match, recording: Recording, excluded: frozenset[str]) -> tuple[list[str], list[str]]:
    """Raise unless the match can be replaced without anyone noticing.

    Returns the guards under which that stays so, and the children that must have no hooks.
    """
    nodes = {op.node for op in match.all_ops}
    for op in match.all_ops[:-1]:
        if op.node is not match.kept and not set(op.node.users) <= nodes:
            raise Refusal(Reason.USED_ELSEWHERE, str(op.node))
        if op.name != "identity":  # which hands its operand on: it is read where the next operation is
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
        for tensor in placeholders(match.tensors)
        if view.example(tensor) is None
    ]
    for op in (*match.ops, *match.absorbed):
        if op.child is not None:
            if op.child in excluded:
                raise Refusal(Reason.EXCLUDED_CHILD, op.child)
            for path in op.sequentials:
                guards += maker_guards(view, path, recording)
            guards += child_guards(view, op, recording)
            unseen += [*op.sequentials, op.child]
    for path in unseen:
        if hooked(view.root.get_submodule(path)):
            raise Refusal(Reason.HOOKED_CHILD, path)
    return guards, unseen


def check_operands_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """The operands of ``op`` are read later than before, where ``root`` is: nothing may write them in between."""
    between = [
        n for n in view.position if view.position[op.node] < view.position[n] < view.position[root] and n not in nodes
    ]
    if barrier := next(filter(is_barrier, between), None):
        raise Refusal(Reason.WRITTEN_BETWEEN, f"anything, perhaps by {barrier}")
    operands = {operand: view.memory(operand) for operand in op.node.all_input_nodes if operand not in nodes}
    if isinstance(op["input"], Leading):  # the other layers of a Sequential stay where they are
        operands = {op.node: view.memory_between(op["input"])}
    for operand, memory in operands.items():
        for writer in between:
            if view.written(writer) & memory:
                raise Refusal(Reason.WRITTEN_BETWEEN, f"{operand}, perhaps by {writer}")


def check_statistics_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """A norm writes its running statistics later than before: nothing may read or write them in between."""
    if op.name not in ("batch_norm", "instance_norm"):
        return
    if op.child is not None:
        shared = {view.root.get_submodule(op.child)}
        written: set[Any] = {f"{op.child}.{name}" for name in ("running_mean", "running_var")}
    else:
        shared, written = set(), {getattr(op[name], "target", None) for name in ("running_mean", "running_var")}
    for node in view.position:
        read = node.op in ("get_attr", "placeholder") and node.target in written and not set(node.users) <= nodes
        between = view.position[op.node] < view.position[node] < view.position[root]
        if read or (between and node.op == "call_module" and shared & set(view.child(node).modules())):
            raise Refusal(Reason.WRITTEN_BETWEEN, f"the running statistics of {op.node}, which {node} may see")


def check_draws_keep(view: View, op: Op, root: Node, nodes: set[Node]) -> None:
    """A dropout draws later than before: nothing may draw from the same generator in between."""
    for node in view.position if op.name in RANDOM else ():
        between = view.position[op.node] < view.position[node] < view.position[root]
        if between and node not in nodes and view.may_draw(node):
            raise Refusal(Reason.DRAWN_BETWEEN, f"{op.node} and {root}, perhaps by {node}")


def check_mutation(
    view: View, writer: Node, target: Any, results: set[Node], nodes: set[Node]
) -> tuple[list[str], list[str]]:
    """An in-place operation goes away: nothing else may see what it wrote.

    Returns the children that made it, and those that are given it: a hook on one of them could keep it.
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


def placeholders(values: tuple[Any, ...]) -> Iterator[Node]:
    return (value for value in values if isinstance(value, Node) and value.op == "placeholder")


def child_guards(view: View, op: Op, recording: Recording) -> list[str]:
    """An absorbed child must still be the layer that it was."""
    path = str(op.child)
    child = view.root.get_submodule(path)
    layer = original_class(child)
    expression = module_expression(path)
    guards = [f"{bind(recording, calls.plain)}({expression}, {bind(recording, layer)})"]
    if op.recording is not None:
        return guards + inner_guards(op.recording, recording)
    if isinstance(op["fingerprint"], Fingerprint):
        return guards + scale_guards(op["fingerprint"], expression, child)
    attributes = LAYERS[layer][1] if layer in LAYERS else ()
    for attribute in (*attributes, *(("inplace",) if hasattr(child, "inplace") else ())):
        value = getattr(child, attribute)
        guards.append(equality(f"{expression}.{attribute}", value, lambda value, hint: bind(recording, value, hint)))
    return guards


def scale_guards(found: Fingerprint, expression: str, module: nn.Module) -> list[str]:
    """Whether a written-out norm has a weight is decided by an attribute of some."""
    if found.scaled is None:
        return []
    return [f"{'' if getattr(module, found.scaled) else 'not '}{expression}.{found.scaled}"]


def maker_guards(view: View, path: str, recording: Recording) -> list[str]:
    """A child that made a tensor must still be one that makes its own."""
    child = view.root.get_submodule(path)
    layer = original_class(child)
    expression = module_expression(path)
    if layer in FRESH_LAYERS:  # another one will do: SyncBatchNorm, say
        guards = [f"{bind(recording, calls.plain_any)}({expression}, {bind(recording, FRESH_LAYERS, 'fresh_layers')})"]
    else:
        guards = [f"{bind(recording, calls.plain)}({expression}, {bind(recording, layer)})"]
    if hasattr(child, "inplace"):
        guards.append(f"{expression}.inplace is {child.inplace}")
    if is_sequential(child):
        guards.append(f"tuple({expression}._modules) == {tuple(child._modules)}")
    inspected = view.children.get(path)
    if inspected is not None:
        guards += inner_guards(inspected[0], recording)
    return guards


def inner_guards(inner: Recording, recording: Recording) -> list[str]:
    """The guards of what was recorded of a child, and what they call."""
    add_names(recording.namespace, inner.namespace)
    return list(inner.guards)


def replace(recording: Recording, match: Match) -> Node:
    """Put the call that a match stands for in the place of its operations, and return it."""
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
    """What Dynamo would have recorded of the fused call: its value, and the modules that all operations are in."""
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
    """An argument of a fused call, with the node or the name that it needs."""
    graph = recording.graph
    if isinstance(value, Attribute):
        return graph.get_attr(value.path)
    if isinstance(value, Casts):
        return value.argument(recording)
    if isinstance(value, Leading):
        with graph.inserting_before(value.node):  # where they were called: they may draw random numbers
            x = value.node.args[0]
            for path in value.paths:
                x = graph.call_module(path, (x,))
        return x
    return value.make(graph) if isinstance(value, Deferred) else value


# -- writing the class ------------------------------------------------------------------------------------------------


def fuse(
    module: nn.Module,
    excluded: frozenset[str] = frozenset(),
    known: dict[Any, Any] | None = None,
    rules: tuple[GraphRule, ...] | None = None,
    needed: str | None = None,
    prefix: str = "Fused",
) -> Fused:
    """Trace a module, rewrite its graph, and generate its class.

    Args:
        module: any module whose own class has a Python forward. It is not changed.
        excluded: paths of children that no fusion may absorb.
        known: classes generated so far; modules with the same class and the same rewritten code share one.
        rules: what to look for; all graph rules where not given.
        needed: a rule without which a rewritten forward is not worth having.
        prefix: of the name of the class.

    Returns:
        What was found, and a subclass of the class that the module has now.

    Raises:
        Refusal: the forward cannot be recorded.
    """
    original = original_class(module)
    known = {} if known is None else known
    rules = graph_rules() if rules is None else rules
    always = tuple(rule for rule in rules if rule.when is None)
    if needed is None and type(module) is original:
        model = fuse_masks(module, fuse_losses(module, excluded))
        if model is not None:
            return fuse_model(original, model, known)
    check_subclassing(original)
    written = fingerprint(original) if needed is None else None
    if written is not None:
        return fuse_written_norm(module, written, known)
    recordings, refusals = record_all(module, plain_forward(original))
    outcome = Fused(None)
    variants: list[tuple[Recording, str]] = []
    for recording in recordings:
        if len(always) < len(rules) and needed is None:
            variants += variant_for_some_calls(recording, module, excluded, rules, outcome)
        applied = apply_rules(recording, module, excluded, always)
        outcome.left.extend(refusal for refusal in applied.left if str(refusal) not in map(str, outcome.left))
        if applied.rules if needed is None else needed in applied.rules:
            outcome.rules |= applied.rules
            variants.append((recording, body_source(recording, module)))
    if not variants:
        if needed is None and not outcome.left and looks_like_a_norm(original):
            raise Refusal(Reason.UNKNOWN_NORM)
        if not recordings:
            raise refusals[0]
        return outcome
    outcome.left.extend(refusals)  # in some mode, or with some optional argument, the original forward answers
    outcome.cls = generate_class(type(module), f"{prefix}{original.__name__}", merge_modes(variants), known)
    return outcome


def variant_for_some_calls(
    recording: Recording, module: nn.Module, excluded: frozenset[str], rules: tuple[GraphRule, ...], outcome: Fused
) -> list[tuple[Recording, str]]:
    """The variant that rules for some calls have a part in, to be asked before the other; none where they find nothing.

    What those rules made is counted in ``outcome``.
    """
    given = next((node for node in recording.graph.nodes if node.op == "placeholder" and node.users), None)
    if given is None:
        return []
    own = Recording(copy.deepcopy(recording.graph), dict(recording.guards), dict(recording.namespace))
    made = apply_rules(own, module, excluded, rules).rules
    for_some = [rule for rule in rules if rule.when is not None and rule.name in made]
    if not for_some:
        return []
    outcome.rules |= Counter({rule.name: made[rule.name] for rule in for_some})
    first = {f"{bind(own, rule.when)}({given.target})": None for rule in for_some}
    own.guards = {**first, **own.guards}
    return [(own, body_source(own, module))]


def fuse_written_norm(module: nn.Module, found: Fingerprint, known: dict[Any, Any]) -> Fused:
    """The class for a norm that a library wrote out: its forward is one call, where its casting order holds."""
    body, graph = found.body, fx.Graph()
    recording = Recording(graph)
    x = graph.placeholder(found.parameter)
    scaled = found.weight is not None and (found.scaled is None or bool(getattr(module, found.scaled)))
    weight = graph.get_attr(str(found.weight)) if scaled else None
    call = graph.call_function(calls.written_norm, (x, weight, graph.get_attr(found.eps), body.casting))
    graph.output(call)
    operands = f"{found.parameter}, {f'self.{found.weight}' if scaled else None}"
    guards = scale_guards(found, "self", module)
    guards.append(f"{bind(recording, calls.knows)}({operands}, casting={body.casting!r}, same={body.same})")
    recording.guards = dict.fromkeys(guards)
    name = f"Fused{type(module).__name__}"
    generated = generate_class(type(module), name, [(recording, body_source(recording, module))], known)
    return Fused(generated, Counter({f"{body.op} ({body.name})": 1}))


def fuse_model(original: type[nn.Module], model: FusedModel, known: dict[Any, type[nn.Module]]) -> Fused:
    """The class for one of transformers' models, with other losses and masks."""
    if model.rules and model.key not in known:
        check_subclassing(original, harmless=pretrained_model())
        generated = type(f"Fused{original.__name__}", (original,), model.members)
        known[model.key] = seal(generated, original, model.source)
    return Fused(known.get(model.key), model.rules, left=model.left)


def record_all(module: nn.Module, forward: Any) -> tuple[list[Recording], list[Refusal]]:
    """Recordings for each set of optional tensors and, where the forward branches on it, for both modes."""
    recordings: list[Recording] = []
    refusals: list[Refusal] = []
    optional = optional_parameters(forward) if isinstance(forward, types.FunctionType) else []
    sizes = range(len(optional) + 1) if len(optional) <= ALL_COMBINATIONS else (0, 1, len(optional))
    for tensors in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in sizes):
        try:
            recordings.append(record(module, forward, training=None, tensors=frozenset(tensors)))
        except Refusal as refusal:
            if refusal.reason is not Reason.DATA_DEPENDENT and refusal.reason is not Reason.IDENTITY_TEST:
                refusals.append(refusal)
                continue
            recordings.extend(record_modes(module, forward, frozenset(tensors), refusals))
    return recordings, refusals


def record_modes(
    module: nn.Module, forward: Any, tensors: frozenset[str], refusals: list[Refusal]
) -> Iterator[Recording]:
    """A recording for ``self.training`` and one for eval, each with the mode as its first guard."""
    for training in (True, False):
        try:
            recording = record(module, forward, training=training, tensors=tensors)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        recording.guards = {"self.training" if training else "not self.training": None, **recording.guards}
        yield recording


def merge_modes(variants: list[tuple[Recording, str]]) -> list[tuple[Recording, str]]:
    """One variant for two that differ in nothing but the mode that they were recorded in."""
    merged: dict[Any, tuple[Recording, str]] = {}
    for recording, body in variants:
        guards = tuple(guard for guard in recording.guards if guard not in ("self.training", "not self.training"))
        key = (guards, body)
        if key in merged:
            recording.guards = dict.fromkeys(guards)
        merged[key] = (recording, body)
    return list(merged.values())


class ByRegistry(ast.NodeTransformer):
    """Children looked up where they are, past ``nn.Module.__getattr__``, which is Python."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_child = self.child(node) is not None
        self.generic_visit(node)
        if is_child:
            registry = ast.Attribute(node.value, "_modules", ast.Load())
            return ast.Subscript(registry, ast.Constant(node.attr), node.ctx)
        return node

    def child(self, node: ast.expr) -> nn.Module | None:
        """The module that an expression like ``self.attn.qkv`` gives, where its class has no such attribute."""
        if isinstance(node, ast.Name):
            return self.module if node.id == "self" else None
        owner = self.child(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or hasattr(type(owner), node.attr):  # type: ignore[attr-defined]
            return None
        return owner._modules.get(node.attr)  # type: ignore[attr-defined]


class SharedLookups(ast.NodeTransformer):
    """Children of ``self`` that several tests look up, looked up by the first of them."""

    def __init__(self, tests: list[ast.expr]) -> None:
        found = (node for test in tests for node in ast.walk(test))
        self.counts = Counter(ast.unparse(node) for node in found if isinstance(node, ast.Subscript))
        self.names: dict[str, str] = {}
        self.always = True  # whether what is visited is evaluated in any case

    def visit(self, node: ast.AST) -> Any:
        before = self.always
        self.always = before and not isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.GeneratorExp)
        found = super().visit(node)
        self.always = before
        return found

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        code = ast.unparse(node)
        if CHILD.fullmatch(code) is None:
            return self.generic_visit(node)
        if code in self.names:
            return ast.Name(self.names[code], ast.Load())
        self.generic_visit(node)
        if not self.always or self.counts[code] == 1:
            return node
        name = "_fastlayers_" + "_".join(re.findall(r"'(\w+)'", code))
        while name in self.names.values():
            name += "_"
        self.names[code] = name
        return ast.NamedExpr(ast.Name(name, ast.Store()), node)


def share_lookups(guards: Iterable[str]) -> list[str]:
    """The tests in a row, each of which is asked where those before it hold."""
    both = " and ".join(f"({guard})" for guard in guards)
    if not both:
        return []
    tests = list(conjuncts(ast.parse(both, mode="eval").body))
    shared = SharedLookups(tests)
    return [source_of_test(shared.visit(test)) for test in tests]


def conjuncts(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from conjuncts(value)
    else:
        yield test


def source_of_test(test: ast.expr) -> str:
    """One test in a row, a call with its arguments one below the other where they are many."""
    if isinstance(test, ast.Call) and len(test.args) > 2 and not test.keywords:
        arguments = ",\n    ".join(map(ast.unparse, test.args))
        return f"{ast.unparse(test.func)}(\n    {arguments}\n)"
    return f"({ast.unparse(test)})" if isinstance(test, ast.BoolOp | ast.IfExp) else ast.unparse(test)


def body_source(recording: Recording, module: nn.Module) -> str:
    """The statements of a recorded graph; the objects they name go to the namespace of the recording."""
    code = recording.graph.python_code("self")
    function = next(node for node in ast.parse(code.src).body if isinstance(node, ast.FunctionDef))
    add_names(recording.namespace, code.globals)
    by_registry = ByRegistry(module)
    return "\n".join(ast.unparse(by_registry.visit(statement)) for statement in function.body)


def signature_source(forward: types.FunctionType, namespace: dict[str, Any]) -> tuple[str, str]:
    """The parameters of a forward as they are declared, and as they are handed on."""
    itself, *parameters = inspect.signature(forward).parameters.values()
    declared = [itself.replace(name="self", annotation=itself.empty)]  # some call it something else
    handed: list[str] = []
    for parameter in parameters:
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, bool | int | str | None):
            name = f"_default_{parameter.name}"
            namespace[name] = default
            default = Name(name)
        declared.append(parameter.replace(annotation=parameter.empty, default=default))
        handed.append(
            f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
        )
    text = str(inspect.Signature(declared))
    return text, ", ".join(handed)


def guards_source(recording: Recording, keyword: str) -> str:
    """``keyword`` (an assignment, a return) and whether the guards of a recording hold.

    Those that cannot be asked do not hold: a child that they look at may be gone, or be a function now.
    """
    guards = "\nand ".join(share_lookups(recording.guards)) or "True"
    return "\n".join(
        [
            "try:",
            f"    {keyword} (",
            textwrap.indent(guards, " " * 8),
            "    )",
            "except (AttributeError, KeyError):",
            f"    {keyword} False",
        ]
    )


def class_source(
    name: str, present: type[nn.Module], variants: list[tuple[Recording, str]], namespace: dict[str, Any]
) -> str:
    base = present.__name__ if present.__name__.isidentifier() else "Original"
    while namespace.setdefault(base, present) is not present:
        base += "_"
    declared, handed = signature_source(present.forward, namespace)  # type: ignore[arg-type]
    lines = [f"class {name}({base}):", f"    def forward{declared}:"]
    for recording, body in variants:
        lines.append(textwrap.indent(guards_source(recording, f"{HOLDS} ="), " " * 8))
        lines.append(f"        if {HOLDS}:")
        lines.append(textwrap.indent(body, " " * 12))
    lines.append(f"        return super().forward({handed})")
    return "\n".join(lines) + "\n"


def generate_class(
    present: type[nn.Module], name: str, variants: list[tuple[Recording, str]], known: dict[Any, Any]
) -> type[nn.Module]:
    """A subclass of the class that a module has now, which may be a generated one, standing for its own class."""
    original = present.__dict__.get("__fastlayers_original__", present)
    namespace: dict[str, Any] = {}
    for recording, _ in variants:
        add_names(namespace, recording.namespace)
    name = name if name.isidentifier() else "Fused"
    while name in namespace:
        name += "_"
    source = class_source(name, present, variants, namespace)
    key = (present, source, *sorted((name, id(value)) for name, value in namespace.items()))
    if key in known:
        return known[key]  # type: ignore[no-any-return]
    scope = dict(namespace)
    exec(compile(source, show_source(original.__qualname__, source), "exec"), scope)
    generated = scope[name]
    names = inspect.unwrap(generated.__dict__["forward"]).__code__.co_varnames
    if clash := set(names) & (set(namespace) | GUARD_BUILTINS):
        raise Refusal(Reason.SIGNATURE, f"a variable called {', '.join(sorted(clash))} hides what the guards use")
    generated.forward.__doc__ = original.forward.__doc__
    known[key] = seal(generated, original, source)
    return generated


# -- the class that takes the place of another ------------------------------------------------------------------------


def is_patched(module: nn.Module) -> bool:
    return "__fastlayers_original__" in type(module).__dict__


def is_folded(module: nn.Module) -> bool:
    return "__fastlayers_unfolded__" in type(module).__dict__


def become(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Give a module another of the classes that it may have: its own, or one that was made for it.

    A bound forward that something put on the instance goes along: accelerate's hooks keep one, to call and to put back.

    Returns:
        False, and nothing was changed, where a wrapper that was put on the instance calls the present forward.
    """
    present = type(module)
    kinds: Any = present.__mro__[: present.__mro__.index(original_class(module)) + 1]
    forwards = [kind.forward for kind in kinds]
    bound = [
        name
        for name, value in vars(module).items()
        if isinstance(value, types.MethodType) and value.__self__ is module and value.__func__ in forwards
    ]
    if "forward" not in bound and any(function in forwards for function in wrapped(vars(module).get("forward"))):
        return False
    for name in bound:
        vars(module)[name] = types.MethodType(cls.forward, module)
    module.__class__ = cls
    return True


def wrapped(function: Any) -> Iterator[Any]:
    """A function and, as far as it says what it wraps, those inside of it."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):  # calls this, whatever it says
            function = function.func
        yield function
        function = getattr(function, "__wrapped__", None)


def called_by_class(module: nn.Module) -> bool:
    """Whether a call of a module runs the forward of its class; on the instance may be the same, which hooks leave."""
    present: Any = module.forward
    return getattr(present, "__self__", None) is module and present.__func__ is type(module).forward


def check_subclassing(original: type[nn.Module], harmless: type[nn.Module] | None = None) -> None:
    """Creating a subclass must not run code of the class: a registry would list the generated one."""
    if type(original) not in (type, abc.ABCMeta):
        raise Refusal(Reason.CLASS_HOOKS, f"metaclass {type(original).__name__}")
    for cls in original.__mro__:
        known = cls is harmless or cls.__module__ in ("builtins", "typing")
        if "__init_subclass__" in cls.__dict__ and not known and (cls.__module__, cls.__name__) != CHECKPOINTING:
            raise Refusal(Reason.CLASS_HOOKS, f"{cls.__name__}.__init_subclass__")


def swap_class(rule: ModuleRule) -> type[nn.Module]:
    """The class that a module rule puts in place of a layer: the fused class, which remembers the layer's own."""
    return seal(type(rule.fused.__name__, (rule.fused,), {"__doc__": rule.fused.__doc__}), rule.layer, None)


def shown_name(cls: type[nn.Module]) -> str:
    """What a report and ``print(model)`` call a sealed class."""
    return cls.__fastlayers_name__  # type: ignore[attr-defined, no-any-return]


def seal(generated: type[nn.Module], original: type[nn.Module], source: str | None) -> type[nn.Module]:
    """Make a class undoable and copyable and, in a pickle, its original: a file loads where it never existed.

    It takes the name and the module of its original, by which libraries look classes up: the initialisation of weights,
    FSDP's and accelerate's lists of blocks that must not be split, torch.fx's layers that are not looked into, the
    shifted labels of transformers' Trainer. Only ``repr`` says what it is.
    """

    def represent(self: nn.Module) -> str:
        text = original.__repr__(self)
        return name + text.removeprefix(original.__name__) if text.startswith(original.__name__) else text

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        reduced = super(generated, self).__reduce_ex__(protocol)  # type: ignore[misc]
        if isinstance(reduced, str) or type(self) is not generated:
            return reduced
        function, args, *rest = reduced
        if function is NEW_OBJECT and args == (generated,):
            # pickle insists on the object's own class there; this is the same call by another name.
            function, args = RECONSTRUCT, (original, object, None)
        args = tuple(original if arg is generated else arg for arg in args)
        return (original if function is generated else function, args, *rest)

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        theirs: Callable[..., Any] | None = getattr(super(generated, self), "__deepcopy__", None)  # type: ignore[misc]
        if theirs is not None:
            copied = theirs(memo)
            if type(copied) is original:
                copied.__class__ = type(self)
            return copied
        if type(self) is not generated:  # of a parametrization, which torch copies so and refuses to reduce
            copied = type(self).__new__(type(self))
            memo[id(self)] = copied
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
            return copied
        reduced: Any = super(generated, self).__reduce_ex__(4)  # type: ignore[misc]
        function, args, state = reduced[:3]
        copied = function(*copy.deepcopy(args, memo))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def prepare_scriptable(self: nn.Module) -> Any:
        raise PatchError(
            f"{name} is a patched module, which torch.jit.script cannot compile: "
            "call fastlayers.unpatch_model(model) before it; torch.jit.trace and torch.export take patched models"
        )

    name = generated.__name__
    for attribute, value in (
        ("__repr__", represent),
        ("__reduce_ex__", reduce_ex),
        ("__deepcopy__", deepcopy),
        ("__prepare_scriptable__", prepare_scriptable),
        ("__fastlayers_original__", original),
        ("__fastlayers_name__", name),
        ("__fastlayers_source__", source),
    ):
        setattr(generated, attribute, value)
    generated.__module__, generated.__name__ = original.__module__, original.__name__
    generated.__qualname__ = original.__qualname__
    if source is not None:
        generated.__doc__ = original.__doc__
    return generated
