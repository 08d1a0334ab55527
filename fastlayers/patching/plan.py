"""The walk over a model: it decides what happens to each module, swaps classes and swaps them back.

The class of a patched module remembers the original class. Nothing else is stored, neither on the module nor globally,
so a deep copy can be unpatched like its original, and unpatching a module is one assignment.
"""

from __future__ import annotations

import inspect
import itertools
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.ir.spellings import FRESH_LAYERS_OF_LIBRARIES
from fastlayers.patching.libraries.adapters import adapters
from fastlayers.patching.reasons import Left, PatchError, PatchWarning, Reason, Refusal
from fastlayers.patching.regions.region import FEW_MODULES, region_class, size_of, text_of
from fastlayers.patching.report import QUIET, PatchReport, Row
from fastlayers.patching.rewrite.alike import Outcomes
from fastlayers.patching.rewrite.classes import (
    Generated,
    absorbed_by,
    become,
    below_region,
    called_by_class,
    check_subclassing,
    is_folded,
    is_patched,
    is_sharded,
    shown_name,
    swap_class,
    without_sharding,
)
from fastlayers.patching.rewrite.engine import Fused
from fastlayers.patching.rewrite.forwards import fuse
from fastlayers.patching.rewrite.segments import fuse_segments
from fastlayers.patching.rules import FOLDING_RULES, graph_rules, module_rules
from fastlayers.patching.rules.base import ModuleRule
from fastlayers.patching.runtime.checks import original_class

__all__ = [
    "FilterFn",
    "Pattern",
    "carry_out",
    "left_alone",
    "make_plan",
    "patched",
    "refuse_kind",
    "restore",
    "stays_patched",
    "swap",
    "unpatched",
    "warn_of_stuck",
]

Pattern: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]

FilterFn: TypeAlias = Callable[[nn.Module, str], bool]

QUANTIZED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic",
    "torch.nn.quantized",
    "bitsandbytes",
    "torchao",
)

#: Modules in a region at most. Modules that are alike share its code, and blocks are alike where models are not.
MAX_MODULES = 80
#: The same for a whole model in training, whose gradients all come at the end of its backward: DDP sends the first ones
#: before. And for a Sequential, which computes nothing itself.
MAX_WHOLE = FEW_MODULES
#: Why a module must be called as it is, also from inside a region.
CLOSED = frozenset(
    {
        Reason.SCRIPTED,
        Reason.GRAPH_MODULE,
        Reason.QUANTIZED,
        Reason.UNINITIALIZED,
        Reason.WRAPPER,
        Reason.FORWARD_REPLACED,
    }
)

WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")


class Selection:
    """``include``, ``exclude`` and ``filter_fn``, and which of their patterns have matched nothing so far."""

    def __init__(self, include: Pattern | None, exclude: Pattern | None, filter_fn: FilterFn | None) -> None:
        self.include = patterns("include", include)
        self.exclude = patterns("exclude", exclude)
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"filter_fn must be a function of (module, name), got {type(filter_fn).__name__}")
        self.filter_fn = filter_fn
        self.unmatched: dict[str | type[nn.Module], None] = dict.fromkeys((*self.include, *self.exclude))

    def _matches(self, chosen: tuple[str | type[nn.Module], ...], lineage: list[tuple[str, nn.Module]]) -> bool:
        hit = False
        for pattern in chosen:
            for name, module in lineage:
                if fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern):
                    self.unmatched.pop(pattern, None)
                    hit = True
        return hit

    def excludes(self, lineages: list[list[tuple[str, nn.Module]]]) -> bool:
        return sum(self._matches(self.exclude, lineage) for lineage in lineages) > 0

    def takes(self, lineages: list[list[tuple[str, nn.Module]]]) -> bool:
        included = sum(self._matches(self.include, lineage) for lineage in lineages) > 0 or not self.include
        if self.excludes(lineages) or not included:
            return False
        name, module = lineages[0][-1]
        return self.filter_fn is None or bool(self.filter_fn(module, name))


def patterns(option: str, given: Pattern | None) -> tuple[str | type[nn.Module], ...]:
    if given is None:
        return ()
    if isinstance(given, str | type):
        given = (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"{option} must be a name pattern, a module class or a list of them, got {given!r}")
    chosen = tuple(given)
    for pattern in chosen:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(f"{option} must hold name patterns and module classes, got {pattern!r}")
    return chosen


def lineage(by_name: dict[str, nn.Module], name: str) -> list[tuple[str, nn.Module]]:
    """The module called ``name`` and the modules around it, outermost first, without the model itself."""
    return [(path, by_name[path]) for path in itertools.accumulate(name.split("."), "{}.{}".format)]


