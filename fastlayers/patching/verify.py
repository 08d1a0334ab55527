"""verify_patch: the patched model against the unpatched one, outputs and gradients."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastlayers.ops.residual import masks_of_torch
from fastlayers.patching.api import patched, unpatch_model
from fastlayers.patching.graph import original_class
from fastlayers.patching.rewrite import is_patched

__all__ = ["Comparison", "VerifyReport", "verify_patch"]

#: A difference of this many roundings is within tolerance whatever the model does with them.
ROUNDINGS = 16.0
#: And of this many times what one rounding of the inputs and weights does to the unpatched model.
SENSITIVITY = 8.0


@dataclass(frozen=True)
class Comparison:
    """One tensor of the patched model against the unpatched one.

    Attributes:
        name: ``output``, ``grad of <parameter>``, ``grad of input 0``, ``buffer <name>``.
        error: largest absolute difference.
        tolerance: what is allowed: the larger of 16 roundings of its largest value, and 8 times what it changes by
            when inputs and weights of the *unpatched* model are perturbed by one rounding.
        problem: a difference of kind (dtype, shape, missing); empty where there is none.
    """

    name: str
    error: float
    tolerance: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify_patch` found. True where everything agrees.

    Attributes:
        comparisons: every output, gradient and changed buffer.
        patched: how many modules differ between the two models.
        training: the mode that the model was in.
        first_difference: name of the first patched module, in the order of execution, whose output differs; None if
            none does.
    """

    comparisons: tuple[Comparison, ...]
    patched: int
    training: bool
    first_difference: str | None = None

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(comparison for comparison in self.comparisons if not comparison.ok)

    def __str__(self) -> str:
        mode = "training" if self.training else "eval"
        verdict = "equal" if self.ok else f"{len(self.failures)} of {len(self.comparisons)} tensors DIFFER"
        lines = [
            f"verify: {verdict} ({self.patched} modules patched, {len(self.comparisons)} tensors compared, {mode} mode)"
        ]
        if all(comparison.ok and comparison.error == 0 for comparison in self.comparisons):
            lines.append("  every value is the same")
        else:
            worst = sorted(self.comparisons, key=lambda c: c.error / c.tolerance if c.tolerance else float(c.error > 0))
            for comparison in self.failures or worst[:-4:-1]:
                within = (
                    comparison.problem or f"differs by {comparison.error:.3g}, tolerance {comparison.tolerance:.3g}"
                )
                lines.append(f"  {comparison.name}: {within}")
        if self.first_difference is not None:
            lines.append(f"  the first module that differs: {self.first_difference or '(model)'}")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(str(self), style="green" if self.ok else "red")

    def to_markdown(self) -> str:
        """Every comparison as a row of a Markdown table."""
        lines = [str(self).partition("\n")[0], "", "| tensor | error | tolerance | |", "|---|---|---|---|"]
        for row in self.comparisons:
            verdict = "equal" if row.ok else row.problem or "differs"
            lines.append(f"| {row.name} | {row.error:.3g} | {row.tolerance:.3g} | {verdict} |")
        return "\n".join(lines) + "\n"

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data."""
        rows = [{**vars(comparison), "ok": comparison.ok} for comparison in self.comparisons]
        return {
            "ok": self.ok,
            "training": self.training,
            "patched": self.patched,
            "first_difference": self.first_difference,
            "comparisons": rows,
        }


@dataclass
class Run:
    """Everything that one forward and backward gave."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def verify_patch(model: nn.Module, *inputs: Any, **kwargs: Any) -> VerifyReport:
    """Run a model patched and unpatched on the same inputs and compare outputs, gradients and buffers.

    A patched model is verified as it is, an unpatched one as :func:`patch_model` would leave it. It runs in its present
    training mode and autocast state, with the same random numbers in every run. Parameters, gradients, buffers
    (BatchNorm's running statistics among them), the random state and the patches are afterwards what they were.

    Args:
        model: any module; DDP and ``torch.compile`` wrappers are looked through.
        inputs, kwargs: what to call it with. Floating-point tensors among them get gradients too.

    Returns:
        A report that is true where all agree, and that says where they first differ.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    model = unwrap(model)
    if any(is_patched(module) for module in model.modules()):
        return compare_patched(model, inputs, kwargs)
    with patched(model):
        return compare_patched(model, inputs, kwargs)


def unwrap(model: nn.Module) -> nn.Module:
    while True:
        inner = model._modules.get("_orig_mod") or (
            model._modules.get("module") if type(model).__module__.startswith("torch.nn.parallel") else None
        )
        if inner is None:
            return model
        model = inner


def compare_patched(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> VerifyReport:
    with rng_state():
        after = run(model, inputs, kwargs, 0.0)
        classes = {name: type(module) for name, module in model.named_modules() if is_patched(module)}
        with unpatched(model):
            before = run(model, inputs, kwargs, 0.0)
            nudged = run(model, inputs, kwargs, rounding(model, before))
        comparisons = tuple(compare(before, after, nudged))
        first = None
        if not all(comparison.ok for comparison in comparisons):
            first = first_difference(model, tuple(classes), inputs, kwargs)
    return VerifyReport(comparisons, len(classes), model.training, first)


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    classes = [(module, type(module)) for module in model.modules() if is_patched(module)]
    unpatch_model(model)
    try:
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls


@contextmanager
def rng_state() -> Iterator[None]:
    """Gives every run the same random numbers, and the caller back its own state."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        yield


