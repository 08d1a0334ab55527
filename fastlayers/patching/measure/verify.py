"""verify_patch: the patched model against the unpatched one, outputs and gradients."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastlayers.ops.residual import masks_of_torch
from fastlayers.patching.measure.runs import rng_state, seed_everything, standing_in, unwrap
from fastlayers.patching.measure.watch import MODULE_CALL, watching
from fastlayers.patching.plan import unpatched
from fastlayers.patching.reasons import PatchWarning
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.report import Report
from fastlayers.patching.rewrite.classes import working
from fastlayers.patching.runtime.checks import rewritten_everywhere
from fastlayers.patching.runtime.lazy import LATE, LazyTensor
from fastlayers.tables import Table

__all__ = ["Comparison", "Run", "VerifyReport", "compare", "keeping_attributes", "verify_patch"]

#: A difference of this many roundings of the largest value is always within tolerance.
ROUNDINGS = 16.0
#: So is this many times the effect of one rounding of the inputs and weights on the unpatched model.
SENSITIVITY = 8.0
#: And this many times the error of the unpatched model, compared with its result in float64.
OWN_ERROR = 4.0
#: A gradient that is nowhere more than this many roundings of the largest one may be nothing but roundings.
NOISE = 4.0
#: The number of differing tensors in a printed report. Markdown and JSON have all of them.
SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """One tensor of the patched model against the unpatched one.

    Attributes:
        name: ``output``, ``grad of <parameter>``, ``grad of input 0``, ``buffer <name>``.
        error: largest absolute difference.
        tolerance: the largest error that is allowed: 16 roundings of the largest value, or 8 times the change when the
            inputs and weights of the *unpatched* model are perturbed by one rounding, whichever is larger. If that is
            not enough, 4 times the error of the unpatched model, compared with its result in float64.
        problem: a difference of kind (dtype, shape, missing); empty if there is none.
    """

    name: str
    error: float
    tolerance: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport(Report):
    """The result of :func:`verify_patch`. It is true if everything agrees.

    Attributes:
        comparisons: every output, gradient and changed buffer.
        patched: the number of patched modules.
        training: whether the model was in training mode.
        first_difference: name of the first module, in the order of execution, that returns something else for the same
            inputs; the innermost of nested ones. None if there is none.
        first_gradient_difference: if no module returns something else, name of the first module, in the order of the
            backward, that returns other gradients for the same ones. None if there is none.
    """

    comparisons: tuple[Comparison, ...]
    patched: int
    training: bool
    first_difference: str | None = None
    first_gradient_difference: str | None = None

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(comparison for comparison in self.comparisons if not comparison.ok)

    def summary(self) -> str:
        """One line: whether everything agrees, and how much was compared."""
        mode = "training" if self.training else "eval"
        verdict = "equal" if self.ok else f"{len(self.failures)} of {len(self.comparisons)} tensors DIFFER"
        compared = f"{self.patched} modules patched, {len(self.comparisons)} tensors compared, {mode} mode"
        return f"verify: {verdict} ({compared})"

    def _table(self) -> Table:
        """The summary and the worst comparisons, without columns."""
        lines = [self.summary()]
        if all(comparison.ok and comparison.error == 0 for comparison in self.comparisons):
            lines.append("  every value is the same")
        else:
            worst = sorted(self.comparisons, key=lambda c: c.error / c.tolerance if c.tolerance else float(c.error > 0))
            for comparison in self.failures[:SHOWN] or worst[:-4:-1]:
                within = (
                    comparison.problem or f"differs by {comparison.error:.3g}, tolerance {comparison.tolerance:.3g}"
                )
                lines.append(f"  {comparison.name}: {within}")
            if len(self.failures) > SHOWN:
                lines.append(f"  and {len(self.failures) - SHOWN} more")
        if self.first_difference is not None:
            lines.append(f"  the first module that differs: {self.first_difference or '(model)'}")
        if self.first_gradient_difference is not None:
            lines.append(
                f"  the first module that differs in the backward: {self.first_gradient_difference or '(model)'}"
            )
        return Table(title="\n".join(lines), style="green" if self.ok else "red")

    def to_markdown(self) -> str:
        """Every comparison as a row of a Markdown table."""
        rows = [
            (row.name, f"{row.error:.3g}", f"{row.tolerance:.3g}", "equal" if row.ok else row.problem or "differs")
            for row in self.comparisons
        ]
        return Table(("tensor", "error", "tolerance", ""), rows, self.summary()).to_markdown()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data."""
        rows = [{**vars(comparison), "ok": comparison.ok} for comparison in self.comparisons]
        return {"ok": self.ok, **vars(self), "comparisons": rows}


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model, and whether to compute their gradients."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: bool = True