@dataclass
class Step:
    """The plan for one module: a class to swap in, or the reason why there is none."""

    module: nn.Module
    row: Row
    cls: type[nn.Module] | None = None


@dataclass
class Plan:
    steps: list[Step]
    report: PatchReport
    warnings: list[str]


def make_plan(
    model: nn.Module,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    folding: bool = False,
) -> Plan:
    """What :func:`patch_model` or, if ``folding``, :func:`fold_batch_norm` is to do with every module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    selection = Selection(include, exclude, filter_fn)
    # Folded weights are computed from whole parameters: what FSDP2 has sharded is not folded.
    with nullcontext() if folding else without_sharding(model.modules()):
        return plan_steps(model, selection, folding)


def plan_steps(model: nn.Module, selection: Selection, folding: bool) -> Plan:
    plan_one: Callable[..., Step] = plan_folding if folding else partial(plan_module, outcomes=Outcomes())
    done = is_folded if folding else stays_patched
    by_name = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, module in by_name.items():
        names.setdefault(id(module), []).append(name)
    modules = {key: by_name[aliases[0]] for key, aliases in names.items()}
    lineages = {key: [lineage(by_name, name) for name in aliases] for key, aliases in names.items()}
    banned = {key for key in modules if selection.excludes(lineages[key])}
    classes = Generated()
    steps: list[Step] = []
    scripted: tuple[str, ...] = ()
    for key, module in modules.items():
        name, *aliases = names[key]
        row = Row(name, original_class(module).__name__, aliases=tuple(aliases))
        if name.startswith(scripted) and scripted:
            steps.append(Step(module, left_alone(row, Refusal(Reason.SCRIPTED, "inside"))))
            continue
        if isinstance(module, torch.jit.ScriptModule):
            scripted = (*scripted, f"{name}." if name else "")
        if done(module):
            steps.append(Step(module, already(row, module)))
        elif not selection.takes(lineages[key]):
            steps.append(Step(module, left_alone(row, Refusal(Reason.NOT_SELECTED))))
        else:
            excluded = frozenset(path for path, child in module.named_modules() if id(child) in banned)
            try:
                steps.append(plan_one(module, row, excluded, classes))
            except Exception as error:
                failed = Refusal(Reason.RECORDING_FAILED, text_of("tracing", error))
                steps.append(Step(module, left_alone(row, failed)))
    if not folding:
        add_regions(steps, banned, classes)
    mark_absorbed(steps)
    unmatched = tuple(p if isinstance(p, str) else p.__name__ for p in selection.unmatched)
    report = PatchReport(tuple(step.row for step in steps), original_class(model).__name__, unmatched)
    return Plan(steps, report, plan_warnings(report, steps, "folded" if folding else "patched"))


def add_regions(steps: list[Step], banned: set[int], classes: dict[Any, Any]) -> None:
    """Let forwards run as regions: those of the modules that are not too large.

    Where no rule fuses anything, a region still saves the host's time, and kernels are generated for what is in it.
    """
    by_module = {id(step.module): step for step in steps}
    for step in steps:
        module, original = step.module, original_class(step.module)
        inside = [by_module[id(child)] for child in module.modules()]
        contains = isinstance(module, nn.Sequential) and original.forward is nn.Sequential.forward
        size = size_of(module)
        infers_only = not step.row.fqn and size > MAX_WHOLE
        if (
            not 2 <= size <= (MAX_WHOLE if contains else MAX_MODULES)
            or any(other.row.reason in CLOSED or id(other.module) in banned for other in inside)
            or step.row.reason is Reason.NOT_SELECTED
            or "__fastlayers_region__" in vars(type(module))
            or not has_own_forward(original)
            or (not step.row.fqn and takes_any_keyword(original))
        ):
            continue
        try:
            refuse_kind(module)
            check_subclassing(original)
            kind = tuple(map(original_class, module.modules())) if contains else None
            cls = region_class(step.cls or type(module), classes, kind, infers_only)
        except Refusal:
            continue
        if step.row.became is None:
            cls.__fastlayers_left__ = step.row.left  # type: ignore[attr-defined]
            note_reason(cls, step.row)
        if is_folded(module):
            cls.__fastlayers_unfolded__ = type(module).__fastlayers_unfolded__  # type: ignore[attr-defined]
        step.cls = cls


def note_reason(cls: type[nn.Module], row: Row) -> None:
    """Note why the forward of a class was left alone; without a detail if the nearest misses of its modules differ."""
    known, detail = vars(cls).get("__fastlayers_reason__"), row.detail
    if known is not None and row.reason is Reason.NOTHING_TO_FUSE and known.detail != detail:
        detail = ""
    if known is None or known.reason is not row.reason:
        cls.__fastlayers_reason__ = Left(row.reason, detail)  # type: ignore[attr-defined]
    else:
        known.detail = detail


def mark_absorbed(steps: list[Step]) -> None:
    """Say in the rows of children that the forward of their parent does their work. Then they miss nothing."""
    classes = {step.module: step.cls or type(step.module) for step in steps}
    names = {step.module: step.row.fqn for step in steps}
    owners = absorbed_by(classes)
    for step in steps:
        owner = owners.get(step.module)
        if owner is not None and step.row.became is not None:
            step.row = replace(step.row, absorbed_by=names[owner])
        elif owner is not None and step.row.reason is Reason.NOTHING_TO_FUSE:
            step.row = replace(step.row, detail="")


def takes_any_keyword(cls: type[nn.Module]) -> bool:
    """Whether a forward has ``**kwargs``. torch.fx traces that of a whole model only if nothing passes them on."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.forward).parameters.values())


