"""Every fact that a region, a graph, a rule and the loss of a head rely on, and what tests it.

``tests/patching/test_facts.py`` replaces each guard by one that always holds, and sees that a patched model is wrong
then where it was right. A fact without a guard has the reason why it needs none. docs/guarantees.md says it in
sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

__all__ = ["FACTS", "Fact"]

#: Where a guard is, as ``room.module:name``, and what it, or the ``check`` of a class, gives where the fact holds.
Guards: TypeAlias = Mapping[str, Any]

LOOKUPS, READERS, REGIONS = "patching.capture.lookups:", "patching.regions.readers:", "patching.regions.region:"
CHECKS, HEADS, STATE = "patching.runtime.checks:", "patching.libraries.heads:", "graphs.state:State."

VALUES: Guards = {READERS + "values_of": [], READERS + "floats_of": []}
EQUAL: Guards = {"patching.capture.recording:equality": "True"}
NAMED: Guards = {LOOKUPS + "same": "True"}
METHOD, TENSORS, HIDDEN = ({LOOKUPS + f: ()} for f in ("same_method", "same_tensor_method", "not_shadowed"))
UNTOUCHED: Guards = {CHECKS + "untouched": True, CHECKS + "no_hooks": True}
CONTENTS, NUMBERS, HOOKS, GLOBALS, FUNCTIONS, IN_PLACE, GEOMETRY, SWITCHES = (
    {f"{STATE}{name}": True}
    for name in (
        "same_contents", "same_numbers", "same_hooks", "same_globals", "same_functions", "is_in_place", "same_tensors",
        "same_modes",
    )
)  # fmt: skip
MODES: Guards = {"graphs.module:other_modes": "", **GEOMETRY}
PLAIN, KNOWN = {CHECKS + "plain": True}, {HEADS + "is_torchs_linear": True}
CALLS: Guards = {CHECKS + "calls_are_torchs": True}


class Fact(NamedTuple):
    """Something that may change between two calls, in the words of the page; the guards of what relies on it; why the
    others need none."""

    what: str
    region: Guards | None = None
    graph: Guards | None = None
    rule: Guards | None = None
    head: Guards | None = None
    reason: str = ""


FACTS = (
    Fact(
        "shapes, strides, dtypes, devices and `requires_grad` of inputs, parameters and buffers",
        {REGIONS + "TensorGuards": True}, GEOMETRY, None, {HEADS + "is_plain": True},
        "rewritten code calls functions that look at their tensors",
    ),
    Fact(
        "which of them are one tensor", {READERS + "repeated": []}, IN_PLACE,
        reason="rewritten code reads each from its module",
    ),
    Fact("attributes and items that Python code reads", VALUES, CONTENTS, EQUAL),
    Fact("1, 1.0 and True differ", {READERS + "types_of": []}, NUMBERS, EQUAL),
    Fact("0.0 from -0.0", {READERS + "zeros_of": []}, NUMBERS, EQUAL),
    Fact("hooks on a module", {READERS + "HOOKS": ()}, HOOKS, UNTOUCHED, {CHECKS + "no_hooks": True}),
    Fact("on all modules", {READERS + "GLOBAL_HOOKS": ()}, HOOKS, UNTOUCHED, {CHECKS + "no_hooks": True}),
    Fact("a `forward` on an instance", {READERS + "own_calls": []}, CONTENTS, UNTOUCHED, PLAIN),
    Fact(
        "the class of a child", {**VALUES, **NAMED}, CONTENTS, UNTOUCHED,
        {**PLAIN, HEADS + "name_of": "torch.nn.modules.linear.Linear"},
    ),
    Fact("a replaced method", METHOD, CONTENTS, METHOD),
    Fact("a global variable", {**NAMED, **VALUES}, GLOBALS, {**NAMED, **EQUAL}),
    Fact("the code or a default of a function", NAMED, FUNCTIONS, NAMED),
    Fact("a function of torch", {LOOKUPS + "inside_function": ()}, GLOBALS, {LOOKUPS + "inside_layer": ()}, KNOWN),
    Fact("a method or an operator of tensors", TENSORS, CONTENTS, TENSORS),
    Fact(
        "`nn.Module.__call__` or `_call_impl`", {**CALLS, **NAMED}, CONTENTS, {**UNTOUCHED, **NAMED},
        {CHECKS + "no_hooks": True, **CALLS, **KNOWN},
    ),
    Fact("a replaced `forward` of a layer's class", NAMED, CONTENTS, NAMED, {HEADS + "has_own_forward": True, **KNOWN}),
    Fact("an attribute that hides a child or a parameter", HIDDEN, CONTENTS, HIDDEN),
    Fact(
        "autocast, grad mode, inference mode, deterministic algorithms, default dtype",
        {REGIONS + "GlobalStateGuard": True}, SWITCHES, reason="rewritten code asks for them in each call",
    ),
    Fact(
        "the attentions that torch may choose", {REGIONS + "attentions": None}, SWITCHES,
        reason="rewritten code calls torch's function",
    ),
    Fact(
        "switches of cuDNN and the precision of float32 products", None, SWITCHES,
        reason="operations of torch ask for them in each call",
    ),
    Fact("the forced backend", reason="a change of it forgets all recordings, see backends.on_change"),
    Fact(
        "modes of dispatch", {"ops.modes:needs_operations": False}, MODES,
        reason="they see fused ops as operations of torch.ops.fastlayers",
    ),
    Fact("of `__torch_function__`", {REGIONS + "function_modes": 0}, MODES, {CHECKS + "must_be_stock": False}),
    Fact(
        "transforms of torch.func, forward-mode derivatives, tracing", {"ops.guard:must_decompose": False}, MODES,
        reason="each op asks for them",
    ),
    Fact("compilation", reason="a region and a graph ask for it first; rewritten code can be compiled"),
    Fact(
        "arguments that are no tensors",
        reason="they are part of the key of a recording and of a graph, as is what a cache holds for a layer",
    ),
    Fact("the values of tensors", reason="operations read them; code that reads one in Python is no region"),
)  # fmt: skip
