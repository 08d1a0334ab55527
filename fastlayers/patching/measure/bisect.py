"""bisect_patch: the pass, the operation and the line of source behind a difference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastlayers.patching.measure.runs import buffers_aside, rng_state, seed_everything, unwrap
from fastlayers.patching.measure.verify import Run, compare, keeping_attributes
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import Operation, Program, plain_name
from fastlayers.patching.regions.explanation import recorded_at_once
from fastlayers.patching.report import Report
from fastlayers.patching.runtime.checks import rewritten_everywhere
from fastlayers.tables import Table

__all__ = ["BisectReport", "Fault", "bisect_patch", "fault_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """What makes a program give something else.

    Attributes:
        rewrite: the name of the pass.
        operation: the operation that it must not have changed; empty if the pass raised an error.
        source: the line of the user's code that the operation comes from.
        problem: how the results differ.
    """

    rewrite: str
    operation: str
    source: str
    problem: str


@dataclass(frozen=True)
class BisectReport(Report):
    """The result of :func:`bisect_patch`. It is true if no pass changes what a program computes.

    Attributes:
        programs: how many programs the passes rewrote.
        faults: those that give something else then.
    """

    programs: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def summary(self) -> str:
        """One line: how many programs were rewritten, and whether they give the same."""
        if not self.programs:
            return "bisect: no call was recorded for which kernels are generated; these need a GPU and Triton"
        wrong = f"{len(self.faults)} of them give something else" if self.faults else "all give the same"
        return f"bisect: {self.programs} programs were rewritten, {wrong}"

    def _table(self) -> Table:
        rows = [(f.rewrite, f.operation, f.source, f.problem) for f in self.faults]
        title = self.summary()
        return Table(
            ("pass", "operation", "source", "problem") if rows else (), rows, title, style="red" if rows else "green"
        )

    def to_markdown(self) -> str:
        """Every fault as a row of a Markdown table."""
        return self._table().to_markdown()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data."""
        return {"ok": self.ok, "programs": self.programs, "faults": [vars(fault) for fault in self.faults]}


@rewritten_everywhere()
def bisect_patch(model: nn.Module, *inputs: Any, **kwargs: Any) -> BisectReport:
    """Find what makes the recorded programs of a model give something else than torch's operations.

    The model runs patched, and its calls are recorded. Each program runs then as it was recorded and as the passes
    leave it, on the same values. Where results or gradients differ, a search over the passes finds the first one after
    which they do, and a search over the operations that it may change the first one with which they do.

    Args:
        model: any module, as :func:`verify_patch` takes it.
        inputs, kwargs: the arguments of the model.
    """
    if find_spec("triton") is None:  # Nothing is rewritten, and the passes cannot be loaded.
        return BisectReport(0, ())
    from fastlayers.patching.fusion.passes import watched

    model, in_patched = unwrap(model)
    faults: list[Fault | None] = []
    args, keywords = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (inputs, kwargs))
    seen = watched(lambda program: faults.append(fault_of(program)))
    with rng_state(), in_patched, recorded_at_once(model), keeping_attributes(model), buffers_aside(model), seen:
        model(*args, **keywords)
    return BisectReport(len(faults), tuple(fault for fault in faults if fault is not None))


def fault_of(program: Program) -> Fault | None:
    """What the passes make wrong of a program, whose values are those of its recording; None for nothing."""
    from fastlayers.patching.fusion.passes import enabled, prepared

    stages = [prepared(program)]
    compared = Comparing(program)
    for each in enabled():
        try:
            stages.append(each.run(apart(stages[-1])))
        except Exception as error:
            return Fault(each.name, "", "", f"{type(error).__name__}: {error}")
    problem = compared.problem(stages[-1])
    if not problem:
        return None
    wrong = first_wrong(len(stages) - 1, lambda count: bool(compared.problem(stages[count])))
    before, culprit = stages[wrong - 1], enabled()[wrong - 1]

    def differs(count: int) -> bool:
        try:
            found = culprit.run(held(apart(before), count))
        except Exception as error:  # It does not expect what is between the two.
            logger.debug("%s fails on the first %d operations: %s", culprit.name, count, error)
            return False
        return bool(compared.problem(released(found)))

    free = [operation for operation in before.operations if not operation.view]
    operation = free[first_wrong(len(free), differs) - 1]
    makes = ", ".join(name for name in operation.makes if name)
    text = f"{makes} = {plain_name(operation.function)}({', '.join(operation.operands)})"
    return Fault(culprit.name, text, source_of(operation, program), problem)