def left_alone(row: Row, refusal: Refusal) -> Row:
    return Row(row.fqn, row.was, reason=refusal.reason, detail=refusal.detail, aliases=row.aliases)


def already(row: Row, module: nn.Module) -> Row:
    cls = type(module)
    fused, left = getattr(cls, "__fastlayers_rules__", ()), getattr(cls, "__fastlayers_left__", ())
    if is_folded(module) and cls.__fastlayers_unfolded__ is original_class(module):  # type: ignore[attr-defined]
        left = (*left, (Reason.FOLDED, ""))
    note = getattr(cls, "__fastlayers_reason__", Left())
    became = shown_name(cls) if note.reason is None else None
    return Row(row.fqn, row.was, became, fused, note.reason, note.detail, left=left, aliases=row.aliases)


def plan_module(
    module: nn.Module, row: Row, excluded: frozenset[str], classes: dict[Any, Any], outcomes: Outcomes
) -> Step:
    try:
        refuse_kind(module)
        rules = [rule for rule in layer_rules() if type(module) is rule.layer]
        if rules:
            gaining = next((rule for rule in rules if rule.gains(module)), None)
            if gaining is None:
                raise Refusal(Reason.SAVES_NOTHING)
            return plan_swap(module, row, gaining, classes)
        if not has_own_forward(type(module)):
            raise Refusal(Reason.SUBCLASS if is_subclass(module) else Reason.NO_RULE)
        outcome = outcomes.find(module, excluded, lambda: fuse_forward(module, excluded, classes))
    except Refusal as refusal:
        return Step(module, left_alone(row, refusal))
    return step_of(module, row, outcome)


def layer_rules() -> tuple[ModuleRule, ...]:
    """The module rules, with those for the layers of libraries."""
    of_libraries = (pair for adapter in adapters() for pair in adapter.fused_layers().items())
    return (*module_rules(), *(rule_of(layer, fused) for layer, fused in of_libraries))  # type: ignore[arg-type]


@cache
def rule_of(layer: type[nn.Module], fused: type[nn.Module]) -> ModuleRule:
    FRESH_LAYERS_OF_LIBRARIES.add(layer)
    return ModuleRule(fused.__name__.removeprefix("Fused"), f"{layer.__name__} -> {fused.__name__}", layer, fused)


def fuse_forward(module: nn.Module, excluded: frozenset[str], classes: dict[Any, Any]) -> Fused:
    """Fuse a forward as a whole or, where it cannot be recorded or has nothing to fuse, segments of it."""
    try:
        outcome = fuse(module, excluded, classes)
    except Refusal as refusal:
        parts = fuse_segments(module, excluded, classes)
        if parts is not None:
            return parts
        if refusal.reason is Reason.SIGNATURE:
            return fuse(module, excluded, classes, bare=True)
        raise
    if outcome.cls is None:
        return fuse_segments(module, excluded, classes, recorded=True) or outcome
    return outcome