@dataclass
class Run:
    """The results of one forward and backward."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    #: Of an output that is a mapping.
    keys: frozenset[str] = frozenset()

    def values(self) -> dict[str, Any]:
        """All results by their names in a report."""
        several = len(self.outputs) > 1
        outputs = {f"output {i}" if several else "output": value for i, value in enumerate(self.outputs)}
        return {**outputs, **self.gradients, **{f"buffer {name}": value for name, value in self.buffers.items()}}


@rewritten_everywhere()
def verify_patch(model: nn.Module, *inputs: Any, **kwargs: Any) -> VerifyReport:
    """Run a model patched and unpatched on the same inputs and compare outputs, gradients and buffers.

    A patched model is verified as it is, an unpatched one as :func:`patch_model` would leave it. It runs in its
    present training mode and autocast state, with the same random numbers in every run. On a CPU, too, the rewritten
    forwards run, though the model itself runs those of before where no kernel would gain by the others. In training
    with labels, a patched language model may leave the logits out of its output: these are not compared, but their
    loss is. Afterwards parameters, gradients, buffers (with BatchNorm's running statistics), attributes of modules,
    the random state and the patches are as before.

    Args:
        model: any module. A DDP or ``torch.compile`` wrapper is unwrapped first.
        inputs, kwargs: the arguments of the model. Gradients of floating-point tensors among them are compared too, if
            the model can compute them.

    Returns:
        A report that is true if everything agrees. It names the first difference.

    Raises:
        TypeError: ``model`` is not a module.
    """
    model, in_patched = unwrap(model)
    with in_patched:
        return compare_patched(model, Inputs(inputs, kwargs))


def compare_patched(model: nn.Module, inputs: Inputs) -> VerifyReport:
    with rng_state():
        with unpatched(model):
            before, inputs = run_somehow(model, inputs)
        after = run(model, inputs)
        omitted = omitted_outputs(model, after)
        with unpatched(model):
            if omitted:
                before = run(model, inputs, omitted=omitted)
            nudged = run(model, inputs, rounding(model, before), omitted)
        patches = len(working(model))
        comparisons = tuple(compare(before, after, nudged))
        if not all(comparison.ok for comparison in comparisons):
            with unpatched(model):
                exact = run_in_float64(model, inputs, omitted)
            comparisons = tuple(compare(before, after, nudged, exact))
        differences: tuple[str | None, str | None] = None, None
        if not all(comparison.ok for comparison in comparisons):
            differences = first_differences(model, inputs)
    return VerifyReport(comparisons, patches, model.training, *differences)


def run_somehow(model: nn.Module, inputs: Inputs) -> tuple[Run, Inputs]:
    """:func:`run`, without gradients of the inputs if the model cannot compute them. Returns the inputs used too.

    In training, Wav2Vec2 and similar models call ``requires_grad_`` on a view of their input, which fails if the input
    belongs to a graph.
    """
    try:
        return run(model, inputs), inputs
    except RuntimeError as error:
        if "requires_grad" not in str(error):
            raise
    inputs = replace(inputs, wanted=False)
    return run(model, inputs), inputs


def run_in_float64(model: nn.Module, inputs: Inputs, omitted: frozenset[str]) -> Run | None:
    """:func:`run` in float64; None if the model does not support it, or memory is short."""
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    try:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(model, inputs, omitted=omitted, dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return None


def omitted_outputs(model: nn.Module, run: Run) -> frozenset[str]:
    """Outputs that the patched model leaves out, such as the logits of a language model."""
    if not run.keys:
        return frozenset()
    return frozenset[str]().union(*(getattr(type(m), "__fastlayers_omits__", ()) for m in model.modules())) - run.keys


def run(
    model: nn.Module,
    inputs: Inputs,
    nudge: float = 0.0,
    omitted: frozenset[str] = frozenset(),
    dtype: torch.dtype | None = None,
) -> Run:
    """One forward and backward with copies of the parameters, buffers and inputs.

    Args:
        model, inputs: the model and its inputs.
        nudge: perturbs parameters and inputs by this relative amount, which shows how sensitive the model is.
        omitted: names of outputs to ignore.
        dtype: the dtype of all floating-point tensors; their own by default.
    """
    noise = torch.Generator().manual_seed(0)

    def nudged(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.to(tensor.dtype if dtype is None else dtype)
        if not nudge:
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=noise, dtype=torch.int8).to(tensor.device) * 2 - 1
        return tensor * (1 + nudge * sign).to(tensor.dtype)

    def leaf(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return copy.deepcopy(tensor)
        return (
            nudged(tensor.detach().clone())
            .detach()
            .requires_grad_(inputs.wanted and tensor.is_floating_point() and not tensor.is_inference())
        )

    parameters = {
        name: nudged(p.detach()).detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }
    buffers = {
        name: buffer.detach().clone().to(dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype)
        for name, buffer in model.named_buffers()
    }
    args, keywords = tree_map(leaf, (inputs.args, inputs.kwargs))
    given = [value for value in tree_flatten((args, keywords))[0] if isinstance(value, Tensor)]  # It may change lists.
    seed_everything()
    with torch.enable_grad(), masks_of_torch():
        with keeping_attributes(model), standing_in(model, {**parameters, **buffers}):
            result = model(*args, **keywords)
        keys = frozenset(result) if isinstance(result, Mapping) else frozenset()
        if omitted & keys:
            result = {key: value for key, value in result.items() if key not in omitted}
        outputs, _ = tree_flatten(result)
        with warnings.catch_warnings():  # Nobody asked for these.
            warnings.filterwarnings("ignore", LATE, PatchWarning)
            outputs = [output.computed() if isinstance(output, LazyTensor) else output for output in outputs]
        wanted = {f"grad of {name}": p for name, p in parameters.items() if p.requires_grad}
        wanted |= {f"grad of input {i}": value for i, value in enumerate(given) if value.requires_grad}
        gradients = backward(outputs, wanted)
    kept = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    return Run(kept, gradients, buffers, keys)


@contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Restores attributes that a forward sets on its modules for the next call, as LeViT's attention does."""
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    values = {id(value): value for _, attributes in before for value in attributes.values()}
    containers = [(value, copy.copy(value)) for value in values.values() if type(value) in (dict, list, set)]
    try:
        yield
    finally:
        for attributes, attributes_before in before:
            attributes.clear()
            attributes.update(attributes_before)
        for container, content in containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


def backward(outputs: list[Any], wanted: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients for a random gradient of every output. With a constant one, errors could cancel."""
    noise = torch.Generator().manual_seed(1)
    differentiable = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    seeds = [torch.randn(o.shape, generator=noise).to(o.device, o.dtype) for o in differentiable]
    if not differentiable or not wanted:
        return {}
    found = torch.autograd.grad(differentiable, list(wanted.values()), seeds, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def rounding(model: nn.Module, run: Run) -> float:
    """Half an ulp of the coarsest dtype that takes part."""
    tensors = [*model.parameters(), *(output for output in run.outputs if isinstance(output, Tensor))]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps) / 2


def compare(before: Run, after: Run, nudged: Run, exact: Run | None = None) -> Iterator[Comparison]:
    if len(before.outputs) != len(after.outputs):
        yield Comparison("output", 0.0, 0.0, f"has {len(after.outputs)} leaves instead of {len(before.outputs)}")
        return
    actual, moved, right = (run.values() if run is not None else {} for run in (after, nudged, exact))
    known = [largest(gradient.to_dense()) for gradient in before.gradients.values() if gradient is not None]
    steepest = max(filter(math.isfinite, known), default=0.0)
    for name, value in before.values().items():
        noise = steepest if name in before.gradients else 0.0
        yield compare_values(name, value, actual.get(name), moved.get(name), right.get(name), noise)


def compare_values(
    name: str, expected: Any, actual: Any, nudged: Any, exact: Any = None, noise: float = 0.0
) -> Comparison:
    """Compare two values.

    Args:
        name: what they are.
        expected, actual: those of the unpatched and of the patched model.
        nudged: that of the unpatched model with slightly other parameters.
        exact: that in float64, if it is known.
        noise: of a gradient, the largest value of any: where all of it is no more than a few roundings of that, as
            that of a bias before a norm or a softmax, which is 0, it may differ by one.
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        alike = isinstance(expected, Tensor) or not compares(expected)
        same = type(expected) is type(actual) and (alike or expected == actual)
        return Comparison(name, 0.0, 0.0, "" if same else f"is {describe(actual)} instead of {describe(expected)}")
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return Comparison(name, 0.0, 0.0, f"is {describe(actual)} instead of {describe(expected)}")
    if expected.numel() == 0:
        return Comparison(name, 0.0, 0.0)
    expected, actual, nudged, exact = (  # Some are sparse.
        value.to_dense() if isinstance(value, Tensor) else value for value in (expected, actual, nudged, exact)
    )
    whole = not expected.is_floating_point() and not expected.is_complex()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if not isinstance(nudged, Tensor) or nudged.shape != expected.shape:  # as where a model predicts a length
        nudged = expected
    a, b, c = (value.detach().to("cpu", wide) for value in (expected, actual, nudged))
    finite = a.isfinite()
    if not torch.equal(
        torch.where(finite, 0.0, a.nan_to_num(7.0)).real, torch.where(finite, 0.0, b.nan_to_num(7.0)).real
    ):
        return Comparison(name, float("inf"), 0.0, "has NaN or infinity at other places")
    error = largest((a - b)[finite])
    if whole:
        return Comparison(name, error, 0.0)
    magnitude, moved = largest(a[finite]), largest((a - c)[finite & c.isfinite()])
    eps = torch.finfo(expected.dtype).eps
    tolerance = max(ROUNDINGS * eps * magnitude, SENSITIVITY * moved)
    if magnitude <= NOISE * eps * noise:
        tolerance = max(tolerance, eps * noise)
    if isinstance(exact, Tensor) and exact.shape == expected.shape:
        own = largest((a - exact.detach().to("cpu", wide))[finite])
        if own <= eps**0.5 * magnitude:  # else it computed something else, dropped other elements perhaps
            tolerance = max(tolerance, OWN_ERROR * own)
    return Comparison(name, error, tolerance)


def compares(value: Any) -> bool:
    """Whether an object says itself what it is equal to; a cache that a model returns, say, equals only itself."""
    return any("__eq__" in cls.__dict__ for cls in type(value).__mro__[:-1])


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    return repr(value)


# -- where two runs part ----------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of a module: what went in, what came out, and their gradients."""

    inputs: list[Any]
    outputs: list[Any]
    #: By ("input" or "output", position).
    gradients: dict[tuple[str, int], Tensor]


#: The calls of modules in one run by (name, number of earlier calls), in the order in which they began, and the keys in
#: the order in which they ended: the children of a module come before it.
Calls: TypeAlias = tuple[dict[tuple[str, int], Call], list[tuple[str, int]]]


def first_differences(model: nn.Module, inputs: Inputs) -> tuple[str | None, str | None]:
    """The modules where the forward and the backward of the patched model first differ from the unpatched one.

    In the forward this is the innermost module that returns something else for the same inputs, in the backward the
    module that returns other gradients for the same ones. A module that a patched one has absorbed is not called in
    both runs, and counts as part of it.
    """
    with no_regions():  # They do not call what they consist of.
        (after, ended), gradients = calls_of(model, inputs)
    with unpatched(model):
        (before, _), expected = calls_of(model, inputs)
        (nudged, _), moved = calls_of(model, inputs, rounding(model, Run([], {}, {})))
    common = [key for key in ended if key in before and key in nudged]

    def agree(key: tuple[str, int], part: Callable[[Call], list[Any]]) -> bool:
        values = (part(calls[key]) for calls in (before, after, nudged))
        return all(compare_values("", *triple).ok for triple in zip(*values, strict=False))

    def parameters_agree(name: str) -> bool:
        return all(
            compare_values("", gradient, gradients.get(parameter), moved.get(parameter)).ok
            for parameter, gradient in expected.items()
            if f"{parameter}.".startswith(f"{name}.") or not name
        )

    for key in common:
        if agree(key, lambda call: call.inputs) and not agree(key, lambda call: call.outputs):
            return key[0], None
    for key in reversed([key for key in after if key in before and key in nudged]):
        given = agree(key, lambda call: gradients_of(call, "output", call.outputs))
        if given and not (
            agree(key, lambda call: gradients_of(call, "input", call.inputs)) and parameters_agree(key[0])
        ):
            return None, key[0]
    return None, None


def gradients_of(call: Call, kind: str, values: list[Any]) -> list[Tensor | None]:
    return [call.gradients.get((kind, i)) for i in range(len(values))]


def calls_of(model: nn.Module, inputs: Inputs, nudge: float = 0.0) -> tuple[Calls, dict[str, Tensor | None]]:
    """All calls of modules in a run, and the gradients of the parameters by name."""
    names = {module: name for name, module in model.named_modules()}
    count: Counter[str] = Counter()
    calls: dict[tuple[str, int], Call] = {}
    open_calls: dict[FrameType, tuple[str, int]] = {}
    ended: list[tuple[str, int]] = []

    def keep(call: Call, kind: str, value: Any) -> list[Any]:
        leaves = tree_flatten(value)[0]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(call.gradients.__setitem__, (kind, i)))
        return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def entered(frame: FrameType) -> None:
        scope = frame.f_locals
        if scope["self"] in names:
            name = names[scope["self"]]
            key = open_calls[frame] = name, count[name]
            count[name] += 1
            calls[key] = Call([], [], {})
            calls[key].inputs = keep(calls[key], "input", (scope["args"], scope["kwargs"]))

    def left(frame: FrameType, result: Any) -> None:
        if frame in open_calls:
            key = open_calls.pop(frame)
            ended.append(key)
            calls[key].outputs = keep(calls[key], "output", result)

    with watching({MODULE_CALL}, entered, left):
        result = run(model, inputs, nudge)
    return (calls, ended), {name.removeprefix("grad of "): value for name, value in result.gradients.items()}