def apart(program: Program) -> Program:
    """The program with values of its own, which a pass may change."""
    return replace(program, values=dict(program.values))


def first_wrong(count: int, is_wrong: Callable[[int], bool]) -> int:
    """The smallest number that is wrong, of which 0 is right and ``count`` wrong."""
    right, wrong = 0, count
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
    return wrong


def source_of(operation: Operation, recorded: Program) -> str:
    """The line that an operation comes from; of one that a pass made, that of what it stands for."""
    known = {name: each.source for each in recorded.operations for name in each.makes if each.source}
    names = (name for name in (*operation.makes, *operation.operands) if name in known)
    return operation.source or known.get(next(names, ""), "")


# -- operations that no pass may change --------------------------------------------------------------------------------


class Held:
    """A function that no pass knows."""

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, plain_name(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def held(program: Program, count: int) -> Program:
    """The program, of whose operations that are no views all but the first ones are held."""
    seen, found = 0, list[Operation]()
    for operation in program.operations:
        seen += not operation.view
        is_free = operation.view or seen <= count
        found.append(operation if is_free else replace(operation, function=Held(operation.function)))
    return program.with_operations(found)


def released(program: Program) -> Program:
    return program.with_operations(
        replace(o, function=o.function.function) if isinstance(o.function, Held) else o for o in program.operations
    )


# -- results -----------------------------------------------------------------------------------------------------------


class Comparing:
    """The results and gradients of a program, to compare those of others with. Differences are measured as
    :func:`~fastlayers.patching.measure.verify.verify_patch` does, by what one rounding of the inputs changes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = [program.values[name] for name in program.inputs]
        self.grads = [program.values[name] for name in program.grads]
        dtypes = {t.dtype for t in program.values.values() if t.is_floating_point()}
        rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) / 2
        self.expected, self.nudged = self.results(program), self.results(program, rounding)

    def results(self, program: Program, nudge: float = 0.0) -> Run:
        noise = torch.Generator().manual_seed(0)

        def copied(t: Tensor) -> Tensor:
            copy = t.detach().clone(memory_format=torch.preserve_format)
            if not nudge or not t.is_floating_point():
                return copy
            sign = torch.randint(0, 2, t.shape, generator=noise, dtype=torch.int8).to(t.device) * 2 - 1
            return copy.mul_((1 + nudge * sign).to(t.dtype))

        code = PythonExecutor(program, Facts())
        inputs = [copied(t) for t in self.inputs]
        with rng_state(), torch.no_grad(), excluding(KEYS):
            seed_everything()
            results, kept = code.forward(*inputs)
            gradients: Sequence[Tensor | None] = ()
            if program.grads:
                gradients = code.backward([copied(t) for t in self.grads], list(kept))
        updated = {str(i): t for i, t in enumerate(inputs)}  # Running statistics are among these.
        return Run(list(results), {f"gradient {i}": t for i, t in enumerate(gradients)}, updated)

    def problem(self, program: Program) -> str:
        """How the results of another program differ; empty if they do not."""
        for each in compare(self.expected, self.results(program), self.nudged):
            if not each.ok:
                within = f"differs by {each.error:.3g}, tolerance {each.tolerance:.3g}"
                return f"{each.name}: {each.problem or within}"
        return ""