def plan_folding(module: nn.Module, row: Row, excluded: frozenset[str], classes: dict[Any, Any]) -> Step:
    """:func:`plan_module` for folding BatchNorms. A patched module stays patched where nothing is folded, and what ran
    as a region runs as one with its folded norms."""
    present, original = type(module), original_class(module)
    try:
        refuse_kind(module)
        if not has_own_forward(original):
            raise Refusal(Reason.NO_RULE)
        rules = (*FOLDING_RULES, *(graph_rules() if is_patched(module) else ()))
        outcome = fuse(module, excluded, classes, rules, needed=FOLDING_RULES[0].name, prefix="Folded")
        if outcome.cls is not None and below_region(present) is not present:
            outcome.cls = region_class(outcome.cls, classes)
    except Refusal as refusal:
        return Step(module, left_alone(row, refusal))
    if outcome.cls is not None:
        outcome.cls.__fastlayers_unfolded__ = present  # type: ignore[attr-defined]
    return step_of(module, row, outcome)


def step_of(module: nn.Module, row: Row, outcome: Fused) -> Step:
    left = tuple((refusal.reason, refusal.detail) for refusal in outcome.left if refusal.reason not in QUIET)
    if outcome.cls is None:
        if left:
            reason, detail = left[0]
        elif is_subclass(module):
            reason, detail = Reason.SUBCLASS, ""
        else:
            nothing = next(iter(outcome.left), Refusal(Reason.NOTHING_TO_FUSE))
            reason, detail = nothing.reason, nothing.detail if nothing.reason is Reason.NOTHING_TO_FUSE else ""
        return Step(module, Row(row.fqn, row.was, reason=reason, detail=detail, left=left[1:], aliases=row.aliases))
    fused = tuple(outcome.rules.items())
    outcome.cls.__fastlayers_rules__ = fused  # type: ignore[attr-defined]
    outcome.cls.__fastlayers_left__ = left  # type: ignore[attr-defined]
    outcome.cls.__fastlayers_absorbs__ = outcome.absorbed  # type: ignore[attr-defined]
    became = shown_name(outcome.cls)
    return Step(module, Row(row.fqn, row.was, became, fused, left=left, aliases=row.aliases), outcome.cls)


def plan_swap(module: nn.Module, row: Row, rule: ModuleRule, classes: dict[Any, Any]) -> Step:
    key = rule, rule.layer.forward
    if key not in classes:
        classes[key] = swap_class(rule)
    became = shown_name(classes[key])
    return Step(module, Row(row.fqn, row.was, became, ((rule.name, 1),), aliases=row.aliases), classes[key])


def is_subclass(module: nn.Module) -> bool:
    """Whether a module is an instance of a user's subclass of a layer that a rule replaces."""
    own = original_class(module)
    return any(issubclass(own, rule.layer) and own not in (rule.layer, rule.fused) for rule in layer_rules())


def has_own_forward(cls: type[nn.Module]) -> bool:
    """Whether a class has a Python forward of its own, or Sequential's. Layers of torch and fastlayers have none."""
    forward = cls.forward
    if forward is nn.Sequential.forward:
        return True
    return isinstance(forward, types.FunctionType) and not (forward.__module__ or "").startswith(
        ("torch.", "fastlayers.modules.")
    )


def refuse_kind(module: nn.Module) -> None:
    """Raise for kinds of modules whose class must not be swapped, whatever their forward does."""
    package = type(module).__module__
    if isinstance(module, torch.jit.ScriptModule):
        raise Refusal(Reason.SCRIPTED)
    if isinstance(module, fx.GraphModule):
        raise Refusal(Reason.GRAPH_MODULE)
    if package.startswith(QUANTIZED) and type(module).__name__ != "FloatFunctional":  # It adds, until it is converted.
        raise Refusal(Reason.QUANTIZED)
    if any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
        raise Refusal(Reason.UNINITIALIZED)
    if package.startswith(WRAPPERS) or is_sharded(type(module)):
        raise Refusal(Reason.WRAPPER, type(module).__name__)
    if "forward" in module.__dict__ and not called_by_class(module):
        raise Refusal(Reason.FORWARD_REPLACED)
    if is_parametrized(module):
        raise Refusal(Reason.PARAMETRIZED)


WARN_ABOUT = {
    Reason.WRAPPER: "is wrapped in {}; what is inside was patched, but patch a model before wrapping it",
    Reason.SCRIPTED: "holds scripted modules ({}), which have no Python forward to patch",
    Reason.QUANTIZED: "holds quantised layers ({}), which are left alone",
    Reason.UNINITIALIZED: "holds layers whose parameters are uninitialised ({}): call it once, and patch it then",
    Reason.RECORDING_FAILED: "holds modules ({}) at which fastlayers failed; please report what patch_report says",
    Reason.FORWARD_REPLACED: "holds modules whose forward was replaced on the instance ({}); they are left alone",
}


