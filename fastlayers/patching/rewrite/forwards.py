"""Whole forwards: recorded in each variant, rewritten, and generated as a class."""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fastlayers.patching.capture.lookups import inside_layer, member, same
from fastlayers.patching.capture.recording import Given, Recording, bind, binder
from fastlayers.patching.capture.syntax import optional_parameters
from fastlayers.patching.capture.trace import record
from fastlayers.patching.ir.fingerprints import Fingerprint, fingerprint, norm_by_hand
from fastlayers.patching.libraries.adapters import RewrittenModel, adapters, plain_forward
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.classes import below_region, check_subclassing, fused_or_stock, generated_class
from fastlayers.patching.rewrite.engine import Fused, apply_rules
from fastlayers.patching.rewrite.generate import body_source, generate_class
from fastlayers.patching.rewrite.misses import nearest_miss
from fastlayers.patching.rewrite.safety import scale_guards
from fastlayers.patching.rules import graph_rules, idle_tests
from fastlayers.patching.rules.base import GraphRule
from fastlayers.patching.runtime import norm_calls
from fastlayers.patching.runtime.checks import must_be_stock, original_class

__all__ = ["fuse"]

#: With more optional tensors than this, a forward is recorded with none, with each alone, and with all of them.
ALL_COMBINATIONS = 2
#: Why a forward cannot be recorded that takes None for a tensor.
LACKS = "it needs an argument or an attribute that is None"


def fuse(
    module: nn.Module,
    excluded: frozenset[str] = frozenset(),
    known: dict[Any, Any] | None = None,
    rules: tuple[GraphRule, ...] | None = None,
    needed: str | None = None,
    prefix: str = "Fused",
    bare: bool = False,
) -> Fused:
    """Trace a module, rewrite its graph, and generate its class.

    Args:
        module: any module whose own class has a Python forward. It is not changed.
        excluded: paths of children that no fusion may absorb.
        known: the classes generated so far. Modules with the same class and the same rewritten code share one.
        rules: the rules to apply; all graph rules by default.
        needed: a rule that a rewritten forward must have used.
        prefix: of the name of the class.
        bare: whether to record calls that give nothing for ``*args`` and ``**kwargs``.

    Returns:
        The outcome, with a subclass of the present class of the module, or of the one below its region.

    Raises:
        Refusal: the forward cannot be recorded.
    """
    original = original_class(module)
    known = {} if known is None else known
    rules = graph_rules() if rules is None else rules
    if needed is None and type(module) is original:
        for adapter in adapters():
            model = adapter.rewrite_model(module, excluded)
            if model is not None:
                return fuse_model(original, model, known)
    check_subclassing(original)
    written = fingerprint(original) if needed is None else None
    if written is not None:
        return fuse_handwritten_norm(module, written, known)
    recordings, refusals = record_all(module, plain_forward(original), bare)
    outcome = Fused(None)
    variants: list[tuple[Recording, str]] = []
    absorbed: list[frozenset[str]] = []
    for recording in recordings:
        applied = apply_rules(recording, module, excluded, rules)
        outcome.left.extend(refusal for refusal in applied.left if str(refusal) not in map(str, outcome.left))
        if applied.rules if needed is None else needed in applied.rules:
            outcome.rules |= applied.rules
            variants.append((recording, body_source(recording, module)))
        absorbed.append(applied.absorbed)
    if not variants:
        if needed is None and not outcome.left and (statement := norm_by_hand(original)):
            raise Refusal(Reason.UNKNOWN_NORM, statement)
        if not recordings:
            raise Refusal(refusals[0].reason, refusals[0].detail)
        if needed is None and not outcome.left:
            misses = (nearest_miss(recording, module, rules) for recording in recordings)
            outcome.left.append(Refusal(Reason.NOTHING_TO_FUSE, next(filter(None, misses), "")))
        return outcome
    if not refusals:
        outcome.absorbed = frozenset.intersection(*absorbed)
    outcome.left.extend(refusals)  # The original forward runs in these modes, or with these optional arguments.
    name, idle = f"{prefix}{original.__name__}", idle_tests(outcome.rules)
    outcome.cls = generate_class(below_region(type(module)), name, merge_modes(variants), known, idle)
    return outcome


