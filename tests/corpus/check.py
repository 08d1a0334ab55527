"""What must hold for a model, whichever it is: patched it computes the same, and everything about it survives."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten

from fastlayers.patching import PatchReport, PatchWarning, Reason, patch_model, plan_patch, unpatch_model, verify_patch
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.report import QUIET
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.corpus.models import LISTS, PACKAGES, Sample
from tests.corpus.sites import Sites, fusable

__all__ = ["Entry", "check"]


@dataclass
class Entry:
    """A line of the table.

    Attributes:
        modules, patched: their numbers.
        fused: the number of fused places by rule.
        sites: the fusable sites of the model by kind, and those that are left when it is patched: in regions, where
            kernels are generated for them on a GPU, and elsewhere.
        left: places that look fusable to a rule and are left alone, by reason.
        unread: forwards that cannot be recorded, by reason.
        stated: all reasons, with the class and what they refer to.
        problems: what is wrong.
    """

    name: str
    modules: int = 0
    patched: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    in_regions: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def library(self) -> str:
        """Where it is in the table: under its library, or among the other packages."""
        library = self.name.partition(":")[0]
        return library if library in LISTS else PACKAGES

    def line(self) -> str:
        """All of it but long messages."""
        found = f"{self.name}: {self.patched} of {self.modules} modules, fused {self.fused}, left {dict(self.left)}"
        sites = f"sites {self.sites}, in regions {self.in_regions}, elsewhere {self.elsewhere}"
        return "\n  ".join([f"{found}, not read {dict(self.unread)}", sites, *self.problems])


def check(name: str, sample: Sample) -> Entry:
    """Patch a model, compare it with itself, take it back, and say what was found and what is wrong."""
    least = dict.fromkeys(regions.LEAST, min(regions.LEAST.values()))  # As if their C++ part had been built.
    with mock.patch.object(regions, "LEAST", least):
        return checked(name, sample)


def checked(name: str, sample: Sample) -> Entry:
    model, args, kwargs = sample.model, sample.args, sample.kwargs
    entry = Entry(name)
    before = run(model, args, kwargs)  # which may change classes by itself, as BigBird does for short inputs
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    if not all(value.isfinite().all() for value in before if value.is_floating_point()):
        entry.problems.append("the unpatched model gives infinities or NaN, which compare with anything")

    with Sites() as stock:
        run(model, args, kwargs)
    entry.sites = fusable(stock.found)
    pickles = can_pickle(model)
    plan = plan_patch(model)
    entry.modules, entry.patched = len(plan), len(plan.patched)
    entry.fused = dict(sorted(plan.counts().items()))
    entry.left, entry.unread, entry.stated = reasons(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if plan.patched else "ignore", PatchWarning)
        for what in ("whose forward was replaced on the instance", "is wrapped in", "holds quantised layers"):
            warnings.filterwarnings("ignore", message=f".*{what}")  # timm's FasterNet, peft, pytorchvideo
        patch_model(model)
    expect(entry, list(model.state_dict()) == keys, "state-dict keys changed")
    with mock.patch.object(demand, "CALLS", 1):  # Each call is of a copy.
        for training in (True, False, True, False):  # the second time regions run, which the first one recorded
            report = verify_patch(model.train(training), *args, **kwargs)
            expect(entry, bool(report), str(report))

    with Sites(regions_of(model, args, kwargs)) as rewritten, rewritten_everywhere():
        run(model, args, kwargs)
    entry.in_regions, entry.elsewhere = (fusable(rewritten.found, in_region) for in_region in (True, False))
    classes = [type(module) for module in model.modules()]
    patched = run(model, args, kwargs)
    copied = copy.deepcopy(model)
    expect(entry, [type(module) for module in copied.modules()] == classes, "deepcopy lost a class")
    expect(entry, equal(run(copied, args, kwargs), patched), "a deepcopy computes something else")
    del copied
    if pickles:
        loaded = pickle.loads(pickle.dumps(model))
        expect(entry, [type(module) for module in loaded.modules()] == types, "pickle did not restore the classes")
        expect(entry, equal(run(loaded, args, kwargs), before), "unpickled, it computes something else")
        del loaded
    unpatch_model(model)
    expect(entry, [type(module) for module in model.modules()] == types, "unpatching did not restore the classes")
    expect(entry, equal(run(model, args, kwargs), before), "unpatched again, it computes something else")
    return entry


def expect(entry: Entry, truth: bool, problem: str) -> None:
    if not truth:
        entry.problems.append(problem)


def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a model returns in eval, which is the mode that it is left in."""
    torch.manual_seed(1)
    with torch.no_grad():
        values = tree_flatten(model.eval()(*copy.deepcopy(args), **copy.deepcopy(kwargs)))[0]
    return [value for value in values if isinstance(value, torch.Tensor)]


def regions_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Any]:
    """The modules whose forwards run as regions in a third call, which is as any later one."""
    found = set()
    regions.forget_all()
    for _ in range(demand.CALLS):
        run(model, args, kwargs)
    call, code, called = regions.Region.__call__, regions.Region.run, []

    def watched_call(region: Any, module: Any, *rest: Any) -> Any:
        called.append(module)
        try:
            return call(region, module, *rest)
        finally:
            called.pop()

    def watched(region: Any, *rest: Any) -> Any:
        found.add(called[-1])
        return code(region, *rest)

    with (
        mock.patch.object(regions.Region, "__call__", watched_call),
        mock.patch.object(regions.Region, "run", watched),
    ):
        run(model, args, kwargs)
    return found


def can_pickle(model: Any) -> bool:
    """Parametrized models cannot, nor those on which a library has put hooks of its own, patched or not."""
    try:
        pickle.dumps(model)
    except (RuntimeError, AttributeError, pickle.PicklingError):
        return False
    return True


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


#: The first of the reasons that are about a place in a forward, in the order of :class:`Reason`.
PLACES = list(Reason)[list(Reason).index(Reason.UNKNOWN_LOSS) :]


def reasons(plan: PatchReport) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Places that were left alone though they looked fusable, and forwards that cannot be recorded, by reason.

    And all of them, by class, reason and what it refers to.
    """
    left, unread, stated = Counter[str](), Counter[str](), Counter[str]()
    for row in plan:
        for reason, detail in ((row.reason, row.detail), *row.left):
            if reason is not None and reason not in QUIET:
                (left if reason in PLACES or reason is Reason.UNKNOWN_NORM else unread)[reason.name] += 1
                stated[f"{row.was}: {reason.value}{f' ({detail})' if detail else ''}"] += 1
    return left, unread, stated