def run(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], nudge: float) -> Run:
    """One forward and backward over stand-ins of parameters, buffers and inputs; the model's own are only read.

    ``nudge`` perturbs parameters and inputs by that relative amount, to see how much the model makes of it.
    """
    noise = torch.Generator().manual_seed(0)

    def nudged(tensor: Tensor) -> Tensor:
        if not nudge or not tensor.is_floating_point():
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=noise, dtype=torch.int8).to(tensor.device) * 2 - 1
        return tensor * (1 + nudge * sign).to(tensor.dtype)

    def leaf(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return copy.deepcopy(tensor)
        return (
            nudged(tensor.detach().clone())
            .detach()
            .requires_grad_(tensor.is_floating_point() and not tensor.is_inference())
        )

    parameters = {
        name: nudged(p.detach()).detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    args, keywords = tree_map(leaf, (inputs, kwargs))
    torch.manual_seed(0)
    with torch.enable_grad(), masks_of_torch():
        with standing_in(model, {**parameters, **buffers}):
            result = model(*args, **keywords)
        outputs, _ = tree_flatten(result)
        wanted = {f"grad of {name}": p for name, p in parameters.items() if p.requires_grad}
        leaves = [value for value in tree_flatten((args, keywords))[0] if isinstance(value, Tensor)]
        wanted |= {f"grad of input {i}": value for i, value in enumerate(leaves) if value.requires_grad}
        gradients = backward(outputs, wanted)
    kept = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    return Run(kept, gradients, buffers)


@contextmanager
def standing_in(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Other parameters and buffers, under every name that each has.

    torch.func.functional_call puts those of a module that is used in several places in twice, and leaves them in.
    """
    stand_ins = {
        id(own): tensors[name] for found in (model.named_parameters(), model.named_buffers()) for name, own in found
    }
    registries = [registry for module in model.modules() for registry in (module._parameters, module._buffers)]
    before = [(registry, dict(registry)) for registry in registries]
    try:
        for registry, tensors_before in before:
            registry.update({name: stand_ins.get(id(own), own) for name, own in tensors_before.items()})  # type: ignore[misc]
        yield
    finally:
        for registry, tensors_before in before:
            registry.update(tensors_before)  # type: ignore[arg-type]


def backward(outputs: list[Any], wanted: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients for a random, not a constant, gradient of every output: a constant one hides what cancels."""
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


def compare(before: Run, after: Run, nudged: Run) -> Iterator[Comparison]:
    if len(before.outputs) != len(after.outputs):
        yield Comparison("output", 0.0, 0.0, f"has {len(after.outputs)} leaves instead of {len(before.outputs)}")
        return
    for i, (a, b, c) in enumerate(zip(before.outputs, after.outputs, nudged.outputs, strict=True)):
        yield compare_values(f"output {i}" if len(before.outputs) > 1 else "output", a, b, c)
    for kind, label in ((lambda run: run.gradients, ""), (lambda run: run.buffers, "buffer ")):
        yield from compare_dicts(kind, label, before, after, nudged)


def compare_dicts(kind: Callable[[Run], Any], label: str, before: Run, after: Run, nudged: Run) -> Iterator[Comparison]:
    for name, value in kind(before).items():
        yield compare_values(f"{label}{name}", value, kind(after).get(name), kind(nudged).get(name))


def compare_values(name: str, expected: Any, actual: Any, nudged: Any) -> Comparison:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        alike = isinstance(expected, Tensor) or not compares(expected)
        same = type(expected) is type(actual) and (alike or expected == actual)
        return Comparison(name, 0.0, 0.0, "" if same else f"is {describe(actual)} instead of {describe(expected)}")
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return Comparison(name, 0.0, 0.0, f"is {describe(actual)} instead of {describe(expected)}")
    if expected.numel() == 0:
        return Comparison(name, 0.0, 0.0)
    exact = not expected.is_floating_point() and not expected.is_complex()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b, c = (value.detach().to("cpu", wide) for value in (expected, actual, nudged))
    finite = a.isfinite()
    if not torch.equal(
        torch.where(finite, 0.0, a.nan_to_num(7.0)).real, torch.where(finite, 0.0, b.nan_to_num(7.0)).real
    ):
        return Comparison(name, float("inf"), 0.0, "has NaN or infinity at other places")
    error = largest((a - b)[finite])
    if exact:
        return Comparison(name, error, 0.0)
    magnitude, moved = largest(a[finite]), largest((a - c)[finite & c.isfinite()])
    return Comparison(name, error, max(ROUNDINGS * torch.finfo(expected.dtype).eps * magnitude, SENSITIVITY * moved))


def compares(value: Any) -> bool:
    """Whether an object says itself what it is equal to; a cache that a model returns, say, equals only itself."""
    return any("__eq__" in cls.__dict__ for cls in type(value).__mro__[:-1])


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    return repr(value)


def first_difference(
    model: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The first of the patched modules whose output differs, by running both models with hooks on these modules only.

    A hook on any other module could be one that makes a patched parent fall back to its original forward.
    """
    with_patch = outputs_of(model, names, inputs, kwargs)
    with unpatched(model):
        without = outputs_of(model, names, inputs, kwargs)
        scale = rounding(model, Run([], {}, {}))
        moved = outputs_of(model, names, inputs, kwargs, scale)
    for (name, expected), (_, actual), (_, nudged) in zip(without, with_patch, moved, strict=False):
        if not all(compare_values(name, *values).ok for values in zip(expected, actual, nudged, strict=False)):
            return name
    return None


def outputs_of(
    model: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], kwargs: dict[str, Any], nudge: float = 0.0
) -> list[tuple[str, list[Any]]]:
    seen: list[tuple[str, list[Any]]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = tree_flatten(output)[0]
            seen.append((name, [value.detach().clone() if isinstance(value, Tensor) else value for value in values]))

        return hook

    layers = [name for name in names if not is_layer(model.get_submodule(name))]
    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in layers or names]
    try:
        run(model, inputs, kwargs, nudge)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def is_layer(module: nn.Module) -> bool:
    """Whether a patched module is a swapped layer, which a parent may have absorbed."""
    return original_class(module).__module__.startswith("torch.nn.modules")