def fuse_handwritten_norm(module: nn.Module, found: Fingerprint, known: dict[Any, Any]) -> Fused:
    """The class for a handwritten norm: its forward is one call, where its casting order holds."""
    body, graph = found.body, fx.Graph()
    recording = Recording(graph)
    x = graph.placeholder(found.parameter)
    scaled = found.weight is not None and (found.scaled is None or bool(getattr(module, found.scaled)))
    weight = graph.get_attr(str(found.weight)) if scaled else None
    call = graph.call_function(norm_calls.handwritten_norm, (x, weight, graph.get_attr(found.eps), body.casting))
    graph.output(call)
    operands = f"{found.parameter}, {f'self.{found.weight}' if scaled else None}"
    guards = [
        *scale_guards(found, "self", module),
        *inside_layer(original_class(module), "self", binder(recording.namespace)),
    ]
    guards.append(
        f"{bind(recording, norm_calls.computes_norm)}({operands}, casting={body.casting!r}, same={body.same})"
    )
    recording.guards = dict.fromkeys(guards)
    variants = [(recording, body_source(recording, module))]
    generated = generate_class(type(module), f"Fused{type(module).__name__}", variants, known, ())
    return Fused(generated, Counter({f"{body.op} ({body.name})": 1}))


def fuse_model(original: type[nn.Module], model: RewrittenModel, known: dict[Any, type[nn.Module]]) -> Fused:
    """The class for a model that an adapter has rewritten."""
    if model.rules and model.key not in known:
        check_subclassing(original, model.harmless)
        members = {**model.members, "__fastlayers_omits__": model.omits, "__fastlayers_source__": model.source}
        if "forward" in members:
            bind = binder(bound := dict[str, Any]())
            unchanged = same(member(original, "forward", bind), original.forward, bind)
            unchanged = f"not {bind(must_be_stock, 'must_be_stock')}() and {unchanged}"
            members["forward"] = fused_or_stock(members["forward"], unchanged, original, bound)
        known[model.key] = generated_class(f"Fused{original.__name__}", original, members)
    return Fused(known.get(model.key), model.rules, left=model.left)


def record_all(module: nn.Module, forward: Any, bare: bool) -> tuple[list[Recording], list[Refusal]]:
    """Recordings for each set of optional tensors, and for arguments that are no tensors if the forward asks."""
    recordings: list[Recording] = []
    refusals: list[Refusal] = []
    optional = optional_parameters(forward) if isinstance(forward, types.FunctionType) else []
    sizes = range(len(optional) + 1) if len(optional) <= ALL_COMBINATIONS else (0, 1, len(optional))
    for tensors in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in sizes):
        given = Given(frozenset(tensors), bare=bare)
        found = record_given(module, forward, given, refusals)
        asked = frozenset[str]().union(*(recording.asked for recording in found))
        recordings += found
        if asked:  # Most forwards refuse what is no tensor.
            recordings += record_given(module, forward, replace(given, others=asked), [])
    if recordings:  # A call without an argument that it needs does not occur.
        refusals = [refusal for refusal in refusals if refusal.detail != LACKS]
    return recordings, refusals


def record_given(module: nn.Module, forward: Any, given: Given, refusals: list[Refusal]) -> list[Recording]:
    """The recording for such calls or, if the forward branches on the mode, those for both modes."""
    try:
        return [record(module, forward, given, training=None)]
    except Refusal as refusal:
        if refusal.reason is Reason.DATA_DEPENDENT or refusal.reason is Reason.IDENTITY_TEST:
            return list(record_modes(module, forward, given, refusals))
        if refusal.reason is Reason.TRACE_FAILED and "'NoneType' object" in refusal.detail:
            refusal = Refusal(Reason.TRACE_FAILED, LACKS)
        refusals.append(refusal.kept())
        return []


def record_modes(module: nn.Module, forward: Any, given: Given, refusals: list[Refusal]) -> Iterator[Recording]:
    """A recording for ``self.training`` and one for eval, each with the mode as its first guard."""
    for training in (True, False):
        try:
            recording = record(module, forward, given, training)
        except Refusal as refusal:
            refusals.append(refusal.kept())
            continue
        recording.guards = {"self.training" if training else "not self.training": None, **recording.guards}
        yield recording


def merge_modes(variants: list[tuple[Recording, str]]) -> list[tuple[Recording, str]]:
    """Merge variants that differ only in the mode of their recording."""
    merged: dict[Any, tuple[Recording, str]] = {}
    for recording, body in variants:
        guards = tuple(guard for guard in recording.guards if guard not in ("self.training", "not self.training"))
        key = (guards, body)
        if key in merged:
            recording.guards = dict.fromkeys(guards)
        merged[key] = (recording, body)
    return list(merged.values())
