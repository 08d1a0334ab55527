"""The public functions that patch a model, say what they would do or did, and take it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from fastlayers.patching.measure.runs import arguments
from fastlayers.patching.measure.traffic import bytes_saved
from fastlayers.patching.plan import (
    FilterFn,
    Pattern,
    carry_out,
    left_alone,
    make_plan,
    restore,
    stays_patched,
    swap,
    warn_of_stuck,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.regions.explanation import explained
from fastlayers.patching.regions.rows import region_of, rows_of
from fastlayers.patching.report import PatchReport
from fastlayers.patching.rewrite.classes import become, is_folded, is_patched, without_sharding
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.folded_layers import forget

__all__ = [
    "explain",
    "fold_batch_norm",
    "patch_model",
    "patch_report",
    "plan_fold",
    "plan_patch",
    "unfold_batch_norm",
    "unpatch_model",
]


# -- the public functions ---------------------------------------------------------------------------------------------


def plan_patch(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: Any = None,
    details: bool = False,
) -> PatchReport:
    """Report what :func:`patch_model` would do with the same arguments. Changes nothing.

    Args:
        model, include, exclude, filter_fn: as for :func:`patch_model`.
        example_inputs: where given, what to call the model with, for an estimate of the bytes that each row saves a
            step: a tensor, a sequence of positional or a mapping of keyword arguments. The model runs twice, forward
            only; :mod:`fastlayers.patching.measure.traffic` explains the estimate. A model and inputs on the "meta"
            device need no memory.
        details: print a line for each module; else equal ones share a line.

    Returns:
        A report with a row for every module. Print it, or see :class:`PatchReport`.

    Raises:
        TypeError: as :func:`patch_model`, or ``example_inputs`` has another type.
    """
    plan = make_plan(model, include, exclude, filter_fn)
    report = replace(plan.report, details=details)
    if example_inputs is None:
        return report
    changed = swap(plan)
    try:
        return with_bytes(report, model, example_inputs)
    finally:
        restore(changed)


def with_bytes(report: PatchReport, model: nn.Module, example_inputs: Any) -> PatchReport:
    """A report on a model, which is patched as it says, with the bytes that its rows save."""
    saved = bytes_saved(model, *arguments(example_inputs))
    rows = (replace(row, bytes_saved=saved.get(model.get_submodule(row.fqn))) for row in report.rows)
    return replace(report, rows=tuple(rows))


def patch_model(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    strict: bool = False,
) -> nn.Module:
    """Replace what a model computes by fused layers, in place.

    Layers are swapped (``nn.Softmax`` becomes ``FusedSoftmax``), and the forward of any module is rewritten where it
    computes something that has a fused kernel, such as ``relu(x) + y``, however it is spelled. Only classes change:
    parameters, buffers, hooks, names, devices, ``training`` and optimizers stay as they are, the state dict keeps its
    keys, and :func:`unpatch_model` undoes everything. A module that cannot be rewritten safely stays as it is;
    :func:`patch_report` lists which ones and why.

    Args:
        model: any module. Shared modules are patched once.
        include: patch only these: :mod:`fnmatch` patterns of fully qualified names (``"layer1.*"``), module classes, or
            a list of both. A pattern that matches a module covers everything inside it. The model itself has the empty
            name.
        exclude: leave these alone, in the same terms; wins over ``include``. The fused layer of a parent does not
            absorb an excluded child either.
        filter_fn: called with each module and its name; the module is patched if it returns True. It does not decide
            about the children of the module.
        strict: raise an error, and change nothing, if a selected module is refused, a pattern matches nothing or
            nothing is patched.

    Returns:
        The same model.

    Raises:
        TypeError: the model, a pattern or ``filter_fn`` has the wrong type.
        PatchError: ``strict`` and something was left out.

    Warns:
        PatchWarning: nothing was patched, a pattern matched nothing, or the model is wrapped, scripted or quantised.
    """
    carry_out(make_plan(model, include, exclude, filter_fn), strict)
    return model


def patch_report(model: nn.Module, *, details: bool = False) -> PatchReport:
    """Report the present state of a model: what is patched, why the rest is not, and after the first calls what runs.

    Args:
        model: any module.
        details: print a line for each module; else equal ones share a line.

    Returns:
        A report in which only patched modules have a ``became``. A module that :func:`patch_model` could still patch is
        listed as not selected. Rows of modules whose calls run as regions, or might, say so.
    """
    plan = make_plan(model)
    rows = []
    regions = rows_of(model)
    for step in plan.steps:
        pending = step.row.became is not None and not stays_patched(step.module)
        row = left_alone(step.row, Refusal(Reason.NOT_SELECTED)) if pending else step.row
        region = region_of(step.module)
        if region is not None:
            failed = tuple((Reason.RECORDING_FAILED, error) for error in region.errors)
            row = replace(row, left=(*row.left, *failed), region=regions.get(region))
        rows.append(row)
    return PatchReport(tuple(rows), plan.report.model, details=details)


@contextmanager
def explain(model: nn.Module) -> Iterator[None]:
    """Print what the calls of a patched model in a ``with`` block run, when it ends.

    For each recorded program whose calls ran, or that was recorded, in the block: its class and the place of its
    forward, the signature, the number of calls, an estimate of the kernels launched and bytes moved by each, and the
    program as Python that runs, with the source of its generated kernels. Above the operations of a program that was
    recorded in the block are the lines that they come from, of forwards as :func:`patch_model` rewrote them; here the
    first call of a signature is recorded already. Of classes whose calls run op by op it prints the reasons.

    Nothing is printed if the block raises an error.

    Args:
        model: a patched model.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: nothing in it is patched.

    Example:
        >>> with fastlayers.explain(model):
        ...     model(x).sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    with without_sharding(model.modules()):
        if not any(map(is_patched, model.modules())):
            name = type(model).__name__
            raise ValueError(f"nothing in this {name} is patched: call fastlayers.patch_model(model) before explain")
    with explained(model):
        yield