def plan_warnings(report: PatchReport, steps: list[Step], done: str) -> list[str]:
    messages = [f"the pattern {pattern!r} matched no module of the model" for pattern in report.unmatched]
    for reason, message in WARN_ABOUT.items():
        kinds = dict.fromkeys(type(step.module).__name__ for step in steps if step.row.reason is reason)
        if kinds:
            messages.append(f"the model {message.format(', '.join(kinds))}")
    if not report.patched:
        reasons = Counter(row.reason.name for row in report.refused if row.reason is not None)
        why = "".join(f"; {count} modules refused: {reason}" for reason, count in reasons.items())
        if any(step.cls is not None for step in steps):
            found = (
                f"no rule fuses anything in {report.model}{why}; a GPU may run generated kernels for it all the same"
            )
        else:
            found = f"nothing in {report.model} was {done}{why}. The report says more"
        messages.append(found)
    return messages


def carry_out(plan: Plan, strict: bool, stacklevel: int = 3) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Carry out a plan, and return what :func:`swap` does. A warning points ``stacklevel`` frames up, to the user."""
    problems = [*plan.warnings, *(f"{row.fqn or '(model)'}: {row.outcome()}" for row in plan.report.refused)]
    problems += [f"{row.fqn or '(model)'}: {note}" for row in plan.report.patched for note in row.notes()]
    if strict and problems:
        raise PatchError("strict=True, and nothing was changed, because:\n  " + "\n  ".join(problems))
    for message in plan.warnings:
        warnings.warn(message, PatchWarning, stacklevel=stacklevel)
    return swap(plan)


def swap(plan: Plan) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Give the modules of a plan their classes, and return those that changed, with the classes that they had."""
    changed = []
    try:
        with without_sharding(step.module for step in plan.steps):
            for step in plan.steps:
                if step.cls is not None:
                    changed.append((step.module, type(step.module)))
                    become(step.module, step.cls)
    except BaseException:  # an interrupt, too
        restore(changed)
        raise
    return changed


def stays_patched(module: nn.Module) -> bool:
    """Whether a module is patched, even if a parametrization, say, has changed its class again since."""
    return hasattr(type(module), "__fastlayers_original__")


def restore(changed: Iterable[tuple[nn.Module, type[nn.Module]]]) -> list[nn.Module]:
    """Undo :func:`swap`, and return the modules where that is impossible."""
    changed = list(changed)
    with without_sharding(module for module, _ in changed):
        return [
            module
            for module, before in changed
            if stays_patched(module) and not (is_patched(module) and become(module, before))
        ]


def warn_of_stuck(model: nn.Module, stuck: list[nn.Module], stacklevel: int) -> None:
    """The warning about modules that stay patched."""
    names = [name or "(model)" for name, module in model.named_modules() if module in stuck]
    if names:
        message = (
            f"the class of {', '.join(names)} was changed again after patching (parametrizations?), or a wrapper "
            "was put around its forward; it stays patched"
        )
        warnings.warn(message, PatchWarning, stacklevel=stacklevel + 1)


@contextmanager
def patched(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    strict: bool = False,
) -> Iterator[nn.Module]:
    """``with patched(model): ...`` patches like :func:`patch_model`, and on leaving unpatches what it patched."""
    changed = carry_out(make_plan(model, include, exclude, filter_fn), strict, stacklevel=4)  # contextlib is between
    try:
        yield model
    finally:
        warn_of_stuck(model, restore(changed), stacklevel=3)


@contextmanager
def unpatched(model: nn.Module) -> Iterator[nn.Module]:
    """``with unpatched(model): ...`` gives patched modules their own classes, and on leaving those that they had.

    For a tool that asks for the types of modules or replaces functions of torch, such as one that counts operations,
    explains or quantises. What the tool does to the model stays: modules that it has put in the place of others, hooks,
    parametrizations.

    Args:
        model: any module, patched or not, with graphs or without.

    Warns:
        PatchWarning: a module stays patched, since its class was changed again or its forward wrapped since.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    with without_sharding(model.modules()):
        changed = [(module, type(module)) for module in model.modules() if is_patched(module)]
        stuck = [module for module, _ in changed if not become(module, original_class(module))]
    warn_of_stuck(model, stuck, stacklevel=3)
    try:
        yield model
    finally:
        with without_sharding(module for module, _ in changed):
            for module, cls in changed:
                if type(module) is cls.__fastlayers_original__:  # type: ignore[attr-defined]  # A tool may have given it another one.
                    become(module, cls)