def unpatch_model(model: nn.Module) -> nn.Module:
    """Give every patched module its own class back; parameters keep their present values.

    This undoes :func:`fold_batch_norm` too.

    Returns:
        The same model. Nothing happens to a model that is not patched.

    Warns:
        PatchWarning: a module stays patched. Its class was changed again after patching, or a wrapper around its
            forward calls the fused forward: undo that first.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        forget(module)
    with without_sharding(model.modules()):
        originals = [(module, original_class(module)) for module in model.modules()]
    warn_of_stuck(model, restore(originals), stacklevel=2)
    return model


# -- folding ----------------------------------------------------------------------------------------------------------


def plan_fold(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
) -> PatchReport:
    """Report what :func:`fold_batch_norm` would do with the same arguments, or has done. Changes nothing.

    Returns:
        A report with a row for every module. For a module whose forward applies a BatchNorm after a convolution, it
        counts them, or gives the reason why they are not folded.

    Raises:
        TypeError: as :func:`patch_model`.
    """
    return make_plan(model, include, exclude, filter_fn, folding=True).report


def fold_batch_norm(
    model: nn.Module,
    *,
    include: Pattern | None = None,
    exclude: Pattern | None = None,
    filter_fn: FilterFn | None = None,
    strict: bool = False,
) -> nn.Module:
    """For inference: compute each BatchNorm that follows a convolution or a linear layer as part of that layer.

    The folded layer includes the sum and the activation that follow (also an activation inside of the norm, as in
    timm's BatchNormAct2d): on a GPU one kernel adds the bias and the residual and applies the activation. Under
    autocast several consecutive folded convolutions, with a gate between them, are one call.

    Only classes change, and only the rounding of the results: parameters, buffers, state-dict keys and the patches of
    :func:`patch_model` stay, and :func:`unfold_batch_norm` undoes it. The folded weights are stored next to the model.
    They take as much memory as the weights of those layers in the dtype that they are used in (under autocast, its
    dtype). They are recomputed when a parameter or a running statistic changes. torch does not count a write such as
    ``p.data.copy_(...)``: unfold and fold again after one. :func:`load_model` and ``load_state_dict`` need no such
    care.

    In training mode, and where the gradient of a folded parameter is needed, the unfolded forward runs: a folded model
    trains as before, and folds its new weights when it is back in eval.

    Args:
        model: in eval mode. BatchNorms that are in training mode are left alone.
        include, exclude, filter_fn: which modules to look at, the blocks or ``nn.Sequential`` that hold the layers, as
            for :func:`patch_model`.
        strict: raise instead of leaving anything out, as for :func:`patch_model`.

    Returns:
        The same model.

    Raises:
        TypeError: the model, a pattern or ``filter_fn`` has the wrong type.
        PatchError: ``strict`` and something was left out.

    Warns:
        PatchWarning: nothing was folded, or as :func:`patch_model`.
    """
    carry_out(make_plan(model, include, exclude, filter_fn, folding=True), strict)
    return model


def unfold_batch_norm(model: nn.Module) -> nn.Module:
    """Undo :func:`fold_batch_norm`; patches stay.

    Returns:
        The same model. Nothing happens to a model that is not folded.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        forget(module)
    folded = filter(is_folded, model.modules())
    stuck = [module for module in folded if not become(module, type(module).__fastlayers_unfolded__)]  # type: ignore[attr-defined]
    warn_of_stuck(model, stuck, stacklevel=2)
    return model
